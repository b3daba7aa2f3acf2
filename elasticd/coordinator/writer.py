"""The leader's writes: in order, each fenced by the leader's key, patient while the store is away.

A write is a transaction that compares the leader's key and, of every key that it touches, the revision that
this writer last saw: a request whose answer was lost and that lands late therefore changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import TypeVar

from elasticd_planner.value import StoredValue, Value

from elasticd.machines.job.effects import Note, Record, Stored, Write
from elasticd.records import (
    LEADER_KEYS,
    CheckpointsRecord,
    ConfigRecord,
    DoneRecord,
    Fence,
    HistoryRecord,
    JobSpec,
    Keys,
    OutRecord,
    PlanRecord,
    Proposal,
    decode_at,
    encode,
)
from elasticd.store.leader import Leadership, LeadershipLost
from elasticd.store.protocol import Compare, Delete, KeyValue, Op, Put, Store, StoreUnavailable

#: Records of history that are kept for a job.
MOST_HISTORY = 256
#: Seconds between attempts while the store is away.
PAUSE = 0.2

R = TypeVar("R", bound=StoredValue)

_log = logging.getLogger(__name__)


class Rank(StoredValue, frozen=True, kw_only=True, tag="torchrun-ranks"):
    """What a torchrun said of its ranks, in the store: the other torchruns ask for it whenever they start a
    worker again, and a later leader may have to answer. An empty key deletes those of a job that is over."""

    job: str
    key: str = ""
    value: bytes = b""


class Setting(Value, frozen=True, kw_only=True):
    """A change of the configuration."""

    record: ConfigRecord


class WriteConflict(Exception):
    """Somebody else changed the leader's records although the leader's key is ours: nobody may."""


class Writer:
    """Executes `Write` effects one after the other, on the store's thread; `told` hears their notes.

    `failed` is called once, with why this leader must end: its key is lost, or a record was changed.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        leadership: Leadership,
        keys: Keys,
        known: Iterable[KeyValue],
        *,
        told: Callable[[Note], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._store, self._executor, self._leadership, self._keys = store, executor, leadership, keys
        self._revisions = {item.key: item.mod_revision for item in known}
        self._told, self._failed = told, failed
        self._queue: asyncio.Queue[Write | Rank | Setting] = asyncio.Queue()
        self.away = False

    def put(self, write: Write | Rank | Setting) -> None:
        self._queue.put_nowait(write)

    async def drained(self) -> None:
        """Returns when all that was put is written."""
        await self._queue.join()

    async def run(self) -> None:
        """Writes until cancelled, or until this leader may not write any more."""
        loop = asyncio.get_running_loop()
        while True:
            write = await self._queue.get()
            try:
                while not await loop.run_in_executor(self._executor, self._attempt, write):
                    await asyncio.sleep(PAUSE)
            except (LeadershipLost, WriteConflict) as error:
                self._failed(error)
                return
            for note in write.notes if isinstance(write, Write) else ():
                self._told(note)
            self._queue.task_done()

    def _attempt(self, write: Write | Rank | Setting) -> bool:
        """One try, on the store's thread, where encoding holds nobody up; False while the store is away."""
        ops = self._of_rank(write) if isinstance(write, Rank) else operations(self._keys, write)
        if not ops:
            return True
        compares = [Compare.modified(op.key, self._revisions.get(op.key, 0)) for op in ops]
        try:
            result = self._leadership.transact(self._store, compares, ops)
            if result.succeeded:
                self._seen(ops, result.revision)
            else:
                self._read_back(ops)
        except StoreUnavailable as error:
            if not self.away:
                _log.warning("the store is away, decisions wait until it returns: %s", error)
            self.away = True
            return False
        if self.away:
            _log.warning("the store is back")
        self.away = False
        return True

    def _of_rank(self, rank: Rank) -> tuple[Op, ...]:
        folder = _ranks(self._keys, rank.job)
        if rank.key:
            return (Put(folder + rank.key.replace("/", ":"), encode(rank)),)
        return tuple(Delete(key) for key, seen in self._revisions.items() if seen and key.startswith(folder))

    def _read_back(self, ops: tuple[Op, ...]) -> None:
        """A comparison failed under our own key: an earlier try must have landed after all."""
        found = {op.key: self._store.get(op.key) for op in ops}
        for op in ops:
            if not _landed(op, found[op.key]):
                raise WriteConflict(
                    f"{op.key} was changed by somebody else; only the leader may write it: "
                    "find who did, then start the coordinator again"
                )
        for op in ops:
            item = found[op.key]
            self._revisions[op.key] = item.mod_revision if item is not None else 0

    def _seen(self, ops: tuple[Op, ...], revision: int) -> None:
        for op in ops:
            self._revisions[op.key] = revision if isinstance(op, Put) else 0


def _landed(op: Op, found: KeyValue | None) -> bool:
    if isinstance(op, Delete):
        return found is None
    return found is not None and found.value == op.value


def operations(keys: Keys, write: Write | Setting) -> tuple[Op, ...]:
    """What a write does to the store. The plan comes before the proposal's end: agents read in this order."""
    ops: list[Op] = []
    if isinstance(write, Setting):
        number = write.record.number
        ops += (Put(key, encode(write.record)) for key in (keys.config, keys.config_history(number)))
        if number > MOST_HISTORY:
            ops.append(Delete(keys.config_history(number - MOST_HISTORY)))
        return tuple(ops)
    for record in write.records:
        ops.append(Put(_key(keys, write.job, record), encode(record)))
        if isinstance(record, HistoryRecord) and record.number > MOST_HISTORY:
            ops.append(Delete(keys.history(write.job, record.number - MOST_HISTORY)))
    if write.close:
        ops.append(Delete(keys.job(write.job, "proposal")))
    return tuple(ops)


def _key(keys: Keys, job: str, record: Record) -> str:
    if isinstance(record, HistoryRecord):
        return keys.history(job, record.number)
    if isinstance(record, JobSpec):
        return keys.job(job, "spec")
    if isinstance(record, PlanRecord):
        return keys.job(job, "plan")
    if isinstance(record, Proposal):
        return keys.job(job, "proposal")
    if isinstance(record, Fence):
        return keys.job(job, "fence")
    if isinstance(record, CheckpointsRecord):
        return keys.job(job, "checkpoints")
    if isinstance(record, OutRecord):
        return f"{keys.rendezvous(job)}out/{record.torchrun}"
    return keys.job(job, "done")


def _ranks(keys: Keys, job: str) -> str:
    return f"{keys.jobs}{job}/ranks/"


def ranks(keys: Keys, items: Iterable[KeyValue]) -> list[Rank]:
    """Those in a snapshot of the jobs' prefix. Raises `msgspec.DecodeError` for one that this program cannot
    read."""
    jobs = {item.key.removeprefix(keys.jobs).partition("/")[0] for item in items}
    folders = tuple(_ranks(keys, job) for job in jobs)
    return [_read(item, Rank) for item in items if item.key.startswith(folders)]


def stored(keys: Keys, items: Iterable[KeyValue]) -> list[Stored]:
    """Every job in a snapshot of the jobs' prefix. Raises `msgspec.DecodeError` with the key of a record
    that this program cannot read."""
    jobs: dict[str, dict[str, KeyValue]] = {}
    for item in items:
        job, _, part = item.key.removeprefix(keys.jobs).partition("/")
        if not keys.note_unknown(item.key):
            jobs.setdefault(job, {})[part] = item
    return [_stored(job, parts) for job, parts in sorted(jobs.items()) if _decided(parts)]


def _decided(parts: dict[str, KeyValue]) -> bool:
    """Whether a leader decided any of it: agents write `members/`, `rendezvous/`, torchruns tell `ranks/`."""
    return any(part.partition("/")[0] in LEADER_KEYS for part in parts)


def _read(item: KeyValue, kind: type[R]) -> R:
    return decode_at(item.key, item.value, kind)


def _stored(job: str, parts: dict[str, KeyValue]) -> Stored:
    history = {
        int(name): item
        for part, item in parts.items()
        if part.startswith("history/") and (name := part.removeprefix("history/")).isdecimal()
    }
    plan = _read(parts["plan"], PlanRecord) if "plan" in parts else None
    proposal = _read(parts["proposal"], Proposal) if "proposal" in parts else None
    number = proposal.number if proposal is not None else plan.plan.number if plan is not None else 0
    return Stored(
        job=job,
        spec=_read(parts["spec"], JobSpec) if "spec" in parts else None,
        plan=plan,
        proposal=proposal,
        fence=_read(parts["fence"], Fence) if "fence" in parts else None,
        done=_read(parts["done"], DoneRecord) if "done" in parts else None,
        history=_read(history[number], HistoryRecord) if number in history else None,
        checkpoints=_read(parts["checkpoints"], CheckpointsRecord) if "checkpoints" in parts else None,
        highest=max(history, default=0),
    )
