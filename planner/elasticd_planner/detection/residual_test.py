"""The residual test: whether a device's slowdown changes, after one more residual.

`stragglers` has the rules. A few devices are judged one by one (`ResidualTest.after`). Many are judged at once
(`ResidualTest.after_all`): the same sums are made in arrays, and only the devices whose sums show a change are
then judged one by one.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Literal

import msgspec
import numpy as np

from elasticd_planner.detection.cusum import NONE, CusumState, CusumTest, trimmed
from elasticd_planner.detection.device_rates import AGE, DOWN, OFFSET, RATE, SEEN, UP, DeviceRate, Devices
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.slowness_history import MOST_KEPT, Episode
from elasticd_planner.numeric import Bools, Floats, Ints
from elasticd_planner.spec.cluster import NORMAL
from elasticd_planner.value import Value

Kind = Literal["slow", "slower", "faster", "recovered", "corrected"]

#: Steps over which a device's own offset is learned, and how many steps the belief that it has none is worth.
OFFSET_STEPS = 256
OFFSET_DOUBT = 8


class Change(Value, frozen=True, kw_only=True):
    """A change of a device's slowdown."""

    device: str
    before: float  # slowdown
    after: float  # slowdown
    step: int
    reason: str  # for people
    kind: Kind  # "corrected": the same condition, known better


def rounded(ratio: float, rounding: float) -> float:
    """A ratio as a slowdown: a multiple of `rounding` from 1 to 2, of twice that from 2 to 4, and so on."""
    if ratio <= NORMAL:
        return NORMAL
    step = rounding * 2 ** math.floor(math.log2(ratio))
    return float(round(max(NORMAL, round(ratio / step) * step), 6))


