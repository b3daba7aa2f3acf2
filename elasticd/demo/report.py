"""The report of a run: every figure with how it was computed, and the checks that decide the exit code. Pure.

Throughput of a phase: the median over its steps of tokens / seconds, both as rank 0 measured them. A plan's
first two steps are left out (they follow the pause of a switch), and of the slowed phase the step in which the
slowdown came. Times between events are by the leader's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.problem import Problem, ideal_ratio, without
from elasticd_planner.readable import readable
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import StoredValue, Value

from elasticd.demo.record import DemoLine, DemoRecord
from elasticd.demo.scenario import DemoError
from elasticd.records import HistoryRecord
from elasticd.wire.event_record import EventRecord
from elasticd.wire.step_record import StepRecord

#: What must hold: measured over predicted after the replan, the relative error of the loss, overruns, and
#: bytes on the wire over those that were lacking.
LEAST_OF_PREDICTED = 0.92
LOSS_TOLERANCE = 1e-3
MOST_OVERRUNS = 0.01
MOST_ON_THE_WIRE = 1.02
#: Kinds of events that tell of the same by a step on the way.
ALSO = {"recovered": ("faster",)}
#: Steps of a plan that are left out of its throughput.
LEFT_OUT = 2
MEBI = 1 << 20


class Speed(Value, frozen=True, kw_only=True):
    """One phase: the plan it ran under, measured and predicted tokens/s, and how much the measured ones stray
    (half the distance between the quartiles, as a fraction of the median). `steps` counts those measured.
    `guessed`: the prediction was made before an all-reduce as wide as the plan's groups had been timed."""

    phase: str
    plan: int
    shape: str
    measured: float
    predicted: float | None
    noise: float
    steps: int
    guessed: bool = False


class Switch(Value, frozen=True, kw_only=True):
    """One change of plans in place. Seconds count from the event that led to it: to its detection, and to the
    first rank that ran the new plan. The pause is the longest of all ranks, also in steps of the new plan.
    Bytes: sent by all ranks with their checksums, lacking at all of them, and the job's whole state."""

    cause: str
    number: int
    detected_seconds: float
    switched_seconds: float
    pause_seconds: float
    pause_steps: float
    bytes_wire: int
    bytes_lacking: int
    bytes_state: int


class Check(Value, frozen=True, kw_only=True):
    """Something that must hold for the demo to succeed."""

    name: str
    met: bool
    text: str


class DemoReport(StoredValue, frozen=True, kw_only=True, tag="demo-report"):
    """Everything that is shown and written. `without_slow` is None where the other devices cannot hold the
    model. All speeds are those of emulated devices."""

    emulated: bool
    speeds: tuple[Speed, ...]
    without_slow: float | None
    ideal: float
    switches: tuple[Switch, ...]
    pids_before: dict[str, int]
    pids_after: dict[str, int]
    final_loss: float
    plain_loss: float
    loss_error: float
    overruns: float
    device_memory: int
    replica_memory: int
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that are not met, in order; the demo has succeeded if there are none."""
        return tuple(check for check in self.checks if not check.met)


def report(record: DemoRecord) -> DemoReport:
    """Raises DemoError where the record lacks something that every complete run has."""
    chaos = _events(record, "chaos")
    if len(chaos) != 2:
        raise DemoError(f"the record of the run has {len(chaos)} interventions instead of two")
    slowed_at, recovered_at = (event.time for event in chaos)
    numbers = _plans(record.steps, slowed_at, recovered_at)
    speeds = _speeds(record, numbers, slowed_at, recovered_at)
    history = {entry.number: entry for entry in record.history}
    replanned, final = history[numbers[1]], history[numbers[2]]
    slow = _switch(record, "slow", slowed_at, numbers[0])
    back = _switch(record, "recovered", recovered_at, numbers[1])
    tokens = median(step.tokens or 0 for step in record.steps)
    alone = plan(msgspec.structs.replace(without(replanned.problem, record.scenario.slow_device), current=None))
    prediction = alone.plan.prediction if alone.plan is not None else None
    rates = replanned.problem.rates
    ratio = ideal_ratio(rates.get(device.name, 1.0) for device in replanned.problem.cluster.devices)
    last, plain = record.ledger[-1].loss, record.plain[-1].loss
    pacing = record.pacing
    bare = DemoReport(
        emulated=True,
        speeds=speeds,
        without_slow=tokens / prediction.step_seconds if prediction is not None else None,
        ideal=speeds[0].measured / ratio,
        switches=(slow, back),
        pids_before=record.before,
        pids_after=record.after,
        final_loss=last,
        plain_loss=plain,
        loss_error=abs(last - plain) / abs(plain),
        overruns=pacing.overruns / pacing.paced if pacing.paced else 1.0,
        device_memory=replanned.problem.cluster.devices[0].memory,
        replica_memory=replica_memory(replanned.problem),
        checks=(),
    )
    checks = (*_speed_checks(bare), *_other_checks(bare, record, replanned, final))
    return msgspec.structs.replace(bare, checks=checks)


def replica_memory(problem: Problem) -> int:
    """Bytes of one whole replica on one device, with one micro-batch in flight, as the planner counts them."""
    profile = problem.profile
    alone = (profile.share_units,)
    cost = ProfileCost(profile)
    return int(cost.memory(profile.layers, alone, 0, first=True, last=True, in_flight=1))


def work(made: Plan, device: str) -> float:
    """The part of all the step's work that a plan gives to a device."""
    place = made.places.get(device)
    if place is None:
        return 0.0
    pipeline = made.pipeline(place)
    stage = pipeline.stages[place.stage]
    total = pipeline.layers * made.global_batch / made.micro_batch
    return stage.layers * stage.fraction(place.position) * pipeline.micro_batches / total


