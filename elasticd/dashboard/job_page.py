"""A job's page: how fast it trains, how fast it could, and where the rest of the time went."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from elasticd_planner.placement.expert_placement import least_busiest
from elasticd_planner.spec.cluster import Rates, rate_of
from elasticd_planner.spec.expert_load import ExpertLoad, blocks_of, held_in, rows_by_device, splits_in
from elasticd_planner.spec.mesh import JobPlan, MeshPlan
from elasticd_planner.spec.plan import Plan, Stage
from elasticd_planner.spec.sequence_lengths import PER_DOUBLING

from elasticd.dashboard import views
from elasticd.dashboard.cluster_page import event_row, hung, job_row, restart_row, restarting
from elasticd.dashboard.history import StepRow
from elasticd.dashboard.known import KnownCluster, Table
from elasticd.explain.training_speed import tokens_per_second, training_speed, wall_seconds
from elasticd.machines.job.state.events import SLOWDOWN_KINDS
from elasticd.wire.api_types import JobStatus
from elasticd.wire.event_record import EventRecord
from elasticd.wire.live_types import LiveJob, RestartingJob
from elasticd.wire.step_record import StepRecord

#: By part of a step the columns that are summed.
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "forward": ("forward_seconds",),
    "backward": ("backward_seconds",),
    "recompute": ("again_seconds",),
    "embed and head": ("embed_seconds", "head_seconds"),
    "tp": ("tensor_seconds",),
    "context": ("context_seconds",),
    "bubble": ("boundary_seconds",),
    "reduction": ("reduce_seconds",),
    "vote": ("vote_seconds",),
    "optimizer": ("optimizer_seconds",),
    "input": ("input_seconds",),
}
#: Stages that are shown: of more, those that compute longest.
MOST_STAGES = 128
#: Kinds of events that are marks on a time axis, by what they mark.
_MARKS: Mapping[str, tuple[str, ...]] = {
    "plan": ("recorded",),
    "fault": ("fenced", "worker_lost", "raised", "halted", "node_down", "waiting", "no_progress"),
    "slow": (*SLOWDOWN_KINDS, "link"),
    "snapshot": ("snapshot",),
    "checkpoint": ("checkpoint",),
    "change": ("configured", "drained", "chaos", "stopping", "started_again", "shifted", "asked"),
}
#: Kinds of events that a forgotten job's page is made from.
KEPT_KINDS = ("finished", "stopped", "forgotten", "snapshot", "checkpoint")
MARKS: Mapping[str, str] = {kind: mark for mark, kinds in _MARKS.items() for kind in kinds}


def parts_of(table: Table, rank: int) -> dict[str, float]:
    """The parts of a member's step; empty where it did not report."""
    total = table.of(rank, "step_seconds")
    if math.isnan(total):
        return {}
    by_part: dict[str, float] = {}
    for part, columns in _COLUMNS.items():
        seconds = sum(table.of(rank, column) for column in columns)
        by_part[part] = 0.0 if math.isnan(seconds) else seconds
    if not by_part["forward"] and not by_part["backward"]:  # the passes were not told apart
        by_part["blocks"] = table.of(rank, "block_seconds")
    other = sum(sum(of_items(table, rank, module).values()) for module in item_modules(table))
    by_part["other"] = max(0.0, total - sum(by_part.values()) - other)
    return {part: by_part[part] for part in views.PARTS if by_part.get(part)}


def item_modules(table: Table) -> list[str]:
    """The modules of items that members computed with."""
    return list(dict.fromkeys(name.rpartition("/")[0] for name in table.columns if "/" in name))


def of_items(table: Table, rank: int, module: str) -> dict[str, float]:
    """The parts of a member's step in a module of items; none where it has no place there."""
    by_part: dict[str, float] = {}
    for part in ("forward", "backward", "recompute", "embed and head", "tp", "reduction"):
        seconds = sum(table.of(rank, f"{module}/{column}") for column in _COLUMNS[part])
        if not math.isnan(seconds) and seconds:
            by_part[part] = seconds
    if by_part and "forward" not in by_part and "backward" not in by_part:
        by_part["blocks"] = table.of(rank, f"{module}/block_seconds")
    return by_part


