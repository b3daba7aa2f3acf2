"""From one layout of a tensor to another: the communication that makes it so.

`resolve` cuts the tensor at the borders of both layouts. Each cell has holders, each of the value or of a term
of a sum, and devices that need it. Cells of like holders and needers are one step, and what it does follows:

| terms | who needs the cell | operation |
|---|---|---|
| 1 | who holds it | keep |
| 1, held by one of D, others hold further cells | all of D | all-gather over D, parts of any sizes |
| 1 | others | send |
| k | all holders | all-reduce over them; of replicas of one term one counts |
| k, held by D | one of D, others need further cells | reduce-scatter over D, parts of any sizes |
| k | others | sum at one of them, which relays it to the rest |
| 0 | a term of a sum | zero |

A target may hold terms, too: each term of the source then goes into the term of the target that is nearest.
Gradients go the other way: `resolve(dual(target), dual(source))` is the adjoint of `resolve(source, target)`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal, NamedTuple

import msgspec

from elasticd_planner.spec.box import Box, Holding, TensorLayout, covered
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.value import Invalid, Value

Operation = Literal["keep", "zero", "send", "all_gather", "all_reduce", "reduce_scatter", "sum", "relay"]

#: In this order steps can be carried out: a relay needs the sum that it passes on.
ORDER: dict[Operation, int] = {
    "keep": 0,
    "zero": 0,
    "send": 1,
    "all_gather": 1,
    "all_reduce": 1,
    "reduce_scatter": 1,
    "sum": 1,
    "relay": 2,
}


class Uncovered(Invalid):
    """The target has boxes that the source does not hold; `boxes` are those."""

    def __init__(self, name: str, boxes: Sequence[Box]) -> None:
        self.boxes = tuple(boxes)
        some = ", ".join(f"{box.start} to {box.stop}" for box in self.boxes[:3])
        more = f" and {len(self.boxes) - 3} more" if len(self.boxes) > 3 else ""
        super().__init__(f"{name}: no device holds {some}{more}, and the target needs it")


class Demand(NamedTuple):
    """A cell that a device needs and how it is held: `terms` that add up to it, each with the devices that hold
    it. One term: they hold the value itself. None: it is zero."""

    box: Box
    terms: tuple[tuple[str, ...], ...]
    needers: tuple[str, ...]


class Cell(Value, frozen=True, kw_only=True, gc=False):
    """A box that each needer gets as the sum of what the sources hold of it. A replica is no source."""

    box: Box
    sources: tuple[str, ...]
    needers: tuple[str, ...]


class Communication(Value, frozen=True, kw_only=True):
    """Cells that one operation of these devices serves. The first device of a send or relay is its source."""

    operation: Operation
    devices: tuple[str, ...]
    cells: tuple[Cell, ...]


def demands(source: TensorLayout, target: TensorLayout, of: str | None = None) -> Iterator[Demand]:
    """The cells of the target, each with its holders and its needers; devices in the order of the holdings.

    With `of` only those that this device holds or needs.

    Raises:
        Uncovered: the target has boxes that the source does not hold.
        Invalid: the layouts are of different tensors; a device holds two terms of a cell; a cell is to be the
            value on one device and a term on another.
    """
    if (source.name, source.shape) != (target.name, target.shape):
        raise Invalid(f"{source.name} {source.shape} cannot become {target.name} {target.shape}")
    holders, wanters = _by_box(source), _by_box(target)
    mine = None if of is None else {*source.of(of), *target.of(of)}
    missing: list[Box] = []
    found: list[Demand] = []
    for cell, boxes in covered((*holders, *wanters), mine):
        held = _by_term(source, cell, boxes, holders)
        needed = _by_term(target, cell, boxes, wanters)
        if not needed:
            continue
        if not held:
            missing.append(cell)
        elif None not in needed:
            found += _terms(cell, _added(held), needed)
        elif len(needed) == 1:
            found.append(Demand(cell, _added(held), needed[None]))
        else:
            raise Invalid(f"{target.name} {cell.start} to {cell.stop}: value on one device, term on another")
    if missing:
        raise Uncovered(target.name, missing)
    yield from found


def resolve(
    source: TensorLayout,
    target: TensorLayout,
    members: Sequence[str] = (),
    *,
    of: str | None = None,
    agree: bool = False,
) -> tuple[Communication, ...]:
    """The steps by which a tensor that is laid out as `source` is laid out as `target`, in one order for all.

    Args:
        source: who holds what.
        target: who is to hold what.
        members: devices by rank, in whose order all lists are (empty: in the order of the holdings).
        of: only the steps that this device takes part in are wanted, which is quicker.
        agree: holders of one value get it from the first of them, so that they are equal to the bit though
            unlike devices have computed it.

    Raises:
        Uncovered: the target has boxes that the source does not hold.
        Invalid: see `demands`.
    """
    listed = members or tuple(h.device for h in (*source.holdings, *target.holdings))
    made = _Steps({device: rank for rank, device in enumerate(dict.fromkeys(listed))}, agree, of)
    for demand in demands(source, target, of):
        made.add(demand)
    return tuple(step for step in made.listed() if of is None or of in step.devices)


def messages(steps: Iterable[Communication]) -> Iterator[tuple[tuple[str, ...], Cell]]:
    """Values that go from one device to others as messages: (source, *destinations), and what they carry. An
    all-gather is messages of each member to all others."""
    for step in steps:
        for cell in step.cells:
            if step.operation in ("send", "relay"):
                yield step.devices, cell
            elif step.operation == "all_gather":
                yield (*cell.sources, *(device for device in cell.needers if device not in cell.sources)), cell


def dual(layout: TensorLayout, *, add: bool = False) -> TensorLayout:
    """The layout of the gradient of a tensor that is laid out so, where it is known first.

    Of a term of a sum it is the gradient of the sum. Of a value's replicas it is the same on all; with `add`
    each has a term of it, because each was used in another way.
    """
    holdings = tuple(
        msgspec.structs.replace(
            holding,
            partial=holding.device if add and holding.partial is None else None,
        )
        for holding in layout.holdings
    )
    return msgspec.structs.replace(layout, holdings=holdings)


_Terms = Mapping[str | None, tuple[str, ...]]


#: Replicas hold the same boxes: the holdings by box, each with its index among all.
_ByBox = Mapping[Box, Sequence[tuple[int, Holding]]]


def _by_box(layout: TensorLayout) -> _ByBox:
    found: dict[Box, list[tuple[int, Holding]]] = defaultdict(list)
    for numbered in enumerate(layout.holdings):
        found[numbered[1].box].append(numbered)
    return found


def _by_term(layout: TensorLayout, cell: Box, boxes: Sequence[Box], by_box: _ByBox) -> _Terms:
    """The devices whose holdings are of these boxes by the term that they hold, each once; None: the value."""
    around = [by_box[box] for box in boxes if box in by_box]
    holdings = around[0] if len(around) == 1 else sorted(chain.from_iterable(around))
    found: dict[str | None, dict[str, None]] = {}
    term: dict[str, str | None] = {}
    for _, holding in holdings:
        if term.setdefault(holding.device, holding.partial) != holding.partial:
            raise Invalid(f"{layout.name} {cell.start} to {cell.stop}: {holding.device} holds two terms")
        found.setdefault(holding.partial, {})[holding.device] = None
    return {term: tuple(devices) for term, devices in found.items()}


def _added(held: _Terms) -> tuple[tuple[str, ...], ...]:
    """The terms that add up to the value. Where a device has the value itself, no term is needed."""
    return (held[None],) if None in held else tuple(held.values())


def _terms(cell: Box, held: Sequence[tuple[str, ...]], needed: _Terms) -> Iterator[Demand]:
    """A target of terms: each term of the source becomes part of one, so that nothing is counted twice."""
    parts: dict[str | None, list[tuple[str, ...]]] = {term: [] for term in needed}
    for holders in held:
        parts[_nearest(holders, needed)].append(holders)
    for term, devices in needed.items():
        yield Demand(cell, tuple(parts[term]), devices)


def _nearest(holders: Sequence[str], needed: _Terms) -> str | None:
    """The term of the target that has a device of the holders, else one of their nodes, else the first."""
    nodes = set(map(node_of, holders))

    def far(term: str | None) -> int:
        devices = needed[term]
        if not set(holders).isdisjoint(devices):
            return 0
        return 1 if nodes.intersection(map(node_of, devices)) else 2

    return min(needed, key=far)


class _Steps:
    """Collects the cells of each step."""

    def __init__(self, rank: Mapping[str, int], agree: bool, of: str | None) -> None:
        self._rank, self._agree, self._of = rank, agree, of
        self._steps: dict[tuple[Operation, tuple[str, ...]], list[Cell]] = defaultdict(list)
        self._gathers: dict[tuple[str, ...], list[Demand]] = defaultdict(list)
        self._scatters: dict[tuple[str, ...], list[Demand]] = defaultdict(list)

    def add(self, demand: Demand) -> None:
        box, needers = demand.box, self._sorted(demand.needers)
        terms = tuple(map(self._sorted, demand.terms))
        demand = Demand(box, terms, needers)
        holders = self._sorted(device for term in terms for device in term)
        if not terms:
            for device in needers:
                self._add("zero", (device,), box, (), (device,))
        elif len(terms) > 1:
            if needers == holders:
                self._add("all_reduce", holders, box, self._sorted(term[0] for term in terms), needers)
            elif len(needers) == 1 and needers[0] in holders:
                self._scatters[holders].append(demand)
            else:
                self._sum(demand)
        elif self._agree and len(holders) > 1 and needers == holders:
            self._add("all_reduce", holders, box, holders[:1], needers)
        elif len(holders) == 1 and len(needers) > 1 and holders[0] in needers:
            self._gathers[needers].append(demand)
        else:
            self._send(demand)

    def listed(self) -> tuple[Communication, ...]:
        """All steps, in their order."""
        for needers, demands in self._gathers.items():
            together = len({demand.terms for demand in demands}) > 1
            for demand in demands:
                if together:
                    self._add("all_gather", needers, demand.box, demand.terms[0], needers)
                else:
                    self._send(demand)
        for holders, demands in self._scatters.items():
            together = len({demand.needers for demand in demands}) > 1
            for box, terms, needers in demands:
                if together:
                    self._add("reduce_scatter", holders, box, self._sorted(term[0] for term in terms), needers)
                else:
                    self._sum(Demand(box, terms, needers))
        order = sorted(self._steps, key=lambda key: (ORDER[key[0]], [self._rank[d] for d in key[1]], key[0]))
        return tuple(
            Communication(operation=operation, devices=devices, cells=tuple(self._steps[operation, devices]))
            for operation, devices in order
        )

    def _send(self, demand: Demand, operation: Operation = "send") -> None:
        """Each holder of the value keeps it; each other gets it from a holder of its node, else from any;
        holders take turns."""
        box, (holders,), needers = demand
        sent: dict[str, list[str]] = defaultdict(list)
        near: dict[str, list[str]] = defaultdict(list)  # holders by node; those that sent go to the end
        for holder in holders:
            near[node_of(holder)].append(holder)
        far, have = list(holders), set(holders)
        for device in needers:
            if device in have:
                if operation == "send" and self._of in (None, device):
                    self._add("keep", (device,), box, (device,), (device,))
                continue
            turns = near.get(node_of(device), far)
            sent[turns[0]].append(device)
            turns.append(turns.pop(0))
        for source, devices in sent.items():
            self._add(operation, (source, *devices), box, (source,), devices)

    def _sum(self, demand: Demand) -> None:
        """At the needer that holds most of the terms."""
        box, terms, needers = demand
        at = max(needers, key=lambda device: (sum(device in term for term in terms), -self._rank[device]))
        sources = [
            min(term, key=lambda device: (device != at, node_of(device) != node_of(at))) for term in terms
        ]
        self._add("sum", self._sorted((at, *sources)), box, sources, (at,))
        self._send(Demand(box, ((at,),), needers), "relay")

    def _add(
        self,
        operation: Operation,
        devices: tuple[str, ...],
        box: Box,
        sources: Sequence[str],
        needers: Sequence[str],
    ) -> None:
        self._steps[operation, devices].append(Cell(box=box, sources=tuple(sources), needers=tuple(needers)))

    def _sorted(self, devices: Iterable[str]) -> tuple[str, ...]:
        distinct = tuple(set(devices))
        return distinct if len(distinct) == 1 else tuple(sorted(distinct, key=self._rank.__getitem__))
