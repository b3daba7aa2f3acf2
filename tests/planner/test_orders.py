"""What orders of stages take at least, against all layers under the schedule's exact time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from elasticd_planner.cost.model import GroupCost
from elasticd_planner.cost.pipeline_time import Schedule, Times
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.grouping.tp_groups import Group, hop
from elasticd_planner.search.exhaustive import Least, orders
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.brute import compositions
from tests.planner.models import profile
from tests.sizes import examples

CLUSTER = Cluster(
    nodes=tuple(Node(name=f"n{n}", devices=(Device(name=f"n{n}/0", memory=1),)) for n in range(3)),
    inside=Link(bandwidth=1e9, latency=0.0),
    between=Link(bandwidth=1e5, latency=0.1),
)
COST = ProfileCost(profile())
GROUPS = st.tuples(
    st.integers(0, 2), st.floats(0.1, 3.0), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 1.0])
)


def group(node: int, block: float, embed: float, head: float) -> Group:
    return Group(
        members=((node, 1),),
        counts=tuple(int(i == node) for i in range(3)),
        node=f"n{node}",
        island=0,
        cost=GroupCost(block=block, embed=embed, head=head),
    )


def least(chain: list[Group], layers: int, micro_batches: int) -> float:
    rows = np.array(list(compositions(layers, len(chain))))
    work = rows * np.array([g.cost.block for g in chain])
    work[:, 0] += chain[0].cost.embed
    work[:, -1] += chain[-1].cost.head
    hops = [COST.boundary(hop(a, b, CLUSTER)) / 2 for a, b in pairwise(chain)]
    boundary = np.broadcast_to(np.array(hops), (len(rows), len(chain) - 1))
    times = Times(forward=work / 3, backward=2 * work / 3, boundary=boundary)
    return float(Schedule().seconds(times, micro_batches).min())


@settings(max_examples=examples(60))
@given(st.lists(GROUPS, min_size=1, max_size=4), st.integers(0, 4), st.integers(1, 10))
def test_no_layers_beat_what_an_order_takes_at_least(
    drawn: list[tuple[int, float, float, float]], more: int, most: int
) -> None:
    groups = [group(*one) for one in drawn]
    layers = len(groups) + more
    listed = np.array(list(orders(tuple(range(len(groups))))))
    found = Least(groups, CLUSTER, COST, layers, 1 / 3).seconds(listed, most)
    for row, order in enumerate(listed):
        for m in range(1, most + 1):
            assert found[row, m - 1] <= least([groups[i] for i in order], layers, m) * (1 + 1e-9)


def test_one_stage_takes_exactly_that() -> None:
    alone = [group(0, 1.5, 0.5, 1.0)]
    found = Least(alone, CLUSTER, COST, 4, 1 / 3).seconds(np.array([[0]]), 3)
    np.testing.assert_allclose(found, [[7.5, 15.0, 22.5]])


def test_orders_are_the_distinct_permutations() -> None:
    assert list(orders((1, 1, 2))) == [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    assert len(list(orders((0, 1, 2, 3)))) == 24
