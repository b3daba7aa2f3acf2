"""`ItemDealing`: by which slowdowns the lanes of a module of items get their items, agreed in votes.

A lane's weight in the plan follows from the time that the planner expects it to take. In each vote every rank
brings how many times as long as that a row of items took it. The slowest device of a lane stands for it, and
`batching.lane_slowdown` makes of them what all ranks agree on. So a lane that becomes slow gets fewer items
within a few steps, without a new plan, and what the plan knows of it already counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elasticd_planner.batching.lane_slowdown import SlowdownChange, SlowdownState
from elasticd_planner.batching.lane_slowdown import step as slowdowns_after
from elasticd_planner.batching.lane_tree import NORMAL
from elasticd_planner.layout.module_passes import ROWS
from elasticd_planner.spec.plan import NO_TIMES, Plan, Stage

#: A slow lane that has had no item in so many steps gets one: else nobody would see that it has recovered.
STARVED = 16
#: Slower than this, a lane may get no items at all [64ths].
_SLOW = 2 * NORMAL
#: Steps from a vote to the first step that is dealt by it: the next one may be dealt already.
_LAG = 2


class LaneSpeeds(NamedTuple):
    """Slowdowns that items are dealt by: arguments of `item_batch`."""

    slowdown: tuple[int, ...] = ()  #: of each lane [64ths]; empty: all are normal
    first: tuple[int, ...] = ()  #: lanes that get an item before others do


class ItemDealing:
    """The slowdowns of the lanes of one module of items under one plan, the same on all ranks."""

    def __init__(self, plan: Plan, module: str, rise: float = 0.0) -> None:
        """
        Args:
            plan: of all modules.
            module: of items.
            rise: by what a row costs more for each row of its item; see `detection.lengths.item_rise`.
        """
        self._rise = rise
        view = plan.view(module)
        lanes = view.by_lane
        self._state = SlowdownState.begin((NORMAL,) * len(lanes))
        timed = all(stage.microseconds != NO_TIMES for _, _, stage in view.walk())
        self._planned: dict[str, float] = {}
        self._lane_of = {
            device: number
            for number, lane in enumerate(lanes)
            for stage in lane.stages
            for device in stage.devices
        }
        for lane in lanes:
            for stage in lane.stages:
                self._planned |= dict.fromkeys(stage.devices, _planned_seconds(stage, timed=timed))
        #: Of each rank the lane that it is in; None: it is in none.
        self._lanes = [self._lane_of.get(device) for device in plan.members]
        self._heads = [lane.stages[0].devices[0] for lane in lanes]
        self._idle = [0] * len(lanes)  # for so many steps each lane has had no item
        self._before = self._agreed = LaneSpeeds()
        self._since = 0  # the first step that is dealt by what is agreed

    def of(self, step: int) -> LaneSpeeds:
        """By what the items of a step are dealt."""
        return self._agreed if step >= self._since else self._before

    def slowdown_of(self, device: str) -> int:
        """Of a device's lane [64ths of what was planned]; 0: it is in none, or no other lane is."""
        lane = self._lane_of.get(device)
        return self._state.slowdown[lane] if lane is not None and len(self._idle) > 1 else 0

    def ratio(self, device: str, seconds: float, rows: int, squares: float = 0.0) -> float:
        """The time of a row on a device over the planned time; 0: it had none. Lanes compare with each
        other, so that it does not matter which size of items was planned.

        Args:
            device: a member of the plan.
            seconds: of its passes in the module.
            rows: that they were on.
            squares: the sum of squares of the rows of each item.
        """
        if not rows or device not in self._planned:
            return 0.0
        return seconds / (rows + self._rise * squares) / self._planned[device]

    def voted(self, step: int, ratios: Sequence[float]) -> tuple[SlowdownChange, ...]:
        """A step ends.

        Args:
            step: its index.
            ratios: of each rank, as `ratio` gives them.

        Returns:
            The lanes whose slowdown changes.
        """
        count = len(self._idle)
        if count == 1:  # there is nobody to deal to but it
            return ()
        spent = [0.0] * count
        for lane, ratio in zip(self._lanes, ratios, strict=True):
            if lane is not None:
                spent[lane] = max(spent[lane], ratio)
        # One alone has nobody to compare with.
        several = sum(map(bool, spent)) > 1
        self._state, changes = slowdowns_after(self._state, spent if several else [0.0] * count, [1.0] * count)
        slowdown = self._state.slowdown
        self._idle = [0 if had else idle + 1 for had, idle in zip(spent, self._idle, strict=True)]
        first = tuple(
            lane for lane, idle in enumerate(self._idle) if idle >= STARVED and slowdown[lane] >= _SLOW
        )
        for lane in first:
            self._idle[lane] = 0
        speeds = LaneSpeeds(slowdown if any(each != NORMAL for each in slowdown) else (), first)
        self._before, self._agreed, self._since = self._agreed, speeds, step + _LAG
        return changes

    def head(self, lane: int) -> str:
        """The first device of a lane, which names it."""
        return self._heads[lane]


def _planned_seconds(stage: Stage, *, timed: bool) -> float:
    """Seconds of a row on a stage by its plan; in a plan without times its part of the layers."""
    if timed:
        return sum(stage.microseconds) / 1e6 / ROWS
    return stage.layers * max(map(stage.fraction, range(len(stage.devices))))
