"""Plans of several modules whose sequences are packed: beside every layout of a small cluster, in the memory
that there is, and given by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.problem import ModuleProblem, Problem, SearchSpace
from elasticd_planner.search.lanes import joined
from elasticd_planner.search.module_cost import ModuleCosts
from elasticd_planner.search.modules import left_devices, with_pair
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.cluster import rate_of
from elasticd_planner.spec.item_batch import ItemBatch
from elasticd_planner.spec.plan import Edge, ModulePlan, Pipeline, Plan, Stage, Strategy

from tests.planner import test_packed_search as packed_search
from tests.sizes import number

LOSS, VISION = "language", "vision"
MB = 1_000_000
SEEDS = range(number(0, 0), number(12, 2))


def drawn(seed: int, memory: int = 200 * MB) -> Problem:
    """Four devices on two nodes, sequences of unlike length, and images that take a part of all time."""
    chance = np.random.default_rng(seed)
    lengths = np.clip(np.exp(chance.normal(7.0, 1.0, 24)), 64, 12_000).astype(np.int64)
    problem = packed_search.problem(lengths, memory)
    devices = [device.name for device in problem.cluster.devices]
    slow = {str(name): 2.0 for name in chance.choice(devices, int(chance.integers(2)), replace=False)}
    assert problem.packed is not None
    work = problem.packed.tokens * problem.profile.layers * problem.profile.block.seconds
    items, rows = float(chance.choice([0.5, 1.0, 2.5])), 256.0
    block = SectionProfile(
        seconds=float(chance.uniform(0.1, 1.0)) * work / (len(lengths) * items * rows * 2),
        cut_bytes=2 * MB,
        cut_activation=1000.0,
        collectives=4,
    )
    vision = ModelProfile(
        name=VISION,
        layers=2,
        share_units=8,
        tokens=rows,
        block=block,
        boundary_bytes=1024.0,
        overhead_seconds=0.0,
    )
    encoder = ModuleProblem(
        name=VISION,
        profile=vision,
        items="images",
        items_a_sample=items,
        rows_an_item=rows,
        trained=seed % 3 > 0,
    )
    return msgspec.structs.replace(problem, rates=slow, module=LOSS, modules=(encoder,))


def planned(problem: Problem) -> Plan:
    answer = plan(problem, 3)
    assert answer.plan is not None, answer.refusal
    return answer.plan


def layouts(problem: Problem) -> Iterator[Plan]:
    """By TP size, stages, copies and lanes of the module with the loss, and devices left to images: plans whose
    lanes of images take as much as their devices are fast, with each `ahead`."""
    costs, (vision,) = ModuleCosts(problem), problem.modules
    assert costs.rows is not None
    for count in range(3):
        left = left_devices(problem, count)
        own = [device.name for device in problem.cluster.devices if device.name not in left]
        lanes = tuple(
            Pipeline(
                stages=(Stage(start=0, stop=vision.profile.layers, devices=(device,), shares=(8,)),),
                micro_batches=round(8 / rate_of(problem.rates, device)),
            )
            for device in left or own
        )
        for width in (1, 2, 4):
            for stages in (1, 2):
                copies = len(own) // (width * stages)
                for most in range(1, copies + 1):
                    pipelines = joined(copies_of(problem, own, width, stages, copies), most)
                    items = ModulePlan(module=VISION, pipelines=lanes, items="images", trainable=vision.trained)
                    made = Plan(
                        number=1,
                        strategies=(
                            Strategy(
                                modules=(items, ModulePlan(module=LOSS, pipelines=pipelines)),
                                edges=(Edge(source=VISION, target=LOSS),),
                            ),
                        ),
                        micro_batch=1,
                        global_batch=copies,
                    )
                    made = costs.rows.packed_plan(made).replace(global_batch=problem.global_batch)
                    for ahead in (1, 4, 16):
                        found = costs.roomy(with_pair(made, ahead, 1))
                        if costs.rows.holds(found.loss_view) and fits(costs, found):
                            yield costs.timed(found)


def copies_of(
    problem: Problem, devices: list[str], width: int, stages: int, copies: int
) -> tuple[Pipeline, ...]:
    groups = [tuple(devices[at * width : (at + 1) * width]) for at in range(stages * copies)]
    shares = (8 // width,) * width
    layers = [problem.profile.layers // stages] * stages
    return tuple(
        Pipeline.from_layers([(group, shares) for group in groups[at * stages : (at + 1) * stages]], layers, 1)
        for at in range(copies)
    )


def fits(costs: ModuleCosts, found: Plan) -> bool:
    memory = costs.problem.cluster.memory
    return all(size <= memory[device] for device, size in costs.memory(found).items())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_about_as_quick_as_the_best_layout_played_by_the_same_order(seed: int) -> None:
    problem = drawn(seed, memory=(200, 60)[seed % 2] * MB)
    found, costs = planned(problem), ModuleCosts(problem)
    assert found.prediction is not None
    best = min(costs.seconds(each) for each in layouts(problem))
    assert found.prediction.step_seconds <= best * 1.03
    assert 0 < found.prediction.bound_seconds <= min(best, found.prediction.step_seconds)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_keeps_memory_and_says_what_it_is_played_as(seed: int) -> None:
    problem = drawn(seed)
    found, costs = planned(problem), ModuleCosts(problem)
    prediction, language = found.prediction, found.view(LOSS)
    assert prediction is not None
    assert costs.rows is not None
    assert prediction.step_seconds == costs.seconds(found)
    assert all(size <= problem.cluster.memory[device] for device, size in prediction.memory.items())
    assert costs.rows.holds(language)
    assert all(pipeline.packed for pipeline in language.pipelines)
    assert not any(pipeline.packed for pipeline in found.view(VISION).pipelines)
    assert Plan.from_json(found.to_json()) == found
    batches = costs.batches(found)
    items = batches[VISION]
    assert isinstance(items, ItemBatch)
    counted = {item for _, group in items.walk() for item in group.items}
    assert len(counted) == costs.step_items(problem.modules[0])


def test_rows_have_the_memory_that_images_leave() -> None:
    """In the memory that a layout just needs there is a plan, whose rows are shorter than without images."""
    problem = drawn(1)
    (vision,) = problem.modules
    large = msgspec.structs.replace(vision.profile.block, cut_activation=20_000.0)
    vision = msgspec.structs.replace(
        vision, profile=msgspec.structs.replace(vision.profile, block=large), trained=True
    )
    problem = msgspec.structs.replace(
        problem, modules=(vision,), cluster=packed_search.problem(np.array([1000]), 60 * MB).cluster
    )
    found, alone = planned(problem), planned(msgspec.structs.replace(problem, modules=()))
    rooms = [
        sum(lane.capacity for pipeline in each.loss_view.pipelines for lane in pipeline.packed)
        for each in (found, alone)
    ]
    assert rooms[0] < rooms[1]


def test_a_sequence_that_no_lanes_hold_beside_images_is_refused_by_its_name() -> None:
    answer = plan(drawn(1, memory=18 * MB))
    assert answer.plan is None
    assert "modules of items do not fit beside language: vision needs" in answer.refusal
    answer = plan(drawn(1, memory=16 * MB))
    assert answer.plan is None
    assert "tokens, and the lanes of no pipeline hold more than" in answer.refusal
    assert "add a node" in answer.refusal


def test_a_given_plan_gets_rows_of_the_memory_that_there_is() -> None:
    problem = drawn(2)
    given = next(layouts(problem))
    answer = plan(msgspec.structs.replace(problem, given=given, only_given=True), 7)
    assert answer.plan is not None, answer.refusal
    assert answer.plan.loss_view.pipelines == given.loss_view.pipelines
    assert answer.plan.reason.startswith("given by the job: ")


def test_a_running_plan_stays_where_none_is_better() -> None:
    problem = drawn(3)
    first = planned(problem)
    again = plan(msgspec.structs.replace(problem, current=first), 4)
    assert again.plan is not None
    assert first.prediction is not None
    assert again.current_seconds == pytest.approx(first.prediction.step_seconds)
    assert again.plan.strategies == first.strategies


def test_sequences_that_stay_whole_have_plans_too() -> None:
    problem = drawn(4)
    assert problem.packed is not None
    whole = msgspec.structs.replace(problem.packed, cut=False)
    found = planned(msgspec.structs.replace(problem, packed=whole, search_space=SearchSpace()))
    assert found.prediction is not None
    assert math.isfinite(found.prediction.step_seconds)
    assert all(len(pipeline.packed) == 1 for pipeline in found.loss_module.pipelines)
