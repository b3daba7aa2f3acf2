"""What is left of a plan's layouts after a fault: some devices are gone, of others the parameters are stale.

Under ZeRO a device has the new parameters where it keeps their state, and gets the rest from their keepers. It
gets buffers that it keeps for others from those that compute with them. A fault in between leaves it with boxes
of two steps, or with what an aborted message left; what it has by itself is true, the rest is lacking.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator

import msgspec

from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.box import Box, Holding, TensorLayout, subtract
from elasticd_planner.spec.model import Specs
from elasticd_planner.spec.plan import Plan


class Remains(Layouts):
    """The layouts of `plan` without `gone`, and without what `stale` devices get from others."""

    def __init__(self, spec: Specs, plan: Plan, *, gone: Collection[str], stale: Collection[str] = ()) -> None:
        super().__init__(spec, plan)
        self._gone = frozenset(gone)
        self._stale = frozenset(stale) if plan.state.zero else frozenset()
        self._trained = frozenset(self.trained)
        self._left: dict[tuple[Hashable, str], TensorLayout] = {}

    def layout(self, item: Item) -> TensorLayout:
        """Who holds which box of an item still."""
        key = self.family(item), item.name
        if key not in self._left:
            whole = super().layout(item)
            holdings = tuple(self._kept(item, whole.holdings))
            self._left[key] = msgspec.structs.replace(whole, holdings=holdings)
        return self._left[key]

    def boxes(self, item: Item, device: str) -> tuple[Box, ...]:
        """The boxes of an item that one device holds still."""
        if device in self._gone:
            return ()
        if device in self._stale and self._cut(item):
            return super().boxes(Item(item.name, "state"), device)
        if device in self._stale and item.role == "buffer":
            return tuple(held.box for held in self.parameter(item.name).holdings if held.device == device)
        return super().boxes(item, device)

    def lost(self) -> Iterator[tuple[Item, tuple[Box, ...]]]:
        """Of each item the boxes that nobody holds any more."""
        known: dict[Hashable, tuple[Box, ...]] = {}
        for item in self.items:
            key = self.family(item)
            if key not in known:
                layout = self.layout(item)
                held = sorted({holding.box for holding in layout.holdings})
                known[key] = tuple(subtract(Box.whole(layout.shape), held))
            if known[key]:
                yield item, known[key]

    def _cut(self, item: Item) -> bool:
        return item.role == "value" and item.name in self._trained

    def _kept(self, item: Item, holdings: Collection[Holding]) -> Iterator[Holding]:
        for holding in holdings:
            if holding.device in self._gone or (holding.device in self._stale and self._cut(item)):
                continue
            if holding.device not in self._stale or item.role != "buffer" or self.boxes(item, holding.device):
                yield holding
        if self._cut(item):
            for device in sorted(self._stale - self._gone):
                yield from (Holding(device=device, box=box) for box in self.boxes(item, device))