def stages(plan: JobPlan | None, table: Table | None) -> tuple[views.StageParts, ...]:
    """The newest step stage by stage: of each the member whose computation took longest."""
    if not isinstance(plan, Plan) or table is None or table.plan != plan.number:
        return ()
    ranks = {device: rank for rank, device in enumerate(plan.members)}
    numbered = list(enumerate(_stages(plan, table, ranks)))
    if len(numbered) > MOST_STAGES:  # those that compute longest, in the order of the plan
        slowest = sorted(numbered, key=lambda item: -_computed(item[1]))[:MOST_STAGES]
        numbered = sorted(slowest, key=lambda item: item[0])
    return tuple(stage for _, stage in numbered)


def _computed(stage: views.StageParts) -> float:
    return sum(stage.seconds.get(part, 0.0) for part in ("forward", "backward", "blocks", "recompute"))


def _stages(plan: Plan, table: Table, ranks: Mapping[str, int]) -> Iterator[views.StageParts]:
    for module in plan.modules:
        column = f"{module.module}/block_seconds" if module.items else "block_seconds"
        for p, pipeline in enumerate(module.pipelines):
            for lane_number, lane in enumerate(pipeline.by_lane):
                for s, stage in enumerate(lane.stages):
                    spent = {
                        device: table.of(ranks[device], column) for device in stage.devices if device in ranks
                    }
                    known = {device: each for device, each in spent.items() if not math.isnan(each)}
                    if not known:
                        continue
                    slowest = max(known, key=known.__getitem__)
                    yield views.StageParts(
                        module=module.module,
                        pipeline=p,
                        lane=lane_number,
                        stage=s,
                        layers=stage.named,
                        devices=stage.devices,
                        slowest=slowest,
                        seconds=of_items(table, ranks[slowest], module.module)
                        if module.items
                        else parts_of(table, ranks[slowest]),
                        total=table.of(ranks[slowest], "step_seconds"),
                    )


def lost(news: LiveJob, now: float) -> tuple[views.LostTime, ...]:
    """The seconds lost by cause, the most first; since the newest step, as "stalled now"."""
    if news.time is None:
        return ()
    rows = [
        views.LostTime(cause=cause, seconds=seconds, times=news.time.times.get(cause, 0))
        for cause, seconds in news.time.lost.items()
        if seconds > 0
    ]
    since = now - news.time.last
    usual = (news.time.healthy or 0.0) * 2 + 1.0
    if not news.over and since > usual:
        rows.append(views.LostTime(cause="stalled now", seconds=since, times=1))
    return tuple(sorted(rows, key=lambda each: -each.seconds))


def experts(known: KnownCluster, job: str) -> views.ExpertsView | None:
    """The load of experts and the devices that have them, by what was reported last and the plan in force."""
    plan, rows = known.cluster.plans.get(job), known.cluster.expert_rows.get(job)
    if not rows or not isinstance(plan, Plan):
        return None
    load = ExpertLoad(rows=rows, part=0.0, expert_bytes=0)
    groups = [
        views.ExpertGroup(pipeline=p, lane=lane, stage=s, devices=group.devices, blocks=blocks)
        for p, pipeline in enumerate(plan.loss_view.pipelines)
        for s, stage in enumerate(pipeline.stages)
        for lane, group, own in _expert_groups(stage, load)
        if (blocks := tuple(_expert_block(group, block, load, known.cluster.rates) for block in own))
    ]
    parts = {block: tuple(round(part, 5) for part in load.weights(block)) for block in sorted(rows)}
    return views.ExpertsView(parts=parts, groups=tuple(groups)) if groups else None


def _expert_groups(stage: Stage, load: ExpertLoad) -> Iterator[tuple[int | None, Stage, list[int]]]:
    """The groups of a stage whose devices compute for each other: the lane (None: all), and the blocks."""
    blocks = [block for block in blocks_of(stage) if block in load.rows]
    shared = {*stage.shared_blocks}
    yield None, stage, [block for block in blocks if block in shared]
    for number, lane in enumerate(stage.by_lane):
        yield number, lane, [block for block in blocks if block not in shared]


