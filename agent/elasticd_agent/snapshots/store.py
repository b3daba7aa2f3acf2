"""Snapshots in an agent's memory: what its own workers copied, and what other agents sent it to keep.

A snapshot is bytes in a memory file; the agent does not read them. They are ordered by plan, then step, for a
recovery goes back in steps under a plan with a higher number. Of each device are kept

- the newest;
- the one of the set that the leader called whole: every member's is kept, and on two nodes where there are two;
- those between the two, for as long as their set may still become whole.

Nobody tells of a set that never will (an agent ended before it sent its worker's copy), so that is a matter of
time: without an end, its snapshots would take up the workers' memory for new ones for good. Thread-safe. What
the store lets go of is the caller's to close, for closing a large memory file takes a while.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elasticd_planner.spec.mesh import JobPlan

from elasticd.wire.snapshots import Held

#: Seconds that a set has to become whole, from when this agent has done its part; where that took longer than a
#: tenth of it, ten times as long.
RESERVATION_SECONDS = 30.0
_SHARE = 10.0

_Key = tuple[str, str, int, int]
#: JobPlan and step.
Version = tuple[int, int]


class NoRoom(MemoryError):
    """A snapshot does not fit into what the agent may use for them; the message says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """`fd` is a memory file of `held.size` bytes or more. `plan` comes with the first rank's."""

    held: Held
    fd: int
    plan: JobPlan | None = None


@dataclass(kw_only=True, slots=True)
class _Entry:
    """peer: the agent that has a copy. lent: set while it is being sent. settled: when this agent had done its
    part, monotonic seconds; took: seconds that this needed."""

    snapshot: Snapshot
    peer: str = ""
    lent: threading.Event | None = None
    settled: float | None = None
    took: float = 0.0
    born: float = field(default_factory=time.monotonic)

    @property
    def version(self) -> Version:
        return self.snapshot.held.plan, self.snapshot.held.step


