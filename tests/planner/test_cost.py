"""Step time and memory of plans, worked out by hand."""

import msgspec
import pytest
from elasticd_planner.cost.memory import memory_by_device
from elasticd_planner.cost.model import (
    after_seconds,
    pipeline_seconds,
    stage_seconds,
    step_seconds,
)
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.placement.state_movement import strategy
from elasticd_planner.problem import Problem
from elasticd_planner.spec.cluster import Link
from elasticd_planner.spec.plan import Plan
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.models import cluster, plan, plans, predict, profile
from tests.sizes import examples

#: A block takes 1 s on a normal device, embed 0.1 s, head 0.2 s; communication costs nothing.
FREE = ModelProfile(
    name="free",
    layers=4,
    share_units=8,
    tokens=100,
    block=SectionProfile(seconds=0.01, cut_bytes=80, whole_activation=1.0, cut_activation=0.8),
    embed=SectionProfile(seconds=0.001, cut_bytes=40),
    head=SectionProfile(seconds=0.002, cut_bytes=40),
    tied_bytes=40,
)
SILENT = Link(bandwidth=1e30, latency=0)
PLAN = plan((3, [(1, ["n0/0", "n0/1"], [6, 2]), (3, ["n0/2"], [1])]))


def test_a_group_is_as_slow_as_its_slowest_share() -> None:
    quiet = cluster(3, inside=SILENT)
    cost = ProfileCost(FREE)
    first, last = stage_seconds(PLAN.pipelines[0], quiet, {"n0/1": 3.0, "n0/2": 2.0}, cost)
    assert first == pytest.approx(0.75 * 1.1)  # 6/8 of a normal device, and 2/8 x 3, alike
    assert last == pytest.approx(2 * (3 + 0.2))
    # Three micro-batches; while the first is on the last stage, the first stage goes ahead with the second.
    assert step_seconds(PLAN, quiet, {"n0/1": 3.0, "n0/2": 2.0}, cost) == pytest.approx(first + 3 * last)


@settings(max_examples=examples(40))
@given(plans(), st.dictionaries(st.integers(0, 30), st.floats(1, 4), max_size=3))
def test_a_step_takes_as_long_as_its_slowest_pipeline_and_what_follows(
    made: Plan, slow: dict[int, float]
) -> None:
    """However many pipelines are alike, and counted at once."""
    here, cost = cluster(*[8] * 8), ProfileCost(profile())
    rates = {made.members[place % len(made.members)]: rate for place, rate in slow.items()}
    each = [pipeline_seconds(pipeline, here, rates, cost) for pipeline in made.pipelines]
    assert step_seconds(made, here, rates, cost) == max(each) + after_seconds(made, here, cost)


def test_a_collective_costs_what_was_measured_else_a_ring() -> None:
    model = ModelProfile(
        name="m",
        layers=1,
        share_units=4,
        tokens=10,
        block=SectionProfile(seconds=1e-9, collectives=4),
        boundary_bytes=20,
        collective_seconds={2: 0.5},
    )
    cost = ProfileCost(model)
    link = Link(bandwidth=100, latency=0.1)
    assert cost.collective(1, link) == 0
    assert cost.collective(2, link) == 0.5
    assert cost.collective(4, link) == pytest.approx(6 * (0.1 + 200 / 4 / 100))
    assert cost.group([1, 1], [2, 2], link).block == pytest.approx(2.0)
    assert cost.boundary(link) == pytest.approx(2 * (0.1 + 2.0))


def test_pipelines_reduce_over_a_ring_of_what_a_device_holds() -> None:
    cost = ProfileCost(FREE)
    link = Link(bandwidth=100, latency=0.1)
    assert cost.after(1, 4, link) == 0
    assert FREE.gradient_bytes == 4 * 80 + 40
    assert cost.after(3, 2, link) == pytest.approx(4 * (0.1 + 360 / 2 / 3 / 100))


def test_memory_counts_micro_batches_in_flight_by_position() -> None:
    cost = ProfileCost(FREE)
    needed = memory_by_device(PLAN, cost)
    # First stage: one block and embed, two micro-batches in flight; last: three blocks and head, one.
    assert needed["n0/0"] == pytest.approx(6 / 8 * (80 + 40) * 4 + 2 * 100 * (1.0 + 0.8 * 6 / 8), abs=1)
    assert needed["n0/2"] == pytest.approx((3 * 80 + 40) * 4 + 3 * 100 * 1.8, abs=1)


