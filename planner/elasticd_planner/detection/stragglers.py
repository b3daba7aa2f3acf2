"""Straggler detection: each device's slowdown from the measurements of each step, with hysteresis.

Theory of operation. A step's cost of a device is its computation's seconds per unit of work (tokens, their
sequences' lengths, layers, share), so that plans and batches compare. Its residual is the logarithm of that
cost over the fleet's in the same step (`fleet_baseline`). Residuals are judged one by one (`cusum`):

    normal --(residuals above 0 by ln slow)------------------------> slow
    slow   --(off ln slowdown by ln(1 + slowdown_change))----------> slow by another factor, or normal
    slow   --(after `refine_after_steps` steps, mean off)----------> slow by the mean since

What is judged is always a shift from what is believed, and it must be most of `slow` or `slowdown_change`: that
is the hysteresis. One wild step never changes a belief, and two do not either. The spread of the residuals is
measured, and is never taken for less than `noise`. A device has an offset of its own, up to `tolerance`, which
is learned while it is normal: devices differ a little for good.

Of `MANY` devices and more everything is done in arrays, for the last report of a large job's step is judged
between two messages. The results are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from statistics import median

import msgspec
import numpy as np

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.detection.device_rates import COUNT, RATE, Devices, replaced, without
from elasticd_planner.detection.device_rates import DeviceRate as DeviceRate
from elasticd_planner.detection.fleet_baseline import (
    Curve,
    fleet_cost,
    fleet_cost_of_many,
    learned,
    learned_of_many,
    noise,
)
from elasticd_planner.detection.residual_test import Change as Change
from elasticd_planner.detection.residual_test import Kind, ResidualTest
from elasticd_planner.detection.residual_test import rounded as rounded
from elasticd_planner.detection.settings import DetectSettings as DetectSettings
from elasticd_planner.detection.slowness_history import Slowness, classify
from elasticd_planner.numeric import Floats, middle
from elasticd_planner.spec.cluster import NORMAL
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import Plan, seats_of
from elasticd_planner.spec.step_measurements import STARTS, Step
from elasticd_planner.value import Value

#: Devices from which on a step is judged in arrays. Of fewer numpy's calls take longer than the sums.
MANY = 64


#: What devices are compared with, as people read it.
FLEET = "the fleet for the same work"


class RateState(Value, frozen=True, kw_only=True):
    """The state of straggler detection in one job."""

    devices: Mapping[str, DeviceRate] = msgspec.field(default_factory=dict)  # a `Devices` where there are many
    plan: int = -1  # number of the plan of the last step
    step: int = -1  # the last step
    fresh: int = 0  # steps seen since the plan changed, up to the warm-up
    noise: float = 0.0  # the fleet's, as the standard deviation of a residual from step to step
    seen: int = 0  # steps that the noise was measured in
    curve: Curve = Curve()  # what a token costs by the length of its sequence
    window: int = DetectSettings().window  # steps whose median slowdown screens show

    @property
    def rates(self) -> dict[str, float]:
        """The slowdowns to plan with; devices that are not named are normal."""
        if isinstance(self.devices, Devices):
            return self.devices.slow
        return {name: known.rate for name, known in self.devices.items() if known.rate != NORMAL}

    @property
    def troubled(self) -> tuple[str, ...]:
        """The devices that were slow at some time, be it for one step."""
        if isinstance(self.devices, Devices):
            return tuple({**self.devices.episodes, **self.devices.spikes})
        return tuple(name for name, known in self.devices.items() if known.episodes or known.spikes)

    def ratio(self, device: str) -> float:
        """The median of a device's last ratios to the fleet, for screens; 1.0 where nothing is known."""
        known = self.devices.get(device)
        if known is None or not known.residuals:
            return NORMAL
        return math.exp(median(known.residuals[-self.window :]))

    def slowness(self, device: str, persistent_steps: int = DetectSettings().persistent_steps) -> Slowness:
        """The kind of slowness that a device has, for people; `persistent_steps` as in the settings."""
        known = self.devices.get(device, _UNKNOWN)
        return classify(known.episodes, known.spikes, self.step, persistent_steps)


Work = Callable[[Step], Floats]
Observed = tuple[RateState, tuple[Change, ...]]


