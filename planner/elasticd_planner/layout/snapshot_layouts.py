"""The layouts of a plan as snapshots have them: each member's share, read by a device in its place.

A snapshot has of every box of the state what one member was dealt of it, each element once. A device that
stands in for a member holds that, whatever it was to the plan itself. Where only snapshots are left, all
members have stand-ins; where most copies on devices live, those alone whose boxes nobody else has.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from elasticd_planner.layout.holdings import Holdings
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box, Holding, TensorLayout, subtract
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.value import refuse


class SnapshotLayouts:
    """The `layouts` of a plan as its members' `shares` lie on the devices of `stands`.

    No incarnation matters here: what is held was read, not trained; a copy that lives has its own device.

    Args:
        layouts: of the plan.
        shares: by member the disjoint boxes that it was dealt of each item; together they are everything.
        stands: by member the device that has its share; one may stand in for several, or for itself.
        left: copies on devices that live. Of a share only what those lack is held. None: no copy lives.

    Raises:
        Invalid: no copy lives, and a member has no stand-in.
    """

    plan: JobPlan  #: that the snapshots are of, bound to no incarnation

    def __init__(
        self,
        layouts: Holdings,
        *,
        shares: Mapping[str, Mapping[Item, Sequence[Box]]],
        stands: Mapping[str, str],
        left: Holdings | None = None,
    ) -> None:
        self.plan, self.items, self.trained = layouts.plan.replace(binding={}), layouts.items, layouts.trained
        plan = self.plan
        missing = [member for member in plan.members if member not in stands or member not in shares]
        if missing and left is None:
            refuse(f"plan {plan.number}: nobody stands in for {missing[0]} ({len(missing)} such members)")
        self._left = left
        self._read: dict[str, dict[Item, tuple[Box, ...]]] = {}
        holdings: dict[Item, list[Holding]] = {}
        if left is not None:
            holdings = {item: list(left.layout(item).holdings) for item in self.items}
        living = {item: sorted({holding.box for holding in held}) for item, held in holdings.items()}
        for member in (member for member in plan.members if member in stands):
            device = stands[member]
            read = self._read.setdefault(device, {})
            for item, share in shares[member].items():
                boxes = tuple(part for box in share for part in subtract(box, living.get(item, ())))
                if not boxes:
                    continue
                read[item] = (*read.get(item, ()), *boxes)
                holdings.setdefault(item, []).extend(Holding(device=device, box=box) for box in boxes)
        self._numbers: dict[Hashable, int] = {}
        self._of: dict[Item, tuple[int, TensorLayout]] = {}
        for item in self.items:
            whole = layouts.layout(item)
            key = tuple(holdings.get(item, ())), whole.shape, whole.dtype
            number = self._numbers.setdefault(key, len(self._numbers))
            layout = TensorLayout(name=whole.name, shape=whole.shape, dtype=whole.dtype, holdings=key[0])
            self._of[item] = number, layout

    def layout(self, item: Item) -> TensorLayout:
        """The holdings of an item."""
        return self._of[item][1]

    def family(self, item: Item) -> Hashable:
        """The key of parameters that are dealt alike. A member's part follows from the parts before: parameters
        that are cut alike may well lie differently."""
        return self._of[item][0]

    def boxes(self, item: Item, device: str) -> tuple[Box, ...]:
        """The boxes of an item that one device has."""
        left = self._left.boxes(item, device) if self._left is not None else ()
        return (*left, *self._read.get(device, {}).get(item, ()))

    def own(self, item: Item, device: str) -> tuple[Box, ...]:
        """The boxes of an item that a device has without what others send it: all that it has."""
        return self.boxes(item, device)

    def held(self, device: str) -> dict[Item, tuple[Box, ...]]:
        """All that one device has: the boxes of each item, in order."""
        boxes = {item: self.boxes(item, device) for item in self.items}
        return {item: held for item, held in boxes.items() if held}
