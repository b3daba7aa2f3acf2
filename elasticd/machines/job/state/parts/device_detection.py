"""The slowdowns of a job's devices."""

from __future__ import annotations

import msgspec
from elasticd_planner.detection.idle_probes import ProbeState
from elasticd_planner.detection.stragglers import RateState
from elasticd_planner.value import Value


class DeviceDetection(Value, frozen=True, kw_only=True):
    """Measured slowdowns, of devices with and without work."""

    rates: RateState = msgspec.field(default_factory=RateState)  # measured slowdown of each device
    probes: ProbeState = msgspec.field(default_factory=ProbeState)  # of devices without work
