"""Reductions: every element of every holder exactly once, each term counted once, and the sum is right."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
from elasticd_planner.layout.channels import channels
from elasticd_planner.layout.gradient_reduction import Reduction, reductions
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.layout.two_level_sums import two_levels
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.plan import Plan
from hypothesis import given, settings

from tests.planner.models import LAYERS, SPEC, plan, plans
from tests.sizes import examples


@settings(max_examples=examples(30))
@given(plans())
def test_each_element_of_each_holder_is_reduced_exactly_once(made: Plan) -> None:
    layouts = Layouts(SPEC, made)
    found = reductions(layouts)
    for name in layouts.names:
        layout = layouts.parameter(name)
        for device in made.members:
            times = np.zeros(layout.shape, dtype=np.int64)
            for reduction in found:
                for piece in reduction.pieces:
                    if piece.name == name and device in reduction.devices:
                        times[piece.box.slices(Box.whole(layout.shape))] += 1
            held = np.zeros(layout.shape, dtype=np.int64)
            for box in layout.of(device):
                held[box.slices(Box.whole(layout.shape))] = 1
            assert (times == held).all()


@settings(max_examples=examples(30))
@given(plans())
def test_the_sum_over_counting_devices_is_the_sum_of_distinct_terms(made: Plan) -> None:
    """Give every term of every parameter a value of its own: the reduced sum has each once."""
    layouts = Layouts(SPEC, made)
    found = reductions(layouts)
    for name in layouts.names:
        holdings = layouts.gradient(name).holdings
        value = {term: 2.0**i for i, term in enumerate(sorted({str(h.partial) for h in holdings}))}
        shape = layouts.parameter(name).shape
        expected = np.zeros(shape)
        for term, number in value.items():
            covered = np.zeros(shape, dtype=bool)
            for holding in holdings:
                if holding.partial == term:
                    covered[holding.box.slices(Box.whole(shape))] = True
            expected += number * covered
        mine = {holding.device: value[str(holding.partial)] for holding in holdings}
        reduced = np.zeros(shape)
        for reduction in found:
            for piece in reduction.pieces:
                if piece.name == name:
                    total = sum(mine[device] for device in piece.counting)
                    reduced[piece.box.slices(Box.whole(shape))] += total
        assert (reduced == expected).all(), name


def of_parameter(found: tuple[Reduction, ...], name: str) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    counting = defaultdict(set)
    for reduction in found:
        for piece in reduction.pieces:
            if piece.name == name:
                counting[reduction.devices].add(piece.counting)
    return dict(counting)


def test_replicas_with_the_same_gradient_count_once_and_kv_replicas_add() -> None:
    wide = plan((2, [(LAYERS, [f"n0/{i}" for i in range(4)], [1, 1, 1, 1])]))
    found = reductions(Layouts(SPEC, wide))
    everybody = ("n0/0", "n0/1", "n0/2", "n0/3")
    assert of_parameter(found, "blocks.0.norm.weight") == {everybody: {("n0/0",)}}
    assert of_parameter(found, "blocks.0.k.weight") == {
        ("n0/0", "n0/1"): {("n0/0", "n0/1")},
        ("n0/2", "n0/3"): {("n0/2", "n0/3")},
    }


def test_a_set_has_one_reduction_in_an_order_all_ranks_share() -> None:
    made = plan(
        (2, [(1, ["n1/0", "n0/1"], [3, 1]), (2, ["n0/0"], [1])]), (1, [(LAYERS, ["n2/0", "n2/1"], [1, 1])])
    )
    found = reductions(Layouts(SPEC, made))
    sets = [reduction.devices for reduction in found]
    assert len(set(sets)) == len(sets)
    ranks = [sorted(made.rank(device) for device in devices) for devices in sets]
    assert ranks == sorted(ranks)


@settings(max_examples=examples(30))
@given(plans())
def test_a_ring_of_a_set_enters_each_node_once(made: Plan) -> None:
    for reduction in reductions(Layouts(SPEC, made)):
        devices = reduction.devices
        nodes = [node_of(device) for device in devices]
        crossings = sum(one != other for one, other in pairwise((*nodes, nodes[0])))
        assert crossings == (len(set(nodes)) if len(set(nodes)) > 1 else 0), devices
        for node in set(nodes):
            near = [made.rank(device) for device in devices if node_of(device) == node]
            assert near == sorted(near), "inside of a node in rank order"


def test_pipelines_that_take_turns_on_two_nodes_are_reduced_node_by_node() -> None:
    devices = ["n0/0", "n1/0", "n0/1", "n1/1"]
    made = plan(*((1, [(LAYERS, [device], [1])]) for device in devices))
    assert made.members == tuple(devices)
    (found,) = reductions(Layouts(SPEC, made))
    assert found.devices == ("n0/0", "n0/1", "n1/0", "n1/1")
    (channel,) = (channel for channel in channels(Layouts(SPEC, made), "n1/0") if channel.use == "reduce")
    assert channel.members == found.devices


def test_sums_have_two_levels_where_nodes_have_as_many_devices_each_and_more_than_one() -> None:
    assert two_levels(("a/0", "b/0", "a/1", "b/1")) == (("a/0", "a/1"), ("b/0", "b/1"))
    for flat in (
        ("a/0", "a/1", "a/2"),  # on one node
        ("a/0", "b/0", "c/0"),  # one on each
        ("a/0", "a/1", "b/0"),  # not as many
        ("a/0",),
    ):
        assert two_levels(flat) is None


@settings(max_examples=examples(20))
@given(plans())
def test_a_device_that_asks_for_its_own_reductions_gets_those_of_all_that_it_is_in(made: Plan) -> None:
    layouts = Layouts(SPEC, made)
    found = reductions(layouts)
    for device in made.members:
        assert reductions(layouts, device) == tuple(each for each in found if device in each.devices)
