"""Keeps this agent's keys in the store: its node and its workers, all under one lease.

What ought to be there is set from the event loop; a thread brings the store to it, over outages and after a
lost lease, since the store's calls block. The node's key is also the proof that no other agent serves it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from elasticd.backoff import Backoff, jittered
from elasticd.decoding import shown
from elasticd.records import Keys, MemberRecord, NodeRecord, decode, encode
from elasticd.store.keeper import LeaseKeeper
from elasticd.store.protocol import (
    Compare,
    KeyValue,
    LeaseLost,
    OutcomeUnknown,
    Put,
    Store,
    StoreError,
    StoreTooLarge,
)

#: Seconds between attempts to write the keys: doubled from the first to the second.
_RETRY = (0.25, 2.0)
_POLL_SECONDS = 0.2

_log = logging.getLogger(__name__)


class NodeTaken(Exception):
    """Another living agent has this node's name; the message says what to do."""


class Registrar:
    """`claim` the node's key, then `start`; `failed(reason)` comes from the thread if it is lost for good."""

    def __init__(
        self, store: Store, keys: Keys, record: NodeRecord, ttl: int, failed: Callable[[str], None]
    ) -> None:
        self._store, self._keys, self._record, self._ttl = store, keys, record, ttl
        self._failed = failed
        self._node_key = keys.node(record.node)
        self._lock = threading.Lock()
        self._wanted: dict[str, bytes] = {}
        self._written: dict[str, bytes] = {}
        self._told: dict[str, Callable[[], None]] = {}
        self._keeper: LeaseKeeper | None = None
        self._lease = 0
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registrar", daemon=True)

    def claim(self) -> None:
        """Take the node's key. A dead agent's is waited for until its lease has run out.

        Raises NodeTaken, and StoreError when the store is not there.
        """
        deadline = time.monotonic() + self._ttl + 1.0
        lease = self._store.grant(self._ttl)
        while not self._take(lease):
            holder = self._store.get(self._node_key)
            if holder is not None and time.monotonic() >= deadline:
                self._store.revoke(lease)
                raise NodeTaken(self._taken_by(holder))
            if self._stop.wait(jittered(_POLL_SECONDS)):
                self._store.revoke(lease)
                return
            self._store.keep_alive(lease)
        self._lease = lease
        self._keeper = LeaseKeeper(self._store, lease, self._ttl, lambda _: self._wake.set()).start()

    def start(self) -> None:
        self._thread.start()

    def set_node(self, record: NodeRecord) -> None:
        """The node's key says this from now on."""
        with self._lock:
            self._record = record
            self._wanted[self._node_key] = encode(record)
        self._wake.set()

    def set_member(self, job: str, record: MemberRecord) -> None:
        with self._lock:
            self._wanted[self._keys.member(job, record.device)] = encode(record)
        self._wake.set()

    def clear_member(self, job: str, device: str) -> None:
        with self._lock:
            self._wanted.pop(self._keys.member(job, device), None)
        self._wake.set()

    def hold(self, key: str, value: bytes, written: Callable[[], None]) -> None:
        """Keep this key as long as this agent lives; `written` is called from the thread once it is there."""
        with self._lock:
            self._wanted[key] = value
            self._told[key] = written
        self._wake.set()

    def release(self, key: str) -> None:
        with self._lock:
            self._wanted.pop(key, None)
            self._told.pop(key, None)
        self._wake.set()

    def give_up(self) -> None:
        """Let a `claim` that waits return; nothing is claimed then."""
        self._stop.set()

    def close(self) -> None:
        """End the thread and give the lease back, and with it all keys. Blocks as the store does."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._keeper is not None:
            self._keeper.stop(revoke=True)

    def _take(self, lease: int) -> bool:
        put = Put(self._node_key, encode(self._record), lease)
        try:
            if self._store.transact((Compare.absent(self._node_key),), (put,)).succeeded:
                return True
        except OutcomeUnknown:
            # The lease is ours alone, so the key tells.
            pass
        found = self._store.get(self._node_key)
        return found is not None and found.lease == lease

    def _taken_by(self, holder: KeyValue) -> str:
        try:
            other = decode(holder.value, NodeRecord)
            who = f"agent {other.agent} at {other.address}"
        except ValueError:
            who = "another agent"
        return (
            f"node {self._record.node!r} is served by {who}, which is alive: stop that one, "
            "or give this agent a name of its own with --node"
        )

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            pause = Backoff(*_RETRY)
            while not self._stop.is_set() and not self._settle():
                self._stop.wait(pause.next())

    def _settle(self) -> bool:
        """Bring the store to what is wanted; False when that must be tried again."""
        try:
            if self._keeper is not None and self._keeper.lost:
                self._reclaim()
            with self._lock:
                wanted = dict(self._wanted)
            for key in self._written.keys() - wanted.keys():
                self._store.delete(key)
                del self._written[key]
            for key, value in wanted.items():
                if self._written.get(key) != value:
                    self._put(key, value)
                    self._written[key] = value
            self._tell()
        except NodeTaken as taken:
            self._failed(str(taken))
            self._stop.set()
        except LeaseLost:
            if self._keeper is not None:
                self._keeper.refresh()
            return False
        except StoreError as error:
            _log.debug("the store did not take this node's keys, trying again: %s", error)
            return False
        return True

    def _put(self, key: str, value: bytes) -> None:
        """One key that the store does not take, for its size, does not keep the others waiting."""
        try:
            self._store.put(key, value, self._lease)
        except StoreTooLarge as error:
            _log.error("the key %s is not written: %s", shown(key), error)

    def _tell(self) -> None:
        with self._lock:
            there = [key for key in self._told if self._written.get(key) == self._wanted.get(key)]
            calls = [self._told.pop(key) for key in there]
        for call in calls:
            call()

    def _reclaim(self) -> None:
        """The lease ran out (this process was frozen, or cut off while etcd ran on): begin anew."""
        _log.warning("the lease of node %s was lost: taking a new one", self._record.node)
        if self._keeper is not None:
            self._keeper.stop()
        self._written.clear()
        self.claim()
