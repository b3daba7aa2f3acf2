"""Keeps this agent's keys in the store: its node and its workers, all under one lease.

What ought to be there is set from the event loop; a thread brings the store to it, over outages and after a
lost lease, since the store's calls block. The node's key is also the proof that no other agent serves it.

A key that the store refuses, for its size or for want of a permission, is named in the log and tried again,
ever more seldom: etcd's limits and roles may be changed. No other key waits for it.

A request whose answer never came may be made later, by an etcd that was frozen, behind a newer one. So its key
is looked at again for some minutes, and brought to what it is to be.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elasticd.backoff import Backoff, jittered
from elasticd.codec.decoding import shown
from elasticd.records import Keys, NodeRecord, decode, encode
from elasticd.store.leader import taken
from elasticd.store.lease import LeaseKeeper
from elasticd.store.protocol import (
    Compare,
    Delete,
    KeyValue,
    LeaseLost,
    OutcomeUnknown,
    Store,
    StoreError,
    StoreRefused,
    StoreReplaced,
    StoreTooLarge,
)
from elasticd_agent.internal_errors import outlived

#: Seconds between attempts to write the keys, and those that the store refuses: doubled from the first to the
#: second.
_RETRY = (0.25, 2.0)
_RETRY_REFUSED = (1.0, 30.0)
_POLL_SECONDS = 0.2
#: Seconds between looks at a key of which an answer never came, doubled from the first to the second, which is
#: the last.
_LOOKS = (1.0, 256.0)

_log = logging.getLogger(__name__)


class NodeTaken(Exception):
    """Another living agent has this node's name; the message says what to do."""


@dataclass(kw_only=True, slots=True)
class _Refused:
    """A key that the store does not take, or does not delete (`value` None), and when that is tried again."""

    value: bytes | None = None
    why: str = ""
    again: float = 0.0
    pause: Backoff = field(default_factory=lambda: Backoff(*_RETRY_REFUSED))