def observe(
    state: RateState,
    measured: Step | Iterable[Measurement],
    settings: DetectSettings,
    work: Work | None = None,
) -> Observed:
    """Judges the measurements of one step. A step that is not newer than the last one changes nothing.

    Args:
        measured: of all members, or of those that reported.
        work: the work of each device in any unit; None: tokens x layers x share (see `expectation`).

    Returns:
        The state after the step, and the slowdowns that changed.

    Raises:
        Invalid: the measurements are of several steps.
    """
    if not isinstance(measured, Step):
        measured = tuple(measured)
        if not measured:
            return state, ()
    step = measured if isinstance(measured, Step) else Step.of(measured)
    if step.step <= state.step or step.plan < state.plan:
        return state, ()
    fresh = state.fresh if step.plan == state.plan else 0
    warm = fresh >= settings.warmup
    now = msgspec.structs.replace(state, plan=step.plan, step=step.step, fresh=fresh if warm else fresh + 1)
    observed = _observe_many if _are_many(state, len(step.devices)) else _observe_few
    return observed(now, step, settings, work, warm=warm) or (state, ())


def judged(
    state: RateState,
    residuals: Mapping[str, float],
    settings: DetectSettings,
    fleet: str = FLEET,
) -> Observed:
    """Judges residuals of step `state.step`.

    Args:
        residuals: by device: the logarithm of what it took over what a normal device takes.
        fleet: what the devices are compared with, in the words of an event.
    """
    if _are_many(state, len(residuals)):
        return _judged_many(state, tuple(residuals), np.array([*residuals.values()]), settings, fleet)
    rates = state.rates
    pairs = ((y, state.devices.get(name)) for name, y in residuals.items() if name not in rates)
    moves = [abs(y - known.residuals[-1]) for y, known in pairs if known is not None and known.residuals]
    heard = noise(state.noise, state.seen, median(moves) if moves else None)
    test = ResidualTest(settings, max(settings.noise, heard), state.step, fleet)
    devices = dict(state.devices)
    changes: list[Change] = []
    for name in sorted(residuals):
        devices[name], change = test.after(name, devices.get(name, _UNKNOWN), residuals[name])
        if change is not None:
            changes.append(change)
    seen = state.seen + bool(moves)
    state = msgspec.structs.replace(state, devices=devices, noise=heard, seen=seen, window=settings.window)
    return state, tuple(changes)


def all_believed(
    state: RateState,
    ratios: Mapping[str, tuple[float, float | None]],
    settings: DetectSettings,
    fleet: str,
) -> Observed:
    """Sets slowdowns by measurements outside of the devices' steps.

    Args:
        ratios: by device: how many times longer than `fleet` it took, and its new slowdown; None: the old one
            stays.
    """
    test = ResidualTest(settings, max(settings.noise, state.noise), state.step, fleet)
    known, changes = dict[str, DeviceRate](), list[Change]()
    for device, (ratio, found) in ratios.items():
        before = state.devices.get(device, _UNKNOWN)
        residuals = (*before.residuals, math.log(ratio))[-settings.kept :]
        after, change = msgspec.structs.replace(before, residuals=residuals), None
        if found is not None and rounded(found, settings.rounding) != before.rate:
            kind: Kind = "slow" if before.rate == NORMAL else "slower" if found > before.rate else "faster"
            after, change = test.changed(device, before, residuals, math.log(found), None, kind)
        known[device] = after
        changes += [change] if change is not None else []
    return msgspec.structs.replace(state, devices=replaced(state.devices, known)), tuple(changes)


def forget(state: RateState, device: str) -> RateState:
    """The state without a device, on which a new worker runs."""
    return msgspec.structs.replace(state, devices=without(state.devices, device))


_UNKNOWN = DeviceRate()


# -- few devices -------------------------------------------------------------------------------------------


def _are_many(state: RateState, count: int) -> bool:
    """Returns True if a step of so many devices is judged in arrays."""
    return max(len(state.devices), count) >= MANY


def _observe_few(
    state: RateState, step: Step, settings: DetectSettings, work: Work | None, *, warm: bool
) -> Observed | None:
    """The consequences of a step; None where nothing in it makes sense. In the warm-up no device is judged."""
    costs, lengths = dict[str, float](), dict[str, float]()
    done = work(step).tolist() if work is not None else None
    for place, (name, (seconds, asked, tokens, squares)) in enumerate(
        zip(step.devices, step.rows, strict=True)
    ):
        if asked > 0 and 0 < seconds < math.inf:
            length = squares / tokens if tokens else 0.0
            cost = seconds / ((done[place] if done is not None else asked) * state.curve.factor(length))
            if 0 < cost < math.inf:
                costs[name], lengths[name] = cost, length
    if not costs:
        return None
    if not warm:
        return state, ()
    rates = state.rates
    level = math.log(fleet_cost(costs, rates, max(settings.noise, state.noise)))
    residuals = {name: math.log(cost) - level for name, cost in costs.items()}
    normal = {name: y for name, y in residuals.items() if name not in rates}
    state, changes = judged(state, residuals, settings)
    curve = learned(state.curve, lengths, normal, max(settings.noise, state.noise))
    return msgspec.structs.replace(state, curve=curve), changes


