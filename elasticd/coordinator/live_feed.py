"""The live feed: what a leader knows, told to those who listen, line by line (`live_types`).

Theory of operation. Nothing is kept or made while nobody listens. While somebody does, the leader's loop notes
what it hears, at the price of a dictionary's entry for each report: it computes nothing. A few times a second a
round compares the leader's state with what was told last. The state is immutable, and what did not change is
the same object, so that most of a round is comparing identities. The round and its encoding run in the viewers'
thread (`http.response_encoder`), one at a time, for all listeners together. What devices measured is told once
a second at most, and less often where making it would take more than `SHARE` of the time.

Each listener has a queue of lines, bounded in bytes. Whoever lags behind loses its queue, and begins again with
a hello: the leader's memory does not grow with a listener that sleeps. Lines of late are kept for those who
lost their connection: they go on after the last id that they know.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np
from elasticd_planner.detection.device_rates import COUNT, RESIDUALS, UP, Devices
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.spec.plan import Plan

from elasticd.coordinator import status
from elasticd.explain.training_speed import TrainingSpeed
from elasticd.line_queue import LineQueue
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.coordinator.restart_jobs import RestartJob
from elasticd.machines.job.state.job_state import OVER, JobState, NodeState
from elasticd.machines.job.state.last_checkpoint import is_dead
from elasticd.version import __version__
from elasticd.wire import live_types as live
from elasticd.wire.api_types import ApiError, LeaderStatus, Settings
from elasticd.wire.event_record import EventRecord
from elasticd.wire.job_time import JobTime
from elasticd.wire.step_record import StepRecord
from elasticd.wire.worker import Prepared, StayedOnPlan, Switched

#: Seconds between two rounds, between two looks at what devices measured, and between pulses.
ROUND, DEVICES, PULSE = 0.25, 1.0, 1.0
#: The part of the time that may go into telling what devices measured.
SHARE = 0.008
#: Who may listen at once. A dashboard is one listener, however many browsers look at it.
MOST_LISTENERS = 16
#: Of these, how many are left to operators: viewers that sleep lock nobody out who can act.
FOR_OPERATORS = 4
#: Bytes of lines that may wait for one listener, and of those that are kept for who comes back.
MOST_WAITING, MOST_KEPT = 8 << 20, 8 << 20
#: Events and steps that wait for a round, at most: more are left to the journal, and a hello says so.
MOST_NOTED = 20_000

_log = logging.getLogger(__name__)
_measured = attrgetter(*live.MEASURED)
_items_measured = attrgetter(*live.OF_ITEMS)
_pack = struct.Struct(f"<{len(live.MEASURED)}f").pack
_LARGEST = float(np.finfo(np.float32).max)


def _packed(*values: float) -> bytes:
    """Values as float32, as far as that reaches."""
    try:
        return _pack(*values)
    except (OverflowError, struct.error):
        return _pack(*(max(min(value, _LARGEST), -_LARGEST) for value in values))


#: Of a member that measured nothing new.
_NOTHING = _packed(*(math.nan,) * len(live.MEASURED))
_encode = msgspec.json.Encoder().encode
#: How a line of what devices measured begins.
_MEASURED = b'{"type":"measured"'
T = TypeVar("T")
Beside = Callable[..., Awaitable[Any]]


class FeedSource(msgspec.Struct, frozen=True, kw_only=True):
    """All that a round reads of the leader: taken in the loop, and immutable."""

    state: CoordinatorState
    cluster: str
    store: str  # the etcd's cluster ID
    leader: LeaderStatus
    settings: Settings
    times: Mapping[str, JobTime]
    speeds: Mapping[str, TrainingSpeed]
    restarts: tuple[RestartJob, ...]
    clock: float  # seconds of the clock that restarts have their times of
    newest_event: int
    store_away: bool
    unwritten_seconds: float = 0.0  # for which the oldest decision waits for etcd
    chaos: bool
    at: float  # seconds of the machine's clock
    now: float  # unix seconds


@dataclass(slots=True)
class _Noted:
    """The loop's notes since the last round."""

    events: list[EventRecord] = field(default_factory=list)
    steps: list[tuple[str, StepRecord]] = field(default_factory=list)
    progress: list[tuple[str, int, live.RankNews]] = field(default_factory=list)
    measured: dict[str, dict[str, Measurement]] = field(default_factory=dict)


