"""The protocol of a store: keys with revisions, transactions, leases and watches, and the errors they raise.

The words are etcd's.  Every change gives the whole store a new *revision*; a key remembers the
revision that created it and the one that last changed it; a *lease* takes its keys along when it
expires; a *watch* reports every change of a prefix from a revision on, each exactly once and in order.

An operation ends in one of six ways:

1. it answers (a transaction whose comparison failed is an answer: `succeeded=False`);
2. `StoreUnavailable`: an outage. Nothing was changed; try again later;
3. `OutcomeUnknown`, a `StoreUnavailable`: the deadline passed or the connection was lost after a
   change was sent. It may have happened, or may yet: settle it with `confirm.settle`;
4. `StoreRefused`: wrong credentials, or an etcd that is older than, or another than, the one seen
   before. Repeating does not help;
5. `StoreTooLarge`: the request is larger than the store's `Limits`. Nothing was changed, and the store
   is well: the caller asks for less, or gives this one thing up;
6. `StoreFull`, a `StoreUnavailable`: the store is at its quota, and an operator must free space.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, Protocol

import msgspec

_log = logging.getLogger(__name__)


class StoreError(Exception):
    """Anything a store can raise. A daemon waits where it is a `StoreUnavailable`; each other class says for
    itself what happened."""


class StoreUnavailable(StoreError):
    """The store cannot be reached; the operation was not carried out."""


class OutcomeUnknown(StoreUnavailable):
    """A change was sent and its answer never came: it may have been carried out, or may yet be."""


class StoreFull(StoreUnavailable):
    """The store is at its quota: it reads, and takes nothing more until an operator frees space. Nothing was
    changed."""


class StoreRefused(StoreError):
    """The store is there but must not be used: credentials, permissions, or an older or other cluster."""


class StoreReplaced(StoreRefused):
    """The store is another than the one known before, or came back older than it was."""


class StoreTooLarge(StoreError):
    """The request has more bytes or operations than the store takes: it is never carried out."""


class LeaseLost(StoreError):
    """The lease has expired or was revoked; its keys are gone."""


class WatchCompacted(StoreError):
    """The history that a watch asked for was compacted away.

    Consumers never see it: the watch reads its prefix afresh and delivers a `WatchReset` instead.
    """

    def __init__(self, compact_revision: int) -> None:
        super().__init__(f"history before revision {compact_revision} has been compacted")
        self.compact_revision = compact_revision


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a store: etcd's own defaults. An etcd may be configured otherwise; one that takes less
    refuses by itself, which is a `StoreTooLarge` too."""

    operations: int = 128  # conditions, or operations of one side, in a transaction (etcd's --max-txn-ops)
    request_bytes: int = 1_572_864  # a request as it is sent (etcd's --max-request-bytes)
    page_bytes: int = 1 << 20  # a page of a prefix that is read: the next one is made larger or smaller by it
    page_keys: int = 128  # keys of such a page


