"""The cluster as the dashboard knows it now: built from the leader's live feed, line by line.

All times that pages show are of the leader's clock, by which steps and events have their times: this machine's
may be another (`KnownCluster.time`).

`KnownCluster` lives on the dashboard's event loop. A hello and all that follows it, up to `Whole`, is put
together apart, so that pages never show half a cluster; until then, and while nobody leads, what was known
before stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.slowness_history import Slowness
from elasticd_planner.numeric import Floats
from elasticd_planner.spec.mesh import JobPlan, MeshPlan
from elasticd_planner.spec.plan import Place
from elasticd_planner.value import Value

from elasticd.codec.decoding import decoded_as
from elasticd.dashboard.history import StepRow, about
from elasticd.wire import live_types as live
from elasticd.wire.api_types import LeaderStatus, LinkStatus, MemberStatus, NodeStatus, Settings
from elasticd.wire.event_record import EventRecord
from elasticd.wire.main_thread import Halted
from elasticd.wire.node_health import Health
from elasticd.wire.step_record import StepRecord

#: Who leads while nobody was heard.
NOBODY = LeaderStatus(name="", url="", epoch=0)


@dataclass(frozen=True, slots=True)
class Table:
    """The measurements of a plan's members in their newest step."""

    plan: int
    step: int
    columns: dict[str, int]  # place of each column
    numbers: Floats  # [members in rank order, columns]; NaN: not measured
    lengths: SequenceLengths | None  # of its sequences (None: not known)

    def of_plan(self, plan: JobPlan) -> bool:
        """Returns True if its rows are the members of this plan."""
        return self.plan == plan.number and len(self.numbers) == len(plan.members)

    def of(self, rank: int, column: str) -> float:
        """A number; NaN where it is not known."""
        place = self.columns.get(column)
        return float(self.numbers[rank, place]) if place is not None else float("nan")


class SequenceLengths(Value, frozen=True, kw_only=True):
    """The lengths of a step's sequences, in tokens."""

    counts: dict[int, int]  # sequences by bucket (`sequence_lengths.bucket`)
    tokens: int  # of all of them (0: not known)
    shortest: int  # 0: not known
    longest: int  # 0: not known


class Use(Value, frozen=True, kw_only=True):
    """A job's use of a device."""

    job: str
    place: Place | None = None  # None: it does not compute
    carrier: bool = False  # it keeps state alone
    restarts: bool = False  # the job is in restart mode, which has no plans


@dataclass(slots=True)
class ClusterNow:
    """The cluster as one leader told it."""

    name: str = ""
    leader: LeaderStatus = NOBODY
    release: str = ""
    chaos: bool = False
    detect: DetectSettings = field(default_factory=DetectSettings)
    settings: Settings | None = None
    nodes: dict[str, NodeStatus] = field(default_factory=dict)
    health: dict[str, Health] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)  # of devices that are slow
    slowness: dict[str, Slowness] = field(default_factory=dict)
    jobs: dict[str, live.LiveJob] = field(default_factory=dict)
    plans: dict[str, JobPlan] = field(default_factory=dict)  # in force
    proposed: dict[str, JobPlan] = field(default_factory=dict)
    members: dict[str, tuple[MemberStatus, ...]] = field(default_factory=dict)
    halts: dict[str, dict[str, Halted]] = field(default_factory=dict)
    expert_rows: dict[str, dict[int, tuple[float, ...]]] = field(default_factory=dict)  # by job and block
    links: tuple[LinkStatus, ...] = ()
    restarts: tuple[live.RestartingJob, ...] = ()
    paused: bool = False
    store_away: bool = False
    unwritten_seconds: float = 0.0  # for which what is shown has waited to be in etcd
    measured: dict[str, Table] = field(default_factory=dict)
    newest: dict[str, StepRow] = field(default_factory=dict)  # step of each job, as its chart has it

    def apply(self, news: live.Keyed) -> Iterable[str]:
        """Takes a line in. Returns the devices whose state it may change."""
        if isinstance(news, live.Drop):
            for kind in live.dropped(news):
                getattr(self, TABLES[kind]).pop(news.key, None)
            return ()
        assert isinstance(news, live.Valued)
        if (handler := HANDLERS.get(news.kind)) is not None:
            return handler(self, news.key, news.value)
        if news.kind in TABLES:
            getattr(self, TABLES[news.kind])[news.key] = news.value
        elif news.kind in ("links", "restarts"):
            setattr(self, news.kind, news.value)
        return ()


