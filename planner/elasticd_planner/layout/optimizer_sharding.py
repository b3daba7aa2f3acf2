"""The keepers of optimizer state: each cell of a parameter dealt in parts to its holders, each part on several
nodes.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import ne, or_
from typing import NamedTuple

from elasticd_planner.spec.box import Box, covered
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


class Dealt(NamedTuple):
    """A cell of a parameter, dealt in rows to those that hold it. Most ranks need the parts of few cells."""

    cell: Box
    dim: int | None  #: the dimension that it is split along; None: it stays whole, as one row
    holders: tuple[str, ...]
    rows: Sequence[int]  #: of the part of each holder
    keepers: Sequence[tuple[str, ...]]  #: who keeps the state of each holder's part, in rank order

    @property
    def parts(self) -> Iterator[Part]:
        """The parts that there are."""
        cell, dim = self.cell, self.dim
        start = 0 if dim is None else cell.start[dim]
        for rows, keepers in zip(self.rows, self.keepers, strict=True):
            if rows:
                box = cell if dim is None else cell.cropped(dim, start, start + rows)
                yield Part(box, self.holders, keepers)
            start += rows


class _Ring(NamedTuple):
    """Devices that hold a cell, in rank order."""

    holders: tuple[str, ...]
    weights: tuple[int, ...]  #: of their parts of it
    #: By holder, as far as nodes say who keeps its part: it, and the next ones on other nodes.
    keepers: tuple[tuple[str, ...], ...]


class OptimizerSharder:
    """Deals the state of a model's parameters, one after the other, over the members of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._replicas = plan.state.replicas or 0
        #: Of the members.
        self.rank = {device: i for i, device in enumerate(plan.members)}
        self._node = {device: node_of(device) for device in plan.members}
        self._speed = speeds(plan)
        self._load: dict[str, int] = dict.fromkeys(plan.members, 0)
        self._nodes = tuple(dict.fromkeys(self._node.values()))
        self._heaps: dict[str, list[tuple[int, int, str]]] = {}  # made when one is first asked for
        self._rings: dict[tuple[str, ...], _Ring] = {}

    def deal(self, holders: Mapping[Box, Iterable[str]], count: int) -> tuple[Dealt, ...]:
        """The cells of a parameter whose boxes are held so; `count` such parameters are dealt alike."""
        found: list[Dealt] = []
        for cell, around in covered(holders):
            ring = self._ring({device for box in around for device in holders[box]})
            dim, rows = self._rows(cell, ring)
            elements = cell.size // sum(rows) * count
            keepers = [
                self._charged(ring, turn, of_part * elements) if of_part else ()
                for turn, of_part in enumerate(rows)
            ]
            found.append(Dealt(cell, dim, ring.holders, rows, keepers))
        return tuple(found)

    def _ring(self, devices: Iterable[str]) -> _Ring:
        holders = self._sorted(devices)
        if holders not in self._rings:
            fastest = max(self._speed[device] for device in holders)
            weights = (max(1, round(LEVELS * self._speed[device] / fastest)) for device in holders)
            keepers = (self._elsewhere(holders, turn) for turn in range(len(holders)))
            self._rings[holders] = _Ring(holders, tuple(weights), tuple(keepers))
        return self._rings[holders]

    def _elsewhere(self, holders: Sequence[str], turn: int) -> tuple[str, ...]:
        """The holder whose turn it is, and its replicas among the next ones, each on a further node."""
        by_node: dict[str, str] = {}
        for device in chain(islice(holders, turn, None), islice(holders, turn)):
            if len(by_node) == self._replicas:
                break
            by_node.setdefault(self._node[device], device)
        return self._sorted(by_node.values())

    def _rows(self, cell: Box, ring: _Ring) -> tuple[int | None, Sequence[int]]:
        """The dimension that a cell is split along, and the rows of each holder's part; or the least loaded
        holder has it whole."""
        devices, shape = ring.holders, cell.shape
        if len(devices) == 1 or cell.size < LEAST * len(devices):
            first = min(devices, key=self._load.__getitem__)
            return None, [int(device == first) for device in devices]
        dim = next((d for d, extent in enumerate(shape) if extent >= len(devices)), None)
        if dim is None:
            dim = max(range(len(shape)), key=lambda d: (shape[d], -d))
        return dim, divided(shape[dim], ring.weights)

    def _charged(self, ring: _Ring, turn: int, elements: int) -> tuple[str, ...]:
        """The keepers of the part of the holder whose turn it is, in rank order: each has so many elements
        more."""
        keepers = ring.keepers[turn]
        if len(keepers) < self._replicas:
            keepers = self._sorted(self._more(keepers, ring, turn))
        for device in keepers:
            self._load[device] += elements
            if self._heaps:
                heapq.heappush(self._heaps[self._node[device]], self._entry(device))
        return keepers

    def _more(self, keepers: Sequence[str], ring: _Ring, turn: int) -> list[str]:
        """The keepers with further ones where holders are on too few nodes."""
        kept, nodes = list(keepers), {self._node[device] for device in keepers}
        while len(kept) < self._replicas and len(nodes) < len(self._nodes):
            device = min(self._top(node) for node in self._nodes if node not in nodes)[2]
            kept.append(device)
            nodes.add(self._node[device])
        missing = self._replicas - len(kept)
        if missing > 0:  # not so many nodes: further devices of the same ones
            others = (*ring.holders[turn + 1 :], *ring.holders[:turn])
            kept += [device for device in others if device not in kept][:missing]
        missing = self._replicas - len(kept)
        if missing > 0:
            rest = [device for device in self.rank if device not in kept and device not in ring.holders]
            kept += sorted(rest, key=self._load.__getitem__)[:missing]
        return kept

    def _sorted(self, devices: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(devices, key=self.rank.__getitem__))

    def _top(self, node: str) -> tuple[int, int, str]:
        """The least loaded device of a node; what the heap says of earlier loads is dropped."""
        if not self._heaps:
            self._heaps = {name: [] for name in self._nodes}
            for device in self.rank:
                heapq.heappush(self._heaps[self._node[device]], self._entry(device))
        heap = self._heaps[node]
        while heap[0][0] != self._load[heap[0][2]]:
            heapq.heappop(heap)
        return heap[0]

    def _entry(self, device: str) -> tuple[int, int, str]:
        return self._load[device], self.rank[device], device


def speeds(plan: Plan) -> dict[str, float]:
    """The speeds of the members, as the plan has it: the layers that each does in a step, by its share of them.
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
    nodes = {node_of(device) for device in plan.members if device not in plan.carriers}
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
