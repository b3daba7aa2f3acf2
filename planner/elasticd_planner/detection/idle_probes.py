"""Idle probes: the slowdown of a device without work, from a small matrix product that is timed a few times.

Theory of operation. A device is probed while it has no work: before it is given any, and again and again while
it stands by. A probe's cost is the least of its times, for whatever disturbs a product only makes it longer.
What is normal is the cost of the fleet's cheaper half (`fleet_baseline.fleet_cost`), of the last probe of every
device.

    unknown --(one probe at `slow` or more)-----------------> slow before it is given work
    normal  --(two probes in a row at `slow` or more)-------> slow
    slow    --(two in a row at `recovered` or less)---------> normal
    slow    --(two in a row off by `slowdown_change`, both up or both down)---> slow by another factor

Work makes two in a row begin anew: a device that its steps showed to be slow is not believed to be well because
of a probe from before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from elasticd_planner.detection.fleet_baseline import fleet_cost
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.stragglers import Change, RateState, all_believed
from elasticd_planner.spec.cluster import NORMAL
from elasticd_planner.value import Value

FLEET = "the fleet for the same matrix product"


class Probed(Value, frozen=True, kw_only=True):
    """A device's last probe."""

    cost: float  # the shortest of its products, in seconds
    before: float | None = None  # seconds of the probe before it; None if the device had work in between
    fresh: bool = True  # it was not judged yet
    idle: bool = True  # the device had no work since


class ProbeState(Value, frozen=True, kw_only=True):
    """The last probes of all devices."""

    devices: dict[str, Probed] = msgspec.field(default_factory=dict)  # by device
    plan: int = 0  # number of the plan whose members are known to have worked

    def heard(self, device: str, seconds: Sequence[float], *, idle: bool = True) -> ProbeState:
        """The state after one more probe of a device.

        Args:
            seconds: of each of its products; what is no positive number is not counted.
            idle: False where the device has work by now: the probe is then a baseline for other devices alone.
        """
        times = [each for each in seconds if 0 < each < math.inf]
        if not times:
            return self
        known = self.devices.get(device)
        before = known.cost if idle and known is not None and known.idle else None
        probed = Probed(cost=min(times), before=before, fresh=idle, idle=idle)
        return msgspec.structs.replace(self, devices={**self.devices, device: probed})

    def worked(self, plan: int, members: Iterable[str]) -> ProbeState:
        """The members of this plan have work: their probes are a baseline for other devices from now on."""
        if plan == self.plan:
            return self
        done = {
            name: Probed(cost=self.devices[name].cost, fresh=False, idle=False)
            for name in members
            if name in self.devices
        }
        return ProbeState(devices={**self.devices, **done}, plan=plan)

    def forgotten(self, device: str) -> ProbeState:
        """Another worker drives the device."""
        left = {name: known for name, known in self.devices.items() if name != device}
        return msgspec.structs.replace(self, devices=left)

    @property
    def fresh(self) -> tuple[str, ...]:
        """The devices whose last probe was not judged yet, by name."""
        return tuple(sorted(name for name, known in self.devices.items() if known.fresh))

    @property
    def normal(self) -> float:
        """Seconds of a normal device's product."""
        return fleet_cost({name: known.cost for name, known in self.devices.items()}, {})


def judged(
    probes: ProbeState, rates: RateState, settings: DetectSettings
) -> tuple[ProbeState, RateState, tuple[Change, ...]]:
    """Judges the fresh probes; returns the slowdowns after that, and which of them changed."""
    fresh = probes.fresh
    if not fresh:
        return probes, rates, ()
    normal = probes.normal
    found: dict[str, tuple[float, float | None]] = {}
    for name in fresh:
        known = probes.devices[name]
        ratio = known.cost / normal
        before = known.before / normal if known.before is not None else None
        found[name] = ratio, _verdict(rates, name, ratio, before, settings)
    rates, changes = all_believed(rates, found, settings, FLEET)
    devices = {name: msgspec.structs.replace(probes.devices[name], fresh=False) for name in fresh}
    probes = msgspec.structs.replace(probes, devices={**probes.devices, **devices})
    return probes, rates, changes


def _verdict(
    rates: RateState, name: str, ratio: float, before: float | None, settings: DetectSettings
) -> float | None:
    """A device's new slowdown, None where the old one stays."""
    known = rates.devices.get(name)
    if known is None:
        return ratio if ratio >= settings.slow else NORMAL
    if before is None:
        return None
    low, high = sorted((before, ratio))
    if known.rate == NORMAL:
        return low if low >= settings.slow else None
    if high <= settings.recovered:
        return NORMAL
    moved = 1 + settings.slowdown_change
    return ratio if low > known.rate * moved or high < known.rate / moved else None
