"""Faults by the day, drawn from a seed: how often devices become slow or die, and for how long."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from elasticd_planner.value import Value, refuse

from elasticd.chaos.faults import Fault

DAY = 86_400.0


class RandomFaults(Value, frozen=True, kw_only=True):
    """Drawn from the seed. Fail-slow: how often a device becomes slow, for how long in the mean (exponential),
    by which factors (evenly on a logarithmic scale). Fail-stop: how often one dies, and how many hours it
    takes in the mean until it is there again."""

    slow_per_device_day: float = 0.0
    hours: float = 1.0
    least: float = 1.3
    most: float = 5.0
    stop_per_device_day: float = 0.0
    repair_hours: float = 4.0

    def __post_init__(self) -> None:
        if min(self.slow_per_device_day, self.stop_per_device_day) < 0:
            refuse("slow_per_device_day and stop_per_device_day must not be negative")
        if not self.hours > 0 or not self.repair_hours > 0 or not 1 < self.least <= self.most:
            refuse("hours and repair_hours must be positive, and 1 < least <= most")

    @property
    def any(self) -> bool:
        """True if either rate is above 0. Both are 0 by default, and then `draw` gives no fault."""
        return self.slow_per_device_day > 0 or self.stop_per_device_day > 0


def draw(settings: RandomFaults, devices: Sequence[str], until: float, seed: int) -> tuple[Fault, ...]:
    """Each device becomes slow, and dies, by Poisson processes of its own; it recovers before it may be slow
    again, and is repaired before it may die again. One that comes back is as fast as any."""
    scales = (math.log(settings.least), math.log(settings.most))
    kinds = (
        ("slow", "recover", settings.slow_per_device_day, settings.hours),
        ("kill", "join", settings.stop_per_device_day, settings.repair_hours),
    )
    faults: list[Fault] = []
    for number, (begins, ends, per_day, hours) in enumerate(kinds, start=1):
        rng = np.random.default_rng([seed, number])  # what is slow does not depend on what dies
        for device in devices if per_day else ():
            at = float(rng.exponential(DAY / per_day))
            while at < until:
                factor = round(math.exp(float(rng.uniform(*scales))), 2) if begins == "slow" else 1.0
                faults.append(Fault(kind=begins, device=device, factor=factor, seconds=round(at, 3)))
                at += float(rng.exponential(hours * 3600))
                if at < until:
                    faults.append(Fault(kind=ends, device=device, seconds=round(at, 3)))
                at += float(rng.exponential(DAY / per_day))
    return tuple(sorted(faults, key=lambda fault: (fault.seconds or 0.0, fault.device)))
