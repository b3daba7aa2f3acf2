"""A program's forked children are its own, as those that it starts in earnest: ids, exit codes, signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elasticd.testing.waiting import until
from tests import forkserver, nursery
from tests.forkserver import Forked
from tests.liveness import ended


class Program:
    """`tests.nursed` with a script that first says who it is; and what both print."""

    def __init__(self, folder: Path) -> None:
        self.script, self.printed = folder / "script.py", folder / "printed"

    def start(self, body: str, *arguments: str) -> Forked:
        told = "'child', os.getppid(), os.getsid(0) == os.getpid(), sys.argv[1:], 'torch' in sys.modules"
        # One write for each line: the program prints into the same file, and `print` writes word by word.
        say = "def say(*words):\n    os.write(1, (' '.join(map(str, words)) + '\\n').encode())"
        self.script.write_text(f"import os, sys, time\n{say}\nsay({told})\n{body}\n")
        environment = {**os.environ, "PYTHONPATH": str(forkserver.ROOT)}
        self.forked = forkserver.start(
            "tests.nursed", str(self.script), *arguments, environment=environment, output=self.printed
        )
        return self.forked

    def said(self, word: str) -> str:
        """What follows a word at a line's begin, once it is there."""

        def look() -> str:
            lines = self.printed.read_text().splitlines() if self.printed.exists() else []
            return next((line for line in lines if line.startswith(word)), "")

        return until(look, self.printed.read_text).removeprefix(word).strip()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    program.forked.kill()
    program.forked.wait()


@pytest.mark.parametrize("other", [False, True], ids=["forked", "started in earnest"])
@pytest.mark.parametrize(("body", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("", 0)])
def test_a_child_is_the_programs_own(
    program: Program, body: str, code: int, other: bool, tmp_path: Path
) -> None:
    forked = program.start(body, *([str(tmp_path)] if other else []))
    assert forked.wait(60) == 0
    assert program.said("child") == f"{forked.pid} True ['word'] {not other}", "parent, session, argv, torch"
    assert program.said("code") == str(code)


@pytest.mark.parametrize("other", [False, True], ids=["forked", "started in earnest"])
def test_a_child_that_is_to_end_with_its_program_is_told_when_that_is_killed(
    program: Program, other: bool, tmp_path: Path
) -> None:
    body = (
        "import signal\nsignal.signal(15, lambda *_: (open(sys.argv[0] + '.told', 'w').close(), os._exit(0)))"
    )
    forked = program.start(f"{body}\nsay('up')\ntime.sleep(600)", *([str(tmp_path)] if other else []))
    program.said("up")
    child = psutil.Process(int(program.said("pid")))
    names = sorted(one.name() for one in psutil.Process(forked.pid).children())
    assert [name for name in names if name != nursery.NAME] == [child.name()]
    forked.kill()
    until(lambda: Path(f"{program.script}.told").exists())
    until(lambda: ended(child))


def test_signals_to_all_of_a_tree_leave_the_nursery_to_its_program(program: Program) -> None:
    forked = program.start("say('up')\ntime.sleep(600)")
    program.said("up")
    child = psutil.Process(int(program.said("pid")))
    tree = psutil.Process(forked.pid).children()
    (nurse,) = (one for one in tree if one.name() == nursery.NAME)
    nurse.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGTERM)
    assert forked.wait(60) == 0
    assert program.said("code") == str(-signal.SIGTERM)
    until(lambda: ended(nurse))
