"""IO around the coordinator's machine while it leads: events in, effects out, both in order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from elasticd.codec.decoding import shown, tag_of
from elasticd.coordinator import status
from elasticd.coordinator.bootstrap_stores import BootstrapStores
from elasticd.coordinator.connections import Connection, Connections
from elasticd.coordinator.events.event_log import EventLog
from elasticd.coordinator.events.event_pages import Paged
from elasticd.coordinator.fair_queue import FairQueue
from elasticd.coordinator.journal_pages import JournalPages
from elasticd.coordinator.live_config import ConfigChanges
from elasticd.coordinator.live_feed import FeedSource, LiveFeed
from elasticd.coordinator.metrics import LeaderMetrics, LeaderReading
from elasticd.coordinator.pages_shown import PagesShown
from elasticd.coordinator.planner_process import COMMAND, Planning
from elasticd.coordinator.recorders import Recorders
from elasticd.coordinator.restarting_jobs import RestartingJobs
from elasticd.coordinator.store_transactions import (
    Asked,
    LeadershipProbe,
    NodeDrain,
    Rank,
    RendezvousSweep,
    Sweep,
)
from elasticd.coordinator.store_writer import Writer
from elasticd.coordinator.worker_output import WorkerOutputs
from elasticd.coordinator.write_shares import WriteShares
from elasticd.machines.coordinator import finished_jobs, message_checks
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.coordinator.machine_runner import MachineRunner
from elasticd.machines.job.state.events import (
    AgentDown,
    AgentUp,
    CancelPlan,
    CoordinatorNote,
    CoordinatorSend,
    CoordinatorTick,
    Event,
    Log,
    Received,
    RequestPlan,
    Unwritten,
    Write,
)
from elasticd.machines.job.state.job_state import OVER
from elasticd.records import ConfigRecord, DoneRecord, RestartEndRecord, StopRecord
from elasticd.trusted_time import ReadTimes
from elasticd.wire.api_types import ApiError, LeaderStatus, Settings
from elasticd.wire.coordinator import (
    AgentHello,
    Crossed,
    FromClient,
    Frozen,
    OfJob,
    ToClient,
    ToLeader,
    ToMachine,
    Unreached,
    Unread,
    WorkerLost,
)
from elasticd.wire.launch import FOLLOWED, MOST_FOLLOWED, FollowJob, Happened, OutputPart
from elasticd.wire.main_thread import Halted
from elasticd.wire.node_health import Health
from elasticd.wire.rendezvous import Join, StepTime, TorchrunState
from elasticd.wire.snapshots import SnapshotInventory
from elasticd.wire.worker import (
    Finished,
    Hello,
    Prepared,
    Rejected,
    Report,
    StayedOnPlan,
    StoreAnswer,
    StoreCall,
    Switched,
)

#: Seconds between the looks at what has become due.
TICK_SECONDS = 0.1
#: For how many times as long as a look took the next one waits at least: with ten thousand devices it takes a
#: while.
TICK_SHARE = 10
#: Seconds that a write may take until the status says that what it shows is not in etcd.
UNWRITTEN_SECONDS = 1.0
#: Seconds between looks at what is not needed any more.
LOOK_SECONDS = 60.0
#: Kinds of messages, by node, of which the log tells that they are not heard.
MOST_TOLD = 256
#: By which a rank tells how far it is in a switch.
FAR = (Prepared, Switched, StayedOnPlan)
_log = logging.getLogger(__name__)


class Leader:
    """One leader's soft state and its hands. Everything runs on one event loop; nothing here blocks it."""

    def __init__(
        self,
        state: CoordinatorState,
        *,
        chaos: bool,
        cluster: str = "",
        failed: Callable[[Exception], None],
        planner: tuple[str, ...] = COMMAND,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        times: ReadTimes | None = None,
    ) -> None:
        """times: those by which it takes over; None: its clock, and no leader led before."""
        self.runner = MachineRunner(state, self)
        self.journal = EventLog(term=state.epoch)
        self.metrics = LeaderMetrics(cluster)
        self.connections = Connections()
        self.outputs = WorkerOutputs(self.connections)
        self.pages_shown = PagesShown()
        self.turns = FairQueue()
        self.decoding = ThreadPoolExecutor(1, thread_name_prefix="decode")  # of large frames of agents
        #: Whether the store does not answer, as the keeper of the lease finds out while nothing is written.
        self.lease_fails: Callable[[], bool] = lambda: False
        self.recorders = Recorders()
        self.feed = LiveFeed(state.epoch)
        self.planning = Planning(self.apply, command=planner)
        self.writer: Writer | None = None
        self.chaos = chaos
        self._failed = failed
        self._clock, self.wall = clock, wall
        times = times or ReadTimes.of(wall(), ())
        self.pages = JournalPages(self.journal, clock, times, lambda: self.writer)
        self.stores = BootstrapStores(clock, self.put, self._refusal)
        self.shares = WriteShares(clock)
        self.restarting = RestartingJobs(state.epoch, clock, self.shares.caused, self.runner.perform, self.put)
        self._away_since = self._away_seconds = self._look_at = 0.0
        self._turned_away: set[tuple[str, str]] = set()
        self.changes = ConfigChanges(detect=state.settings.detect, policy=state.settings.policy)
        self._settings_of, self._settings = self.changes, self.changes.shown()

    @property
    def state(self) -> CoordinatorState:
        """All that this leader knows of nodes and jobs."""
        return self.runner.state

    def apply(self, event: Event) -> None:
        """One step of the machine, and its effects. A message that it fails on is dropped: nothing has changed
        then. Any other error ends this leader rather than go on with a state that nobody decided."""
        before, now = self.state, self.now()
        try:
            effects = self.runner.step(event, now)
        except Exception as error:
            _log.exception("the machine failed on %r", event)
            if not isinstance(event, Received):
                self._failed(error)
            self.metrics.refused("failed")
            return
        try:
            if self.recorders:
                self.recorders.heard(event, effects, now, changed=self.state is not before)
            if self.state.drains is not before.drains:
                self._keep_drains(before.drains)
            self.runner.perform(effects)
        except Exception as error:
            _log.exception("what was decided on %r cannot be done", event)
            self._failed(error)

    def now(self) -> float:
        """The machine's clock, which stands still while the store is away: what was decided meanwhile is not
        written, nobody can answer it, and nobody is late."""
        now = self._clock()
        if self.writer is not None and self.writer.away:
            self._away_since = self._away_since or now
            return self._away_since - self._away_seconds
        if self._away_since:
            self._away_seconds += now - self._away_since
            self._away_since = 0.0
        return now - self._away_seconds

    async def ticks(self) -> None:
        """Has the machine look at what time asks for, until cancelled."""
        self.planning.warm()
        spent = 0.0
        while True:
            await asyncio.sleep(max(TICK_SECONDS, TICK_SHARE * spent))
            began = time.monotonic()
            self.apply(CoordinatorTick())
            self.clear()
            self.restarting.end_due()
            spent = time.monotonic() - began

    def _reported(self, up: FromClient, report: Report) -> None:
        """Only a worker of the job makes its steps."""
        job = up.job
        known = self.state.jobs.get(job)
        if known is None or known.worker(up.device, up.incarnation) is None:
            return
        gain = self.journal.report(job, report, self.wall(), up.incarnation)
        if self.feed:
            self.feed.measured(job, report.measurement)
            if report.loss is not None or report.tokens is not None:
                newest = self.journal.newest(job)
                if newest is not None:
                    self.feed.stepped(job, newest)
        if gain is not None:
            number = report.measurement.plan
            text = f"plan {number} {gain.about}: {gain.text}"
            data = {
                "number": number,
                "before": gain.before,
                "after": gain.after,
                "pause": gain.pause,
                "faulted": gain.faulted,
            }
            self.record(CoordinatorNote(kind="gained", job=job, text=text, data=data))

    def _finished(self, up: FromClient, said: Finished) -> None:
        """The last step, where rank 0's report of it has not come."""
        known = self.state.jobs.get(up.job)
        if known is None or known.worker(up.device, up.incarnation) is None:
            return
        step = self.journal.finished(up.job, said, self.wall())
        if step is not None and self.feed:
            self.feed.stepped(up.job, step)

    def record(self, note: CoordinatorNote) -> None:
        """Into the journal, which is written to etcd, and the log."""
        if self.journal.repeats(note):
            return
        event = self.journal.tell(note, self.wall())
        if note.job and note.kind in FOLLOWED:
            data = {**note.data, "page": self.pages_shown.of(note.job)}
            self.connections.happened(Happened(job=note.job, kind=note.kind, text=note.text, data=data))
        if self.feed:
            self.feed.told(event)
        size = len(note.text) + sum(len(value) for value in note.data.values() if isinstance(value, str))
        if note.job:
            self.shares.wrote(note.job, size)
        elif note.data.get("node") in self.state.nodes:
            self.shares.wrote_for(note.data["node"], size)
        self.metrics.event(note.kind)
        named = ("node", "plan", "step", "device")
        about: dict[str, object] = {name: note.data[name] for name in named if name in note.data}
        if "number" in note.data:  # of a plan
            about["plan"] = note.data["number"]
        _log.info(
            *("%s%s", f"job {note.job}: " if note.job else "", note.text),
            extra={"kind": note.kind, "job": note.job or None, **about},
        )

    # -- effects of the machine -----------------------------------------------------------------------------

    def log(self, line: Log) -> None:
        """Into the log alone."""
        _log.warning("job %s: %s", line.job, line.text)

    def send(self, message: CoordinatorSend) -> None:
        """To a node's agent, if it is connected."""
        self.connections.send(message.node, message.message)

    def write(self, write: Write) -> None:
        """Into the store, with the time of a job's end."""
        self.put(_dated(write, *self.pages.stamp()))
        self.stores.decided(write)
        if write.forget:
            self.stores.drop(write.job)
            self.shares.forget(write.job)
            self.journal.forget(write.job)

    def request_plan(self, request: RequestPlan) -> None:
        """Of the planner, in a process of its own."""
        self.planning.request(request.job, request.token, request.problem)

    def cancel_plan(self, request: CancelPlan) -> None:
        """Ends that process."""
        self.planning.cancel(request.job)

    # -- the store ------------------------------------------------------------------------------------------

    def put(self, asked: Asked) -> None:
        """Has something written to the store, after all that was put before."""
        if self.writer is not None:
            self.writer.put(asked)

    def _refusal(self, rank: Rank) -> str:
        """Why the store would not take this; empty: it would."""
        return self.writer.refusal(rank) if self.writer is not None else ""

    def unwritten(self, asked: Asked, error: Exception) -> None:
        """The store does not take what was to be written: that is the failure of the job whose it was."""
        _log.error("not written: %s: %s", _named(asked), error)
        if isinstance(asked, Paged):
            self.pages.refused()
        if isinstance(asked, Write):
            records = tuple(tag_of(record) for record in asked.records)
            self.apply(Unwritten(job=asked.job, records=records, reason=str(error)))

    def clear(self) -> None:
        """Once a minute drops the stores of jobs that never began, and the rounds of jobs in restart mode that
        are over."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        if self.pages.led_seconds >= finished_jobs.EMPTY_SECONDS:  # until then torchruns may come back
            self.stores.keep(self.state.jobs)
        self.restarting.clear(self.state.settings.keep_seconds)
        self.shares.keep(self.state.jobs.keys() | self.restarting.jobs.keys())

    def _keep_drains(self, before: Mapping[str, bool]) -> None:
        """Has the wishes to drain nodes written that are not as before."""
        after = self.state.drains
        for node in sorted(before.keys() | after.keys()):
            if before.get(node) != after.get(node):
                self.put(NodeDrain(node=node, on=after.get(node)))

    # -- agents --------------------------------------------------------------------------------------------

    def agent_up(self, hello: AgentHello) -> Connection:
        """An agent said hello: its connection, in place of one that it had before."""
        connection = self.connections.enter(hello.record)
        self.apply(_up(hello))
        return connection

    def agent_down(self, connection: Connection) -> None:
        """A connection ended."""
        if self.connections.leave(connection):
            self.apply(AgentDown(node=connection.node, left=connection.left))

    async def heard(self, connection: Connection, message: ToLeader | Unread) -> None:
        """One message of an agent; returns when it is dealt with, which may be long for a waiting `get`."""
        began = time.monotonic()
        await self._on_message(connection, message)
        body = message.body if isinstance(message, FromClient) else message
        if not isinstance(body, StoreCall):  # which waits for others
            self.metrics.message(tag_of(body), time.monotonic() - began)

    async def _on_message(self, connection: Connection, message: ToLeader | Unread) -> None:
        if isinstance(message, OutputPart):
            self.outputs.heard(connection.node, message)
        elif why := message_checks.refusal(connection.record, message, self.state.jobs):
            self._turn_away(connection, message, why)
        elif isinstance(message, FromClient) and isinstance(message.body, StoreCall):
            await self._on_store_call(connection, message, message.body)
        else:
            HANDLERS[type(message)](self, connection, message)

    async def _on_store_call(self, connection: Connection, up: FromClient, call: StoreCall) -> None:
        if why := message_checks.call_refusal(connection.record, up, self.state.jobs):
            self._turn_away(connection, up, why)
            return
        over = self.state.jobs[up.job].phase in OVER
        answer = await self.stores.call(connection.node, up.job, call, over=over)
        connection.send(ToClient(client=up.client, body=answer))

    def of_client(self, connection: Connection, up: FromClient) -> None:
        """A message of a worker or a torchrun."""
        if isinstance(up.body, Join) and self._restarts_instead(up):
            why = f"job {up.job} runs in restart mode: start this part of it without --mode live"
            connection.send(ToClient(client=up.client, body=Rejected(reason=why, restart=True)))
            return
        if isinstance(up.body, Report):
            self._reported(up, up.body)
        elif isinstance(up.body, Finished):
            self._finished(up, up.body)
        elif up.job in self.state.jobs:
            self.shares.caused(up.job, connection.node)
        if self.feed and isinstance(up.body, FAR):
            self.feed.said(up.job, up.device, up.body)
        self.to_machine(connection, up)

    def of_job(self, connection: Connection, message: OfJob | Unread) -> None:
        """A message about a job, which may lead to something that is written."""
        if isinstance(message, Unread):
            self.metrics.refused("unreadable")
        if message.job in self.state.jobs:
            self.shares.caused(message.job, connection.node)
        self.to_machine(connection, message)

    def to_machine(self, connection: Connection, message: ToMachine | Unread) -> None:
        """A message that the machine alone deals with."""
        self.apply(Received(node=connection.node, message=message))

    def hello_again(self, connection: Connection, hello: AgentHello) -> None:
        """The record of an agent has changed."""
        self.apply(_up(hello))

    def follow_job(self, connection: Connection, message: FollowJob) -> None:
        """An agent's launcher is to get the events of a job."""
        if len(connection.follows) < MOST_FOLLOWED:
            connection.follows.add(message.job)

    def _foreign(self, node: str, message: msgspec.Struct, why: str) -> None:
        """A message that this node may not say."""
        self.metrics.refused("foreign")
        key = node, tag_of(message)
        if key not in self._turned_away and len(self._turned_away) < MOST_TOLD:
            self._turned_away.add(key)
            _log.warning("node %s: a message %r is not heard: %s", *key, why)

    def _turn_away(self, connection: Connection, message: ToLeader | Unread, why: str) -> None:
        """A message that this agent may not say. A client that waits for an answer gets one."""
        body = message.body if isinstance(message, FromClient) else message
        self._foreign(connection.node, body, why)
        if isinstance(message, FromClient) and isinstance(body, StoreCall):
            connection.send(ToClient(client=message.client, body=StoreAnswer(id=body.id, error=why)))
        elif isinstance(message, Unread) or (
            isinstance(message, FromClient) and isinstance(body, Hello | Join)
        ):
            connection.send(ToClient(client=message.client, body=Rejected(reason=why)))

    def _restarts_instead(self, up: FromClient) -> bool:
        """Returns True if the job that a torchrun asks for in live mode runs in restart mode."""
        return up.job not in self.state.jobs and self.restarting.lives(up.job)

    def attended(self, connection: Connection, told: TorchrunState) -> None:
        """A torchrun in restart mode: nothing is decided by it. A job that trains under a plan has none."""
        live = self.state.jobs.get(told.job)
        if live is not None and live.plan is not None and live.phase not in OVER:
            self.metrics.refused("foreign")
            return
        if why := self.restarting.attended(connection.node, told):
            self._foreign(connection.node, told, why)

    def lap(self, connection: Connection, heard: StepTime) -> None:
        """Of a job in restart mode, whose rounds no leader makes."""
        settings = self.state.settings
        try:
            why = self.restarting.lap(connection.node, heard, settings.detect, settings.policy)
        except Exception:  # of this message alone
            _log.exception("the machine failed on %r", heard)
            self.metrics.refused("failed")
            return
        if why:
            self._foreign(connection.node, heard, why)

    # -- what is shown ---------------------------------------------------------------------------------------

    @property
    def store_away(self) -> bool:
        """True while etcd does not answer."""
        return self.lease_fails() or (self.writer is not None and self.writer.away)

    @property
    def unwritten_seconds(self) -> float:
        """Seconds for which the oldest of what was decided waits for etcd; 0 up to `UNWRITTEN_SECONDS`."""
        seconds = self.writer.oldest_seconds if self.writer is not None else 0.0
        return seconds if seconds > UNWRITTEN_SECONDS else 0.0

    def follow(self, changes: ConfigChanges, words: str) -> None:
        """Goes by these from now on."""
        self.changes = changes
        self.apply(changes.event(words))

    def recording(self) -> AsyncIterator[bytes]:
        """Lines of a recording from now on (`elasticd.recording`). Raises `ApiError` where too many record."""
        if self.recorders.full:
            raise ApiError(
                "unavailable", "as many record already as may at once: end one of them, or try again later"
            )
        return self.recorders.record(lambda: (self.state, self.now()))

    def listening(self, leader: LeaderStatus, cluster: str, store: str) -> FeedSource:
        """The source of a round of the live feed: this leader, whose etcd is `store`."""
        return FeedSource(
            state=self.state,
            cluster=cluster,
            store=store,
            leader=leader,
            settings=self._shown(),
            times={name: job_time for name, clock in self.journal.clocks.items() if (job_time := clock.time)},
            speeds=self.journal.speeds,
            restarts=self.restarting.listed(),
            clock=time.monotonic(),
            newest_event=self.journal.newest_id,
            store_away=self.store_away,
            unwritten_seconds=self.unwritten_seconds,
            chaos=self.chaos,
            at=self.now(),
            now=self.wall(),
        )

    def _shown(self) -> Settings:
        """The configuration as it is shown, made once for each change of it."""
        if self._settings_of is not self.changes:
            self._settings_of, self._settings = self.changes, self.changes.shown()
        return self._settings

    def exposition(self, reading: LeaderReading | None = None) -> bytes:
        """The body of `GET /metrics`; by a reading that the loop made, where this is called beside it."""
        return self.metrics.text(self.reading() if reading is None else reading)

    def reading(self) -> LeaderReading:
        """This leader's state, as metrics show it."""
        return LeaderReading(
            state=self.state,
            agents=len(self.connections),
            store_away=self.store_away,
            clocks=self.journal.readings,
            now=self.wall(),
            at=self.now(),
            listeners=len(self.feed),
            restarts=status.restarting(self.restarting.listed(), self._clock()),
        )


