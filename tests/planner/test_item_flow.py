"""The pipelines that lanes of items serve: their own, then those that are cheapest to send items to."""

from __future__ import annotations

import sys

import msgspec
import pytest
from elasticd_planner.cost.schedule import passes
from elasticd_planner.layout.module_order import module_order
from elasticd_planner.problem import SearchSpace
from elasticd_planner.search.item_flow import components, serving
from elasticd_planner.search.module_cost import ModuleCosts
from elasticd_planner.search.modules import with_pair
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.batch import batch_plan
from elasticd_planner.spec.cluster import Link
from elasticd_planner.spec.item_batch import item_batch
from elasticd_planner.spec.plan import Edge, ModulePlan, Pipeline, Plan, Stage, Strategy
from elasticd_planner.value import Invalid

from tests.planner.drawn_module_problems import GIB, LOSS, cluster_of, drawn_problem

CLUSTER = cluster_of(2, 4)


def lane(device: str, weight: int = 1, layers: int = 2) -> Pipeline:
    stage = Stage(start=0, stop=layers, devices=(device,), shares=(1,), microseconds=(100, 200))
    return Pipeline(stages=(stage,), micro_batches=weight)


def planned(encoders: dict[str, int], languages: dict[str, int]) -> Plan:
    """One device in each pipeline of the language model, and in each lane of the encoder."""
    vision = ModulePlan(
        module="vision", pipelines=tuple(lane(d, n) for d, n in encoders.items()), items="images", ahead=2
    )
    language = ModulePlan(module=LOSS, pipelines=tuple(lane(d, n) for d, n in languages.items()))
    strategy = Strategy(modules=(vision, language), edges=(Edge(source="vision", target=LOSS),))
    return Plan(number=1, strategies=(strategy,), micro_batch=1, global_batch=sum(languages.values()))


def served(plan: Plan, groups: int = 2) -> list[tuple[int, ...]]:
    module = serving(plan, plan.modules[0], CLUSTER, groups, 4e6)
    strategy = msgspec.structs.replace(plan.strategies[0], modules=(module, plan.modules[1]))
    plan.replace(strategies=(strategy,))  # keeps the rules of plans
    return [pipeline.serves for pipeline in module.pipelines]


def test_lanes_serve_the_pipelines_of_their_own_devices_where_these_need_no_more() -> None:
    made = planned({"n0/0": 4, "n1/0": 4}, {"n0/0": 8, "n1/0": 8})
    assert served(made) == [(0,), (1,)]


def test_lanes_of_other_devices_serve_the_nearest_and_help_where_items_are_left() -> None:
    made = planned({"n1/1": 1, "n0/1": 1, "n0/2": 1, "n1/2": 1}, {"n0/0": 8, "n1/0": 8})
    assert served(made) == [(1,), (0,), (0,), (1,)]
    made = planned({"n0/1": 2, "n0/2": 2, "n1/2": 4}, {"n0/0": 12, "n1/0": 4})
    assert served(made) == [(0,), (0,), (0, 1)]


def test_every_pipeline_is_served_and_groups_have_adjacent_ones() -> None:
    made = planned({"n0/3": 1}, {"n0/0": 2, "n0/1": 2, "n1/0": 2})
    assert served(made, 3) == [(0, 1, 2)]
    made = planned({"n0/0": 1, "n1/0": 1}, {"n0/0": 2, "n0/1": 2, "n1/0": 2, "n1/1": 2})
    assert served(made) == [(0, 1), (2, 3)]


def test_items_go_to_lanes_that_serve_their_pipeline_alone_and_ranks_order_their_own() -> None:
    made = planned({"n0/0": 1, "n1/0": 1}, {"n0/0": 4, "n1/0": 4})
    module = serving(made, made.modules[0], CLUSTER, 2, 4e6)
    made = made.replace(
        strategies=(msgspec.structs.replace(made.strategies[0], modules=(module, made.modules[1])),)
    )
    assert made.strategies[0].divided
    assert Plan.from_json(made.to_json()) == made
    samples = batch_plan(made.view(LOSS), 0, range(8))
    counts = {sample: 3 if sample in samples.samples()[:4] else 0 for sample in range(8)}
    items = item_batch(made, "vision", samples, counts)
    for name, group in items.walk():
        assert name.pipeline == group.pipeline
    batches = {LOSS: samples, "vision": items}
    first, second = (module_order(made, batches, passes, device=device) for device in ("n0/0", "n1/0"))
    assert {act.pipeline for act in first} == {0}
    assert {act.pipeline for act in second} == {1}
    assert len(first) + len(second) == len(module_order(made, batches, passes))


