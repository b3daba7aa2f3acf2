"""Lanes of a module of items, filled in beside other modules: how many items of a step each of them takes.

A step of T seconds leaves a device the time in which no pass of another module runs there. A lane takes as
many items as the fullest of its devices has time for. The least T in which all lanes together take all items is
found by bisection. Whether modules share all their devices, some or none is an outcome.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from elasticd_planner.numeric import Ints
from elasticd_planner.spec.plan import Pipeline

#: Halvings of the bisection.
HALVINGS = 60

#: The weight of the lane that takes most items. Weights are whole numbers.
MOST_WEIGHT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemLane:
    """A lane that may take items."""

    pipeline: Pipeline
    seconds: tuple[float, ...]  # of an item, by stage, forward and backward


@dataclass(frozen=True, kw_only=True, slots=True)
class Filling:
    """Lanes with the items that they take in a step."""

    seconds: float  # of the step, before what comes after its passes
    items: tuple[float, ...]  # by lane


def filled(lanes: Sequence[ItemLane], busy: Mapping[str, float], items: float, floor: float) -> Filling:
    """The shortest step in which these lanes take so many items beside other modules.

    Args:
        lanes: at least one; no device is in two.
        busy: seconds that other modules' passes run on a device.
        items: of a step.
        floor: seconds that the step takes in any case.
    """
    entries = [
        (busy.get(device, 0.0), seconds)
        for lane in lanes
        for stage, seconds in zip(lane.pipeline.stages, lane.seconds, strict=True)
        for device in stage.devices
    ]
    used, spent = np.array(entries, dtype=np.float64).T
    sizes = [sum(len(stage.devices) for stage in lane.pipeline.stages) for lane in lanes]
    starts: Ints = np.cumsum(sizes) - np.array(sizes)
    low, high = floor, max(floor, float(used.max())) + items * float(spent.max())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        room = np.minimum.reduceat(np.maximum(0.0, middle - used) / spent, starts)
        low, high = (low, middle) if room.sum() >= items else (middle, high)
    room = np.minimum.reduceat(np.maximum(0.0, high - used) / spent, starts)
    return Filling(seconds=high, items=tuple((room * (items / room.sum())).tolist()))


def weights(items: Sequence[float]) -> list[int]:
    """Whole-number weights of lanes that take so many items of a step; 0: a lane has no share of them. No more
    lanes have one than there are items: further ones would hold state for nothing."""
    most = max(items)
    found = [round(MOST_WEIGHT * each / most) for each in items]
    count = max(1, math.ceil(sum(items) - 1e-6))
    ranked = sorted(range(len(items)), key=lambda lane: (-found[lane], lane))
    for lane in ranked[count:]:
        found[lane] = 0
    common = reduce(math.gcd, found)
    return [weight // common for weight in found]
