"""Benchmarks write what DESIGN says: rows with goals that are met or not, the machine, the versions."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from elasticd.coordinator.journal import Pacing
from elasticd.demo.report import report
from tests.demo.records import changed, record

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/_results.py, as a benchmark imports it: from beside itself."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_results")


@pytest.fixture
def demo(results: ModuleType) -> ModuleType:
    return importlib.import_module("demo")


def test_what_looks_like_markup_is_printed_as_it_is(
    results: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results.finish("x", [results.row("peer", "no: [/a/b.cc:1] refused [bold]", "")], tmp_path)
    assert "no: [/a/b.cc:1] refused [bold]" in " ".join(capsys.readouterr().out.split())


def test_file_has_rows_machine_and_versions(results: ModuleType, tmp_path: Path) -> None:
    rows = [
        results.row("speed", 2.5, "tokens/s", kind="emulated", goal=">= 2", met=True, noise=0.02),
        results.row("bytes", 7, "bytes"),
    ]
    assert results.finish("x", rows, tmp_path) == 0
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["machine"]["cores"] >= 1
    assert "msgspec" in written["versions"]
    assert written["rows"] == [
        {
            "name": "speed",
            "value": 2.5,
            "unit": "tokens/s",
            "goal": ">= 2",
            "met": True,
            "noise": 0.02,
            "kind": "emulated",
        },
        {
            "name": "bytes",
            "value": 7,
            "unit": "bytes",
            "goal": None,
            "met": None,
            "noise": None,
            "kind": "measured",
        },
    ]


def test_missed_goal_fails_the_benchmark(results: ModuleType, tmp_path: Path) -> None:
    assert results.finish("x", [results.row("a", 1, "", goal="2", met=False)], tmp_path) == 1


def test_goal_without_a_verdict_is_refused(results: ModuleType) -> None:
    with pytest.raises(ValueError, match="a goal needs met"):
        results.row("a", 1, "", goal="2")


def test_every_check_of_the_demo_is_a_row_with_a_goal(demo: ModuleType) -> None:
    made = report(record())
    judged = [row for row in demo.rows(made) if row.goal is not None]
    # "replan pays" compares rows that are there beside each other.
    assert len(judged) == len(made.checks) - 1
    assert all(row.met for row in judged)


def test_check_that_fails_is_a_goal_that_is_missed(demo: ModuleType) -> None:
    made = report(changed(record(), pacing=Pacing(paced=10, overruns=1)))
    assert [row.name for row in demo.rows(made) if row.met is False] == ["overruns of the emulation"]
