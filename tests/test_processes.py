"""Processes of a command end on every path: by themselves in order, after Ctrl-C, and when it is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from elasticd.system.child_processes import ProcessError, Processes

DEADLINE = 60.0

# Starts a child that starts another and waits; `deaf` ones do not listen to SIGTERM; with `orphan` the first
# ends at once and leaves its child behind, as a torchrun does that is killed.
TREE = """
import os, signal, subprocess, sys, time
deaf, orphan = "deaf" in sys.argv, "orphan" in sys.argv
if deaf: signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time\\n" + ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n" if deaf else "")
child = subprocess.Popen([sys.executable, "-c", code + "print('up', flush=True); time.sleep(600)"],
                         start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
if not orphan:
    # What torchrun does with its workers.
    if not deaf: signal.signal(signal.SIGTERM, lambda *_: (child.kill(), sys.exit(0)))
    print("up", flush=True)
    time.sleep(600)
"""

COMMAND = """
import sys
from pathlib import Path
from elasticd.system import child_processes as p
p.GRACE = 0.5
folder = Path(sys.argv[1])
tree = (sys.executable, str(folder / "tree.py"))
try:
    with p.Processes(folder) as children, children.interruptible():
        first = children.start("first", tree)
        second = children.start("second", (*tree, *sys.argv[3:]))
        children.until(lambda: "up" in first.log.read_text(), "the first child's start", 60, needs=[first])
        there = lambda: "up" in second.log.read_text() or second.process.poll() is not None
        children.until(there, "the second child's start", 60, needs=[first])
        children.pause(0.5)
        (folder / "ready").touch()
        if sys.argv[2] == "error":
            raise ValueError("as a bug would")
        while sys.argv[2] == "wait":
            children.pause(0.02)
except p.Interrupted:
    sys.exit(130)
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "this never became true"
        time.sleep(0.02)


@contextmanager
def command(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """A small command once all of its children run, and those children."""
    (folder / "tree.py").write_text(TREE)
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(folder), *arguments], stderr=subprocess.DEVNULL
    )
    tree: list[psutil.Process] = []

    def ready() -> bool:
        if process.poll() is None:
            found = psutil.Process(process.pid).children(recursive=True)
            tree.extend(child for child in found if child not in tree)
        return (folder / "ready").exists()

    try:
        until(ready)
        yield process, tree
    finally:
        process.kill()
        process.wait()
        for left in tree:
            if left.is_running():
                left.kill()


def assert_gone(tree: list[psutil.Process]) -> None:
    assert len(tree) >= 3
    _, alive = psutil.wait_procs(tree, timeout=DEADLINE / 2)
    assert not alive


@pytest.mark.parametrize(
    ("number", "second"),
    [
        (signal.SIGINT, []),
        (signal.SIGTERM, ["deaf"]),
        (signal.SIGHUP, ["orphan"]),
        (signal.SIGINT, ["orphan", "deaf"]),
    ],
)
def test_interrupted_command_ends_all_of_its_processes(
    number: signal.Signals, second: list[str], tmp_path: Path
) -> None:
    with command(tmp_path, "wait", *second) as (process, tree):
        process.send_signal(number)
        process.send_signal(number)  # an impatient user harms nothing
        assert process.wait(DEADLINE) == 130
        assert_gone(tree)


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("error", 1)])
def test_one_that_ends_by_itself_ends_its_processes(how: str, code: int, tmp_path: Path) -> None:
    with command(tmp_path, how, "orphan") as (process, tree):
        assert process.wait(DEADLINE) == code
        assert_gone(tree)


def test_killed_one_takes_its_processes_along(tmp_path: Path) -> None:
    with command(tmp_path, "wait") as (process, tree):
        process.kill()
        assert_gone(tree)


def test_wait_for_something_that_cannot_come_ends_with_what_was_said(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    child = processes.start("talker", (sys.executable, "-c", "print('why I ended'); raise SystemExit(3)"))
    with pytest.raises(ProcessError, match=r"talker ended with 3:\nwhy I ended"):
        processes.until(lambda: None, "something", DEADLINE, needs=[child])
    with pytest.raises(ProcessError, match=r"something else did not happen within 0\.1 s"):
        processes.until(lambda: None, "something else", 0.1, needs=())
    assert processes.wait(child, DEADLINE) == 3
