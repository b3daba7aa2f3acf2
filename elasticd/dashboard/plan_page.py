"""A plan's page: its picture, the predicted schedule, why it was chosen, what it changed, what goes over links.

All of it follows from what the history keeps of a plan (the problem that it answers), by the planner's own
functions: nothing is guessed here.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from elasticd_planner.cost.model import KnownCosts, stage_times
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.cost.pipeline_time import Times
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.cost.schedule_timeline import pass_times
from elasticd_planner.layout.explained_plan import (
    Communications,
    ModuleSizes,
    PlanOperation,
    explain_modules,
    explain_step,
)
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.placement.state_movement import Held, bytes_by_member, holders
from elasticd_planner.problem import Problem
from elasticd_planner.search.module_cost import MOST_PLAYED, ModuleCosts
from elasticd_planner.spec.item_batch import ItemBatch
from elasticd_planner.spec.plan import Pipeline, Plan, spanned
from elasticd_planner.value import Invalid

from elasticd.dashboard import views
from elasticd.dashboard.history import PlanInBrief
from elasticd.explain import why
from elasticd.records import AnyHistoryRecord, HistoryRecord, JobSpec, MeshHistoryRecord
from elasticd.wire.event_record import EventRecord
from elasticd.wire.step_record import StepRecord

#: Micro-batches of a schedule that are drawn, lanes of it, and devices of a difference that are listed.
MOST_MICRO_BATCHES, MOST_LANES, MOST_MOVING = 32, 16, 512
#: Devices beyond which what goes over links is not listed: it takes long, and `elasticd plan --explain` does
#: it.
MOST_EXPLAINED = 1024
#: Rows of what goes over links, for each purpose.
MOST_ROWS = 12


def cost_of(problem: Problem, plan: Plan) -> ProfileCost:
    """The cost of the plan, by the problem that it answers."""
    profile = problem.profile
    if plan.micro_batch != problem.micro_batch:
        profile = profile.sized(profile.tokens / problem.micro_batch * plan.micro_batch)
    near = problem.cluster.within or problem.cluster.inside
    return ProfileCost(profile, near=near).under(plan.loss_view)


def times_of(record: HistoryRecord) -> list[tuple[str, int, int, Pipeline, Times]]:
    """Of each lane: its module, its pipeline's number, its own, itself, and the seconds of its stages."""
    problem, plan = record.problem, record.plan
    cost, known = cost_of(problem, plan), KnownCosts()
    return [
        (module.module, p, number, lane, stage_times(lane, problem.cluster, problem.rates, cost, known))
        for module in plan.loss_view.modules  # the profile is of that one alone
        for p, pipeline in enumerate(module.pipelines)
        for number, lane in enumerate(pipeline.by_lane)
    ]


def _of_modules(record: HistoryRecord) -> tuple[views.PipelineBox, ...]:
    """The picture of a plan of several modules: the modules one after the other, a row for each lane. The load
    of a stage is the time of its passes in a mean step, as a part of the busiest stage's."""
    problem, plan = record.problem, record.plan
    busy = ModuleCosts(problem).busy_seconds(plan)
    most = max((seconds for rows in busy.values() for row in rows for seconds in row), default=0.0) or 1.0
    parts = []
    for module in plan.modules:
        lanes = [
            (p, n, lane)
            for p, pipeline in enumerate(module.pipelines)
            for n, lane in enumerate(pipeline.by_lane)
        ]
        for (p, n, lane), row in zip(lanes, busy[module.module], strict=True):
            box = views.PipelineBox(
                module=module.module,
                pipeline=p,
                lane=n,
                micro_batches=lane.micro_batches,
                seconds=None,
                items=module.items,
                stages=_stage_boxes(lane, [seconds / most for seconds in row], problem.rates),
            )
            parts.append(box)
    return tuple(parts)


