"""Who keeps which state: each cell of a parameter dealt in parts to its holders, each part on several nodes.

The rule of ZeRO with replicas (StatePolicy). A cell is what one set of devices holds of a parameter: it is
cut at all borders of their boxes. It is split along one dimension, in whole rows, over its holders, in
proportion to their speeds; a small cell is left whole and goes to the least loaded of them. Each part then gets
its further replicas: holders on other nodes first, in ring order; then members on other nodes that do not
compute the box, the least loaded; and where there are not so many nodes, further devices of the same ones.

Pure, and the same on every rank: everything that is equal goes by rank. What a plan does not change is dealt as
before: speeds count in coarse levels, so that one micro-batch more moves nothing.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import ne, or_
from typing import NamedTuple

from elasticd_planner.spec.box import Box, Holding, cells
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.plan import Plan

#: Elements that a part has at least; a cell that has fewer for each holder stays whole.
LEAST = 256
#: Levels of speed that are told apart: a device at 30 % of the fastest counts as one quarter.
LEVELS = 4


class Part(NamedTuple):
    """A box of a parameter: who computes with it, and who keeps its state, each in rank order."""

    box: Box
    holders: tuple[str, ...]
    keepers: tuple[str, ...]

    @property
    def leader(self) -> str:
        """The lowest-ranked device that computes with the box and keeps its state; there is always one."""
        return next(device for device in self.keepers if device in self.holders)


class Dealer:
    """Deals the state of a model's parameters, one after the other, over the members of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._replicas = plan.state.replicas or 0
        self._rank = {device: i for i, device in enumerate(plan.members)}
        self._node = {device: node_of(device) for device in plan.members}
        self._speed = speeds(plan)
        self._load: dict[str, int] = dict.fromkeys(plan.members, 0)
        self._nodes = tuple(dict.fromkeys(self._node.values()))
        self._heaps: dict[str, list[tuple[int, int, str]]] = {}  # made when one is first asked for

    def deal(self, holdings: Sequence[Holding], count: int) -> tuple[Part, ...]:
        """The parts of a parameter that is held so; `count` such parameters are dealt alike."""
        parts: list[Part] = []
        for cell, held in cells(holdings):
            holders = tuple(sorted({holding.device for holding in held}, key=self._rank.__getitem__))
            for box, first in self._parts(cell, holders):
                keepers = tuple(sorted(self._keepers(first, holders), key=self._rank.__getitem__))
                parts.append(Part(box, holders, keepers))
                elements = box.size * count
                for device in keepers:
                    self._charge(device, elements)
        return tuple(parts)

    def kept(self, parts: Sequence[Part]) -> tuple[Holding, ...]:
        """The layout of the state. A box of it lies in one that its device computes with, or touches none."""
        boxes: dict[tuple[int, bool], list[Box]] = defaultdict(list)
        for part in parts:
            for device in part.keepers:
                boxes[self._rank[device], device in part.holders].append(part.box)
        members = tuple(self._rank)
        return tuple(
            Holding(device=members[rank], box=box)
            for rank, computes in sorted(boxes)
            for box in joined(boxes[rank, computes])
        )

    def _parts(self, cell: Box, holders: Sequence[str]) -> Iterator[tuple[Box, str]]:
        """The cell in parts, each with the holder whose it is first."""
        if len(holders) == 1 or cell.size < LEAST * len(holders):
            yield cell, min(holders, key=lambda device: (self._load[device], self._rank[device]))
            return
        dims = range(len(cell.shape))
        dim = next((d for d in dims if cell.shape[d] >= len(holders)), None)
        if dim is None:
            dim = max(dims, key=lambda d: (cell.shape[d], -d))
        fastest = max(self._speed[device] for device in holders)
        weights = [max(1, round(LEVELS * self._speed[device] / fastest)) for device in holders]
        start = cell.start[dim]
        for device, rows in zip(holders, divided(cell.shape[dim], weights), strict=True):
            if rows:
                yield cell.cropped(dim, start, start + rows), device
            start += rows

    def _keepers(self, first: str, holders: Sequence[str]) -> list[str]:
        """The devices of one part: `first`, and its replicas."""
        kept = [first]
        if self._replicas == 1:
            return kept
        nodes = {self._node[first]}
        turn = holders.index(first) + 1
        ring = [*holders[turn:], *holders[: turn - 1]]
        for device in ring:
            if len(kept) == self._replicas:
                break
            if self._node[device] not in nodes:
                kept.append(device)
                nodes.add(self._node[device])
        while len(kept) < self._replicas and len(nodes) < len(self._nodes):
            device = min(self._top(node) for node in self._nodes if node not in nodes)[2]
            kept.append(device)
            nodes.add(self._node[device])
        more = self._replicas - len(kept)
        if more > 0:  # not so many nodes: further devices of the same ones
            kept += [device for device in ring if device not in kept][:more]
        more = self._replicas - len(kept)
        if more > 0:
            rest = [device for device in self._rank if device not in kept and device not in holders]
            kept += sorted(rest, key=lambda device: (self._load[device], self._rank[device]))[:more]
        return kept

    def _charge(self, device: str, elements: int) -> None:
        self._load[device] += elements
        if self._heaps:
            heapq.heappush(self._heaps[self._node[device]], self._entry(device))

    def _top(self, node: str) -> tuple[int, int, str]:
        """The least loaded device of a node; what the heap says of earlier loads is dropped."""
        if not self._heaps:
            self._heaps = {name: [] for name in self._nodes}
            for device in self._rank:
                heapq.heappush(self._heaps[self._node[device]], self._entry(device))
        heap = self._heaps[node]
        while heap[0][0] != self._load[heap[0][2]]:
            heapq.heappop(heap)
        return heap[0]

    def _entry(self, device: str) -> tuple[int, int, str]:
        return self._load[device], self._rank[device], device


