"""What the agent reads from the store: who leads, the other nodes, and each job's proposal, plan, fence,
checkpoints and end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from elasticd.decoding import count, skip
from elasticd.machines.agent_state import (
    CheckpointsRead,
    DoneRead,
    Event,
    FenceRead,
    LeaderRead,
    PlanRead,
    ProposalRead,
)
from elasticd.parts import Shelf
from elasticd.records import (
    LASTING,
    CheckpointsRecord,
    DoneRecord,
    Fence,
    Keys,
    NodeRecord,
    PlanRecord,
    Proposal,
    decode,
    read_schema,
    schema_apart,
)
from elasticd.remembered import StateFile
from elasticd.store.leader import Leader
from elasticd.store.protocol import KeyValue, Store, StoreReplaced, WatchEvent, WatchItem
from elasticd.store.watch import Watch
from elasticd_agent.defects import outlived

_PARTS = ("proposal", "plan", "fence", "checkpoints", "done")
R = TypeVar("R", bound=msgspec.Struct)

_log = logging.getLogger(__name__)


class Records:
    """Turns the store's keys into events, on the running loop, in the order of their revisions.

    `follow` is called with the leader's url, or None when there is no leader, `node_read` with each node's
    record, or None when that is gone, `refuse` with why this agent cannot work with what the store holds now.
    `memory` knows which plans and fences were seen.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        emit: Callable[[Event], None],
        follow: Callable[[str | None], None],
        node_read: Callable[[str, NodeRecord | None], None],
        refuse: Callable[[str], None],
        memory: StateFile | None = None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._emit = emit
        self._follow = follow
        self._node_read = node_read
        self._refuse, self._memory = refuse, memory
        self._known: set[str] = set()
        self._shelf = Shelf(keys.jobs)
        self._watch: Watch | None = None

    async def start(self) -> None:
        """Read everything once, then watch. Raises StoreError when the store is not there."""
        snapshot = await asyncio.to_thread(self._store.snapshot, self._keys.root)
        self._adopt(snapshot.items)
        loop = asyncio.get_running_loop()

        def sink(item: WatchItem) -> None:
            loop.call_soon_threadsafe(self._take, item)

        self._watch = self._store.watch(self._keys.root, snapshot.revision + 1, sink)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def _take(self, item: WatchItem) -> None:
        if isinstance(item, WatchEvent):
            self._read(item.key, item.item if item.kind == "put" else None)
        else:
            self._adopt(item.snapshot.items)

    def _adopt(self, items: tuple[KeyValue, ...]) -> None:
        """The whole of what the store holds: also what it does not hold any more."""
        for key in self._known - {item.key for item in items}:
            self._read(key, None)
        # The parts before the records that need them: those may have changed since.
        self._shelf = Shelf(self._keys.jobs, ((item.key, item.value) for item in items))
        # The leader first: its epoch is what the orders of the others are measured by.
        for item in sorted(items, key=lambda item: item.key != self._keys.leader):
            self._read(item.key, item)

    def _read(self, key: str, item: KeyValue | None) -> None:
        """One key. An error costs this key, not those that are read after it."""
        try:
            self._read_key(key, item)
        except Exception as error:
            outlived("a record of the store", error)

    def _read_key(self, key: str, item: KeyValue | None) -> None:
        if self._shelf.take(key, item.value if item is not None else None) or self._keys.note_unknown(key):
            return
        if key == self._keys.schema:
            if item is not None:
                self._read_schema(item)
            return
        job, _, part = key.removeprefix(self._keys.jobs).rpartition("/")
        node = key.removeprefix(self._keys.nodes) if key.startswith(self._keys.nodes) else ""
        of_job = key.startswith(self._keys.jobs) and part in _PARTS
        if key != self._keys.leader and not node and not of_job:
            return
        at = item.mod_revision if item is not None else 0
        if part in LASTING and item is not None and self._went_back(item):
            return
        (self._known.discard if item is None else self._known.add)(key)
        try:
            if key == self._keys.leader:
                self._read_leader(item)
            elif node:
                self._node_read(node, self._decoded(item, NodeRecord))
            elif part == "proposal":
                self._emit(ProposalRead(job=job, proposal=self._decoded(item, Proposal), revision=at))
            elif part == "plan":
                self._emit(PlanRead(job=job, record=self._decoded(item, PlanRecord), revision=at))
            elif part == "fence":
                self._emit(FenceRead(job=job, record=self._decoded(item, Fence), revision=at))
            elif part == "checkpoints":
                record = self._decoded(item, CheckpointsRecord)
                self._emit(CheckpointsRead(job=job, record=record, revision=at))
            else:
                self._emit(DoneRead(job=job, record=self._decoded(item, DoneRecord), revision=at))
        except ValueError as error:
            count("record")
            _log.error("the record %s in the store cannot be read: %s", key, error)

    def _went_back(self, item: KeyValue) -> bool:
        """Whether the store is an old copy, whose orders may have been withdrawn. First remembered, then
        obeyed."""
        if self._memory is None:
            return False
        try:
            self._memory.check((item,))
        except StoreReplaced as error:
            self._refuse(self._memory.refusal(error))
            return True
        return False

    def _decoded(self, item: KeyValue | None, kind: type[R]) -> R | None:
        return decode(item.value, kind, self._shelf.of(item.key)) if item is not None else None

    def _read_schema(self, item: KeyValue) -> None:
        """Ends this agent only for a leader's record that is too far away; other bytes are no leader's."""
        try:
            record = read_schema(item.value)
        except msgspec.DecodeError as error:
            skip("record", ("schema",), f"this agent goes on, although {error}")
            return
        if refusal := schema_apart(record):
            self._refuse(refusal)

    def _read_leader(self, item: KeyValue | None) -> None:
        if item is None:
            self._follow(None)
            return
        self._emit(LeaderRead(epoch=item.create_revision))
        self._follow(_leader_url(item))


def _leader_url(item: KeyValue) -> str:
    return Leader.of(item).value
