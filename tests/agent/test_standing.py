"""Which workers are found to stand still, as their memory files say, and what an agent tells of them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from elasticd_agent import stacks
from elasticd_agent.pulses import BEAT
from elasticd_agent.standing import Halt, Standing

from elasticd import messages, packets
from elasticd.machines.agent_state import LinkDown, LinkUp, Stood
from elasticd.offspring import ending_with_us
from elasticd.runtime.where import Shared
from elasticd.whereabouts import (
    BACKWARD,
    BETWEEN,
    FORWARD,
    IDLE,
    LOADER,
    LOSS,
    NAMES,
    OPTIMIZER,
    OTHER,
    SAVING,
    SCRIPT,
    STACK,
    VOTE,
    Halted,
    Whereabouts,
    read,
)
from tests.machines.agent_scene import hello, run, told


class Rank:
    """A worker's memory, and the agent's view of it, a beat at a time."""

    def __init__(self) -> None:
        self.where, self.standing, self.now = Shared(), Standing(), 100.0
        assert self.standing.hear("w", Whereabouts(signal=64), os.dup(self.where.fd)) == ""

    def step(self, seconds: float) -> None:
        self.where.begin(5, 1)
        self.where.at(FORWARD)
        self.where.end(seconds)

    def beats(self, seconds: float, beat: float = BEAT) -> tuple[list[Halt], list[str]]:
        """What was found in so many seconds."""
        halted, moving = list[Halt](), list[str]()
        for _ in range(round(seconds / beat)):
            self.now += beat
            more, again = self.standing.beat(("w",), self.now)
            halted += more
            moving += again
        return halted, moving


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.standing.close()


def usual(rank: Rank, seconds: float = 1.0) -> None:
    """Two steps: the first of a plan tells nothing."""
    rank.step(50.0)
    rank.step(seconds)


def test_one_place_in_a_step_for_longer_than_two_steps_is_a_standstill(rank: Rank) -> None:
    usual(rank)
    rank.where.begin(7, 1)
    rank.where.at(LOSS)
    assert rank.beats(2.8) == ([], [])
    ((halt,), _) = rank.beats(1.0)
    assert halt.place.step == 7
    assert halt.place.name == "the loss"
    assert halt.place.computes
    assert 3.0 <= halt.seconds < 3.5
    assert rank.standing.still(halt)
    assert rank.beats(60.0) == ([], []), "said once"
    rank.where.at(BACKWARD)
    assert rank.beats(1.0) == ([], ["w"])
    assert not rank.standing.still(halt)


@pytest.mark.parametrize("place", [FORWARD, BACKWARD])
def test_a_device_that_becomes_ten_times_as_slow_is_a_straggler(
    rank: Rank, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of a step may be at one place: a large block, or a CUDA device that the host waits for."""
    now = [0.0]
    monkeypatch.setattr("elasticd.runtime.where.perf_counter", lambda: now[0])
    for _ in range(3):
        rank.where.begin(5, 1)
        rank.where.at(LOSS)
        now[0] += 0.1
        rank.where.at(place)
        now[0] += 0.8
        rank.where.at(VOTE)
        now[0] += 5.0
        rank.where.end(6.0 if place == FORWARD else 1.0)
    rank.where.begin(7, 1)
    rank.where.at(place)
    known = 12.0 if place == FORWARD else 8.0
    assert rank.beats(known + 0.8) == ([], []), "a wait for others is no stay"
    ((halt,), _) = rank.beats(1.0)
    assert halt.seconds > known
    rank.where.begin(8, 2)
    rank.where.at(place)
    assert rank.beats(300.0)[0] == [], "another plan's steps are others"


def test_a_wait_is_told_with_the_rank_that_is_waited_for(rank: Rank) -> None:
    usual(rank)
    rank.where.begin(7, 1)
    rank.where.at(VOTE, 3)
    assert rank.beats(1.2) == ([], [])
    ((halt,), _) = rank.beats(1.0)
    assert halt.place.waits
    assert halt.place.rank == 3


def test_the_same_place_again_and_again_is_no_standstill(rank: Rank) -> None:
    usual(rank)
    rank.where.begin(7, 1)
    for _ in range(30):
        rank.where.at(LOSS)
        assert rank.beats(2.0) == ([], [])