class KeyValue(msgspec.Struct, frozen=True, kw_only=True):
    """A key as the store holds it. `version` counts its changes since creation; `lease` is 0 for none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int = 0


class Put(msgspec.Struct, frozen=True):
    """Set a key; the key dies with `lease` unless that is 0."""

    key: str
    value: bytes
    lease: int = 0

    def __post_init__(self) -> None:
        _check_key(self.key)
        if not isinstance(self.value, bytes):
            raise TypeError(f"the value of {self.key!r} must be bytes, not {type(self.value).__name__}")


class Delete(msgspec.Struct, frozen=True):
    """Remove a key; nothing happens when it is absent."""

    key: str

    def __post_init__(self) -> None:
        _check_key(self.key)


class DeletePrefix(msgspec.Struct, frozen=True):
    """Remove all keys that begin with `prefix`, however many: it counts as one operation."""

    prefix: str

    def __post_init__(self) -> None:
        check_prefix(self.prefix)


Op = Put | Delete | DeletePrefix


class Compare(msgspec.Struct, frozen=True):
    """One condition of a transaction, made by `created`, `modified`, `absent` or `untouched`."""

    key: str
    target: Literal["create", "mod", "prefix"]
    expected: int  # revision

    def __post_init__(self) -> None:
        _check_key(self.key)
        if not isinstance(self.expected, int):
            raise TypeError(f"comparing the {self.target} of {self.key!r} needs int")

    @classmethod
    def created(cls, key: str, revision: int) -> Compare:
        """The key exists and was created at `revision` (0: it is absent)."""
        return cls(key, "create", revision)

    @classmethod
    def modified(cls, key: str, revision: int) -> Compare:
        """The key was last changed at `revision` (0: it is absent)."""
        return cls(key, "mod", revision)

    @classmethod
    def absent(cls, key: str) -> Compare:
        """The key does not exist."""
        return cls(key, "create", 0)

    @classmethod
    def untouched(cls, prefix: str, revision: int) -> Compare:
        """No key that begins with `prefix` was changed after `revision`."""
        return cls(prefix, "prefix", revision)

    def holds(self, *items: KeyValue | None) -> bool:
        """Returns True if the condition is true of what the store holds: under the key, or under its prefix."""
        if self.target == "prefix":
            return all(item is None or item.mod_revision <= self.expected for item in items)
        (stored,) = items
        if stored is None:
            return self.expected == 0
        return (stored.create_revision if self.target == "create" else stored.mod_revision) == self.expected


class TransactResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a transaction: True if all conditions held, and the store's revision after the
    transaction."""

    succeeded: bool
    revision: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All keys of a prefix at one revision, by key. Watching from `revision + 1` misses nothing."""

    revision: int
    items: tuple[KeyValue, ...]


class WatchEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One change. Of a deletion only `item.key` and `item.mod_revision` mean anything."""

    kind: Literal["put", "delete"]
    item: KeyValue

    @property
    def key(self) -> str:
        """The key that was changed."""
        return self.item.key

    @property
    def mod_revision(self) -> int:
        """The revision of the change."""
        return self.item.mod_revision


class WatchReset(msgspec.Struct, frozen=True, kw_only=True):
    """History was compacted: forget what you knew of the prefix, it is now `snapshot`.

    Later items begin at `snapshot.revision + 1`.
    """

    snapshot: Snapshot


WatchItem = WatchEvent | WatchReset


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Which store this is and how far it has come: what a daemon remembers to refuse an older one."""

    cluster_id: int
    revision: int


Sink = Callable[[WatchItem], None]


class Watch:
    """The receiving end of a watch, as `Store.watch` returns it: a queue that blocks, or a sink that is called.

    Two ways to read it without a sink:

    - a thread:  `for item in watch: ...` ends when the watch is cancelled;
    - a test:    `watch.get(timeout=5)` gives the next item, or None when none came in time.
    """

    def __init__(self, sink: Sink | None = None, on_cancel: Callable[[], None] | None = None) -> None:
        self._queue: queue.SimpleQueue[WatchItem | None] = queue.SimpleQueue()
        self._sink: Sink = sink if sink is not None else self._queue.put
        self._on_cancel = on_cancel
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """True if it delivers nothing any more."""
        return self._cancelled.is_set()

    def get(self, timeout: float | None = None) -> WatchItem | None:
        """The next item; None when the watch is cancelled or `timeout` seconds have passed."""
        if self.cancelled:
            return None
        with contextlib.suppress(queue.Empty):
            return self._queue.get(timeout=timeout)
        return None

    def __iter__(self) -> Iterator[WatchItem]:
        while (item := self.get()) is not None:
            yield item

    def cancel(self) -> None:
        """Stop. Nothing is delivered afterwards, except a call of the sink that is under way."""
        if self._cancelled.is_set():
            return
        self._cancelled.set()
        self._queue.put(None)
        if self._on_cancel is not None:
            self._on_cancel()

    def deliver(self, item: WatchItem) -> None:
        """For stores: hand one item over, unless the watch was cancelled."""
        if self.cancelled:
            return
        try:
            self._sink(item)
        except Exception:
            # One bad item must not cost the reader all that follow.
            _log.exception("a watch's sink failed on %r", item)

    def wait_cancelled(self, timeout: float) -> bool:
        """For stores: wait before trying again, but no longer than the watch is wanted."""
        return self._cancelled.wait(timeout)


class Store(Protocol):
    """A store: synchronous, thread-safe. All but `watch` and `close` may raise `StoreUnavailable`."""

    @property
    def limits(self) -> Limits:
        """The largest request that this store sends."""
        ...

    def get(self, key: str) -> KeyValue | None:
        """The key as it is now (linearizable), or None."""
        ...

    def snapshot(self, prefix: str) -> Snapshot:
        """All keys that begin with `prefix`, at one revision, however many: it reads them page by page."""
        ...

    def transact(self, compares: Iterable[Compare], then: Sequence[Op]) -> TransactResult:
        """If all conditions hold do `then`, at once and as one revision; else nothing.

        Raises ValueError when it touches a key twice, StoreTooLarge when there is more of it than the
        `limits` allow, LeaseLost when a put names a dead lease, OutcomeUnknown when the answer never came.
        """
        ...

    def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Set a key whatever it is; the revision. Raises as `transact`."""
        return self.transact((), (Put(key, value, lease),)).revision

    def delete(self, key: str) -> int:
        """Remove a key if it is there; the revision. Raises as `transact`."""
        return self.transact((), (Delete(key),)).revision

    def grant(self, ttl_seconds: int) -> int:
        """A new lease that lives for `ttl_seconds` (at least 1) after each refresh; its id."""
        ...

    def keep_alive(self, lease: int) -> int:
        """Refresh the lease once; the seconds it now has. Raises LeaseLost when it is gone."""
        ...

    def revoke(self, lease: int) -> None:
        """End the lease and delete its keys; harmless when it is gone."""
        ...

    def watch(self, prefix: str, revision: int, sink: Sink | None = None) -> Watch:
        """Every change of the prefix from `revision` on, over any number of outages; never raises an outage.

        Without `sink`, items are read from the watch; with it, `sink(item)` is called for each, one at
        a time and in order, on a thread of the store: it must not block.
        """
        ...

    def identity(self) -> Identity:
        """Which store this is. Also the check to make at start-up: it raises StoreRefused early."""
        ...

    def known(self) -> Identity | None:
        """The store and the highest revision seen so far, without asking: what a daemon persists."""
        ...

    def close(self) -> None:
        """Cancel the watches and let go of the connection; later calls raise StoreUnavailable.

        Leases live on until they expire."""
        ...


