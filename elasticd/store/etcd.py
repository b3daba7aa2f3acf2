"""The store in etcd, over sessions that are thrown away at their first error.

What a caller sees: a read is tried once more on a new session; a change is not, it raises
`OutcomeUnknown`; a watch goes on over every outage, from the last event's revision on.  Sessions open
on the endpoints in turn, so that each error moves on to the next one.

Every watch has a thread of its own, which sleeps in the stream while nothing happens and backs off to
a second between attempts while etcd is away.

A prefix is read page by page at the revision of its first page, so that neither one answer nor its deadline
grows with what the store holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from elasticd.backoff import Backoff
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
    Sink,
    Snapshot,
    Store,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreTooLarge,
    StoreUnavailable,
    TransactResult,
    Watch,
    WatchCompacted,
    WatchReset,
    check_ops,
    check_prefix,
    check_request,
    check_ttl,
)
from elasticd.store.session import (
    EtcdOptions,
    EtcdSession,
    Guard,
    RevisionCompacted,
    TokenExpired,
    WatchStream,
    is_text,
    key_value,
    prefix_end,
)

T = TypeVar("T")
_log = logging.getLogger(__name__)

# Seconds between attempts of a watch to get its stream back: doubled from the first to the second.
_BACKOFF = (0.05, 1.0)
#: Keys of the first page of a prefix, before it is known how large its values are.
_FIRST_PAGE = 16
#: How often a prefix is begun anew whose revision was compacted away between two pages.
_ATTEMPTS = 5


class EtcdStore(Store):
    """A `Store` in etcd. It connects at its first use; `identity()` is the check to make at start-up.

    `known` is what a daemon remembers of its cluster: another or an older etcd is then refused.
    """

    def __init__(self, options: EtcdOptions, *, known: Identity | None = None) -> None:
        self._options = options
        self._guard = Guard(known)
        self._lock = threading.Lock()
        self._session: EtcdSession | None = None
        self._next_endpoint = 0
        self._opened_once = False
        self._failures = 0
        self._failure: StoreError | None = None
        self._closed = False
        self._tails: list[_Tail] = []

    @property
    def limits(self) -> Limits:
        """As `Store.limits`: those of the options. etcd itself is not asked."""
        return self._options.limits

    def get(self, key: str) -> KeyValue | None:
        """As `Store.get`. An outage is met by one more try on a new session."""

        def ask(session: EtcdSession) -> KeyValue | None:
            request = session.rpc.RangeRequest(key=key.encode())
            answer = session.unary("kvstub", "Range", request, linearizable=True)
            return key_value(answer.kvs[0]) if answer.kvs else None

        return self._read(ask)

    def snapshot(self, prefix: str) -> Snapshot:
        """As `Store.snapshot`. It begins anew where etcd compacts the revision meanwhile, and raises
        RevisionCompacted after `_ATTEMPTS` times. Raises ValueError for an empty prefix."""
        check_prefix(prefix)
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._pages(prefix)
            except RevisionCompacted as error:
                _log.info("%s while %s was read; reading it anew", error, prefix)
        return self._pages(prefix)

    def _pages(self, prefix: str) -> Snapshot:
        """The prefix as of its first page. Raises RevisionCompacted where that is gone before its last."""
        items: list[KeyValue] = []
        start, keys, revision = prefix.encode(), min(_FIRST_PAGE, self.limits.page_keys), 0
        while True:
            page = self._page(start, prefix_end(prefix), keys, revision)
            revision = revision or page.header.revision
            items += map(key_value, filter(is_text, page.kvs))
            if not page.more:
                return Snapshot(revision=revision, items=tuple(items))
            start = page.kvs[-1].key + b"\0"
            fits = keys * self.limits.page_bytes // max(1, page.ByteSize())
            keys = max(1, min(fits, 2 * keys, self.limits.page_keys))

    def _page(self, start: bytes, end: bytes, keys: int, revision: int) -> Any:
        """etcd's answer: at most so many keys from `start` on, at a revision (0: the newest)."""

        def ask(session: EtcdSession) -> Any:
            request = session.rpc.RangeRequest(key=start, range_end=end, limit=keys, revision=revision)
            return session.unary("kvstub", "Range", request, linearizable=True)

        return self._read(ask)

    def transact(self, compares: Iterable[Compare], then: Sequence[Op]) -> TransactResult:
        """As `Store.transact`. It is sent a second time only after etcd turned down an expired token. Raises
        StoreUnavailable where no session opens: then nothing was sent."""
        check_ops(then)
        conditions = tuple(compares)
        check_request(self.limits, conditions, then)

        def ask(session: EtcdSession) -> TransactResult:
            request = session.rpc.TxnRequest(
                compare=[_compare(session.rpc, condition) for condition in conditions],
                success=[_request_op(session.rpc, op) for op in then],
            )
            answer = session.unary("kvstub", "Txn", request, linearizable=True)
            return TransactResult(succeeded=answer.succeeded, revision=answer.header.revision)

        try:
            return self._send(ask)
        except TokenExpired:
            return self._send(ask)

    def grant(self, ttl_seconds: int) -> int:
        """As `Store.grant`, with one more try after an outage. The lease of a lost answer expires by itself.
        Raises ValueError for a `ttl_seconds` that is not a whole number of at least 1."""
        check_ttl(ttl_seconds)

        # A lease whose grant went unanswered harms nobody: it expires. So this repeats like a read.
        def ask(session: EtcdSession) -> int:
            request = session.rpc.LeaseGrantRequest(TTL=ttl_seconds)
            return int(session.unary("leasestub", "LeaseGrant", request).ID)

        return self._read(ask)

    def keep_alive(self, lease: int) -> int:
        """As `Store.keep_alive`, with one more try after an outage: a refresh that is made twice does no
        harm."""
        seconds = self._read(lambda session: session.keep_alive(lease))
        if seconds <= 0:
            raise LeaseLost(f"lease {lease:x} has expired or was revoked")
        return seconds

    def revoke(self, lease: int) -> None:
        """As `Store.revoke`, with one more try after an outage. A lease that is gone by then counts as
        revoked."""

        def ask(session: EtcdSession) -> None:
            request = session.rpc.LeaseRevokeRequest(ID=lease)
            try:
                session.unary("leasestub", "LeaseRevoke", request)
            except LeaseLost:
                return

        self._read(ask)

    def watch(self, prefix: str, revision: int, sink: Sink | None = None) -> Watch:
        """As `Store.watch`, on a thread of its own for each watch. Raises StoreUnavailable after `close`,
        ValueError for an empty prefix."""
        check_prefix(prefix)
        tail = _Tail(self, prefix, revision, sink)
        with self._lock:
            if self._closed:
                raise StoreUnavailable("this store was closed")
            self._tails = [*(known for known in self._tails if not known.watch.cancelled), tail]
        tail.start()
        return tail.watch

    def identity(self) -> Identity:
        """As `Store.identity`. Raises StoreReplaced for an etcd that is another or an older one than
        `known`."""
        return self._read(lambda session: session.identify())

    def release(self) -> str:
        """The release of the member that answers, as "3.5.17"."""

        def ask(session: EtcdSession) -> str:
            return str(session.unary("maintenancestub", "Status", session.rpc.StatusRequest()).version)

        return self._read(ask)

    def known(self) -> Identity | None:
        """The cluster and the highest revision seen so far, without asking: what a daemon persists."""
        return self._guard.known()

    def close(self) -> None:
        """As `Store.close`; `watch` raises afterwards too."""
        with self._lock:
            self._closed = True
            session, self._session = self._session, None
            tails, self._tails = self._tails, []
        for tail in tails:
            tail.watch.cancel()
        if session is not None:
            session.close()

    # Sessions.

    def open_session(self) -> EtcdSession:
        """The present session, or a new one on the first endpoint that takes us, beginning after the last."""
        failures = self._failures
        with self._lock:
            if self._closed:
                raise StoreUnavailable("this store was closed")
            if self._session is not None:
                return self._session
            if self._failures != failures and self._failure is not None:
                # Another thread tried while we waited for the lock: do not queue up behind deadlines.
                raise type(self._failure)(str(self._failure))
            self._session = self._open()
            return self._session

    def discard(self, session: EtcdSession) -> None:
        """Throw a session away after an error; its streams end, and their watches move to the next one."""
        with self._lock:
            if self._session is session:
                self._session = None
        session.close()

    def _open(self) -> EtcdSession:
        failures: list[StoreError] = []
        for _ in self._options.endpoints:
            endpoint = self._options.endpoints[self._next_endpoint % len(self._options.endpoints)]
            self._next_endpoint += 1
            try:
                session = EtcdSession(self._options, endpoint, self._guard)
            except StoreError as error:
                failures.append(error)
                continue
            self._opened_once = True
            return session
        self._failures += 1
        self._failure = self._summary(failures)
        raise self._failure

    def _summary(self, failures: list[StoreError]) -> StoreError:
        summary = "; ".join(dict.fromkeys(str(failure) for failure in failures))
        refusals = [failure for failure in failures if isinstance(failure, StoreRefused)]
        # One member that refuses while the others are silent is an outage, once we have been let in.
        if refusals and (not self._opened_once or len(refusals) == len(failures)):
            return type(refusals[0])(summary)
        return StoreUnavailable(summary)

    def _read(self, ask: Callable[[EtcdSession], T]) -> T:
        session = self.open_session()
        try:
            return self._on(session, ask)
        except StoreUnavailable:
            return self._on(self.open_session(), ask)

    def _send(self, ask: Callable[[EtcdSession], T]) -> T:
        session = self.open_session()
        try:
            return self._on(session, ask)
        except (TokenExpired, StoreFull):
            raise
        except StoreUnavailable as error:
            raise OutcomeUnknown(f"{error}; the change may have been made or not") from error

    def _on(self, session: EtcdSession, ask: Callable[[EtcdSession], T]) -> T:
        try:
            return ask(session)
        except (LeaseLost, RevisionCompacted, StoreFull, StoreTooLarge):
            raise  # an answer, by a session that is well
        except StoreError:
            self.discard(session)
            raise


