"""The shares by which lanes get tokens and items."""

from __future__ import annotations

import msgspec
from elasticd_planner.value import Value


class LaneShares(Value, frozen=True, kw_only=True):
    """The shares that members said they deal by."""

    #: by which lanes get their shares of tokens [64ths], by device, as far as it is not that of the others
    shares: dict[str, int] = msgspec.field(default_factory=dict)
    #: likewise of items, by module and the first device of a lane
    item_shares: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    shares_plan: int = 0  # number of the plan that those are of
