"""From measurements to rates: who is slow, who recovered, robustly and with hysteresis.

Theory of operation. A step's cost of a device is its computation's seconds per unit of work (tokens, their
sequences' lengths, layers, share), so that plans and batches compare. Its residual is the logarithm of that
cost over the fleet's in the same step (`fleet`). Residuals are judged one by one (`sequential`):

    normal --(residuals above 0 by ln slow)----------> slow
    slow   --(above or below ln rate by ln moved)----> slow at another rate, or normal
    slow   --(after `settle` steps, mean off)--------> slow at the mean since

What is judged is always a shift from what is believed, and it must be most of `slow` or `moved`: that is the
hysteresis. One wild step never changes a belief, and two do not either. The spread of the residuals is
measured, and is never taken for less than `noise`. A device has an offset of its own, up to `tolerance`, which
is learned while it is normal: devices differ a little for good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Literal

import msgspec

from elasticd_planner.cluster import NORMAL
from elasticd_planner.detect import DetectSettings as DetectSettings
from elasticd_planner.fleet import Curve, fleet_cost, learned, noise
from elasticd_planner.measurement import Measurement
from elasticd_planner.sequential import NONE, Detector, Evidence, trimmed
from elasticd_planner.slowness import MOST_KEPT, Episode, Slowness, classify
from elasticd_planner.value import Value, refuse

Kind = Literal["slow", "slower", "faster", "recovered", "corrected"]

#: Steps over which a device's own offset is learned, and how many steps the belief that it has none is worth.
OFFSET_STEPS = 256
OFFSET_DOUBT = 8


class DeviceRate(Value, frozen=True, kw_only=True):
    """What is known of one device: its rate (1.0 normal), the residuals of the last steps, and what they say.

    above, below: the evidence for a shift up and down. age: steps since the rate began to hold (None: long
    ago). offset: its own lasting difference, from `seen` steps. spikes: single slow steps; episodes: when it
    was slow."""

    rate: float = NORMAL
    residuals: tuple[float, ...] = ()
    above: Evidence = NONE
    below: Evidence = NONE
    age: int | None = None
    offset: float = 0.0
    seen: int = 0
    spikes: tuple[int, ...] = ()
    episodes: tuple[Episode, ...] = ()


class Change(Value, frozen=True, kw_only=True):
    """A rate that changed, and why. A "corrected" one is the same condition, known better."""

    device: str
    before: float
    after: float
    step: int
    reason: str
    kind: Kind


class RateState(Value, frozen=True, kw_only=True):
    """Detection's whole state. `fresh` counts the steps seen since the plan changed, up to the warm-up; `noise`
    is the fleet's, measured in `seen` steps. window: steps whose median people see."""

    devices: dict[str, DeviceRate] = msgspec.field(default_factory=dict)
    plan: int = -1
    step: int = -1
    fresh: int = 0
    noise: float = 0.0
    seen: int = 0
    curve: Curve = Curve()
    window: int = DetectSettings().window

    @property
    def rates(self) -> dict[str, float]:
        """The rates to plan with; devices not named are normal."""
        return {name: known.rate for name, known in self.devices.items() if known.rate != NORMAL}

    def ratio(self, device: str) -> float:
        """The median of a device's last ratios (1.0 where nothing is known): for people, not for planning."""
        known = self.devices.get(device)
        if known is None or not known.residuals:
            return NORMAL
        return math.exp(median(known.residuals[-self.window :]))

    def slowness(self, device: str, chronic: int = DetectSettings().chronic) -> Slowness:
        """What kind of slowness a device has, for people; `chronic` as in the settings."""
        known = self.devices.get(device, DeviceRate())
        return classify(known.episodes, known.spikes, self.step, chronic)


def observe(
    state: RateState,
    measurements: Iterable[Measurement],
    settings: DetectSettings,
    work: Callable[[Measurement], float] | None = None,
) -> tuple[RateState, tuple[Change, ...]]:
    """Takes in one step's measurements (of all members, or of those that reported). `work`: what a device had
    to do, in units of any size (None: tokens x layers x share alone; see `expected`).

    A step not newer than the last one changes nothing. Raises Invalid for measurements of several steps.
    """
    given = {m.device: m for m in measurements if m.block_work > 0 and 0 < m.block_seconds < math.inf}
    if not given:
        return state, ()
    steps = {(m.plan, m.step) for m in given.values()}
    if len(steps) != 1:
        refuse(f"rates: measurements of one step at a time, not of (plan, step) {sorted(steps)}")
    plan, step = steps.pop()
    if step <= state.step or plan < state.plan:
        return state, ()
    fresh = state.fresh if plan == state.plan else 0
    if fresh < settings.warmup:
        return msgspec.structs.replace(state, plan=plan, step=step, fresh=fresh + 1), ()
    rates = state.rates
    lengths = {name: m.effective_length for name, m in given.items()}
    costs = {
        name: m.block_seconds / ((work(m) if work else m.block_work) * state.curve.factor(lengths[name]))
        for name, m in given.items()
    }
    level = math.log(fleet_cost(costs, rates, max(settings.noise, state.noise)))
    residuals = {name: math.log(cost) - level for name, cost in costs.items()}
    normal = {name: y for name, y in residuals.items() if name not in rates}
    state = msgspec.structs.replace(state, plan=plan, step=step, fresh=fresh)
    state, changes = judged(state, residuals, settings)
    curve = learned(state.curve, lengths, normal, max(settings.noise, state.noise))
    return msgspec.structs.replace(state, curve=curve), changes


