"""From measurements to rates: who is slow, who recovered, robustly and with hysteresis.

Theory of operation. A step's unit cost of a device is its computation's seconds per token, layer and share,
so that plans and batches compare. It is divided by the fleet's unit cost in the same step (what slows
everybody slows nobody relative to the others), and the median of a short window of these ratios is judged:

    normal --(ratio >= slow, confirmed)--> slow --(ratio <= recovered, confirmed)--> normal
                                           slow --(ratio moved by `moved`, confirmed)--> slow

A judgement is confirmed when it holds for some steps in a row (one, as it is: with a window of five it
takes three steps to move the median). One wild step never moves it, and two do not either.
The fleet is the faster half of the devices that are not known to be slow: one slow device out of two counts
in neither half, and a device that was slow from the start is seen as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Literal

import msgspec

from elasticd_planner.cluster import NORMAL
from elasticd_planner.measurement import Measurement
from elasticd_planner.value import Value, refuse

Judgement = Literal["", "slow", "recovered", "slower", "faster"]

#: A recovered step is one that calls for "faster" as well, only more so.
STRONGER: dict[Judgement, tuple[Judgement, ...]] = {
    "slow": (),
    "recovered": (),
    "slower": (),
    "faster": ("recovered",),
}


class DetectSettings(Value, frozen=True, kw_only=True):
    """slow, recovered: ratios at which a device becomes slow and normal again. moved: relative change of a
    slow device's rate that is reported. window: steps whose median counts. confirmations: steps in a row that
    must agree. warmup: steps skipped after each change of plan. rounding: rates between 1 and 2 are rounded
    to it, between 2 and 4 to twice of it, and so on, so that noise does not change plans."""

    slow: float = 1.25
    recovered: float = 1.1
    moved: float = 0.15
    window: int = 5
    confirmations: int = 1
    warmup: int = 1
    rounding: float = 0.05

    def __post_init__(self) -> None:
        if not 1 <= self.recovered < self.slow:
            refuse(
                f"detect: recovered ({self.recovered}) must be at least 1 and below slow ({self.slow}); "
                "the room between them is what keeps a device from flapping"
            )
        if self.window < 1 or self.confirmations < 1 or self.warmup < 0:
            refuse("detect: window and confirmations must be at least 1, warmup at least 0")
        if not self.moved > 0 or not 0 < self.rounding <= 1:
            refuse("detect: moved must be positive, and rounding above 0 and at most 1")


class DeviceRate(Value, frozen=True, kw_only=True):
    """What is known of one device: its rate (1.0 normal), the ratios of the last steps, and for how many
    steps in a row they have been judged to call for the same change."""

    rate: float = NORMAL
    ratios: tuple[float, ...] = ()
    judgement: Judgement = ""
    streak: int = 0


class Change(Value, frozen=True, kw_only=True):
    """A rate that changed, and why."""

    device: str
    before: float
    after: float
    step: int
    reason: str


class RateState(Value, frozen=True, kw_only=True):
    """Detection's whole state. `fresh` counts the steps seen since the plan changed, up to the warm-up."""

    devices: dict[str, DeviceRate] = msgspec.field(default_factory=dict)
    plan: int = -1
    step: int = -1
    fresh: int = 0

    @property
    def rates(self) -> dict[str, float]:
        """The rates to plan with; devices not named are normal."""
        return {name: known.rate for name, known in self.devices.items() if known.rate != NORMAL}

    def ratio(self, device: str) -> float:
        """The median of a device's last ratios (1.0 where nothing is known): for people, not for planning."""
        known = self.devices.get(device)
        return median(known.ratios) if known is not None and known.ratios else NORMAL


def observe(
    state: RateState, measurements: Iterable[Measurement], settings: DetectSettings
) -> tuple[RateState, tuple[Change, ...]]:
    """Takes in one step's measurements (of all members, or of those that reported).

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
    costs = {name: m.block_seconds / m.block_work for name, m in given.items()}
    fleet = fleet_cost(costs, state.rates)
    devices = dict(state.devices)
    changes: list[Change] = []
    for name in sorted(costs):
        before = devices.get(name, DeviceRate())
        after, reason = _judge(before, costs[name] / fleet, settings)
        devices[name] = after
        if after.rate != before.rate:
            changes.append(
                Change(device=name, before=before.rate, after=after.rate, step=step, reason=f"{name} {reason}")
            )
    return msgspec.structs.replace(state, devices=devices, plan=plan, step=step, fresh=fresh), tuple(changes)


def forget(state: RateState, device: str) -> RateState:
    """A new worker runs on the device: nothing is known of it."""
    devices = {name: known for name, known in state.devices.items() if name != device}
    return msgspec.structs.replace(state, devices=devices)


def fleet_cost(costs: Mapping[str, float], slow: Mapping[str, float]) -> float:
    """The unit cost of a normal device: the median of the cheaper half of those not known to be slow. Where
    only slow ones work, of all of them by their rates."""
    normal = [cost for name, cost in costs.items() if name not in slow]
    if not normal:
        normal = [cost / slow[name] for name, cost in costs.items()]
    return median(sorted(normal)[: (len(normal) + 1) // 2])


def rounded(ratio: float, rounding: float) -> float:
    """A ratio as a rate: steps of `rounding` between 1 and 2, twice that between 2 and 4, and so on."""
    if ratio <= NORMAL:
        return NORMAL
    step = rounding * 2 ** math.floor(math.log2(ratio))
    return float(round(max(NORMAL, round(ratio / step) * step), 6))


def _judge(before: DeviceRate, ratio: float, settings: DetectSettings) -> tuple[DeviceRate, str]:
    """The device after one more ratio, and the reason if its rate changed."""
    ratios = (*before.ratios, ratio)[-settings.window :]
    judgement: Judgement = ""
    if len(ratios) == settings.window:
        judgement = _judgement(before.rate, median(ratios), settings)
    streak = (before.streak + 1 if judgement == before.judgement else 1) if judgement else 0
    if not judgement or streak < settings.confirmations:
        return DeviceRate(rate=before.rate, ratios=ratios, judgement=judgement, streak=streak), ""
    # The window still holds steps from before the change, and one in which it happened: the rate is that of
    # the steps that call for the change.
    now = median(r for r in ratios if _judgement(before.rate, r, settings) in (judgement, *STRONGER[judgement]))
    if judgement == "recovered" or now <= settings.recovered:
        judgement, rate = "recovered", NORMAL
    else:
        rate = rounded(now, settings.rounding)
    words = "recovered" if judgement == "recovered" else f"is {judgement}"
    reason = f"{words}: it takes {now:.2f} times as long as the fleet for the same work (was {before.rate:g})"
    return DeviceRate(rate=rate, ratios=ratios), reason


def _judgement(rate: float, ratio: float, settings: DetectSettings) -> Judgement:
    if rate == NORMAL:
        return "slow" if ratio >= settings.slow else ""
    if ratio <= settings.recovered:
        return "recovered"
    if ratio >= rate * (1 + settings.moved):
        return "slower"
    return "faster" if ratio <= rate * (1 - settings.moved) else ""
