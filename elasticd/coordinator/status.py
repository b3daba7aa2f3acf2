"""The coordinator's status, from its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from elasticd_planner.detection.slowness_history import Slowness
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.expert_load import ExpertLoad, held_by_device
from elasticd_planner.spec.plan import Plan

from elasticd.explain.training_speed import TrainingSpeed
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.coordinator.restart_jobs import RestartJob
from elasticd.machines.job.faults.hangs import awaited
from elasticd.machines.job.lifecycle import phase_time, stop_request
from elasticd.machines.job.measurements.module_times import ModuleTimes, module_times
from elasticd.machines.job.state.job_state import LIVE, JobState, NodeState
from elasticd.machines.job.state.last_checkpoint import newest
from elasticd.wire.api_types import (
    CheckpointStatus,
    ClusterStatus,
    DeviceStatus,
    ExceptionStatus,
    ExpertDeviceStatus,
    ExpertsStatus,
    JobStatus,
    LeaderStatus,
    LinkStatus,
    MemberStatus,
    ModuleDeviceStatus,
    ModuleStatus,
    NodeStatus,
    Pace,
    RestartStatus,
)


def status(
    state: CoordinatorState,
    cluster: str,
    leader: LeaderStatus,
    restarts: Iterable[RestartJob],
    now: float,
    at: float,
    speeds: Mapping[str, TrainingSpeed],
    unwritten_seconds: float = 0.0,
) -> ClusterStatus:
    """The whole cluster; `restarts` are the jobs in restart mode that report laps, `now` the seconds of their
    clock, `at` those of the machine's, which stands still while the store is away; `speeds` are those of jobs,
    with their newest steps; `unwritten_seconds` is for how long the oldest decision has waited for etcd."""
    slowdowns, slow, used = state.slowdowns, slowness(state), members(state)
    restarting_jobs = restarting(restarts, now)
    used += Counter(node_of(device) for job in restarting_jobs for device in job.members)
    limit = state.settings.detect.outside_seconds
    return ClusterStatus(
        cluster=cluster,
        leader=leader,
        nodes=tuple(
            node_status(node, slowdowns, slow, used[name]) for name, node in sorted(state.nodes.items())
        ),
        jobs=tuple(job_status(job, at, limit, speeds.get(name)) for name, job in sorted(state.jobs.items())),
        restarts=restarting_jobs,
        paused=state.settings.policy.paused,
        unwritten_seconds=unwritten_seconds,
        links=links(state),
    )


def links(state: CoordinatorState) -> tuple[LinkStatus, ...]:
    """The links between nodes that were probed, by name."""
    return tuple(
        LinkStatus(link=name, bandwidth=probe.bandwidth, latency=probe.latency, rate=state.links.rate(name))
        for name, probe in sorted(state.links.probes.items())
    )


def restarting(jobs: Iterable[RestartJob], now: float) -> tuple[RestartStatus, ...]:
    """The jobs in restart mode."""
    return tuple(_restarting(job, now) for job in jobs)


def _restarting(job: RestartJob, now: float) -> RestartStatus:
    return RestartStatus(
        job=job.job,
        round=max(job.round, job.gathered),
        step=job.step,
        step_seconds=job.wall,
        silent_seconds=max(0.0, now - job.heard) if job.step else 0.0,
        devices={
            device: Pace(seconds=known.lap.seconds, ratio=job.rates.ratio(device))
            for device, known in sorted(job.laps.items())
        },
        out=job.out,
        phase=job.phase(now),
        nodes=job.nodes,
        members=job.members(now),
        ran_on=job.ran_on,
        workers=sum(known.state.at_work.workers for known in job.torchruns.values()),
        restarts=job.restarts,
        sentence=job.sentence(now),
        failure=job.failure,
        stopped_by=job.stopped_by(now),
    )


def slowness(state: CoordinatorState, devices: Collection[str] | None = None) -> dict[str, Slowness]:
    """The kind of slowness of the devices that were slow at some time in their job: all, or some of these.
    Those of jobs that are over are not among them."""
    persistent_steps = state.settings.detect.persistent_steps
    return {
        device: job.detection.rates.slowness(device, persistent_steps)
        for job in state.measuring
        for device in job.detection.rates.troubled
        if devices is None or device in devices
    }


def node_status(
    node: NodeState, rates: Mapping[str, float], slow: Mapping[str, Slowness], members: int
) -> NodeStatus:
    """One node, by the slowdown and slowness of its devices, and how many of them plans use."""
    record = node.record
    return NodeStatus(
        node=record.node,
        connected=node.connected,
        address=record.address,
        emulated=record.emulated,
        draining=record.draining,
        drain_asked=node.drain_asked,
        members=members,
        health=node.health,
        devices=tuple(
            DeviceStatus(
                name=device.name,
                memory=device.memory,
                rate=rates.get(device.name, 1.0),
                pace=node.paces.get(device.name, 1.0),
                slowness=slow.get(device.name),
            )
            for device in record.devices
        ),
    )


def members(state: CoordinatorState) -> Counter[str]:
    """The number of devices of each node that plans use, in force or proposed."""
    jobs = [job for job in state.jobs.values() if job.phase in LIVE]
    used = {device for job in jobs for plan in job.candidates for device in plan.members}
    return Counter(node_of(device) for device in used)


def job_status(
    job: JobState,
    at: float,
    limit: float,
    speed: TrainingSpeed | None,
    *,
    waits: bool = True,
    brief: bool = False,
) -> JobStatus:
    """One job. speed: of its newest steps. waits: whether to look whom it waits for. brief: without its plan
    and members."""
    awaits = awaited(job, at, limit) if waits and job.phase in LIVE else ""
    return JobStatus(
        job=job.job,
        phase=job.phase.value,
        reason=stop_request.awaited(job) or job.reason or phase_time.missing(job) or awaits or _left_out(job),
        orderly=job.ending.orderly,
        stopping=bool(job.ending.stopping),
        checkpoint=_checkpoint(job, at),
        plan=None if brief else job.plan,
        proposal=job.proposal.number if job.proposal is not None else None,
        step=job.steps.progress.step,
        snapshot=job.snapshots.whole.step if job.snapshots.whole is not None else None,
        loss=speed.newest.loss if speed is not None else None,
        tokens_per_second=speed.tokens_per_second if speed is not None else None,
        step_seconds=(speed.newest.seconds or None) if speed is not None else None,
        wall_seconds=speed.wall_seconds if speed is not None else None,
        predicted_seconds=job.predicted_seconds,
        prediction_guessed=job.prediction_guessed,
        exception=_exception(job),
        batch=job.steps.batch,
        members=() if brief else member_list(job),
        modules=tuple(_module(each, brief=brief) for each in module_times(job)),
        experts=_experts(job, brief=brief),
    )


def _experts(job: JobState, *, brief: bool) -> ExpertsStatus | None:
    """The load of experts, and which devices have them; the devices are left out where a job's members are."""
    plan, known = job.plan, job.learned.expert_rows
    if not isinstance(plan, Plan) or not known.mean or known.plan != plan.number:
        return None
    plan = plan.loss_view
    load = ExpertLoad(rows=known.mean, part=0.0, expert_bytes=0)
    held = held_by_device(plan, load)
    parts = {block: load.weights(block) for block in load.rows}
    block = max(parts, key=lambda each: max(parts[each]))
    lanes = [lane for _, _, lane in plan.walk()]
    count = sum(map(len, load.rows.values()))
    groups = [device for lane in lanes if len(lane.devices) > 1 for device in lane.devices]
    copies = sum(len(own) for blocks in held.values() for own in blocks.values()) - count * len(plan.by_lane)
    return ExpertsStatus(
        experts=count,
        copies=max(0, copies),
        uneven=known.uneven,
        block=block,
        heaviest=parts[block].index(max(parts[block])),
        part=max(parts[block]),
        by_device=()
        if brief
        else tuple(
            ExpertDeviceStatus(
                device=device,
                experts=sum(map(len, held.get(device, {}).values())),
                work=known.work.get(device, 1.0),
            )
            for device in groups
        ),
    )


