"""Threads beside training: calls run in their order, errors are logged, the end drops what has not begun."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from elasticd.runtime.threads import DaemonThreads


def test_calls_run_in_their_order_and_give_their_results() -> None:
    threads, seen = DaemonThreads("test"), list[int]()
    futures = [threads(lambda number=number: seen.append(number) or number) for number in range(5)]
    assert [future.result(60) for future in futures] == seen == list(range(5))


def test_an_error_of_a_call_that_nobody_waits_for_is_logged_and_the_next_call_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads = DaemonThreads("test")
    threads.run(lambda: [][0])
    assert threads(lambda: 3).result(60) == 3
    assert "IndexError" in caplog.text


def test_the_end_waits_for_the_call_that_runs_and_drops_the_others() -> None:
    threads, seen = DaemonThreads("test"), list[str]()
    began, may_end = threading.Event(), threading.Event()

    def first() -> None:
        began.set()
        may_end.wait(60)
        seen.append("first")

    threads.run(first)
    threads.run(lambda: seen.append("second"))
    waited = threads(lambda: seen.append("third"))
    assert began.wait(60)
    threading.Timer(0.05, may_end.set).start()
    threads.end(60)
    assert seen == ["first"]
    assert waited.cancelled(), "nobody waits for ever"
    assert threads(lambda: seen.append("fourth")).cancelled()
    assert seen == ["first"]


def test_an_end_before_any_call_leaves_no_thread() -> None:
    threads = DaemonThreads("never-called", 3)
    threads.end(60)
    assert threads(lambda: 1).cancelled()
    assert not [thread.name for thread in threading.enumerate() if "never-called" in thread.name]


#: A process that ends while its thread computes, with more calls to come.
ENDS = """
import threading, torch
from elasticd.runtime.threads import DaemonThreads

def computes():
    began.set()
    x = torch.ones(64, 64)
    for _ in range(CALLS):
        x = torch.mm(x, x)

began = threading.Event()
threads = DaemonThreads("test")
for _ in range(CALLS):
    threads.run(computes)
began.wait()
"""


def test_a_process_that_ends_while_a_thread_is_in_torch_ends_with_its_own_exit_code() -> None:
    """An interpreter that ends under such a thread aborts: "terminate called without an active exception"."""
    script = ENDS.replace("CALLS", "1000")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
