"""How long conditions last: what a new plan's horizon is, and how long a restless device is left alone.

Theory of operation. A device's condition is its rate. Each change ends one lifetime and begins another. A
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


class Restlessness(Value, frozen=True, kw_only=True):
    """One device: its rate since step `since`, the `lifetimes` before it, the steps of its last changes.
    `answered`: the step since which the plan in force is an answer to this condition, None where it is not.
    `switches` that were made for it, less those forgiven before `answered`."""

    rate: float = NORMAL
    since: int = 0
    lifetimes: tuple[int, ...] = ()
    changes: tuple[int, ...] = ()
    answered: int | None = 0
    switches: int = 0

    def level(self, step: int, horizon: int) -> int:
        """The switches that count against it at `step`."""
        lasted = max(0, step - self.answered) if self.answered is not None else 0
        return max(0, self.switches - lasted // horizon)

    def patience(self, step: int, horizon: int) -> int:
        """Steps that a condition must last before a switch is made for it."""
        level = self.level(step, horizon)
        return first_wait(horizon) << (level - FREE) // 2 if level >= FREE else 0

    def expected(self, step: int, horizon: int) -> int:
        """Steps for which its condition is expected to last yet."""
        seen = [min(life, horizon) for life in self.lifetimes]
        mean = (sum(seen) + horizon * (MEMORY - len(seen))) // MEMORY
        return max(1, min(horizon, max(mean, step - self.since)))


class Stability(Value, frozen=True, kw_only=True):
    """All devices that ever changed, and the rates that the plan in force was made for."""

    devices: dict[str, Restlessness] = msgspec.field(default_factory=dict)
    planned: dict[str, float] = msgspec.field(default_factory=dict)


class Outlook(Value, frozen=True, kw_only=True):
    """What a new plan may count on: `steps` to pay for its switch in, and `wait` before it is made at all,
    because of a device whose condition has lasted `age` steps; `history` says what that device did."""

    steps: int
    wait: int = 0
    age: int = 0
    history: str = ""


def first_wait(horizon: int) -> int:
    """Steps that the first condition that is not answered at once must last."""
    return max(1, horizon // 8)


def changed(state: Stability, device: str, rate: float, step: int, horizon: int) -> Stability:
    """The device has another rate from `step` on."""
    before = state.devices.get(device, Restlessness())
    after = Restlessness(
        rate=rate,
        since=step,
        lifetimes=(*before.lifetimes, step - before.since)[-MEMORY:] if before.changes else (),
        changes=(*before.changes, step)[-TOLD:],
        answered=step if rate == state.planned.get(device, NORMAL) else None,
        switches=before.level(step, horizon),
    )
    return msgspec.structs.replace(state, devices={**state.devices, device: after})


def corrected(state: Stability, device: str, rate: float) -> Stability:
    """The device's rate is known better: it is the same condition, as old as it was, and answered if it was."""
    known = state.devices.get(device)
    if known is None:
        return state
    known = msgspec.structs.replace(known, rate=rate)
    return msgspec.structs.replace(state, devices={**state.devices, device: known})


def switched(state: Stability, rates: Mapping[str, float], step: int, horizon: int) -> Stability:
    """A plan made for `rates` is in force from `step` on: it counts against the devices it was made for."""
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
    """The plan in force is the answer to all conditions of `step`: no other would be worth its switch."""
    devices = {
        name: known if known.answered is not None else msgspec.structs.replace(known, answered=step)
        for name, known in state.devices.items()
    }
    return msgspec.structs.replace(state, devices=devices)


def outlook(state: Stability, rates: Mapping[str, float], step: int, horizon: int) -> Outlook:
    """For a plan made for `rates`. Of the devices that it would be made for, the one that is to be waited for
    the least decides, and then the one expected to stay as it is the longest."""
    best = Outlook(steps=horizon)
    for name in sorted({*rates, *state.planned}):
        if rates.get(name, NORMAL) == state.planned.get(name, NORMAL):
            continue
        known = state.devices.get(name)
        if known is None:
            return Outlook(steps=horizon)
        age = max(0, step - known.since)
        found = Outlook(
            steps=known.expected(step, horizon),
            wait=max(0, known.patience(step, horizon) - age),
            age=age,
            history=_history(name, known, step),
        )
        if not best.history or (found.wait, -found.steps) < (best.wait, -best.steps):
            best = found
    return best


def _history(name: str, known: Restlessness, step: int) -> str:
    count, span = len(known.changes), step - known.changes[0] if known.changes else 0
    times = "once" if count == 1 else f"{count} times"
    return f"{name} has changed its speed {times} in {span} steps"
