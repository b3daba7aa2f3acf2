"""The losses of a job: the fence, workers that are fenced off, and hangs."""

from __future__ import annotations

import msgspec
from elasticd_planner.value import Value

from elasticd.records import Fence


class Losses(Value, frozen=True, kw_only=True):
    """The newest fence, incarnations that are fenced off, and steps in which members hung."""

    fence: Fence | None = None  # the one that no recorded plan has followed yet
    #: incarnations that were ever fenced off, the last of each device: their words count no more
    gone: dict[str, str] = msgspec.field(default_factory=dict)
    #: updates so far when members were last given up since they stood still (-1: none was)
    stuck_step: int = -1
    #: index of the step in which members were last said to hang though none is given up (-1: none was)
    standstill: int = -1