@dataclass(slots=True)
class _Told:
    """The news that was published last, to compare with. `base`: what all listeners know, before the first
    round."""

    base: FeedSource | None = None
    nodes: dict[str, NodeState] = field(default_factory=dict)
    members: Counter[str] = field(default_factory=Counter)
    rates: dict[str, float] = field(default_factory=dict)
    jobs: dict[str, JobState] = field(default_factory=dict)
    live_jobs: dict[str, live.LiveJob] = field(default_factory=dict)
    newest: dict[str, StepRecord | None] = field(default_factory=dict)
    halts: dict[str, dict[str, Any]] = field(default_factory=dict)
    links: object = None
    restarts: tuple[RestartJob, ...] = ()
    settings: Settings | None = None


class _Listener(LineQueue):
    """One connection. Where it lags it gets a hello. measured: whether it wants what devices measure, which is
    most of all that is told."""

    def __init__(self, *, measured: bool = True) -> None:
        super().__init__(MOST_WAITING)
        self._measured = measured
        self.closed = False

    def put(self, lines: Collection[bytes]) -> None:
        """Has lines wait, those that it wants."""
        super().put(lines if self._measured else [line for line in lines if not line.startswith(_MEASURED)])


class LiveFeed:
    """The listeners of one leader. All methods are called in the leader's loop."""

    def __init__(self, epoch: int) -> None:
        self._epoch, self._sequence = epoch, 0
        self._listeners: set[_Listener] = set()
        self._noted = _Noted()
        self._told: _Told | None = None
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_size = 0
        self._begun = asyncio.Event()
        self._devices_at = self._pulse_at = 0.0
        self._closed = False

    def __len__(self) -> int:
        """The listeners there are."""
        return len(self._listeners)

    # -- what the leader notes -----------------------------------------------------------------------------

    def measured(self, job: str, measurement: Measurement) -> None:
        """A device reported a step."""
        by_device = self._noted.measured.get(job)
        if by_device is None:
            by_device = self._noted.measured[job] = {}
        by_device[measurement.device] = measurement

    def stepped(self, job: str, step: StepRecord) -> None:
        """A job made a step."""
        if len(self._noted.steps) < MOST_NOTED:
            self._noted.steps.append((job, step))

    def told(self, event: EventRecord) -> None:
        """Something happened."""
        if len(self._noted.events) < MOST_NOTED:
            self._noted.events.append(event)
        else:
            self._all_lag()

    def said(self, job: str, device: str, body: Prepared | Switched | StayedOnPlan) -> None:
        """A rank told how far it is in a switch."""
        rank = live.RankNews(device=device, at=time.time(), what=_SAID[type(body)])
        if isinstance(body, Switched):
            rank = msgspec.structs.replace(
                rank,
                pause=body.pause_seconds,
                bytes_sent=body.bytes_sent,
                bytes_lacking=body.bytes_lacking,
                flows={source: size for source, (size, _) in body.flows.items()},
            )
        self._noted.progress.append((job, body.number, rank))

    # -- listeners -----------------------------------------------------------------------------------------

    def listen(
        self,
        after: str,
        known: Callable[[], FeedSource],
        beside: Beside,
        *,
        measured: bool = True,
        operator: bool = True,
    ) -> AsyncGenerator[bytes, None]:
        """Lines, until the leader ends or the listener goes.

        Args:
            after: the id of the last line that the listener has ("": none).
            known: what the leader knows at the time of the call.
            beside: runs work in the viewers' thread.
            measured: whether the listener wants what devices measure.
            operator: whether the listener may change the cluster; for others there are fewer places.

        Raises:
            ApiError: as many listen as may.
        """
        most = MOST_LISTENERS if operator else MOST_LISTENERS - FOR_OPERATORS
        if len(self._listeners) >= most:
            raise ApiError(
                "unavailable",
                f"{most} listen to this leader already: let browsers ask one 'elasticd dashboard', "
                "which listens once for all of them",
            )
        return self._lines(after, known, beside, measured)

    def _enter(self, after: str, known: Callable[[], FeedSource], measured: bool) -> _Listener:
        listener = _Listener(measured=measured)
        missed = self._after(after)
        if missed is None:
            listener.lag()
        else:
            listener.put(missed)
        listener.closed = self._closed
        if not self._listeners:
            self._begin(known())
        self._listeners.add(listener)
        return listener

    async def _lines(
        self, after: str, known: Callable[[], FeedSource], beside: Beside, measured: bool
    ) -> AsyncGenerator[bytes, None]:
        listener = self._enter(
            after, known, measured
        )  # here: who is gone before the first line was never there
        try:
            while True:
                if listener.lags:
                    listener.lags = False  # what comes from here on waits behind the hello
                    greeting = hello(known(), f"{self._epoch}:{self._sequence}")
                    while lines := await beside(_some, greeting):
                        yield lines
                    continue  # it may have lagged meanwhile
                if listener.closed and not listener.lines:
                    return
                if not listener.lines:
                    listener.woken.clear()
                    await listener.woken.wait()
                    continue
                yield listener.take()
        finally:
            self._listeners.discard(listener)
            if not self._listeners:
                self._end()

    def close(self) -> None:
        """Ends all streams, once they have what waits for them."""
        self._closed = True
        for listener in self._listeners:
            listener.closed = True
            listener.woken.set()

    # -- rounds --------------------------------------------------------------------------------------------

    async def rounds(self, known: Callable[[], FeedSource], beside: Beside) -> None:
        """Tells listeners what is new, until cancelled."""
        while True:
            await self._begun.wait()
            began = time.monotonic()
            try:
                await self._round(known(), beside)
            except Exception:  # a defect here must not end the leader
                _log.exception("what listeners are to hear cannot be said")
                self._all_lag()
                self._told = _Told()
                await asyncio.sleep(DEVICES)
            await asyncio.sleep(max(0.05, ROUND - (time.monotonic() - began)))

    async def _round(self, known: FeedSource, beside: Beside) -> None:
        noted, self._noted = self._noted, _Noted()
        now = time.monotonic()
        measured: dict[str, dict[str, Measurement]] = {}
        if now >= self._devices_at:
            measured, noted.measured = noted.measured, {}
        elif noted.measured:
            self._noted.measured, noted.measured = noted.measured, {}
        pulse = now >= self._pulse_at
        if pulse:
            self._pulse_at = now + PULSE
        assert self._told is not None, "somebody listens"
        published, sequence = self._told, self._sequence
        lines, spent = await beside(_made, known, noted, measured, published, self._epoch, sequence, pulse)
        if measured:
            self._devices_at = now + max(DEVICES, spent / SHARE)
        if published is not self._told:
            return  # nobody listens any more, or others do
        self._sequence += len(lines)
        self._keep(lines)
        for listener in self._listeners:
            listener.put(lines)

    def _begin(self, known: FeedSource) -> None:
        """The first listener gets a hello that is no older than what is `known`: rounds tell what changes from
        here on."""
        self._noted, self._told = _Noted(), _Told(base=known)
        self._kept.clear()
        self._kept_size = 0
        self._devices_at = self._pulse_at = 0.0
        self._begun.set()

    def _end(self) -> None:
        self._begun.clear()
        self._noted, self._told = _Noted(), None
        self._kept.clear()

    def _keep(self, lines: list[bytes]) -> None:
        for place, line in enumerate(lines):
            self._kept.append((self._sequence - len(lines) + place + 1, line))
            self._kept_size += len(line)
        while self._kept_size > MOST_KEPT:
            self._kept_size -= len(self._kept.popleft()[1])

    def _after(self, after: str) -> list[bytes] | None:
        """The lines after an id; None where they are not kept, or the id is another leader's."""
        epoch, _, text = after.partition(":")
        if epoch != str(self._epoch) or not text.isdecimal() or len(text) > 18:
            return None
        sequence = int(text)
        oldest = self._kept[0][0] if self._kept else self._sequence + 1
        if not self._listeners or not oldest - 1 <= sequence <= self._sequence:
            return None
        return [line for number, line in self._kept if number > sequence]

    def _all_lag(self) -> None:
        for listener in self._listeners:
            listener.lag()