def test_a_slow_link_between_nodes_keeps_items_on_their_node() -> None:
    problem = drawn_problem(5)
    (module,) = problem.modules
    profile = msgspec.structs.replace(module.profile, boundary_bytes=65536.0)
    block = msgspec.structs.replace(problem.profile.block, cut_bytes=0, grouped_bytes=0)
    problem = msgspec.structs.replace(
        problem,
        cluster=msgspec.structs.replace(problem.cluster, between=Link(bandwidth=2e8, latency=1e-4)),
        profile=msgspec.structs.replace(problem.profile, block=block),
        modules=(msgspec.structs.replace(module, profile=profile, items_a_sample=2.0),),
        rates={},
        search_space=SearchSpace(fixed_dp=2),
    )
    found = plan(problem).plan
    assert found is not None
    assert found.prediction is not None
    assert found.strategies[0].divided
    every = msgspec.structs.replace(
        found.modules[0],
        pipelines=tuple(msgspec.structs.replace(each, serves=()) for each in found.modules[0].pipelines),
    )
    strategy = msgspec.structs.replace(found.strategies[0], modules=(every, found.modules[1]))
    costs = ModuleCosts(problem)
    shared = with_pair(found.replace(strategies=(strategy,)), every.ahead, every.lead)
    assert found.prediction.step_seconds < 0.7 * costs.seconds(shared)


def test_pipelines_are_of_one_component_where_lanes_serve_both() -> None:
    devices = {f"n0/{i}": 1 for i in range(4)}

    def parts(*serves: tuple[int, ...]) -> list[list[int]]:
        made = planned(devices, {f"n1/{i}": 1 for i in range(4)})
        lanes = zip(made.modules[0].pipelines, serves, strict=True)
        pipelines = tuple(msgspec.structs.replace(pipeline, serves=each) for pipeline, each in lanes)
        module = msgspec.structs.replace(made.modules[0], pipelines=pipelines)
        return components(made.with_modules([module, made.modules[1]]))

    assert parts((0,), (1,), (2,), (3,)) == [[0], [1], [2], [3]]
    assert parts((0, 3), (1,), (2,), (2,)) == [[0, 3], [1], [2]]
    assert parts((0, 2), (1, 3), (2, 3), (0,)) == [[0, 1, 2, 3]]
    assert parts((), (), (), ()) == [[0], [1], [2], [3]]


def test_a_lone_trainer_plans_for_its_device_without_networkx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    problem = drawn_problem(5)
    found = plan(msgspec.structs.replace(problem, cluster=cluster_of(1, 1, 80 * GIB), rates={})).plan
    assert found is not None
    assert components(found) == [[0]]
    with pytest.raises(ImportError):
        served(planned({"n0/1": 2, "n0/2": 2, "n1/2": 4}, {"n0/0": 12, "n1/0": 4}))


def test_what_is_served_must_be_there() -> None:
    made = planned({"n0/0": 1, "n1/0": 1}, {"n0/0": 2, "n1/0": 2})

    def given(*serves: tuple[int, ...]) -> None:
        pipelines = tuple(
            msgspec.structs.replace(pipeline, serves=each)
            for pipeline, each in zip(made.modules[0].pipelines, serves, strict=True)
        )
        module = msgspec.structs.replace(made.modules[0], pipelines=pipelines)
        msgspec.structs.replace(made.strategies[0], modules=(module, made.modules[1]))

    given((0,), ())
    with pytest.raises(Invalid, match="no pipeline of vision serves pipeline 1"):
        given((0,), (0,))
    with pytest.raises(Invalid, match="has the pipelines 0 to 1"):
        given((0,), (1, 2))