class SnapshotStore:
    """Holds snapshots of at most `limit` bytes of other nodes; those of its own workers are their memory."""

    def __init__(self, node: str, limit: int, patience: float = RESERVATION_SECONDS) -> None:
        self._node, self._limit, self._patience = node, limit, patience
        self._lock = threading.Lock()
        self._entries: dict[_Key, _Entry] = {}
        self._whole: dict[str, Version] = {}
        self._reserved = 0

    def mine(self, held: Held) -> bool:
        """Returns True if a worker of this node copied it."""
        return held.node == self._node

    def put(self, snapshot: Snapshot) -> list[Snapshot]:
        """Takes a snapshot over, and lets go of what it outdates or replaces."""
        held = snapshot.held
        with self._lock:
            old = self._entries.pop(_key(held), None)
            entry = self._entries[_key(held)] = _Entry(snapshot=snapshot)
            if not self.mine(held):
                entry.settled = entry.born
            return ([] if old is None else [_revoked(old)]) + self._outdated(held.job)

    def reserve(self, size: int) -> int:
        """A memory file for a snapshot of another node; `release` follows, once it is put or given up. Raises
        NoRoom beyond the limit."""
        with self._lock:
            others = (e.snapshot.held for e in self._entries.values() if not self.mine(e.snapshot.held))
            used = sum(held.size for held in others) + self._reserved
            if used + size > self._limit:
                raise NoRoom(
                    f"snapshots of other nodes use {used >> 20} MiB of {self._limit >> 20}: "
                    f"{size / (1 << 20):.1f} MiB more do not fit; raise [agent] snapshot_mib"
                )
            fd = os.memfd_create("elasticd-snapshot", os.MFD_CLOEXEC)
            self._reserved += size
        return fd

    def release(self, size: int) -> None:
        """The room that was reserved is used or given back."""
        with self._lock:
            self._reserved -= size

    def find(self, wanted: Held) -> Snapshot | None:
        """The snapshot of that job, device, plan and step under a descriptor of the caller's."""
        with self._lock:
            entry = self._entries.get(_key(wanted))
            if entry is None:
                return None
            return Snapshot(held=entry.snapshot.held, fd=os.dup(entry.snapshot.fd), plan=entry.snapshot.plan)

    def held(self, job: str) -> tuple[Held, ...]:
        """All that is here of a job, in order."""
        with self._lock:
            return tuple(self._entries[key].snapshot.held for key in sorted(self._entries) if key[0] == job)

    def plans(self, job: str) -> tuple[JobPlan, ...]:
        """The plans of these, as far as they are known, each once."""
        with self._lock:
            plans_held = (e.snapshot.plan for key, e in self._entries.items() if key[0] == job)
            plans = {plan.number: plan for plan in plans_held if plan is not None}
        return tuple(plans[number] for number in sorted(plans))

    def jobs(self) -> set[str]:
        """The names of the jobs that have any snapshot here."""
        with self._lock:
            return {job for job, *_ in self._entries}

    # -- what is let go of ----------------------------------------------------------------------------------

    def whole(self, job: str, version: Version) -> list[Snapshot]:
        """All snapshots of that plan and step are kept: older ones go."""
        with self._lock:
            self._whole[job] = max(version, self._whole.get(job, version))
            return self._outdated(job)

    def expire(self, now: float, living: Callable[[str], bool]) -> list[Snapshot]:
        """Lets go of what time has outdated: sets that did not become whole, the newest of a living worker
        (`living` is asked with its device) only where a whole one is here: it has memory for two."""
        with self._lock:
            gone: list[_Key] = []
            for entries in self._by_device().values():
                newest = entries[-1]
                whole = self._whole.get(newest.snapshot.held.job)
                for entry in entries:
                    held = entry.snapshot.held
                    if entry.version == whole or entry.lent is not None or not self._stale(entry, now):
                        continue
                    saved = self.mine(held) and entries[0].version == whole and living(held.device)
                    if entry is not newest or saved:
                        gone.append(_key(held))
            return [self._entries.pop(key).snapshot for key in gone]

    def forget(self, job: str) -> list[Snapshot]:
        """Of this job nothing is needed any more; what is being sent is cut off."""
        with self._lock:
            self._whole.pop(job, None)
            return [_revoked(self._entries.pop(key)) for key in list(self._entries) if key[0] == job]

    # -- what is sent to another node -----------------------------------------------------------------------

    def unsent(self) -> list[Held]:
        """Of this node's snapshots those that no other agent has a copy of, the oldest first."""
        with self._lock:
            waiting = [e for e in self._entries.values() if not e.peer and not self._sending(e.snapshot.held)]
            waiting.sort(key=lambda entry: entry.born)
            return [entry.snapshot.held for entry in waiting if self.mine(entry.snapshot.held)]

    def lend(self, held: Held) -> threading.Event | None:
        """For sending: it is kept until `settle`, unless the event says that it is revoked: then its memory may
        be written to again. None where it is gone, or one of its device is being sent already: the first of
        them arrives sooner if the next waits, and the sooner its set is whole."""
        with self._lock:
            entry = self._entries.get(_key(held))
            if entry is None or self._sending(held):
                return None
            entry.lent = threading.Event()
            return entry.lent

    def settle(self, held: Held, lent: threading.Event, peer: str, took: float) -> list[Snapshot]:
        """Notes that a lent snapshot reached the agent `peer` (empty: none did), in so many seconds. Memory
        that was kept for the sending alone is given back."""
        with self._lock:
            entry = self._entries.get(_key(held))
            if entry is None or entry.lent is not lent:
                return []
            entry.lent, entry.peer = None, peer
            if peer or entry.settled is None:
                entry.settled, entry.took = time.monotonic(), took
            return self._outdated(held.job)

    def lost(self, agents: Iterable[str]) -> None:
        """The copies that these agents had are gone."""
        gone = set(agents)
        with self._lock:
            for entry in self._entries.values():
                if entry.peer in gone:
                    entry.peer = ""

    # -- parts, under the lock ------------------------------------------------------------------------------

    def _sending(self, held: Held) -> bool:
        """Returns True if any snapshot of that job and device is lent."""
        like = held.job, held.device
        return any(key[:2] == like and entry.lent is not None for key, entry in self._entries.items())

    def _by_device(self) -> dict[tuple[str, str], list[_Entry]]:
        entries: dict[tuple[str, str], list[_Entry]] = {}
        for key in sorted(self._entries):
            entries.setdefault(key[:2], []).append(self._entries[key])
        return entries

    def _outdated(self, job: str) -> list[Snapshot]:
        whole = self._whole.get(job)
        if whole is None:
            return []
        keys = [key for key, entry in self._entries.items() if key[0] == job and key[2:] < whole]
        return [self._entries.pop(key).snapshot for key in keys if self._entries[key].lent is None]

    def _stale(self, entry: _Entry, now: float) -> bool:
        if entry.settled is None:
            return False
        return now - entry.settled > max(self._patience, _SHARE * entry.took)


def _key(held: Held) -> _Key:
    return held.job, held.device, held.plan, held.step


def _revoked(entry: _Entry) -> Snapshot:
    if entry.lent is not None:
        entry.lent.set()
    return entry.snapshot