def _stage_boxes(
    lane: Pipeline, loads: Sequence[float], rates: Mapping[str, float]
) -> tuple[views.StageBox, ...]:
    return tuple(
        views.StageBox(
            stage=s,
            layers=stage.layers,
            named=stage.named,
            devices=stage.devices,
            slowdowns=tuple(rates.get(device, 1.0) for device in stage.devices),
            shares=tuple(stage.fraction(position) for position in range(len(stage.devices))),
            load=float(loads[s]),
            recompute=stage.recompute,
        )
        for s, stage in enumerate(lane.stages)
    )


def _order(record: HistoryRecord) -> tuple[views.TimelineLane, ...]:
    """The predicted order of a plan of several modules: all lanes on one axis of time, by module, with the
    passes of the first micro-batches. A pass of items has the number of the micro-batch that needs it."""
    plan = record.plan
    if len(plan.members) * plan.global_batch > MOST_PLAYED:
        return ()
    costs = ModuleCosts(record.problem)
    batches = costs.batches(plan)
    played = costs.pass_times(plan, batches)
    passes: dict[tuple[str, int, int], dict[int, list[views.TimelinePass]]] = {}
    cut, last = set[tuple[str, int, int]](), 0.0
    for one in played:
        module, p, lane, stage, act, _ = one.act
        batch, number = batches[module], act.micro_batch
        if isinstance(batch, ItemBatch):
            number = batch.pipelines[p][lane][number].micro_batch
        last = max(last, one.stop / 1e6)
        stages = passes.setdefault((module, p, lane), {})
        if number >= MOST_MICRO_BATCHES:
            cut.add((module, p, lane))
            continue
        drawn = views.TimelinePass(
            kind="forward" if act.kind == "forward" else "backward",
            micro_batch=number,
            chunk=act.chunk,
            start=one.start / 1e6,
            stop=one.stop / 1e6,
        )
        stages.setdefault(stage, []).append(drawn)
    order = [module.module for module in plan.modules]
    listed = sorted(passes, key=lambda key: (order.index(key[0]), key[1:]))
    return tuple(
        views.TimelineLane(
            module=module,
            pipeline=p,
            lane=lane,
            alike=1,
            seconds=last,
            stages=_in_stages(passes[module, p, lane]),
            shortened=(module, p, lane) in cut,
        )
        for module, p, lane in listed[:MOST_LANES]
    )


def _in_stages(
    passes: Mapping[int, Sequence[views.TimelinePass]],
) -> tuple[tuple[views.TimelinePass, ...], ...]:
    return tuple(tuple(passes.get(stage, ())) for stage in range(max(passes, default=-1) + 1))


def boxes(record: HistoryRecord) -> tuple[views.PipelineBox, ...]:
    """The picture: a row for each lane."""
    if len(record.plan.modules) > 1:
        return _of_modules(record)
    lanes, rates = times_of(record), record.problem.rates
    cost = cost_of(record.problem, record.plan)
    work = {
        at: [sum(times.work[s :: len(lane.stages)]) for s in range(len(lane.stages))]
        for at, (_, _, _, lane, times) in enumerate(lanes)
    }
    busiest = max((max(each) for each in work.values()), default=1.0) or 1.0
    return tuple(
        views.PipelineBox(
            module=module,
            pipeline=p,
            lane=number,
            micro_batches=lane.micro_batches,
            seconds=_seconds(cost, lane, times),
            stages=_stage_boxes(lane, [each / busiest for each in work[at]], rates),
        )
        for at, (module, p, number, lane, times) in enumerate(lanes)
    )


def _seconds(cost: ProfileCost, lane: Pipeline, times: Times) -> float:
    if lane.chunks > 1:
        return cost.timing.interleaved(times, lane.micro_batches, lane.chunks)
    return float(cost.timing.seconds(times, lane.micro_batches))


