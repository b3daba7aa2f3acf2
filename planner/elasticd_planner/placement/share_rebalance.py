"""The running plan's groups in their places, with other shares: as their rates ask, or part of the way there.

A slow device that gives away less than its rate asks moves fewer bytes; with fewer micro-batches its pipeline
may take no longer for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.spec.cluster import Rates, rate_of
from elasticd_planner.spec.model import apportion
from elasticd_planner.spec.plan import Pipeline, Stage

#: How much of a rate counts: all of it, nothing (equal shares), and what is between.
WHOLE = (1.0, 0.0)
BETWEEN = (0.75, 0.5, 0.25)


def shared_again(
    pipelines: Sequence[Pipeline], rates: Rates, profile: ModelProfile, part: float
) -> tuple[Pipeline, ...]:
    """The same groups and layers; a member's share is by 1 / rate ** part, in whole units."""
    part = part if profile.uneven else 0.0

    def stage(given: Stage) -> Stage:
        # Integer weights with six digits: rates are rounded far coarser than that.
        weights = (max(1, round(1e6 / rate_of(rates, device) ** part)) for device in given.devices)
        return msgspec.structs.replace(given, shares=apportion(profile.share_units, tuple(weights)))

    return tuple(msgspec.structs.replace(p, stages=tuple(map(stage, p.stages))) for p in pipelines)