class KnownCluster:
    """The cluster, who tells of it, and since when."""

    def __init__(self) -> None:
        self.cluster = ClusterNow()
        self.ahead = 0.0  # seconds by which the leader's clock is ahead of this machine's
        self.heard = 0.0  # unix seconds of the newest word, by the leader's clock
        self.reachable = False
        self.since = time.time()  # of `reachable`
        self.trouble = "no leader was heard yet"
        self.store_since = self.since  # of `cluster.store_away`
        self.last_events: dict[str, EventRecord] = {}  # by job
        self.began: dict[tuple[str, str], float] = {}  # since when something is not normal, by state and name
        self.uses: dict[str, Use] = {}
        self.touched: set[str] = set()  # nodes whose cells may have changed
        self.gone: set[str] = set()  # nodes
        self._store = "", 0  # of the last leader: its etcd, and its epoch
        self._coming: ClusterNow | None = None

    def time(self, at: float) -> float:
        """The reading of the leader's clock at a time of this machine's."""
        return at + self.ahead

    # -- connection ----------------------------------------------------------------------------------------

    def reached(self, at: float) -> None:
        """The leader's stream is open."""
        if not self.reachable:
            self.reachable, self.since, self.trouble = True, at, ""

    def lost(self, why: str, at: float) -> None:
        """No leader is heard since a time of this machine's clock."""
        at = self.time(at)
        self._coming = None
        self.trouble = why
        if self.reachable:
            self.reachable, self.since = False, at

    def store(self, *, away: bool, at: float) -> None:
        """Notes that etcd answers, or that it does not."""
        if away != self.cluster.store_away:
            self.cluster.store_away, self.store_since = away, at

    # -- news ----------------------------------------------------------------------------------------------

    def hear(self, news: live.AnyNews, at: float) -> bool:
        """Takes a message in that came at a time of this machine's clock. Returns whether everything is new:
        pages begin again."""
        if isinstance(news, live.LiveHello | live.LeaderPulse):
            self.ahead = news.at - at
        at = self.time(at)
        self.heard = at
        self.reached(at)
        if isinstance(news, live.Keyed):
            self._change(news)
        elif isinstance(news, live.LiveHello):
            self._begin(news)
        elif isinstance(news, live.LeaderPulse):
            self._pulse(news, at)
        else:
            return self._complete(at)
        return False

    def _begin(self, hello: live.LiveHello) -> None:
        if another_store(self._store, hello):
            self.last_events.clear()
            self.began.clear()
        self._store = hello.store or self._store[0], hello.leader.epoch
        self._coming = ClusterNow(
            name=hello.cluster,
            leader=hello.leader,
            release=hello.release,
            chaos=hello.chaos,
            detect=hello.detect,
        )

    def _pulse(self, pulse: live.LeaderPulse, at: float) -> None:
        target = self._coming if self._coming is not None else self.cluster
        target.paused, target.unwritten_seconds = pulse.paused, pulse.unwritten_seconds
        if target is self.cluster:
            self.store(away=pulse.store_away, at=at)
        target.store_away = pulse.store_away

    def _change(self, news: live.Keyed) -> None:
        target = self._coming if self._coming is not None else self.cluster
        devices = target.apply(news)
        if isinstance(news, live.Drop) and news.kind == "job":
            self.last_events.pop(news.key, None)
        elif isinstance(news, live.Append) and news.kind == "event":
            self._event(news.value)
        elif isinstance(news, live.Append) and news.kind == "slowdowns":
            for device in (device for device, rate in news.value.rates.items() if rate == 1.0):
                self.began.pop(("slow", device), None)
        if target is self.cluster:
            self._touch(news, devices)

    def _complete(self, at: float) -> bool:
        if self._coming is None:
            return False
        before, self.cluster, self._coming = self.cluster, self._coming, None
        for name in self.cluster.jobs:  # what is not said again after a hello
            table, plan = before.measured.get(name), self.cluster.plans.get(name)
            if table is not None and plan is not None and table.of_plan(plan):
                self.cluster.measured.setdefault(name, table)
            if name in before.newest:
                self.cluster.newest.setdefault(name, before.newest[name])
        if before.store_away != self.cluster.store_away:
            self.store_since = at
        self._place()
        self.touched, self.gone = set(), set()
        return True

    def _touch(self, news: live.Keyed, devices: Iterable[str]) -> None:
        if self._places_anew(news):
            self._place()
            self.touched.update(self.cluster.nodes)
        elif isinstance(news, live.Drop) and news.kind == "node":
            self.gone.add(news.key)
            self.touched.discard(news.key)
        elif isinstance(news, live.PutValue) and news.kind == "node":
            self.touched.add(news.key)
            self.gone.discard(news.key)
        else:
            self.touched.update(device.rpartition("/")[0] for device in devices)

    def _places_anew(self, news: live.Keyed) -> bool:
        """Returns True if jobs may use other devices than before."""
        if isinstance(news, live.Drop):
            return news.kind in ("job", "plan")
        if isinstance(news, live.PutValue) and news.kind == "job":
            used = news.value.over or not news.value.plan
            return used and news.key in {use.job for use in self.uses.values()}
        return isinstance(news, live.PutValue) and news.kind in ("plan", "members", "restarts")

    def _event(self, event: EventRecord) -> None:
        if event.job:
            self.last_events[event.job] = event
        node, device = about(event)
        if event.kind == "slow":
            self.began.setdefault(("slow", device), event.time)
        elif event.kind == "recovered" and event.data.get("after") == 1.0:
            self.began.pop(("slow", device), None)
        elif event.kind == "stopped" and not event.data.get("orderly"):
            self.began["failed", event.job] = event.time
        elif event.kind == "node_down":
            self.began[("unreachable", node)] = event.time
        elif event.kind == "drained":
            self.began[("drained", node)] = event.time
        elif event.kind == "link":
            self.began[("link", str(event.data.get("link")))] = event.time

    def remember(self, events: Iterable[EventRecord]) -> None:
        """Events of before, oldest first: since when something is as it is."""
        for event in events:
            self._event(event)

    def _place(self) -> None:
        """Notes the use that jobs make of each device."""
        self.uses = {}
        for name, plan in self.cluster.plans.items():
            job = self.cluster.jobs.get(name)
            if job is None or job.over:
                continue
            for device, place in _places(plan):
                self.uses[device] = Use(job=name, place=place)
            for device in plan.carriers:
                self.uses[device] = Use(job=name, carrier=True)
            for device in plan.idle:
                self.uses.setdefault(device, Use(job=name))
        for name, members in self.cluster.members.items():
            job = self.cluster.jobs.get(name)
            if job is not None and not job.over:
                for member in members:
                    self.uses.setdefault(member.device, Use(job=name))
        for restarting in self.cluster.restarts:
            for device in restarting.members:
                self.uses.setdefault(device, Use(job=restarting.job, restarts=True))

    # -- what follows --------------------------------------------------------------------------------------

    def store_view(self) -> bytes:
        """All that a restart while nobody leads needs."""
        cluster = self.cluster
        return msgspec.json.encode(
            SavedCluster(
                name=cluster.name,
                leader=cluster.leader,
                heard=self.heard,
                nodes=tuple(cluster.nodes.values()),
                rates=cluster.rates,
                jobs=tuple(cluster.jobs.values()),
                plans=cluster.plans,
                members=cluster.members,
                links=cluster.links,
                restarts=cluster.restarts,
                settings=cluster.settings,
                detect=cluster.detect,
                paused=cluster.paused,
                chaos=cluster.chaos,
            )
        )

    def restore_view(self, text: bytes) -> None:
        """The cluster as it was known before a restart. Raises msgspec.DecodeError."""
        saved = decoded_as(SavedCluster, text)
        self.cluster = ClusterNow(
            name=saved.name,
            leader=saved.leader,
            nodes={node.node: node for node in saved.nodes},
            rates=dict(saved.rates),
            jobs={job.job.job: job for job in saved.jobs},
            plans=dict(saved.plans),
            members=dict(saved.members),
            links=saved.links,
            restarts=saved.restarts,
            settings=saved.settings,
            detect=saved.detect,
            paused=saved.paused,
            chaos=saved.chaos,
        )
        self.heard = saved.heard
        self._place()


