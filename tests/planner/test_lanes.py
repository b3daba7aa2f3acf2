"""Lanes in the planner: they cost and hold what pipelines of their own do; a search joins them where it may."""

from __future__ import annotations

from itertools import pairwise

import pytest
from elasticd_planner.cost.memory import memory_by_device
from elasticd_planner.cost.model import pipeline_seconds, stage_times, step_seconds
from elasticd_planner.cost.pipeline_time import Steady
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.layout.optimizer_sharding import speeds
from elasticd_planner.placement.state_movement import bytes_to_move
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.search.lanes import apart, joined
from elasticd_planner.search.planner import plan as search
from elasticd_planner.spec.plan import Pipeline, Plan, Stage, StatePolicy
from elasticd_planner.spec.plan_summary import describe
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.models import LAYERS, SPEC, cluster, plan, planned, plans, profile
from tests.planner.test_plan import LANES
from tests.sizes import examples

STATES = st.sampled_from([StatePolicy(), StatePolicy(zero=1, replicas=1), StatePolicy(zero=2, replicas=2)])


@settings(max_examples=examples(60))
@given(plans(), STATES, st.dictionaries(st.integers(0, 30), st.floats(1, 4), max_size=3))
def test_lanes_cost_and_hold_what_pipelines_of_their_own_do(
    made: Plan, state: StatePolicy, slow: dict[int, float]
) -> None:
    made = made.replace(state=state)
    alone, here, cost = apart(made), cluster(3, 3, 3), ProfileCost(profile(layers=LAYERS))
    rates = {made.members[place % len(made.members)]: rate for place, rate in slow.items()}
    assert alone.members == made.members
    assert all(not pipeline.rows for pipeline in alone.pipelines)
    for timed in (cost, cost.timed(Steady())):
        assert step_seconds(made, here, rates, timed) == step_seconds(alone, here, rates, timed)
    slowest = [max(pipeline_seconds(lane, here, rates, cost) for lane in p.by_lane) for p in made.pipelines]
    assert [pipeline_seconds(p, here, rates, cost) for p in made.pipelines] == slowest
    assert memory_by_device(made, cost) == memory_by_device(alone, cost)
    assert bytes_to_move(profile(layers=LAYERS), made, alone) == 0
    assert speeds(made) == speeds(alone)


@settings(max_examples=examples(30))
@given(plans(), STATES)
def test_lanes_are_laid_out_as_pipelines_of_their_own(made: Plan, state: StatePolicy) -> None:
    made = made.replace(state=state)
    one, other = Layouts(SPEC, made), Layouts(SPEC, apart(made))
    for item in one.items:
        assert one.layout(item).holdings == other.layout(item).holdings
    for name in one.trained:
        assert one.gradient(name).holdings == other.gradient(name).holdings


def test_gradients_of_lanes_add() -> None:
    norm = Layouts(SPEC, LANES).gradient("blocks.0.norm.weight").holdings
    assert {h.device: h.partial for h in norm} == {
        "n0/0": "0.0",
        "n0/1": "0.0",  # one TP group has one term
        "n1/0": "1.0",
        "n2/0": "2.0",
    }


def test_a_pipeline_of_lanes_has_no_single_times() -> None:
    with pytest.raises(Invalid, match="ask for those of each lane"):
        stage_times(LANES.pipelines[0], cluster(3, 3, 3), {}, ProfileCost(profile(layers=LAYERS)))


def test_lanes_are_told_in_one_sentence() -> None:
    assert describe(LANES, {}) == (
        "2 pipelines: 2 lanes of TP2/TP1 x 2 layers (shares 3:1 / 5) + TP1 x 1 layer with 3 + 2 micro-batches; "
        "TP1 x 3 layers with 1 micro-batches"
    )


def test_pipelines_of_equal_borders_are_joined_and_others_stay() -> None:
    def line(node: int, *borders: int, recompute: bool = False) -> Pipeline:
        stages = (
            Stage(start=a, stop=b, devices=(f"n{node}/{s}",), shares=(1,), recompute=recompute)
            for s, (a, b) in enumerate(pairwise(borders))
        )
        return Pipeline(stages=tuple(stages), micro_batches=node + 1)

    lines = [line(0, 0, 3), line(1, 0, 1, 3), line(2, 0, 3), line(3, 0, 3), line(4, 0, 3, recompute=True)]
    found = joined(lines, 2)
    assert [pipeline.micro_batches_by_lane for pipeline in found] == [(1, 3), (4,), (2,), (5,)]
    assert found[0].stages[0].devices == ("n0/0", "n2/0")
    assert found[0].by_lane == (lines[0], lines[2])
    assert apart(planned(*found)).by_lane == planned(*found).by_lane


def problem(lanes: int, current: Plan | None = None) -> Problem:
    """Four devices on which the best plans are replicas."""
    return Problem(
        cluster=cluster(2, 2),
        profile=profile(block=profile().block),
        global_batch=8,
        micro_batch=1,
        current=current,
        search_space=SearchSpace(lanes=lanes, fixed_dp=4),
    )


def found(given_: Problem) -> Plan:
    made = search(given_).plan
    assert made is not None
    return made


def test_joined_pipelines_have_no_placed_experts_of_one_of_them() -> None:
    """The running plan places them, and the search finds pipelines near it. A pipeline alone keeps its own."""
    stages = [
        Stage(start=0, stop=1, devices=(f"n{n}/0", f"n{n}/1"), shares=(1, 1), experts=(((n,), (1 - n,)),))
        for n in range(2)
    ]
    pipelines = [Pipeline(stages=(stage,), micro_batches=2) for stage in stages]
    (made,) = joined(pipelines, 2)
    assert made.stages[0].lanes == (2, 2)
    assert made.stages[0].experts == ()
    assert joined(pipelines, 1) == tuple(pipelines)


def test_a_search_has_lanes_only_where_it_may() -> None:
    plain, two, all_ = (found(problem(lanes)) for lanes in (1, 2, 8))
    assert plain.version == 1
    assert [len(p.micro_batches_by_lane) for p in two.pipelines] == [2, 2]
    assert [len(p.micro_batches_by_lane) for p in all_.pipelines] == [4]
    assert all_.prediction == plain.prediction
    assert "4 lanes of TP1" in all_.reason


def test_a_running_plan_with_lanes_stays_as_it_is() -> None:
    running = found(problem(2)).replace(number=3)
    again = search(problem(2, running))
    assert again.plan is not None
    assert again.plan.digest == running.digest
    assert running.prediction is not None
    assert again.current_seconds == running.prediction.step_seconds
    wider = found(problem(4, running))
    assert wider.digest == running.digest, "it has no more lanes than it may, and others gain nothing"
    fewer = found(problem(1, running))
    assert fewer.version == 1
    assert bytes_to_move(profile(), running, fewer) == 0


def test_an_impossible_number_of_lanes_is_refused() -> None:
    with pytest.raises(Invalid, match="lanes 0 must be at least 1"):
        SearchSpace(lanes=0)
    assert apart(plan((2, [(1, ["n0/0"], [1])]))).version == 1
