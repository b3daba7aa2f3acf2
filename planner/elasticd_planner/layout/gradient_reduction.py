"""Gradient reduction by holder set: parameters cut at all box borders, one reduction per set of holders.

Under ZeRO also who sends gradients and updated values to whom, since state is kept by some of the holders, and
replicas of it by devices that hold nothing else of the parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.layout.optimizer_sharding import Part
from elasticd_planner.layout.resolve import Communication, resolve
from elasticd_planner.spec.box import Box
from elasticd_planner.value import Value


class Piece(Value, frozen=True, kw_only=True):
    """A cell of a parameter that every device of a holder set holds; `counting` are the devices whose copy
    is added (of replicas that hold the same term, the first alone)."""

    name: str
    box: Box
    counting: tuple[str, ...]


class Reduction(Value, frozen=True, kw_only=True):
    """All pieces that one set of devices, in rank order, holds: reduced together, owned by the first."""

    devices: tuple[str, ...]
    pieces: tuple[Piece, ...]

    @property
    def owner(self) -> str:
        """The device that has the sum."""
        return self.devices[0]


def reductions(layouts: Layouts) -> tuple[Reduction, ...]:
    """The reductions of a plan's gradients, in one order for all ranks; a set of one device needs no wire."""
    rank = {device: i for i, device in enumerate(layouts.plan.members)}
    pieces: dict[tuple[str, ...], list[Piece]] = defaultdict(list)
    known: dict[Hashable, tuple[Communication, ...]] = {}  # parameters that are held alike
    for name in layouts.trained:
        family = layouts.family(Item(name, "value"))
        if family not in known:
            source, target = layouts.gradient(name), layouts.parameter(name)
            known[family] = resolve(source, target, layouts.plan.members, agree=True)
        for each in known[family]:
            cut = [Piece(name=name, box=cell.box, counting=cell.sources) for cell in each.cells]
            pieces[each.devices] += cut
    order = sorted(pieces, key=lambda devices: [rank[device] for device in devices])
    return tuple(Reduction(devices=devices, pieces=tuple(pieces[devices])) for devices in order)


class Delivery(Value, frozen=True, kw_only=True):
    """Boxes of parameters, by name, that one device sends to others, each of which takes all of them."""

    source: str
    destinations: tuple[str, ...]
    pieces: tuple[tuple[str, Box], ...]


def gradients_away(layouts: Layouts, device: str) -> tuple[Delivery, ...]:
    """Of reduced gradients what `device` sends to, or gets as, one that keeps state without computing with it.

    The source is the part's leader. Every device lists what it takes part in, all in one order."""
    return _deliveries(layouts, device, layouts.trained, _away)


def buffers_away(layouts: Layouts, device: str) -> tuple[Delivery, ...]:
    """Of buffers what `device` sends to, or gets as, one that keeps them without computing with them."""
    names = tuple(item.name for item in layouts.items if item.role == "buffer")
    return _deliveries(layouts, device, names, _away)


def values_back(layouts: Layouts, device: str) -> tuple[Delivery, ...]:
    """Of updated parameters what `device` sends to, or gets as, one that computes without keeping the state.

    The source is the lowest-ranked keeper."""
    return _deliveries(layouts, device, layouts.trained, _back)


def _away(part: Part) -> tuple[str, tuple[str, ...]]:
    return part.leader, tuple(keeper for keeper in part.keepers if keeper not in part.holders)


def _back(part: Part) -> tuple[str, tuple[str, ...]]:
    return part.keepers[0], tuple(holder for holder in part.holders if holder not in part.keepers)


def _deliveries(
    layouts: Layouts, device: str, names: Sequence[str], way: Callable[[Part], tuple[str, tuple[str, ...]]]
) -> tuple[Delivery, ...]:
    rank = {name: i for i, name in enumerate(layouts.plan.members)}
    pieces: dict[tuple[str, tuple[str, ...]], list[tuple[str, Box]]] = defaultdict(list)
    known: dict[int, list[tuple[str, tuple[str, ...], Box]]] = {}  # alike parameters have the same parts
    for name in names:
        parts = layouts.parts(name)
        if id(parts) not in known:
            ways = [
                (*way(part), part.box) for part in parts if device in part.holders or device in part.keepers
            ]
            known[id(parts)] = [found for found in ways if device == found[0] or device in found[1]]
        for source, destinations, box in known[id(parts)]:
            if destinations:
                pieces[source, destinations].append((name, box))
    order = sorted(pieces, key=lambda key: (rank[key[0]], [rank[name] for name in key[1]]))
    return tuple(Delivery(source=a, destinations=b, pieces=tuple(pieces[a, b])) for a, b in order)


def leading(layouts: Layouts, device: str) -> tuple[tuple[str, Box], ...]:
    """The parts whose gradients `device` counts: under ZeRO those that it leads, each part once in a job."""
    known: dict[int, list[Box]] = {}
    found = []
    for name in layouts.trained:
        parts = layouts.parts(name)
        if id(parts) not in known:
            mine = [part for part in parts if device in part.keepers]
            known[id(parts)] = [part.box for part in mine if part.leader == device]
        found += [(name, box) for box in known[id(parts)]]
    return tuple(found)
