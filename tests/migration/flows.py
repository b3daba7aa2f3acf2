"""Wants, and what a choice of sources puts on the links. The least busiest link by maximum flow is the oracle
for the choice: it shares nothing with it."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import networkx as nx
from elasticd_migration.source_choice import WHOLE_BELOW_BYTES, Share, SourceChooser
from elasticd_planner.spec.cluster import node_of


class Want(NamedTuple):
    """`size` bytes that `destination` lacks and that each of `holders` has, the destination not among them."""

    destination: str
    size: int
    holders: tuple[str, ...]


def choose(wants: Sequence[Want], *, whole_below: int = WHOLE_BELOW_BYTES) -> list[tuple[Share, ...]]:
    """The shares of each want; they add up to its size."""
    dealing = SourceChooser(whole_below)
    member = [dealing.class_of(want.destination, want.holders) for want in wants]
    for want, index in zip(wants, member, strict=True):
        dealing.add(index, want.size)
    dealing.balance()
    return [dealing.shares(index, want.size) for want, index in zip(wants, member, strict=True)]


class Loads(NamedTuple):
    """Bytes over each link."""

    out_of_device: dict[str, int]
    out_of_node: dict[str, int]
    into_node: dict[str, int]

    @property
    def busiest(self) -> int:
        return max((most for link in self for most in link.values()), default=0)


def loads(wants: Sequence[Want], chosen: Sequence[Sequence[Share]]) -> Loads:
    """What a choice puts on each link."""
    found = Loads(defaultdict(int), defaultdict(int), defaultdict(int))
    for want, shares in zip(wants, chosen, strict=True):
        home = node_of(want.destination)
        for share in shares:
            found.out_of_device[share.source] += share.size
            node = node_of(share.source)
            if node != home:
                found.out_of_node[node] += share.size
                found.into_node[home] += share.size
    return found


def least_busiest(wants: Sequence[Want], precision: int = 2000) -> int:
    """By bisection over the capacity of all links; at most 1/precision of all bytes too high."""
    near = [tuple(h for h in want.holders if node_of(h) == node_of(want.destination)) for want in wants]
    inside: dict[str, int] = defaultdict(int)
    into: dict[str, int] = defaultdict(int)
    for want, found in zip(wants, near, strict=True):
        (inside if found else into)[node_of(want.destination)] += want.size
    total = sum(want.size for want in wants)

    def carried(limit: int) -> bool:
        graph = nx.DiGraph()
        for i, (want, found) in enumerate(zip(wants, near, strict=True)):
            graph.add_edge("all", i, capacity=want.size)
            for holder in found or want.holders:
                graph.add_edge(i, holder)
                graph.add_edge(holder, node_of(holder), capacity=limit)
                graph.add_edge(node_of(holder), "end", capacity=limit + inside[node_of(holder)])
        return bool(nx.maximum_flow_value(graph, "all", "end") == total)

    low, high = max(into.values(), default=0), total
    while high - low > max(1, total // precision):
        middle = (low + high) // 2
        low, high = (low, middle) if carried(middle) else (middle, high)
    return high
