"""Damping of flapping devices: over how many steps a switch must pay, and how long it is put off.

Theory of operation. A device's condition is its slowdown. Each change ends one lifetime and begins another. A
condition is expected to last for the mean of the device's last lifetimes (`MEMORY` of them; those that were
not seen yet count as the horizon of the settings), or as long again as it has lasted, whichever is more, and
never beyond that horizon. Over so many steps a switch must pay.

Where even a short life pays, each change would cause a switch. So each switch made for a device counts
against it: the first `FREE` are made at once, and then, with b = an eighth of the horizon, its condition must
have lasted b steps twice, 2b twice, 4b twice and so on. Each whole horizon that a condition lasts after it
was answered forgives one. (Routes that flap are damped alike: RFC 2439.)

An odd number is free and the waits come in pairs, so that a device that is slow now and then is left with the
plan for its slow times: that costs less in good times than the other one would in slow ones.

The bound. For whatever changes of one device within n steps, the switches made for it are at most

    FREE + 1 + 2 log2(n / 2b + 1) + whole horizons that its conditions lasted,

since the waits b + b + 2b + ... of those that were neither free nor forgiven do not overlap: a device whose
conditions last less than a horizon causes O(log n) switches. The count is that of one leader's time.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from elasticd_planner.spec.cluster import NORMAL
from elasticd_planner.value import Value

#: Lifetimes whose mean the next one is expected to have.
MEMORY = 3

#: Switches that are made for a device at once.
FREE = 3

#: Changes whose steps are kept, for people.
TOLD = 16


class ChangeHistory(Value, frozen=True, kw_only=True):
    """The changes of one device's slowdown, and the switches made for them."""

    rate: float = NORMAL  # slowdown since step `since`
    since: int = 0
    lifetimes: tuple[int, ...] = ()  # steps that the conditions before it lasted
    changes: tuple[int, ...] = ()  # steps of its last changes
    answered: int | None = 0  # the step since which the plan in force answers this condition; None: it does not
    switches: int = 0  # that were made for it, less those forgiven before `answered`

    def level(self, step: int, horizon: int) -> int:
        """The switches that count against the device at `step`."""
        lasted = max(0, step - self.answered) if self.answered is not None else 0
        return max(0, self.switches - lasted // horizon)

    def backoff_steps(self, step: int, horizon: int) -> int:
        """Steps that a condition must last before a switch is made for it."""
        level = self.level(step, horizon)
        return first_wait(horizon) << (level - FREE) // 2 if level >= FREE else 0

    def expected(self, step: int, horizon: int) -> int:
        """Steps for which the condition is expected to last yet."""
        seen = [min(life, horizon) for life in self.lifetimes]
        mean = (sum(seen) + horizon * (MEMORY - len(seen))) // MEMORY
        return max(1, min(horizon, max(mean, step - self.since)))


class Stability(Value, frozen=True, kw_only=True):
    """The devices of a job that ever changed, and what the plan in force was made for."""

    devices: dict[str, ChangeHistory] = msgspec.field(default_factory=dict)  # by device
    planned: dict[str, float] = msgspec.field(default_factory=dict)  # slowdown by device


class PayoffHorizon(Value, frozen=True, kw_only=True):
    """The seconds that a new plan may last, and those for which its switch is put off."""

    steps: int  # in which its switch must pay
    wait: int = 0  # steps before the switch is made at all
    age: int = 0  # steps that the deciding device's condition has lasted
    history: str = ""  # what that device did


def first_wait(horizon: int) -> int:
    """Steps that a condition must last before the first switch that is put off."""
    return max(1, horizon // 8)


def changed(state: Stability, device: str, rate: float, step: int, horizon: int) -> Stability:
    """The state after a device's slowdown changed at `step`."""
    before = state.devices.get(device, ChangeHistory())
    after = ChangeHistory(
        rate=rate,
        since=step,
        lifetimes=(*before.lifetimes, step - before.since)[-MEMORY:] if before.changes else (),
        changes=(*before.changes, step)[-TOLD:],
        answered=step if rate == state.planned.get(device, NORMAL) else None,
        switches=before.level(step, horizon),
    )
    return msgspec.structs.replace(state, devices={**state.devices, device: after})


def corrected(state: Stability, device: str, rate: float) -> Stability:
    """The state after a device's slowdown was corrected: the age of its condition and its answer stay."""
    known = state.devices.get(device)
    if known is None:
        return state
    known = msgspec.structs.replace(known, rate=rate)
    return msgspec.structs.replace(state, devices={**state.devices, device: known})


def switched(state: Stability, rates: Mapping[str, float], step: int, horizon: int) -> Stability:
    """The state after a plan made for `rates` came into force, which counts against the devices in `rates`."""
    devices = {}
    for name, known in state.devices.items():
        planned = rates.get(name, NORMAL)
        charge = int(planned != state.planned.get(name, NORMAL))
        answered = None
        if planned == known.rate:
            answered = known.answered if known.answered is not None and not charge else step
        switches = known.switches
        if answered != known.answered:  # what was forgiven up to here stays so
            switches = known.level(step, horizon)
        devices[name] = msgspec.structs.replace(known, answered=answered, switches=switches + charge)
    return Stability(devices=devices, planned=dict(rates))


def settled(state: Stability, step: int) -> Stability:
    """The state after the plan in force was found to be the best answer to all conditions of `step`."""
    devices = {
        name: known if known.answered is not None else msgspec.structs.replace(known, answered=step)
        for name, known in state.devices.items()
    }
    return msgspec.structs.replace(state, devices=devices)


def payoff_horizon(state: Stability, rates: Mapping[str, float], step: int, horizon: int) -> PayoffHorizon:
    """The horizon of a plan made for `rates` (slowdown by device).

    Among the devices for whose change the plan would be made, the device with the shortest wait decides; among
    equal waits, the device whose condition is expected to last longest.
    """
    best = PayoffHorizon(steps=horizon)
    for name in sorted({*rates, *state.planned}):
        if rates.get(name, NORMAL) == state.planned.get(name, NORMAL):
            continue
        known = state.devices.get(name)
        if known is None:
            return PayoffHorizon(steps=horizon)
        age = max(0, step - known.since)
        found = PayoffHorizon(
            steps=known.expected(step, horizon),
            wait=max(0, known.backoff_steps(step, horizon) - age),
            age=age,
            history=_history(name, known, step),
        )
        if not best.history or (found.wait, -found.steps) < (best.wait, -best.steps):
            best = found
    return best


def _history(name: str, known: ChangeHistory, step: int) -> str:
    count, span = len(known.changes), step - known.changes[0] if known.changes else 0
    times = "once" if count == 1 else f"{count} times"
    return f"{name} has changed its speed {times} in {span} steps"