def timeline(record: HistoryRecord) -> tuple[views.TimelineLane, ...]:
    """The predicted schedule of each lane; of those that are alike the first. The slowest come first."""
    if len(record.plan.modules) > 1:
        return _order(record)
    alike: dict[tuple[object, ...], list[tuple[str, int, int, Pipeline, Times]]] = defaultdict(list)
    for each in times_of(record):
        _, _, _, lane, times = each
        key = (
            lane.micro_batches,
            lane.chunks,
            times.forward.tobytes(),
            times.backward.tobytes(),
            times.boundary.tobytes(),
        )
        alike[key].append(each)
    cost = cost_of(record.problem, record.plan)
    rows = []
    for group in alike.values():
        module, p, number, lane, times = group[0]
        shown = min(lane.micro_batches, MOST_MICRO_BATCHES)
        passes = pass_times(times.forward, times.backward, times.boundary, shown, lane.chunks)
        rows.append(
            views.TimelineLane(
                module=module,
                pipeline=p,
                lane=number,
                alike=len(group),
                seconds=_seconds(cost, lane, times),
                stages=tuple(tuple(views.TimelinePass(**one._asdict()) for one in stage) for stage in passes),
                shortened=shown < lane.micro_batches,
            )
        )
    return tuple(sorted(rows, key=lambda lane: -lane.seconds)[:MOST_LANES])


# -- the plan before -----------------------------------------------------------------------------------------


def diff(before: HistoryRecord | None, record: HistoryRecord, sent: int | None) -> views.PlanDiff | None:
    """The changes since the plan before; None where that is not kept, or of another model."""
    if before is None or not _same_model(before, record):
        return None
    gone = set(before.plan.members) - {device.name for device in record.problem.cluster.devices}
    sources = [device for device in before.plan.members if device not in gone]
    parts = [*_changes(before, record)]
    held_before, held_now = list[_HeldOfModule](), list[_HeldOfModule]()
    for name, profile, old, new in parts:
        units = profile.share_units
        held_before.append((name, units, old, holders(old, units)))
        held_now.append((name, units, new, holders(new, units)))
    lacks, whole = Counter[str](), Counter[str]()
    for _, profile, old, new in parts:
        lacks.update(bytes_by_member(profile, old, new, sources))
        whole.update(bytes_by_member(profile, None, new))
    lacking = round(sum(lacks.values()))
    moving = []
    for device in sorted({*before.plan.members, *record.plan.members}, key=_by_name):
        was, now = _of_device(held_before, before.plan, device), _of_device(held_now, record.plan, device)
        if was != now or round(lacks[device]):
            moving.append(
                views.Moving(device=device, before=was, after=now, bytes_lacking=round(lacks[device]))
            )
    return views.PlanDiff(
        before=before.number,
        devices=tuple(moving[:MOST_MOVING]),
        bytes_lacking=lacking,
        bytes_state=round(sum(whole.values())),
        bytes_sent=sent,
        ratio=sent / lacking if sent is not None and lacking else None,
    )


def _same_model(before: HistoryRecord, record: HistoryRecord) -> bool:
    """Returns True if two plans are of a model of the same modules, with as many layers each."""

    def layers(problem: Problem) -> dict[str, int]:
        others = {module.name: module.profile.layers for module in problem.modules}
        return {problem.module: problem.profile.layers, **others}

    return layers(before.problem) == layers(record.problem)


def _changes(before: HistoryRecord, record: HistoryRecord) -> Iterator[tuple[str, ModelProfile, Plan, Plan]]:
    """Of each module of a model of several its name, its profile, and its part of both plans; of a model of one
    the plans, without a name."""
    if len(record.plan.modules) == 1:
        yield "", record.problem.profile, before.plan, record.plan
        return
    others = {module.name: module.profile for module in record.problem.modules}
    for module in record.plan.modules:
        name = module.module
        profile = others.get(name, record.problem.profile)
        yield name, profile, before.plan.view(name), record.plan.view(name)


#: Of a module its name, its share units, its part of a plan, and what devices hold of it.
_HeldOfModule = tuple[str, int, Plan, Mapping[str, Held]]


def _of_device(parts: Sequence[_HeldOfModule], plan: Plan, device: str) -> str:
    """The parts of each module that a device holds under a plan."""
    rows = []
    for name, units, view, held in parts:
        if not name:
            return _held(held.get(device), units, plan, device)
        if device in held:
            rows.append(f"{name} {_held(held[device], units, view, device)}")
    return "; ".join(rows) or why.use(plan, device)