def test_before_a_plan_has_made_two_steps_nobody_knows_how_long_one_takes(rank: Rank) -> None:
    usual(rank)
    rank.where.begin(7, 2)
    rank.where.at(FORWARD)
    assert rank.beats(300.0) == ([], [])
    rank.where.end(300.0)
    rank.where.begin(8, 2)
    rank.where.at(FORWARD)
    assert rank.beats(300.0) == ([], [])


@pytest.mark.parametrize(
    ("step", "place", "name"),
    [
        (False, SCRIPT, "its script's own code"),
        (True, SCRIPT, "its script's own code"),
        (True, LOADER, "its loader"),
        (False, FORWARD, "an evaluation"),
        (False, LOADER, "an evaluation"),
        (False, BACKWARD, "its script's own code"),
        (False, OPTIMIZER, "the optimizer's factory"),
        (False, SAVING, "the writing of the last checkpoint"),
    ],
)
def test_what_is_outside_of_a_steps_computation_is_told_by_its_name(
    rank: Rank, step: bool, place: int, name: str
) -> None:
    usual(rank)
    if step:
        rank.where.begin(7, 1)
    rank.where.at(place)
    ((halt,), _) = rank.beats(5.0)
    assert not halt.place.computes
    assert not halt.place.waits
    assert halt.place.name == name
    assert rank.standing.outside() == {"w"}


def test_a_wait_for_the_coordinator_is_no_standstill(rank: Rank) -> None:
    """A device that stands by waits for days."""
    usual(rank)
    rank.where.at(IDLE)
    assert rank.beats(60.0) == ([], [])
    rank.where.at(OPTIMIZER)
    ((halt,), _) = rank.beats(5.0)
    assert halt.place.place == OPTIMIZER


def test_every_place_has_a_name_and_one_of_a_newer_release_is_a_collective() -> None:
    where = Shared()
    for place in range(len(NAMES)):
        where.at(place)
        found = read(os.pread(where.fd, STACK, 0))
        assert found is not None
        assert found.place == place
    where.at(len(NAMES))
    found = read(os.pread(where.fd, STACK, 0))
    assert found is not None
    assert found.place == OTHER
    assert {IDLE, *BETWEEN} == {*range(OTHER + 1, len(NAMES))}


def test_what_the_agent_was_late_for_is_not_held_against_a_worker(rank: Rank) -> None:
    usual(rank)
    rank.where.begin(7, 1)
    rank.where.at(LOSS)
    assert rank.beats(1.0) == ([], [])
    rank.now += 30.0
    assert rank.beats(1.0) == ([], [])


def test_a_worker_that_is_gone_is_forgotten_and_only_memory_files_are_read(rank: Rank) -> None:
    rank.standing.beat((), 1.0)
    assert rank.standing.stacks_of("w") is None
    reads, writes = os.pipe()
    os.close(writes)
    assert "no memory file" in rank.standing.hear("w", Whereabouts(), reads)
    assert "missing" in rank.standing.hear("w", Whereabouts(), None)
    empty = os.memfd_create("x")
    assert rank.standing.hear("w", Whereabouts(signal=64), empty) == ""
    assert rank.beats(60.0) == ([], []), "it says nothing"


def test_every_word_can_be_read_back() -> None:
    where = Shared()
    where.begin(0, 1)
    for place, rank in ((VOTE, 0), (VOTE, (1 << 24) - 2), (LOSS, None)):
        where.at(place, rank)
        found = read(os.pread(where.fd, STACK, 0))
        assert found is not None
        assert (found.step, found.place, found.rank) == (0, place, rank)
    assert read(b"") is None
    assert read(bytes(STACK)) is None


def test_telling_where_it_is_costs_the_main_thread_next_to_nothing() -> None:
    """A step says so some hundred times; 50 us of it are the goal."""
    where, count = Shared(), 20_000
    best = min(_timed(where, count) for _ in range(5))
    assert best / count < 2e-6, f"{best / count * 1e9:.0f} ns"


def _timed(where: Shared, count: int) -> float:
    began = time.thread_time()  # of the processor: a busy machine does not count
    for _ in range(count):
        where.at(LOSS)
    return time.thread_time() - began


