"""The cause and the results of a plan, in lines: the same in `elasticd why` and on the plan's page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import msgspec
from elasticd_planner.readable import readable, readable_seconds
from elasticd_planner.spec.mesh import JobPlan, MeshPlan
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Stage
from elasticd_planner.spec.plan_summary import row_limit, row_tokens
from elasticd_planner.value import Value

from elasticd.explain.switch_gain import Gain, gain_of
from elasticd.records import AnyHistoryRecord, HistoryRecord
from elasticd.wire.event_record import EventRecord, line
from elasticd.wire.step_record import StepRecord

#: Devices of a change that are named; more are counted.
MOST_NAMED = 4
#: Steps of a plan until the median of their times is shown.
LEAST_STEPS = 3


class WhyLine(NamedTuple):
    """A line: what it is about, with the blanks behind it, and what there is to say."""

    about: str
    text: str


def decided(record: AnyHistoryRecord, before: AnyHistoryRecord | None = None) -> Iterator[WhyLine]:
    """The cause of a plan, and which modules it changed of the plan `before`."""
    yield WhyLine("plan ", f"{record.number}  {record.reason}")
    slow = {device: rate for device, rate in record.problem.rates.items() if rate != 1.0}
    devices = ", ".join(f"{device} takes {rate:.2f}x" for device, rate in sorted(slow.items()))
    yield WhyLine("measured  ", devices or "every device at normal speed")
    if isinstance(record.plan, MeshPlan):
        yield WhyLine("mesh      ", record.plan.words)
    if before is not None and (changes := module_changes(before, record)):
        yield WhyLine("modules   ", "; ".join(f"{module}: {change}" for module, change in changes.items()))


def record_before(record: AnyHistoryRecord, records: Sequence[AnyHistoryRecord]) -> AnyHistoryRecord | None:
    """The record of the plan before this one; None: it is the first one, or that is not kept."""
    return max(
        (each for each in records if each.number < record.number), key=lambda each: each.number, default=None
    )


def module_changes(before: AnyHistoryRecord, record: AnyHistoryRecord) -> dict[str, str]:
    """The changes of a plan in each module of a model of several."""
    was, now = before.plan, record.plan
    if isinstance(was, MeshPlan) or isinstance(now, MeshPlan):
        return {}
    known = {module.module: module for module in was.modules}
    if len(now.modules) == 1 or {*known} != {module.module for module in now.modules}:
        return {}
    return {module.module: _change(known[module.module], module) for module in now.modules}


def _change(was: ModulePlan, now: ModulePlan) -> str:
    """The changes in one module, in a few words."""
    layouts = [[_layout(pipeline) for pipeline in module.pipelines] for module in (was, now)]
    if layouts[0] != layouts[1]:
        before, after = (
            {name for lane in module.by_lane for stage in lane.stages for name in stage.devices}
            for module in (was, now)
        )
        parts = [
            f"{len(names)} devices {word}" if len(names) > MOST_NAMED else f"{', '.join(sorted(names))} {word}"
            for names, word in ((after - before, "added"), (before - after, "removed"))
            if names
        ]
        return f"another layout ({', '.join(parts)})" if parts else "another layout"
    if [pipeline.micro_batches_by_lane for pipeline in was.pipelines] != [
        pipeline.micro_batches_by_lane for pipeline in now.pipelines
    ]:
        return f"other shares of {now.items}" if now.items else "other micro-batches"
    if [pipeline.serves for pipeline in was.pipelines] != [pipeline.serves for pipeline in now.pipelines]:
        return "its lanes serve other pipelines"
    return "as before" if (was.ahead, was.lead) == (now.ahead, now.lead) else "another order of passes"


def _layout(pipeline: Pipeline) -> tuple[Stage, ...]:
    """The stages without their times."""
    return pipeline.untimed.stages


def did(
    record: AnyHistoryRecord, history: Sequence[EventRecord], steps: Sequence[StepRecord]
) -> Iterator[WhyLine]:
    """The results of a plan; `steps` are those around the switch to it."""
    seconds, predicted = seconds_under(record.plan, steps), prediction_of(record, history)
    if predicted.seconds is not None:
        yield WhyLine("predicted ", predicted.text)
    if len(seconds) >= LEAST_STEPS:
        real = median(seconds)
        text = f"{readable_seconds(real)} a step, the median of {len(seconds)} steps"
        if predicted.seconds is not None and not predicted.guessed:
            text += f"; {real / predicted.seconds:.2f} times the prediction"
        yield WhyLine("took      ", text)
    if (cost := snapshot_cost(record.number, history)) is not None:
        part = cost.seconds / median(seconds) if len(seconds) >= LEAST_STEPS else None
        yield WhyLine("snapshots ", cost.text(part))
    if (gain := gained(record.number, history, steps)) is not None:
        yield WhyLine("fault     " if gain.faulted else "gained    ", gain.text)


class SnapshotCost(Value, frozen=True, kw_only=True):
    """The cost of the snapshots in the agents' memory under a plan."""

    bytes: int  # of the largest share of a device
    seconds: float  # for which one held training up, at most (0: not known yet)
    every: int  # steps from one to the next

    def text(self, part: float | None) -> str:
        """As people read it.

        Args:
            part: of a step that `seconds` are; None: not known.
        """
        often = "each step" if self.every == 1 else f"every {self.every} steps"
        text = f"{often}, {readable(self.bytes)} of each device"
        if not self.seconds:
            return text
        text = f"{text}; one holds training up for {readable_seconds(self.seconds)}"
        return text if part is None else f"{text}, {part:.1%} of a step"