def _held(held: Held | None, units: int, plan: Plan, device: str) -> str:
    if held is None:
        return why.use(plan, device)
    low, high = 100 * held.low / units, 100 * held.high / units
    part = "" if high - low > 99.99 else f", {low:.4g}-{high:.4g} %"
    return f"layer{'s' if held.layers > 1 else ''} {spanned(held.spans)}{part}"


def _by_name(device: str) -> tuple[str, int]:
    node, _, index = device.rpartition("/")
    return node, int(index) if index.isdecimal() else 0


_SAVED = re.compile(
    r"(?P<now>[\d.]+) ms a step now, (?P<new>[\d.]+) ms under the new plan: (?P<saving>-?[\d.]+) s saved in "
    r"(?P<steps>\d+) steps, (?P<price>[\d.]+) s to move"
)


def policy(record: AnyHistoryRecord) -> views.Policy:
    """The policy's inequality, from the reason that it gave."""
    saving = _SAVED.search(record.reason)
    predicted = record.plan.prediction
    new = predicted.step_seconds if predicted is not None else None
    if saving is None:
        return views.Policy(
            current_seconds=None,
            new_seconds=new,
            price_seconds=None,
            steps=None,
            saving_seconds=None,
            text=record.reason,
        )
    return views.Policy(
        current_seconds=float(saving["now"]) / 1e3,
        new_seconds=float(saving["new"]) / 1e3,
        price_seconds=float(saving["price"]),
        steps=int(saving["steps"]),
        saving_seconds=float(saving["saving"]),
        text=record.reason,
    )


# -- what goes over links ------------------------------------------------------------------------------------


def communications(record: HistoryRecord, spec: JobSpec | None) -> tuple[tuple[views.Communication, ...], str]:
    """The communications of a step over links, or why that is not listed."""
    if spec is None:
        return (), "the leader does not say what the job trains any more"
    if len(record.plan.members) > MOST_EXPLAINED:
        return (), (
            f"for more than {MOST_EXPLAINED} devices it is not listed here: ask 'elasticd plan --explain' "
            "with the problem in a file"
        )
    try:
        explanation = _explained(record, spec)
    except (Invalid, ValueError) as error:
        return (), f"it cannot be listed: {error}"
    several = len(explanation) > 1
    return tuple(
        msgspec.structs.replace(row, purpose=f"{name}: {row.purpose}") if several else row
        for name, each in explanation.items()
        for row in _rows(each.operations)
    ), ""


def _explained(record: HistoryRecord, spec: JobSpec) -> dict[str, Communications]:
    """The communications of a step over links, or in a mean step of several modules, by module."""
    plan, problem = record.plan, record.problem
    layouts, gradients = Layouts(spec.specs, plan), spec.numbers.gradients if spec.numbers is not None else None
    tokens = round(problem.profile.tokens / problem.micro_batch * plan.micro_batch)
    boundary = problem.profile.bundle_bytes
    if len(plan.modules) == 1:
        step = explain_step(layouts, problem.cluster, tokens=tokens, boundary=boundary, gradients=gradients)
        return {problem.module: step}
    sizes = {problem.module: ModuleSizes(tokens=tokens, boundary=boundary, gradients=gradients)}
    for module in problem.modules:
        sizes[module.name] = ModuleSizes(
            boundary=module.profile.bundle_bytes, output=module.output_row_bytes, gradients=gradients
        )
    batches = ModuleCosts(problem).batches(plan)
    items = {name: batch for name, batch in batches.items() if isinstance(batch, ItemBatch)}
    return explain_modules(layouts, problem.cluster, sizes, items)


