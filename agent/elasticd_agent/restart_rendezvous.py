"""The rounds of jobs in restart mode: what torch's rendezvous keeps in etcd, for the torchruns of this node.

A torchrun needs no client of etcd: it asks here. The state of a job's rendezvous is torch's own, opaque bytes
under one key, changed by comparison with its last revision alone. Beside it each torchrun has a key under this
agent's lease, so that the others know within a moment when one has died, and by the lease when a node has.
Reads are answered from a watch; they cost the store nothing, however many ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from elasticd.codec.decoding import log_once, shown, skip
from elasticd.codec.message import Message, protocol_refusal
from elasticd.machines.agent import machine
from elasticd.machines.agent.state import AgentState, DevicesHeld, Event, LinkUp
from elasticd.names import harmless, name_refusal
from elasticd.records import Keys, NodeRecord, OutRecord, decode
from elasticd.store.confirm import settle
from elasticd.store.protocol import Compare, KeyValue, Put, Store, StoreError, Watch, WatchEvent, WatchItem
from elasticd.store.write_allowance import Allowance
from elasticd.system import process_mark
from elasticd.wire.coordinator import ToLeader
from elasticd.wire.rendezvous import (
    Attend,
    Attending,
    AtWork,
    Lap,
    Present,
    ReadRound,
    RoundAnswer,
    StepTime,
    Torchrun,
    TorchrunState,
    Watching,
    WriteRound,
)
from elasticd.wire.worker import ToWorker
from elasticd_agent import orphans
from elasticd_agent.registration import Registrar

#: Seconds for which the key of a torchrun that has ended says so; afterwards it is not there at all.
ENDED_SECONDS = 30.0
#: Seconds that a torchrun has to come again after it hung up, as long as its process lives.
RETURN_SECONDS = 5.0
#: Seconds until the leader is told again which torchruns there are.
REPEAT_SECONDS = 5.0
#: Characters of what a torchrun says of itself.
MOST_PRESENT = 1024
#: Bytes that the torchruns of this node may have written to etcd: at once, and a second. A rendezvous of 1,000
#: nodes takes 150 KB every 5 s.
WRITTEN_AT_ONCE, WRITTEN_A_SECOND = 64 << 20, 64 << 10

R = TypeVar("R", bound=msgspec.Struct)

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Client:
    """One torchrun's connection; `present` is what it last said of itself."""

    job: str
    pid: int
    marked: str  # of its process, by the agent's own look (`process_mark`)
    present: Present | None = None
    watching: Watching | None = None
    slots: tuple[int, ...] = ()


@dataclass(kw_only=True)
class _Job:
    """The records of one job's rounds in the store, by the watch."""

    prefix: str
    items: dict[str, KeyValue] = field(default_factory=dict)
    watch: Watch | None = None
    ready: asyncio.Task[None] | None = None

    @property
    def state(self) -> KeyValue | None:
        return self.items.get(self.prefix + "state")

    def take(self, item: KeyValue) -> None:
        """Newer than what is known, or nothing: our own writes are known before the watch reports them."""
        known = self.items.get(item.key)
        if known is None or known.mod_revision < item.mod_revision:
            self.items[item.key] = item

    def torchruns(self) -> dict[str, Torchrun]:
        """All torchruns by name. One whose record this release cannot decode counts as one that is here."""
        present, out = {}, {}
        for key, item in self.items.items():
            kind, _, name = key.removeprefix(self.prefix).partition("/")
            if kind == "torchruns":
                present[name] = _record(item, Torchrun) or Torchrun(node="", store="")
            elif kind == "out":
                record = _record(item, OutRecord)
                out[name] = record.reason if record is not None else "its record says so"
        for name in out.keys() & present.keys():
            if present[name].status == "here":
                present[name] = msgspec.structs.replace(present[name], status="out", reason=out[name])
        return present