class SavedCluster(Value, frozen=True, kw_only=True):
    """A cluster as it is kept over a restart of the dashboard."""

    name: str
    leader: LeaderStatus
    heard: float
    nodes: tuple[NodeStatus, ...]
    rates: dict[str, float]
    jobs: tuple[live.LiveJob, ...]
    plans: dict[str, JobPlan]
    members: dict[str, tuple[MemberStatus, ...]]
    links: tuple[LinkStatus, ...]
    restarts: tuple[live.RestartingJob, ...]
    settings: Settings | None
    detect: DetectSettings
    paused: bool
    chaos: bool


def another_store(before: tuple[str, int], hello: live.LiveHello) -> bool:
    """Returns True if a leader has another etcd than the one before, whose etcd and epoch are given (empty and
    0: there was none): ids of events begin anew."""
    store, epoch = before
    return bool(store and hello.store and store != hello.store) or hello.leader.epoch < epoch


def _put_node(cluster: ClusterNow, key: str, node: NodeStatus) -> Iterable[str]:
    cluster.nodes[key] = node
    _set_rates(cluster, {device.name: device.rate for device in node.devices})
    for device in node.devices:
        if device.slowness is not None:
            cluster.slowness[device.name] = device.slowness
    return [device.name for device in node.devices]


def _put_halts(cluster: ClusterNow, key: str, halts: dict[str, Halted]) -> Iterable[str]:
    before = cluster.halts.get(key, {})
    cluster.halts[key] = halts
    return {*before, *halts}


