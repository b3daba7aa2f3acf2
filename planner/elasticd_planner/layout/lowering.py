"""A redistribution lowered to the levels of links: layouts in between, where the steps to them are cheaper.

`resolve` says what must be communicated, whatever links devices talk over. Where links are unlike, a layout in
between can spare the slow ones. A lowering is a chain of such layouts; the steps from each to the next are
those of `resolve` again, inside each group of a level. Two kinds of steps are lowered:

- A sum whose terms lie in several groups (nodes, racks):

      source ─ reduce-scatter ─► a term of each group, in slices inside the group
             ─ all-reduce ─────► the sum, in the same slices, between groups
             ─ all-gather ─────► target, inside each group

- A value that several devices of a group need and none of them holds: it comes in slices, one to each of them,
  over the slow link, and is gathered inside the group (Megatron-LM's scatter and gather of stage boundaries).

With more levels slices are scattered again at each level, and gathered level by level. Groups may be of any
sizes: slices are then cut at the borders of all groups, and each cell is reduced between those that have it; or
each group has as many slices as the smallest can have.

Steps are priced by what they put on links (`seconds`). The cheapest chain is taken where it is clearly cheaper
than the steps of `resolve`, of equal ones the shortest. Where all links are alike steps stay what they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import msgspec

from elasticd_planner.layout.resolve import (
    ORDER,
    Cell,
    Communication,
    Demand,
    Operation,
    Uncovered,
    demands,
    resolve,
)
from elasticd_planner.spec.box import Box, Holding, TensorLayout, covered
from elasticd_planner.spec.cluster import Cluster, Link
from elasticd_planner.value import Value

#: A chain is taken where it is cheaper by this part of the flat steps' price, and a longer one than another
#: where it is cheaper by more than rounding. Played message by message (`benchmarks/_two_level.py`), rings and
#: chains on even nodes take what their price says, chains on uneven nodes up to an eighth more.
WORTH, ROUNDING = 0.05, 1e-9

#: The group of each device at one level of links.
Partition = Mapping[str, str]

#: Who has which boxes.
Boxes = tuple[tuple[str, Box], ...]


class Phase(Value, frozen=True, kw_only=True):
    """One part of a redistribution: the steps, all of which may go on at once, and the layout after them."""

    layout: TensorLayout
    steps: tuple[Communication, ...]


def lowered(
    source: TensorLayout,
    target: TensorLayout,
    cluster: Cluster,
    members: Sequence[str] = (),
    *,
    itemsize: int = 4,
    agree: bool = False,
) -> tuple[Phase, ...]:
    """The phases by which a tensor that is laid out as `source` is laid out as `target`, the last layout.

    Args:
        source, target, members, agree: as of `resolve`.
        cluster: whose links devices talk over.
        itemsize: bytes of an element.

    Raises:
        Uncovered, Invalid: as `resolve`.
    """
    listed = members or tuple(h.device for h in (*source.holdings, *target.holdings))
    rank = {device: at for at, device in enumerate(dict.fromkeys(listed))}
    flat = Phase(layout=target, steps=resolve(source, target, members, agree=agree))
    if not _partitions(cluster, rank):
        return (flat,)
    work = _Lowering(source, target, cluster, rank, itemsize, agree)
    chains = [work.chain(flow) for flow in _flows(source, target)]
    if all(len(chain) == 1 for chain in chains):
        return (flat,)
    return tuple(work.together(chains, number) for number in range(max(map(len, chains))))


def seconds(steps: Sequence[Communication], cluster: Cluster, itemsize: int = 4) -> float:
    """Seconds that steps take which go on at once: as long as the busiest link is busy, and no less than the
    longest way takes.

    Each device, and each group of a level, has one link to the others of its kind, which all that it sends
    shares, and all that it gets. Collectives are rings that go through a group before they leave it: a part of
    a reduce-scatter and of an all-gather passes all hops but one, of an all-reduce twice. A device does one
    collective after the other, in the order of the steps, and each waits for all of its devices; sends go on
    side by side.
    """
    load: dict[tuple[int, str, bool], float] = defaultdict(float)
    links: dict[tuple[int, str], Link] = {}
    rings: dict[str, float] = defaultdict(float)
    sends: dict[str, float] = defaultdict(float)
    for step in steps:
        moved, part = _moved(step, cluster)
        hops = []
        for source, destination, size in moved:
            here, there = cluster.places(source), cluster.places(destination)
            widths = []
            for level, (one, other) in enumerate(zip(here, there, strict=True)):
                if one == other:
                    break
                links[one], links[other] = cluster.exit(source, level), cluster.exit(destination, level)
                load[*one, False] += size * itemsize
                load[*other, True] += size * itemsize
                widths += [links[one].bandwidth, links[other].bandwidth]
            latency = cluster.reach((source, destination)).latency
            hops.append(latency + (size if part is None else part) * itemsize / min(widths))
        if step.operation in _RINGS:
            way = _RINGS[step.operation] * (sum(hops) - min(hops))
            done = max(rings[device] for device in step.devices) + way
            for device in step.devices:
                rings[device] = done
        elif hops:
            for device in step.devices:
                sends[device] = max(sends[device], *hops)
    busiest = max((size / links[level, name].bandwidth for (level, name, _), size in load.items()), default=0.0)
    return max((busiest, *(rings[device] + sends[device] for device in {*rings, *sends})))


#: Collectives, and how many times each passes around its ring.
_RINGS: dict[Operation, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


def _moved(step: Communication, cluster: Cluster) -> tuple[list[tuple[str, str, float]], float | None]:
    """(source, destination, elements) of a step; of a ring also the elements of the largest part that goes
    around."""
    if step.operation not in _RINGS:
        sent = [
            (source, needer, float(cell.box.size))
            for cell in step.cells
            for source in cell.sources
            for needer in cell.needers
            if source != needer
        ]
        return sent, None
    ring = sorted(step.devices, key=lambda device: [name for _, name in reversed(cluster.places(device))])
    total = sum(cell.box.size for cell in step.cells)
    parts: dict[str, float] = defaultdict(float)  # what a device gives to all, or gets of all
    for cell in step.cells:
        parts[cell.sources[0] if step.operation == "all_gather" else cell.needers[0]] += cell.box.size
    if step.operation == "all_reduce":
        parts = defaultdict(float, dict.fromkeys(ring, total / len(ring)))
    moved = []
    for device, after in zip(ring, [*ring[1:], ring[0]], strict=True):
        if step.operation == "all_reduce":
            moved.append((device, after, 2 * (total - parts[device])))
        else:  # neither is a part passed on to whose it is, nor by whom it is for
            moved.append((device, after, total - parts[after if step.operation == "all_gather" else device]))
    return moved, max(parts.values())


class BucketStep(NamedTuple):
    """The operation of one group on its copies of a bucket, all in this order: reduce-scatter, all-reduce or
    all-gather. A device that is not among them does nothing."""

    operation: Operation
    devices: tuple[str, ...]
    #: By device the elements start <= i < stop that the operation is about: of a reduce-scatter those whose sum
    #: the device gets, of an all-gather those that it gives, of an all-reduce the same for all.
    ranges: tuple[tuple[tuple[int, int], ...], ...]


def phases(
    devices: Sequence[str], elements: int, cluster: Cluster, itemsize: int = 4
) -> tuple[BucketStep, ...]:
    """The steps by which a bucket of so many elements, of which each of these devices has a term, becomes the
    sum on all.

    Every device carries out the steps that it is in, in this order. Then all have started all collectives that
    they share in one order, and all have the same sum to the bit. Without a lowering it is one all-reduce."""
    whole = Box.whole((elements,))
    source, target = (
        TensorLayout(
            name="bucket",
            shape=(elements,),
            dtype="",
            holdings=tuple(
                Holding(device=device, box=whole, partial=device if term else None) for device in devices
            ),
        )
        for term in (True, False)
    )
    return tuple(
        BucketStep(_COLLECTIVE[step.operation], step.devices, tuple(_ranges(step, d) for d in step.devices))
        for phase in lowered(source, target, cluster, devices, itemsize=itemsize)
        for step in phase.steps
        if step.operation in _COLLECTIVE
    )


#: Of a bucket with fewer elements than devices one device may have all: the others then get, or give, nothing.
_COLLECTIVE: dict[Operation, Operation] = {
    "reduce_scatter": "reduce_scatter",
    "sum": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "send": "all_gather",
}


def _ranges(step: Communication, device: str) -> tuple[tuple[int, int], ...]:
    gives = _COLLECTIVE[step.operation] == "all_gather"
    found: list[tuple[int, int]] = []
    for cell in step.cells:
        if device in (cell.sources if gives else cell.needers):
            (start,), (stop,) = cell.box.start, cell.box.stop
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, stop))
    return tuple(found)


# -- flows: cells that are held and needed alike -------------------------------------------------------------


class _Flow(NamedTuple):
    """Cells with the same holders by term and the same needers; or those that a gather or a scatter joins."""

    demands: tuple[Demand, ...]
    #: Whether layouts may be put in between: where nothing else is under way to the same cells.
    free: bool


def _flows(source: TensorLayout, target: TensorLayout) -> tuple[_Flow, ...]:
    asked = list(demands(source, target))
    times: dict[Box, int] = defaultdict(int)  # terms of the target that a cell has
    rings: dict[tuple[str, frozenset[str]], list[Demand]] = defaultdict(list)
    found: dict[tuple[object, ...], list[Demand]] = defaultdict(list)
    for demand in asked:
        times[demand.box] += 1
    for demand in asked:
        holders = frozenset(device for term in demand.terms for device in term)
        if len(holders) == 1 and len(demand.needers) > 1 and holders.issubset(demand.needers):
            rings["gather", frozenset(demand.needers)].append(demand)
        elif len(demand.terms) > 1 and len(demand.needers) == 1 and holders.issuperset(demand.needers):
            rings["scatter", holders].append(demand)
        else:
            found[demand.terms, demand.needers, times[demand.box] == 1].append(demand)
    flows = []
    for (kind, _), listed in rings.items():
        if len({demand.terms if kind == "gather" else demand.needers for demand in listed}) > 1:
            flows.append(_Flow(tuple(listed), False))
        else:  # cells that one device has, or needs, are no ring
            for demand in listed:
                found[demand.terms, demand.needers, times[demand.box] == 1].append(demand)
    for listed in found.values():
        flows.append(_Flow(tuple(listed), bool(listed[0].terms) and times[listed[0].box] == 1))
    return tuple(flows)


# -- chains of layouts ---------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """One part of a flow's chain: the boxes that devices hold after it, the term they are of (None: as the
    target says), and the steps."""

    holdings: tuple[Holding, ...]
    steps: tuple[Communication, ...]


class _Lowering:
    """One redistribution."""

    def __init__(
        self,
        source: TensorLayout,
        target: TensorLayout,
        cluster: Cluster,
        rank: Mapping[str, int],
        itemsize: int,
        agree: bool,
    ) -> None:
        self.source, self.target, self.cluster = source, target, cluster
        self.rank, self.itemsize, self.agree = rank, itemsize, agree
        self._terms: dict[str, list[Holding]] = defaultdict(list)
        for holding in target.holdings:
            self._terms[holding.device].append(holding)

    def chain(self, flow: _Flow) -> tuple[_Part, ...]:
        """The cheapest way of a flow: the steps of `resolve`, or a chain over some of the levels."""
        source, target = self._ends(flow)
        flat: tuple[_Part, ...] = (self._part(target, self._steps(source, target, agree=self.agree)),)
        if not flow.free:
            return flat
        demand = flow.demands[0]
        devices = {device for term in demand.terms for device in term} | {*demand.needers}
        partitions = _partitions(self.cluster, devices)
        best, least = flat, self._seconds(flat) * (1 - WORTH)
        for count in range(1, len(partitions) + 1):
            for levels in combinations(partitions, count):
                for made in self._made(flow, levels):
                    if made is not None and (spent := self._seconds(made)) < least:
                        best, least = made, spent * (1 - ROUNDING)
        return best

    def _made(self, flow: _Flow, levels: Sequence[Partition]) -> Iterator[tuple[_Part, ...] | None]:
        if len(flow.demands[0].terms) == 1:
            yield self._scattered(flow, levels)
            return
        for even in (False, True):
            yield self._summed(flow, levels, even=even)

    def together(self, chains: Sequence[tuple[_Part, ...]], number: int) -> Phase:
        """The phase of this number: of each chain its part, or where it has come to its end what keeps it."""
        holdings: list[Holding] = []
        cells: dict[tuple[Operation, tuple[str, ...]], list[Cell]] = defaultdict(list)
        for chain in chains:
            part = chain[min(number, len(chain) - 1)]
            steps = part.steps if number < len(chain) else _kept(part.holdings)
            holdings += part.holdings
            for step in steps:
                cells[step.operation, step.devices] += step.cells
        order = sorted(cells, key=lambda key: (ORDER[key[0]], [self.rank[d] for d in key[1]], key[0]))
        layout = msgspec.structs.replace(self.source, holdings=tuple(holdings))
        return Phase(
            layout=self.target if number == max(map(len, chains)) - 1 else layout,
            steps=tuple(
                Communication(operation=operation, devices=devices, cells=tuple(cells[operation, devices]))
                for operation, devices in order
            ),
        )

    def _summed(self, flow: _Flow, levels: Sequence[Partition], *, even: bool) -> tuple[_Part, ...] | None:
        """Terms are summed inside groups, level by level, then between the groups of the farthest level; what
        devices need is gathered the same way back. None where no group has two terms or two needers, or where
        `even` makes no difference."""
        needers = flow.demands[0].needers
        terms = _shared_out(flow.demands[0].terms, needers, levels)
        holders = self._sorted({device for term in terms for device in term})
        if all(_alone(devices, levels[0]) for devices in (holders, needers)):
            return None
        here = TensorLayout(name="x", shape=self.source.shape, dtype="", holdings=())
        boxes = [demand.box for demand in flow.demands]
        up, down = (_climbed(boxes, devices, levels, even=even) for devices in (holders, needers))
        if even and up == _climbed(boxes, holders, levels) and down == _climbed(boxes, needers, levels):
            return None
        before = msgspec.structs.replace(
            here,
            holdings=tuple(
                Holding(device=device, box=box, partial=str(number))
                for box in boxes
                for number, term in enumerate(terms)
                for device in term
            ),
        )
        chain: list[_Part] = []
        for level, held in zip(levels, up, strict=True):
            after = _layout(here, held, level)
            chain.append(_Part(after.holdings, self._steps(before, after, level)))
            before = after
        after = _layout(here, down[-1], None)
        chain.append(self._part(after, self._steps(before, after)))
        return (*chain, *self._gathered(here, down, levels, boxes, needers))

    def _scattered(self, flow: _Flow, levels: Sequence[Partition]) -> tuple[_Part, ...] | None:
        """A value comes in slices to the groups of the farthest level that need and lack it, and is gathered
        inside them, level by level. None where no such group has two needers."""
        (holders,), needers = flow.demands[0].terms, flow.demands[0].needers
        far, boxes = levels[-1], [demand.box for demand in flow.demands]
        home = {far[device] for device in holders}
        away = self._sorted(device for device in needers if far[device] not in home)
        if _alone(away, far):
            return None
        here = TensorLayout(name="x", shape=self.source.shape, dtype="", holdings=())
        stay = tuple(device for device in needers if far[device] in home)
        kept = _layout(here, tuple((device, box) for box in boxes for device in stay), None)
        held = _layout(here, tuple((device, box) for box in boxes for device in holders), None)
        down = _climbed(boxes, away, levels)
        steps = list(self._steps(held, kept, agree=False)) if stay else []
        for group in dict.fromkeys(far[device] for device in away):
            slices = tuple((device, box) for device, box in down[-1] if far[device] == group)
            # Holders take turns, those that are nearest to the group.
            near = self._nearest(holders, slices[0][0])
            of = tuple((near[turn % len(near)], box) for turn, (_, box) in enumerate(slices))
            steps += self._steps(_layout(here, of, None), _layout(here, slices, None))
        after = msgspec.structs.replace(here, holdings=kept.holdings + _layout(here, down[-1], None).holdings)
        chain = [self._part(after, tuple(steps))]
        for part in self._gathered(here, down, levels, boxes, away):
            ends = self._part(kept, _kept(kept.holdings))
            chain.append(_Part(ends.holdings + part.holdings, ends.steps + part.steps))
        return tuple(chain)

    def _gathered(
        self,
        here: TensorLayout,
        down: Sequence[Boxes],
        levels: Sequence[Partition],
        boxes: Sequence[Box],
        needers: Sequence[str],
    ) -> Iterator[_Part]:
        """From the slices of the farthest level to all that devices need, inside the groups of each level."""
        whole = tuple((device, box) for box in boxes for device in needers)
        for level, now, then in zip(
            reversed(levels), reversed(down), (*reversed(down[:-1]), whole), strict=True
        ):
            before, after = _layout(here, now, None), _layout(here, then, None)
            yield self._part(after, self._steps(before, after, level))

    def _ends(self, flow: _Flow) -> tuple[TensorLayout, TensorLayout]:
        """Source and target of a flow alone. Its terms are what adds up to the value that the target needs."""
        here = TensorLayout(name="x", shape=self.source.shape, dtype="", holdings=())
        held, needed = list[Holding](), list[Holding]()
        for box, terms, needers in flow.demands:
            held += [
                Holding(device=device, box=box, partial=str(number) if len(terms) > 1 else None)
                for number, term in enumerate(terms)
                for device in term
            ]
            needed += [Holding(device=device, box=box) for device in needers]
        return (
            msgspec.structs.replace(here, holdings=tuple(held)),
            msgspec.structs.replace(here, holdings=tuple(needed)),
        )

    def _steps(
        self,
        source: TensorLayout,
        target: TensorLayout,
        level: Partition | None = None,
        *,
        agree: bool = False,
    ) -> tuple[Communication, ...]:
        """The steps between two layouts, inside each group of a level; None: among all."""
        if level is None:
            return self._resolved(source, target, agree=agree)
        sides: list[dict[str, list[Holding]]] = []
        for layout in (source, target):
            groups: dict[str, list[Holding]] = defaultdict(list)
            for holding in layout.holdings:
                groups[level[holding.device]].append(holding)
            sides.append(groups)
        steps: list[Communication] = []
        for group, holdings in sides[1].items():
            held = msgspec.structs.replace(source, holdings=tuple(sides[0].get(group, ())))
            needed = msgspec.structs.replace(target, holdings=tuple(holdings))
            steps += self._resolved(held, needed, agree=False)
        return tuple(steps)

    def _resolved(
        self, source: TensorLayout, target: TensorLayout, *, agree: bool
    ) -> tuple[Communication, ...]:
        try:
            here = self._sorted(holding.device for holding in (*source.holdings, *target.holdings))
            return resolve(source, target, here, agree=agree)
        except Uncovered:
            # Nobody holds a term of it: the flow is of zeros.
            return tuple(
                Communication(
                    operation="zero",
                    devices=(holding.device,),
                    cells=(Cell(box=holding.box, sources=(), needers=(holding.device,)),),
                )
                for holding in target.holdings
            )

    def _part(self, layout: TensorLayout, steps: tuple[Communication, ...]) -> _Part:
        """Boxes that hold a part of the target, by the terms that it names."""
        return _Part(
            tuple(
                msgspec.structs.replace(holding, partial=self._partial(holding)) for holding in layout.holdings
            ),
            steps,
        )

    def _partial(self, holding: Holding) -> str | None:
        for known in self._terms[holding.device]:
            if known.box.contains(holding.box):
                return known.partial
        return None

    def _nearest(self, holders: Sequence[str], device: str) -> tuple[str, ...]:
        """The holders that meet a device at the nearest level."""
        way = self.cluster.places(device)

        def level(holder: str) -> int:
            there = self.cluster.places(holder)
            return next((at for at, (a, b) in enumerate(zip(way, there, strict=True)) if a == b), len(way))

        least = min(map(level, holders))
        return self._sorted(holder for holder in holders if level(holder) == least)

    def _seconds(self, chain: Sequence[_Part]) -> float:
        return sum(seconds(part.steps, self.cluster, self.itemsize) for part in chain)

    def _sorted(self, devices: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(set(devices), key=self.rank.__getitem__))


def _partitions(cluster: Cluster, devices: Iterable[str]) -> tuple[Partition, ...]:
    """The levels at which these devices are in several groups with a quicker link inside, the nearest first. Of
    levels whose groups have one link the farthest counts alone."""
    listed = list(devices)
    whole = cluster.reach(listed)
    ways = {device: cluster.places(device) for device in listed}
    found: list[Partition] = []
    above: list[Link | None] = [whole] * len(listed)
    for level in reversed(range(1, len(next(iter(ways.values()), ())))):
        groups: dict[str, list[str]] = defaultdict(list)
        for device, way in ways.items():
            groups[way[level][1]].append(device)
        reach = {name: cluster.reach(group) for name, group in groups.items() if len(group) > 1}
        inside = [reach.get(ways[device][level][1]) for device in listed]
        if any(link not in (None, far) for link, far in zip(inside, above, strict=True)):
            found.append({device: way[level][1] for device, way in ways.items()})
            above = inside
    return tuple(reversed(found))


def _alone(devices: Sequence[str], level: Partition) -> bool:
    """Returns True if each device is the only one of its group."""
    return len({level[device] for device in devices}) == len(devices)


def _shared_out(
    terms: Sequence[tuple[str, ...]], needers: Sequence[str], levels: Sequence[Partition]
) -> tuple[tuple[str, ...], ...]:
    """Each term with those of its holders that are in one group, at all levels: a term counts once. Groups that
    need the sum come first, then those that have other terms."""
    wanted = [{level[device] for device in needers} for level in levels]
    near = levels[0]
    others: dict[str, int] = defaultdict(int)
    for term in terms:
        for group in {near[device] for device in term}:
            others[group] += 1

    def rate(device: str) -> tuple[int, int]:
        return -sum(level[device] in groups for level, groups in zip(levels, wanted, strict=True)), -others[
            near[device]
        ]

    found = []
    for term in terms:
        first = near[min(term, key=rate)]
        found.append(tuple(device for device in term if near[device] == first))
    return tuple(found)


def _climbed(
    boxes: Sequence[Box], devices: Sequence[str], levels: Sequence[Partition], *, even: bool = False
) -> tuple[Boxes, ...]:
    """By level who has which slices: each group of the level has every box once, cut over all its devices; with
    `even` over as many in each group as the smallest has, so that groups have equal slices."""
    found: list[Boxes] = []
    now: dict[str, list[tuple[str, Box]]] = {  # by group of the level below: at first devices themselves
        device: [(device, box) for box in boxes] for device in devices
    }
    for level in levels:
        groups: dict[str, list[list[tuple[str, Box]]]] = defaultdict(list)
        for held in now.values():
            groups[level[held[0][0]]].append(held)
        most = min(map(len, groups.values())) if even else None
        now = {group: _cut(parts, most) for group, parts in groups.items()}
        found.append(tuple(entry for held in now.values() for entry in held))
    return tuple(found)


def _cut(parts: Sequence[Sequence[tuple[str, Box]]], most: int | None) -> list[tuple[str, Box]]:
    """Each part has all boxes, divided over its devices: they are divided over those of all parts, of which
    `most` get some."""
    if len(parts) == 1:
        return list(parts[0])
    by_box: dict[Box, list[str]] = defaultdict(list)
    for held in parts:
        for device, box in held:
            by_box[box].append(device)
    found = []
    for cell, around in covered(by_box):
        holders = [device for box in around for device in by_box[box]]
        found += list(zip(holders, _slices(cell, min(len(holders), most or len(holders))), strict=False))
    return found


def _slices(box: Box, count: int) -> list[Box]:
    """`count` slices of a box along its longest dimension, as even as can be; fewer where it is too short."""
    if not box.shape:
        return [box]
    extent = max(box.shape)
    dim = box.shape.index(extent)
    count = min(count, extent)
    edges = [box.start[dim] + at * extent // count for at in range(count + 1)]
    return [box.cropped(dim, start, stop) for start, stop in pairwise(edges)]


def _layout(here: TensorLayout, boxes: Boxes, level: Partition | None) -> TensorLayout:
    """Values; with a level a term of each of its groups."""
    holdings = tuple(
        Holding(device=device, box=box, partial=None if level is None else level[device])
        for device, box in boxes
    )
    return msgspec.structs.replace(here, holdings=holdings)


def _kept(holdings: Sequence[Holding]) -> tuple[Communication, ...]:
    """Everybody keeps what it has."""
    cells: dict[str, list[Cell]] = defaultdict(list)
    for holding in holdings:
        cells[holding.device].append(
            Cell(box=holding.box, sources=(holding.device,), needers=(holding.device,))
        )
    return tuple(
        Communication(operation="keep", devices=(device,), cells=tuple(of)) for device, of in cells.items()
    )
