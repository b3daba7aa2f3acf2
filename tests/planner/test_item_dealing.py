"""Items follow the slowdowns of lanes: relative to what was planned, from a step on that all ranks know; a lane
without items is asked again."""

from __future__ import annotations

import msgspec
import pytest
from elasticd_planner.batching.item_dealing import STARVED, ItemDealing, LaneSpeeds
from elasticd_planner.spec.item_batch import item_batch
from elasticd_planner.spec.plan import Plan

from tests.planner.test_item_batch import batch_of, loads, planned


def voted(dealing: ItemDealing, seconds: dict[str, float], steps: range, plan: Plan) -> None:
    """Steps in which a row took so long on each device; 0: it had none."""
    for step in steps:
        ratios = [
            dealing.ratio(device, 100 * seconds.get(device, 0.0), 100 * (seconds.get(device, 0.0) > 0))
            for device in plan.members
        ]
        dealing.voted(step, ratios)


def test_a_slow_lane_gets_fewer_items_two_steps_after_a_vote() -> None:
    plan = planned((1, 1), (4,), ahead=4)
    dealing = ItemDealing(plan, "vision")
    voted(dealing, {"a/0": 1.0, "a/1": 6.0}, range(2), plan)
    assert dealing.of(1) == dealing.of(2) == LaneSpeeds()
    slowdown, first = dealing.of(3)
    assert slowdown[0] == 64
    assert slowdown[1] == pytest.approx(6 * 64, rel=0.01)
    assert not first
    assert dealing.slowdown_of("a/1") == slowdown[1]
    batch = item_batch(plan, "vision", batch_of(plan), {0: 3, 1: 3, 2: 4, 3: 4}, None, *dealing.of(3))
    assert loads(batch) == [12, 2]
    voted(dealing, {"a/0": 1.0, "a/1": 1.0}, range(2, 20), plan)
    assert dealing.of(30) == LaneSpeeds()


def test_a_slowdown_that_the_plan_knows_of_counts_once() -> None:
    """The planner gave a lane a sixth of the items, since its device takes six times as long."""
    plan = planned((6, 1), (4,), ahead=4)
    module = next(each for each in plan.modules if each.items)
    timed = tuple(
        msgspec.structs.replace(
            pipeline, stages=(msgspec.structs.replace(pipeline.stages[0], microseconds=(each, 2 * each)),)
        )
        for pipeline, each in zip(module.pipelines, (1000, 6000), strict=True)
    )
    modules = [msgspec.structs.replace(m, pipelines=timed) if m.items else m for m in plan.modules]
    strategy = msgspec.structs.replace(plan.strategies[0], modules=tuple(modules))
    plan = plan.replace(strategies=(strategy,))
    dealing = ItemDealing(plan, "vision")
    voted(dealing, {"a/0": 3e-6, "a/1": 18e-6}, range(20), plan)
    assert dealing.of(30) == LaneSpeeds()
    voted(dealing, {"a/0": 3e-6, "a/1": 3e-6}, range(20, 90), plan)  # it recovers
    slowdown, _ = dealing.of(100)
    assert slowdown[0] / slowdown[1] == pytest.approx(6, rel=0.05)


def test_a_slow_lane_without_items_gets_one_now_and_then() -> None:
    plan = planned((1, 1), (4,), ahead=4)
    dealing = ItemDealing(plan, "vision")
    voted(dealing, {"a/0": 1.0, "a/1": 16.0}, range(2), plan)
    firsts = []
    for step in range(2, 2 + 3 * STARVED):
        first = dealing.of(step).first
        firsts.append(first)
        voted(dealing, {"a/0": 1.0, **({"a/1": 16.0} if first else {})}, range(step, step + 1), plan)
    assert {*firsts} == {(), (1,)}
    assert 2 <= firsts.count((1,)) <= 3


def test_one_lane_and_one_alone_with_items_agree_on_nothing() -> None:
    plan = planned((1,), (4,), ahead=4)
    dealing = ItemDealing(plan, "vision")
    voted(dealing, {"a/0": 6.0}, range(10), plan)
    assert dealing.of(20) == LaneSpeeds()
    assert dealing.slowdown_of("a/0") == 0
    plan = planned((1, 1), (4,), ahead=4)
    dealing = ItemDealing(plan, "vision")
    voted(dealing, {"a/0": 1.0, "a/1": 6.0}, range(2), plan)
    voted(dealing, {"a/1": 6.0}, range(2, 10), plan)
    assert dealing.of(20).slowdown[1] > 300
