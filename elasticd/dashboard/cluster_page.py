"""The cluster's page: the heat map's cells, what is not normal, the rows of jobs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from elasticd_planner.readable import readable_seconds

from elasticd.dashboard import views
from elasticd.dashboard.history import about
from elasticd.dashboard.known import ClusterNow, KnownCluster
from elasticd.explain.training_speed import tokens_per_second
from elasticd.wire.api_types import NodeStatus
from elasticd.wire.event_record import EventRecord
from elasticd.wire.live_types import LiveJob, RestartingJob
from elasticd.wire.node_health import causes

#: What a phase means, in a sentence's beginning.
PHASES: Mapping[str, str] = {
    "gathering": "waits for torchruns to join",
    "assembling": "waits for its workers to start",
    "planning": "waits for its first plan",
    "proposed": "trains on while a new plan is prepared",
    "aborting": "gives up a proposed plan",
    "running": "trains",
    "recovering": "recovers from a loss",
    "done": "has trained all its steps",
    "stopped": "has stopped",
    "failed": "has failed",
}
#: Phases of a row after which nothing follows.
OVER = ("done", "stopped", "failed")
#: Seconds for which a job that failed is among what is not normal: from then on it is one that is over.
FAILED_SECONDS = 600.0
#: The order of the table "not normal": what stops jobs first.
_WORST = ("failed", "hung", "recovering", "unreachable", "slow", "suspect", "draining", "drained")


def event_row(event: EventRecord) -> views.EventRow:
    """An event with what it is about."""
    node, device = about(event)
    by = event.data.get("by")
    return views.EventRow(
        id=event.id,
        time=event.time,
        kind=event.kind,
        job=event.job,
        text=event.text,
        data=event.data,
        node=node,
        device=device,
        by=by if isinstance(by, str) else "",
    )


def leader_view(known: KnownCluster) -> views.LeaderView:
    """The leader."""
    leader = known.cluster.leader
    return views.LeaderView(
        name=leader.name,
        url=leader.url,
        epoch=leader.epoch,
        reachable=known.reachable,
        since=known.since,
        trouble=known.trouble,
    )


def etcd_view(known: KnownCluster) -> views.EtcdView:
    """The state of etcd: it answers or not, and has what is shown or lags behind."""
    cluster = known.cluster
    return views.EtcdView(
        reachable=not cluster.store_away,
        since=known.store_since,
        unwritten_seconds=cluster.unwritten_seconds,
    )


def live_leader(known: KnownCluster, now: float) -> views.LiveLeader:
    """The pulse of the page."""
    return views.LiveLeader(
        leader=leader_view(known),
        etcd=etcd_view(known),
        paused=known.cluster.paused,
        links=slow_links(known.cluster),
        heard=known.heard,
        now=now,
    )


def state_of(known: KnownCluster, node: NodeStatus, device: str) -> views.DeviceState:
    """A device's state in a word."""
    use = known.uses.get(device)
    if not node.connected:
        return "unreachable"
    if use is not None and hung(known.cluster, use.job, device):
        return "hung"
    if node.draining:
        return "draining" if node.members else "drained"
    if known.cluster.rates.get(device, 1.0) > 1.0:
        return "slow"
    if use is None:
        return "unused"
    if use.carrier:
        return "state"
    return "standby" if use.place is None and not use.restarts else "healthy"


def hung(cluster: ClusterNow, job: str, device: str) -> bool:
    """Returns True if its worker stands still, and not since it waits for others."""
    halted = cluster.halts.get(job, {}).get(device)
    return halted is not None and not halted.waits


def cell(known: KnownCluster, node: NodeStatus, device: str, pace: float) -> views.DeviceCell:
    """A device of the heat map."""
    use = known.uses.get(device)
    place = use.place if use is not None else None
    return views.DeviceCell(
        name=device,
        slowdown=known.cluster.rates.get(device, 1.0),
        state=state_of(known, node, device),
        job=use.job if use is not None else "",
        place=(0, place.pipeline, place.lane, place.stage, place.position) if place else None,
        pace=pace,
    )


def node_row(known: KnownCluster, node: NodeStatus) -> views.NodeRow:
    """A row of the heat map."""
    return views.NodeRow(
        node=node.node,
        connected=node.connected,
        draining=node.draining,
        members=node.members,
        address=node.address,
        emulated=node.emulated,
        devices=tuple(cell(known, node, device.name, device.pace) for device in node.devices),
    )


def counted(rows: Iterable[views.NodeRow]) -> dict[str, int]:
    """Devices by state."""
    counts = Counter(device.state for row in rows for device in row.devices)
    return {state: counts[state] for state in views.DEVICE_STATES if counts[state]}


