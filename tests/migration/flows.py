"""The least busiest link by maximum flow: the oracle for the choice of sources. Shares nothing with it."""

from collections import defaultdict
from collections.abc import Sequence

import networkx as nx
from elasticd_migration.source_choice import Want
from elasticd_planner.spec.cluster import node_of


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
