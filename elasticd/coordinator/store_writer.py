"""The leader's writes: in order, each fenced by the leader's key, patient while the store is away.

A write is a transaction that compares the leader's key and, of every key that it touches, the revision that
this writer last saw: a request whose answer was lost and that lands late therefore changes nothing.

A write that cannot be made, as it is too large for the store, is that one write's failure: whoever asked for it
is told, and the next one follows. An outage is different: nothing follows until it ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TypeVar

import msgspec
from elasticd_planner.value import StoredValue

from elasticd.codec.record_parts import Shelf
from elasticd.coordinator.events.event_log import Lines
from elasticd.coordinator.events.event_pages import newest_of, stamp_of
from elasticd.coordinator.store_transactions import (
    MOST_TOGETHER,
    Asked,
    LeadershipProbe,
    Ops,
    Rank,
    RendezvousSweep,
    StoreTransactions,
    Sweep,
    operations,
    rank_put,
)
from elasticd.machines.job.state.events import CoordinatorNote, Stored, Write
from elasticd.records import (
    LEADER_KEYS,
    CheckpointsRecord,
    ConfigRecord,
    DoneRecord,
    DrainRecord,
    Fence,
    Keys,
    PlanRecord,
    ProfileRecord,
    Proposal,
    RestartEndRecord,
    StopRecord,
    decode_at,
    decode_history,
    decode_spec,
    numbered,
    read_at,
)
from elasticd.store.confirm import left
from elasticd.store.leader import Leadership, LeadershipLost
from elasticd.store.protocol import (
    Compare,
    DeletePrefix,
    KeyValue,
    Put,
    Store,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    check_request,
)
from elasticd.trusted_time import ReadTimes
from elasticd.wire.rendezvous import Torchrun

#: Seconds between attempts while the store is away.
RETRY_SECONDS = 0.2
#: Writes that the store refused of late, for whoever waits for one of them.
MOST_REFUSALS = 256

R = TypeVar("R", bound=StoredValue)
T = TypeVar("T")

_log = logging.getLogger(__name__)


class WriteConflict(Exception):
    """Somebody else changed the leader's records although the leader's key is ours: nobody may."""


class NotWritten(Exception):
    """A write is not in the store; the message says why."""


class Writer:
    """Executes `Write` effects one after the other, on the store's thread; `told` hears their notes.

    `refused` hears of a write that cannot be made, and why; `wrote` how many bytes were written for a job, as
    etcd has them: compressed, and without what it had already. `failed` is called once, with why this leader
    must end: its key is lost, a record was changed, or the store takes nothing of it any more.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        leadership: Leadership,
        keys: Keys,
        ledger: StoreTransactions,
        *,
        told: Callable[[CoordinatorNote], None],
        refused: Callable[[Asked, Exception], None],
        failed: Callable[[Exception], None],
        wrote: Callable[[str, int], None] = lambda job, size: None,
    ) -> None:
        """ledger: what the store held when this leader took over."""
        self._store, self._executor, self._leadership = store, executor, leadership
        self._keys, self._ledger = keys, ledger
        self._told, self._refused, self._failed, self._wrote = told, refused, failed, wrote
        self._bytes = 0  # of what is being written
        self._queue: asyncio.Queue[Asked] = asyncio.Queue()
        self._held: Asked | None = None  # the first in the queue, if it was taken from there already
        self.away = False
        self.full = ""  # why the store takes nothing, while it is at its quota
        self._put = self._settled = 0
        self._put_at: deque[float] = deque()  # of what is not settled yet, the oldest first
        self._refusals: deque[tuple[int, str]] = deque(maxlen=MOST_REFUSALS)
        self._moved = asyncio.Event()
        self._ended = ""

    def put(self, asked: Asked) -> None:
        """Has something written, after all that was put before."""
        self._queue.put_nowait(asked)
        self._put += 1
        self._put_at.append(time.monotonic())

    @property
    def busy(self) -> bool:
        """True if something that was put is neither written nor refused yet."""
        return self._put > self._settled

    @property
    def oldest_seconds(self) -> float:
        """Seconds since the oldest of what is neither written nor refused was put; 0 where there is nothing."""
        return time.monotonic() - self._put_at[0] if self._put_at else 0.0

    def refusal(self, asked: Rank | ConfigRecord) -> str:
        """Why the store would not take it, or nothing: known before it is put, so that its sender hears it."""
        guard = self._leadership.guard()
        try:
            ops = (rank_put(self._keys, asked),) if isinstance(asked, Rank) else operations(self._keys, asked)
            check_request(self._store.limits, [guard, *self._ledger.compares(ops)], ops)
        except (StoreError, ValueError) as error:
            return str(error)
        return ""

    @property
    def marked(self) -> int:
        """A mark for `durable`: what is put from now on lies behind it."""
        return self._put

    async def durable(self, mark: int) -> None:
        """Returns when all that was put since `mark` is in the store. Raises `NotWritten` where some of it was
        refused, or this leader may not write any more."""
        until = self._put
        while self._settled < until:
            if self._ended:
                raise NotWritten(self._ended)
            self._moved.clear()
            await self._moved.wait()
        if why := next((why for number, why in self._refusals if mark < number <= until), ""):
            raise NotWritten(why)

    async def drained(self) -> None:
        """Returns when all that was put is written, or refused."""
        await self._queue.join()

    async def run(self) -> None:
        """Writes until cancelled, or until this leader may not write any more."""
        while True:
            taken = await self._take()
            if not await self._write(taken):
                self._moved.set()
                return
            for _ in taken:
                self._queue.task_done()
            self._settled += len(taken)
            for _ in taken:
                self._put_at.popleft()
            self._moved.set()

    async def _take(self) -> Sequence[Asked]:
        """The next that was put. Of ranks all that follow each other are taken: when a job starts there is one
        for each device, and what is put behind them is not to wait for as many transactions."""
        asked = self._held if self._held is not None else await self._queue.get()
        self._held = None
        taken = [asked]
        while _is_rank(asked) and len(taken) < MOST_TOGETHER and self._held is None and not self._queue.empty():
            behind = self._queue.get_nowait()
            if _is_rank(behind):
                taken.append(behind)
            else:
                self._held = behind
        return taken

    async def _write(self, taken: Sequence[Asked]) -> bool:
        """Has it written, or refused; False where this leader may not write any more."""
        loop = asyncio.get_running_loop()
        self._bytes = 0
        try:
            while not await loop.run_in_executor(self._executor, self._attempt, taken):
                await asyncio.sleep(RETRY_SECONDS)
        except (LeadershipLost, StoreRefused, WriteConflict) as error:
            self._ended = str(error)
            self._failed(error)
            return False
        except (StoreError, ValueError) as error:  # of this write alone; ValueError: it cannot be encoded
            if len(taken) > 1:  # one of them was refused: the others are not
                for asked in taken:
                    if not await self._write([asked]):
                        return False
                return True
            self._refusals.append((self._settled + 1, str(error)))
            self._refused(taken[0], error)
        else:
            if isinstance(taken[0], Write):
                self._wrote(taken[0].job, self._bytes)
            for note in (note for asked in taken if isinstance(asked, Write) for note in asked.notes):
                self._told(note)
        for asked in taken:
            if isinstance(asked, Write) and self._ledger.sweeps(asked.job):
                self.put(Sweep(job=asked.job))
        return True

    def _attempt(self, taken: Sequence[Asked]) -> bool:
        """One try, on the store's thread, where encoding holds nobody up; False while the store is away. Of
        several transactions the next try makes those that this one did not."""
        try:
            if isinstance(taken[0], RendezvousSweep):
                self._clear(taken[0])
            elif isinstance(taken[0], LeadershipProbe):
                (ops,) = self._ledger.transactions(taken[0])
                self._leadership.transact(self._store, (), ops)
            else:
                for ops in filter(None, self._ledger.transactions(*taken)):
                    self._make(ops)
        except StoreUnavailable as error:
            if not self.away:
                _log.warning("the store is away, decisions wait until it returns: %s", error)
            self.away, self.full = True, str(error) if isinstance(error, StoreFull) else ""
            return False
        if self.away:
            _log.warning("the store is back")
        self.away, self.full = False, ""
        return True

    def _clear(self, asked: RendezvousSweep) -> None:
        """Deletes what agents write, too: not while a torchrun is there, nor where anything has changed since
        this looked."""
        prefix = self._keys.rendezvous(asked.job)
        snapshot = self._store.snapshot(prefix)
        torchruns = (item for item in snapshot.items if item.key.startswith(f"{prefix}torchruns/"))
        if not snapshot.items or any(_is_here(item) for item in torchruns):
            return
        (ops,) = self._ledger.transactions(asked)
        compares = [Compare.untouched(prefix, snapshot.revision)]
        if self._leadership.transact(self._store, compares, ops).succeeded:
            self._ledger.done(ops, {})

    def _make(self, ops: Ops) -> None:
        result = self._leadership.transact(self._store, self._ledger.compares(ops), ops)
        self._bytes += sum(len(op.key) + len(op.value) for op in ops if isinstance(op, Put))
        puts = [op.key for op in ops if isinstance(op, Put)]
        revisions = dict.fromkeys(puts, result.revision) if result.succeeded else self._read_back(ops)
        self._ledger.done(ops, revisions)

    def _read_back(self, ops: Ops) -> dict[str, int]:
        """A comparison failed under our own key: an earlier try must have landed after all. Returns at which
        revision each key was changed."""
        revisions: dict[str, int] = {}
        for op in ops:
            items = left(self._store, op)
            if items is None:
                key = op.prefix if isinstance(op, DeletePrefix) else op.key
                raise WriteConflict(
                    f"{key} was changed by somebody else; only the leader may write it: "
                    "find who did, then start the coordinator again"
                )
            revisions |= {item.key: item.mod_revision for item in items}
        return revisions


