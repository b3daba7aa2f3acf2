"""Off a terminal no command wraps or cuts a line: one console for all, and each one's output by a pipe."""

from __future__ import annotations

import ast
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.table import Table
from rich.text import Text

from elasticd.cli.console import command_console
from elasticd.records import ConfigRecord
from elasticd.wire.api_types import ExceptionStatus, RestartStatus, Settings
from elasticd.wire.event_record import EventRecord
from tests.cli.answers import Answers, long_text, serving
from tests.cli.support import call
from tests.cli.test_app_without_extras import DOCTOR, READING
from tests.cli.test_status import PLAN, STATUS
from tests.cli.test_top_and_why import record
from tests.house import PACKAGES

ROOT = Path(__file__).parents[2]
SCENARIO = str(ROOT / "examples/scenarios/small.toml")
#: Calls of every command that reads; `profile` measures anew each time: the first test has it.
CALLS: dict[str, tuple[str, ...]] = {
    "status": ("status",),
    "status --all": ("status", "--all"),
    "status JOB": ("status", "over"),
    "jobs": ("jobs",),
    "top": ("top", "--once"),
    "why": ("why",),
    "why DEVICE": ("why", "a/1"),
    "history": ("history",),
    "logs": ("logs",),
    "plan": ("plan",),
    "config get": ("config", "get"),
    "config history": ("config", "history"),
}


def test_no_command_makes_a_console_of_its_own() -> None:
    makers = {
        str(path.relative_to(ROOT))
        for folder in PACKAGES.values()
        for path in folder.rglob("*.py")
        if "Console(" in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Console"
    }
    assert makers == set(), "command_console makes all of them"


def test_every_command_that_reads_is_called_here() -> None:
    named = {
        " ".join(word for word in name.split() if word.islower() and not word.startswith("-")) for name in CALLS
    }
    asks_nobody = {DOCTOR, "checkpoint list", "checkpoint verify", "simulate", "profile"}
    assert named == READING - asks_nobody


def answers() -> Answers:
    """A job that runs and one that is over, in which every text is long."""
    (job,) = STATUS.jobs
    (node,) = STATUS.nodes
    raised = ExceptionStatus(
        device="a/1", step=41, kind="ValueError", message=long_text("message"), traceback=long_text("frame")
    )
    replace = msgspec.structs.replace
    over = replace(job, job="over", phase="stopped", reason=long_text("ended"), plan=None, members=())
    running = replace(job, reason=long_text("waits"), exception=raised)
    restarting = RestartStatus(
        job="again",
        round=1,
        step=1,
        step_seconds=1.0,
        silent_seconds=0.0,
        devices={},
        out={"r": long_text("out")},
    )
    event = EventRecord(
        id=1, time=0.0, kind="slow", job="j", text=long_text("event"), data={"device": "a/1", "number": 7}
    )
    wide = PLAN.replace(idle=tuple(f"spare-node-{number}/0" for number in range(40)))
    change = ConfigRecord(number=1, at=0.0, by="alice", values={"policy.paused": long_text("value")})
    return Answers(
        status=replace(STATUS, nodes=(node,), jobs=(over, running), restarts=(restarting,)),
        events=(event,),
        histories={"j": (replace(record(7, {"a/1": 3.0}, wide), reason=long_text("decided")),)},
        settings=Settings(values={"policy.paused": long_text("set")}, changed={}, history=(change,)),
    )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(answers()) as found:
        yield found


@pytest.mark.parametrize("name", CALLS)
def test_what_is_written_into_a_pipe_has_each_text_whole_in_one_line(
    name: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for columns in ("20", "80", "4000"):
        monkeypatch.setenv("COLUMNS", columns)
        done = call(*CALLS[name], "--coordinator", url)
        assert done.exit_code == 0, done.output
        outputs.append(re.sub(r"\d\d:\d\d:\d\d", "TIME", done.stdout))
    assert len(set(outputs)) == 1, "the width of a terminal that is not there"
    texts = set(re.findall(r"([a-z]+)! /srv", outputs[0]))
    assert texts or name == "plan"
    lines = outputs[0].splitlines()
    for begins in texts:
        assert any(long_text(begins) in line for line in lines), begins
    assert not any(line.endswith(" ") for line in lines)


@pytest.mark.parametrize(
    "command", [("simulate", SCENARIO), (DOCTOR,), ("checkpoint", "list", "{folder}")], ids=lambda c: c[0]
)
def test_commands_that_ask_nobody_write_the_same_whatever_the_width(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]  # looked for in seconds otherwise
    damaged = tmp_path / f"step-00000001.plan-1.{'a' * 200}"
    damaged.mkdir()
    arguments = [word.format(folder=tmp_path) for word in command]
    outputs = []
    for columns in ("20", "4000"):
        monkeypatch.setenv("COLUMNS", columns)
        outputs.append(call(*arguments).stdout)
    assert outputs[0]
    assert outputs[0] == outputs[1]


def test_a_terminal_wraps_and_a_pipe_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table("name", "text", box=None)
    table.add_row("a", " ".join(["word"] * 60))
    table.add_row("b", Text("short"))

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "40")
    for stream, count in ((Terminal(), 9), (io.StringIO(), 3)):
        monkeypatch.setattr("sys.stdout", stream)
        command_console().print(table)
        assert len(stream.getvalue().splitlines()) >= count
        assert (len(stream.getvalue().splitlines()) == 3) == (not stream.isatty())
