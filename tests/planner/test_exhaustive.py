"""The exact search against brute force on random small problems, under the schedule's exact time."""

import math
import random

import msgspec
import pytest
from elasticd_planner.cost.model import step_seconds
from elasticd_planner.cost.model_profile import SectionProfile
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.problem import Problem
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.planner import brute, jobs, schedule_brute
from tests.planner.models import cluster, profile, replica_bytes
from tests.sizes import beside, examples

SIZES = [(1,), (3,), (4,), (2, 2), (1, 2), (1, 3), (1, 1, 2)]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to four devices in up to three nodes, two to four layers, memory that often binds."""
    model = profile(
        layers=draw(st.integers(2, 4)),
        share_units=draw(st.sampled_from([4, 6, 8])),
        groups=draw(st.sampled_from([0, 2])),
        block=SectionProfile(
            seconds=1e-3,
            cut_bytes=1000,
            grouped_bytes=draw(st.sampled_from([0, 200])),
            whole_bytes=10,
            cut_activation=draw(st.sampled_from([0.0, 2.0])),
            whole_activation=draw(st.sampled_from([0.0, 1.0])),
            collectives=draw(st.sampled_from([0, 4])),
        ),
        embed=SectionProfile(seconds=draw(st.sampled_from([0.0, 5e-4])), cut_bytes=700, collectives=1),
        head=SectionProfile(seconds=draw(st.sampled_from([0.0, 1e-3])), cut_bytes=700),
        tied_bytes=draw(st.sampled_from([0, 700])),
        boundary_bytes=draw(st.sampled_from([10.0, 5000.0])),
        overhead_seconds=0.05,
        pipeline_scale=draw(st.sampled_from([1.0, 0.9])),
    )
    whole = replica_bytes(model)
    memories = [math.ceil(whole * draw(st.sampled_from([0.3, 0.45, 0.6, 1.0, 2.0]))) for _ in range(2)]
    nodes = []
    for n, size in enumerate(draw(st.sampled_from(SIZES))):
        devices = tuple(Device(name=f"n{n}/{i}", memory=draw(st.sampled_from(memories))) for i in range(size))
        nodes.append(Node(name=f"n{n}", devices=devices))
    cluster = Cluster(
        nodes=tuple(nodes), between=Link(bandwidth=draw(st.sampled_from([1e6, 1e9])), latency=1e-3)
    )
    rates = {d.name: draw(st.sampled_from([1.0, 1.0, 1.0, 1.5, 2.0, 3.0])) for d in cluster.devices}
    micro_batches = draw(st.integers(1, 5))
    return Problem(cluster=cluster, profile=model, rates=rates, global_batch=2 * micro_batches, micro_batch=2)


#: Two devices have no room for shares by their rates, of which device swaps find others.
TIGHT = Problem(
    cluster=msgspec.structs.replace(
        cluster(2, 2, memory=4896, inside=Link(bandwidth=1e9, latency=2e-4)),
        between=Link(bandwidth=1e6, latency=1e-3),
    ),
    profile=profile(
        layers=2,
        share_units=6,
        block=SectionProfile(seconds=1e-3, cut_bytes=1000, whole_bytes=10),
        embed=SectionProfile(cut_bytes=700, collectives=1),
        head=SectionProfile(cut_bytes=700),
        tied_bytes=700,
        boundary_bytes=10.0,
        overhead_seconds=0.05,
    ),
    rates={"n0/0": 1.0, "n0/1": 3.0, "n1/0": 1.0, "n1/1": 1.5},
    global_batch=2,
    micro_batch=2,
)


@settings(max_examples=examples(25))
@given(problems())
@example(TIGHT)
def test_the_search_finds_what_brute_force_finds(problem: Problem) -> None:
    seconds, _ = brute.best(problem)
    answer = plan(problem)
    if answer.plan is None:
        assert math.isinf(seconds)
        assert answer.refusal.startswith("does not fit")
        return
    assert brute.fits(answer.plan, problem)
    assert answer.plan.prediction is not None
    found = answer.plan.prediction.step_seconds
    assert found == step_seconds(answer.plan, problem.cluster, problem.rates, ProfileCost(problem.profile))
    if brute.looked_at(answer.plan, problem):
        assert found == pytest.approx(seconds, rel=1e-8)
    else:  # devices that changed places keep the shares of those before them, for which memory may have room
        assert found < seconds * (1 + 1e-8)
    assert answer.plan.prediction.bound_seconds <= seconds * (1 + 1e-9)


@settings(max_examples=examples(12))
@given(problems(), st.data())
def test_with_a_current_plan_the_answer_is_within_the_tolerance(problem: Problem, data: st.DataObject) -> None:
    healthy = plan(msgspec.structs.replace(problem, rates={}))
    if healthy.plan is None:
        return
    moved = msgspec.structs.replace(problem, current=healthy.plan)
    tolerance = data.draw(st.sampled_from([0.0, 0.005, 0.05]))
    answer = plan(moved, tolerance=tolerance)
    seconds, _ = brute.best(problem)
    assert answer.plan is not None
    assert brute.fits(answer.plan, problem)
    found = step_seconds(answer.plan, problem.cluster, problem.rates, ProfileCost(problem.profile))
    assert found <= seconds * (1 + tolerance) * (1 + 1e-8)
    now = step_seconds(healthy.plan, problem.cluster, problem.rates, ProfileCost(problem.profile))
    assert answer.current_seconds == pytest.approx(now)
    if now <= seconds * (1 + tolerance):
        assert answer.plan.pipelines == healthy.plan.pipelines


#: Problems of up to five devices, or of six whose plans are quickly listed.
QUICKLY_LISTED = range(1, 40)


@pytest.mark.parametrize("seed", beside(QUICKLY_LISTED, range(40)))
def test_up_to_six_devices_are_planned_as_well_as_can_be(seed: int) -> None:
    problem = jobs.small(random.Random(seed))
    seconds = schedule_brute.best(problem)
    answer = plan(problem)
    if answer.plan is None:
        assert math.isinf(seconds)
        return
    assert brute.fits(answer.plan, problem)
    assert answer.plan.prediction is not None
    assert answer.plan.prediction.step_seconds == pytest.approx(seconds, rel=1e-9)
    assert answer.plan.prediction.bound_seconds <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("sizes", [(2,), (1, 1), (3,), (1, 2)])
def test_the_two_oracles_agree(sizes: tuple[int, ...]) -> None:
    """One lists plans by the names of devices, the other by classes and in arrays."""
    for seed in range(3):
        problem = jobs.small(random.Random(seed), (sizes,))
        problem = msgspec.structs.replace(problem, global_batch=min(problem.global_batch, 6))
        assert schedule_brute.best(problem) == pytest.approx(brute.best(problem)[0])


def test_pipelines_alike_in_plans_of_different_reductions_are_costed_for_each() -> None:
    """What is known of a pipeline in a plan of three must not hide it from a plan of one."""
    rates = {"n0/0": 2.5}
    slow = Link(bandwidth=1e8, latency=1e-3)
    problem = Problem(
        cluster=msgspec.structs.replace(cluster(4, 4), between=slow),
        profile=profile(layers=6, boundary_bytes=4096.0),
        global_batch=8,
        micro_batch=1,
        rates=rates,
    )
    answer = plan(problem)
    assert answer.plan is not None
    found = step_seconds(answer.plan, problem.cluster, problem.rates, ProfileCost(problem.profile))
    assert found == pytest.approx(schedule_brute.best(problem), rel=1e-9)
