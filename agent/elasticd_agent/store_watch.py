"""The agent's view of the store: the leader, the other nodes, and each job's proposal, plan, fence, checkpoints
and end.

It watches the prefixes that have these, and not the whole cluster: what a leader writes into its journal and
its configuration, and what agents write of their workers, would be told to all agents for nothing. Each prefix
is heard in the order of its revisions; parts, records and end of a job are in one. Between prefixes there is no
order, and none is needed: a leader's records name its epoch, so that it is as high after them as after its key.
What a leader that was replaced wrote later is not there, as its writes compare its key; the second lock against
that (`elasticd.machines.agent.machine`) closes with the first that is heard of the new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from elasticd.codec.decoding import shown, skip
from elasticd.codec.record_parts import Shelf
from elasticd.codec.safe_text import shortened
from elasticd.machines.agent.state import (
    CheckpointsRead,
    DoneRead,
    Event,
    FenceRead,
    LeaderRead,
    PlanRead,
    ProposalRead,
)
from elasticd.records import (
    LASTING,
    CheckpointsRecord,
    DoneRecord,
    Fence,
    Keys,
    NodeRecord,
    PlanRecord,
    decode,
    decode_proposal,
    read_schema,
    schema_apart,
)
from elasticd.store.leader import ElectedLeader
from elasticd.store.protocol import KeyValue, Sink, Store, StoreReplaced, Watch, WatchEvent, WatchItem
from elasticd.store.state_file import StateFile
from elasticd_agent.internal_errors import outlived

_PARTS = ("proposal", "plan", "fence", "checkpoints", "done")
R = TypeVar("R", bound=msgspec.Struct)

#: Characters that are logged of why a record cannot be read: it ends with the remedy.
_MOST_WHY = 500
_log = logging.getLogger(__name__)


class StoreWatch:
    """Turns the store's keys into events, on the running loop, in the order of each prefix' revisions.

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
        self._watches: list[Watch] = []

    async def start(self) -> None:
        """Read everything once, then watch. Raises StoreError when the store is not there."""
        keys = self._keys
        prefixes = keys.schema, keys.leader, keys.nodes, keys.jobs  # whom to obey first, then the orders
        snapshots = await asyncio.to_thread(lambda: [self._store.snapshot(prefix) for prefix in prefixes])
        for prefix, snapshot in zip(prefixes, snapshots, strict=True):
            self._adopt(prefix, snapshot.items)
        for prefix, snapshot in zip(prefixes, snapshots, strict=True):
            begin = partial(self._store.watch, prefix, snapshot.revision + 1, self._sink(prefix))
            self._watches.append(await asyncio.to_thread(begin))  # it may wait until etcd answers again

    def close(self) -> None:
        """Cancels the watches. The store stays open."""
        for watch in self._watches:
            watch.cancel()

    def _sink(self, prefix: str) -> Sink:
        loop = asyncio.get_running_loop()

        def sink(item: WatchItem) -> None:
            loop.call_soon_threadsafe(self._take, prefix, item)

        return sink

    def _take(self, prefix: str, item: WatchItem) -> None:
        if isinstance(item, WatchEvent):
            self._read(item.key, item.item if item.kind == "put" else None)
        else:
            self._adopt(prefix, item.snapshot.items)

    def _adopt(self, prefix: str, items: tuple[KeyValue, ...]) -> None:
        """All that the store holds of a prefix: also what it does not hold any more."""
        for key in {key for key in self._known if key.startswith(prefix)} - {item.key for item in items}:
            self._read(key, None)
        if prefix == self._keys.jobs:
            # The parts before the records that need them: those may have changed since.
            self._shelf = Shelf(self._keys.jobs, ((item.key, item.value) for item in items))
        for item in items:
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
                parts = self._shelf.of(key)
                proposal = decode_proposal(item.value, parts) if item is not None else None
                self._emit(ProposalRead(job=job, proposal=proposal, revision=at))
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
            why = shortened(str(error), _MOST_WHY)
            skip("record", ("record", key), f"the record {shown(key)} in the store cannot be read: {why}")

    def _went_back(self, item: KeyValue) -> bool:
        """Returns True if the store is an old copy, whose orders may have been withdrawn. First remembered,
        then obeyed."""
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
    return ElectedLeader.of(item).value