def _rows(operations: Sequence[PlanOperation]) -> Iterator[views.Communication]:
    """Operations that differ in their devices alone as one row; of each purpose those with the most bytes."""
    purposes: dict[str, dict[object, list[PlanOperation]]] = {}
    for each in operations:
        key = (each.operation, len(each.devices), each.times, each.size, *sorted(each.bytes.items()))
        purposes.setdefault(each.purpose, {}).setdefault(key, []).append(each)
    for purpose, groups in purposes.items():
        rows = sorted(groups.values(), key=lambda alike: -sum(sum(one.bytes.values()) for one in alike))
        for alike in rows[:MOST_ROWS]:
            total: dict[str, int] = defaultdict(int)
            for one in alike:
                for level, size in one.bytes.items():
                    total[level] += size
            yield views.Communication(
                purpose=purpose,
                operation=alike[0].operation.replace("_", "-"),
                groups=len(alike),
                devices=alike[0].devices,
                times=alike[0].times,
                bytes=dict(total),
                seconds=alike[0].seconds,
            )


# -- the page ------------------------------------------------------------------------------------------------


def plan_row(
    head: PlanInBrief,
    *,
    heard: float,
    in_force: int | None,
    proposed: int | None,
    measured: Mapping[int, tuple[int, float]],
    told: Sequence[EventRecord],
) -> views.PlanRow:
    """A plan in a list; `told` are the events of its job."""
    number = head.number
    own_events = [event for event in told if event.data.get("number") == number]
    steps, median = measured.get(number, (0, 0.0))
    swapped = [event for event in own_events if event.kind == "swapped"]
    pauses = [float(event.data["pause_seconds"]) for event in swapped if "pause_seconds" in event.data]
    sent = [int(event.data["bytes_sent"]) for event in swapped if "bytes_sent" in event.data]
    kinds = {event.kind for event in own_events}
    at = next((event.time for event in own_events if event.kind == "proposed"), heard)
    newest = why.newest_prediction(number, told)
    outcome = "unknown"
    if number == in_force:
        outcome = "in force"
    elif number == proposed:
        outcome = "proposed"
    elif "aborted" in kinds and "recorded" not in kinds:
        outcome = "aborted"
    elif "recorded" in kinds or steps or (in_force is not None and number < in_force):
        outcome = "replaced"
    return views.PlanRow(
        number=number,
        time=at,
        reason=head.reason,
        outcome=outcome,  # type: ignore[arg-type]
        predicted_seconds=newest if newest is not None else head.predicted,
        first_predicted_seconds=head.predicted if newest is not None else None,
        guessed=newest is None and head.guessed,
        measured_seconds=median if steps >= why.LEAST_STEPS else None,
        steps=steps,
        pause_seconds=max(pauses) if pauses else None,
        bytes_sent=sum(sent) if sent else None,
    )


def plan_view(
    record: AnyHistoryRecord,
    before: AnyHistoryRecord | None,
    row: views.PlanRow,
    numbers: tuple[int, ...],
    told: Sequence[EventRecord],
    steps: Sequence[StepRecord],
    spec: JobSpec | None,
) -> views.PlanView:
    """The page. `told`: events of the job and the cluster, oldest first; `steps`: those around the switch."""
    if isinstance(record, MeshHistoryRecord):
        missing = "the job's own loop communicates on its mesh, and elasticd plans none of it"
        return views.PlanView(
            row=row,
            newest=max(numbers, default=record.number),
            numbers=numbers,
            pipelines=(),
            idle=record.plan.idle,
            carriers=(),
            timeline=(),
            timeline_seconds=None,
            why="\n".join(why.about_plan(record, told, steps, before)),
            policy=policy(record),
            diff=None,
            communications=(),
            communications_missing=missing,
        )
    listed, missing = communications(record, spec)
    try:
        drawn, lanes = boxes(record), timeline(record)
    except Invalid:  # a profile of another shape than the plan: of another release
        drawn, lanes = (), ()
    return views.PlanView(
        row=row,
        newest=max(numbers, default=record.number),
        numbers=numbers,
        pipelines=drawn,
        idle=record.plan.idle,
        carriers=record.plan.carriers,
        timeline=lanes,
        timeline_seconds=max((lane.seconds for lane in lanes), default=None),
        why="\n".join(why.about_plan(record, told, steps, before)),
        policy=policy(record),
        diff=diff(before if isinstance(before, HistoryRecord) else None, record, row.bytes_sent),
        communications=listed,
        communications_missing=missing,
    )