def _put_settings(cluster: ClusterNow, key: str, value: live.LiveSettings) -> Iterable[str]:
    cluster.settings, cluster.detect = value.settings, value.detect
    return ()


def _append_slowdowns(cluster: ClusterNow, key: str, slowdowns: live.Slowdowns) -> Iterable[str]:
    _set_rates(cluster, slowdowns.rates)
    cluster.slowness.update(slowdowns.slowness)
    return slowdowns.rates


def _append_step(cluster: ClusterNow, job: str, step: StepRecord) -> Iterable[str]:
    cluster.newest[job] = step_row(cluster, job, step)
    return ()


def _append_measured(cluster: ClusterNow, job: str, measured: live.MeasuredStep) -> Iterable[str]:
    cluster.measured[job] = table_of(measured, cluster.measured.get(job))
    return ()


#: The table of `ClusterNow` with the things of a kind, by key.
TABLES = {
    "node": "nodes",
    "health": "health",
    "job": "jobs",
    "plan": "plans",
    "proposed": "proposed",
    "members": "members",
    "halts": "halts",
    "experts": "expert_rows",
    "step": "newest",
    "measured": "measured",
}
#: Kinds whose values are not put into their table as they are.
HANDLERS: dict[str, Callable[[ClusterNow, str, Any], Iterable[str]]] = {
    "node": _put_node,
    "halts": _put_halts,
    "settings": _put_settings,
    "slowdowns": _append_slowdowns,
    "step": _append_step,
    "measured": _append_measured,
}


def _set_rates(cluster: ClusterNow, rates: Mapping[str, float]) -> None:
    for device, rate in rates.items():
        if rate != 1.0:
            cluster.rates[device] = rate
        else:
            cluster.rates.pop(device, None)


def table_of(measured: live.MeasuredStep, before: Table | None = None) -> Table:
    """The measurements of members. Columns without a number stay as they were measured before, under the same
    plan."""
    width = len(measured.columns)
    numbers = np.frombuffer(measured.numbers, "<f4").reshape(-1, width) if width else np.zeros((0, 0))
    if before is not None and before.plan == measured.plan and before.numbers.shape == numbers.shape:
        numbers = np.where(np.isnan(numbers), before.numbers, numbers)
    columns = {name: place for place, name in enumerate(measured.columns)}
    lengths = before.lengths if before is not None and before.plan == measured.plan else None
    if measured.lengths:
        lengths = SequenceLengths(
            counts=measured.lengths,
            tokens=measured.sequence_tokens,
            shortest=measured.shortest,
            longest=measured.longest,
        )
    return Table(plan=measured.plan, step=measured.step, columns=columns, numbers=numbers, lengths=lengths)


