"""The store in memory: etcd's revisions, transactions, leases and watches without a server.

`MemoryServer` holds the data and `MemoryStore` is one client's connection to it, so that several
daemons of a test or of the simulator share one server, and each can be cut off alone.  Time comes from
the clock that the server is given: with a `VirtualClock` leases expire inside `advance`, and since
watchers are called on the thread that changes something, a single-threaded run is reproducible.

Faults: `MemoryServer.outage(True)` cuts everybody off and, as a stopped etcd does, stops leases from
ageing; `MemoryServer.full` puts it at its quota; `MemoryStore.outage(True)` cuts off one client;
`MemoryStore.lose_next_reply` leaves the outcome of a change unknown; `MemoryServer.compact` drops history.

Limits: it refuses what etcd refuses for its size, so that a test of a daemon meets that too. Those are limits
of what is sent. What is read has none, here or there: etcd answers with up to 2 GiB, our sessions take messages
of any length, and `EtcdStore` reads a prefix in pages only to keep each answer within its deadline.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence

from elasticd.clock import Clock, Timer, WallClock
from elasticd.store.protocol import (
    Compare,
    Delete,
    DeletePrefix,
    Identity,
    KeyValue,
    LeaseLost,
    Limits,
    Op,
    OutcomeUnknown,
    Put,
    Sink,
    Snapshot,
    Store,
    StoreFull,
    StoreUnavailable,
    TransactResult,
    Watch,
    WatchEvent,
    WatchItem,
    WatchReset,
    check_ops,
    check_prefix,
    check_request,
    check_ttl,
)


class MemoryServer:
    """The data, and what a server does by itself: expire leases, feed watches, forget old history.

    `history_limit` is how many events are kept for watches that resume; older ones are compacted.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        history_limit: int = 10_000,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits if limits is not None else Limits()
        self.clock: Clock = clock if clock is not None else WallClock()
        self.cluster_id = 1
        self.lock = threading.RLock()
        self.down = False
        self.full = False  # it reads, and takes neither transactions nor leases, as etcd 3.5.1 then
        self.revision = 1
        self._compacted = 0
        self._items: dict[str, KeyValue] = {}
        self._history: list[WatchEvent] = []
        self._history_limit = history_limit
        self._leases: dict[int, _Lease] = {}
        self._lease_ids = itertools.count(1)
        self._expiry: Timer | None = None
        self.feeds: list[_Feed] = []  # the places of the watches, each of which is told of changes

    def outage(self, on: bool) -> None:
        """Stop, or start again with all data; leases start again with their full time, as etcd's do."""
        with self.lock:
            self.down = on
            if not on:
                for lease in self._leases.values():
                    lease.expires = self.clock.now() + lease.ttl
                self._arm_expiry()
        self.feed()

    def compact(self, revision: int) -> None:
        """Forget the history before `revision`; watches that need it get a `WatchReset`."""
        with self.lock:
            if not self._compacted < revision <= self.revision:
                raise ValueError(
                    f"compact between {self._compacted + 1} and {self.revision}, not at {revision}"
                )
            self._compacted = revision
            self._history = self._history[self._first_event(revision) :]

    def feed(self) -> None:
        """Deliver what the watches have not seen yet; call it without holding the lock."""
        with self.lock:
            feeds = list(self.feeds)
        for feed in feeds:
            feed.pump()

    # What follows is for `MemoryStore`, and is called under the lock.

    def get(self, key: str) -> KeyValue | None:
        """The key at the newest revision, or None. An outage is not checked: `MemoryStore` does that."""
        return self._items.get(key)

    def snapshot(self, prefix: str) -> Snapshot:
        """As `Store.snapshot`: sorted by key, at the newest revision."""
        return Snapshot(revision=self.revision, items=tuple(self._under(prefix)))

    def transact(self, compares: Iterable[Compare], then: Sequence[Op]) -> TransactResult:
        """As `Store.transact`, for operations that `MemoryStore` has checked. Raises LeaseLost; feeds no
        watch."""
        succeeded = all(compare.holds(*self._meant(compare)) for compare in compares)
        if succeeded:
            self._apply(then)
        return TransactResult(succeeded=succeeded, revision=self.revision)

    def grant(self, ttl: int) -> int:
        """A lease that expires `ttl` seconds from now by the server's clock; its id, counted from 1."""
        lease = next(self._lease_ids)
        self._leases[lease] = _Lease(ttl, self.clock.now() + ttl)
        self._arm_expiry()
        return lease

    def keep_alive(self, lease: int) -> int:
        """The lease has its full time again; returns that in seconds. Raises LeaseLost."""
        granted = self._lease(lease)
        granted.expires = self.clock.now() + granted.ttl
        return granted.ttl

    def revoke(self, lease: int) -> None:
        """Ends the lease and deletes its keys, all at one revision. Harmless when it is gone."""
        if lease in self._leases:
            # By key, as etcd does.
            held = sorted(item.key for item in self._items.values() if item.lease == lease)
            self._apply([Delete(key) for key in held])
            del self._leases[lease]

    def expire_due(self) -> None:
        """Revoke the leases whose time has come. A stopped server does not age."""
        now = self.clock.now()
        due = [] if self.down else [lease for lease, held in self._leases.items() if held.expires <= now]
        for lease in due:
            self.revoke(lease)

    def since(self, prefix: str, revision: int) -> list[WatchItem]:
        """The items for a watch of `prefix` that wants `revision` and later."""
        if revision < self._compacted:
            return [WatchReset(snapshot=self.snapshot(prefix))]
        return [event for event in self._history[self._first_event(revision) :] if event.key.startswith(prefix)]

    def _under(self, prefix: str) -> list[KeyValue]:
        """By key, as etcd reads and deletes."""
        return [self._items[key] for key in sorted(key for key in self._items if key.startswith(prefix))]

    def _meant(self, compare: Compare) -> Sequence[KeyValue | None]:
        return self._under(compare.key) if compare.target == "prefix" else [self._items.get(compare.key)]

    def _each(self, ops: Sequence[Op]) -> Iterator[Put | Delete]:
        for op in ops:
            if isinstance(op, DeletePrefix):
                yield from [Delete(item.key) for item in self._under(op.prefix)]
            else:
                yield op

    def _apply(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if isinstance(op, Put) and op.lease:
                self._lease(op.lease)
        revision = self.revision + 1
        events = [event for op in self._each(ops) if (event := self._change(op, revision)) is not None]
        if not events:
            return
        self.revision = revision
        self._history.extend(events)
        if len(self._history) > self._history_limit:
            self.compact(self._history[len(self._history) // 2].mod_revision)

    def _change(self, op: Put | Delete, revision: int) -> WatchEvent | None:
        old = self._items.get(op.key)
        if isinstance(op, Delete):
            if old is None:
                return None
            del self._items[op.key]
            gone = KeyValue(key=op.key, value=b"", create_revision=0, mod_revision=revision, version=0)
            return WatchEvent(kind="delete", item=gone)
        item = KeyValue(
            key=op.key,
            value=op.value,
            create_revision=old.create_revision if old is not None else revision,
            mod_revision=revision,
            version=old.version + 1 if old is not None else 1,
            lease=op.lease,
        )
        self._items[op.key] = item
        return WatchEvent(kind="put", item=item)

    def _lease(self, lease: int) -> _Lease:
        if lease not in self._leases:
            raise LeaseLost(f"lease {lease:x} has expired or was revoked")
        return self._leases[lease]

    def _first_event(self, revision: int) -> int:
        return bisect.bisect_left(self._history, revision, key=lambda event: event.mod_revision)

    def _arm_expiry(self) -> None:
        # One timer, for the lease that is first to go as things stand. A refresh leaves it alone: it
        # then finds nothing due and is set anew.
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self._leases and not self.down:
            first = min(lease.expires for lease in self._leases.values())
            self._expiry = self.clock.call_at(first, self._on_expiry)

    def _on_expiry(self) -> None:
        with self.lock:
            self.expire_due()
            self._arm_expiry()
        self.feed()


class MemoryStore(Store):
    """One client of a `MemoryServer`; without one given, of a server of its own."""

    def __init__(self, server: MemoryServer | None = None) -> None:
        self.server = server if server is not None else MemoryServer()
        self._cut_off = False
        self._closed = False
        self._lost_reply: bool | None = None
        self._feeds: list[_Feed] = []

    @property
    def limits(self) -> Limits:
        """As `Store.limits`: those of its server, for all its clients."""
        return self.server.limits

    @property
    def reachable(self) -> bool:
        """False in an outage of the server, or of this client alone."""
        return not (self.server.down or self._cut_off)

    def outage(self, on: bool) -> None:
        """Cut this client off, or let it back: its watches then catch up from where they were."""
        with self.server.lock:
            self._cut_off = on
        self.server.feed()

    def lose_next_reply(self, *, applied: bool) -> None:
        """Let the next change of this client raise OutcomeUnknown, carried out or not."""
        self._lost_reply = applied

    def get(self, key: str) -> KeyValue | None:
        """As `Store.get`. In an outage it raises StoreUnavailable at once."""
        with self._connected() as server:
            return server.get(key)

    def snapshot(self, prefix: str) -> Snapshot:
        """As `Store.snapshot`, without pages. Raises ValueError for an empty prefix."""
        check_prefix(prefix)
        with self._connected() as server:
            return server.snapshot(prefix)

    def transact(self, compares: Iterable[Compare], then: Sequence[Op]) -> TransactResult:
        """As `Store.transact`. Raises OutcomeUnknown after `lose_next_reply`, once."""
        check_ops(then)
        compares = tuple(compares)
        with self._connected(writes=bool(then)) as server:
            check_request(server.limits, compares, then)
            applied, self._lost_reply = self._lost_reply, None
            if applied is None:
                return server.transact(compares, then)
            if applied:
                server.transact(compares, then)
        raise OutcomeUnknown("the answer to a transaction was lost")

    def grant(self, ttl_seconds: int) -> int:
        """As `Store.grant`, by the server's clock. Raises ValueError for a `ttl_seconds` that is not a whole
        number of at least 1."""
        check_ttl(ttl_seconds)
        with self._connected(writes=True) as server:
            return server.grant(ttl_seconds)

    def keep_alive(self, lease: int) -> int:
        """As `Store.keep_alive`. Leases whose time has come expire first, this one among them."""
        with self._connected() as server:
            return server.keep_alive(lease)

    def revoke(self, lease: int) -> None:
        """As `Store.revoke`. Watches are told on the calling thread, unless another one is delivering to
        them."""
        with self._connected() as server:
            server.revoke(lease)

    def watch(self, prefix: str, revision: int, sink: Sink | None = None) -> Watch:
        """As `Store.watch`. `sink` is called on the thread that makes a change; changes since `revision` come
        before this returns. Raises StoreUnavailable after `close`, ValueError for an empty prefix."""
        check_prefix(prefix)
        if self._closed:
            raise StoreUnavailable("this store was closed")
        feed = _Feed(self, prefix, revision, sink)
        with self.server.lock:
            self.server.feeds.append(feed)
            self._feeds = [*(known for known in self._feeds if not known.watch.cancelled), feed]
        feed.pump()
        return feed.watch

    def identity(self) -> Identity:
        """As `Store.identity`. It never raises StoreRefused."""
        with self._connected() as server:
            return Identity(cluster_id=server.cluster_id, revision=server.revision)

    def known(self) -> Identity | None:
        """As `Store.known`: the server's newest revision, whether or not this client has seen it."""
        return Identity(cluster_id=self.server.cluster_id, revision=self.server.revision)

    def close(self) -> None:
        """As `Store.close`. The server and its other clients go on."""
        self._closed = True
        for feed in self._feeds:
            feed.watch.cancel()
        self._feeds = []

    @contextlib.contextmanager
    def _connected(self, *, writes: bool = False) -> Iterator[MemoryServer]:
        """The server under its lock; afterwards, outside it, the watches are fed. writes: as a store at its
        quota does not let anybody."""
        server, changed = self.server, False
        try:
            with server.lock:
                if self._closed:
                    raise StoreUnavailable("this store was closed")
                if not self.reachable:
                    raise StoreUnavailable("the in-memory store has an outage")
                if writes and server.full:
                    raise StoreFull("the in-memory store is at its quota (database space exceeded)")
                before = server.revision
                try:
                    server.expire_due()
                    yield server
                finally:
                    changed = server.revision != before
        finally:
            if changed:
                server.feed()


class _Lease:
    __slots__ = ("expires", "ttl")

    def __init__(self, ttl: int, expires: float) -> None:
        self.ttl = ttl
        self.expires = expires


class _Feed:
    """A watch's place in the history. One thread at a time delivers, so that the order is kept."""

    def __init__(self, store: MemoryStore, prefix: str, revision: int, sink: Sink | None) -> None:
        self._store = store
        self._prefix = prefix
        self._next_revision = revision
        self._delivering = False
        self.watch = Watch(sink, self._detach)

    def pump(self) -> None:
        # Whoever delivers looks again before leaving, so the thread that finds it busy may go. The
        # lock is not held while delivering: a sink may use the store.
        while items := self._begin():
            try:
                for item in items:
                    self.watch.deliver(item)
            finally:
                self._delivering = False

    def _begin(self) -> list[WatchItem]:
        server = self._store.server
        with server.lock:
            if self._delivering or self.watch.cancelled or not self._store.reachable:
                return []
            items = server.since(self._prefix, self._next_revision)
            self._next_revision = max(self._next_revision, server.revision + 1)
            self._delivering = bool(items)
            return items

    def _detach(self) -> None:
        server = self._store.server
        with server.lock, contextlib.suppress(ValueError):  # it may be gone already
            server.feeds.remove(self)