# -- many devices ------------------------------------------------------------------------------------------


def _observe_many(
    state: RateState, step: Step, settings: DetectSettings, work: Work | None, *, warm: bool
) -> Observed | None:
    """The same as `_observe_few`."""
    seconds, asked, tokens, squares = (step.column(name) for name in STARTS)
    with np.errstate(all="ignore"):  # what makes no sense is left out
        lengths = np.where(tokens != 0, squares / tokens, 0.0)
        costs = seconds / ((work(step) if work is not None else asked) * state.curve.factors(lengths))
        heard = (asked > 0) & (costs > 0) & (costs < math.inf)
    names = step.devices
    if not heard.all():
        names, costs, lengths = tuple(compress(names, heard.tolist())), costs[heard], lengths[heard]
    if not names:
        return None
    if not warm:
        return state, ()
    devices = _in_columns(state, names)
    rates = devices.table[RATE, : len(names)]
    level = math.log(fleet_cost_of_many(costs, rates, max(settings.noise, state.noise)))
    residuals, normal = np.log(costs) - level, rates == NORMAL
    state, changes = _judged_many(state, names, residuals, settings, FLEET)
    spread = max(settings.noise, state.noise)
    curve = learned_of_many(state.curve, lengths[normal], residuals[normal], spread)
    return msgspec.structs.replace(state, curve=curve), changes


def _judged_many(
    state: RateState, names: tuple[str, ...], residuals: Floats, settings: DetectSettings, fleet: str
) -> Observed:
    """The same as `judged`, of the devices of these names by their residuals [devices]."""
    devices = _in_columns(state, names)
    change = _middle_change(devices.table[:, : len(names)], residuals)
    heard = noise(state.noise, state.seen, change)
    test = ResidualTest(settings, max(settings.noise, heard), state.step, fleet)
    devices, changes = test.after_all(devices, residuals)
    seen = state.seen + (change is not None)
    state = msgspec.structs.replace(state, devices=devices, noise=heard, seen=seen, window=settings.window)
    return state, tuple(sorted(changes, key=lambda change: change.device))


def _in_columns(state: RateState, names: tuple[str, ...]) -> Devices:
    """The table of the devices, with the columns of these first."""
    known = state.devices if isinstance(state.devices, Devices) else Devices.of(state.devices)
    return known.led_by(names)


def _middle_change(table: Floats, residuals: Floats) -> float | None:
    """The median of the changes of normal devices' residuals since their last step, up and down alike; None
    where there was none before."""
    known = (table[COUNT] > 0) & (table[RATE] == NORMAL)
    if not known.any():
        return None
    return middle(np.sort(np.abs((residuals - table[-1])[known])))


def expectation(profile: ModelProfile, plan: Plan) -> Callable[[Step], Floats]:
    """The function `work` of `observe` for the members of a plan of one module; of several see `module_work`.

    The work of a device [devices] is tokens x layers x share. From the profile come two corrections: a share in
    a wide TP group takes longer than that part of the whole (norms take as long as on
    one device), and each pass of a block has a fixed time. How the cost of a token grows with the length of its
    sequence is learned by `observe`.
    """
    block = profile.block
    if not block.slowdown and not block.fixed_seconds and not block.whole_seconds:
        return lambda step: step.column("block_work")
    seats, fixed = plan.seats, block.fixed_seconds / block.seconds
    # The last ones are of a device that does not compute under this plan.
    group = seats.group
    slowdown = np.append(block.slowdowns(seats.width[group], seats.part, seats.sliced[group]), 1.0)
    each = np.append(fixed * seats.layers[group], 0.0)

    def work(step: Step) -> Floats:
        seat = seats_of(plan, step.devices)
        found: Floats = step.column("block_work") * slowdown[seat] + each[seat] * step.column("micro_batches")
        return found

    return work
