"""The frame of the benchmarks: rows are written as they come, and stale ones are listed."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def frame(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_frame")


@pytest.fixture
def row(frame: ModuleType) -> Callable[..., Any]:
    return frame.row  # type: ignore[no-any-return]


def of(frame: ModuleType, *rows: Any) -> Any:
    return frame.Part(lambda smallest: iter(rows), ("code.py",))


def measure(frame: ModuleType, path: Path, parts: dict[str, Any], *only: str) -> list[Any]:
    results = frame.Results(path, parts)
    return [each for name in only or parts for each in results.measure(name, False)]


def written(path: Path) -> list[tuple[str, object]]:
    return [(row["name"], row["value"]) for row in json.loads(path.read_text())["rows"]]


def test_a_row_is_in_the_file_before_the_next_is_measured_and_others_stay(
    frame: ModuleType, row: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "long.json"
    measure(
        frame, path, {"one": of(frame, row("a", 1, ""), row("b", 1, "")), "two": of(frame, row("c", 1, ""))}
    )
    seen = []

    def rows(smallest: bool) -> Iterator[Any]:
        yield row("a", 2, "")
        seen.append(written(path))
        yield row("b", 2, "")
        seen.append(written(path))

    parts = {"one": frame.Part(rows, ("code.py",)), "two": of(frame)}
    measure(frame, path, parts, "one")
    assert seen == [[("a", 2), ("b", 1), ("c", 1)], [("a", 2), ("b", 2), ("c", 1)]]
    records = json.loads(path.read_text())["parts"]
    assert [(part["part"], part["rows"], part["measures"]) for part in records] == [
        ("one", 2, ["code.py"]),
        ("two", 1, ["code.py"]),
    ]


def test_a_part_that_is_cut_off_leaves_what_it_measured_and_what_it_did_not_reach(
    frame: ModuleType, row: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "long.json"
    measure(frame, path, {"one": of(frame, row("a", 1, ""), row("b", 1, "", goal="1", met=True))})

    def rows(smallest: bool) -> Iterator[Any]:
        yield row("a", 2, "")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(frame, path, {"one": frame.Part(rows, ())})
    assert written(path) == [("a", 2), ("b", 1)]


@pytest.mark.parametrize("error", [ValueError("no model\nat all"), SystemExit("no model")])
def test_a_part_that_breaks_off_is_a_missed_goal_and_the_next_part_is_measured(
    frame: ModuleType, row: Callable[..., Any], tmp_path: Path, error: BaseException
) -> None:
    def rows(smallest: bool) -> Iterator[Any]:
        yield row("a", 2, "")
        raise error

    parts = {"one": frame.Part(rows, ()), "two": of(frame, row("b", 1, ""))}
    measure(frame, tmp_path / "x.json", parts)
    assert written(tmp_path / "x.json") == [("a", 2), ("one: broke off", "no model"), ("b", 1)]


def test_a_goal_that_a_part_has_no_row_for_stays_and_is_missed_and_parts_that_are_no_more_go(
    frame: ModuleType, row: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "long.json"
    measure(
        frame,
        path,
        {"one": of(frame, row("a", 1, "", goal="<= 2", met=True)), "gone": of(frame, row("c", 1, ""))},
    )
    rows = measure(frame, path, {"one": of(frame, row("b", 2, ""))})
    assert [(each.name, each.value, each.met) for each in rows] == [("b", 2, None), ("a", None, False)]
    assert written(path) == [("b", 2), ("a", None)]


@pytest.mark.parametrize(("smallest", "code"), [([], 1), (["--smallest"], 0)])
def test_a_missed_goal_fails_the_benchmark_but_not_at_its_smallest(
    frame: ModuleType,
    row: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    smallest: list[str],
    code: int,
) -> None:
    parts = {"one": of(frame, row("a", 3, "s", goal="<= 2", met=False)), "two": of(frame, row("b", 1, ""))}
    arguments = ["--only", "one", "--out", str(tmp_path / "x.json"), *smallest]
    assert frame.run("x", "purpose", parts, frame.parser("purpose", parts).parse_args(arguments)) == code
    assert "one: a: 3 s (goal <= 2: missed)" in capsys.readouterr().out
    assert written(tmp_path / "x.json") == [("a", 3)]


def test_a_part_that_breaks_off_fails_the_benchmark_at_its_smallest_too(
    frame: ModuleType, tmp_path: Path
) -> None:
    parts = {"one": frame.Part(frame.module_rows("_there_is_no_such_module"), ())}
    arguments = ["--smallest", "--out", str(tmp_path / "x.json")]
    assert frame.run("x", "purpose", parts, frame.parser("purpose", parts).parse_args(arguments)) == 1


def test_rows_older_than_the_last_change_to_what_they_measure_are_stale(
    frame: ModuleType, tmp_path: Path
) -> None:
    changes = importlib.import_module("_stale").Changes
    assert not changes(tmp_path).known
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "other.py").write_text("1")
    git(tmp_path, "init", "--quiet")
    first = committed(tmp_path)
    assert changes(tmp_path).since(first, ("code.py",)) == ""
    (tmp_path / "other.py").write_text("2")
    second = committed(tmp_path)
    assert changes(tmp_path).since(first, ("code.py",)) == ""
    assert (
        changes(tmp_path)
        .since(first, ("code.py", "other.py"))
        .startswith(f"measured at {first}, 1 change since, the last {second[:7]}")
    )
    assert changes(tmp_path).since(first, ()) == "its part does not say what it measures"
    (tmp_path / "code.py").write_text("3")
    assert changes(tmp_path).since(first, ("code.py",)) == f"measured at {first}, files changed since"
    assert "with changes beside" in changes(tmp_path).since(first + "+", ("code.py",))
    assert "no commit before this one" in changes(tmp_path).since("0123456789ab", ("code.py",))


def committed(folder: Path) -> str:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "x")
    return git(folder, "rev-parse", "HEAD")[:12]


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