def unequal(made: Plan) -> bool:
    """Returns True if a TP group of this plan has unequal shares."""
    return any(len(set(stage.shares)) > 1 for _, _, stage in made.walk())


# -- speeds --------------------------------------------------------------------------------------------------


def _plans(steps: Sequence[StepRecord], slowed_at: float, recovered_at: float) -> tuple[int, int, int]:
    """The plans in force when the device was slowed, when it recovered, and at the end."""
    healthy = [step.plan for step in steps if step.time <= slowed_at]
    replanned = [step.plan for step in steps if step.time <= recovered_at]
    if not healthy or not replanned:
        raise DemoError("the record of the run has no steps before the device was slowed")
    return healthy[-1], replanned[-1], steps[-1].plan


def _speeds(
    record: DemoRecord, numbers: tuple[int, int, int], slowed_at: float, recovered_at: float
) -> tuple[Speed, ...]:
    healthy, replanned, final = numbers
    steps = record.steps
    slowed = [step for step in steps if step.plan == healthy and step.time - step.seconds >= slowed_at]
    phases = (
        ("healthy", healthy, _steady(steps, healthy, until=slowed_at)),
        ("slowed, before the replan", healthy, slowed),
        ("after the replan", replanned, _steady(steps, replanned, slowed_at, recovered_at)),
        ("recovered", final, _steady(steps, final, recovered_at)),
    )
    return tuple(_speed(record, name, number, ran) for name, number, ran in phases)


def _steady(
    steps: Iterable[StepRecord], number: int, after: float = -math.inf, until: float = math.inf
) -> list[StepRecord]:
    """The steps of a plan without its first two, of those that ended in this time."""
    ran = [step for step in steps if step.plan == number][LEFT_OUT:]
    return [step for step in ran if after < step.time <= until]


