"""IO around the coordinator's machine while it leads: events in, effects out, both in order."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from elasticd.config import ConfigError
from elasticd.coordinator.changes import Changes, Scalar
from elasticd.coordinator.connections import Connection, Connections
from elasticd.coordinator.journal import Journal
from elasticd.coordinator.keyvalue import KeyValue
from elasticd.coordinator.ledger import Asked, Rank, Setting
from elasticd.coordinator.metrics import Metrics
from elasticd.coordinator.planning import COMMAND, Planning
from elasticd.coordinator.recorders import Recorders
from elasticd.coordinator.writer import Writer
from elasticd.decoding import shown, tag_of
from elasticd.health import OfNode
from elasticd.machines import coordinator, doors, restarts
from elasticd.machines.coordinator import State
from elasticd.machines.job.effects import (
    AgentDown,
    AgentUp,
    CancelPlan,
    Drained,
    Effect,
    Event,
    Note,
    Paced,
    Received,
    RequestPlan,
    Send,
    StopAsked,
    Tick,
    Unwritten,
    Write,
)
from elasticd.machines.job.state import OVER
from elasticd.messages import (
    AgentHello,
    Down,
    Hello,
    Join,
    Rejected,
    Report,
    StoreAnswer,
    StoreCall,
    ToLeader,
    Up,
    WorkerLost,
)
from elasticd.pulses import Frozen
from elasticd.records import DoneRecord, Proposal
from elasticd.rounds import Lapped
from elasticd.snapshots import Keeps
from elasticd.whereabouts import Halted

#: Seconds between the looks at what has become due.
TICK = 0.1
#: For how many times as long as a look took the next one waits at least: with ten thousand devices it takes a
#: while.
TICK_SHARE = 10
#: Seconds that a user waits for etcd to take what he changed.
WRITE_SECONDS = 5.0
#: Jobs that may have a bootstrap store at once.
MOST_STORES = 4096
#: Kinds of messages, by node, of which the log tells that they are not heard.
MOST_TOLD = 256
#: How the keys begin by which torchruns tell each other their ranks (elasticd.rendezvous.live).
RANKS = "rdzv/"

_log = logging.getLogger(__name__)


class Refused(Exception):
    """A request of a user that cannot be done: an HTTP status, and what would be right."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Leading:
    """One leader's soft state and its hands. Everything runs on one event loop; nothing here blocks it."""

    def __init__(
        self,
        state: State,
        *,
        chaos: bool,
        failed: Callable[[Exception], None],
        planner: tuple[str, ...] = COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self.journal = Journal()
        self.metrics = Metrics()
        self.connections = Connections()
        self.recorders = Recorders()
        self.planning = Planning(self.apply, command=planner)
        self.writer: Writer | None = None
        self.chaos = chaos
        self._failed = failed
        self._clock = clock
        self._stores: dict[str, KeyValue] = {}
        self._away_since = self._away_seconds = 0.0
        self.restarts: dict[str, restarts.RestartJob] = {}
        self._turned_away: set[tuple[str, str]] = set()
        self.changes = Changes(detect=state.settings.detect, policy=state.settings.policy)

    def apply(self, event: Event) -> None:
        """One step of the machine, and its effects. A message that it fails on is dropped: nothing has changed
        then. Any other error ends this leader rather than go on with a state that nobody decided."""
        before, now = self.state, self._now()
        try:
            self.state, effects = coordinator.step(before, event, now)
        except Exception as error:
            _log.exception("the machine failed on %r", event)
            if not isinstance(event, Received):
                self._failed(error)
            self.metrics.refused("failed")
            return
        try:
            if self.recorders:
                self.recorders.heard(event, effects, now, changed=self.state is not before)
            for effect in effects:
                self._execute(effect)
        except Exception as error:
            _log.exception("what was decided on %r cannot be done", event)
            self._failed(error)

    def _now(self) -> float:
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
        self.planning.warm()
        spent = 0.0
        while True:
            await asyncio.sleep(max(TICK, TICK_SHARE * spent))
            began = time.monotonic()
            self.apply(Tick())
            spent = time.monotonic() - began

    def tell(self, note: Note) -> None:
        """Into the journal and the log."""
        self.journal.tell(note, time.time())
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
        if isinstance(effect, Note):
            self.tell(effect)
        elif isinstance(effect, Send):
            self.connections.send(effect.node, effect.message)
        elif isinstance(effect, Write):
            if self.writer is not None:
                self.writer.put(effect)
            self._drop_keys(effect)
        elif isinstance(effect, RequestPlan):
            self.planning.request(effect.job, effect.token, effect.problem)
        elif isinstance(effect, CancelPlan):
            self.planning.cancel(effect.job)

    def unwritten(self, asked: Asked, error: Exception) -> None:
        """The store does not take what was to be written: that is the failure of the job whose it was."""
        _log.error("not written: %s: %s", _named(asked), error)
        if isinstance(asked, Write):
            records = tuple(tag_of(record) for record in asked.records)
            self.apply(Unwritten(job=asked.job, records=records, reason=str(error)))

    def _drop_keys(self, write: Write) -> None:
        """A new proposal needs the keys of no plan before the running one, a job that is over none."""
        for record in write.records:
            if isinstance(record, DoneRecord):
                self._stores.pop(write.job, None)
                if self.writer is not None:
                    self.writer.put(Rank(job=write.job))
            elif isinstance(record, Proposal) and record.old is not None and write.job in self._stores:
                self._stores[write.job].drop_before(record.old.number)

    def remember(self, ranks: Iterable[Rank]) -> None:
        """What torchruns told the leaders before."""
        for rank in ranks:
            self._stores.setdefault(rank.job, KeyValue()).put(rank.key, rank.value)

    # -- agents --------------------------------------------------------------------------------------------

    def agent_up(self, hello: AgentHello) -> Connection:
        connection = self.connections.enter(hello.record)
        self.apply(_up(hello))
        return connection

    def agent_down(self, connection: Connection) -> None:
        if self.connections.leave(connection):
            self.apply(AgentDown(node=connection.node))

    async def heard(self, connection: Connection, message: ToLeader) -> None:
        """One message of an agent; returns when it is dealt with, which may be long for a waiting `get`."""
        began = time.monotonic()
        await self._heard(connection, message)
        said = message.body if isinstance(message, Up) else message
        if not isinstance(said, StoreCall):  # which waits for others
            self.metrics.message(tag_of(said), time.monotonic() - began)

    async def _heard(self, connection: Connection, message: ToLeader) -> None:
        if why := doors.refusal(connection.node, message, self.state.jobs):
            self._turn_away(connection, message, why)
            return
        if isinstance(message, Up) and isinstance(message.body, StoreCall):
            call = message.body
            if message.job not in self._stores and len(self._stores) >= MOST_STORES:
                self._turn_away(connection, message, f"{MOST_STORES} jobs have a bootstrap store already")
                return
            answer = await self._answered(message.job, call)
            connection.send(Down(client=message.client, body=answer))
            return
        if isinstance(message, Up | WorkerLost | Frozen | Halted | OfNode | Keeps):
            if isinstance(message, Up) and isinstance(message.body, Report):
                self.journal.report(message.job, message.body, time.time())
            self.apply(Received(node=connection.node, message=message))
        elif isinstance(message, Lapped):
            self._lap(message)
        elif isinstance(message, AgentHello):  # its record has changed
            self.apply(_up(message))

    async def _answered(self, job: str, call: StoreCall) -> StoreAnswer:
        """What torchruns tell of their ranks is written, too. What the store would not take is refused: nobody
        is to go on as if it were there."""
        values = self._stores.setdefault(job, KeyValue())
        if call.op == "set" and call.key.startswith(RANKS) and self.writer is not None:
            rank = Rank(job=job, key=call.key, value=call.value)
            if why := values.refusal(call) or self.writer.refusal(rank):
                return StoreAnswer(id=call.id, error=f"set of {shown(call.key)}: {why}")
            self.writer.put(rank)
        return await values.call(call)

    def _turn_away(self, connection: Connection, message: ToLeader, why: str) -> None:
        """A message that this agent may not say. A client that waits for an answer gets one."""
        self.metrics.refused("foreign")
        said = message.body if isinstance(message, Up) else message
        key = connection.node, tag_of(said)
        if key not in self._turned_away and len(self._turned_away) < MOST_TOLD:
            self._turned_away.add(key)
            _log.warning("node %s: a message %r is not heard: %s", *key, why)
        if isinstance(message, Up) and isinstance(said, StoreCall):
            connection.send(Down(client=message.client, body=StoreAnswer(id=said.id, error=why)))
        elif isinstance(message, Up) and isinstance(said, Hello | Join):
            connection.send(Down(client=message.client, body=Rejected(reason=why)))

    def _lap(self, heard: Lapped) -> None:
        """Of a job in restart mode, whose rounds no leader makes."""
        job = self.restarts.get(heard.by.job) or restarts.RestartJob(job=heard.by.job)
        settings = self.state.settings
        job, effects = restarts.lap(
            job, heard, settings.detect, settings.policy, self.state.epoch, self._clock()
        )
        self.restarts[job.job] = job
        for effect in effects:
            self._execute(effect)

    # -- users ---------------------------------------------------------------------------------------------

    def allow_chaos(self) -> None:
        """Raises `Refused` where the configuration has it off."""
        if not self.chaos:
            raise Refused(
                403, "chaos is off: set enabled = true in section [chaos] of the coordinator's configuration"
            )

    async def change(self, asked: Mapping[str, Any], by: str) -> None:
        """Changes detection and policy: written first, then followed. Raises `Refused`."""
        assert self.writer is not None
        try:
            changes = self.changes.changed(asked, time.time(), by)
        except ConfigError as error:
            raise Refused(400, str(error)) from error
        if why := self.writer.refusal(Setting(record=changes.history[-1])):
            raise Refused(400, f"this change cannot be kept: {why}")
        if self.writer.away:
            raise Refused(503, "etcd does not answer, and a change is kept there: try again when it is back")
        before, self.changes = self.changes, changes
        self.writer.put(Setting(record=changes.history[-1]))
        try:
            await asyncio.wait_for(self.writer.drained(), WRITE_SECONDS)
        except TimeoutError:
            raise Refused(
                503, "etcd stopped answering meanwhile: the change holds now, and is kept once etcd is back"
            ) from None
        finally:
            self.follow(changes, _words(before.values, changes.values, by))

    def follow(self, changes: Changes, words: str) -> None:
        """Goes by these from now on."""
        self.changes = changes
        self.apply(changes.event(words))

    def drain(self, node: str, on: bool) -> None:
        """Lets the devices of a node be left, or used again. Raises `Refused`."""
        known = self.state.nodes.get(node)
        if known is None:
            names = ", ".join(sorted(self.state.nodes)) or "none"
            raise Refused(404, f"there is no node {node!r}; there are: {names}")
        if not known.connected:
            raise Refused(409, f"the agent of node {node} cannot be reached: start it, or wait for it")
        self.apply(Drained(node=node, on=on))

    def stop(self, name: str, seconds: float, by: str) -> None:
        """Ends a job, whose workers have so many seconds for a last checkpoint. Raises `Refused`."""
        job = self.state.jobs.get(name)
        if job is None and name in self.restarts:
            raise Refused(409, f"job {name} is in restart mode, and ends with its torchruns: stop those")
        if job is None:
            names = ", ".join(sorted(self.state.jobs)) or "none"
            raise Refused(404, f"there is no job {name!r}; there are: {names}")
        if job.phase in OVER:
            raise Refused(409, f"job {name} is {job.phase.value} already" + (job.reason and f": {job.reason}"))
        self.apply(StopAsked(job=name, by=by, seconds=seconds))

    def know_device(self, device: str) -> None:
        """Raises `Refused` where no node has it."""
        known = [known.name for node in self.state.nodes.values() for known in node.record.devices]
        if device not in known:
            raise Refused(
                404, f"there is no device {device!r}; there are: {', '.join(sorted(known)) or 'none'}"
            )

    def recording(self) -> AsyncIterator[bytes]:
        """Lines of a recording from now on (`elasticd.recording`). Raises `Refused` where too many record."""
        if self.recorders.full:
            raise Refused(503, "as many record already as may at once: end one of them, or try again later")
        return self.recorders.record(lambda: (self.state, self._now()))

    def exposition(self) -> bytes:
        """The body of `GET /metrics`."""
        away = self.writer is not None and self.writer.away
        return self.metrics.text(self.state, self.connections, away)

    def pace(self, action: str, device: str, factor: float) -> None:
        """Chaos on a device's speed; raises `Refused`."""
        self.allow_chaos()
        if action not in ("slow", "recover"):
            raise Refused(400, f"action {action!r} must be 'slow' or 'recover'")
        if action == "recover":
            factor = 1.0
        if not math.isfinite(factor) or factor < 1:
            raise Refused(400, f"factor {factor} must be a finite number of at least 1 (1 is normal speed)")
        self.know_device(device)
        self.apply(Paced(device=device, factor=factor))


def _named(asked: Asked) -> str:
    """What was to be written, for the log."""
    if isinstance(asked, Write):
        return f"{', '.join(map(tag_of, asked.records))} of job {shown(asked.job)}"
    if isinstance(asked, Rank):
        return f"{shown(asked.key)} of job {shown(asked.job)}"
    return "a change of the configuration" if isinstance(asked, Setting) else f"job {shown(asked.job)}"


def _words(before: Mapping[str, Scalar], after: Mapping[str, Scalar], by: str) -> str:
    told = [f"{key} = {value}" for key, value in sorted(after.items()) if before.get(key) != value]
    told += [f"{key} is the file's again" for key in sorted(before) if key not in after]
    return f"configuration changed by {by}: {', '.join(told)}"


def _up(hello: AgentHello) -> AgentUp:
    return AgentUp(record=hello.record, release=hello.release, version=hello.version)
