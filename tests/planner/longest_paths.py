"""The end of each pass of a pipeline, as the longest path through a graph of passes and messages.

It shares nothing with `pass_order.timed_passes`, which is compared with it, but the order of passes of a stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import networkx as nx
from elasticd_planner.cost.schedule import passes


def ends(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    boundary: Sequence[float] = (),
    chunks: int = 1,
) -> dict[tuple[str, int, int], float]:
    """When each pass (kind, place, micro-batch) is over. It begins after what it needs, and after the one
    before it on its stage; messages go one after the other on their link in their direction.

    Args:
        forward: times [place, micro-batch].
        backward: times likewise.
        boundary: of a message between two places, one way; empty: zeros.
        chunks: of each stage.
    """
    stages, last = len(forward) // chunks, len(forward) - 1
    graph = nx.DiGraph()
    for stage in range(stages):
        previous: object = "begin"
        sent: dict[tuple[str, int], object] = defaultdict(lambda: "begin")
        for kind, micro, chunk in passes(stages, stage, len(forward[0]), chunks):
            place = chunk * stages + stage
            begin, end = (("begin", kind, place, micro), ("end", kind, place, micro))
            graph.add_edge(previous, begin, weight=0)
            graph.add_edge(begin, end, weight=(forward if kind == "forward" else backward)[place][micro])
            if kind == "backward":
                graph.add_edge(("end", "forward", place, micro), begin, weight=0)
            target = place + (1 if kind == "forward" else -1)
            if 0 <= target <= last:
                link = min(place, target)
                going, arrived = ("going", kind, place, micro), ("arrived", kind, target, micro)
                graph.add_edge(end, going, weight=0)
                graph.add_edge(sent[kind, link % stages], going, weight=0)
                graph.add_edge(going, arrived, weight=boundary[link] if boundary else 0)
                graph.add_edge(arrived, ("begin", kind, target, micro), weight=0)
                sent[kind, link % stages] = arrived
            previous = end
    longest: dict[object, float] = defaultdict(int)
    for node in nx.topological_sort(graph):
        for _, after, weight in graph.out_edges(node, data="weight"):
            longest[after] = max(longest[after], longest[node] + weight)
    return {node[1:]: time for node, time in longest.items() if node[0] == "end"}  # type: ignore[index, misc]
