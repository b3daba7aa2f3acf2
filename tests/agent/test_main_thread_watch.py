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

import msgspec
import pytest
from elasticd_agent.hangs import stack_dump
from elasticd_agent.hangs.heartbeat import BEAT_SECONDS
from elasticd_agent.hangs.main_thread_watch import Halt, MainThreadWatch, told_of
from elasticd_planner.spec.cluster import node_of

from elasticd.machines.agent.state import LinkDown, LinkUp, Stood
from elasticd.machines.job.faults.hangs import awaited
from elasticd.machines.job.state.events import Received
from elasticd.runtime.telemetry.main_thread import SharedMainThread, during_task
from elasticd.system.parent_death_signal import ending_with_us
from elasticd.wire import unix_socket
from elasticd.wire.main_thread import (
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
    TASKS,
    VOTE,
    Halted,
    Whereabouts,
    read,
)
from elasticd.wire.worker import from_worker
from tests.machines.agent_scene import hello, run, told
from tests.machines.cast import JOB
from tests.machines.test_recovery import running


class Rank:
    """A worker's memory, and the agent's view of it, a beat at a time."""

    def __init__(self) -> None:
        self.where, self.standing, self.now = SharedMainThread(), MainThreadWatch(), 100.0
        assert self.standing.hear("w", Whereabouts(signal=64), os.dup(self.where.fd)) == ""

    def step(self, seconds: float) -> None:
        self.where.begin(5, 1)
        self.where.at(FORWARD)
        self.where.end(seconds)

    def beats(self, seconds: float, beat: float = BEAT_SECONDS) -> tuple[list[Halt], list[str]]:
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
    monkeypatch.setattr("elasticd.runtime.telemetry.main_thread.perf_counter", lambda: now[0])
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
    halted, _ = rank.beats(300.0)
    assert not any(halt.place.computes for halt in halted), "another plan's steps are others"


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


def begun(rank: Rank, steps: int) -> None:
    """A plan with so many steps made, after another one whose steps were short."""
    usual(rank)
    for step in range(steps):
        rank.where.begin(7 + step, 2)
        rank.where.at(FORWARD)
        rank.where.end(300.0)
    rank.where.begin(7 + steps, 2)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("place", [FORWARD, LOSS, BACKWARD])
def test_in_a_plans_first_two_steps_no_computation_is_a_hang_and_where_it_is_is_told(
    rank: Rank, steps: int, place: int
) -> None:
    """A first compilation may take minutes. What takes longer is told again, with its stack."""
    begun(rank, steps)
    rank.where.at(place)
    assert rank.beats(1.8) == ([], [])
    ((halt,), _) = rank.beats(1.0)
    assert 2.0 <= halt.seconds < 2.5
    assert not halt.looks
    ((again,), _) = rank.beats(300.0)
    assert 10.0 <= again.seconds < 10.5
    assert again.looks
    assert rank.standing.outside() == {"w"}, "its silence means nothing"
    for each in (halt, again):
        told = told_of(each, "train.py")
        assert told.place == f"{NAMES[place]} (in its plan's first steps)"
        assert (told.step, told.computes, told.waits) == (7 + steps, False, False)
    rank.where.at(VOTE)
    assert rank.beats(1.0) == ([], ["w"])
    assert rank.standing.outside() == frozenset()


@pytest.mark.parametrize("steps", [0, 1])
def test_in_a_plans_first_two_steps_a_wait_is_told_after_two_seconds(rank: Rank, steps: int) -> None:
    begun(rank, steps)
    rank.where.at(VOTE, 3)
    assert rank.beats(1.8) == ([], [])
    ((halt,), _) = rank.beats(300.0)
    told = told_of(halt, "")
    assert (told.place, told.rank, told.waits) == ("the vote", 3, True)
    assert 2.0 <= halt.seconds < 2.5


def test_after_two_steps_of_a_plan_a_hang_is_found(rank: Rank) -> None:
    begun(rank, 2)
    rank.where.at(LOSS)
    assert rank.beats(600.0) == ([], [])
    ((halt,), _) = rank.beats(2.0)
    assert halt.looks
    assert told_of(halt, "train.py").computes


def test_a_compilation_is_told_as_one_in_whichever_step(rank: Rank) -> None:
    compiles = 'File "/x/torch/_inductor/compile_fx.py", line 3 in there'
    for steps in (0, 2):
        begun(rank, steps)
        rank.where.at(FORWARD)
        halted, _ = rank.beats(700.0)
        told = told_of(halted[-1], compiles)
        assert (told.place, told.computes, told.waits) == ("a compilation of its model", False, False)
        assert told.stack == compiles
        rank.where.end(None)