def _dated(write: Write, at: float, led: float) -> Write:
    """With the time in a record of a job's end, or of a wish for it, which the machine has no clock for."""

    records = list(write.records)
    for index, record in enumerate(records):
        if isinstance(record, StopRecord):
            records[index] = msgspec.structs.replace(record, at=at, led=led)
        elif isinstance(record, DoneRecord | RestartEndRecord):
            records[index] = msgspec.structs.replace(record, at=at)
    return msgspec.structs.replace(write, records=tuple(records))


def _named(asked: Asked) -> str:
    """The write's name, for the log."""
    return NAMES[type(asked)](asked)


#: The name of a write of each type, for the log.
NAMES: dict[type, Callable[[Any], str]] = {
    Write: lambda asked: f"{', '.join(map(tag_of, asked.records))} of job {shown(asked.job)}",
    Rank: lambda asked: f"{shown(asked.key)} of job {shown(asked.job)}",
    Paged: lambda asked: "a page of the journal",
    NodeDrain: lambda asked: f"the drain of node {shown(asked.node)}",
    LeadershipProbe: lambda asked: "the schema's record, as it is",
    ConfigRecord: lambda asked: "a change of the configuration",
    Sweep: lambda asked: f"job {shown(asked.job)}",
    RendezvousSweep: lambda asked: f"job {shown(asked.job)}",
}
#: What the leader does with a message of each type.
HANDLERS: dict[type, Callable[[Leader, Connection, Any], None]] = {
    FromClient: Leader.of_client,
    WorkerLost: Leader.of_job,
    Frozen: Leader.of_job,
    Unreached: Leader.of_job,
    Halted: Leader.of_job,
    Unread: Leader.of_job,
    Health: Leader.to_machine,
    Crossed: Leader.to_machine,
    SnapshotInventory: Leader.to_machine,
    AgentHello: Leader.hello_again,
    StepTime: Leader.lap,
    TorchrunState: Leader.attended,
    FollowJob: Leader.follow_job,
}


def _up(hello: AgentHello) -> AgentUp:
    return AgentUp(record=hello.record, release=hello.release, version=hello.version, factors=hello.factors)