_SAID: dict[type, str] = {Prepared: "prepared", Switched: "swapped", StayedOnPlan: "kept"}


# -- in the viewers' thread --------------------------------------------------------------------------------


def _some(lines: Iterator[bytes]) -> bytes:
    """Some of the lines of a hello, so that the loop gets its turn between them."""
    batch, size = [], 0
    for line in lines:
        batch.append(line)
        size += len(line)
        if size >= 64 << 10:
            break
    return b"".join(batch)


def hello(known: FeedSource, last: str) -> Iterator[bytes]:
    """All that is known, as lines. They have the id of the last line before them."""
    state = known.state
    first = live.LiveHello(
        id=last,
        cluster=known.cluster,
        leader=known.leader,
        release=__version__,
        at=known.now,
        chaos=known.chaos,
        newest_event=known.newest_event,
        store=known.store,
        detect=state.settings.detect,
    )
    yield _line(first)
    for news in _changes(known, _Told(), lambda: last):
        yield _line(news)
    yield _line(_pulse(known, last))
    yield _line(live.Whole(id=last))


def _line(news: live.News) -> bytes:
    return _encode(news) + b"\n"


def _made(
    known: FeedSource,
    noted: _Noted,
    measured: Mapping[str, Mapping[str, Measurement]],
    told: _Told,
    epoch: int,
    sequence: int,
    pulse: bool,
) -> tuple[list[bytes], float]:
    """The lines of a round, and the seconds that what devices measured took of it."""

    if told.base is not None:
        deque(_changes(told.base, told, str), maxlen=0)
        told.base = None

    def next_id() -> str:
        nonlocal sequence
        sequence += 1
        return f"{epoch}:{sequence}"

    lines = [_line(news) for news in _changes(known, told, next_id, restarts=pulse)]
    for event in noted.events:
        lines.append(_line(live.append(next_id(), "event", event.job, event)))
    for name, step in noted.steps:
        lines.append(_line(live.append(next_id(), "step", name, step)))
    for (name, number), ranks in _by_switch(noted.progress).items():
        progress = live.SwitchProgress(number=number, ranks=tuple(ranks))
        lines.append(_line(live.append(next_id(), "progress", name, progress)))
    began = time.thread_time()
    for name, by_device in measured.items():
        job = known.state.jobs.get(name)
        if job is not None and job.plan is not None:
            value = measurements(job, job.plan, by_device)
            lines += [_line(live.append(next_id(), "measured", name, value))] if value is not None else []
    spent = time.thread_time() - began
    if pulse:
        lines.append(_line(_pulse(known, next_id())))
    return lines, spent


