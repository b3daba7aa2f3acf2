"""Gradient reduction by holder set: parameters cut at all box borders, one reduction per set of holders.

Under ZeRO also who sends gradients and updated values to whom, since state is kept by some of the holders, and
replicas of it by devices that hold nothing else of the parameter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence

from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.layout.resolve import Communication, messages, resolve
from elasticd_planner.layout.two_level_sums import node_by_node
from elasticd_planner.spec.box import Box, TensorLayout
from elasticd_planner.spec.model import item_size
from elasticd_planner.value import Value


class Piece(Value, frozen=True, kw_only=True):
    """A cell of a parameter that every device of a holder set holds; `counting` are the devices whose copy
    is added (of replicas that hold the same term, the first alone)."""

    name: str
    box: Box
    counting: tuple[str, ...]


class Reduction(Value, frozen=True, kw_only=True):
    """All pieces that one set of devices holds: reduced together."""

    devices: tuple[str, ...]  #: node by node, else in rank order: a ring enters each node once
    pieces: tuple[Piece, ...]


def reductions(layouts: Layouts, device: str | None = None) -> tuple[Reduction, ...]:
    """The reductions of a plan's gradients, in one order for all ranks; a set of one device needs no wire. With
    `device` only those that it takes part in."""
    pieces: dict[tuple[str, ...], list[Piece]] = defaultdict(list)
    for name, steps in _resolved(
        layouts, layouts.trained, layouts.gradient, layouts.parameter, of=device, agree=True
    ):
        for step in steps:
            pieces[step.devices] += [
                Piece(name=name, box=cell.box, counting=cell.sources) for cell in step.cells
            ]
    rank = {device: i for i, device in enumerate(layouts.plan.members)}
    order = sorted(pieces, key=lambda devices: [rank[device] for device in devices])
    return tuple(Reduction(devices=node_by_node(devices), pieces=tuple(pieces[devices])) for devices in order)


#: Bytes that a device receives in a round of deliveries, about: one parameter or buffer may have more.
ROUND_BYTES = 64 * 1024 * 1024


class Delivery(Value, frozen=True, kw_only=True):
    """Boxes of parameters or buffers of one dtype, by name, that one device sends to others, each of
    which takes all of them. All deliveries of a round go on side by side, and one round after the other."""

    round: int
    source: str
    destinations: tuple[str, ...]
    pieces: tuple[tuple[str, Box], ...]


def gradients_away(layouts: Layouts, device: str | None = None) -> tuple[Delivery, ...]:
    """Of reduced gradients what `device` sends to, or gets as, one that keeps state without computing with it.

    Every device lists what it takes part in, all in one order. None: of all devices."""
    return _deliveries(layouts, device, layouts.trained, layouts.reduced, layouts.state)


def buffers_away(layouts: Layouts, device: str | None = None) -> tuple[Delivery, ...]:
    """Of buffers what `device` sends to, or gets as, one that keeps them without computing with them."""
    names = tuple(item.name for item in layouts.items if item.role == "buffer")
    return _deliveries(layouts, device, names, layouts.parameter, layouts.value)


def values_back(layouts: Layouts, device: str | None = None) -> tuple[Delivery, ...]:
    """Of updated parameters what `device` sends to, or gets as, one that computes without keeping the state."""
    return _deliveries(layouts, device, layouts.trained, layouts.state, layouts.parameter)


#: The layout of a parameter or buffer, by its name.
_LayoutOf = Callable[[str], TensorLayout]


def _deliveries(
    layouts: Layouts, device: str | None, names: Sequence[str], source: _LayoutOf, target: _LayoutOf
) -> tuple[Delivery, ...]:
    rank = {device: i for i, device in enumerate(layouts.plan.members)}
    pieces: dict[tuple[int, tuple[str, ...], str], list[tuple[str, Box]]] = defaultdict(list)
    number = rounds(layouts, names)
    for name, steps in _resolved(layouts, names, source, target, of=device):
        dtype = layouts.rule(name).dtype
        for devices, cell in messages(steps):
            if device is None or device in devices:
                pieces[number[name], devices, dtype].append((name, cell.box))
    ends = sorted({ends for _, ends, _ in pieces}, key=lambda devices: [rank[device] for device in devices])
    place = {devices: i for i, devices in enumerate(ends)}
    order = sorted(pieces.items(), key=lambda at: (at[0][0], place[at[0][1]], at[0][2]))
    return tuple(
        Delivery(round=at, source=devices[0], destinations=devices[1:], pieces=tuple(together))
        for (at, devices, _), together in order
    )


def rounds(layouts: Layouts, names: Sequence[str]) -> dict[str, int]:
    """The round of each of these names, the same for all devices: so many names in a row as the device with the
    largest share of a layer receives at most `ROUND_BYTES` bytes of."""
    largest = max(stage.fraction(at) for _, _, stage in layouts.plan.walk() for at in range(len(stage.devices)))
    found: dict[str, int] = {}
    number, size = 0, 0.0
    for name in names:
        parameter = layouts.rule(name)
        more = math.prod(parameter.shape) * item_size(parameter.dtype) * largest
        if size and size + more > ROUND_BYTES:
            number, size = number + 1, 0.0
        found[name] = number
        size += more
    return found


def _resolved(
    layouts: Layouts,
    names: Sequence[str],
    source: _LayoutOf,
    target: _LayoutOf,
    *,
    of: str | None = None,
    agree: bool = False,
) -> Iterator[tuple[str, tuple[Communication, ...]]]:
    """The steps from one layout of each tensor to another: made once for all that are held alike."""
    known: dict[Hashable, tuple[Communication, ...]] = {}
    for name in names:
        if of is not None and of not in layouts.holders(name):
            continue
        family = layouts.family(Item(name, "value"))
        if family not in known:
            known[family] = resolve(source(name), target(name), layouts.plan.members, of=of, agree=agree)
        yield name, known[family]


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
