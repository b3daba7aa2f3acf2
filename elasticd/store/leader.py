"""The leader's key: who leads, how one becomes it, and the fence that every write of a leader carries.

The key lives under the leader's lease.  Its create revision is the *term*: it grows with every new
leader and is never used again.  A leader adds `guard()` to each transaction, so that a leader who was
replaced without noticing can no longer change anything; and it sends the term with each order, so that
agents refuse those of an older one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import msgspec
from elasticd_planner.value import StoredValue

from elasticd.backoff import jittered
from elasticd.codec.decoding import VersionRefused, decode_stored
from elasticd.store.confirm import settle
from elasticd.store.protocol import (
    Compare,
    KeyValue,
    Op,
    OutcomeUnknown,
    Put,
    Store,
    StoreError,
    StoreUnavailable,
    TransactResult,
)

RECORD_VERSION = 1
#: Seconds between looks at the leader's key by who stands by: a watch tells sooner, unless its etcd is frozen.
LOOK_SECONDS = 0.5


class LeaderRecord(StoredValue, frozen=True, kw_only=True, tag="leader"):
    """The value of the leader's key: the leader's name, and what others need to reach it."""

    name: str
    value: str
    version: int = RECORD_VERSION


class ElectedLeader(msgspec.Struct, frozen=True, kw_only=True):
    """A leader as others see it; `term` is its key's create revision."""

    name: str
    value: str
    term: int

    @classmethod
    def of(cls, item: KeyValue) -> ElectedLeader:
        """From the key as read or watched. Raises ValueError when it is not a leader's record."""
        try:
            record = decode_stored(item.value, LeaderRecord)
        except VersionRefused as error:
            raise VersionRefused(f"the key {item.key!r}: {error}") from error
        except msgspec.DecodeError as error:
            raise ValueError(f"the key {item.key!r} does not hold a leader's record: {error}") from error
        return cls(name=record.name, value=record.value, term=item.create_revision)


class AlreadyLed(StoreError):
    """Somebody else leads and lives; `leader` says who."""

    def __init__(self, key: str, leader: ElectedLeader) -> None:
        super().__init__(
            f"{leader.name!r} at {leader.value} leads already (key {key}, term {leader.term}); "
            "stop it first, or choose another cluster name"
        )
        self.leader = leader


class LeadershipLost(StoreError):
    """The leader's key is no longer ours: nothing was written; stop deciding."""


class Leadership(msgspec.Struct, frozen=True, kw_only=True):
    """Proof of being elected. It says nothing about still leading: only a guarded write does. `term` is the
    create revision of its key, which grows with each leader."""

    key: str
    term: int
    lease: int
    ttl: int

    def guard(self) -> Compare:
        """The condition that every transaction of this leader must carry."""
        return Compare.created(self.key, self.term)

    def transact(self, store: Store, compares: Sequence[Compare], then: Sequence[Op]) -> TransactResult:
        """A settled, guarded transaction. Raises LeadershipLost when it failed and the guard would too."""
        result = settle(store, (self.guard(), *compares), then)
        if not result.succeeded and not self.guard().holds(store.get(self.key)):
            raise LeadershipLost(f"the leader's key {self.key} is no longer that of term {self.term}")
        return result

    def resign(self, store: Store) -> None:
        """Give the key back at once, so that a successor need not wait for the lease."""
        store.revoke(self.lease)


def read_leader(store: Store, key: str) -> ElectedLeader | None:
    """The leader now, or None."""
    item = store.get(key)
    return ElectedLeader.of(item) if item is not None else None


def await_vacancy(
    store: Store, key: str, told: Callable[[ElectedLeader], None], stopped: threading.Event
) -> bool:
    """Stands by while somebody leads, over every outage; `told` hears who, once for each. True when nobody
    leads, False once `stopped` is set. Raises StoreRefused."""
    seen: ElectedLeader | None = None
    while not stopped.is_set():
        try:
            item = store.get(key)
            if item is None:
                return True
            if (leader := ElectedLeader.of(item)) != seen:
                seen = leader
                told(leader)
            _outwait(store, item, stopped)
        except StoreUnavailable:
            stopped.wait(jittered(LOOK_SECONDS))
    return False


def _outwait(store: Store, item: KeyValue, stopped: threading.Event) -> None:
    """Returns when the key may not be as it is here any more, or once `stopped` is set."""
    watch = store.watch(item.key, item.mod_revision + 1)
    try:
        while not stopped.is_set() and watch.get(timeout=LOOK_SECONDS) is None:
            # Asked as well: an etcd that froze keeps its watches open, and says nothing.
            current = store.get(item.key)
            if current is None or current.mod_revision != item.mod_revision:
                return
    finally:
        watch.cancel()


def campaign(store: Store, key: str, name: str, value: str, ttl: int) -> Leadership:
    """Become the leader, under a lease of `ttl` seconds; `value` says how to reach us.

    Raises AlreadyLed when somebody leads, and LeaseLost when the store is so slow that our own lease runs out
    meanwhile: both may be tried again.
    """
    lease, record = store.grant(ttl), msgspec.json.encode(LeaderRecord(name=name, value=value))
    try:
        while True:
            won = taken(store, key, record, lease)
            if won is not None:
                return Leadership(key=key, term=won, lease=lease, ttl=ttl)
            incumbent = store.get(key)
            if incumbent is not None:
                raise AlreadyLed(key, ElectedLeader.of(incumbent))
    except BaseException:
        with contextlib.suppress(StoreError):  # else it expires by itself
            store.revoke(lease)
        raise


def taken(store: Store, key: str, value: bytes, lease: int) -> int | None:
    """Takes a key that nobody has, under a lease of the caller's alone: its create revision if we got it, None
    if it is another's."""
    try:
        result = store.transact((Compare.absent(key),), (Put(key, value, lease),))
        if result.succeeded:
            return result.revision
    except OutcomeUnknown:
        # The lease is ours alone, so the key tells; and if the request lands later than this, the
        # next attempt finds the key and recognises it just so.
        pass
    item = store.get(key)
    return item.create_revision if item is not None and item.lease == lease else None