HANGS = """
import re, socket, sys
from elasticd import messages, packets
from elasticd.runtime.where import Shared
from elasticd.whereabouts import LOSS, Whereabouts
where = Shared()
end = socket.socket(fileno=int(sys.argv[1]))
where.begin(3, 1)
where.at(LOSS)
packets.send(end, messages.encode(Whereabouts(signal=where.signal)), where.fd)
def held():
    re.match("(a+)+$", "a" * 64 + "b")  # for longer than the universe, in C, with the interpreter's lock
held()
"""


def test_a_thread_that_holds_the_interpreters_lock_is_seen_and_its_stack_had() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = ending_with_us([sys.executable, "-c", HANGS, str(theirs.fileno())])
    process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
    try:
        ours.settimeout(60)
        data, fd = packets.accept(ours)
        assert data is not None
        assert fd is not None
        body = messages.from_worker(data)
        assert isinstance(body, Whereabouts)
        assert body.signal
        place = read(os.pread(fd, STACK, 0))
        assert place is not None
        assert (place.step, place.place) == (3, LOSS)
        text = ""
        for _ in range(100):  # until it is in the call
            text = asyncio.run(stacks._written(os.pidfd_open(process.pid), fd, body.signal))
            if "in held" in text:
                break
        assert "in held" in text
        assert process.poll() is None
        again = asyncio.run(stacks._written(os.pidfd_open(process.pid), fd, body.signal))
        assert again.count("in held") == 1, "each is written anew"
    finally:
        process.kill()
        process.wait()


def test_the_file_of_a_worker_that_goes_meanwhile_is_not_another_one(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """py-spy has two seconds. A worker that hangs up meanwhile leaves its descriptor's number to whatever is
    opened next, which must not be cut to the length of a memory file."""
    other = tmp_path / "state"
    other.write_bytes(bytes(10_000))
    opened = list[int]()

    async def spied(pid: int) -> str:
        rank.standing.beat((), 1.0)
        opened.extend(os.open(other, os.O_RDWR) for _ in range(3))
        return ""

    monkeypatch.setattr(stacks, "_spied", spied)
    monkeypatch.setattr("signal.pidfd_send_signal", lambda *_: None)
    before = {*os.listdir("/proc/self/fd")}
    asyncio.run(stacks.stack(0, os.dup(0), rank.standing.stacks_of("w")))
    assert other.stat().st_size == 10_000
    for fd in opened:
        os.close(fd)
    assert len({*os.listdir("/proc/self/fd")} - before) == 0, "nothing is left open"


def test_a_signal_that_is_none_of_those_is_not_sent() -> None:
    assert asyncio.run(stacks._written(-1, 0, 9)) == ""


def test_a_compilation_and_a_debugger_are_known_by_their_stacks() -> None:
    for path, what in (
        ("/x/torch/_inductor/compile_fx.py", "a compilation of its model"),
        ("/x/triton/runtime/autotuner.py", "a compilation of its model"),
        ("/usr/lib/python3.11/pdb.py", "a debugger"),
        ("train.py", ""),
    ):
        assert stacks.busy(f'File "{path}", line 3 in there') == what


def test_a_standstill_is_told_the_leader_and_again_on_a_new_link() -> None:
    halted = Halted(job="", device="", incarnation="", place="the loss", computes=True, seconds=3.0)
    state, _ = run(hello(0), LinkUp())
    state, effects = run(Stood(client="w0", halted=halted), state=state, now=10.0)
    (said,) = [body for body in told(effects) if isinstance(body, Halted)]
    assert (said.job, said.device, said.place, said.seconds) == ("job", "n0/0", "the loss", 3.0)
    state, _ = run(LinkDown(), state=state)
    state, effects = run(LinkUp(), state=state, now=14.0)
    (again,) = [body for body in told(effects) if isinstance(body, Halted)]
    assert again.seconds == 7.0
    state, effects = run(Stood(client="w0"), state=state, now=15.0)
    (moves,) = [body for body in told(effects) if isinstance(body, Halted)]
    assert moves.place == ""
    state, effects = run(Stood(client="w0"), LinkDown(), LinkUp(), state=state)
    assert not [body for body in told(effects) if isinstance(body, Halted)]
