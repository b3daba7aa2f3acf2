"""A second lower bound, for whole layers and what memory holds: strong where a stage has few layers.

In a pipeline of m micro-batches a stage with n of the L layers, each of cost c, needs

    m n c + (L - n) c_min  <=  T

by the formula, since one micro-batch's way through the other stages takes (L - n) c_min at least; m n c <= T
holds in every schedule and in the steady state. n is whole, at least 1 and no more than what the memory of
the group holds at any position. As the n of a pipeline sum to L, its m is the sum of m n / L over its stages,
so that all pipelines together take at most the sum over all groups of

    max over m of (m / L) (the largest n)

over the numbers of micro-batches that the pipelines have. Any m may be among those of many pipelines; of one or
two all choices are looked at in turn. A node adds what its best division does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from elasticd_planner.grouping.node_partitions import GroupType, NodeKind, NodePartitioner
from elasticd_planner.numeric import EQUAL, Floats, Ints
from elasticd_planner.search.task import Task

#: A group: cost of a layer, and the most layers that its memory holds.
Piece = tuple[float, int]

#: Divisions of alike nodes, and how many nodes there are.
Nodes = tuple[Sequence[Sequence[Piece]], int]


@dataclass(frozen=True, kw_only=True)
class IntegerLayerBound:
    """layers: L. fastest: c_min, 0 where nothing is asked of the other stages. most: micro-batches of a
    pipeline at most. pipelines: how many there are if one or two take exactly `most` together, else 0."""

    layers: int
    fastest: float
    most: int
    pipelines: int = 0

    def adds(self, costs: Floats, rooms: Ints, limit: float) -> Floats:
        """Micro-batches that groups add at most within `limit`: by group, and by choice of what the pipelines
        take. Sums over groups hold for each choice alone."""
        if not self.pipelines:
            n = np.arange(1, self.layers + 1)
            left = np.maximum(limit - (self.layers - n) * self.fastest, 0.0) / n
            taken = np.minimum(np.floor(left / costs[:, None] * (1 + EQUAL)), self.most)
            found: Floats = np.where(n <= rooms[:, None], taken * n, 0.0).max(axis=1)[:, None] / self.layers
            return found
        counts = np.array([self.most]) if self.pipelines == 1 else np.arange(1, self.most)
        left = max(0.0, limit - self.layers * self.fastest)
        more = costs[:, None] * counts - self.fastest
        most: Floats = np.full(more.shape, float(self.layers)) * (limit >= self.layers * self.fastest)
        np.floor_divide(left * (1 + EQUAL), more, out=most, where=more > self.fastest * EQUAL)
        found = np.minimum(most, np.minimum(rooms, self.layers)[:, None]) * counts / self.layers
        # Of two pipelines one takes what the other leaves.
        return np.maximum(found, found[:, ::-1])

    def least(self, nodes: Sequence[Nodes], micro_batches: int, low: float) -> float:
        """The least T, not under `low`, in which nodes let pipelines take the batch; inf: never."""
        pieces = sorted({piece for divisions, _ in nodes for division in divisions for piece in division})
        if not pieces:
            return math.inf
        place = {piece: index for index, piece in enumerate(pieces)}
        costs = np.array([cost for cost, _ in pieces])
        rooms = np.array([room for _, room in pieces], dtype=np.int64)
        tables = [
            (
                np.array([place[piece] for division in divisions for piece in division], dtype=np.int64),
                np.cumsum([0, *(len(division) for division in divisions)]),
                count,
            )
            for divisions, count in nodes
        ]

        def enough(limit: float) -> bool:
            each = self.adds(costs, rooms, limit)
            total = np.zeros(each.shape[1])
            for flat, starts, count in tables:
                sums = np.zeros((len(flat) + 1, each.shape[1]))
                np.cumsum(each[flat], axis=0, out=sums[1:])
                total += count * np.diff(sums[starts], axis=0).max(axis=0, initial=0.0)
            return bool((total >= micro_batches * (1 - EQUAL)).any())

        if low > 0 and enough(low):
            return low
        high = max(low, self.layers * float(costs.min()))
        for _ in range(64):
            if enough(high):
                break
            low, high = high, high * 2
        else:
            return math.inf
        while high > low * (1 + EQUAL):
            middle = (low + high) / 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return low


def nodes_of(task: Task, kinds: Sequence[NodeKind], partitioner: NodePartitioner) -> list[Nodes] | None:
    """What `least_whole` reads of the nodes; None where not all divisions of one, or not the fastest shares,
    can be listed."""
    devices = sum(kind.devices * len(kind.nodes) for kind in kinds)
    deepest = min(task.layers, devices)
    equal = all(len(task.cost.shares((1.0, 2.0, *(1.0,) * w)[:w])) == 1 for w in task.cost.widths(devices))
    rooms: dict[GroupType, int] = {}
    nodes: list[Nodes] = []
    for kind in kinds:
        if not partitioner.complete(kind, size=task.fixed_tp):
            return None
        divisions = partitioner.every(kind, size=task.fixed_tp)
        pieces = set()
        for division in divisions:
            for made in division.types:
                if made not in rooms:
                    rooms[made] = _room(task, made, deepest) if equal else task.layers
            pieces.add(tuple(sorted((made.block, rooms[made]) for made in division.types)))
        nodes.append((sorted(pieces), len(kind.nodes)))
    return nodes


def least_whole(task: Task, nodes: Sequence[Nodes], pipelines: int, low: float) -> float:
    """Seconds, not under `low`, that no plan of so many pipelines can beat, besides what comes after them."""
    blocks = [cost for divisions, _ in nodes for division in divisions for cost, _ in division]
    if not blocks or pipelines > task.micro_batches:
        return math.inf
    timing, few = task.cost.timing, pipelines <= 2
    whole = IntegerLayerBound(
        layers=task.layers,
        fastest=0.0 if timing.hidden or not timing.fill else min(blocks),
        most=task.micro_batches if few else task.micro_batches - pipelines + 1,
        pipelines=pipelines if few else 0,
    )
    return whole.least(nodes, task.micro_batches, low)


def _room(task: Task, kind: GroupType, deepest: int) -> int:
    """The most layers that a group holds at any position."""
    places = product(range(1, deepest + 1), (False, True))
    return max(kind.most_layers(task.cost, task.layers, at, first=first) for at, first in places)