def snapshot_cost(number: int, history: Sequence[EventRecord]) -> SnapshotCost | None:
    """The newest of a plan, from the events of its job; None: it has none that is known."""
    events = [event for event in history if event.kind == "snapshot" and event.data.get("number") == number]
    data = max(events, key=lambda event: event.id).data if events else {}
    size, seconds, every = (data.get(key) for key in ("bytes", "seconds", "every"))
    if not (isinstance(size, int) and isinstance(seconds, int | float) and isinstance(every, int) and every):
        return None
    return SnapshotCost(bytes=size, seconds=float(seconds), every=every)


class ShownPrediction(NamedTuple):
    """The seconds of a step under a plan, as predicted by the newest profile that is known."""

    seconds: float | None  # None: nothing was predicted
    first_seconds: float | None  # as predicted when the plan was made, where that differs
    guessed: bool  # by the model's shapes alone: no step had been measured

    @property
    def text(self) -> str:
        """As people read it."""
        if self.seconds is None:
            return ""
        text = f"{readable_seconds(self.seconds)} a step"
        if self.guessed:
            return f"{text}, a guess before steps were measured"
        first = self.first_seconds
        return text if first is None else f"{text}; {readable_seconds(first)} when it was made"


def prediction_of(record: AnyHistoryRecord, history: Sequence[EventRecord]) -> ShownPrediction:
    """The seconds of a step under a plan: as its leader predicted them last, else as when it was made."""
    first = record.plan.prediction.step_seconds if record.plan.prediction is not None else None
    newest = newest_prediction(record.number, history)
    if newest is None:
        guessed = isinstance(record, HistoryRecord) and not record.problem.profile.fitted
        return ShownPrediction(first, None, guessed)
    return ShownPrediction(
        newest, first if first is not None and differs(first, newest) else None, guessed=False
    )


def newest_prediction(number: int, history: Sequence[EventRecord]) -> float | None:
    """Seconds of a step under a plan by the newest profile, from the events of its job; None where there was no
    newer profile than the plan's own."""
    events = [
        (event.id, float(seconds))
        for event in history
        if event.data.get(PREDICTS.get(event.kind, "")) == number
        and isinstance(seconds := event.data.get("step_seconds"), float | int)
    ]
    return max(events)[1] if events else None


#: By the kinds of events that predict the plan in force anew: where they have its number.
PREDICTS = {"fitted": "number", "shifted": "plan"}


def differs(before: float, after: float) -> bool:
    """Returns True if two predictions are not the same in what is shown of them."""
    return readable_seconds(before) != readable_seconds(after)


def events_of(number: int, history: Sequence[EventRecord]) -> list[EventRecord]:
    """The events of a plan, and the exceptions of the script's code under it."""
    return [
        event for event in history if event.data.get("plan" if event.kind == "raised" else "number") == number
    ]


def event_lines(events: Sequence[EventRecord]) -> Iterator[str]:
    """A line for each, and the traceback of an exception below its own."""
    for event in events:
        yield line(event)
        for each in str(event.data.get("traceback", "")).splitlines():
            yield f"    {each}"


