"""IO around the coordinator's machine while it leads: events in, effects out, both in order."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, get_args

import msgspec

from elasticd.codec.decoding import shown, tag_of
from elasticd.config.tree import ConfigError
from elasticd.coordinator import status
from elasticd.coordinator.api_types import CHAOS_OFF, ApiError, LeaderStatus, Settings, unknown
from elasticd.coordinator.bootstrap_store import BootstrapRoom, BootstrapStore
from elasticd.coordinator.connections import Connection, Connections
from elasticd.coordinator.events.event_log import EventLog, Lines
from elasticd.coordinator.events.event_pages import MOST_EVENTS, MOST_STEPS, Paged, Pages
from elasticd.coordinator.events.trusted_time import ReadTimes
from elasticd.coordinator.fair_queue import FairQueue
from elasticd.coordinator.live_config import ConfigChanges, Scalar
from elasticd.coordinator.live_feed import FeedSource, LiveFeed
from elasticd.coordinator.metrics import LeaderMetrics, LeaderReading
from elasticd.coordinator.pages_shown import PagesShown
from elasticd.coordinator.planner_process import COMMAND, Planning
from elasticd.coordinator.recorders import Recorders
from elasticd.coordinator.store_transactions import Asked, LeadershipProbe, NodeDrain, Rank, RendezvousSweep
from elasticd.coordinator.store_writer import NotWritten, Writer
from elasticd.coordinator.worker_output import WorkerOutputs
from elasticd.machines.coordinator import absent_nodes, finished_jobs, machine, message_checks, restart_jobs
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job import adoption
from elasticd.machines.job.copies import checkpoints
from elasticd.machines.job.lifecycle import stop_request
from elasticd.machines.job.state.events import (
    AdoptAsked,
    AgentDown,
    AgentUp,
    CancelPlan,
    CheckpointAsked,
    CoordinatorNote,
    CoordinatorSend,
    CoordinatorTick,
    Effect,
    Event,
    ForgetAsked,
    ForgetNodeAsked,
    Log,
    NodeDrained,
    Paced,
    Received,
    RequestPlan,
    StopAsked,
    Unwritten,
    Write,
)
from elasticd.machines.job.state.job_state import OVER, JobState, NodeState
from elasticd.records import ConfigRecord, DoneRecord, Proposal, RestartEndRecord, StopRecord
from elasticd.store.write_allowance import Allowance
from elasticd.wire.coordinator import (
    AgentHello,
    FromClient,
    OfJob,
    ToClient,
    ToLeader,
    ToMachine,
    Unread,
    is_first,
)
from elasticd.wire.launch import FOLLOWED, MOST_FOLLOWED, FollowJob, Happened, OutputPart
from elasticd.wire.rendezvous import Join, StepTime, TorchrunState
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
#: Seconds between looks at whether the journal has something new; how many looks until steps alone are written.
PAGE_SECONDS, STEPS_SELDOM = 1.0, 5
#: Seconds that a user waits for etcd to take what he changed.
WRITE_SECONDS = 5.0
#: Seconds that a write may take until the status says that what it shows is not in etcd.
UNWRITTEN_SECONDS = 1.0
UNCHANGED = "nothing was changed; try again when it is back"
#: Bytes of all bootstrap stores together.
MOST_STORED_BYTES = 1 << 30
#: Jobs in restart mode whose laps are judged; beyond them the one that was silent longest is forgotten.
MOST_RESTARTS = 1000
#: Jobs in restart mode whose rounds are cleared away once their time is up; seconds between looks at them, and
#: since the last lap until a user may have one forgotten.
MOST_ROUNDS = 10_000
LOOK_SECONDS = 60.0
LAP_SECONDS = 60.0
#: Kinds of messages, by node, of which the log tells that they are not heard.
MOST_TOLD = 256
#: What the machine hears. A tuple: a union would be made anew for each of thousands of reports a second.
MACHINES = (*get_args(ToMachine), Unread)
#: Of these a word about a job may lead to something that is written.
CAUSES = (*get_args(OfJob), Unread)
#: By which a rank tells how far it is in a switch.
FAR = (Prepared, Switched, StayedOnPlan)
#: Calls that need no bootstrap store where there is none: nothing is in it.
EMPTY_WITHOUT = ("check", "delete")
#: How the keys begin by which torchruns tell each other their ranks (elasticd.rendezvous.live_mode).
RANKS = "rdzv/"
#: Bytes of one such value, and of all that the torchruns of a node have written to etcd: at once, and a second.
LARGEST_RANK, RANKS_AT_ONCE, RANKS_A_SECOND = 16 << 10, 4 << 20, 4 << 10
#: Bytes that are written to etcd for what a node said, records and events: at once, and a second. A node beyond
#: that is heard again once this much time has passed. A plan of 8,000 devices takes 0.2 MiB.
WRITES_AT_ONCE, WRITES_A_SECOND = 32 << 20, 64 << 10

_log = logging.getLogger(__name__)
T = TypeVar("T")


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
        self.state = state
        self.journal = EventLog(term=state.epoch)
        self.metrics = LeaderMetrics(cluster)
        self.connections = Connections()
        self.outputs = WorkerOutputs(self.connections)
        self.pages_shown = PagesShown()
        self.turns = FairQueue()
        self.decoding = ThreadPoolExecutor(1, thread_name_prefix="decode")  # of large frames of agents
        self._changing = asyncio.Lock()
        #: Whether the store does not answer, as the keeper of the lease finds out while nothing is written.
        self.lease_fails: Callable[[], bool] = lambda: False
        self.recorders = Recorders()
        self.feed = LiveFeed(state.epoch)
        self.planning = Planning(self.apply, command=planner)
        self.writer: Writer | None = None
        self._pages: Pages | None = None
        self.chaos = chaos
        self._failed = failed
        self._clock, self._wall = clock, wall
        self._times = times or ReadTimes.of(wall(), ())
        self._room = BootstrapRoom(MOST_STORED_BYTES)
        self._stores: dict[str, BootstrapStore] = {}
        self._away_since = self._away_seconds = 0.0
        self.restarts: dict[str, restart_jobs.RestartJob] = {}
        self._rounds: dict[str, float] = {}  # of jobs in restart mode: since when none of them was heard of
        self._began, self._look_at = clock(), 0.0
        self._turned_away: set[tuple[str, str]] = set()
        self._allowances: dict[str, Allowance] = {}
        self._causes: dict[str, str] = {}  # by job: the node that said the last word of it
        self._writes: dict[str, Allowance] = {}  # by node
        self.changes = ConfigChanges(detect=state.settings.detect, policy=state.settings.policy)
        self._settings_of, self._settings = self.changes, self.changes.shown()

    def apply(self, event: Event) -> None:
        """One step of the machine, and its effects. A message that it fails on is dropped: nothing has changed
        then. Any other error ends this leader rather than go on with a state that nobody decided."""
        before, now = self.state, self.now()
        try:
            self.state, effects = machine.step(before, event, now)
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
            for effect in effects:
                self._execute(effect)
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
            self._clear_rounds()
            self._end_due()
            spent = time.monotonic() - began

    def keep(self, pages: Pages, kept: Iterable[Lines]) -> None:
        """The journal goes on from what earlier leaders `kept`, and is kept in its turn."""
        for lines in kept:
            self.journal.restore(lines)
        self.journal.forget(*self.journal.jobs - self.state.jobs.keys())
        self._pages = pages

    async def keeping(self) -> None:
        """Writes down what is new in the journal: events soon, steps alone less often."""
        rounds = 0
        while True:
            await asyncio.sleep(PAGE_SECONDS)
            rounds += 1
            if self.journal.new_events or rounds >= STEPS_SELDOM:
                rounds = 0
                self.page()

    def page(self) -> None:
        """Writes a page of the journal's new lines. It waits while something else is written: no decision is to
        wait for it."""
        if self._pages is None or self.writer is None or self.writer.busy:
            return
        lines = self.journal.new(MOST_EVENTS, MOST_STEPS)
        if lines is not None:
            stamp, led = self._stamp_now()
            lines = msgspec.structs.replace(lines, stamp=stamp, led=led)
            self.writer.put(self._pages.written(lines))

    def _stamp_now(self) -> tuple[float, float]:
        """Unix seconds by a clock that nobody sets, and that goes on from leader to leader; and the seconds for
        which leaders led, in all."""
        seconds = self._clock() - self._began
        return self._times.stamp + seconds, self._times.led + seconds

    def _reported(self, up: FromClient, report: Report) -> None:
        """Only a worker of the job makes its steps."""
        job = up.job
        known = self.state.jobs.get(job)
        if known is None or known.worker(up.device, up.incarnation) is None:
            return
        gain = self.journal.report(job, report, self._wall(), up.incarnation)
        if self.feed:
            self.feed.measured(job, report.measurement)
            if report.loss is not None or report.tokens is not None:
                newest = self.journal.newest(job)
                if newest is not None:
                    self.feed.stepped(job, newest)
        if gain is not None:
            number = report.measurement.plan
            text = f"plan {number} gained: {gain.words}"
            data = {"number": number, "before": gain.before, "after": gain.after, "pause": gain.pause}
            self.tell(CoordinatorNote(kind="gained", job=job, text=text, data=data))

    def _finished(self, up: FromClient, said: Finished) -> None:
        """The last step, where rank 0's report of it has not come."""
        known = self.state.jobs.get(up.job)
        if known is None or known.worker(up.device, up.incarnation) is None:
            return
        step = self.journal.finished(up.job, said, self._wall())
        if step is not None and self.feed:
            self.feed.stepped(up.job, step)

    def tell(self, note: CoordinatorNote) -> None:
        """Into the journal, which is written to etcd, and the log."""
        if self.journal.repeats(note):
            return
        event = self.journal.tell(note, self._wall())
        if note.job and note.kind in FOLLOWED:
            data = {**note.data, "page": self.pages_shown.of(note.job)}
            self.connections.happened(Happened(job=note.job, kind=note.kind, text=note.text, data=data))
        if self.feed:
            self.feed.told(event)
        size = len(note.text) + sum(len(value) for value in note.data.values() if isinstance(value, str))
        if note.job:
            self.wrote(note.job, size)
        elif note.data.get("node") in self.state.nodes:
            self._allowance(note.data["node"]).spend(size, self._clock())
        self.metrics.event(note.kind)
        named = ("node", "plan", "step", "device")
        about: dict[str, object] = {name: note.data[name] for name in named if name in note.data}
        if "number" in note.data:  # of a plan
            about["plan"] = note.data["number"]
        _log.info(
            *("%s%s", f"job {note.job}: " if note.job else "", note.text),
            extra={"kind": note.kind, "job": note.job or None, **about},
        )

    def _execute(self, effect: Effect) -> None:
        if isinstance(effect, CoordinatorNote):
            self.tell(effect)
        elif isinstance(effect, Log):
            _log.warning("job %s: %s", effect.job, effect.text)
        elif isinstance(effect, CoordinatorSend):
            self.connections.send(effect.node, effect.message)
        elif isinstance(effect, Write):
            self._put(_dated(effect, *self._stamp_now()))
            self._drop_keys(effect)
            if effect.forget:
                self._forget(effect.job)
        elif isinstance(effect, RequestPlan):
            self.planning.request(effect.job, effect.token, effect.problem)
        elif isinstance(effect, CancelPlan):
            self.planning.cancel(effect.job)

    def unwritten(self, asked: Asked, error: Exception) -> None:
        """The store does not take what was to be written: that is the failure of the job whose it was."""
        _log.error("not written: %s: %s", _named(asked), error)
        if isinstance(asked, Paged) and self._pages is not None:
            self._pages.refused()
        if isinstance(asked, Write):
            records = tuple(tag_of(record) for record in asked.records)
            self.apply(Unwritten(job=asked.job, records=records, reason=str(error)))

    def _drop_keys(self, write: Write) -> None:
        """A new proposal needs the keys of no plan before the running one, a job that is over none."""
        for record in write.records:
            if isinstance(record, DoneRecord):
                self._drop_store(write.job)
                self._put(Rank(job=write.job))
            elif isinstance(record, Proposal) and record.old is not None and write.job in self._stores:
                self._stores[write.job].drop_before(record.old.number)

    def _drop_store(self, job: str) -> None:
        if (store := self._stores.pop(job, None)) is not None:
            store.close()

    def _forget(self, job: str) -> None:
        """Nothing of it is needed any more."""
        self._drop_store(job)
        self._causes.pop(job, None)
        self.journal.forget(job)

    def remember(self, ranks: Iterable[Rank]) -> None:
        """Takes over the ranks that torchruns reported to earlier leaders."""
        for rank in ranks:
            self._stores.setdefault(rank.job, BootstrapStore(self._room)).put(rank.key, rank.value)

    def remember_rounds(self, jobs: Iterable[str], ended: Mapping[str, RestartEndRecord]) -> None:
        """These jobs in restart mode were in the store when this leader took over, some of them `ended`."""
        for job in jobs:
            self._rounds.setdefault(job, self._clock())
        for job in sorted(ended, key=lambda name: ended[name].at)[-MOST_RESTARTS:]:
            self.restarts[job] = restart_jobs.restored(job, ended[job])

    def _clear_stores(self, now: float) -> None:
        """Drops what torchruns told of jobs that never began. A new leader keeps it until they are back."""
        if now - self._began < finished_jobs.EMPTY_SECONDS:
            return
        for job in self._stores.keys() - self.state.jobs.keys():
            self._drop_store(job)
            self._put(Rank(job=job))

    def _clear_rounds(self) -> None:
        """Drops stores of jobs that never began. Has the rounds deleted of jobs in restart mode whose torchruns
        are gone, and that were not heard of for as long as a job that is over is kept."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        self._clear_stores(now)
        for job, since in list(self._rounds.items()):
            if now - since >= self.state.settings.keep_seconds:
                self._rounds[job] = now  # torchruns that are there, and report no laps, may keep it
                self._forget_rounds(job)
        known = self.state.jobs.keys() | self.restarts.keys()
        self._causes = {job: node for job, node in self._causes.items() if job in known}
        while len(self._rounds) > MOST_ROUNDS:
            del self._rounds[min(self._rounds, key=self._rounds.__getitem__)]

    def _forget_rounds(self, job: str) -> None:
        self.restarts.pop(job, None)
        self._put(RendezvousSweep(job=job))

    def _keep_drains(self, before: Mapping[str, bool]) -> None:
        """Has the wishes to drain nodes written that are not as before."""
        after = self.state.drains
        for node in sorted(before.keys() | after.keys()):
            if before.get(node) != after.get(node):
                self._put(NodeDrain(node=node, on=after.get(node)))

    def _put(self, asked: Asked) -> None:
        if self.writer is not None:
            self.writer.put(asked)

    def wrote(self, job: str, size: int) -> None:
        """So many bytes went to etcd for a job. They count for the node whose word was the last of it: what
        follows of a word may be decided a tick later."""
        if (node := self._causes.get(job)) is not None:
            self._allowance(node).spend(size, self._clock())

    def _allowance(self, node: str) -> Allowance:
        return self._writes.setdefault(node, Allowance(WRITES_AT_ONCE, WRITES_A_SECOND))

    def wait(self, node: str) -> float:
        """Seconds for which a node is not heard, as its words made this leader write too much; mostly 0."""
        seconds = self._allowance(node).wait(self._clock())
        if seconds and (node, "") not in self._turned_away and len(self._turned_away) < MOST_TOLD:
            self._turned_away.add((node, ""))
            text = "node %s is heard more slowly: what it says has more than %d bytes a second written to etcd"
            _log.warning(text, node, WRITES_A_SECOND)
        return seconds

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
        said = message.body if isinstance(message, FromClient) else message
        if not isinstance(said, StoreCall):  # which waits for others
            self.metrics.message(tag_of(said), time.monotonic() - began)

    async def _on_message(self, connection: Connection, message: ToLeader | Unread) -> None:
        if isinstance(message, OutputPart):
            self.outputs.heard(connection.node, message)
            return
        if why := message_checks.refusal(connection.record, message, self.state.jobs):
            self._turn_away(connection, message, why)
            return
        if isinstance(message, FromClient) and isinstance(message.body, StoreCall):
            call = message.body
            if why := message_checks.call_refusal(connection.record, message, self.state.jobs):
                self._turn_away(connection, message, why)
                return
            answer = await self._answered(connection.node, message.job, call)
            connection.send(ToClient(client=message.client, body=answer))
            return
        if (
            isinstance(message, FromClient)
            and isinstance(message.body, Join)
            and self._restarts_instead(message)
        ):
            why = f"job {message.job} runs in restart mode: start this part of it without --mode live"
            connection.send(ToClient(client=message.client, body=Rejected(reason=why, restart=True)))
            return
        if isinstance(message, Unread):
            self.metrics.refused("unreadable")
        if isinstance(message, MACHINES):
            if isinstance(message, FromClient) and isinstance(message.body, Report):
                self._reported(message, message.body)
            elif isinstance(message, FromClient) and isinstance(message.body, Finished):
                self._finished(message, message.body)
            elif isinstance(message, CAUSES) and message.job in self.state.jobs:
                self._causes[message.job] = connection.node
            if self.feed and isinstance(message, FromClient) and isinstance(message.body, FAR):
                self.feed.said(message.job, message.device, message.body)
            self.apply(Received(node=connection.node, message=message))
        elif isinstance(message, StepTime):
            self._lap(connection.node, message)
        elif isinstance(message, FollowJob) and len(connection.follows) < MOST_FOLLOWED:
            connection.follows.add(message.job)
        elif isinstance(message, TorchrunState):
            self._attended(connection.node, message)
        elif isinstance(message, AgentHello):  # its record has changed
            self.apply(_up(message))

    async def _answered(self, node: str, job: str, call: StoreCall) -> StoreAnswer:
        """Writes the ranks that a torchrun reports, too. Ranks that the store does not take are refused, so
        that nobody goes on as if they were there."""
        over = self.state.jobs[job].phase in OVER
        values = self._stores.get(job)
        if values is None:
            values = BootstrapStore(None if over else self._room)
            if call.op not in EMPTY_WITHOUT and not over:  # of a job that is over nothing is begun again
                self._stores[job] = values
        if call.op == "set" and call.key.startswith(RANKS) and self.writer is not None and not over:
            rank = Rank(job=job, key=call.key, value=call.value)
            why = values.refusal(call, node) or self.writer.refusal(rank) or self._too_much(node, call)
            if why:
                return StoreAnswer(id=call.id, error=f"set of {shown(call.key)}: {why}")
            self.writer.put(rank)
        return await values.call(call, node)

    def _too_much(self, node: str, call: StoreCall) -> str:
        """Why a node's torchruns may not have this written to etcd now, or nothing."""
        size = len(call.key) + len(call.value)
        if size > LARGEST_RANK:
            return f"{size} bytes: a torchrun tells of its ranks in at most {LARGEST_RANK}"
        allowance = self._allowances.setdefault(node, Allowance(RANKS_AT_ONCE, RANKS_A_SECOND))
        if not allowance.take(size, self._clock()):
            return (
                f"the torchruns of node {node} write more than {RANKS_A_SECOND} bytes a second of their ranks"
            )
        return ""

    def _foreign(self, node: str, message: msgspec.Struct, why: str) -> None:
        """A message that this node may not say."""
        self.metrics.refused("foreign")
        key = node, tag_of(message)
        if key not in self._turned_away and len(self._turned_away) < MOST_TOLD:
            self._turned_away.add(key)
            _log.warning("node %s: a message %r is not heard: %s", *key, why)

    def _turn_away(self, connection: Connection, message: ToLeader | Unread, why: str) -> None:
        """A message that this agent may not say. A client that waits for an answer gets one."""
        said = message.body if isinstance(message, FromClient) else message
        self._foreign(connection.node, said, why)
        if isinstance(message, FromClient) and isinstance(said, StoreCall):
            connection.send(ToClient(client=message.client, body=StoreAnswer(id=said.id, error=why)))
        elif isinstance(message, Unread) or (
            isinstance(message, FromClient) and isinstance(said, Hello | Join)
        ):
            connection.send(ToClient(client=message.client, body=Rejected(reason=why)))

    def _restarting(self, name: str) -> restart_jobs.RestartJob:
        """A job in restart mode, of which something is heard now."""
        job = self.restarts.get(name) or restart_jobs.RestartJob(job=name)
        if name not in self.restarts and len(self.restarts) >= MOST_RESTARTS:
            now = self._clock()
            known = self.restarts.values()
            del self.restarts[min(known, key=lambda other: (other.lives(now), other.heard)).job]
        self._rounds[name] = self._clock()
        return job

    def _restarts_instead(self, up: FromClient) -> bool:
        """Returns True if the job that a torchrun asks for in live mode runs in restart mode."""
        known = self.restarts.get(up.job)
        return up.job not in self.state.jobs and known is not None and known.lives(self._clock())

    def _attended(self, node: str, told: TorchrunState) -> None:
        """A torchrun in restart mode: nothing is decided by it. A job that trains under a plan has none."""
        live = self.state.jobs.get(told.job)
        if live is not None and live.plan is not None and live.phase not in OVER:
            self.metrics.refused("foreign")
            return
        job = self._restarting(told.job)
        if why := restart_jobs.state_refusal(job, node, told, self._clock()):
            self._foreign(node, told, why)
            return
        self._causes[told.job] = node
        self._goes_on(*restart_jobs.attended(job, node, told, self.state.epoch, self._clock()))

    def _lap(self, node: str, heard: StepTime) -> None:
        """Of a job in restart mode, whose rounds no leader makes."""
        job = self._restarting(heard.by.job)
        if why := restart_jobs.lap_refusal(job, node, heard):
            self._foreign(node, heard, why)
            return
        settings = self.state.settings
        try:
            job, effects = restart_jobs.lap(
                job, heard, settings.detect, settings.policy, self.state.epoch, self._clock()
            )
        except Exception:  # of this message alone
            _log.exception("the machine failed on %r", heard)
            self.metrics.refused("failed")
            return
        self.restarts[job.job], self._causes[job.job] = job, node
        for effect in effects:
            self._execute(effect)

    # -- users ---------------------------------------------------------------------------------------------

    def asked(self, by: str, what: str, *, action: str, job: str = "", **about: Any) -> None:
        """For the audit: a user had something changed."""
        data = {"by": by, "action": action, **about}
        self.tell(CoordinatorNote(kind="asked", job=job, text=f"{by} {what}", data=data))

    def allow_chaos(self) -> None:
        """Raises `ApiError` where the configuration has it off."""
        if not self.chaos:
            raise ApiError("forbidden", CHAOS_OFF)

    async def change(self, asked: Mapping[str, Any], by: str, audit: Callable[[], None]) -> None:
        """Changes detection and policy, one change after the other. Raises `ApiError`."""
        assert self.writer is not None
        async with self._changing:
            self._changes_by(asked, by)  # what cannot be is refused before anything is written
            await self.decide(lambda: self._changed(asked, by), audit)

    def _changes_by(self, asked: Mapping[str, Any], by: str) -> ConfigChanges:
        """The configuration with this change. Raises `ApiError`."""
        assert self.writer is not None
        try:
            changes = self.changes.changed(asked, self._wall(), by)
        except ConfigError as error:
            raise ApiError("invalid", str(error)) from error
        if why := self.writer.refusal(changes.history[-1]):
            raise ApiError("invalid", f"this change cannot be kept: {why}")
        return changes

    def _changed(self, asked: Mapping[str, Any], by: str) -> None:
        before, changes = (
            self.changes,
            self._changes_by(asked, by),
        )  # the file may have been read anew meanwhile
        self._put(changes.history[-1])
        self.follow(changes, _words(before.values, changes.values, by))

    @property
    def store_away(self) -> bool:
        """True while etcd does not answer."""
        return self.lease_fails() or (self.writer is not None and self.writer.away)

    @property
    def unwritten_seconds(self) -> float:
        """Seconds for which the oldest of what was decided waits for etcd; 0 up to `UNWRITTEN_SECONDS`."""
        seconds = self.writer.oldest_seconds if self.writer is not None else 0.0
        return seconds if seconds > UNWRITTEN_SECONDS else 0.0

    async def decide(self, decision: Callable[[], T], audit: Callable[[], None]) -> T:
        """Makes a user's decision, and returns what it returns once all that it has written is in the store.

        Before that it is found out whether this leader still leads, and etcd takes what it writes. `audit`
        tells who asked, once the decision was made.

        Raises `ApiError` "unavailable" where that is not so: nothing was decided then, unless etcd went away in
        the midst of it, which the text says.
        """
        assert self.writer is not None
        if self.store_away:
            why = self.writer.full or "etcd does not answer"
            raise ApiError("unavailable", f"{why}, and decisions are kept there: {UNCHANGED}")
        mark = self.writer.marked
        self.writer.put(LeadershipProbe())
        await self._durable(mark, UNCHANGED)
        mark, made = self.writer.marked, decision()
        audit()
        await self._durable(
            mark, "it is decided here, and kept only once etcd has taken it: look at the status"
        )
        return made

    async def _durable(self, mark: int, otherwise: str) -> None:
        assert self.writer is not None
        try:
            await asyncio.wait_for(self.writer.durable(mark), WRITE_SECONDS)
        except NotWritten as error:
            raise ApiError("unavailable", f"etcd did not take it ({error}): {otherwise}") from None
        except TimeoutError:
            why = self.writer.full or f"etcd does not answer for {WRITE_SECONDS:g} s"
            raise ApiError("unavailable", f"{why}: {otherwise}") from None

    def follow(self, changes: ConfigChanges, words: str) -> None:
        """Goes by these from now on."""
        self.changes = changes
        self.apply(changes.event(words))

    def drain(self, node: str, on: bool) -> None:
        """Lets the devices of a node be left, or used again. Raises `ApiError`."""
        self.connected(node, "start it, or wait for it")
        self.apply(NodeDrained(node=node, on=on))

    def connected(self, node: str, remedy: str) -> NodeState:
        """A node whose agent is connected. Raises `ApiError`, whose text ends with the `remedy`."""
        known = self.state.nodes.get(node)
        if known is None:
            raise unknown("node", node, self.state.nodes)
        if not known.connected:
            raise ApiError("conflict", f"the agent of node {node} cannot be reached: {remedy}")
        return known

    def stop(self, name: str, seconds: float, by: str) -> dict[str, str]:
        """Ends a job, whose workers have so many seconds for a last checkpoint. Returns the nodes whose workers
        will not hear of it, with the release of each one's agent. Raises `ApiError`."""
        job = self.state.jobs.get(name)
        if job is None and (restarting := self.restarts.get(name)) is not None:
            return self._stop_torchruns(restarting, seconds, by)
        if job is None:
            raise unknown("job", name, self.state.jobs)
        _not_over(job)
        if job.unadopted is not None and seconds > 0:
            why = f"job {name} is left alone, and cannot be told to make a last checkpoint: run 'elasticd adopt"
            raise ApiError(
                "conflict", f"{why} {name}' first, or end it without one by 'elasticd stop --now {name}'"
            )
        unheard = stop_request.unheard(job, self.state.nodes, seconds)
        self.apply(StopAsked(job=name, by=by, seconds=seconds))
        return unheard

    def _stop_torchruns(self, job: restart_jobs.RestartJob, seconds: float, by: str) -> dict[str, str]:
        now = self._clock()
        if job.over(now):
            raise ApiError("conflict", f"job {job.job} is {job.phase(now)} already")
        if not job.torchruns:
            why = f"no agent tells of the torchruns of job {job.job}, which is in restart mode: stop those"
            raise ApiError("conflict", why)
        job, effects = restart_jobs.stop_asked(job, by, seconds, now)
        self._goes_on(job, effects)
        nodes = {name: self.state.nodes[name].release for name in job.nodes if name in self.state.nodes}
        return {name: release for name, release in nodes.items() if is_first(release)}

    def _goes_on(self, job: restart_jobs.RestartJob, effects: restart_jobs.Effects) -> None:
        """A job in restart mode is so from now on."""
        self.restarts[job.job] = job
        for effect in effects:
            self._execute(effect)

    def _end_due(self) -> None:
        """Ends jobs in restart mode that were stopped, and whose time is up."""
        now = self._clock()
        for job in list(self.restarts.values()):
            if job.stop_at <= now:
                self._goes_on(*restart_jobs.stop_due(job, now))

    def checkpoint(self, name: str) -> None:
        """Has a job make a checkpoint at its next vote. Raises `ApiError`."""
        job = self.state.jobs.get(name)
        if job is None and name in self.restarts:
            raise ApiError("conflict", f"job {name} is in restart mode, and makes its checkpoints itself")
        if job is None:
            raise unknown("job", name, self.state.jobs)
        _not_over(job)
        if why := checkpoints.refusal(job):
            raise ApiError("conflict", why)
        self.apply(CheckpointAsked(job=name))

    def adopt(self, name: str, by: str) -> None:
        """Has the plan that a job's workers run written to etcd, which lacks it. Raises `ApiError`."""
        job = self.state.jobs.get(name)
        if job is None:
            raise unknown("job", name, self.state.jobs)
        if why := adoption.refusal(job):
            raise ApiError("conflict", why)
        self.apply(AdoptAsked(job=name, by=by))
        for node in {worker.node for worker in job.workers.values()}:
            self.connections.renew(node)  # what was not heard while the job was left alone is said again

    def forget(self, name: str, by: str) -> None:
        """Nothing of a job that is over is kept. Raises `ApiError`."""
        job = self.state.jobs.get(name)
        if job is None and name in self._rounds:
            last = self.restarts.get(name)
            now = self._clock()
            if last is not None and (last.lives(now) or now - last.heard < LAP_SECONDS):
                raise ApiError("conflict", f"job {name} is in restart mode, and runs: stop its torchruns first")
            self._forget_rounds(name)
            return
        if job is None:
            raise unknown("job", name, self.state.jobs)
        if why := finished_jobs.refusal(job, self.state.nodes):
            raise ApiError("conflict", why)
        self.apply(ForgetAsked(job=name, by=by))

    def forget_node(self, name: str, by: str) -> None:
        """A node that is away is shown no more, until it comes back. Raises `ApiError`."""
        node = self.state.nodes.get(name)
        if node is None:
            raise unknown("node", name, self.state.nodes)
        if node.connected:
            raise ApiError("conflict", f"the agent of node {name} is connected: stop it, and the node leaves")
        if jobs := absent_nodes.users(self.state.jobs, name):
            why = f"workers of {', '.join(jobs)} may train on at node {name}: stop them, or start its agent"
            raise ApiError("conflict", why)
        self.apply(ForgetNodeAsked(node=name, by=by))

    def know_device(self, device: str) -> None:
        """Raises `ApiError` where no node has it."""
        known = [known.name for node in self.state.nodes.values() for known in node.record.devices]
        if device not in known:
            raise unknown("device", device, known)

    def has_worker(self, device: str) -> bool:
        """Returns whether a job has a worker on a device that its agent knows: in restart mode one that calls
        `elasticd.watch()`."""
        workers = (job.workers.get(device) for job in self.state.jobs.values())
        if any(worker is not None and not worker.left for worker in workers):
            return True
        return any(device in job.laps for job in self.restarts.values())

    def restarting(self, device: str) -> str:
        """The job that holds a device in restart mode; empty where none does."""
        return next((name for name, job in self.restarts.items() if device in job.members(self.now())), "")

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
            times={name: found for name, clock in self.journal.clocks.items() if (found := clock.time)},
            speeds=self.journal.speeds,
            restarts=tuple(self.restarts.values()),
            clock=time.monotonic(),
            newest_event=self.journal.newest_id,
            store_away=self.store_away,
            unwritten_seconds=self.unwritten_seconds,
            chaos=self.chaos,
            at=self.now(),
            now=self._wall(),
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
            now=self._wall(),
            at=self.now(),
            listeners=len(self.feed),
            restarts=status.restarting(tuple(self.restarts.values()), self._clock()),
        )

    def pace(self, device: str, factor: float) -> None:
        """Chaos on a device's speed; raises `ApiError`."""
        if not math.isfinite(factor) or factor < 1:
            raise ApiError(
                "invalid", f"factor {factor} must be a finite number of at least 1 (1 is normal speed)"
            )
        self.know_device(device)
        self.apply(Paced(device=device, factor=factor))


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
    if isinstance(asked, Write):
        return f"{', '.join(map(tag_of, asked.records))} of job {shown(asked.job)}"
    if isinstance(asked, Rank):
        return f"{shown(asked.key)} of job {shown(asked.job)}"
    if isinstance(asked, Paged):
        return "a page of the journal"
    if isinstance(asked, NodeDrain):
        return f"the drain of node {shown(asked.node)}"
    if isinstance(asked, LeadershipProbe):
        return "the schema's record, as it is"
    return "a change of the configuration" if isinstance(asked, ConfigRecord) else f"job {shown(asked.job)}"


def _not_over(job: JobState) -> None:
    if job.phase in OVER:
        raise ApiError(
            "conflict", f"job {job.job} is {job.phase.value} already" + (job.reason and f": {job.reason}")
        )


def _words(before: Mapping[str, Scalar], after: Mapping[str, Scalar], by: str) -> str:
    told = [f"{key} = {value}" for key, value in sorted(after.items()) if before.get(key) != value]
    told += [f"{key} is the file's again" for key in sorted(before) if key not in after]
    return f"configuration changed by {by}: {', '.join(told)}"


def _up(hello: AgentHello) -> AgentUp:
    return AgentUp(record=hello.record, release=hello.release, version=hello.version, factors=hello.factors)