def _by_switch(
    progress: list[tuple[str, int, live.RankNews]],
) -> dict[tuple[str, int], list[live.RankNews]]:
    by_switch: dict[tuple[str, int], list[live.RankNews]] = {}
    for job, number, rank in progress:
        by_switch.setdefault((job, number), []).append(rank)
    return by_switch


def _pulse(known: FeedSource, number: str) -> live.LeaderPulse:
    return live.LeaderPulse(
        id=number,
        at=known.now,
        store_away=known.store_away,
        paused=known.state.settings.policy.paused,
        unwritten_seconds=known.unwritten_seconds,
    )


def _changes(
    known: FeedSource, told: _Told, next_id: Callable[[], str], *, restarts: bool = True
) -> Iterator[live.News]:
    """The news that differs from the news published last; it is published then. restarts: also jobs in restart
    mode, which change with each report of a device."""
    state = known.state
    if known.settings != told.settings:
        told.settings = known.settings
        settings = live.LiveSettings(settings=known.settings, detect=state.settings.detect)
        yield live.put(next_id(), "settings", "", settings)
    yield from _of_nodes(state, told, next_id)
    yield from _of_rates(state, told, next_id)
    for name, job in sorted(state.jobs.items()):
        yield from _of_job(known, job, told.jobs.get(name), told, next_id)
    for name in told.jobs.keys() - state.jobs.keys():
        told.halts.pop(name, None)
        told.live_jobs.pop(name, None)
        told.newest.pop(name, None)
        yield live.Drop(id=next_id(), kind="job", key=name)
    told.jobs = dict(state.jobs)
    if state.links is not told.links:
        told.links = state.links
        yield live.put(next_id(), "links", "", status.links(state))
    if restarts and [*map(id, known.restarts)] != [*map(id, told.restarts)]:
        told.restarts = known.restarts
        yield live.put(next_id(), "restarts", "", _restarting(known))


