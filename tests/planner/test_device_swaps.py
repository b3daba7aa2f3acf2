"""Device swaps: a plan's shape on devices that make it faster, beside every arrangement of small shapes."""

from __future__ import annotations

import math
import random
from itertools import permutations

import pytest
from elasticd_planner.placement.state_movement import strategy
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.search import planner
from elasticd_planner.search.device_swaps import swapped
from elasticd_planner.search.lanes import apart
from elasticd_planner.search.options import setting_of, task_of
from elasticd_planner.search.task import Task
from elasticd_planner.spec.cluster import Cluster, Level, Link, Rates
from elasticd_planner.spec.plan import Plan, StatePolicy
from msgspec import structs

from tests import sizes
from tests.planner.drawn_topologies import kept, mapped, nodes_of, pinned, problem, seconds, tp_groups
from tests.planner.models import cluster, plan, profile

#: Bytes of a boundary that make its link matter.
MODEL = profile(layers=4, boundary_bytes=65536.0)


def given(nodes: Cluster, rates: Rates | None = None, **changes: object) -> Problem:
    """A problem whose plan the tests make themselves."""
    return Problem(
        cluster=structs.replace(
            nodes, inside=Link(bandwidth=1e11, latency=1e-6), between=Link(bandwidth=1e8, latency=1e-4)
        ),
        profile=MODEL,
        rates=rates or {},
        global_batch=4,
        micro_batch=1,
        search_space=SearchSpace(**changes),  # type: ignore[arg-type]
    )


def task(job: Problem, made: Plan) -> Task:
    return task_of(setting_of(made, job).problem(job))


def improved(job: Problem, made: Plan) -> Plan | None:
    """The plan on the devices that are found for it; None where it stays where it is."""
    found = swapped(task(job, made), made)
    return None if found is None else made.replace(strategies=(strategy(found),), idle=(), prediction=None)


def pairs(*groups: str) -> list[tuple[int, list[str], list[int]]]:
    """Stages of an equal part of the layers on the first two devices of nodes, or on the next two ("n0+")."""
    names = [(group.rstrip("+"), 2 * group.count("+")) for group in groups]
    layers = MODEL.layers // len(groups)
    return [(layers, [f"{node}/{at}", f"{node}/{at + 1}"], [1, 1]) for node, at in names]


def test_groups_change_pipelines_so_that_none_leaves_its_node() -> None:
    job = given(cluster(4, 4))
    made = plan((2, pairs("n0", "n1")), (2, pairs("n1+", "n0+")))
    found = improved(job, made)
    assert found is not None
    assert [len(nodes_of([d for s in p.stages for d in s.devices])) for p in found.pipelines] == [1, 1]
    assert seconds(job, found) < seconds(job, made)


def test_stages_that_are_neighbours_come_into_one_rack() -> None:
    nodes = structs.replace(
        cluster(2, 2, 2, 2),
        levels=(
            Level(name="rack", link=Link(bandwidth=1e10, latency=1e-5), groups=(("n0", "n3"), ("n1", "n2"))),
        ),
    )
    job = given(nodes)
    made = plan((4, pairs("n0", "n1", "n3", "n2")))
    orders = [plan((4, pairs(*order))) for order in permutations(["n0", "n1", "n2", "n3"])]
    found = improved(job, made)
    assert found is not None
    assert seconds(job, found) == pytest.approx(min(seconds(job, each) for each in orders))
    assert improved(job, found) is None


def test_idle_devices_of_a_nearer_node_take_over() -> None:
    job = given(cluster(4, 2))
    made = plan((4, pairs("n0", "n1")), idle=("n0/2", "n0/3"))
    found = improved(job, made)
    assert found is not None
    assert nodes_of(found.members) == {"n0"}


def test_a_slow_device_makes_room_for_an_idle_one_or_for_one_of_less_work() -> None:
    job = given(cluster(3, 2), {"n0/0": 4.0})
    found = improved(job, plan((4, pairs("n0", "n1")), idle=("n0/2",)))
    assert found is not None
    assert "n0/0" not in found.members
    fewer = [(3, ["n0/0", "n0/1"], [1, 1]), (1, ["n0/2", "n0/3"], [1, 1])]
    found = improved(given(cluster(4), {"n0/0": 4.0}), plan((4, fewer)))
    # All links of one node are alike, but that to other nodes; the search knows of both.
    assert found is not None
    assert "n0/0" in found.pipelines[0].stages[1].devices


