"""Gradient reduction by holder set: parameters cut at all box borders, one reduction per set of holders."""

from __future__ import annotations

from collections import defaultdict

from elasticd_planner.boxes import Box, cut
from elasticd_planner.layouts import Layouts
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
        return self.devices[0]


def reductions(layouts: Layouts) -> tuple[Reduction, ...]:
    """The reductions of a plan's gradients, in one order for all ranks; a set of one device needs no wire."""
    rank = {device: i for i, device in enumerate(layouts.plan.members)}
    pieces: dict[tuple[str, ...], list[Piece]] = defaultdict(list)
    for name in layouts.names:
        holdings = layouts.gradient(name).holdings
        for cell in cut([holding.box for holding in holdings]):
            terms: dict[str, list[str]] = defaultdict(list)
            for holding in holdings:
                if holding.box.contains(cell):
                    terms[str(holding.partial)].append(holding.device)
            devices = tuple(sorted({d for held in terms.values() for d in held}, key=rank.__getitem__))
            counting = sorted(
                {min(held, key=rank.__getitem__) for held in terms.values()}, key=rank.__getitem__
            )
            pieces[devices].append(Piece(name=name, box=cell, counting=tuple(counting)))
    order = sorted(pieces, key=lambda devices: [rank[device] for device in devices])
    return tuple(Reduction(devices=devices, pieces=tuple(pieces[devices])) for devices in order)