@pytest.mark.parametrize(("place", "where"), [(LOADER, "its loader"), (LOSS, "the loss")])
@pytest.mark.parametrize("limit", [0.0, 50.0])
def test_what_hangs_in_a_plans_first_step_is_named_and_given_up_at_the_limit_alone(
    place: int, where: str, limit: float
) -> None:
    """Of four ranks of a job one does not come out of its loader, or its loss: from their memory to the
    leader's decision."""
    world = running()
    detect = msgspec.structs.replace(world.settings.detect, outside_seconds=limit)
    world.state = msgspec.structs.replace(
        world.state, settings=msgspec.structs.replace(world.settings, detect=detect)
    )
    hung, ranks = "beta/1", {device: Rank() for device in world.workers}
    world.deaf.add(hung)
    for device, rank in ranks.items():
        rank.where.begin(world.steps, 7)
        rank.where.at(place if device == hung else VOTE)
    fences = list[float]()
    for beat in range(round(70.0 / BEAT_SECONDS)):
        for device, rank in ranks.items():
            for halt in rank.beats(BEAT_SECONDS)[0]:
                told, worker = told_of(halt, "its stack"), world.workers[device]
                told = msgspec.structs.replace(told, job=JOB, device=device, incarnation=worker.incarnation)
                world.say(Received(node=node_of(device), message=told))
        if beat * BEAT_SECONDS > 15.0 and not fences and "fenced" not in world.kinds():
            said = awaited(world.job, world.now)
            assert said.startswith(f"waits for worker {hung}, which is in {where}")
        world.tick(BEAT_SECONDS)
        if "fenced" in world.kinds() and not fences:
            fences.append(beat * BEAT_SECONDS)
    for rank in ranks.values():
        rank.standing.close()
    assert len(fences) == (limit > 0)
    if limit:
        assert limit <= fences[0] < limit + 1.0
        assert {*world.job.losses.gone} == {hung}


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


def test_a_wait_in_what_all_members_do_between_two_steps_is_told_with_its_name(rank: Rank) -> None:
    rank.step(0.1)
    with during_task(rank.where, TASKS.index("job.state_dict()")):
        rank.where.at(OTHER)
        halted, _ = rank.beats(3.0)
        (found,) = (told_of(halt, "") for halt in halted)
        assert (found.task, found.step, found.waits) == ("job.state_dict()", -1, True)
    rank.where.at(OTHER)
    halted, moving = rank.beats(3.0)
    assert moving == ["w"]
    assert [told_of(halt, "").task for halt in halted] == [""]


def test_a_wait_for_the_coordinator_is_no_standstill(rank: Rank) -> None:
    """A device that stands by waits for days."""
    usual(rank)
    rank.where.at(IDLE)
    assert rank.beats(60.0) == ([], [])
    rank.where.at(OPTIMIZER)
    ((halt,), _) = rank.beats(5.0)
    assert halt.place.place == OPTIMIZER


def test_every_place_has_a_name_and_one_of_a_newer_release_is_a_collective() -> None:
    where = SharedMainThread()
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
    where = SharedMainThread()
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
    where, count = SharedMainThread(), 20_000
    best = min(_timed(where, count) for _ in range(5))
    assert best / count < 2e-6, f"{best / count * 1e9:.0f} ns"


def _timed(where: SharedMainThread, count: int) -> float:
    began = time.thread_time()  # of the processor: a busy machine does not count
    for _ in range(count):
        where.at(LOSS)
    return time.thread_time() - began


HANGS = """
import re, socket, sys
from elasticd.codec.message import encode
from elasticd.wire import unix_socket
from elasticd.runtime.telemetry.main_thread import SharedMainThread, during_task
from elasticd.wire.main_thread import LOSS, Whereabouts
where = SharedMainThread()
end = socket.socket(fileno=int(sys.argv[1]))
where.begin(3, 1)
where.at(LOSS)
unix_socket.send(end, encode(Whereabouts(signal=where.signal)), where.fd)
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
        data, fd = unix_socket.accept(ours)
        assert data is not None
        assert fd is not None
        body = from_worker(data)
        assert isinstance(body, Whereabouts)
        assert body.signal
        place = read(os.pread(fd, STACK, 0))
        assert place is not None
        assert (place.step, place.place) == (3, LOSS)
        for _ in range(2):  # each is written anew
            text = ""
            for _ in range(100):  # until it is in the call, and has the processor for long enough to say so
                text = asyncio.run(stack_dump._written(os.pidfd_open(process.pid), fd, body.signal))
                if "in held" in text:
                    break
            assert text.count("in held") == 1
            assert process.poll() is None
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

    monkeypatch.setattr(stack_dump, "_spied", spied)
    monkeypatch.setattr("signal.pidfd_send_signal", lambda *_: None)
    before = {*os.listdir("/proc/self/fd")}
    asyncio.run(stack_dump.stack(0, os.dup(0), rank.standing.stacks_of("w")))
    assert other.stat().st_size == 10_000
    for fd in opened:
        os.close(fd)
    assert len({*os.listdir("/proc/self/fd")} - before) == 0, "nothing is left open"


def test_a_signal_that_is_none_of_those_is_not_sent() -> None:
    assert asyncio.run(stack_dump._written(-1, 0, 9)) == ""


def test_a_compilation_and_a_debugger_are_known_by_their_stacks() -> None:
    for path, what in (
        ("/x/torch/_inductor/compile_fx.py", "a compilation of its model"),
        ("/x/triton/runtime/autotuner.py", "a compilation of its model"),
        ("/usr/lib/python3.11/pdb.py", "a debugger"),
        ("train.py", ""),
    ):
        assert stack_dump.busy(f'File "{path}", line 3 in there') == what


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
