"""What moves between two answers, in layers and bytes; and plans that stay close to the current one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from elasticd_planner.placement.state_movement import Held
from elasticd_planner.problem_files import file_format
from elasticd_planner.problem_files.file_format import Figures, Planned
from elasticd_planner.value import Invalid

from elasticd.cli.app import elasticd
from elasticd.cli.moves import answered, differences, lacking
from tests.releases.samples import MESH_PLAN

GIB = 2**30
FIGURES = Figures(steady=1.0, step=1.0, bound=1.0, gap=0.0, ideal=1.0)
MEMORY = {"layer_mib_by_stage": [1500.0, 1024.0], "embedding_mib": 256.0}
PROBLEM: dict[str, Any] = {
    "cluster": {"nodes": [{"name": f"n{i}", "devices": 4, "memory_mib": 80000} for i in range(3)]},
    "model": {
        "name": "m",
        "layers": 24,
        "tp_full": 4,
        "tp_slowdown": {"4": 1.0, "2": 2.1, "1": 4.3},
        "memory": MEMORY,
    },
    "batch": {"global_batch": 32, "micro_batch": 1},
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(elasticd, ["plan", *arguments], env={"COLUMNS": "120"})


def problem(path: Path, **changes: Any) -> str:
    path.write_text(json.dumps({**PROBLEM, **changes}))
    return str(path)


def answer(path: Path, *options: str, **changes: Any) -> str:
    result = run(problem(path.with_suffix(".problem"), **changes), "--json", *options)
    assert result.exit_code == 0, result.output
    path.write_text(result.output)
    return str(path)


def held(start: int, stop: int, low: int, high: int) -> Held:
    return Held(start=start, stop=stop, low=low, high=high, embed=False, head=False)


def test_the_plan_of_a_mesh_is_refused_with_where_it_is_explained() -> None:
    with pytest.raises(Invalid, match=r"job j trains a loop of its own on a mesh \(replicate=1, shard=2\)"):
        answered(msgspec.json.encode({"j": MESH_PLAN}), "a.json")


def test_what_a_device_lacks_is_counted_in_layers() -> None:
    assert lacking(None, held(0, 10, 0, 4), 8) == 5.0
    assert lacking(held(0, 10, 0, 4), held(0, 10, 0, 4), 8) == 0.0
    assert lacking(held(0, 10, 0, 4), held(5, 15, 0, 4), 8) == 2.5
    assert lacking(held(0, 10, 0, 4), held(0, 10, 2, 6), 8) == 2.5
    assert lacking(held(0, 5, 0, 4), held(5, 10, 0, 4), 8) == 2.5


def test_the_answer_says_what_layers_weigh_and_the_difference_counts_it(tmp_path: Path) -> None:
    old = answer(tmp_path / "old")
    new = answer(tmp_path / "new", rates={"n0/1": 3.0})
    weighs = json.loads(Path(old).read_text())["state_bytes"]
    assert weighs["layer"]["cut"] == 4 * 1024 * 2**20
    assert (weighs["embedding"]["cut"], weighs["head"]["cut"]) == (GIB, GIB)
    text = " ".join(run("--diff", old, new).output.split())
    assert "device before after layers GiB" in text
    assert "GiB (memory of a last stage)" in text
    same = run("--diff", old, old).output
    assert "0.00 of 72 layers" in same
    assert "n0/1" not in same


def test_without_weights_the_difference_is_in_layers_alone(tmp_path: Path) -> None:
    model = {key: value for key, value in PROBLEM["model"].items() if key != "memory"}
    old = answer(tmp_path / "old", model=model)
    new = answer(tmp_path / "new", model=model, rates={"n0/1": 3.0})
    output = run("--diff", old, new).output
    assert "layers that" in output
    assert "GiB" not in output


def test_a_plan_stays_where_it_is_when_nothing_changed(tmp_path: Path) -> None:
    old = answer(tmp_path / "old", rates={"n0/1": 3.0})
    near = json.loads(Path(answer(tmp_path / "new", "--current", old, rates={"n0/1": 3.0})).read_text())
    assert near["current"]["moved_bytes"] == 0
    assert near["plan"]["modules"] == json.loads(Path(old).read_text())["plan"]["modules"]


def test_a_plan_near_the_current_one_moves_less_and_is_hardly_slower(tmp_path: Path) -> None:
    old = answer(tmp_path / "old", rates={"n0/1": 3.0})
    free = json.loads(Path(answer(tmp_path / "free", rates={"n2/3": 3.0})).read_text())
    near = json.loads(Path(answer(tmp_path / "near", "--current", old, rates={"n2/3": 3.0})).read_text())
    assert near["figures"]["step"] <= free["figures"]["step"] * 1.006
    assert near["current"]["value"] > near["figures"]["step"]
    moved = near["current"]["moved_bytes"]
    shown = run("--diff", old, str(tmp_path / "near")).output
    assert f"{moved / GIB:,.2f} of" in shown, "counted alike"


def lengthened(**state: Any) -> dict[str, Any]:
    """The same model in seconds, with parameters that every member of a group holds, and a tied head."""
    return {
        "name": "m",
        "layers": 24,
        "units": 32,
        "uneven_shares": True,
        "times": {"block": {"seconds_per_token": 1e-5, "collectives": 4}, "boundary_bytes": 8192},
        "state": {
            "block": {"cut_bytes": 6 * GIB // 10, "grouped_bytes": GIB // 20, "whole_bytes": GIB // 10},
            "embed": {"cut_bytes": GIB},
            "head": {"cut_bytes": GIB, "whole_bytes": 4096},
            "tied_bytes": GIB,
            "optimizer": 6.0,
            **state,
        },
    }


IN_SECONDS = {"model": lengthened(), "batch": {"global_batch": 32, "micro_batch": 1, "sequence": 4096}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"model": {**PROBLEM["model"], "uneven_shares": True}}, marks=pytest.mark.full),
        pytest.param({**IN_SECONDS, "pins": {"zero": 0}}, marks=pytest.mark.full),
        pytest.param({**IN_SECONDS, "pins": {"zero": 1, "replicas": 1}}, marks=pytest.mark.full),
        pytest.param({**IN_SECONDS, "pins": {"zero": 2, "replicas": 2}}, marks=pytest.mark.full),
        {**IN_SECONDS, "pins": {"dp": 1, "zero": 1, "replicas": 2}},
    ],
)
def test_the_difference_and_the_plan_near_the_current_one_say_the_same_bytes(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    old = answer(tmp_path / "old", **changes, rates={"n0/1": 3.0})
    near = answer(tmp_path / "near", "--current", old, **changes, rates={"n2/3": 3.0})
    moved = json.loads(Path(near).read_text())["current"]["moved_bytes"]
    assert moved > 0
    (found,) = differences(*(answered(Path(path).read_bytes(), path) for path in (old, near)))
    assert found.moved == moved
    assert f"{moved / GIB:,.2f} of" in run("--diff", old, near).output
    told = json.loads(run("--diff", old, near, "--json").output)
    assert told["bytes"] == found.moved == sum(device["bytes"] for device in told["devices"].values())


def test_devices_that_only_carry_state_are_in_the_answer_and_in_the_difference(tmp_path: Path) -> None:
    fast = {"name": "n0", "devices": 4, "memory_mib": 300000}
    nodes = [fast, {**fast, "name": "n1", "speed": 0.01}]
    changes = {**IN_SECONDS, "cluster": {"nodes": nodes}}
    old = answer(tmp_path / "old", **changes, pins={"dp": 1, "zero": 0})
    new = answer(tmp_path / "new", **changes, pins={"dp": 1, "zero": 1, "replicas": 2})
    carriers = json.loads(Path(new).read_text())["plan"]["carriers"]
    assert carriers
    assert answered(Path(new).read_bytes(), new).plan.carriers == tuple(carriers)
    rows = [line.split() for line in run("--diff", old, new).output.splitlines()]
    fetched = {row[0]: row[1:-2] for row in rows if row and row[0] in carriers}
    assert fetched == {name: ["idle", "state", "alone"] for name in carriers}


def test_a_current_plan_that_lost_a_device_cannot_run(tmp_path: Path) -> None:
    old = answer(tmp_path / "old")
    result = run(problem(tmp_path / "p", rates={"n0/1": None}), "--current", old)
    assert result.exit_code == 0, result.output
    assert "it cannot run any more" in result.output


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {**PROBLEM["model"], "layers": 30}}, "the current plan has 24 layers, the problem 30"),
        ({"batch": {"global_batch": 64, "micro_batch": 1}}, "for a global batch of 32, the problem for 64"),
    ],
)
def test_a_current_plan_of_another_problem_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    old = answer(tmp_path / "old")
    result = run(problem(tmp_path / "p", **changes), "--current", old)
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())


def test_current_needs_a_problem(tmp_path: Path) -> None:
    result = run("--current", answer(tmp_path / "old"))
    assert result.exit_code == 2
    assert "goes with a problem" in result.output


MODULES = Path(__file__).parents[2] / "examples/problems/vision_language.json"


def of_modules(path: Path, *options: str, **changes: Any) -> str:
    """The answer to the example of a vision-language model."""
    given = {**json.loads(MODULES.read_text()), **changes}
    path.with_suffix(".problem").write_text(json.dumps(given))
    result = run(str(path.with_suffix(".problem")), "--json", *options)
    assert result.exit_code == 0, result.output
    path.write_text(result.output)
    return str(path)


def test_what_moves_of_several_modules_is_told_by_module_and_a_devices_parts_together(tmp_path: Path) -> None:
    old = of_modules(tmp_path / "old")
    near = of_modules(tmp_path / "near", "--current", old, rates={"n0/1": 3.0})
    told = json.loads(run("--diff", old, near, "--json").output)
    moved = json.loads(Path(near).read_text())["current"]["moved_bytes"]
    assert moved > 0
    assert told["bytes"] == moved == sum(module["bytes"] for module in told["modules"].values())
    assert sorted(told["modules"]) == ["language", "vision"]
    lines = [line.split() for line in run("--diff", old, near).output.splitlines()]
    totals = [line[3] for line in lines if line[:3] == ["in", "all", "of"]]
    assert totals == ["vision", "language"]
    named = [line[0] for line in lines if line and line[0].startswith("n")]
    assert len(named) == len(set(named)), "a device's parts stand together"
    assert "0.00 of" in run("--diff", old, old).output


def test_plans_of_different_modules_are_not_compared(tmp_path: Path) -> None:
    old, other = of_modules(tmp_path / "old"), answer(tmp_path / "other")
    result = run("--diff", old, other)
    assert result.exit_code == 1
    assert "different modules: language, vision, and model" in " ".join(result.output.split())


def test_an_answer_says_which_experts_a_device_has(tmp_path: Path) -> None:
    """Without them a plan that is read back would have others."""
    path = Path(answer(tmp_path / "a"))
    given = json.loads(path.read_text())
    stage = given["plan"]["modules"][0]["pipelines"][0]["stages"][0]
    devices, (start, stop) = len(stage["devices"]), stage["layers"]
    stage["experts"] = [[[1, 2], *[[0, 1]] * (devices - 1)]] * (stop - start)
    stage["splits"] = [[[1, 3, *[1] * (devices - 1)]]] * (stop - start)
    path.write_text(json.dumps(given))
    plan = answered(path.read_bytes(), "a").plan
    assert plan.pipelines[0].stages[0].experts_of(start)[0] == (1, 2)
    found = file_format.answer(Planned(plan=plan, figures=FIGURES), 0.0)["plan"]["modules"]
    written = json.loads(json.dumps(found[0]["pipelines"][0]["stages"][0]))
    assert (written["experts"], written["splits"]) == (stage["experts"], stage["splits"])


def test_an_answer_says_which_pipelines_a_lane_of_items_serves(tmp_path: Path) -> None:
    """Without it a plan that is read back would deal images to lanes that may not take them."""
    path = Path(of_modules(tmp_path / "a"))
    given = json.loads(path.read_text())
    (vision,) = [module for module in given["plan"]["modules"] if module.get("items")]
    for pipeline in vision["pipelines"]:
        pipeline["serves"] = [0]
    path.write_text(json.dumps(given))
    plan = answered(path.read_bytes(), "a").plan
    assert {lane.serves for lane in plan.view("vision").pipelines} == {(0,)}
    found = file_format.answer(Planned(plan=plan, figures=FIGURES), 0.0)["plan"]["modules"]
    assert all(lane["serves"] == [0] for lane in next(m for m in found if m.get("items"))["pipelines"])