def about_plan(
    record: AnyHistoryRecord,
    history: Sequence[EventRecord],
    steps: Sequence[StepRecord],
    before: AnyHistoryRecord | None = None,
) -> Iterator[str]:
    """All lines of `elasticd why NUMBER` but for its picture; `before`: the plan before it."""
    for each in (*decided(record, before), *did(record, history, steps)):
        yield each.about + each.text
    yield from event_lines([event for event in events_of(record.number, history) if event.kind != "gained"])


def seconds_under(plan: JobPlan, steps: Sequence[StepRecord]) -> list[float]:
    """Of each step under a plan."""
    return [step.seconds for step in steps if step.plan == plan.number and step.seconds > 0]


def gained(number: int, history: Sequence[EventRecord], steps: Sequence[StepRecord]) -> Gain | None:
    """The gain of the switch to a plan: as its leader published it once it was measured, or from the steps."""
    for event in history:
        if event.kind == "gained" and event.data.get("number") == number:
            kept = {name: event.data[name] for name in Gain.__struct_fields__ if name in event.data}
            return msgspec.convert(kept, Gain)
    before = earlier_starts(number, history)
    fences = [
        fence
        for event in history
        if event.kind == "fenced" and isinstance(fence := event.data.get("number"), int)
    ]
    return gain_of(number, [step for step in steps if step.plan > before], pause_of(number, history), fences)


def earlier_starts(number: int, history: Sequence[EventRecord]) -> int:
    """The highest number of the plans that are of earlier starts of the job than plan `number`, by the job's
    events; 0 where it was started once. Nothing is compared over the time between two starts."""
    starts = (event.data.get("number") for event in history if event.kind == "started_again")
    return max((last for last in starts if isinstance(last, int) and last < number), default=0)


def pause_of(number: int, history: Sequence[EventRecord]) -> float:
    """Seconds for which the step loop stood still in the switch to a plan: the longest that a rank measured."""
    swapped = [event for event in history if event.kind == "swapped" and event.data.get("number") == number]
    return max((float(event.data.get("pause_seconds", 0.0)) for event in swapped), default=0.0)


def _use_on_mesh(plan: MeshPlan, name: str) -> str:
    if name not in plan.coordinates:
        return "idle" if name in plan.idle else "no part of it"
    place = zip(plan.names, plan.coordinates[name], strict=True)
    at = ", ".join(f"{dimension} {index}" for dimension, index in place)
    lane = plan.lane_of[name]
    with_others = f" with {len(plan.lanes[lane]) - 1} more" if len(plan.lanes[lane]) > 1 else ""
    return f"{at}; {plan.samples[lane]} of {plan.global_batch} samples a step{with_others}"


def packed_for(record: AnyHistoryRecord | None) -> PackedSequences | None:
    """The sequences that a plan's rows are made for; None where they are padded, or not known."""
    return record.problem.packed if isinstance(record, HistoryRecord) else None


def use(plan: JobPlan, name: str, packed: PackedSequences | None = None) -> str:
    """A plan's use of a device, in a few words; packed: see `packed_for`."""
    if isinstance(plan, MeshPlan):
        return _use_on_mesh(plan, name)
    if len(plan.modules) > 1:
        views = ((module.module, plan.view(module.module)) for module in plan.modules)
        parts = [f"{module}: {use(view, name, packed)}" for module, view in views if name in view.places]
        if parts:
            return "; ".join(parts)
    elif place := plan.places.get(name):
        stage, own = plan.stage(place), plan.pipeline(place)
        count = own.micro_batches
        taken = f"{count} micro-batch{'es' * (count > 1)} a step"
        if own.packed:
            (tokens,) = row_tokens(own, row_limit(plan, packed))
            taken = f"about {count} row{'s' * (count > 1)} a step of at most {tokens} tokens"
        lane = f", lane {place.lane}" if plan.pipelines[place.pipeline].rows else ""
        return (
            f"pipeline {place.pipeline}{lane}, layers {stage.named}, {stage.shares[place.position]} of "
            f"{sum(stage.shares)} shares, {taken}"
        )
    return "state alone" if name in plan.carriers else "idle" if name in plan.idle else "no part of it"
