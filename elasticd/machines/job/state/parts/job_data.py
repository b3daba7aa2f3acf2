"""The lengths and items of a job's data, as its steps have shown them."""

from __future__ import annotations

import msgspec
from elasticd_planner.detection.data_shift import ShiftState
from elasticd_planner.detection.item_shift import ItemShiftState
from elasticd_planner.spec.sequence_lengths import Lengths
from elasticd_planner.value import Value


class JobData(Value, frozen=True, kw_only=True):
    """Lengths and items of the data so far, and the lengths that the profile is for."""

    item_shifts: dict[str, ItemShiftState] = msgspec.field(default_factory=dict)  # by module of items
    shifts: ShiftState = msgspec.field(default_factory=ShiftState)  # what is known of the data's lengths
    lengths: Lengths | None = None  # those that the profile is for (None: all as the spec says)
    longest: int = 0  # [tokens] of the longest sequence of any step so far
    likely: int = 0  # [tokens] of the longest that checkpoints know of: it may come again
