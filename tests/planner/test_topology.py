"""Where TP groups lie: inside a node wherever one fits in a node, on any cluster."""

from __future__ import annotations

import math
import random

import pytest
from elasticd_planner.problem import SearchSpace
from elasticd_planner.search import planner
from msgspec import structs

from tests import sizes
from tests.planner.drawn_topologies import (
    in_order,
    inside_first,
    judged,
    mapped,
    nodes_of,
    placed,
    problem,
    seconds,
    tp_groups,
)
from tests.planner.models import cluster

#: Where other orders of devices were faster than the planner's: groups were in the wrong one of two pipelines
#: (46), members on two nodes though one has room (64, 98), a slow boundary early in a pipeline (125).
BEATEN = (46, 64, 98, 125)


@pytest.mark.parametrize("seed", sizes.beside([58, 73, *BEATEN], sorted({*BEATEN, *range(50, 98)})))
def test_a_tp_group_crosses_no_node_where_one_fits_and_no_other_order_of_devices_is_faster(seed: int) -> None:
    found = placed(seed)
    assert not found.across or found.must
    assert found.beaten <= 1 + 1e-9


@pytest.mark.parametrize("seed", [80, 264])
def test_a_group_keeps_to_a_node_even_where_the_network_is_as_quick_as_the_nodes_own_link(seed: int) -> None:
    assert not inside_first(problem(seed).cluster)
    found = placed(seed)
    assert not found.across
    assert found.other < found.seconds
    assert found.beaten <= 1 + 1e-9


def test_where_a_group_is_more_than_a_node_it_crosses() -> None:
    given = problem(0)
    given = structs.replace(
        given, profile=structs.replace(given.profile, widths=(4, 8)), cluster=cluster(3, 3), rates={}
    )
    found = judged(given, random.Random(0))
    assert found.must
    assert found.across == found.groups == 1


def test_the_seconds_of_a_shape_on_its_own_devices_are_the_plans() -> None:
    given = problem(58)
    plan = planner.plan(given).plan
    assert plan is not None
    assert plan.prediction is not None
    assert seconds(given, plan) == pytest.approx(plan.prediction.step_seconds)
    other = mapped(plan, in_order(plan))
    assert set(other.places) == set(plan.places)
    assert sorted(map(len, tp_groups(other))) == sorted(map(len, tp_groups(plan)))
    assert math.isfinite(seconds(given, other))
    assert all(len(nodes_of(group)) == 1 for group in tp_groups(plan))


@pytest.mark.parametrize("recompute", [False, True])  # one setting, and several
def test_fewer_devices_than_any_tp_group_has_are_refused(recompute: bool) -> None:
    given = problem(0)
    given = structs.replace(
        given,
        profile=structs.replace(given.profile, widths=(4, 8)),
        cluster=cluster(1, 2),
        rates={},
        search_space=SearchSpace(recompute=recompute),
    )
    assert "no TP group of an allowed size can be made of the devices" in planner.plan(given).refusal