class ResidualTest:
    """Judges the devices of one step by their residuals."""

    def __init__(self, settings: DetectSettings, sigma: float, step: int, fleet: str) -> None:
        """
        Args:
            sigma: standard deviation of the residuals of a device whose slowdown does not change.
            fleet: what the devices are compared with, in the words of an event.
        """
        self.settings, self.step, self.fleet = settings, step, fleet
        self._kept, self._limit = settings.kept, math.log1p(settings.tolerance)
        self._slow, self._moved = (
            CusumTest.of(math.log(ratio), sigma, settings.false_alarms, settings.min_steps)
            for ratio in (settings.slow, 1 + settings.slowdown_change)
        )

    def after(self, name: str, before: DeviceRate, residual: float) -> tuple[DeviceRate, Change | None]:
        """A device after one more residual, and its change of rate if there is one."""
        residuals = (*before.residuals, residual)[-self._kept :]
        if before.rate == NORMAL:
            return self._normal(name, before, residuals)
        return self._known_slow(name, before, residuals)

    def after_all(self, devices: Devices, residuals: Floats) -> tuple[Devices, list[Change]]:
        """The same for the first devices at once, by their residuals [devices]; changes are in no order.

        Columns in which nothing happens, which are nearly all, are counted on together. The others are judged
        one by one."""
        table = devices.longer(residuals, self._kept)
        before, after = devices.table[:, : len(residuals)], table[:, : len(residuals)]
        slow = before[RATE] != NORMAL
        after[UP], far = self._slow.add_all(before[UP], residuals - before[OFFSET])
        one_by_one = self._slow.passed_all(after[UP])
        self._learn_offsets(before, after)
        if slow.any():
            far &= ~slow
            one_by_one[slow] = self._count_on_slow(np.flatnonzero(slow), before, after)
        names = devices.names
        spikes = {
            names[i]: self._spiked(devices.spikes.get(names[i], ())) for i in np.flatnonzero(far).tolist()
        }
        known, changes = {}, list[Change]()
        for place in np.flatnonzero(one_by_one).tolist():
            name, residual = names[place], float(residuals[place])
            known[name], change = self.after(name, devices.at(place), residual)
            changes += [change] if change is not None else []
        return devices.stepped(table, spikes).replaced(known), changes

    def _learn_offsets(self, before: Floats, after: Floats) -> None:
        """Of normal devices, as `_normal` does."""
        limit = self._limit
        seen = np.minimum(before[SEEN] + 1, OFFSET_STEPS)
        cut = np.maximum(-2 * limit, np.minimum(2 * limit, after[-1]))
        offset = before[OFFSET] + (cut - before[OFFSET]) / (seen + OFFSET_DOUBT)
        after[SEEN], after[OFFSET] = seen, np.maximum(-limit, np.minimum(limit, offset))

    def _count_on_slow(self, slow: Ints, before: Floats, after: Floats) -> Bools:
        """Of the devices in these columns, known to be slow, as `_known_slow` does; and which of them must be
        judged one by one."""
        off = after[-1, slow] - np.log(before[RATE, slow])
        up, _ = self._moved.add_all(before[UP, slow], off)
        down, _ = self._moved.add_all(before[DOWN, slow], -off)
        age = before[AGE, slow]
        age += age >= 0
        for rows, values in ((UP, up), (DOWN, down), (AGE, age), (SEEN, before[SEEN, slow])):
            after[rows, slow] = values
        after[OFFSET, slow] = before[OFFSET, slow]
        settled = (age >= self.settings.refine_after_steps) & (up[1] == 0) & (down[1] == 0)
        found: Bools = self._moved.passed_all(up) | self._moved.passed_all(down) | settled
        return found

    def _normal(
        self, name: str, before: DeviceRate, residuals: tuple[float, ...]
    ) -> tuple[DeviceRate, Change | None]:
        last = residuals[-1]
        up = self._slow.add(before.cusum_up, last - before.offset)
        spikes = before.spikes
        if self._slow.clear(last - before.offset):
            spikes = self._spiked(spikes)
        if not self._slow.passed(up):
            seen = min(before.seen + 1, OFFSET_STEPS)
            limit = self._limit
            cut = max(-2 * limit, min(2 * limit, last))
            offset = before.offset + (cut - before.offset) / (seen + OFFSET_DOUBT)
            return DeviceRate(
                residuals=residuals,
                cusum_up=up,
                offset=max(-limit, min(limit, offset)),
                seen=seen,
                spikes=spikes,
                episodes=before.episodes,
            ), None
        steps = self._slow.steps(up, residuals)
        found = median(residuals[-steps:])
        if found <= math.log(self.settings.recovered):  # not more than devices may differ
            return msgspec.structs.replace(before, residuals=residuals, cusum_up=NONE, spikes=spikes), None
        start = self.step - steps + 1
        before = msgspec.structs.replace(before, spikes=tuple(spike for spike in spikes if spike < start))
        return self.changed(name, before, residuals, found, steps, "slow")

    def _spiked(self, spikes: tuple[int, ...]) -> tuple[int, ...]:
        """A device's single slow steps with this one."""
        return (*spikes, self.step)[-MOST_KEPT:]

    def _known_slow(
        self, name: str, before: DeviceRate, residuals: tuple[float, ...]
    ) -> tuple[DeviceRate, Change | None]:
        settings, believed = self.settings, math.log(before.rate)
        off = residuals[-1] - believed
        up, down = self._moved.add(before.cusum_up, off), self._moved.add(before.cusum_down, -off)
        verdicts: tuple[tuple[CusumState, Kind], ...] = ((up, "slower"), (down, "faster"))
        for passed, kind in verdicts:
            if self._moved.passed(passed):
                steps = self._moved.steps(passed, residuals)
                return self.changed(name, before, residuals, median(residuals[-steps:]), steps, kind)
        age = None if before.age is None else before.age + 1
        if age is not None and age >= settings.refine_after_steps and not (up.clear or down.clear):
            # The first of them may have begun before the change did.
            found = trimmed(residuals[-min(age - 1, len(residuals)) :])
            if abs(found - believed) > settings.refine:
                return self.changed(name, before, residuals, found, None, "corrected")
            age = None
        return msgspec.structs.replace(before, residuals=residuals, cusum_up=up, cusum_down=down, age=age), None

    def changed(
        self,
        name: str,
        before: DeviceRate,
        residuals: tuple[float, ...],
        found: float,
        since: int | None,
        kind: Kind,
    ) -> tuple[DeviceRate, Change | None]:
        """At another rate for the last `since` steps (None: for as long as it was thought to be at this
        one)."""
        ratio = math.exp(found)
        rate = rounded(ratio, self.settings.rounding)
        start = self.step + 1 - (since or 1)
        episodes = before.episodes
        if kind not in ("slow", "slower") and ratio <= self.settings.recovered:
            kind, rate = "recovered", NORMAL
            if episodes and episodes[-1].stop is None:
                episodes = (*episodes[:-1], msgspec.structs.replace(episodes[-1], stop=start))
        elif episodes and episodes[-1].stop is None:
            episodes = (*episodes[:-1], msgspec.structs.replace(episodes[-1], rate=rate))
        else:
            episodes = (*episodes, Episode(start=start, stop=None, rate=rate))[-MOST_KEPT:]
        settled = since is None or since >= self.settings.refine_after_steps or rate == NORMAL
        after = DeviceRate(
            rate=rate,
            residuals=residuals,
            age=None if settled else since,
            offset=before.offset,
            seen=before.seen,
            spikes=before.spikes,
            episodes=episodes,
        )
        words = {"recovered": "recovered", "corrected": "is known better"}.get(kind, f"is {kind}")
        reason = f"{name} {words}: it takes {ratio:.2f} times as long as {self.fleet} (was {before.rate:g})"
        if rate == before.rate:
            return after, None
        return after, Change(
            device=name, before=before.rate, after=rate, step=self.step, reason=reason, kind=kind
        )