def _is_here(item: KeyValue) -> bool:
    """Returns whether a torchrun has not ended; a record that this release cannot read counts so."""
    try:
        return decode_at(item.key, item.value, Torchrun).status in ("here", "out")
    except msgspec.DecodeError:
        return True


def _is_rank(asked: Asked) -> bool:
    """Returns True if it is a rank, and no end of a job's."""
    return isinstance(asked, Rank) and bool(asked.key)


def ranks(keys: Keys, items: Iterable[KeyValue]) -> list[Rank]:
    """Those in a snapshot of the jobs' prefix. Raises `msgspec.DecodeError` for one that this program cannot
    read."""
    jobs = {item.key.removeprefix(keys.jobs).partition("/")[0] for item in items}
    folders = tuple(keys.job(job, "ranks/") for job in jobs)
    return [decode_at(item.key, item.value, Rank) for item in items if item.key.startswith(folders)]


def in_restart_mode(keys: Keys, items: Iterable[KeyValue]) -> list[str]:
    """The jobs in a snapshot of the jobs' prefix that torchruns keep rounds of."""
    parts = (item.key.removeprefix(keys.jobs).split("/", 2) for item in items)
    return sorted({part[0] for part in parts if len(part) == 3 and part[1] == "rendezvous"})


def restart_ends(keys: Keys, items: Iterable[KeyValue]) -> dict[str, RestartEndRecord]:
    """The ends of jobs in restart mode, in a snapshot of the jobs' prefix. Raises `msgspec.DecodeError` for one
    that this program cannot read."""
    jobs = in_restart_mode(keys, items)
    places = {f"{keys.rendezvous(job)}end": job for job in jobs}
    return {
        places[item.key]: decode_at(item.key, item.value, RestartEndRecord)
        for item in items
        if item.key in places
    }


