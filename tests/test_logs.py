"""Logs as JSON lines: what a line says, who chooses them, and that a script's own logging is left alone."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elasticd.config.tree import ConfigError, parse
from elasticd.coordinator.leader import Leader
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.events import CoordinatorNote
from elasticd.system.logs import JsonLines, LogSection


class Kept(logging.Handler):
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[dict[str, object]] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        assert "\n" not in text
        self.lines.append(json.loads(text))


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept(JsonLines({"cluster": "c", "node": "alpha"}, lambda: {"step": 7}))
    logger = logging.getLogger("elasticd")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_a_line_says_what_it_is_about(kept: Kept) -> None:
    logging.getLogger("elasticd.x").warning("two\nlines of %s", "text", extra={"device": "alpha/1", "step": 8})
    (line,) = kept.lines
    assert str(line.pop("time")).endswith("+00:00")
    assert line == {
        "level": "warning",
        "logger": "elasticd.x",
        "message": "two\nlines of text",
        "cluster": "c",
        "node": "alpha",
        "step": 8,
        "device": "alpha/1",
    }


def test_what_a_record_does_not_say_comes_from_the_moment(kept: Kept) -> None:
    logging.getLogger("elasticd.x").info("later")
    assert kept.lines[0]["step"] == 7


def test_an_exception_is_in_its_line(kept: Kept) -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("elasticd.x").exception("it failed")
    assert "RuntimeError: broken" in str(kept.lines[0]["exception"])


def test_an_event_of_the_leader_is_a_line_with_its_plan_and_device(kept: Kept) -> None:
    leading = Leader(CoordinatorState(epoch=1), chaos=False, failed=lambda error: None)
    leading.record(
        CoordinatorNote(kind="slow", job="j", text="it is slow", data={"device": "beta/0", "step": 12})
    )
    leading.record(CoordinatorNote(kind="recorded", job="j", text="plan 3 runs", data={"number": 3}))
    slow, recorded = kept.lines
    assert (slow["kind"], slow["job"], slow["device"], slow["step"]) == ("slow", "j", "beta/0", 12)
    assert (recorded["plan"], recorded["message"]) == (3, "job j: plan 3 runs")


def test_the_configuration_chooses_and_refuses() -> None:
    assert parse('[log]\nformat = "json"\nlevel = "debug"', "x").log == LogSection(format="json", level="debug")
    with pytest.raises(ConfigError, match="format = 'xml'"):
        parse('[log]\nformat = "xml"', "x")


SCRIPT = """
import logging
logging.basicConfig(format="mine %(message)s")
from elasticd.system.logs import for_worker
for_worker(lambda: {"job": "j", "plan": 2, "step": 5, "device": "alpha/0"})
for_worker(lambda: {})
logging.getLogger("elasticd.runtime.checkpoint.saver").warning("a checkpoint was not written")
logging.getLogger("script").warning("hello")
"""


@pytest.mark.parametrize("chosen", ["json", ""])
def test_a_workers_lines_are_json_where_asked_for_and_the_scripts_own_are_left_alone(chosen: str) -> None:
    environment = {**os.environ, "ELASTICD_LOG_FORMAT": chosen}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=180
    )
    first, second = done.stderr.splitlines()
    assert second == "mine hello"
    if chosen:
        line = json.loads(first)
        assert (line["level"], line["plan"], line["step"], line["device"]) == ("warning", 2, 5, "alpha/0")
    else:
        assert first == "mine a checkpoint was not written"


@pytest.mark.parametrize(("level", "shown"), [("info", False), ("warning", False), ("debug", True)])
def test_a_line_for_each_http_request_is_for_debugging(level: str, shown: bool) -> None:
    code = (
        "import logging; from elasticd.system.logs import LogSection, set_up;"
        f"set_up(LogSection(level={level!r}), dict());"
        "import httpx2; logging.getLogger('httpx2').info('HTTP Request: GET')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert ("HTTP Request: GET" in done.stderr) == shown