def _expert_block(group: Stage, block: int, load: ExpertLoad, rates: Rates) -> views.ExpertBlock:
    weights = load.weights(block)
    held = group.experts_of(block) or held_in(group, block, len(weights))
    slowdowns = [rate_of(rates, device) for device in group.devices]
    rows = rows_by_device(weights, held, splits_in(group, block, weights))
    seconds = [slowdown * own for slowdown, own in zip(slowdowns, rows, strict=True)]
    busiest = max(range(len(seconds)), key=seconds.__getitem__)
    return views.ExpertBlock(
        block=block,
        holders=tuple(
            tuple(place for place, own in enumerate(held) if expert in own) for expert in range(len(weights))
        ),
        busiest=busiest,
        over=seconds[busiest] / least_busiest(weights, slowdowns),
    )


def lengths(known: KnownCluster, job: str) -> views.LengthsView | None:
    """Sequence lengths of the newest step."""
    table = known.cluster.measured.get(job)
    if table is None or table.lengths is None:
        return None
    known_lengths = table.lengths
    count = sum(known_lengths.counts.values())
    least, most = known_lengths.shortest or 1, known_lengths.longest or sys.maxsize
    now = tuple(
        (
            max(least, math.ceil(2 ** (bucket / PER_DOUBLING))),
            min(most, math.ceil(2 ** ((bucket + 1) / PER_DOUBLING)) - 1),
            n,
        )
        for bucket, n in sorted(known_lengths.counts.items())
    )
    return views.LengthsView(
        mean=known_lengths.tokens / count if known_lengths.tokens else None,
        shortest=float(known_lengths.shortest) or None,
        longest=float(known_lengths.longest) or None,
        now=now,
    )


def batch(plan: JobPlan | None, job: JobStatus) -> views.BatchView | None:
    """The batch of a step under the plan in force."""
    if plan is None:
        return None
    packed = job.batch
    return views.BatchView(
        samples=plan.global_batch,
        micro_batch=plan.micro_batch if isinstance(plan, Plan) else 1,
        by_pipeline=tuple(pipeline.micro_batches for pipeline in plan.loss_view.pipelines)
        if isinstance(plan, Plan)
        else plan.samples,
        sequences=packed.sequences if packed is not None else None,
        tokens=packed.tokens if packed is not None else None,
        cut=packed.cut if packed is not None else None,
        imbalance=packed.imbalance if packed is not None else None,
    )


def lanes(known: KnownCluster, job: str) -> tuple[views.LaneRow, ...]:
    """The lanes of pipelines with several, and of a mesh, each as slow as its slowest device."""
    plan = known.cluster.plans.get(job)
    if plan is None:
        return ()
    rates = known.cluster.rates
    if isinstance(plan, MeshPlan):
        return tuple(
            views.LaneRow(
                pipeline=0,
                lane=number,
                devices=devices,
                slowdown=max(rates.get(device, 1.0) for device in devices),
                rows=samples,
            )
            for number, (devices, samples) in enumerate(zip(plan.lanes, plan.samples, strict=True))
        )
    return tuple(
        views.LaneRow(
            pipeline=p,
            lane=number,
            devices=tuple(device for stage in lane.stages for device in stage.devices),
            slowdown=max(rates.get(device, 1.0) for stage in lane.stages for device in stage.devices),
            rows=lane.micro_batches,
        )
        for p, pipeline in enumerate(plan.loss_view.pipelines)
        if pipeline.rows
        for number, lane in enumerate(pipeline.by_lane)
    )


def members(known: KnownCluster, job: str) -> tuple[views.MemberRow, ...]:
    """The workers of a job, by rank."""
    plan = known.cluster.plans.get(job)
    ranks = {device: rank for rank, device in enumerate(plan.members)} if plan is not None else {}
    carriers = plan.carriers if plan is not None else ()
    halts = known.cluster.halts.get(job, {})
    rows = []
    for member in known.cluster.members.get(job, ()):
        on, device = member.computes_on, member.device
        rows.append(
            views.MemberRow(
                device=device,
                node=device.rpartition("/")[0],
                pid=member.pid,
                computes_on=on.text if on is not None else "",
                transport=on.transport if on is not None else "",
                rank=ranks.get(device),
                role="state" if device in carriers else "computes" if device in ranks else "standby",
                hung=halts[device].place if hung(known.cluster, job, device) else "",
            )
        )
    return tuple(sorted(rows, key=lambda row: (row.rank is None, row.rank or 0, row.device)))


