"""The store transactions of a leader's writes: within the store's limits, and the keys that there are
afterwards.

A write is one transaction, so that who reads the store sees all of it or nothing. Where its records do not fit
into one, the larger ones are written in parts (`elasticd.codec.record_parts`): the parts in transactions before
it, and the write itself then holds their names. Parts that no record needs any more are deleted behind it.

The history of a job is bounded: by the number of its plans, and by the bytes of the job's parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from elasticd_planner.value import StoredValue, Value

from elasticd.codec.decoding import tag_of
from elasticd.codec.record_parts import MOST_BYTES, cut, parted
from elasticd.coordinator.events.event_pages import Paged
from elasticd.machines.job.state.events import Record, Write
from elasticd.records import (
    LEADER_KEYS,
    CheckpointsRecord,
    ConfigRecord,
    DoneRecord,
    DrainRecord,
    Fence,
    HistoryRecord,
    JobPart,
    JobSpec,
    Keys,
    MeshHistoryRecord,
    MeshJobSpec,
    OutRecord,
    PlanRecord,
    ProfileRecord,
    Proposal,
    RestartEndRecord,
    SchemaRecord,
    StopRecord,
    encode,
)
from elasticd.store.protocol import (
    Compare,
    Delete,
    DeletePrefix,
    KeyValue,
    Limits,
    Op,
    Put,
    StoreTooLarge,
    request_bytes,
)
from elasticd.version import __version__

#: Records of history that are kept for a job, and bytes of its parts above which older ones go before that.
MOST_HISTORY = 256
MOST_PARTS_BYTES = 32 << 20
#: Bytes of JSON up to which a record is stored whole in any case.
SMALL_BYTES = 64 << 10
#: Operations that are put together into a transaction of parts or of ranks, and records of history that a write
#: deletes: so many that the conditions of a write stay within the store's limits.
MOST_TOGETHER = 64

#: Where the records of a job lie that have many keys, and those of one key each, in the order in which they are
#: deleted.
_FOLDERS: tuple[JobPart, ...] = ("history/", "ranks/", "parts/")
_LIFE_FOLDERS: tuple[JobPart, ...] = ("ranks/",)  # those that a job's next start under its name does without
_SINGLE: dict[type, JobPart] = {
    Proposal: "proposal",
    PlanRecord: "plan",
    Fence: "fence",
    JobSpec: "spec",
    MeshJobSpec: "spec",
    CheckpointsRecord: "checkpoints",
    ProfileRecord: "profile",
    DoneRecord: "done",
    StopRecord: "stop",
}

Ops = tuple[Op, ...]


class Rank(StoredValue, frozen=True, kw_only=True, tag="torchrun-ranks"):
    """A torchrun's report of its ranks: other torchruns ask for it whenever they start a worker again, also of
    a later leader."""

    job: str  # the job's name
    key: str = ""  # of the bootstrap store (empty: all keys of a job that is over are deleted)
    value: bytes = b""  # as the torchrun set it


class Sweep(Value, frozen=True, kw_only=True):
    """The parts of a job that none of its records needs any more are to be deleted."""

    job: str  # the job's name


class LeadershipProbe(Value, frozen=True, kw_only=True):
    """Finds out whether this leader still leads, and etcd takes what it writes: the schema's record is written
    again, as it is."""


class RendezvousSweep(Value, frozen=True, kw_only=True):
    """The keys that torchruns in restart mode keep for a job are to be deleted, if none of them is there any
    more."""

    job: str  # the job's name


class NodeDrain(Value, frozen=True, kw_only=True):
    """A user's wish to drain a node, or to have it used again, is to be kept."""

    node: str  # the node's name
    on: bool | None  # its devices are to be left (None: the wish is forgotten)


Asked = Write | Rank | ConfigRecord | NodeDrain | Sweep | RendezvousSweep | Paged | LeadershipProbe


