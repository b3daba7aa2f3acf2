"""The lanes of a pipeline as a division of sequences sees them: speed, memory, and a tree over their nodes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cached_property
from itertools import accumulate

from elasticd_planner.value import Value, refuse

#: Slowdowns are in parts of a normal lane's time for the same work.
NORMAL = 64
#: The speed of a normal lane: large, because speeds are rounded.
SPEED = 1 << 14

#: Lanes [first, stop) of a tree, by their places in its order.
Vertex = tuple[int, int]


class LaneSet(Value, frozen=True, kw_only=True):
    """The lanes of a pipeline, in their order."""

    nodes: tuple[int, ...]  # the node of each; lanes of one node have the quicker link
    capacity: tuple[int, ...]  # [tokens] of a row that each holds
    slowdown: tuple[int, ...]  # [64ths] of a normal lane's time that each takes for the same work

    def __post_init__(self) -> None:
        if not self.nodes or not len(self.nodes) == len(self.capacity) == len(self.slowdown):
            refuse("lanes: each needs a node, a capacity and a slowdown")
        if min(self.capacity) < 1 or min(self.slowdown) < 1:
            refuse("lanes: capacities and slowdowns must be at least 1")


class LaneTree:
    """The lanes of a pipeline in an order in which those of a node follow each other, and a tree over them.
    Whatever follows counts lanes by their place in this order."""

    def __init__(self, lanes: LaneSet) -> None:
        self.order = sorted(range(len(lanes.nodes)), key=lambda lane: (lanes.nodes[lane], lane))
        self.capacity = [lanes.capacity[lane] for lane in self.order]
        self.slowdown = [lanes.slowdown[lane] for lane in self.order]
        self.speeds = [max(1, NORMAL * SPEED // each) for each in self.slowdown]
        self.fastest = max(self.speeds)
        self.before = [0, *accumulate(self.speeds)]
        self._nodes = [lanes.nodes[lane] for lane in self.order]
        self._rooms: dict[Vertex, tuple[int, int]] = {}
        self._paths: list[list[Vertex]] = []
        self._near: dict[Vertex, list[Vertex]] = {}

    def __len__(self) -> int:
        return len(self.order)

    @cached_property
    def node_ends(self) -> list[int]:
        """The index at which each node's lanes end."""
        return [at for at in range(1, len(self)) if self._nodes[at] != self._nodes[at - 1]] + [len(self)]

    @cached_property
    def levels(self) -> list[list[Vertex]]:
        """The vertices of the tree by level, the widest first: halves of the nodes, then halves of a node's
        lanes, and single lanes at last."""
        levels = [[(0, len(self))]]
        while any(b - a > 1 for a, b in levels[-1]):
            levels.append([half for vertex in levels[-1] for half in self.halves(vertex)])
        return levels

    @cached_property
    def level_facts(self) -> list[tuple[int, int, int]]:
        """Of each level: the speed of its slowest vertex, the largest margin of one, and the longest sequence
        that one of it, or of a level below it, holds in parts by speed [tokens]."""
        longest, found = 0, []
        for level in reversed(self.levels):
            rooms = list(map(self.room, level))
            longest = max(longest, max(holds - margin for holds, margin in rooms))
            found.append((min(map(self.speed, level)), max(margin for _, margin in rooms), longest))
        return found[::-1]

    @cached_property
    def vertices(self) -> list[Vertex]:
        """All vertices, the widest first."""
        return list(dict.fromkeys(vertex for level in self.levels for vertex in level))

    def path(self, place: int) -> list[Vertex]:
        """The vertices that have a lane."""
        if not self._paths:
            found: list[list[Vertex]] = [[] for _ in self.order]
            for a, b in self.vertices:
                for at in range(a, b):
                    found[at].append((a, b))
            self._paths = found
        return self._paths[place]

    def halves(self, vertex: Vertex) -> tuple[Vertex, ...]:
        """The halves of a vertex, which is its own where it has one lane."""
        a, b = vertex
        if b - a == 1:
            return (vertex,)
        first, last = bisect_right(self.node_ends, a), bisect_left(self.node_ends, b)
        middle = self.node_ends[(first + last) // 2] if last > first else (a + b + 1) // 2
        return (a, middle), (middle, b)

    def near(self, place: int) -> list[Vertex]:
        """The vertices of several lanes that are in the node of a lane, or have the lane, the narrowest
        first."""
        at = bisect_right(self.node_ends, place)
        start, stop = self.node_ends[at - 1] if at else 0, self.node_ends[at]
        if (start, stop) not in self._near:
            found, level = [], [(0, len(self))]
            while level:
                found.append(level)
                halves = [half for a, b in level if b - a > 1 for half in self.halves((a, b))]
                level = [(a, b) for a, b in halves if a < stop and start < b and b - a > 1]
            self._near[start, stop] = [vertex for level in reversed(found) for vertex in level]
        return self._near[start, stop]

    def speed(self, vertex: Vertex) -> int:
        """Of all its lanes together."""
        return self.before[vertex[1]] - self.before[vertex[0]]

    def room(self, vertex: Vertex) -> tuple[int, int]:
        """The tokens of a row of a vertex, when its lanes have parts of all sequences by their speed; and the
        tokens that a sequence may take beyond its own of them, because parts are whole pairs. (A sequence of so
        many tokens as the latter has one pair for the slowest lane.)"""
        found = self._rooms.get(vertex)
        if found is None:
            a, b = vertex
            total, speeds = self.speed(vertex), self.speeds[a:b]
            holds = min([room * total // speed for room, speed in zip(self.capacity[a:b], speeds, strict=True)])
            found = self._rooms[vertex] = holds, 2 * -(-total // min(speeds)) if b - a > 1 else 0
        return found