def kept(told: Sequence[EventRecord]) -> tuple[views.Kept, ...]:
    """Snapshots and checkpoints by their events, newest first: the last few."""
    rows = []
    for event in told:
        if event.kind in ("snapshot", "checkpoint") and isinstance(step := event.data.get("step"), int):
            name = str(event.data.get("name", "")) if event.kind == "checkpoint" else ""
            rows.append(
                views.Kept(
                    kind="snapshot" if event.kind == "snapshot" else "checkpoint",
                    step=step,
                    time=event.time,
                    name=name,
                )
            )
    return tuple(rows[:32])


def job_view(known: KnownCluster, name: str, told: Sequence[EventRecord], now: float) -> views.JobView:
    """The page; `told` are the job's newest snapshots and checkpoints. Raises KeyError."""
    if (in_restart_mode := restarting(known.cluster, name)) is not None:
        row = restart_row(known, in_restart_mode, now)
        return _without_measurements(row, known.heard, (), restart_view(in_restart_mode))
    news, plan = known.cluster.jobs[name], known.cluster.plans.get(name)
    table, raised, time = known.cluster.measured.get(name), news.job.exception, news.time
    at = now if known.reachable else known.heard
    healthy = time.healthy if time is not None else None
    return views.JobView(
        head=job_row(known, name, now),
        heard=known.heard,
        measured_step=table.step if table is not None else None,
        stages=stages(plan, table),
        wall_seconds=time.wall(None if news.over else at) if time is not None else 0.0,
        productive_seconds=time.productive if time is not None else 0.0,
        healthy_seconds=healthy,
        lost=lost(news, at),
        slowness_seconds=max(0.0, time.productive - time.steps * healthy) if time and healthy else None,
        repeated_steps=time.repeated if time is not None else 0,
        lanes=lanes(known, name),
        experts=experts(known, name),
        lengths=lengths(known, name),
        batch=batch(plan, news.job),
        members=members(known, name),
        kept=kept(told),
        exception=views.ExceptionView(**msgspec.structs.asdict(raised)) if raised is not None else None,
        restart=None,
    )


def restart_view(job: RestartingJob) -> views.RestartView:
    """The rows of the page of a job in restart mode."""
    names = sorted({*job.ran_on, *job.members, *job.devices})
    devices = [
        views.RestartDevice(
            device=name,
            seconds=job.devices[name].seconds if name in job.devices else None,
            ratio=job.devices[name].ratio if name in job.devices else None,
        )
        for name in names
    ]
    return views.RestartView(
        nodes=job.nodes,
        workers=job.workers,
        restarts=job.restarts,
        round=job.round if job.round >= 0 else None,
        step_seconds=job.step_seconds if job.step else None,
        devices=tuple(sorted(devices, key=lambda each: -(each.ratio or 0.0))),
        out=job.out,
        failure=job.failure,
    )


def _without_measurements(
    row: views.JobRow, heard: float, kept_steps: tuple[views.Kept, ...], restart: views.RestartView | None
) -> views.JobView:
    """The page of a job whose workers tell the leader nothing."""
    return views.JobView(
        head=row,
        heard=heard,
        measured_step=None,
        stages=(),
        wall_seconds=0.0,
        productive_seconds=0.0,
        healthy_seconds=None,
        lost=(),
        slowness_seconds=None,
        repeated_steps=0,
        lanes=(),
        experts=None,
        lengths=None,
        batch=None,
        members=(),
        kept=kept_steps,
        exception=None,
        restart=restart,
    )