@dataclass(kw_only=True, slots=True)
class _Doubt:
    """A key that an earlier request may change still, and when it is looked at next."""

    seconds: float  # between the last look and the next
    again: float


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
        #: What the store has of us, by key; None while that is in doubt.
        self._written: dict[str, bytes | None] = {}
        self._refused: dict[str, _Refused] = {}
        self._doubts: dict[str, _Doubt] = {}
        self._recheck = False
        self._told: dict[str, Callable[[str], None]] = {}
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
        lease = None
        while lease is None:
            value = encode(self._record)
            lease = self._claimed(self._store.grant(self._ttl), value, deadline)
            if lease is None and self._stop.wait(jittered(_POLL_SECONDS)):
                return
        self._lease = lease
        with self._lock:
            self._wanted.setdefault(self._node_key, value)  # else it has another value, perhaps since
            self._written[self._node_key] = value
        self._keeper = LeaseKeeper(self._store, lease, self._ttl, lambda _: self._wake.set()).start()

    def _claimed(self, lease: int, value: bytes, deadline: float) -> int | None:
        """The lease once it has the node's key with this value; None where the store is so slow that it ran out
        before, or where this is given up. Raises as `claim`."""
        try:
            while taken(self._store, self._node_key, value, lease) is None:
                holder = self._store.get(self._node_key)
                # One of our own, whose answer never came, runs out however long an election of etcd makes it.
                if holder is not None and time.monotonic() >= deadline and not self._is_own(holder):
                    self._store.revoke(lease)
                    raise NodeTaken(self._taken_by(holder))
                if self._stop.wait(jittered(_POLL_SECONDS)):
                    self._store.revoke(lease)
                    return None
                self._store.keep_alive(lease)
        except LeaseLost as error:
            _log.warning("the store is too slow to keep the key of node %s: %s", self._record.node, error)
            return None
        return lease

    def start(self) -> None:
        """Starts the thread that keeps the keys; `claim` must have returned before."""
        self._thread.start()

    def set_node(self, record: NodeRecord) -> None:
        """The node's key says this from now on."""
        self._record = record
        self.hold(self._node_key, encode(record))

    def hold(self, key: str, value: bytes, told: Callable[[str], None] = lambda why: None) -> None:
        """Keep this key as long as this agent lives. It returns at once: the thread writes the key. `told` is
        called once, from the thread: with an empty string when the key is there, or with why the store refuses
        it, which is tried again."""
        with self._lock:
            self._wanted[key] = value
            self._told[key] = told
        self._wake.set()

    def release(self, key: str) -> None:
        """The opposite of `hold`: has the key deleted. A `told` that was not called yet is never called."""
        with self._lock:
            self._wanted.pop(key, None)
            self._told.pop(key, None)
        self._wake.set()

    def recheck(self) -> None:
        """Has all keys looked at: somebody deleted one, or another agent has it."""
        with self._lock:
            self._recheck = True
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

    def _is_own(self, holder: KeyValue) -> bool:
        """Returns whether this agent wrote the node's key, if with a lease that it had before."""
        try:
            return decode(holder.value, NodeRecord).agent == self._record.agent
        except ValueError:
            return False

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
            self._wake.wait(self._until_due())
            self._wake.clear()
            pause = Backoff(*_RETRY)
            while not self._stop.is_set() and not self._settle():
                self._stop.wait(pause.next())

    def _until_due(self) -> float | None:
        """Seconds until a key that was refused is tried again, or one in doubt looked at; None where there is
        none."""
        due: list[_Refused | _Doubt] = [*self._refused.values(), *self._doubts.values()]
        again = min((each.again for each in due), default=None)
        return None if again is None else max(0.0, again - time.monotonic())

    def _look(self) -> None:
        """Looks at the keys that a request without an answer may have changed by now. Raises StoreError."""
        for key, doubt in list(self._doubts.items()):
            if time.monotonic() < doubt.again:
                continue
            item = self._store.get(key)
            if key == self._node_key and item is not None and not self._is_own(item):
                raise NodeTaken(self._taken_by(item))
            value = item.value if item is not None and item.lease == self._lease else None
            if value != self._written.get(key) or (value is None) != (item is None):
                self._written[key] = None
            if doubt.seconds >= _LOOKS[1]:
                del self._doubts[key]
            else:
                doubt.seconds *= 2
                doubt.again = time.monotonic() + doubt.seconds

    def _settle(self) -> bool:
        """Bring the store to what is wanted; False when that must be tried again."""
        try:
            if self._keeper is not None and self._keeper.lost:
                self._reclaim()
            with self._lock:
                wanted, recheck, self._recheck = dict(self._wanted), self._recheck, False
            if recheck:
                self._doubts |= {key: _Doubt(seconds=_LOOKS[1], again=0.0) for key in wanted}
            self._look()
            for key in [*((self._written.keys() | self._refused.keys()) - wanted.keys()), *wanted]:
                self._bring(key, wanted.get(key))
            self._notify()
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
        except Exception as error:  # this thread lasts as long as the agent
            outlived("this node's keys", error)
            return False
        return True

    def _is_there(self, key: str, value: bytes | None) -> bool:
        """Returns True if the store has this value of a key (None: nothing of it), as far as we know."""
        return key not in self._written if value is None else self._written.get(key) == value

    def _bring(self, key: str, value: bytes | None) -> None:
        """Write one key, or delete it (None). Raises StoreError, but not for a refusal of this key."""
        refused = self._refused.get(key)
        if self._is_there(key, value):
            self._refused.pop(key, None)
            return
        if refused is not None and refused.value == value and time.monotonic() < refused.again:
            return
        before = dict(self._written)
        self._written[key] = None  # until there is an answer
        try:
            if value is None:
                self._delete(key)
            else:
                self._store.put(key, value, self._lease)
        except OutcomeUnknown:
            self._doubts[key] = _Doubt(seconds=_LOOKS[0], again=time.monotonic() + _LOOKS[0])
            raise
        except StoreReplaced:
            raise  # it refuses all that is ours, as the lease's keeper says
        except (StoreRefused, StoreTooLarge, ValueError, TypeError) as error:  # the last two: it is no key
            self._written = before
            self._refuse(key, value, error)
            return
        self._written[key] = value
        if value is None:
            del self._written[key]
        if self._refused.pop(key, None) is not None:
            _log.info("the store takes the key %s now", shown(key))

    def _delete(self, key: str) -> None:
        """Deletes a key as it is now, if it is ours. A request that etcd carries out late, perhaps when this
        agent is gone, deletes nothing that was written since."""
        item = self._store.get(key)
        if item is not None and item.lease == self._lease:
            self._store.transact((Compare.modified(key, item.mod_revision),), (Delete(key),))

    def _refuse(self, key: str, value: bytes | None, error: Exception) -> None:
        """Said once, until the store takes the key."""
        if key not in self._refused:
            what = "deleted" if value is None else "written"
            _log.error("the key %s is not %s: %s; that is tried again", shown(key), what, error)
        refused = self._refused.setdefault(key, _Refused())
        refused.value, refused.why = value, f"the key {shown(key)}: {error}"
        refused.again = time.monotonic() + refused.pause.next()

    def _notify(self) -> None:
        calls = []
        with self._lock:
            for key in list(self._told):
                value, refused = self._wanted[key], self._refused.get(key)
                if self._is_there(key, value):
                    calls.append((self._told.pop(key), ""))
                elif refused is not None and refused.value == value:
                    calls.append((self._told.pop(key), refused.why))
        for notify, why in calls:
            notify(why)

    def _reclaim(self) -> None:
        """The lease ran out (this process was frozen, or cut off while etcd ran on): begin anew."""
        _log.warning("the lease of node %s was lost: taking a new one", self._record.node)
        if self._keeper is not None:
            self._keeper.stop()
        self._written.clear()
        self.claim()