def abnormal(known: KnownCluster, rows: Iterable[views.NodeRow]) -> tuple[views.Abnormal, ...]:
    """All that is not normal, the worst first."""
    rows_shown = [*_failures(known), *_jobs(known), *_nodes(known, rows), *_links(known)]

    def key(row: views.Abnormal) -> tuple[int, float, str]:
        place = _WORST.index(row.state) if row.state in _WORST else len(_WORST)
        return place, -(row.slowdown or 0.0), row.name

    return tuple(sorted(rows_shown, key=key))


def _nodes(known: KnownCluster, rows: Iterable[views.NodeRow]) -> Iterator[views.Abnormal]:
    for row in rows:
        whole = "unreachable" if not row.connected else "" if not row.draining else "drained"
        if whole == "drained" and row.members:
            whole = "draining"
        if whole:
            began = known.began.get(("unreachable" if whole == "unreachable" else "drained", row.node))
            why = {
                "unreachable": "its agent is not connected; its workers may well train on",
                "draining": f"jobs still use {row.members} of its devices",
                "drained": "no job uses it: it can be stopped",
            }[whole]
            yield _row("node", row.node, whole, why, began)
        health = known.cluster.health.get(row.node)
        for device in row.devices:
            slow = device.slowdown > 1.0
            reasons = causes(health, device.name) if health is not None else ()
            sensors = health.device(device.name) if health is not None else None
            if device.state == "hung":
                halted = known.cluster.halts[device.job][device.name]
                since = known.heard - halted.seconds
                yield _row("device", device.name, "hung", halted.place, since, device)
            elif slow or (reasons and sensors is not None and sensors.pid is None):
                why = "; ".join((*_kind(known.cluster, device.name), *reasons))
                if device.pace != 1.0:
                    why = "; ".join(filter(None, (f"chaos slows it {device.pace:g}x on purpose", why)))
                began = known.began.get(("slow", device.name)) if slow else None
                yield _row("device", device.name, "slow" if slow else "suspect", why, began, device)


def _kind(cluster: ClusterNow, device: str) -> tuple[str, ...]:
    slowness = cluster.slowness.get(device)
    return (f"{slowness.kind.word}: {slowness.reason}",) if slowness is not None and slowness.kind.word else ()


def _row(
    what: str,
    name: str,
    state: str,
    why: str,
    since: float | None,
    device: views.DeviceCell | None = None,
) -> views.Abnormal:
    return views.Abnormal(
        what=what,  # type: ignore[arg-type]
        name=name,
        state=state,
        slowdown=device.slowdown if device is not None else None,
        why=why,
        since=since,
        job=device.job if device is not None else "",
    )


def _links(known: KnownCluster) -> Iterator[views.Abnormal]:
    for link in slow_links(known.cluster):
        yield views.Abnormal(
            what="link",
            name=link.link,
            state="slow",
            slowdown=link.slowdown,
            why=f"{link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.0f} µs one way",
            since=known.began.get(("link", link.link)),
        )


def _failures(known: KnownCluster) -> Iterator[views.Abnormal]:
    """Jobs that failed a short time ago. One that ended otherwise is over, as somebody wanted it."""
    jobs = {
        name: sentence(news) for name, news in known.cluster.jobs.items() if news.job.shown_phase == "failed"
    }
    jobs |= {job.job: job.sentence for job in known.cluster.restarts if job.phase == "failed"}
    for name, why in jobs.items():
        since = known.began.get(("failed", name))
        if since is not None and known.heard - since < FAILED_SECONDS:
            yield views.Abnormal(
                what="job", name=name, state="failed", slowdown=None, why=why, since=since, job=name
            )


def _jobs(known: KnownCluster) -> Iterator[views.Abnormal]:
    for name, news in known.cluster.jobs.items():
        job = news.job
        if news.over:
            continue
        if job.phase in ("recovering", "aborting") or job.reason:
            event = known.last_events.get(name)
            state = job.phase if job.phase in ("recovering", "aborting") else "waits"
            since = event.time if event is not None else None
            yield views.Abnormal(
                what="job",
                name=name,
                state=state,
                slowdown=None,
                why=job.reason or sentence(news),
                since=since,
                job=name,
            )


def slow_links(cluster: ClusterNow) -> tuple[views.LinkRow, ...]:
    """Links that are slow, the slowest first."""
    slow = sorted((link for link in cluster.links if link.rate > 1.0), key=lambda link: -link.rate)
    return tuple(
        views.LinkRow(link=link.link, slowdown=link.rate, bandwidth=link.bandwidth, latency=link.latency)
        for link in slow
    )


def sentence(news: LiveJob) -> str:
    """A job's phase in a sentence, with its reason."""
    job, phase = news.job, news.job.shown_phase
    text = PHASES.get(phase, phase)
    if job.phase == "proposed" and job.proposal is not None:
        text = "trains on" if news.plan else "waits"
        text += f" while plan {job.proposal} is prepared"
    return f"{text}: {job.reason}" if job.reason else text


