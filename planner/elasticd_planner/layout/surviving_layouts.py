"""The rest of a plan's layouts after a fault: some devices are gone, of others the parameters are stale.

Under ZeRO a device has the new parameters where it keeps their state, and gets the rest from their keepers. It
gets buffers that it keeps for others from those that compute with them. A fault in between leaves it with boxes
of two steps, or with what an aborted message left; what it has by itself is true, the rest is lacking.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator

import msgspec

from elasticd_planner.layout.holdings import Holdings
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box, Holding, TensorLayout, subtract
from elasticd_planner.spec.mesh import JobPlan


class SurvivingLayouts:
    """The holdings `layouts` without `gone`, and without what `stale` devices get from others."""

    def __init__(self, layouts: Holdings, *, gone: Collection[str], stale: Collection[str] = ()) -> None:
        self._whole = layouts
        self._gone, self._stale = frozenset(gone), frozenset(stale)
        self._left: dict[tuple[Hashable, str], TensorLayout] = {}

    @property
    def plan(self) -> JobPlan:
        """The plan before the fault."""
        return self._whole.plan

    @property
    def items(self) -> tuple[Item, ...]:
        """All that was held, in the model's order."""
        return self._whole.items

    @property
    def trained(self) -> tuple[str, ...]:
        """Full names of the parameters that have a gradient."""
        return self._whole.trained

    def family(self, item: Item) -> Hashable:
        """Items with equal keys have equal holdings, shapes and dtypes still."""
        return self._whole.family(item)

    def layout(self, item: Item) -> TensorLayout:
        """The holdings of an item that are left."""
        key = self.family(item), item.name
        if key not in self._left:
            whole = self._whole.layout(item)
            holdings = tuple(self._kept(item, whole.holdings))
            self._left[key] = msgspec.structs.replace(whole, holdings=holdings)
        return self._left[key]

    def boxes(self, item: Item, device: str) -> tuple[Box, ...]:
        """The boxes of an item that one device holds still."""
        if device in self._gone:
            return ()
        return self.own(item, device) if device in self._stale else self._whole.boxes(item, device)

    def own(self, item: Item, device: str) -> tuple[Box, ...]:
        """The boxes of an item that a device has without what others send it at the end of a step."""
        return () if device in self._gone else self._whole.own(item, device)

    def held(self, device: str) -> dict[Item, tuple[Box, ...]]:
        """All that one device holds still: the boxes of each item, in order."""
        boxes = {item: self.boxes(item, device) for item in self.items}
        return {item: held for item, held in boxes.items() if held}

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

    def last_holders(self) -> frozenset[str]:
        """The members that had held any of what nobody holds any more."""
        last, known = set[str](), set[Hashable]()
        for item, boxes in self.lost():
            if (key := self.family(item)) not in known:
                known.add(key)
                last |= {
                    holding.device
                    for holding in self._whole.layout(item).holdings
                    if any(holding.box.overlap(box) is not None for box in boxes)
                }
        return frozenset(last)

    def _kept(self, item: Item, holdings: Collection[Holding]) -> Iterator[Holding]:
        stale = dict[str, bool]()
        for holding in holdings:
            device = holding.device
            if device in self._gone:
                continue
            if device in self._stale and device not in stale:
                stale[device] = set(self.own(item, device)) != set(self._whole.boxes(item, device))
            if not stale.get(device):
                yield holding
        for device in sorted(device for device, lacks in stale.items() if lacks):
            yield from (Holding(device=device, box=box) for box in self.own(item, device))
