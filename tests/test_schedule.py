"""The order of the tests: the longest first, those that share a fixture of their module together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import schedule, sizes

SHARED = """
import pytest

@pytest.fixture(scope="module")
def shared(): return 1

@pytest.fixture
def copied(shared): return shared

def test_uses(shared): ...
def test_too(request): request.getfixturevalue("copied")
def test_alone(tmp_path): ...
def test_quick(tmp_path): ...
"""
DEALT = """
from tests import schedule

def pytest_xdist_make_scheduler(config, log): return schedule.LongestFirst(config, log)
"""
BODIES = {"dies": "os._exit(3)", "passes": "pass"}
SECONDS = {
    "one.py::long": 9.0,
    "one.py::middle": 2.0,
    "two.py::test_uses": 3.0,
    "two.py::test_too[x@y]": 1.0,
    "two.py::test_alone": 5.5,
}
NAMES = [
    *("one.py::quick", "one.py::long", "one.py::middle", "one.py::quick too"),
    *("two.py::test_uses", "two.py::test_too[x@y]", "two.py::test_alone", "two.py::test_quick"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "one.py").write_text("")
    (tmp_path / "two.py").write_text(SHARED)
    return tmp_path


def test_the_longest_start_first_and_nothing_is_lost(root: Path) -> None:
    assert schedule.order(NAMES, SECONDS, root) == [
        "one.py::long",
        "two.py::test_alone",
        "two.py::test_uses",
        "two.py::test_too[x@y]",
        "one.py::middle",
        "one.py::quick",
        "one.py::quick too",
        "two.py::test_quick",
    ]


def test_tests_that_share_a_fixture_of_their_file_are_dealt_together_and_long_ones_alone(root: Path) -> None:
    groups = {name: schedule.group(name, SECONDS, root) for name in NAMES}
    assert groups == {
        **dict.fromkeys(("one.py::quick", "one.py::quick too"), "one.py"),
        **{name: name for name in ("one.py::long", "one.py::middle", "two.py::test_alone")},
        **dict.fromkeys(("two.py::test_uses", "two.py::test_too[x@y]"), "two.py::"),
        "two.py::test_quick": "two.py",
    }


def test_a_process_that_dies_fails_one_test_and_the_others_run(tmp_path: Path) -> None:
    """Where xdist deals by itself, what died is run again; and a single test that is left waits for ever."""
    suite = {"test_one.py": ["passes", "dies", "passes"], "test_two.py": ["dies", "passes"]}
    for file, tests in suite.items():
        text = "".join(f"def test_{at}(): {BODIES[test]}\n" for at, test in enumerate(tests))
        (tmp_path / file).write_text(f"import os\n{text}")
    (tmp_path / "conftest.py").write_text(DEALT)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", tmp_path, tmp_path]
    command += ["-p", "xdist", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder"]
    environment = os.environ | {"PYTHONPATH": str(schedule.ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert "2 failed, 3 passed" in ran.stdout.splitlines()[-1], ran.stdout + ran.stderr


def test_no_test_of_make_test_takes_long_but_those_that_are_listed(request: pytest.FixtureRequest) -> None:
    """As tests/durations.json says, of the tests of this run."""
    of_make_test = [item.nodeid for item in request.session.items if not item.get_closest_marker(sizes.MARK)]
    assert schedule.too_long(of_make_test, schedule.known()) == []
    assert schedule.known().keys() >= schedule.LONG, "a test that is gone is listed no more"
    assert schedule.too_long(["a", "b", "c"], {"a": schedule.LONGEST + 1, "b": schedule.LONGEST}) == ["a"]


def marked(params: list[Any]) -> list[tuple[tuple[object, ...], list[str]]]:
    return [(param.values, [mark.name for mark in param.marks]) for param in params]


def test_make_test_takes_representatives_and_make_test_all_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_full", False)
    assert (sizes.examples(300), sizes.examples(12), sizes.examples(3)) == (75, 5, 3)
    assert sizes.every(range(7), 3, 1) == [1, 4]
    assert sizes.number(full=200, quick=50) == 50
    assert marked(sizes.beside([2], [1, 2])) == [((2,), [])]
    assert marked(sizes.beside([], [1])) == [((1,), ["full"])], "no test without cases"
    with pytest.raises(AssertionError, match="no cases"):
        sizes.beside([3], [1, 2])
    monkeypatch.setattr(sizes, "_full", True)
    assert marked(sizes.beside([2], [1, 2])) == [((1,), ["full"]), ((2,), [])]
    assert (sizes.examples(300), sizes.every(range(3), 3), sizes.number(full=200, quick=50)) == (
        300,
        [0, 1, 2],
        200,
    )
