"""A long benchmark's parts: written one by one, each beside what was measured of the others."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = ("one", "two", "three")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_parts")


@pytest.fixture
def row(module: ModuleType) -> Callable[..., Any]:
    return importlib.import_module("_results").row  # type: ignore[no-any-return]


def written(path: Path) -> list[tuple[str, object]]:
    return [(row["name"], row["value"]) for row in json.loads(path.read_text())["rows"]]


def test_parts_are_written_in_their_order_as_soon_as_each_was_measured(
    module: ModuleType, row: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "long.json"
    parts = module.Parts(path, NAMES)
    parts.put("three", [row("c", 3, "")], 2.0, 60)
    assert written(path) == [("c", 3)]
    parts.put("one", [row("a", 1, ""), row("b", 2, "")], 1.0, 60)
    assert written(path) == [("a", 1), ("b", 2), ("c", 3)]
    file = json.loads(path.read_text())
    assert [(part["part"], part["rows"], part["injections"]) for part in file["parts"]] == [
        ("one", 2, 60),
        ("three", 1, 60),
    ]
    assert file["name"] == "long"
    assert file["machine"]["cores"] >= 1


def test_a_part_that_is_measured_again_takes_the_place_of_its_own_rows_alone(
    module: ModuleType, row: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "long.json"
    before = module.Parts(path, NAMES)
    before.put("one", [row("a", 1, ""), row("b", 2, "")], 1.0, 60)
    before.put("two", [row("c", 3, "")], 1.0, 60)
    again = module.Parts(path, NAMES)
    again.put("one", [row("a", 9, "")], 5.0, 80)
    assert written(path) == [("a", 9), ("c", 3)]
    assert dict(module.Parts(path, NAMES).seconds) == {"one": 5.0, "two": 1.0}


def test_a_goal_that_a_part_has_no_row_for_stays_and_is_missed(
    module: ModuleType, row: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "long.json"
    module.Parts(path, NAMES).put("one", [row("a", 1, "", goal="<= 2", met=True)], 1.0, 60)
    rows = module.Parts(path, NAMES).put("one", [row("b", 2, "")], 1.0, 60)
    assert [(each.name, each.value, each.met) for each in rows] == [("b", 2, None), ("a", None, False)]
    assert written(path) == [("b", 2), ("a", None)]
    assert module.Parts(path, NAMES).injections == {"one": 60}


def test_faults_of_all_kept_parts_and_of_all_soaks_are_counted_together(
    module: ModuleType, row: Callable[..., Any], tmp_path: Path
) -> None:
    soaks, injected = importlib.import_module("_soaks"), importlib.import_module("_injected")
    path, names = tmp_path / "faults.json", (*injected.KINDS, "soaks", "torchrun", "all")
    for part, count in (("hangs", 60), ("stuck", 60), ("torchrun", 20)):
        module.Parts(path, names).put(part, [row(part, 1, "")], 1.0, count)
    (found,) = injected.injected(module.Parts(path, names))
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
    module.Parts(path, names).put("soaks", list(soaks.figures(runs)), 1.0, 60)
    (found,) = injected.injected(module.Parts(path, names))
    assert (found.value, found.met) == (1000, True)

    never = soaks.msgspec.structs.replace(report, faults=0, wrong=("after 0 faults: no first step",))
    lost = soaks.msgspec.structs.replace(report, wrong=("step 3 is lost",))
    rows = {
        found.name: found.value
        for found in soaks.figures([soaks.Run(commit="c", shape="", report=r) for r in (report, never, lost)])
    }
    assert rows["soak: runs that ended before a first fault"] == 1, "it says nothing about faults, and is shown"
    assert rows["soak: steps and samples lost or counted twice, false findings, records that break a rule"] == 1


def test_a_part_that_is_no_more_is_dropped(module: ModuleType, row: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "long.json"
    module.Parts(path, ("gone", "one")).put("gone", [row("a", 1, "")], 1.0, 60)
    module.Parts(path, ("one",)).put("one", [row("b", 2, "")], 1.0, 60)
    assert written(path) == [("b", 2)]
