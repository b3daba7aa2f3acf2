"""The layouts of a plan of which only snapshots are left: each member's share, read by a device in its place.

A snapshot has of every box of the state what one member was dealt of it, each element once. Who stands in for
a member holds that, whatever it was to the plan itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from elasticd_planner.layout.holdings import Holdings
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box, Holding, TensorLayout
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.value import refuse


class SnapshotLayouts:
    """The `layouts` of a plan as its members' `shares` lie on the devices of `stands`.

    shares: by member the disjoint boxes that it was dealt of each item; together they are everything. stands:
    by member the device that has its share; one may stand in for several, or for itself. No incarnation
    matters here: what is held was read, not trained. Raises Invalid where a member has no stand-in.
    """

    plan: JobPlan  #: that the snapshots are of, bound to no incarnation

    def __init__(
        self,
        layouts: Holdings,
        *,
        shares: Mapping[str, Mapping[Item, Sequence[Box]]],
        stands: Mapping[str, str],
    ) -> None:
        self.plan, self.items, self.trained = layouts.plan.replace(binding={}), layouts.items, layouts.trained
        plan = self.plan
        missing = [member for member in plan.members if member not in stands or member not in shares]
        if missing:
            refuse(f"plan {plan.number}: nobody stands in for {missing[0]} ({len(missing)} such members)")
        self._held: dict[str, dict[Item, tuple[Box, ...]]] = {}
        holdings: dict[Item, list[Holding]] = {}
        for member in plan.members:
            device = stands[member]
            mine = self._held.setdefault(device, {})
            for item, boxes in shares[member].items():
                mine[item] = (*mine.get(item, ()), *boxes)
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
        """Which device has read which box of an item."""
        return self._of[item][1]

    def family(self, item: Item) -> Hashable:
        """The key of parameters that are dealt alike. A member's part follows from the parts before: parameters
        that are cut alike may well lie differently."""
        return self._of[item][0]

    def boxes(self, item: Item, device: str) -> tuple[Box, ...]:
        """The boxes of an item that one device has read."""
        return self._held.get(device, {}).get(item, ())

    def own(self, item: Item, device: str) -> tuple[Box, ...]:
        """The boxes of an item that a device has without what others send it: all that it has read."""
        return self.boxes(item, device)

    def held(self, device: str) -> dict[Item, tuple[Box, ...]]:
        """All that one device has read: the boxes of each item, in order."""
        boxes = {item: self.boxes(item, device) for item in self.items}
        return {item: held for item, held in boxes.items() if held}