def _speed(record: DemoRecord, phase: str, number: int, steps: Sequence[StepRecord]) -> Speed:
    if not steps:
        raise DemoError(f"the record of the run has no whole step of the phase {phase!r}")
    speeds = sorted((step.tokens or 0) / step.seconds for step in steps)
    middle = median(speeds)
    spread = (speeds[(3 * len(speeds)) // 4] - speeds[len(speeds) // 4]) / 2 if len(speeds) > 3 else 0.0
    entry = next((entry for entry in record.history if entry.number == number), None)
    prediction = entry.plan.prediction if entry is not None else None
    tokens = median(step.tokens or 0 for step in steps)
    predicted = tokens / prediction.step_seconds if prediction is not None else None
    return Speed(
        phase=phase,
        plan=number,
        shape=entry.plan.reason if entry is not None else "",
        measured=middle,
        # The slowed phase runs a plan that was made for other rates: its prediction says nothing of it.
        predicted=None if phase.startswith("slowed") else predicted,
        noise=spread / middle,
        steps=len(steps),
        guessed=entry is not None
        and not entry.plan.tp_widths <= entry.problem.profile.collective_seconds.keys(),
    )


# -- switches ------------------------------------------------------------------------------------------------


def _events(record: DemoRecord, kind: str) -> list[EventRecord]:
    return [event for event in record.events if event.kind in (kind, *ALSO.get(kind, ()))]


def _switch(record: DemoRecord, cause: str, since: float, base: int) -> Switch:
    """The first switch to a plan newer than `base`, after the device was found slow or recovered."""
    device = record.scenario.slow_device
    detected = [e.time for e in _events(record, cause) if e.time >= since and e.data.get("device") == device]
    swapped = [e for e in _events(record, "swapped") if e.time >= since and e.data["number"] > base]
    if not detected or not swapped:
        raise DemoError(f"the record of the run has no switch after {device} was {cause}")
    number = swapped[0].data["number"]
    ranks = [event for event in swapped if event.data["number"] == number]
    pause = max(event.data["pause_seconds"] for event in ranks)
    seconds = median(step.seconds for step in _steady(record.steps, number) or record.steps)
    return Switch(
        cause=cause,
        number=number,
        detected_seconds=detected[0] - since,
        switched_seconds=swapped[0].time - since,
        pause_seconds=pause,
        pause_steps=pause / seconds,
        bytes_wire=sum(event.data["bytes_sent"] for event in ranks),
        bytes_lacking=sum(event.data["bytes_lacking"] for event in ranks),
        bytes_state=max(event.data["bytes_state"] for event in ranks),
    )


# -- checks --------------------------------------------------------------------------------------------------


def _speed_checks(made: DemoReport) -> tuple[Check, ...]:
    _, slowed, after, recovered = made.speeds
    ratio = after.measured / after.predicted if after.predicted else 0.0
    if made.without_slow is None:
        beside = "the other devices alone cannot hold the model"
    else:
        beside = f"{after.measured:,.0f} against {made.without_slow:,.0f} predicted tokens/s"
    return (
        Check(
            name="as predicted",
            met=ratio >= LEAST_OF_PREDICTED,
            text=f"after the replan {ratio:.1%} of the predicted throughput "
            f"(at least {LEAST_OF_PREDICTED:.0%})",
        ),
        Check(
            name="better than without",
            met=made.without_slow is None or after.measured > made.without_slow,
            text=f"better than the best plan without the slow device: {beside}",
        ),
        Check(
            name="replan pays",
            met=after.measured > slowed.measured and recovered.measured > after.measured,
            text=f"{slowed.measured:,.0f} tokens/s slowed, {after.measured:,.0f} after the replan, "
            f"{recovered.measured:,.0f} recovered",
        ),
        Check(
            name="emulation in time",
            met=made.overruns <= MOST_OVERRUNS,
            text=f"{made.overruns:.2%} of the emulated sections overran (at most {MOST_OVERRUNS:.0%}, "
            "else the speeds above are invalid: the machine is too busy)",
        ),
    )


def _other_checks(
    made: DemoReport, record: DemoRecord, replanned: HistoryRecord, final: HistoryRecord
) -> tuple[Check, ...]:
    device = record.scenario.slow_device
    given, back = work(replanned.plan, device), work(final.plan, device)
    equal = 1 / (record.scenario.devices * len(record.scenario.nodes))
    ran = {step.plan for step in record.steps}
    plans = [entry.number for entry in record.history if entry.number in ran and unequal(entry.plan)]
    wire = sum(switch.bytes_wire for switch in made.switches)
    lacking = sum(switch.bytes_lacking for switch in made.switches)
    return (
        Check(
            name="unequal work",
            met=given < equal,
            text=f"{device} did {given:.0%} of the work while it was slow, an equal part is {equal:.0%} "
            f"(plans with unequal shares of a TP group: {', '.join(map(str, plans)) or 'none'})",
        ),
        Check(
            name="work given back",
            met=back > given,
            text=f"{device} did {given:.0%} of the work while it was slow, {back:.0%} after it recovered",
        ),
        Check(
            name="nothing moved twice",
            met=0 < lacking <= wire <= MOST_ON_THE_WIRE * lacking,
            text=f"{wire / MEBI:.2f} MiB on the wire, checksums included, {lacking / MEBI:.2f} MiB lacked by "
            f"their new holders (at most {MOST_ON_THE_WIRE:g} times as much)",
        ),
        Check(
            name="no whole replica fits",
            met=made.device_memory < made.replica_memory,
            text=f"a device has {readable(made.device_memory)}, a whole replica needs "
            f"{readable(made.replica_memory)}",
        ),
        Check(
            name="same processes",
            met=bool(made.pids_before) and made.pids_before == made.pids_after,
            text="the workers' pids are the same before and after: "
            + ", ".join(f"{name} {pid}" for name, pid in sorted(made.pids_after.items())),
        ),
        samples_check(record.ledger, record.plain, record.scenario.steps),
        Check(
            name="same loss",
            met=made.loss_error <= LOSS_TOLERANCE,
            text=f"final loss {made.final_loss:.6f}, {made.plain_loss:.6f} by plain torch in one process: "
            f"{made.loss_error:.1e} apart (at most {LOSS_TOLERANCE:g})",
        ),
    )


def samples_check(ledger: Sequence[DemoLine], plain: Sequence[DemoLine], steps: int) -> Check:
    """Every step once and in order, every sample once, and each step's the same as in the reference, which
    draws them by itself."""
    name = "samples once"
    if [line.step for line in ledger] != list(range(steps)):
        text = f"the ledger does not have the steps 0 to {steps - 1} once each"
        return Check(name=name, met=False, text=text)
    wrong = [a.step for a, b in zip(ledger, plain, strict=False) if a.samples != b.samples]
    if wrong or len(plain) != steps:
        where = f"step {wrong[0]}" if wrong else f"{len(plain)} of {steps} steps"
        return Check(name=name, met=False, text=f"the ledger's samples are not the reference's: {where}")
    drawn = [sample for line in ledger for sample in line.samples]
    twice = len(drawn) - len(set(drawn))
    text = f"{len(drawn)} samples in {steps} steps, each trained on exactly once"
    return Check(name=name, met=not twice, text=f"{twice} samples came twice" if twice else text)
