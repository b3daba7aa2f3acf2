"""Which nodes reach each other on the data network, and the largest set of them that a job can go on with.

A pair of nodes is apart where one of the two fails to reach the other. A set works whose nodes all reach each
other, and which suits the job (it holds all state, say). More nodes never suit less, so that the largest set
that works is a maximal clique of the graph of pairs that are not apart. A node that reaches all others is in
each of them: only the troubled ones are searched, exactly up to `MOST_EXACT` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

#: Two nodes in the order of their names.
Pair = tuple[str, str]
#: Nodes that are apart from some other, up to which all maximal cliques are looked at: 16 have 324 at most.
MOST_EXACT = 16


def pair(one: str, other: str) -> Pair:
    """Both, in the order of their names."""
    return (one, other) if one < other else (other, one)


def together(
    devices: Mapping[str, int], apart: Collection[Pair], suits: Callable[[frozenset[str]], bool]
) -> frozenset[str] | None:
    """The set of nodes with the most devices that reach each other and suit the job; None without any.

    With more than `MOST_EXACT` troubled nodes it is the best of one set grown from each of them, which may not
    be the largest.

    Args:
        devices: How many devices of the job each node has.
        apart: The pairs that do not reach each other; others than these nodes do not matter.
        suits: Whether the job can go on with these nodes. It must be true of a set where it is of a part of it.
    """
    apart = {both for both in apart if both[0] in devices and both[1] in devices}
    troubled = sorted({node for both in apart for node in both})
    free = frozenset(devices) - {*troubled}
    grown = _cliques(troubled, apart) if len(troubled) <= MOST_EXACT else _greedy(troubled, apart, devices)
    sets = {free | larger for larger in grown} or {free}
    order = sorted(sets, key=lambda nodes: (-sum(devices[node] for node in nodes), sorted(nodes)))
    return next((nodes for nodes in order if nodes and suits(nodes)), None)


def _cliques(nodes: Collection[str], apart: Collection[Pair]) -> Iterable[frozenset[str]]:
    """All maximal sets of these that reach each other (Bron and Kerbosch 1973, with a pivot)."""
    near = {
        node: frozenset(other for other in nodes if other != node and pair(node, other) not in apart)
        for node in nodes
    }

    def grown(chosen: frozenset[str], more: frozenset[str], done: frozenset[str]) -> Iterator[frozenset[str]]:
        if not more and not done:
            yield chosen
            return
        pivot = max(more | done, key=lambda node: len(near[node] & more))
        for node in more - near[pivot]:
            yield from grown(chosen | {node}, more & near[node], done & near[node])
            more, done = more - {node}, done | {node}

    return grown(frozenset(), frozenset(nodes), frozenset())


def _greedy(
    nodes: Collection[str], apart: Collection[Pair], devices: Mapping[str, int]
) -> Iterable[frozenset[str]]:
    """From each node the set that grows by those with the least trouble, then the most devices."""
    trouble = {node: sum(node in both for both in apart) for node in nodes}
    order = sorted(nodes, key=lambda node: (trouble[node], -devices[node], node))
    groups = []
    for seed in order:
        chosen = {seed}
        for node in order:
            if node not in chosen and all(pair(node, other) not in apart for other in chosen):
                chosen.add(node)
        groups.append(frozenset(chosen))
    return groups


def words(apart: Iterable[Pair], most: int = 4) -> str:
    """A sentence about the nodes that do not reach each other."""
    pairs = [f"{one} and {other}" for one, other in sorted(apart)]
    more = f" and {len(pairs) - most} more pairs" if len(pairs) > most else ""
    return f"nodes {', '.join(pairs[:most])}{more} do not reach each other on the data network"