def _module(times: ModuleTimes, *, brief: bool) -> ModuleStatus:
    """The times of a module; those of its devices are left out where a job's members are."""
    by_device = () if brief else tuple(ModuleDeviceStatus(**each._asdict()) for each in times.by_device)
    return ModuleStatus(**times._replace(by_device=())._asdict() | {"by_device": by_device})


def _checkpoint(job: JobState, at: float) -> CheckpointStatus | None:
    published, unmade = newest(job), job.checkpoints.unmade
    if published is None and unmade is None:
        return None
    return CheckpointStatus(
        step=published.step if published is not None else job.checkpoints.read_step,
        age_seconds=max(0.0, at - job.checkpoints.checkpoint_at)
        if job.checkpoints.checkpoint_at is not None
        else None,
        failed_step=unmade.step if unmade is not None else None,
        failure=unmade.reason if unmade is not None else "",
    )


def _left_out(job: JobState) -> str:
    """Says that the newest steps change no weight."""
    return job.steps.left_out.words if job.steps.left_out is not None and job.phase in LIVE else ""


def member_list(job: JobState) -> tuple[MemberStatus, ...]:
    """The workers of a job, by device."""
    return tuple(
        MemberStatus(
            device=worker.device,
            incarnation=worker.incarnation,
            pid=worker.pid,
            computes_on=worker.computes_on,
        )
        for _, worker in sorted(job.workers.items())
    )


def _exception(job: JobState) -> ExceptionStatus | None:
    if (
        not job.ending.thrown or job.ending.thrown[-1].step + 1 < job.steps.progress.step
    ):  # the loop's body has a step that is made
        return None
    last = job.ending.thrown[-1]
    return ExceptionStatus(
        device=last.device, step=last.step, kind=last.kind, message=last.text, traceback=last.traceback
    )