def judged(
    state: RateState,
    residuals: Mapping[str, float],
    settings: DetectSettings,
    fleet: str = "the fleet for the same work",
) -> tuple[RateState, tuple[Change, ...]]:
    """Takes in residuals of step `state.step`: the logarithm of what each took, over what a normal one takes.
    `fleet` says to people what that is."""
    rates = state.rates
    pairs = ((y, state.devices.get(name)) for name, y in residuals.items() if name not in rates)
    moves = [y - known.residuals[-1] for y, known in pairs if known is not None and known.residuals]
    heard = noise(state.noise, state.seen, moves)
    judge = _Judge(settings, max(settings.noise, heard), state.step, fleet)
    devices = dict(state.devices)
    changes: list[Change] = []
    for name in sorted(residuals):
        devices[name], change = judge.after(name, devices.get(name, _UNKNOWN), residuals[name])
        if change is not None:
            changes.append(change)
    seen = state.seen + bool(moves)
    state = msgspec.structs.replace(state, devices=devices, noise=heard, seen=seen, window=settings.window)
    return state, tuple(changes)


def believed(
    state: RateState, device: str, ratio: float, found: float | None, settings: DetectSettings, fleet: str
) -> tuple[RateState, Change | None]:
    """What is known of a device from elsewhere than its steps: it took `ratio` times as long as `fleet`, and is
    to be believed to be `found` times slower than normal (None: what is believed stays)."""
    before = state.devices.get(device, _UNKNOWN)
    residuals = (*before.residuals, math.log(ratio))[-settings.kept :]
    after, change = msgspec.structs.replace(before, residuals=residuals), None
    if found is not None and rounded(found, settings.rounding) != before.rate:
        judge = _Judge(settings, max(settings.noise, state.noise), state.step, fleet)
        kind: Kind = "slow" if before.rate == NORMAL else "slower" if found > before.rate else "faster"
        after, change = judge.changed(device, before, residuals, math.log(found), None, kind)
    return msgspec.structs.replace(state, devices={**state.devices, device: after}), change


def forget(state: RateState, device: str) -> RateState:
    """A new worker runs on the device: nothing is known of it."""
    devices = {name: known for name, known in state.devices.items() if name != device}
    return msgspec.structs.replace(state, devices=devices)


def rounded(ratio: float, rounding: float) -> float:
    """A ratio as a rate: steps of `rounding` between 1 and 2, twice that between 2 and 4, and so on."""
    if ratio <= NORMAL:
        return NORMAL
    step = rounding * 2 ** math.floor(math.log2(ratio))
    return float(round(max(NORMAL, round(ratio / step) * step), 6))


_UNKNOWN = DeviceRate()


class _Judge:
    """Judges the devices of one step."""

    def __init__(self, settings: DetectSettings, spread: float, step: int, fleet: str) -> None:
        self.settings, self.spread, self.step, self.fleet = settings, spread, step, fleet
        self._kept, self._limit = settings.kept, math.log1p(settings.tolerance)
        self._slow, self._moved = (
            Detector.of(math.log(ratio), spread, settings.false_alarms, settings.quickest)
            for ratio in (settings.slow, 1 + settings.moved)
        )

    def after(self, name: str, before: DeviceRate, residual: float) -> tuple[DeviceRate, Change | None]:
        """A device after one more residual, and its change of rate if there is one."""
        residuals = (*before.residuals, residual)[-self._kept :]
        if before.rate == NORMAL:
            return self._normal(name, before, residuals)
        return self._known_slow(name, before, residuals)

    def _normal(
        self, name: str, before: DeviceRate, residuals: tuple[float, ...]
    ) -> tuple[DeviceRate, Change | None]:
        last = residuals[-1]
        above = self._slow.add(before.above, last - before.offset)
        spikes = before.spikes
        if self._slow.clear(last - before.offset):
            spikes = (*spikes, self.step)[-MOST_KEPT:]
        if not self._slow.passed(above):
            seen = min(before.seen + 1, OFFSET_STEPS)
            limit = self._limit
            cut = max(-2 * limit, min(2 * limit, last))
            offset = before.offset + (cut - before.offset) / (seen + OFFSET_DOUBT)
            return DeviceRate(
                residuals=residuals,
                above=above,
                offset=max(-limit, min(limit, offset)),
                seen=seen,
                spikes=spikes,
                episodes=before.episodes,
            ), None
        steps = self._slow.steps(above, residuals)
        found = median(residuals[-steps:])
        if found <= math.log(self.settings.recovered):  # not more than devices may differ
            return msgspec.structs.replace(before, residuals=residuals, above=NONE, spikes=spikes), None
        start = self.step - steps + 1
        before = msgspec.structs.replace(before, spikes=tuple(spike for spike in spikes if spike < start))
        return self.changed(name, before, residuals, found, steps, "slow")

    def _known_slow(
        self, name: str, before: DeviceRate, residuals: tuple[float, ...]
    ) -> tuple[DeviceRate, Change | None]:
        settings, believed = self.settings, math.log(before.rate)
        off = residuals[-1] - believed
        above, below = self._moved.add(before.above, off), self._moved.add(before.below, -off)
        verdicts: tuple[tuple[Evidence, Kind], ...] = ((above, "slower"), (below, "faster"))
        for passed, kind in verdicts:
            if self._moved.passed(passed):
                steps = self._moved.steps(passed, residuals)
                return self.changed(name, before, residuals, median(residuals[-steps:]), steps, kind)
        age = None if before.age is None else before.age + 1
        if age is not None and age >= settings.settle and not (above.clear or below.clear):
            # The first of them may have begun before the change did.
            found = trimmed(residuals[-min(age - 1, len(residuals)) :])
            if abs(found - believed) > settings.refine:
                return self.changed(name, before, residuals, found, None, "corrected")
            age = None
        return msgspec.structs.replace(before, residuals=residuals, above=above, below=below, age=age), None

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
        settled = since is None or since >= self.settings.settle or rate == NORMAL
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