def _restarting(known: FeedSource) -> tuple[live.RestartingJob, ...]:
    return tuple(
        live.RestartingJob(
            job=job.job,
            round=job.round,
            step=job.step,
            step_seconds=job.step_seconds,
            heard=known.now - job.silent_seconds,
            devices=job.devices,
            out=job.out,
            phase=job.phase,
            nodes=job.nodes,
            members=job.members,
            ran_on=job.ran_on,
            workers=job.workers,
            restarts=job.restarts,
            sentence=job.sentence,
            failure=job.failure,
        )
        for job in status.restarting(known.restarts, known.clock)
    )


def _of_nodes(state: CoordinatorState, told: _Told, next_id: Callable[[], str]) -> Iterator[live.News]:
    members = status.members(state) if _plans(state.jobs) != _plans(told.jobs) else told.members
    if state.nodes is told.nodes and members is told.members:
        return
    anew = [
        node
        for name, node in sorted(state.nodes.items())
        if _said_anew(told.nodes.get(name), node) or members[name] != told.members[name]
    ]
    devices = {device.name for node in anew for device in node.record.devices}
    rates, slow = (state.slowdowns, status.slowness(state, devices)) if anew else ({}, {})
    for node in anew:
        shown = status.node_status(node, rates, slow, members[node.record.node])
        yield live.put(next_id(), "node", shown.node, msgspec.structs.replace(shown, health=None))
    for name, node in state.nodes.items():
        before = told.nodes.get(name)
        if node.health is not None and (before is None or node.health is not before.health):
            yield live.put(next_id(), "health", name, node.health)
    for name in told.nodes.keys() - state.nodes.keys():
        yield live.Drop(id=next_id(), kind="node", key=name)
    told.nodes, told.members = state.nodes, members


def _plans(jobs: Mapping[str, JobState]) -> dict[str, tuple[int, int, object]]:
    return {name: _plan_of(job) for name, job in jobs.items()}


def _plan_of(job: JobState) -> tuple[int, int, object]:
    return job.number, job.proposal.number if job.proposal is not None else 0, job.phase


def _said_anew(before: NodeState | None, node: NodeState) -> bool:
    if before is None or before is node:
        return before is None
    return (
        before.record != node.record
        or before.connected != node.connected
        or before.paces != node.paces
        or before.drain_asked != node.drain_asked
    )


def _of_rates(state: CoordinatorState, told: _Told, next_id: Callable[[], str]) -> Iterator[live.News]:
    """Devices whose slowdown changed, and all whose kind of slowness may have: those that were ever slow, when
    one of them changes."""
    if all(_same_rates(job, told.jobs.get(name)) for name, job in state.jobs.items()):
        return
    rates = state.slowdowns
    changed = {device for device in {*rates, *told.rates} if rates.get(device) != told.rates.get(device)}
    told.rates = rates
    if changed:
        slow = status.slowness(state, changed)
        value = live.Slowdowns(
            rates={device: rates.get(device, 1.0) for device in sorted(changed)},
            slowness={device: slow[device] for device in sorted(slow)},
        )
        yield live.append(next_id(), "slowdowns", "", value)


def _same_rates(job: JobState, before: JobState | None) -> bool:
    over = job.phase in OVER
    return (
        before is not None and before.detection.rates is job.detection.rates and (before.phase in OVER) == over
    )


