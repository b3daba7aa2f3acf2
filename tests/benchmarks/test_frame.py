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
    return frame.Part(lambda: iter(rows), ("code.py",))


def measure(frame: ModuleType, path: Path, parts: dict[str, Any], *only: str) -> list[Any]:
    results = frame.Results(path, parts)
    return [each for name in only or parts for each in results.measure(name, False)]


def test_a_smallest_size_that_is_no_argument_of_its_part_is_refused_when_it_is_listed(
    frame: ModuleType,
) -> None:
    with pytest.raises(TypeError, match="'coutn'"):
        frame.Part(lambda count=3: iter(()), (), {"coutn": 1})


def test_the_smallest_size_is_called_with_the_arguments_of_the_table(
    frame: ModuleType, row: Callable[..., Any], tmp_path: Path
) -> None:
    def rows(count: int = 1000) -> Iterator[Any]:
        yield row("count", count, "")

    results = frame.Results(tmp_path / "x.json", {"one": frame.Part(rows, (), {"count": 2})})
    assert [each.value for each in results.measure("one", True)] == [2]
    assert [each.value for each in results.measure("one", False)] == [1000]


def test_each_row_has_its_commit_and_its_day(
    frame: ModuleType, row: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame, "commit", lambda: "0123456789ab")
    measure(
        frame, tmp_path / "x.json", {"one": of(frame, row("a", 2.5, "s", goal=">= 2", met=True, noise=0.02))}
    )
    file = json.loads((tmp_path / "x.json").read_text())
    (found,) = file["rows"]
    assert found.pop("date") == file["parts"][0]["ended"][:10]
    assert found == {
        "name": "a",
        "value": 2.5,
        "unit": "s",
        "goal": ">= 2",
        "met": True,
        "noise": 0.02,
        "kind": "measured",
        "commit": "0123456789ab",
    }
    assert file["machine"]["cores"] >= 1
    assert "msgspec" in file["versions"]


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

    def rows() -> Iterator[Any]:
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

    def rows() -> Iterator[Any]:
        yield row("a", 2, "")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(frame, path, {"one": frame.Part(rows, ())})
    assert written(path) == [("a", 2), ("b", 1)]


@pytest.mark.parametrize("error", [ValueError("no model\nat all"), SystemExit("no model")])
def test_a_part_that_breaks_off_is_a_missed_goal_and_the_next_part_is_measured(
    frame: ModuleType, row: Callable[..., Any], tmp_path: Path, error: BaseException
) -> None:
    def rows() -> Iterator[Any]:
        yield row("a", 2, "")
        raise error

    parts = {"one": frame.Part(rows, ()), "two": of(frame, row("b", 1, ""))}
    measure(frame, tmp_path / "x.json", parts)
    assert written(tmp_path / "x.json") == [("a", 2), ("one: broke off", "no model"), ("b", 1)]
    measure(frame, tmp_path / "x.json", {"one": of(frame, row("a", 3, "")), "two": of(frame, row("b", 1, ""))})
    assert written(tmp_path / "x.json") == [("a", 3), ("b", 1)], (
        "once it comes to its end, that is no goal any more"
    )


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


def test_goals_of_an_earlier_run_are_the_same_whatever_counts_are_in_their_names(
    frame: ModuleType, row: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    first = [
        row("wall time of 3 runs", 467.8, "s", goal="<= 120", met=False),
        row("pause, p95 of 60", 1, "s", goal="<= 2", met=True),
        row("speed", 2, "x"),
    ]
    measure(frame, path, {"one": of(frame, *first)})
    again = [row("wall time of 3 runs", 500.0, "s"), row("pause, p95 of 59", 1, "s", goal="<= 2", met=True)]
    measure(frame, path, {"one": of(frame, *again)})
    rows = json.loads(path.read_text())["rows"]
    assert [(row["name"], row["value"], row["goal"], row["met"]) for row in rows] == [
        ("wall time of 3 runs", 500.0, None, None),
        ("pause, p95 of 59", 1, "<= 2", True),
        ("wall time of 3 runs", None, "<= 120", False),
    ]


def test_faults_of_all_parts_and_of_all_soaks_are_counted_together(
    frame: ModuleType, row: Callable[..., Any]
) -> None:
    soaks, injected = importlib.import_module("_soaks"), importlib.import_module("_injected")
    parts = [row(f"{injected.INJECTED}: hangs", 60, ""), row(f"{injected.INJECTED}: stuck", 120, "")]
    (found,) = injected.injected([*parts, row("torchrun: stall", 20, "s")])
    assert (found.value, found.goal, found.met) == (180, ">= 1000", False)
    report = soaks.Report(
        seed=1,
        faults=410,
        kinds={"kill": 410},
        held_back=(),
        steps=900,
        seconds=1.0,
        plans=1,
        fences=1,
        leaders=1,
        processes=1,
        apart=0.0,
        wrong=(),
        ended=(),
    )
    runs = [soaks.Run(commit="c", shape="", report=report)] * 2
    (found,) = injected.injected([*parts, *soaks.figures(runs)])
    assert (found.value, found.met) == (1000, True)

    never = soaks.msgspec.structs.replace(report, faults=0, wrong=("after 0 faults: no first step",))
    lost = soaks.msgspec.structs.replace(report, wrong=("step 3 is lost",))
    rows = {
        found.name: found.value
        for found in soaks.figures([soaks.Run(commit="c", shape="", report=r) for r in (report, never, lost)])
    }
    assert rows["soak: runs that ended before a first fault"] == 1, "it says nothing about faults, and is shown"
    assert rows["soak: steps and samples lost or counted twice, false findings, records that break a rule"] == 1


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


def test_a_benchmark_lists_its_stale_rows_and_measures_nothing(
    frame: ModuleType, row: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows() -> Iterator[Any]:
        yield row("a", 1, "")

    parts, path = {"one": frame.Part(rows, ("Makefile",))}, tmp_path / "x.json"
    measure(frame, path, parts)
    body = json.loads(path.read_text())
    body["rows"][0]["commit"] = "0123456789ab"
    path.write_text(json.dumps(body))
    parts["one"] = frame.Part(lambda: 1 / 0, ("Makefile",))
    assert frame.run("x", "", parts, frame.parser("", parts).parse_args(["--stale", "--out", str(path)])) == 0
    out = capsys.readouterr()
    expected = "x one: 1 row is stale: measured at 0123456789ab, which is no commit before this one"
    assert expected in out.out or "no git history here" in out.err


def committed(folder: Path) -> str:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "x")
    return git(folder, "rev-parse", "HEAD")[:12]


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
