"""`elasticd plan --explain`: what goes over links in a step and in a switch, for people and for programs."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from elasticd_planner.cost.model_profile import ExpertProfile, derive
from elasticd_planner.layout.explained_plan import explain_step
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.problem_files import convert, file_format, solve
from elasticd_planner.problem_files.shapes import shapes_of
from elasticd_planner.problem_files.times import entry_of
from elasticd_planner.spec.model import Units
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy
from elasticd_planner.value import Invalid
from rich.console import Console

from elasticd.cli import console, explanation
from elasticd.cli.app import elasticd
from elasticd.cli.batch import dealt, step_lengths
from tests.planner.test_shapes import LAYERS, SPEC, parameter, problem

LINKS = {"node": {"gb_per_s": 10, "latency_us": 5}, "network": {"gb_per_s": 1, "latency_us": 10}}
PROBLEM: dict[str, Any] = msgspec.to_builtins(problem()) | {
    "cluster": {
        "nodes": [{"name": name, "devices": 2, "memory_mib": 1000} for name in ("a0", "a1", "b0", "b1")],
        "links": LINKS,
        "levels": [{"name": "rack", "gb_per_s": 5, "latency_us": 7, "nodes": [["a0", "a1"], ["b0", "b1"]]}],
    },
    "pins": {"tp": 2, "dp": 2, "zero": 0, "recompute": False},
}


def run(*arguments: str, columns: int = 80) -> Result:
    return CliRunner().invoke(elasticd, ["plan", *arguments], env={"COLUMNS": str(columns)})


def written(path: Path, **changes: Any) -> str:
    given = {key: value for key, value in (PROBLEM | changes).items() if value is not None}
    path.write_text(json.dumps(given, default=str))
    return str(path)


def test_a_program_gets_every_operation(tmp_path: Path) -> None:
    path = written(tmp_path / "p.json")
    answer = json.loads(run(path, "--explain", "--json").output)
    given = file_format.load(Path(path).read_bytes())
    plan, (shapes,) = solve.solve(given).plan, shapes_of(given).values()
    assert plan is not None
    expected = explain_step(
        Layouts(shapes.spec, plan), convert.cluster_of(given), tokens=10, gradients=shapes.gradients
    )
    step = answer["explanation"]["step"]
    assert step["operations"] == json.loads(msgspec.json.encode(expected.operations))
    assert set(step["purposes"]) >= {"tensor parallelism", "gradients"}
    for purpose, sums in step["purposes"].items():
        own = [each for each in step["operations"] if each["purpose"] == purpose]
        for level, size in sums["bytes"].items():
            assert size == sum(each["bytes"].get(level, 0) for each in own)
        assert sums["seconds"] >= max(each["seconds"] for each in own)
    assert answer["explanation"]["parameters"] == "of the problem's bytes"
    assert "switch" not in answer["explanation"]
    assert "explanation" not in json.loads(run(path, "--json").output)


@pytest.mark.parametrize("columns", [80, 120])
def test_people_get_a_table_that_fits_their_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: int
) -> None:
    monkeypatch.setattr(console, "UnwrappedConsole", Console)  # as on a terminal, which has a width
    result = run(written(tmp_path / "p.json"), "--explain", columns=columns)
    assert result.exit_code == 0, result.output
    _, _, table = result.output.partition("one step")
    assert max(map(len, table.splitlines())) <= columns
    assert "…" not in table
    assert "racks" in table
    assert re.search(r"\d x all-reduce a0/0-1 +\d+ x ", table)
    assert "in all" in table
    assert "Name the model" in table.replace("\n", " ")


def test_a_profile_brings_the_models_own_parameters(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_bytes(msgspec.json.encode({"type": "profile", "version": 1, "model": {}, "spec": SPEC}))
    result = run(written(tmp_path / "p.json"), "--explain", "--model", str(profile))
    assert result.exit_code == 0, result.output
    assert "Name the model" not in result.output
    answer = json.loads(run(str(tmp_path / "p.json"), "--explain", "--json", "--model", str(profile)).output)
    assert answer["explanation"]["parameters"] == "of the model"


LANES = Stage(start=0, stop=LAYERS, devices=("a0/0", "a0/1", "b0/0"), shares=(1, 1, 1), lanes=(1, 1, 1))


def test_keys_of_cut_sequences_are_listed_with_the_lengths_of_a_step() -> None:
    given = file_format.load(json.dumps(PROBLEM, default=str).encode())
    module = ModulePlan(module="model", pipelines=(Pipeline(stages=(LANES,), micro_batches=4, rows=(2, 1, 1)),))
    plan = Plan(number=1, strategies=(Strategy(modules=(module,)),), micro_batch=1, global_batch=4)
    batch = dealt(plan, step_lengths(b'{"lengths": [900, 40, 33, 20], "tokens": 400, "least": 8}', "-"))
    found = explanation.explained(given, plan, None, {"model": SPEC}, batch)
    answer = explanation.explanation_of(found)
    keys = answer["step"]["purposes"]["keys of cut sequences"]
    assert sum(keys["bytes"].values()) > 3 * LAYERS * 900 * 2 * 16 * 2, "forth, again, and their gradients back"
    assert keys["seconds"] > 0
    assert answer["communicators"] == dict.fromkeys(LANES.devices, 2), "for keys and for gradients"
    assert "keys of cut sequences" in told(found)
    assert "--batch" not in told(found)
    for model, rows in (({"model": SPEC}, None), (None, batch)):
        assert "name the lengths of a step with --batch" in told(
            explanation.explained(given, plan, None, model, rows)
        )


def test_rows_that_go_to_experts_of_other_lanes_are_listed_where_it_is_known_how_many_a_row_has() -> None:
    given = file_format.load(json.dumps(PROBLEM, default=str).encode())
    held = ((0, 1, 2, 7), (0, 3, 4), (5, 6, 7))
    stage = Stage(
        start=0,
        stop=LAYERS,
        devices=LANES.devices,
        shares=LANES.shares,
        lanes=LANES.lanes,
        experts=(held,) * LAYERS,
    )
    module = ModulePlan(module="model", pipelines=(Pipeline(stages=(stage,), micro_batches=4, rows=(2, 1, 1)),))
    plan = Plan(number=1, strategies=(Strategy(modules=(module,)),), micro_batch=1, global_batch=4)
    with pytest.raises(Invalid, match="the problem says bytes alone: name the model with --model"):
        explanation.explained(given, plan, None, None)
    stacked = parameter("experts.up", 8, 16, 32, cut=(0, "experts"), replicas="add", experts=True)
    kinds, units = ((*SPEC.kinds[0], stacked),), (*SPEC.units, Units(kind="experts", count=8))
    spec = msgspec.structs.replace(SPEC, kinds=kinds, units=units)
    entry = msgspec.convert(entry_of(derive(spec, 10, 1)), type=file_format.ModelEntry, str_keys=True)
    given, model = msgspec.structs.replace(given, model=entry), {"model": spec}
    assert "What goes to those of other lanes is not listed" in told(
        explanation.explained(given, plan, None, model)
    )
    assert given.model.times is not None
    times = msgspec.structs.replace(given.model.times, experts=ExpertProfile(part=0.5, chosen=2, count=8))
    knows = msgspec.structs.replace(given, model=msgspec.structs.replace(given.model, times=times))
    found = explanation.explained(knows, plan, None, model)
    purposes = explanation.explanation_of(found)["step"]["purposes"]
    rows, gradients = (purposes[name]["bytes"] for name in ("expert rows", "expert gradients"))
    assert rows.keys() == gradients.keys()
    assert len(rows) > 1, "of several levels of links"
    assert "expert rows" in told(found)
    assert "not listed: give the problem" not in told(found)


def told(found: explanation.Explained) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(explanation.shown(found))
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_the_switch_is_listed_with_the_least_that_any_could_move(tmp_path: Path) -> None:
    path = written(tmp_path / "p.json")
    (tmp_path / "old.json").write_text(run(path, "--json").output)
    current = ("--explain", "--current", str(tmp_path / "old.json"))
    stays = json.loads(run(path, "--json", *current).output)["explanation"]["switch"]
    assert (stays["moved"], stays["seconds"], stays["operations"]) == (0, 0.0, [])
    slower = written(tmp_path / "q.json", rates={"b1/0": None})
    moved = json.loads(run(slower, "--json", *current).output)["explanation"]["switch"]
    assert moved["moved"] == moved["least"] > 0
    assert moved["moved"] == sum(each["size"] for each in moved["operations"])
    assert {each["purpose"] for each in moved["operations"]} == {"parameters", "optimizer state"}
    assert "b1/0" not in {each["devices"][0] for each in moved["operations"]}, "it is dead"
    assert moved["seconds"] > 0
    shown = run(slower, *current).output
    assert "switch from the current plan" in shown
    assert "at least; the whole state is" in " ".join(shown.split())


def test_a_state_that_nobody_holds_any_more_is_no_switch(tmp_path: Path) -> None:
    one = written(tmp_path / "p.json", pins={"tp": 2, "dp": 1, "zero": 0, "recompute": False})
    (tmp_path / "old.json").write_text(run(one, "--json").output)
    gone = written(tmp_path / "q.json", rates={"b0/0": None, "b0/1": None})
    result = run(gone, "--explain", "--current", str(tmp_path / "old.json"))
    assert result.exit_code == 0, result.output
    assert "go back to a snapshot or a checkpoint" in " ".join(result.output.split())


UNITS = {
    "cluster": {"nodes": [{"name": "n0", "devices": 2, "memory_mib": 1000}]},
    "model": {"name": "m", "layers": 4, "tp_full": 2, "tp_slowdown": {"2": 1.0}},
    "batch": {"global_batch": 4},
    "pins": {},
}


@pytest.mark.parametrize(
    ("arguments", "changes", "said"),
    [
        (("--explain",), UNITS, "this one is in units, which know neither bytes nor links"),
        (("--model", "x.json"), {}, "--model goes with --explain"),
        (("--explain", "--model", "x.json"), {}, "cannot read x.json"),
        (("--explain", "--model", "PROBLEM"), {}, "has no model: name a profile"),
        (("--explain", "--model", "x.py:model"), {}, "there is no file x.py"),
    ],
)
def test_what_cannot_be_listed_is_one_message(
    tmp_path: Path, arguments: tuple[str, ...], changes: dict[str, Any], said: str
) -> None:
    path = written(tmp_path / "p.json", **changes)
    result = run(path, *(path if each == "PROBLEM" else each for each in arguments))
    assert result.exit_code in (1, 2)
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_it_goes_with_a_problem() -> None:
    assert "--explain goes with a problem: name the file of one" in run("--explain").output


MODULES = Path(__file__).parents[2] / "examples/problems/vision_language.json"


def test_what_goes_over_links_is_listed_by_module_and_between_modules(tmp_path: Path) -> None:
    given = json.loads(MODULES.read_text())
    result = run(str(MODULES), "--explain", columns=120)
    assert result.exit_code == 0, result.output
    for head in ("one step, module vision", "one step, module language", "one step, between modules"):
        assert head in result.output
    (tmp_path / "slow.json").write_text(json.dumps(given | {"rates": {"n0/1": 3.0}}))
    (tmp_path / "old.json").write_text(run(str(MODULES), "--json").output)
    options = ("--current", str(tmp_path / "old.json"), "--explain", "--json")
    answer = json.loads(run(str(tmp_path / "slow.json"), *options).output)
    step = answer["explanation"]["step"]
    assert set(step) == {"vision", "language", "between modules"}
    assert set(step["between modules"]["purposes"]) == {"items", "item gradients"}
    assert answer["explanation"]["switch"]["moved"] == pytest.approx(answer["current"]["moved_bytes"], rel=0.1)


def test_a_module_that_is_not_trained_sends_no_gradient(tmp_path: Path) -> None:
    given = json.loads(MODULES.read_text())
    given["modules"][0]["trained"] = False
    (tmp_path / "frozen.json").write_text(json.dumps(given))
    step = json.loads(run(str(tmp_path / "frozen.json"), "--explain", "--json").output)["explanation"]["step"]
    assert not any("gradient" in purpose for purpose in step["vision"]["purposes"])
    assert "item gradients" not in step["between modules"]["purposes"]


def test_a_model_with_other_modules_than_the_problem_is_refused(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_bytes(msgspec.json.encode({"type": "profile", "version": 1, "model": {}, "spec": SPEC}))
    result = run(str(MODULES), "--explain", "--model", str(profile))
    assert result.exit_code == 1
    assert "name the model that the problem is of with --model" in " ".join(result.output.split())