def drains(keys: Keys, items: Iterable[KeyValue]) -> dict[str, bool]:
    """Users' wishes to drain nodes, by node, in a snapshot of their prefix. Raises `msgspec.DecodeError` for
    one that this program cannot read."""
    return {
        item.key.removeprefix(keys.drains): decode_at(item.key, item.value, DrainRecord).on for item in items
    }


def stored(keys: Keys, items: Iterable[KeyValue]) -> list[Stored]:
    """Every job in a snapshot of the jobs' prefix, without the ages of ends and wishes (`aged`). Raises
    `msgspec.DecodeError` with the key of a record that this program cannot read."""
    jobs: dict[str, dict[str, KeyValue]] = {}
    shelf = Shelf(keys.jobs)
    for item in items:
        job, _, part = item.key.removeprefix(keys.jobs).partition("/")
        if not shelf.take(item.key, item.value) and not keys.note_unknown(item.key):
            jobs.setdefault(job, {})[part] = item
    return [_stored(job, parts, shelf) for job, parts in sorted(jobs.items()) if _decided(parts)]


def read_times(jobs: Sequence[Stored], pages: Sequence[Lines], wall: float) -> ReadTimes:
    """The times by which a new leader reckons the ages of these jobs' records, after these pages of the
    journal, where its machine's clock says `wall` (unix seconds)."""
    written = [record.at for job in jobs for record in (job.done, job.stop) if record is not None]
    stamp = stamp_of(pages)
    led = [*(lines.led for lines in pages), *(job.stop.led for job in jobs if job.stop is not None)]
    return ReadTimes.of(wall, written if stamp else (newest_of(pages), *written), stamp, max(led, default=0.0))


