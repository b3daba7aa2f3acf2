"""Who counts as frozen: never a busy process, nor one that the agent itself had no time to ask."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from elasticd_agent.hangs.heartbeat import BEAT_SECONDS, BUSY, IDLE, STOPPED, Heartbeats, Look, look

DEADLINE = 60.0


class Kernel:
    """What the kernel says of process 7."""

    def __init__(self) -> None:
        self.stopped, self.used, self.grows = False, 1.0, 0.0

    def look(self, pid: int) -> Look | None:
        assert pid == 7
        self.used += self.grows
        return Look(stopped=self.stopped, used=self.used)


def run(heartbeats: Heartbeats, seconds: float, start: float, *, answers: bool = False) -> tuple[float, str]:
    """Beats for so many seconds, and how it was found frozen; the time after them."""
    now = start
    while now < start + seconds:
        ask, frozen = heartbeats.beat({"w": 7}, now)
        if answers:
            for name in ask:
                heartbeats.answered(name)
        if frozen:
            return now, frozen["w"]
        now += BEAT_SECONDS
    return now, ""


def test_who_answers_is_never_frozen() -> None:
    kernel = Kernel()
    kernel.stopped = True
    assert run(Heartbeats(kernel.look), 100.0, 0.0, answers=True)[1] == ""


def test_a_stopped_process_is_found_at_once_and_told_once() -> None:
    kernel = Kernel()
    heartbeats = Heartbeats(kernel.look)
    now, _ = run(heartbeats, 2.0, 0.0, answers=True)
    kernel.stopped = True
    found, how = run(heartbeats, 5.0, now)
    assert "stopped" in how
    assert found - now <= STOPPED + 2 * BEAT_SECONDS + 1e-9
    assert run(heartbeats, 5.0, found)[1] == "", "said once"
    assert heartbeats.answered("w"), "it had been found frozen"
    assert not heartbeats.answered("w")


@pytest.mark.parametrize(("grows", "least"), [(0.0, IDLE), (0.1, BUSY)])
def test_a_silent_process_that_is_not_stopped_has_time(grows: float, least: float) -> None:
    kernel = Kernel()
    kernel.grows = grows
    found, how = run(Heartbeats(kernel.look), 2 * BUSY, 0.0)
    assert how
    assert least <= found <= least + 1.0


def test_what_the_agent_is_late_for_is_not_held_against_a_worker() -> None:
    kernel = Kernel()
    heartbeats = Heartbeats(kernel.look)
    assert heartbeats.beat({"w": 7}, 0.0) == (("w",), {})
    kernel.stopped = True
    assert heartbeats.beat({"w": 7}, 3.0) == ((), {}), "this agent had stood still"
    assert run(heartbeats, 2.0, 3.0)[1]


def test_who_is_gone_is_forgotten() -> None:
    heartbeats = Heartbeats(Kernel().look)
    heartbeats.beat({"w": 7}, 0.0)
    heartbeats.beat({}, BEAT_SECONDS)
    assert heartbeats.beat({"w": 7}, 2 * BEAT_SECONDS) == (("w",), {})


def test_the_kernel_tells_a_stopped_process_from_a_busy_one() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + DEADLINE
        first = look(process.pid)
        assert first is not None
        assert not first.stopped
        while (now := look(process.pid)) is not None and now.used <= first.used:
            assert time.monotonic() < deadline
        os.kill(process.pid, signal.SIGSTOP)
        while (now := look(process.pid)) is not None and not now.stopped:
            assert time.monotonic() < deadline
        assert now is not None
    finally:
        process.kill()
        process.wait()
    assert look(process.pid) is None


def test_the_scripts_own_code_may_keep_the_interpreter_to_itself() -> None:
    """A save in C for minutes, with or without the processor; a stopped process is frozen all the same."""
    for grows in (0.0, 0.1):
        kernel = Kernel()
        kernel.grows = grows
        heartbeats, now = Heartbeats(kernel.look), 0.0
        for _ in range(1000):
            _, frozen = heartbeats.beat({"w": 7}, now, frozenset({"w"}))
            assert not frozen
            now += BEAT_SECONDS
        kernel.stopped = True
        assert heartbeats.beat({"w": 7}, now, frozenset({"w"}))[1]