def step_row(cluster: ClusterNow, job: str, step: StepRecord) -> StepRow:
    """A step of a job, with what was predicted of it, and the bound."""
    predicted, bound = expected(cluster, job, step.plan, step.seconds)
    return StepRow(
        step=step.step,
        plan=step.plan,
        time=step.time,
        seconds=step.seconds,
        tokens=step.tokens,
        loss=step.loss,
        predicted=predicted,
        bound=bound,
        ended_at=step.ended_at,
        clock=step.clock,
    )


def expected(
    cluster: ClusterNow, job: str, number: int, seconds: float | None
) -> tuple[float | None, float | None]:
    """Seconds of a step of a job under its plan of this number: as predicted by a profile that was fitted to
    measured steps, and those that no plan is below.

    Args:
        seconds: of a step that was measured under it.

    Returns:
        Each None where it is not known: a prediction that no step was measured for is a guess, and none of a
        step.
    """
    plan, job_now, table = cluster.plans.get(job), cluster.jobs.get(job), cluster.measured.get(job)
    predicted = bound = None
    if job_now is not None and job_now.plan == number and not job_now.job.prediction_guessed:
        predicted = job_now.job.predicted_seconds
    if plan is not None and table is not None and table.plan == plan.number == number:
        bound = balanced_seconds(plan, table, cluster.rates)
    return predicted, lowest_seconds(bound, seconds, predicted)


def lowest_seconds(
    balanced: float | None, seconds: float | None, predicted: float | None = None
) -> float | None:
    """The bound: seconds of a step that no plan is known to go below.

    Args:
        balanced: `balanced_seconds` of one step. Another step computes a little faster or slower.
        seconds: of a step that was measured. One that was as fast shows that a plan can be.
        predicted: of a step under the plan in force, by the mean of the steps that its profile was fitted to:
            so it shows the same.

    Returns:
        The least of them; None where `balanced` is not known.
    """
    if balanced is None:
        return None
    return min(known for known in (balanced, seconds, predicted) if known)


def _places(plan: JobPlan) -> Iterator[tuple[str, Place]]:
    """The place of each device that computes; of several modules that with the loss last. The lanes of a mesh
    are those of one pipeline."""
    if isinstance(plan, MeshPlan):
        for lane, devices in enumerate(plan.lanes):
            for position, device in enumerate(devices):
                yield device, Place(0, 0, position, lane)
        return
    for module in sorted(plan.modules, key=lambda each: not each.items):
        yield from plan.view(module.module).places.items()


#: Columns of what a member computed in a step, whatever plan divides it: no communication, no recomputation.
COMPUTED = ("block_seconds", "embed_seconds", "head_seconds")


def balanced_seconds(plan: JobPlan, table: Table, slowdowns: Mapping[str, float]) -> float | None:
    """Seconds of a step whose computation is divided over all devices of a job by their measured slowdowns,
    standby devices included, and in which nothing else takes time; None where nothing was measured.

    No step takes less than what its busiest device computed. This is the mean of what all computed, weighted
    by 1/slowdown, and a mean is at most the largest: so a step that was measured is never faster than its own
    bound.
    """
    places = [table.columns[name] for name in COMPUTED if name in table.columns]
    computed = np.nansum(table.numbers[:, places], axis=1)
    measured = np.isfinite(table.numbers[:, places]).any(axis=1)
    if not measured.any():
        return None
    speeds = np.array([1 / slowdowns.get(device, 1.0) for device in plan.members])[measured]
    standby = sum(1 / slowdowns.get(device, 1.0) for device in plan.idle)
    mean = float((computed[measured] * speeds).sum() / (speeds.sum() + standby))
    return mean if mean > 0 else None