def forgotten_view(
    name: str, told: Sequence[EventRecord], steps: Sequence[StepRow], plans: Sequence[int]
) -> views.JobView:
    """The page of a job that no leader knows any more, from the history alone.

    Args:
        told: its events of `KEPT_KINDS`, newest first; those of an earlier job of this name are left out.
        steps: its newest ones, oldest first.
        plans: numbers of its plans, in order.
    """
    step, speed = (steps[-1] if steps else None), training_speed([record_of(row) for row in steps])
    own_events: list[EventRecord] = []
    for event in told:
        if event.kind == "forgotten" and own_events:
            break
        own_events.append(event)
    end = next((event for event in own_events if event.kind in ("finished", "stopped")), None)
    last = own_events[0] if own_events else None
    heard = max([event.time for event in own_events] + ([step.time] if step is not None else []), default=0.0)
    row = views.JobRow(
        job=name,
        phase=_phase_at(end) if end is not None else "forgotten",
        sentence=f"{end.text if end is not None else 'its end is not kept'}; the cluster has forgotten it",
        step=step.step + 1 if step is not None else 0,
        loss=step.loss if step is not None else None,
        tokens_per_second=speed.tokens_per_second if speed is not None else None,
        within_steps=tokens_per_second(step, step.seconds) if step is not None else None,
        predicted=None,
        bound=None,
        plan=step.plan if step is not None else plans[-1] if plans else None,
        proposal=None,
        devices=0,
        standby=0,
        ettr=None,
        goodput=None,
        last_event=event_row(last) if last is not None else None,
    )
    return _without_measurements(row, heard, kept(own_events), None)


def _phase_at(end: EventRecord) -> str:
    """The phase of a job after the event of its end."""
    if end.kind == "finished":
        return "done"
    return "stopped" if end.data.get("orderly") else "failed"


def record_of(row: StepRow) -> StepRecord:
    """A step of the history as its leader told it."""
    return StepRecord(
        step=row.step,
        plan=row.plan,
        loss=row.loss,
        tokens=row.tokens,
        seconds=row.seconds,
        time=row.time,
        ended_at=row.ended_at,
        clock=row.clock,
    )


def step_columns(
    job: str, rows: Sequence[StepRow], before: StepRow | None, every: int, told: Sequence[EventRecord]
) -> views.StepColumns:
    """Steps in columns. before: the last step before the first of them, where there is one. told: the events of
    this time, in any order."""
    walls = [wall_seconds(last, row) for last, row in zip([before, *rows], rows, strict=False)]
    return views.StepColumns(
        job=job,
        every=every,
        step=tuple(row.step for row in rows),
        time=tuple(row.time for row in rows),
        plan=tuple(row.plan for row in rows),
        seconds=tuple(row.seconds for row in rows),
        tokens_per_second=tuple(map(tokens_per_second, rows, walls)),
        within_steps=tuple(tokens_per_second(row, row.seconds) for row in rows),
        predicted=tuple(tokens_per_second(row, row.predicted) for row in rows),
        bound=tuple(tokens_per_second(row, row.bound) for row in rows),
        loss=tuple(row.loss for row in rows),
        marks=tuple(mark(event) for event in sorted(told, key=lambda event: event.id) if event.kind in MARKS),
    )


def mark(event: EventRecord) -> views.TimeMark:
    """An event on a time axis."""
    step = event.data.get("step")
    return views.TimeMark(
        time=event.time,
        step=step if isinstance(step, int) and step >= 0 else None,
        kind=MARKS[event.kind],  # type: ignore[arg-type]
        text=event.text,
        event=event.id,
    )


def live_step(
    known: KnownCluster, job: str, row: StepRow, before: StepRow | None, told: int | None, now: float
) -> views.LiveStep | None:
    """The newest step for the stream; `before`: the one that was sent before it, `told`: the measured step
    whose stages were sent last."""
    news = known.cluster.jobs.get(job)
    if news is None:
        return None
    table = known.cluster.measured.get(job)
    fresh = table is not None and table.step != told
    plan = known.cluster.plans.get(job)
    return views.LiveStep(
        job=job,
        step=row.step,
        time=row.time,
        plan=row.plan,
        seconds=row.seconds,
        tokens_per_second=tokens_per_second(row, wall_seconds(before, row)),
        within_steps=tokens_per_second(row, row.seconds),
        predicted=tokens_per_second(row, row.predicted),
        bound=tokens_per_second(row, row.bound),
        loss=row.loss,
        head=job_row(known, job, now),
        measured_step=table.step if table is not None else None,
        stages=stages(plan, table) if fresh else (),
    )