def test_the_largest_share_goes_to_the_fastest_device() -> None:
    job = given(cluster(2, 2), {"n0/1": 3.0, "n1/0": 3.0})
    made = plan((4, [(2, ["n0/0", "n0/1"], [6, 2]), (2, ["n1/0", "n1/1"], [6, 2])]))
    found = improved(job, made)
    assert found is not None
    assert [stage.devices for stage in found.pipelines[0].stages] in (
        [("n0/0", "n0/1"), ("n1/1", "n1/0")],
        [("n1/1", "n1/0"), ("n0/0", "n0/1")],
    )


def test_where_all_links_cost_alike_a_plan_stays_where_it_is() -> None:
    job = given(cluster(4, 4))
    same = structs.replace(job.cluster, between=job.cluster.inside)
    job = structs.replace(job, cluster=same)
    assert improved(job, plan((2, pairs("n0", "n1")), (2, pairs("n1+", "n0+")))) is None


def test_no_device_gets_a_place_for_which_it_has_too_little_memory() -> None:
    job, made = given(cluster(4, 4)), plan((2, pairs("n0", "n1")), (2, pairs("n1+", "n0+")))
    need = task(job, made).cost
    del need
    small = structs.replace(
        job.cluster,
        nodes=tuple(
            structs.replace(
                node,
                devices=tuple(
                    structs.replace(device, memory=device.memory if node.name == "n0" else 1)
                    for device in node.devices
                ),
            )
            for node in job.cluster.nodes
        ),
    )
    assert improved(structs.replace(job, cluster=small), made) is None


def test_a_pinned_size_holds_on_nodes_of_normal_devices() -> None:
    one = [(2, ["n0/0"], [1]), (2, ["n1/0"], [1])]
    rates = {"n0/3": 2.0, "n1/3": 2.0}
    job = given(cluster(4, 4), rates, fixed_tp=2)
    found = improved(job, plan((4, one), idle=("n0/1",)))
    assert found is not None  # on nodes with a slow device groups may have any size
    assert improved(structs.replace(job, rates={}), plan((4, one), idle=("n0/1",))) is None


def test_devices_that_carry_state_take_no_place() -> None:
    job = given(cluster(4, 2), {"n0/0": 8.0})
    made = plan((4, pairs("n0", "n0+")), idle=("n1/0", "n1/1"))
    found = improved(job, made)
    assert found is not None
    assert nodes_of(found.members) == {"n0", "n1"}
    state = StatePolicy(zero=1, replicas=2)
    carried = made.replace(idle=(), carriers=made.idle, state=state)
    job = structs.replace(job, search_space=SearchSpace(states=(state,)))
    assert improved(job, carried) is None


def test_members_that_need_not_be_on_two_nodes_reduce_inside_one() -> None:
    job = given(cluster(4, 2))
    made = plan((2, pairs("n0")), (2, pairs("n1")), idle=("n0/2", "n0/3"))
    found = improved(job, made)
    assert found is not None
    assert nodes_of(found.members) == {"n0"}


def test_members_on_many_nodes_gather_in_one_rack() -> None:
    rack = Level(name="rack", link=Link(bandwidth=1e10, latency=1e-5), groups=(("n0", "n1"), ("n2", "n3")))
    job = given(structs.replace(cluster(4, 4, 2, 2), levels=(rack,)))
    idle = ("n0/2", "n0/3", "n1/2", "n1/3")
    made = plan((1, pairs("n0")), (1, pairs("n2")), (1, pairs("n1")), (1, pairs("n3")), idle=idle)
    found = improved(job, made)
    assert found is not None
    assert nodes_of(found.members) == {"n0", "n1"}


@pytest.mark.parametrize("seed", sizes.beside([14, 46, 58], range(10, 60)))
def test_any_arrangement_of_a_drawn_shape_becomes_one_that_no_exchange_makes_faster(seed: int) -> None:
    job = problem(seed)
    made = planner.plan(job).plan
    if made is None:
        pytest.skip("there is no plan")
    draw = random.Random(seed)
    made = apart(made)
    for _ in range(4):
        start = mapped(made, kept(job, made, draw))
        if not (math.isfinite(seconds(job, start)) and pinned(job, start)):
            continue
        found = improved(job, start)
        assert found == improved(job, start)
        end = start if found is None else found
        assert seconds(job, end) <= seconds(job, start)
        assert found is None or seconds(job, end) < seconds(job, start)
        assert all(len(nodes_of(group)) == 1 for group in tp_groups(end))
        assert [list(map(len, tp_groups(end)))] == [list(map(len, tp_groups(start)))]
        groups = list(tp_groups(end))
        for one in groups:
            for two in groups:
                if one < two and len(one) == len(two):
                    other = mapped(end, dict(zip(one + two, two + one, strict=True)))
                    if pinned(job, other):
                        assert seconds(job, end) <= seconds(job, other) * (1 + 1e-9)