def aged(jobs: Iterable[Stored], times: ReadTimes) -> list[Stored]:
    """These jobs with the ages of their ends and of wishes to stop them."""
    return [_aged(job, times) for job in jobs]


def _aged(job: Stored, times: ReadTimes) -> Stored:
    """With the ages of its end and of a wish to stop it."""
    done, stop = job.done, job.stop
    return msgspec.structs.replace(
        job,
        stop_seconds=max(0.0, times.led - stop.led) if stop is not None and stop.led else 0.0,
        over_seconds=max(0.0, times.trusted - done.at) if done is not None and done.at else 0.0,
    )


def _decided(parts: dict[str, KeyValue]) -> bool:
    """Returns True if a leader decided any of it: agents write `rendezvous/` (and 0.1's `members/`), torchruns
    tell `ranks/`."""
    return any(part.partition("/")[0] in LEADER_KEYS for part in parts)


def _stored(job: str, found: dict[str, KeyValue], shelf: Shelf) -> Stored:
    def read(part: str, kind: type[R]) -> R | None:
        item = found.get(part)
        return decode_at(item.key, item.value, kind, shelf.of(item.key)) if item is not None else None

    def read_by(part: str, reader: Callable[[bytes, Mapping[str, bytes]], T]) -> T | None:
        item = found.get(part)
        return read_at(item.key, item.value, reader, shelf.of(item.key)) if item is not None else None

    history = {
        number: part
        for part in found
        if part.startswith("history/") and (number := numbered(part.removeprefix("history/"))) is not None
    }
    plan, proposal = read("plan", PlanRecord), read("proposal", Proposal)
    done, stop = read("done", DoneRecord), read("stop", StopRecord)
    number = proposal.number if proposal is not None else plan.plan.number if plan is not None else 0
    return Stored(
        job=job,
        spec=read_by("spec", decode_spec),
        plan=plan,
        proposal=proposal,
        fence=read("fence", Fence),
        done=done,
        history=read_by(history.get(number, ""), decode_history),
        checkpoints=read("checkpoints", CheckpointsRecord),
        profile=read("profile", ProfileRecord),
        stop=stop,
        highest=max(history, default=0),
    )