class _Tail:
    """A watch's thread and its place: follows the prefix from one session to the next."""

    def __init__(self, store: EtcdStore, prefix: str, revision: int, sink: Sink | None) -> None:
        self._store = store
        self._prefix = prefix
        self._next_revision = revision
        self._stream: WatchStream | None = None
        self.watch = Watch(sink, self._on_cancel)

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"watch {self._prefix}", daemon=True).start()

    def _run(self) -> None:
        pause, warned = Backoff(*_BACKOFF), False
        while not self.watch.cancelled:
            begun, place = time.monotonic(), self._next_revision
            refused = False
            try:
                self._follow()
                continue
            except StoreError as error:
                refused = isinstance(error, StoreRefused)
                level = logging.ERROR if refused and not warned else logging.DEBUG
                _log.log(level, "watch of %s: %s; that is tried again", self._prefix, error)
            except Exception:  # a defect; without this thread the watch's reader would hear nothing any more
                refused = True
                level = logging.DEBUG if warned else logging.ERROR
                text = "elasticd failed on the watch of %s; that is tried again"
                _log.log(level, text, self._prefix, exc_info=True)
            if self._next_revision != place or time.monotonic() - begun > _BACKOFF[1]:
                pause.reset()
                warned = False
            warned = warned or refused
            self.watch.wait_cancelled(pause.next())

    def _follow(self) -> None:
        """Deliver until something ends the stream; returns only when the watch is cancelled or was reset."""
        session = self._store.open_session()
        stream: WatchStream | None = None
        try:
            stream = self._stream = session.watch(self._prefix, self._next_revision)
            if self.watch.cancelled:
                return
            for batch in stream:
                for event in batch:
                    self.watch.deliver(event)
                self._next_revision = batch[-1].mod_revision + 1
        except WatchCompacted as error:
            _log.info("watch of %s: %s; reading the prefix afresh", self._prefix, error)
            self._reset()
        except StoreError:
            if self.watch.cancelled:
                return
            self._store.discard(session)
            raise
        finally:
            if stream is not None:
                stream.cancel()

    def _reset(self) -> None:
        snapshot = self._store.snapshot(self._prefix)
        self.watch.deliver(WatchReset(snapshot=snapshot))
        self._next_revision = snapshot.revision + 1

    def _on_cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()


def _compare(rpc: Any, condition: Compare) -> Any:
    message = rpc.Compare(key=condition.key.encode(), result=rpc.Compare.EQUAL)
    if condition.target == "create":
        message.target, message.create_revision = rpc.Compare.CREATE, condition.expected
    else:
        message.target, message.mod_revision = rpc.Compare.MOD, condition.expected
    if condition.target == "prefix":  # of every key under it, and true where there is none
        message.range_end, message.result = prefix_end(condition.key), rpc.Compare.LESS
        message.mod_revision = condition.expected + 1
    return message


def _request_op(rpc: Any, op: Op) -> Any:
    if isinstance(op, DeletePrefix):
        request = rpc.DeleteRangeRequest(key=op.prefix.encode(), range_end=prefix_end(op.prefix))
        return rpc.RequestOp(request_delete_range=request)
    key = op.key.encode()
    if isinstance(op, Delete):
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=op.value, lease=op.lease))
