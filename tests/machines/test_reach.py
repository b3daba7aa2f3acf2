"""The largest set of nodes that reach each other and suit a job, against a search of all sets."""

from __future__ import annotations

import random
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from elasticd.machines.job.state.reachable_nodes import MOST_EXACT, pair, together, words

NAMES = tuple("abcdefgh")


@st.composite
def networks(draw: st.DrawFn) -> tuple[dict[str, int], set[tuple[str, str]], list[set[str]]]:
    """Nodes with their devices, the pairs that are apart, and the holders of each box of the state."""
    nodes = NAMES[: draw(st.integers(1, len(NAMES)))]
    devices = {node: draw(st.integers(1, 4)) for node in nodes}
    pairs = [pair(*both) for both in combinations(nodes, 2)]
    apart = {both for both in pairs if draw(st.booleans())}
    boxes = draw(st.lists(st.sets(st.sampled_from(nodes), min_size=1), max_size=4))
    return devices, apart, boxes


@given(networks())
def test_no_set_that_works_has_more_devices(
    network: tuple[dict[str, int], set[tuple[str, str]], list[set[str]]],
) -> None:
    devices, apart, boxes = network

    def suits(nodes: frozenset[str]) -> bool:
        return all(nodes & holders for holders in boxes)

    found = together(devices, apart, suits)
    sizes = [
        sum(devices[node] for node in nodes)
        for count in range(1, len(devices) + 1)
        for nodes in map(frozenset, combinations(devices, count))
        if suits(nodes) and not any(pair(*both) in apart for both in combinations(nodes, 2))
    ]
    if found is None:
        assert not sizes
        return
    assert not any(pair(*both) in apart for both in combinations(found, 2))
    assert suits(found)
    assert sum(devices[node] for node in found) == max(sizes)


def test_of_equal_sets_it_is_the_same_one_whoever_asks() -> None:
    assert together({"b": 2, "a": 2}, {("a", "b")}, lambda nodes: True) == {"a"}


def test_pairs_of_other_nodes_do_not_matter() -> None:
    assert together({"a": 1, "b": 1}, {("a", "x"), ("x", "y")}, lambda nodes: True) == {"a", "b"}


def test_many_troubled_nodes_give_a_set_that_works_and_cannot_grow() -> None:
    """Two halves of a network of forty nodes, and a node that reaches only a part of its half."""
    nodes = [f"n{index:02d}" for index in range(40)]
    left, right = nodes[:25], nodes[25:]
    apart = {pair(one, other) for one in left for other in right} | {pair("n00", "n01"), pair("n00", "n02")}
    found = together(dict.fromkeys(nodes, 8), apart, lambda chosen: True)
    assert found == {*left} - {"n00"}
    assert together(dict.fromkeys(nodes, 8), apart, lambda chosen: "n30" in chosen) == {*right}
    rng = random.Random(7)
    for _ in range(20):
        apart = {pair(*both) for both in combinations(nodes, 2) if rng.random() < 0.3}
        assert len({node for both in apart for node in both}) > MOST_EXACT
        found = together(dict.fromkeys(nodes, 1), apart, lambda chosen: True)
        assert found is not None
        assert not any(pair(*both) in apart for both in combinations(found, 2))
        assert all(any(pair(node, other) in apart for other in found) for node in {*nodes} - found)


def test_it_is_said_who_does_not_reach_whom() -> None:
    assert words([("a", "b")]) == "nodes a and b do not reach each other on the data network"
    many = [("a", name) for name in "bcdefg"]
    assert "a and e and 2 more pairs do not" in words(many)