class RestartRendezvous:
    """`take` hears the socket first, on the running loop; `send` and `dismiss` answer. `state` gives that of
    the agent's machine, which `emit` tells of the devices that torchruns hold."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        registrar: Registrar,
        record: NodeRecord,
        *,
        state: Callable[[], AgentState],
        emit: Callable[[Event], None],
        tell: Callable[[ToLeader], None],
        send: Callable[[str, ToWorker], None],
        dismiss: Callable[[str, str], None],
    ) -> None:
        self._store, self._keys, self._registrar = store, keys, registrar
        self._node, self._address = record.node, record.address
        self._state, self._emit = state, emit
        self._tell, self._send, self._dismiss = tell, send, dismiss
        self._loop = asyncio.get_running_loop()
        self._clients: dict[str, _Client] = {}
        self._jobs: dict[str, _Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._allowance = Allowance(WRITTEN_AT_ONCE, WRITTEN_A_SECOND)
        self._run(self._repeat())

    def take(self, client: str, pid: int, body: Message | None) -> bool:
        """A message of a client, or None at its end; whether it was for us."""
        known = self._clients.get(client)
        if body is None:
            if known is not None:
                self._ended(client, known)
            return known is not None
        if isinstance(body, Attend | Watching) and known is None:
            self._opened(client, pid, body)
        elif known is None:
            return False
        elif isinstance(body, Present):
            self._appear(client, known, body)
        elif isinstance(body, ReadRound | WriteRound):
            self._run(self._ask(client, known.job, body))
        elif isinstance(body, Lap) and known.watching is not None:
            # A hint to the leader: where there is none, nothing is lost but the lap.
            device = f"{self._node}/{self._slot(known.watching)}"
            self._tell(StepTime(device=device, by=known.watching, lap=body))
        return True

    def _opened(self, client: str, pid: int, body: Attend | Watching) -> None:
        if reason := self._refusal(body, pid):
            self._dismiss(client, reason)
            return
        watching = body if isinstance(body, Watching) else None
        known = self._clients[client] = _Client(
            job=body.job, pid=pid, marked=process_mark.mark(pid) or "", watching=watching
        )
        if isinstance(body, Attend):
            self._hold(client, known, body.slots)
            self._send(client, Attending(address=self._address))

    def _ended(self, client: str, known: _Client) -> None:
        del self._clients[client]
        self._let_go(known.job)
        if known.present is not None:
            self._run(self._bury(client, known, known.present))
        else:
            self._hold(client, known, ())

    def _let_go(self, name: str) -> None:
        """Once nobody on this node asks for a job, it is not watched any more: names are never used up."""
        job = self._jobs.get(name)
        if job is None or any(known.job == name for known in self._clients.values()):
            return
        if job.ready is not None and not job.ready.done():
            job.ready.add_done_callback(lambda _: self._let_go(name))
            return
        del self._jobs[name]
        if job.watch is not None:
            job.watch.cancel()

    def _hold(self, client: str, known: _Client, slots: tuple[int, ...]) -> None:
        """The devices of these indices are the job's from now on; those that this agent does not have count for
        nothing, as torch's own launcher may start more processes."""
        if slots != known.slots:
            known.slots = slots
            devices = frozenset(self._devices(slots))
            self._emit(DevicesHeld(client=client, job=known.job, devices=devices))

    def _devices(self, slots: Iterable[int]) -> list[str]:
        there = {device.name for device in self._state().record.devices}
        return [name for slot in slots if (name := f"{self._node}/{slot}") in there]

    def watched(self, device: str) -> str:
        """The connection of the process on a device that calls `elasticd.watch()`; empty where none does."""
        for client, known in self._clients.items():
            if known.watching is not None and f"{self._node}/{self._slot(known.watching)}" == device:
                return client
        return ""

    def _slot(self, watching: Watching) -> int:
        """The device's index of a process that is watched."""
        for known in self._clients.values():
            if known.present is not None and known.present.name == watching.torchrun:
                slots = known.slots
                return slots[watching.local_rank] if watching.local_rank < len(slots) else watching.local_rank
        return watching.local_rank

    async def _bury(self, client: str, known: _Client, present: Present) -> None:
        """A torchrun hung up: one that lives may only be coming anew. Its devices are free once its workers are
        ended."""
        job = known.job
        try:
            if not await self._is_gone(known, present):
                return
        finally:
            self._hold(client, known, ())
        await asyncio.sleep(ENDED_SECONDS)
        if not self._is_here(job, present.name):
            self._registrar.release(self._key(job, present.name))

    async def _is_gone(self, known: _Client, present: Present) -> bool:
        """Returns whether it does not come anew; what it left is ended then, and the others know."""
        job, pid = known.job, known.pid
        deadline = self._loop.time() + RETURN_SECONDS
        while not present.left and not orphans.has_ended(pid) and self._loop.time() < deadline:
            await asyncio.sleep(0.05)
            if self._is_here(job, present.name):
                return False
        self._send_state(job, present, died=True)
        record = Torchrun(node=self._node, store="", status="left" if present.left else "died")
        self._registrar.hold(self._key(job, present.name), msgspec.json.encode(record))
        if orphans.has_ended(pid):
            ended = await asyncio.to_thread(orphans.end, present.name, known.marked)
            if ended:
                _log.warning(
                    "torchrun %s of job %s is gone: its workers %s are ended", present.name, job, ended
                )
        return True

    def _is_here(self, job: str, name: str) -> bool:
        return any(
            known.job == job and known.present is not None and known.present.name == name
            for known in self._clients.values()
        )

    def close(self) -> None:
        """Cancels the tasks and the watches. The torchruns' keys live as long as the registrar's lease."""
        for task in list(self._tasks):
            task.cancel()
        for job in self._jobs.values():
            if job.watch is not None:
                job.watch.cancel()

    def _refusal(self, body: Attend | Watching, pid: int) -> str:
        if apart := protocol_refusal("this process's hello to its agent", body.version, body.release):
            return apart
        if body.pid != pid:
            return (
                f"process {pid} says that it is {body.pid}: agent and torchrun must share one PID namespace "
                "(with containers, run the agent in the same one or share the host's)"
            )
        if why := name_refusal("the job's name", body.job):
            if not harmless(body.job):
                return why
            log_once(("job", body.job), f"{why}; a later release refuses it")
        state = self._state()
        if body.job in state.plans and body.job not in state.done:
            return (
                f"job {body.job!r} runs in live mode: start this part of it without --mode restart "
                "(--rdzv-conf=mode=restart), or give this job another name"
            )
        slots = body.slots if isinstance(body, Attend) else ()
        return machine.cannot_hold(state, body.job, [f"{self._node}/{slot}" for slot in slots])

    def _appear(self, client: str, known: _Client, body: Present) -> None:
        if known.present is not None and known.present.name != body.name:
            self._dismiss(
                client, f"a torchrun has one name, {shown(known.present.name)}: not another one later"
            )
            return
        if "/" in body.name or len(body.name) + len(body.store) > MOST_PRESENT:
            self._dismiss(
                client, f"a torchrun's name and address have {MOST_PRESENT} characters at most, and no '/'"
            )
            return
        if not self._may_write(client, body.id, len(body.name) + len(body.store)):
            return
        if not self._holds(client, known, body):
            return
        before, known.present = known.present, body
        self._send_state(known.job, body)
        if before is not None and (before.store, before.left) == (body.store, body.left):
            self._run(self._ask(client, known.job, ReadRound(id=body.id)))
            return
        status: Literal["left", "here"] = "left" if body.left else "here"
        record = Torchrun(node=self._node, store=body.store, status=status)

        def answer(why: str) -> None:
            if why:
                self._send(client, RoundAnswer(id=body.id, done=False, error=why))
            else:
                self._run(self._ask(client, known.job, ReadRound(id=body.id)))

        def told(why: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it this agent
                self._loop.call_soon_threadsafe(answer, why)

        self._registrar.hold(self._key(known.job, body.name), msgspec.json.encode(record), told)

    def _holds(self, client: str, known: _Client, body: Present) -> bool:
        """Returns whether a torchrun may have the devices that it says it has; if not, it is told why."""
        slots = body.at_work.slots if body.at_work is not None and not body.left else known.slots
        if slots == known.slots:
            return True
        if why := machine.cannot_hold(self._state(), known.job, self._devices(slots)):
            self._dismiss(client, why)
            return False
        self._hold(client, known, slots)
        return True

    def _send_state(self, job: str, present: Present, *, died: bool = False) -> None:
        """To the leader, which keeps nothing of it: it is said again and again."""
        status: Literal["here", "left", "died"] = "left" if present.left else "died" if died else "here"
        at_work = present.at_work or AtWork()
        self._tell(TorchrunState(job=job, torchrun=present.name, status=status, at_work=at_work))

    def torchruns(self, job: str) -> list[str]:
        """The torchruns of a job on this node, as clients."""
        known = self._clients.items()
        return [client for client, one in known if one.job == job and one.watching is None]

    def observe(self, event: Event) -> None:
        """Takes an event of the agent's machine: a new leader is told at once which torchruns there are."""
        if isinstance(event, LinkUp):
            self._send_all_states()

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(REPEAT_SECONDS)
            self._send_all_states()

    def _send_all_states(self) -> None:
        for known in self._clients.values():
            if known.present is not None:
                self._send_state(known.job, known.present)

    def _may_write(self, client: str, question: int, size: int) -> bool:
        """If not, the client is told so, and asks again."""
        if self._allowance.take(size, self._loop.time()):
            return True
        error = f"the torchruns of node {self._node} write more than {WRITTEN_A_SECOND} bytes a second"
        self._send(client, RoundAnswer(id=question, done=False, error=error))
        return False

    async def _ask(self, client: str, name: str, body: ReadRound | WriteRound) -> None:
        """Answers with the state of a job's rendezvous, which a `WriteRound` sets before."""
        if isinstance(body, WriteRound) and not self._may_write(client, body.id, len(body.value)):
            return
        done = True
        try:
            job = await self._job(name)
            if isinstance(body, WriteRound):
                item, done = await asyncio.to_thread(self._swap, job.prefix + "state", body)
                if item is not None:
                    job.take(item)
        except StoreError as error:
            self._send(client, RoundAnswer(id=body.id, done=False, error=str(error)))
            return
        self._answer(client, job, body.id, done=done)
        self._let_go(name)

    def _swap(self, key: str, body: WriteRound) -> tuple[KeyValue | None, bool]:
        """Compare and set, and what the store holds then. A state names its writer: none writes another's."""
        compare = Compare.modified(key, body.token)
        result = settle(self._store, (compare,), (Put(key, body.value),), patience=5.0)
        current = self._store.get(key)
        return current, result.succeeded and current is not None and current.value == body.value

    def _answer(self, client: str, job: _Job, number: int, *, done: bool) -> None:
        state = job.state
        answer = RoundAnswer(
            id=number,
            value=state.value if state is not None else b"",
            token=state.mod_revision if state is not None else 0,
            done=done,
            torchruns=job.torchruns(),
        )
        self._send(client, answer)

    async def _job(self, name: str) -> _Job:
        """The job's rounds, watched from the first question on. Raises StoreError."""
        job = self._jobs.setdefault(name, _Job(prefix=self._keys.rendezvous(name)))
        if job.ready is None:
            job.ready = asyncio.create_task(self._begin(job))
        try:
            await asyncio.shield(job.ready)
        except StoreError:
            job.ready = None  # the next question tries again
            raise
        return job

    async def _begin(self, job: _Job) -> None:
        snapshot = await asyncio.to_thread(self._store.snapshot, job.prefix)
        for item in snapshot.items:
            job.take(item)

        def sink(item: WatchItem) -> None:
            self._loop.call_soon_threadsafe(_on_watch, job, item)

        begin = partial(self._store.watch, job.prefix, snapshot.revision + 1, sink)
        job.watch = await asyncio.to_thread(begin)  # it may wait until etcd answers again

    def _key(self, job: str, torchrun: str) -> str:
        return f"{self._keys.rendezvous(job)}torchruns/{torchrun}"

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a torchrun's question was not answered", exc_info=error)


def _record(item: KeyValue, kind: type[R]) -> R | None:
    """The record at a key; None, with one log line for the key, where this release cannot decode it."""
    try:
        return decode(item.value, kind)
    except msgspec.DecodeError as error:
        text = f"the record {shown(item.key)!r} in the store cannot be read: {shown(str(error))}"
        skip("record", ("record", item.key), text)
        return None


def _on_watch(job: _Job, item: WatchItem) -> None:
    if not isinstance(item, WatchEvent):
        job.items = {stored.key: stored for stored in item.snapshot.items}
    elif item.kind == "put":
        job.take(item.item)
    elif (known := job.items.get(item.key)) is not None and known.mod_revision < item.mod_revision:
        del job.items[item.key]
