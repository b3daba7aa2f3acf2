"""A new leader's view of a job, until its agents have come back."""

from __future__ import annotations

import msgspec
from elasticd_planner.value import Value

from elasticd.wire.worker import RunningPlan


class Takeover(Value, frozen=True, kw_only=True):
    """Deadlines of a new leader, and the workers that it has not met."""

    unadopted: RunningPlan | None = None  # the plan that its workers run, and that the store lacks
    settle_until: float | None = None  # end of a new leader's patience (invariant 4), then None
    patient_until: float = 0.0  # until then a new leader takes nothing for lost that it has not heard of
    #: incarnations by device that a leader before this one bound, and that this one has not heard of: they may
    #: live, and hold copies
    unmet: dict[str, str] = msgspec.field(default_factory=dict)