def job_row(known: KnownCluster, name: str, now: float) -> views.JobRow:
    """A row of the table of jobs. Raises KeyError."""
    cluster = known.cluster
    news = cluster.jobs[name]
    job, plan = news.job, cluster.plans.get(name)
    within_steps, predicted, bound = speeds(cluster, name)
    last = known.last_events.get(name)
    at = None if news.over else max(now, known.heard) if known.reachable else known.heard
    return views.JobRow(
        job=name,
        phase=job.shown_phase,
        sentence=sentence(news),
        step=job.step,
        loss=job.loss,
        tokens_per_second=job.tokens_per_second,
        within_steps=within_steps,
        predicted=predicted,
        bound=bound,
        plan=plan.number if plan is not None else None,
        proposal=job.proposal,
        devices=len(plan.members) if plan is not None else 0,
        standby=len(plan.idle) if plan is not None else 0,
        ettr=news.time.ettr(at) if news.time is not None else None,
        goodput=news.time.goodput(at) if news.time is not None else None,
        last_event=event_row(last) if last is not None else None,
    )


def speeds(cluster: ClusterNow, name: str) -> tuple[float | None, float | None, float | None]:
    """Tokens per second of the newest step alone: as measured, as predicted, and as no plan can exceed. They
    are those of the last point of the job's chart."""
    step = cluster.newest.get(name)
    if step is None:
        return None, None, None
    return (
        tokens_per_second(step, step.seconds),
        tokens_per_second(step, step.predicted),
        tokens_per_second(step, step.bound),
    )


def restart_row(known: KnownCluster, job: RestartingJob, now: float) -> views.JobRow:
    """A job in restart mode in the table of jobs."""
    last = known.last_events.get(job.job)
    over = {"finished": "done", "failed": "failed", "stopped": "stopped"}.get(job.phase)
    silence = (now if known.reachable else known.heard) - job.heard
    late = not over and silence > 5 + 3 * job.step_seconds
    silent = f", silent for {silence:.0f} s" if late else ""
    pace = f"round {job.round}, {readable_seconds(job.step_seconds)} a step{silent}" if job.step else ""
    return views.JobRow(
        job=job.job,
        phase=over or "restart mode",
        sentence="; ".join(filter(None, ("restart mode" if over else "", pace, job.sentence))),
        step=job.step or None,
        loss=None,
        tokens_per_second=None,
        within_steps=None,
        predicted=None,
        bound=None,
        plan=None,
        proposal=None,
        devices=job.workers or len(job.ran_on) or len(job.devices),
        standby=0,
        ettr=None,
        goodput=None,
        last_event=event_row(last) if last is not None else None,
    )


def job_rows(known: KnownCluster, now: float) -> tuple[views.JobRow, ...]:
    """All jobs, those that live first."""
    restarts = [job for job in known.cluster.restarts if restarting(known.cluster, job.job) is not None]
    jobs = known.cluster.jobs.keys() - {job.job for job in restarts}
    rows = [job_row(known, name, now) for name in sorted(jobs)]
    rows += [restart_row(known, job, now) for job in restarts]
    return tuple(sorted(rows, key=lambda row: row.phase in OVER))


def restarting(cluster: ClusterNow, name: str) -> RestartingJob | None:
    """The job of a name, where it is one in restart mode. One of the same name in live mode may be there too:
    it is over, or is about to go on in restart mode, or the name is used again."""
    restart = next((job for job in cluster.restarts if job.job == name), None)
    news = cluster.jobs.get(name)
    if restart is None or news is None or news.over:
        return restart
    return None if news.plan > 0 or restart.phase not in ("running", "gathering") else restart


def cluster_view(
    known: KnownCluster, rows: Mapping[str, views.NodeRow], viewer: views.Viewer, now: float | None = None
) -> views.ClusterView:
    """The whole page; `rows` are those of the heat map, by node."""
    now = time.time() if now is None else now
    listed = [rows[name] for name in sorted(rows)]
    cluster = known.cluster
    return views.ClusterView(
        cluster=cluster.name,
        leader=leader_view(known),
        etcd=etcd_view(known),
        paused=cluster.paused,
        heard=known.heard,
        now=now,
        viewer=viewer,
        nodes=tuple(listed),
        counts=counted(listed),
        abnormal=abnormal(known, listed),
        jobs=job_rows(known, now),
        links=slow_links(cluster),
    )


def changed(before: views.NodeRow | None, after: views.NodeRow) -> tuple[bool, list[views.DeviceCell]]:
    """The difference between two rows of a node: True if the row itself differs, else the cells that do."""
    if before is None or len(before.devices) != len(after.devices):
        return True, []
    empty = msgspec.structs.replace(before, devices=())
    if empty != msgspec.structs.replace(after, devices=()):
        return True, []
    return False, [new for old, new in zip(before.devices, after.devices, strict=True) if old != new]