class StoreTransactions:
    """The leader's keys as they are in the store: the revision of each, and the parts that records need.

    Begins with what the store held when this leader took over. `transactions` says what is to be done for a
    write; `done` is told of each transaction that was made.
    """

    def __init__(self, keys: Keys, limits: Limits, known: Iterable[KeyValue] = ()) -> None:
        """Raises `msgspec.DecodeError` where this release cannot tell which parts a record needs."""
        self._keys, self._limits = keys, limits
        self._revisions: dict[str, int] = {}
        self._parts: dict[str, dict[str, int]] = {}  # of each job: the bytes of its parts, by name
        self._needs: dict[str, dict[str, frozenset[str]]] = {}  # of each job: the parts of a record, by its key
        for item in known:
            self._is(item.key, item.value, item.mod_revision)

    def transactions(self, asked: Asked, *others: Asked) -> list[Ops]:
        """Returns the transactions to make, one after the other; the last one is the write itself. With a rank
        there may be `others`. Raises StoreTooLarge for a record that the store is not to have at all."""
        if isinstance(asked, Rank):
            return self._of_ranks([each for each in (asked, *others) if isinstance(each, Rank)])
        return HANDLERS[type(asked)](self, asked)

    def keyed(self, asked: ConfigRecord | NodeDrain) -> list[Ops]:
        """A record with a key of its own."""
        return [operations(self._keys, asked)]

    def probe(self, asked: LeadershipProbe) -> list[Ops]:
        """The schema's record again: only a leader can write it."""
        return [(Put(self._keys.schema, encode(SchemaRecord(release=__version__))),)]

    def sweep_rendezvous(self, asked: RendezvousSweep) -> list[Ops]:
        """Deletes all keys of a job's rendezvous."""
        return [(DeletePrefix(self._keys.rendezvous(asked.job)),)]

    def sweep(self, asked: Sweep) -> list[Ops]:
        """Deletes the parts that no record of a job needs."""
        return list(_together([Delete(key) for key in self._unneeded(asked.job)]))

    def page(self, asked: Paged) -> list[Ops]:
        """A page of the journal, in the place of the oldest ones."""
        return [(Put(asked.key, asked.value), *map(Delete, asked.gone))]

    def records(self, asked: Write) -> list[Ops]:
        """Records of a job, in parts where they are too large for one transaction."""
        ops = operations(self._keys, asked)
        old = tuple(Delete(key) for key in self._too_old(asked))
        if self._parts.get(asked.job) or not self._fit((*ops, *old)):
            return self._in_parts(asked, ops, old)
        return [(*ops, *old)]

    def compares(self, ops: Ops) -> list[Compare]:
        """Compares that hold if every key is as this leader left it: a transaction that lands late changes
        nothing then."""
        return [
            Compare.untouched(op.prefix, max(map(self._revision, self._under(op.prefix)), default=0))
            if isinstance(op, DeletePrefix)
            else Compare.modified(op.key, self._revision(op.key))
            for op in ops
        ]

    def done(self, ops: Ops, revisions: Mapping[str, int]) -> None:
        """A transaction was made, and each key that it put was changed last at one of these revisions."""
        for op in ops:
            if isinstance(op, Put):
                self._is(op.key, op.value, revisions[op.key])
            else:
                for key in self._under(op.prefix) if isinstance(op, DeletePrefix) else [op.key]:
                    self._is_gone(key)

    def sweeps(self, job: str) -> bool:
        """Returns True if the job has parts that no record needs."""
        return bool(self._unneeded(job))

    def _revision(self, key: str) -> int:
        return self._revisions.get(key, 0)

    def _under(self, prefix: str) -> list[str]:
        return [key for key in self._revisions if key.startswith(prefix)]

    def _is(self, key: str, value: bytes, revision: int) -> None:
        self._revisions[key] = revision
        job, part = self._split(key)
        if part.startswith("parts/"):
            self._parts.setdefault(job, {})[part.removeprefix("parts/")] = len(value)
        elif part.partition("/")[0] in LEADER_KEYS and (index := parted(value)):
            self._needs.setdefault(job, {})[key] = index.parts
        else:
            self._needs.get(job, {}).pop(key, None)

    def _is_gone(self, key: str) -> None:
        self._revisions.pop(key, None)
        job, part = self._split(key)
        self._needs.get(job, {}).pop(key, None)
        self._parts.get(job, {}).pop(part.removeprefix("parts/"), None)
        if not self._needs.get(job):
            self._needs.pop(job, None)
        if not self._parts.get(job):
            self._parts.pop(job, None)

    def _split(self, key: str) -> tuple[str, str]:
        """The job of a key and what follows it; nothing for a key of no job."""
        if not key.startswith(self._keys.jobs):
            return "", ""
        job, _, part = key.removeprefix(self._keys.jobs).partition("/")
        return job, part

    def _unneeded(self, job: str) -> list[str]:
        parts = self._parts.get(job, {})
        needed = frozenset[str]().union(*self._needs.get(job, {}).values()) if parts else frozenset()
        return [self._keys.job(job, "parts/") + name for name in parts if name not in needed]

    def _of_ranks(self, told: Sequence[Rank]) -> list[Ops]:
        puts = [rank_put(self._keys, rank) for rank in told if rank.key]
        if puts:  # of each key the last one
            return list(_together({op.key: op for op in puts}.values(), self._limits.request_bytes // 2))
        folder = self._keys.job(told[0].job, "ranks/")
        return [(DeletePrefix(folder),)] if self._under(folder) else []

    def _too_old(self, write: Write) -> list[str]:
        """The keys of history that go when this write adds to it: the oldest, but for the running plan's."""
        added = next(
            (record for record in write.records if isinstance(record, HistoryRecord | MeshHistoryRecord)), None
        )
        if added is None:
            return []
        proposal = next((record for record in write.records if isinstance(record, Proposal)), None)
        running = proposal.old.number if proposal is not None and proposal.old is not None else None
        folder = self._keys.job(write.job, "history/")
        kept = [self._keys.history(write.job, number) for number in (running,) if number is not None]
        keys = sorted(key for key in self._under(folder) if key not in kept)
        oldest = self._keys.history(write.job, max(0, added.number - MOST_HISTORY))
        old = [key for key in keys if key <= oldest]
        if not old and sum(self._parts.get(write.job, {}).values()) > MOST_PARTS_BYTES:
            old = keys[:2]  # more than are added: so the parts become fewer
        return old[:MOST_TOGETHER]

    def _fit(self, ops: Ops) -> bool:
        # The leader adds a condition of its own.
        compares = [Compare.created(self._keys.leader, 0), *self.compares(ops)]
        return request_bytes(compares, ops) <= self._limits.request_bytes

    def _in_parts(self, write: Write, ops: Ops, old: Ops) -> list[Ops]:
        """The write with its larger records in parts, after the transactions that store those."""
        tags = {record_key(self._keys, write.job, record): tag_of(record) for record in write.records}
        known, folder = self._parts.get(write.job, {}), self._keys.job(write.job, "parts/")
        parts: dict[str, bytes] = {}
        puts: list[Op] = []
        for op in ops:
            if not isinstance(op, Put) or len(op.value) <= SMALL_BYTES:
                puts.append(op)
                continue
            if len(op.value) > MOST_BYTES:
                raise StoreTooLarge(
                    f"the record {tags[op.key]!r} has {len(op.value):,} bytes, more than the store is to keep: "
                    f"{MOST_BYTES:,} are the most"
                )
            index, added = cut(op.value, tags[op.key], {*known, *parts})
            parts |= added
            puts.append(Put(op.key, encode(index)))
        stored = [Put(folder + name, value) for name, value in parts.items()]
        return [*_together(stored, self._limits.request_bytes // 2), (*puts, *old)]


def _together(ops: Iterable[Op], most_bytes: int = 1 << 20) -> Iterator[Ops]:
    """Operations that need not be made at once, as few transactions."""
    some: list[Op] = []
    for op in ops:
        if some and (len(some) >= MOST_TOGETHER or request_bytes((), [*some, op]) > most_bytes):
            yield tuple(some)
            some = []
        some.append(op)
    if some:
        yield tuple(some)


def operations(keys: Keys, write: Write | ConfigRecord | NodeDrain) -> Ops:
    """The operations of a write. The plan comes before the proposal's end: agents read in this order."""
    if isinstance(write, NodeDrain):
        key = keys.drains + write.node
        return (Put(key, encode(DrainRecord(on=write.on))) if write.on is not None else Delete(key),)
    if isinstance(write, ConfigRecord):
        places = keys.config, keys.config_history(write.number)
        ops: list[Op] = [Put(key, encode(write)) for key in places]
        if write.number > MOST_HISTORY:
            ops.append(Delete(keys.config_history(write.number - MOST_HISTORY)))
        return tuple(ops)
    if write.forget:
        # The end goes last: agents read in this order, and a worker that comes in between learns of it still.
        # Of parts those go that no record needs any more: see `Sweep`.
        parts = _LIFE_FOLDERS if write.keep_history else _FOLDERS
        folders = [DeletePrefix(keys.job(write.job, part)) for part in parts]
        return (*folders, *(Delete(keys.job(write.job, part)) for part in dict.fromkeys(_SINGLE.values())))
    ops = [Put(record_key(keys, write.job, record), encode(record)) for record in write.records]
    if write.close:
        ops.append(Delete(keys.job(write.job, "proposal")))
    return tuple(ops)


def rank_put(keys: Keys, rank: Rank) -> Put:
    """The put that stores it."""
    return Put(keys.job(rank.job, "ranks/") + rank.key.replace("/", ":"), encode(rank))


def record_key(keys: Keys, job: str, record: Record) -> str:
    """The key of a leader's record of a job."""
    if isinstance(record, HistoryRecord | MeshHistoryRecord):
        return keys.history(job, record.number)
    if isinstance(record, OutRecord):
        return f"{keys.rendezvous(job)}out/{record.torchrun}"
    if isinstance(record, RestartEndRecord):
        return keys.rendezvous(job) + "end"
    return keys.job(job, _SINGLE[type(record)])


#: The transactions of a write of each type; ranks are written together.
HANDLERS: dict[type, Callable[[StoreTransactions, Any], list[Ops]]] = {
    Write: StoreTransactions.records,
    ConfigRecord: StoreTransactions.keyed,
    NodeDrain: StoreTransactions.keyed,
    LeadershipProbe: StoreTransactions.probe,
    RendezvousSweep: StoreTransactions.sweep_rendezvous,
    Sweep: StoreTransactions.sweep,
    Paged: StoreTransactions.page,
}