def _of_job(
    known: FeedSource, job: JobState, before: JobState | None, told: _Told, next_id: Callable[[], str]
) -> Iterator[live.News]:
    time, speed = known.times.get(job.job), known.speeds.get(job.job)
    newest = speed.newest if speed is not None else None
    anew = before is not job or newest is not told.newest.get(job.job)
    if not anew and (job.phase in OVER or not _due(job, known.at)):
        return
    told.newest[job.job] = newest
    limit = known.state.settings.detect.outside_seconds
    value = live.LiveJob(
        job=status.job_status(job, known.at, limit, speed, waits=_due(job, known.at), brief=True),
        plan=job.number,
        over=job.phase in OVER,
        time=time,
        checkpoints=tuple(one for one in job.checkpoints.published if not is_dead(job, one))[-16:],
    )
    if value != told.live_jobs.get(job.job):
        told.live_jobs[job.job] = value
        yield live.put(next_id(), "job", job.job, value)
    for kind, plan, last in (
        ("plan", job.plan, before and before.plan),
        ("proposed", _proposed(job), before and _proposed(before)),
    ):
        if plan is None and last is not None:
            yield live.Drop(id=next_id(), kind=kind, key=job.job)
        elif plan is not last:
            yield live.put(next_id(), kind, job.job, plan)
    if before is None or before.workers is not job.workers:
        members = status.member_list(job)
        if before is None or members != status.member_list(before):
            yield live.put(next_id(), "members", job.job, members)
        halts = {device: worker.halted for device, worker in job.workers.items() if worker.halted is not None}
        if halts != told.halts.get(job.job, {}):
            told.halts[job.job] = halts
            yield live.put(next_id(), "halts", job.job, halts)
    rows = job.learned.expert_rows.mean
    if rows and (before is None or before.learned.expert_rows.mean is not rows):
        yield live.put(next_id(), "experts", job.job, rows)


def _proposed(job: JobState) -> JobPlan | None:
    return job.proposal.plan if job.proposal is not None else None


def _due(job: JobState, at: float) -> bool:
    """Returns True if its status may change by time alone: nothing came for a while."""
    return at - job.steps.progress.at > 1.0


def measurements(job: JobState, plan: JobPlan, found: Mapping[str, Measurement]) -> live.MeasuredStep | None:
    """The measurements of members, in columns."""
    number = plan.number
    measured = [*map(found.get, plan.members)]
    taken = [each if each is not None and each.plan == number else None for each in measured]
    step = max((each.step for each in taken if each is not None), default=None)
    if step is None:
        return None
    table = b"".join([_NOTHING if each is None else _packed(*_measured(each)) for each in taken])
    width = len(live.MEASURED)
    columns = [np.frombuffer(table, "<f4").reshape(-1, width), _judged(job, plan.members)]
    names: tuple[str, ...] = live.COLUMNS
    for module in plan.modules if isinstance(plan, Plan) else ():
        if module.items:
            columns.append(_of_items(module.module, taken))
            names = (*names, *(f"{module.module}/{name}" for name in live.OF_ITEMS))
    if isinstance(plan, Plan):
        first = {lane.stages[0].devices[0] for lane in plan.loss_view.by_lane}
    else:
        first = {lane[0] for lane in plan.lanes}
    readers = [found.get(device) for device in first]
    in_step = [each for each in readers if each is not None and (each.plan, each.step) == (number, step)]
    if len(in_step) < len(readers):  # of a part of the step's sequences nothing is said
        in_step = []
    lengths: Counter[int] = Counter()
    for each in in_step:
        lengths.update(each.lengths)
    return live.MeasuredStep(
        plan=number,
        step=step,
        numbers=np.concatenate(columns, axis=1).astype("<f4").tobytes(),
        columns=names,
        lengths=dict(sorted(lengths.items())),
        sequence_tokens=sum(each.sequence_tokens for each in in_step),
        shortest=min((each.shortest for each in in_step if each.shortest), default=0),
        longest=max((each.longest for each in in_step), default=0),
    )


def _of_items(module: str, taken: Sequence[Measurement | None]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Measurements of each member in a module of items [members, `OF_ITEMS`]; NaN: it has no place there."""
    table = np.full((len(taken), len(live.OF_ITEMS)), np.nan, dtype=np.float32)
    for place, each in enumerate(taken):
        if each is not None and (own := each.modules.get(module)) is not None:
            table[place] = _items_measured(own)
    return table


def _judged(job: JobState, members: tuple[str, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Detection's result for each member's last step [members, 2]: slowdown and evidence."""
    settings = job.detection.rates
    devices = settings.devices
    judged = np.full((len(members), 2), np.nan, dtype=np.float32)
    if isinstance(devices, Devices) and devices.names[: len(members)] == members:
        table = devices.table[:, : len(members)]
        if len(table) > RESIDUALS:
            known = table[COUNT] > 0
            judged[known, 0] = np.exp(table[-1, known])
        judged[:, 1] = table[UP][0]
        return judged
    for place, device in enumerate(members):
        if (one := devices.get(device)) is not None and one.residuals:
            judged[place] = math.exp(one.residuals[-1]), one.cusum_up.total
    return judged
