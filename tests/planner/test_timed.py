"""Problems in seconds: what is read and refused, a profile there and back, the example that is answered."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from elasticd_planner.cost.memory import memory_by_device
from elasticd_planner.cost.model_profile import ModelProfile, derive
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.problem_files.convert import problem_of, task_of
from elasticd_planner.problem_files.file_format import answer, load
from elasticd_planner.problem_files.solve import figures, solve
from elasticd_planner.problem_files.times import TimedModel, entry_of, profile_of
from elasticd_planner.search import options
from elasticd_planner.search.large import LargeSearch
from elasticd_planner.spec.cluster import Link, node_of
from elasticd_planner.spec.plan import StatePolicy
from elasticd_planner.value import Invalid

from tests import sizes
from tests.planner.models import SPEC

EXAMPLE = Path(__file__).parents[2] / "examples" / "problems" / "mixed.json"


def changed(*changes: tuple[str, Any]) -> str:
    """The example with keys set, or taken away (None)."""
    text = json.loads(EXAMPLE.read_text())
    for path, value in changes:
        *parents, last = path.split(".")
        at: Any = text
        for name in parents:
            at = at[int(name)] if isinstance(at, list) else at.setdefault(name, {})
        if value is None:
            del at[last]
        else:
            at[last] = value
    return json.dumps(text)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model.times.block.seconds_per_token", 0, ["model.times: block.seconds_per_token 0"]),
        ("model.times.block.tp_slowdown", {"0": 1.0}, ["model.times.block", "tp_slowdown.0"]),
        ("model.times.block.tp_slowdown", {"64": 1.0}, ["tp_slowdown.64", "40 units"]),
        ("model.times.forward", 1.5, ["model.times", "forward 1.5"]),
        ("model.times.colour", 1, ["model.times", "colour"]),
        ("model.state.optimizer", -1, ["model.state", "optimizer -1"]),
        ("model.state.block.cut_bytes", "x", ["model.state.block.cut_bytes", "'x'"]),
        ("model.recompute.slowdown", 0.5, ["model.recompute", "slowdown 0.5"]),
        ("model.tp_slowdown", {"1": 1.0}, ["tp_slowdown", "does not go with times"]),
        ("model.groups", 99, ["groups 99", "40 units"]),
        ("model.times", None, ["goes with times, which is missing"]),
        ("model.state", None, []),
        ("batch.sequence", None, ["batch.sequence is missing"]),
        ("batch.sequence", 0, ["batch", "sequence 0"]),
        ("cluster.links.node.gb_per_s", 0, ["cluster.links.node", "gb_per_s 0"]),
        ("cluster.links.rail", {}, ["cluster.links", "rail"]),
        ("cluster.nodes.0.island", 9, ["cluster.nodes[0]", "island 9", "8 devices"]),
        ("pins.zero", 3, ["pins", "zero 3"]),
        ("pins.replicas", 0, ["pins", "replicas 0"]),
        ("pins.tp", 3, ["pins.tp 3", "[1, 2, 4, 8]"]),
    ],
)
def test_what_is_wrong_is_named_with_key_and_value(path: str, value: Any, words: list[str]) -> None:
    if not words:
        assert load(changed((path, value))).model.state is None
        return
    with pytest.raises(Invalid) as caught:
        load(changed((path, value)))
    for word in words:
        assert word in str(caught.value)


def test_pins_need_what_they_are_about() -> None:
    with pytest.raises(Invalid, match=r"pins\.zero 1 needs model\.state"):
        load(changed(("model.state", None), ("pins.zero", 1)))
    with pytest.raises(Invalid, match=r"pins\.recompute true needs model\.recompute"):
        load(changed(("model.recompute", None), ("pins.recompute", True)))
    with pytest.raises(Invalid, match=r'sequence_parallel "plan" needs model\.state'):
        load(changed(("model.state", None), ("pins.sequence_parallel", "plan")))
    with pytest.raises(Invalid, match=r"pins\.sequence_parallel: .*'always'"):
        load(changed(("pins.sequence_parallel", "always")))
    with pytest.raises(Invalid, match="replicas 2 go with zero 1 or 2"):
        load(changed(("pins.zero", 0), ("pins.replicas", 2)))


def test_what_only_problems_in_seconds_have_is_refused_in_units() -> None:
    units = {
        "cluster": {"nodes": [{"name": "n0", "devices": 2, "memory_mib": 1000}]},
        "model": {"name": "m", "layers": 2, "tp_full": 1, "tp_slowdown": {"1": 1.0}},
        "batch": {"global_batch": 2},
    }
    for path, value in [
        (("cluster", "links"), {}),
        (("batch", "sequence"), 10),
        (("pins", "zero"), 1),
        (("pins", "sequence_parallel"), True),
        (("model", "recompute"), {"kept_activation": 1}),
    ]:
        text = json.loads(json.dumps(units))
        text.setdefault(path[0], {})[path[1]] = value
        with pytest.raises(Invalid, match=r"goes? with (model\.)?times"):
            load(json.dumps(text))
    text = json.loads(json.dumps(units))
    text["cluster"]["nodes"][0]["island"] = 2
    with pytest.raises(Invalid, match=r"island goes with model\.times"):
        load(json.dumps(text))


def test_links_islands_and_the_search_space_are_read() -> None:
    problem = problem_of(load(EXAMPLE.read_text()))
    cluster = problem.cluster
    assert cluster.reach(["b0/0", "b0/3"]) == Link(bandwidth=250e9, latency=4e-6)
    assert cluster.reach(["b0/3", "b0/4"]) == Link(bandwidth=25e9, latency=8e-6)
    assert cluster.reach(["b1/3", "b1/4"]) == Link(bandwidth=12e9, latency=12e-6)
    assert cluster.reach(["b0/0", "b1/0"]) == Link(bandwidth=12.5e9, latency=15e-6)
    assert problem.rates["b0/0"] == 2.0
    assert problem.rates["a1/3"] == 2.57
    assert problem.search_space.micro_batches == (1, 2, 4, 8, 16, 32, 64)
    assert StatePolicy() in problem.search_space.states
    assert StatePolicy(zero=1, replicas=1) in problem.search_space.states
    assert not any(state.zero == 2 for state in problem.search_space.states), "it costs what zero 1 does"
    assert problem.search_space.recompute is True
    pinned = problem_of(
        load(changed(("pins", {"zero": 1, "replicas": 2, "recompute": False}), ("batch.micro_batch", 2)))
    )
    assert pinned.search_space.states == (StatePolicy(zero=1, replicas=2),)
    assert pinned.search_space.micro_batches == (2,)
    assert pinned.search_space.recompute is False
    assert pinned.profile.tokens == 2 * 4096


def test_a_profile_goes_to_its_entry_and_back() -> None:
    base = derive(SPEC, sample_tokens=16, micro_batch=2)
    model = msgspec.structs.replace(
        base,
        block=msgspec.structs.replace(base.block, fixed_seconds=1e-3, slowdown={1: 1.0, 2: 1.1}),
        collective_seconds={2: 1e-4},
        collective_token_seconds={2: 1e-7},
        optimizer_seconds=1e-11,
        widths=(1, 2),
        fitted=True,
    )
    entry = json.loads(json.dumps(entry_of(model)))
    again = _profile(entry, model.tokens)
    assert again.block == model.block
    assert entry_of(again) == entry_of(model)
    for width in (1, 2, 3):
        assert again.head.factor(width) == model.head.factor(width) == 1.0
    # Where a fit knows a collective at one size alone, it grows with the tokens.
    known = msgspec.structs.replace(base, collective_seconds={2: 0.032})
    assert entry_of(known)["times"]["collectives"] == {"2": {"seconds": 0.0, "seconds_per_token": 0.001}}
    with pytest.raises(Invalid, match="no key"):
        entry_of(msgspec.structs.replace(base, pipeline_scale=0.9))


def _profile(entry: dict[str, Any], tokens: float) -> ModelProfile:
    return profile_of(msgspec.convert(entry, TimedModel, str_keys=True), tokens)


def test_the_example_is_answered_in_seconds() -> None:
    given = load(changed(("batch.global_batch", sizes.number(full=64, quick=16))))
    planned = solve(given, ideal=False)
    assert planned.plan is not None
    assert planned.figures is not None
    task = task_of(given, "step", planned.plan)
    room = task.cluster.memory
    assert all(size <= room[name] for name, size in memory_by_device(planned.plan, task.cost).items())
    assert figures(planned.plan, task)[1] == pytest.approx(planned.figures.step)
    assert 0 < planned.figures.bound <= planned.figures.step
    said = answer(planned, 0.1)
    assert said["unit"] == "seconds"
    assert said["plan"]["state"] == {"zero": planned.plan.state.zero, "replicas": planned.plan.state.replicas}
    for module in said["plan"]["modules"]:
        for pipeline in module["pipelines"]:
            for stage in pipeline["stages"]:
                assert len({node_of(name) for name in stage["devices"]}) == 1


def test_what_never_fits_is_refused_with_the_shortfall() -> None:
    nodes = [{"name": "a0", "devices": 2, "memory_mib": 20000}]
    planned = solve(load(changed(("cluster.nodes", nodes), ("rates", {}))), ideal=False)
    assert planned.plan is None
    assert "does not fit" in planned.refusal
    assert "GiB more on a0/" in planned.refusal
    assert "recomputation" in planned.refusal


def test_both_objectives_are_planned_for() -> None:
    nodes = [{"name": "a0", "devices": 4, "memory_mib": 81252, "island": 2}]
    text = changed(("cluster.nodes", nodes), ("rates", {"a0/1": 2.0}), ("batch.global_batch", 8))
    step, steady = (solve(load(text), objective, ideal=False) for objective in ("step", "steady"))  # type: ignore[arg-type]
    assert step.figures is not None
    assert steady.figures is not None
    assert steady.figures.steady <= step.figures.steady * (1 + 1e-9)
    assert step.figures.step <= steady.figures.step * (1 + 1e-9)
    assert steady.figures.bound <= steady.figures.steady * (1 + 1e-9)


def test_measured_collectives_need_no_bytes_between_stages() -> None:
    """What a slower link takes is then its latency, or what was measured on the near one."""
    times = {"2": {"seconds": 1e-5}}
    given = load(changed(("model.times.boundary_bytes", None), ("model.times.collectives", times)))
    near, far = Link(bandwidth=1e11, latency=0.0), Link(bandwidth=1e9, latency=0.0)
    cost = ProfileCost(problem_of(given).profile, near=near)
    assert cost.collective(2, near) == cost.collective(2, far) == 1e-5
    assert cost.collective(2, Link(bandwidth=1e9, latency=1e-4)) == pytest.approx(2e-4)


def test_a_plan_with_more_pipelines_than_there_are_micro_batches_is_no_pattern() -> None:
    """Of one setting's plan the form is tried under another, with larger micro-batches."""
    given = problem_of(load(changed(("batch.global_batch", 1), ("batch.micro_batch", 1))))
    found = LargeSearch(options.task_of(given)).run((2, 8), brief=True)
    assert found is not None
    assert len(found.pipelines) == 1