def test_a_tied_head_beside_its_embedding_is_held_once() -> None:
    whole = plan((1, [(4, ["n0/0"], [1])]))
    assert memory_by_device(whole, ProfileCost(FREE))["n0/0"] == pytest.approx(360 * 4 + 4 * 180, abs=1)


def test_passes_of_one_section_at_a_time_need_their_working_bytes() -> None:
    """Of the head or of a block, which is made again where it recomputes, whatever micro-batches are alive."""
    block = msgspec.structs.replace(FREE.block, cut_working=0.8, whole_working=0.2)
    asked = {"first": False, "in_flight": 3}

    def more(head: float, *, last: bool, recompute: bool = False) -> float:
        """Bytes beyond those of a profile without working bytes."""
        fuller = msgspec.structs.replace(
            FREE, block=block, head=msgspec.structs.replace(FREE.head, whole_working=head)
        )
        costs = (ProfileCost(profile, recompute=recompute) for profile in (fuller, FREE))
        found, plain = (cost.memory(2, (6, 2), 0, last=last, **asked) for cost in costs)  # type: ignore[arg-type]
        return found - plain

    of_a_block = 100 * (0.8 * 6 / 8 + 0.2)
    assert more(5.0, last=False) == pytest.approx(of_a_block)
    assert more(5.0, last=True) == pytest.approx(500)
    assert more(0.1, last=True) == pytest.approx(of_a_block)
    again = 100 * (0.8 * 6 / 8 + 1.0)  # counted without working bytes, too
    assert more(5.0, last=True, recompute=True) == pytest.approx(500 - again)
    assert more(0.1, last=True, recompute=True) == pytest.approx(of_a_block)


def test_shares_of_any_scale_are_units() -> None:
    cost = ProfileCost(FREE)
    asked = {"first": False, "last": False, "in_flight": 0}
    assert cost.memory(1, (3, 1), 0, **asked) == cost.memory(1, (6, 2), 0, **asked)  # type: ignore[arg-type]


def test_a_prediction_has_time_bound_and_memory() -> None:
    given = Problem(
        cluster=cluster(3, inside=SILENT), profile=FREE, global_batch=3, micro_batch=1, rates={"n0/1": 3.0}
    )
    found = predict(PLAN, given)
    assert found.bound_seconds == pytest.approx(3 * 4.3 / (1 + 1 / 3 + 1))
    assert found.bound_seconds <= found.step_seconds
    assert set(found.memory) == {"n0/0", "n0/1", "n0/2"}


@pytest.mark.parametrize("recomputing", [(), (0,), (0, 1), (1, 2, 3), (0, 1, 2, 3)])
def test_what_is_left_of_a_reduction_follows_from_the_stages_that_the_plan_recomputes(
    recomputing: tuple[int, ...],
) -> None:
    """A stage that recomputes is longer in its last backward pass, which hides more of its reduction; the
    others are what the step waits for. The setting under which the plan was found says nothing of it."""
    model = msgspec.structs.replace(FREE, layers=6, overlap=True)
    made = plan(*((2, [(3, [f"n0/{p}"], [1]), (3, [f"n0/{p + 1}"], [1])]) for p in (0, 2)))
    here = cluster(4, inside=Link(bandwidth=100, latency=0.1))
    pipelines = tuple(
        msgspec.structs.replace(
            pipeline,
            stages=tuple(
                msgspec.structs.replace(stage, recompute=2 * p + s in recomputing)
                for s, stage in enumerate(pipeline.stages)
            ),
        )
        for p, pipeline in enumerate(made.pipelines)
    )
    made = made.replace(strategies=(strategy(pipelines),))
    settings = (ProfileCost(model, recompute=on) for on in (False, True))
    assert len({step_seconds(made, here, {}, cost) for cost in settings}) == 1
    reduction = 2 * (0.1 + model.gradient_bytes / 2 / 2 / 100)
    backward = 3 * 1.0 * (1 if len(recomputing) == 4 else 2 / 3)  # three blocks, of the last micro-batch
    assert after_seconds(made, here, ProfileCost(model, recompute=True)) == pytest.approx(
        max(reduction / 3, reduction - backward * (1 - 1 / 3))
    )