def speeds(plan: Plan) -> dict[str, float]:
    """How fast the members are, as the plan has it: the layers that each does in a step, by its share of them.
    A carrier does none."""
    found = dict.fromkeys(plan.members, 0.0)
    for pipeline in plan.by_lane:
        for stage in pipeline.stages:
            work = pipeline.micro_batches * stage.layers
            for share, device in zip(stage.shares, stage.devices, strict=True):
                found[device] = work * share / sum(stage.shares)
    return found


def divided(count: int, weights: Sequence[int]) -> list[int]:
    """`count` in proportion to `weights` by largest remainder; what is equal goes to the first."""
    total = sum(weights)
    given = [count * weight // total for weight in weights]
    order = sorted(range(len(weights)), key=lambda i: (-(count * weights[i] % total), i))
    for index in order[: count - sum(given)]:
        given[index] += 1
    return given


def joined(boxes: Sequence[Box]) -> list[Box]:
    """Disjoint boxes with neighbours made one where together they are a box again."""
    rest = sorted(boxes)
    index = 0
    while index < len(rest):
        for other in range(index + 1, len(rest)):
            whole = union(rest[index], rest[other])
            if whole is not None:
                del rest[other]
                rest[index] = whole
                index = -1
                break
        index += 1
    return sorted(rest)


def union(a: Box, b: Box) -> Box | None:
    """The box that two disjoint boxes make up together, if they do."""
    starts, stops = map(ne, a.start, b.start), map(ne, a.stop, b.stop)
    differ = [dim for dim, either in enumerate(map(or_, starts, stops)) if either]
    if len(differ) != 1:
        return None
    (dim,) = differ
    if a.stop[dim] == b.start[dim]:
        return Box(start=a.start, stop=b.stop)
    if b.stop[dim] == a.start[dim]:
        return Box(start=b.start, stop=a.stop)
    return None


def with_carriers(plan: Plan) -> Plan:
    """`plan` with idle devices as members where its replicas need them: if those that compute are on fewer
    nodes than each box is to have replicas, all idle devices of the nodes with the most of them carry some."""
    nodes = {node_of(device) for device in plan.places}
    spare: dict[str, list[str]] = defaultdict(list)
    for device in (*plan.idle, *plan.carriers):
        spare[node_of(device)].append(device)
    away = sorted((node for node in spare if node not in nodes), key=lambda node: (-len(spare[node]), node))
    missing = max(0, (plan.state.replicas or 0) - len(nodes))
    carriers = tuple(sorted(device for node in away[:missing] for device in spare[node]))
    if carriers == plan.carriers:
        return plan
    idle = tuple(device for device in (*plan.idle, *plan.carriers) if device not in carriers)
    return plan.replace(carriers=carriers, idle=idle)