def check_ops(ops: Sequence[Op]) -> None:
    """Refuse a list of operations that touches one key twice: etcd does, so every store does."""
    prefixes = [op.prefix for op in ops if isinstance(op, DeletePrefix)]
    seen: set[str] = set()
    for op in ops:
        key = op.prefix if isinstance(op, DeletePrefix) else op.key
        deleted = sum(key.startswith(prefix) for prefix in prefixes)
        if key in seen or deleted > isinstance(op, DeletePrefix):
            raise ValueError(f"a transaction touches {key!r} twice; each key may appear once")
        seen.add(key)


#: Bytes of a condition or an operation as it is sent, beside its key and its value, at most.
_FRAME_BYTES = 48


def request_bytes(compares: Sequence[Compare], ops: Sequence[Op]) -> int:
    """The bytes of a transaction as it is sent, rather too many than too few."""
    total = _FRAME_BYTES
    for compare in compares:
        total += _FRAME_BYTES + (1 + (compare.target == "prefix")) * _utf8(compare.key)
    for op in ops:
        if isinstance(op, DeletePrefix):
            total += _FRAME_BYTES + 2 * _utf8(op.prefix)
        else:
            total += _FRAME_BYTES + _utf8(op.key) + (len(op.value) if isinstance(op, Put) else 0)
    return total


def check_request(limits: Limits, compares: Sequence[Compare], ops: Sequence[Op]) -> None:
    """Refuse a transaction that is larger than the limits. Raises StoreTooLarge."""
    most = max(len(compares), len(ops))
    if most > limits.operations:
        raise StoreTooLarge(
            f"a transaction of {most} operations is more than the store takes: {limits.operations} are the most"
        )
    size = request_bytes(compares, ops)
    if size > limits.request_bytes:
        raise StoreTooLarge(
            f"a request of {size:,} bytes is more than the store takes: {limits.request_bytes:,} are the most"
        )


def _utf8(key: str) -> int:
    return len(key) if key.isascii() else len(key.encode())


def check_prefix(prefix: str) -> None:
    """Refuse the empty prefix: it means the whole store, which is never ours alone."""
    if not prefix:
        raise ValueError("the prefix is empty; name the keys that are meant, for example '/elasticd/'")


def check_ttl(ttl_seconds: int) -> None:
    """Refuse a time to live that etcd would round."""
    if not isinstance(ttl_seconds, int) or ttl_seconds < 1:
        raise ValueError(f"a lease lives whole seconds, at least 1; got {ttl_seconds!r}")


def _check_key(key: str) -> None:
    if not isinstance(key, str) or not key:
        raise ValueError(f"a key is a non-empty string; got {key!r}")
