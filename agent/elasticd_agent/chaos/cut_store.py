"""A store that can be cut off, as by a broken network: for chaos, around the one that the agent uses."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from elasticd.store.protocol import (
    Compare,
    Identity,
    KeyValue,
    Limits,
    Op,
    Sink,
    Snapshot,
    Store,
    StoreUnavailable,
    TransactResult,
    Watch,
    WatchItem,
)

T = TypeVar("T")


class CuttableStore(Store):
    """`store`, until it is `cut`: then calls raise `StoreUnavailable` and watches are silent. Once it is healed
    watches go on with the item after the last one, as a new session's do."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._is_cut = False
        self._held: deque[tuple[Sink, WatchItem]] = deque()

    def cut(self) -> None:
        """From now on no call reaches the store."""
        with self._lock:
            self._is_cut = True

    def heal(self) -> None:
        """Calls reach the store again; watches get what they missed."""
        with self._lock:
            self._is_cut = False
            self._release()

    @property
    def limits(self) -> Limits:
        """Those of the store, cut or not."""
        return self._store.limits

    def get(self, key: str) -> KeyValue | None:
        """As the store's, unless it is cut."""
        return self._reach(lambda: self._store.get(key))

    def snapshot(self, prefix: str) -> Snapshot:
        """As the store's, unless it is cut."""
        return self._reach(lambda: self._store.snapshot(prefix))

    def transact(self, compares: Iterable[Compare], then: Sequence[Op]) -> TransactResult:
        """As the store's, unless it is cut."""
        return self._reach(lambda: self._store.transact(compares, then))

    def grant(self, ttl_seconds: int) -> int:
        """As the store's, unless it is cut: a lease cannot be had."""
        return self._reach(lambda: self._store.grant(ttl_seconds))

    def keep_alive(self, lease: int) -> int:
        """As the store's, unless it is cut: the lease runs out meanwhile."""
        return self._reach(lambda: self._store.keep_alive(lease))

    def revoke(self, lease: int) -> None:
        """As the store's, unless it is cut."""
        self._reach(lambda: self._store.revoke(lease))

    def watch(self, prefix: str, revision: int, sink: Sink | None = None) -> Watch:
        """With a sink alone: what reads a watch itself cannot be held back."""
        if sink is None:
            return self._store.watch(prefix, revision)

        def held(item: WatchItem) -> None:
            with self._lock:
                self._held.append((sink, item))
                if not self._is_cut:
                    self._release()

        return self._store.watch(prefix, revision, held)

    def identity(self) -> Identity:
        """As the store's, unless it is cut."""
        return self._reach(self._store.identity)

    def known(self) -> Identity | None:
        """The knowledge of the store without asking it, cut or not."""
        return self._store.known()

    def close(self) -> None:
        """Lets go of the store, cut or not."""
        self._store.close()

    def _reach(self, call: Callable[[], T]) -> T:
        if self._is_cut:
            raise StoreUnavailable("chaos cut this agent off from the store")
        return call()

    def _release(self) -> None:
        """In order, under the lock: sinks do not block."""
        while self._held:
            sink, item = self._held.popleft()
            sink(item)
