"""Snapshots in an agent's memory: what its own workers copied, and what other agents sent it to keep.

A snapshot is bytes in a memory file and a manifest that says what they are; the agent reads neither. Of each
device the newest is kept, and the newest of which the leader said that it is whole (all members of the plan
have theirs, on two nodes). Thread-safe. The daemon does not keep any yet: only tests put snapshots here.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from elasticd.messages import Held

#: A memory file is summed in parts of so many bytes.
_PART = 8 << 20


class NoRoom(MemoryError):
    """A snapshot does not fit into what the agent may use for them; the message says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """`fd` is a memory file of `held.size` bytes or more, owned by the vault once it is put there."""

    held: Held
    fd: int

    def map(self) -> mmap.mmap:
        return mmap.mmap(self.fd, self.held.size, access=mmap.ACCESS_READ)


class Vault:
    """Holds snapshots of at most `limit` bytes of other nodes; those of its own workers are their memory."""

    def __init__(self, node: str, limit: int) -> None:
        self._node, self._limit = node, limit
        self._lock = threading.Lock()
        self._snapshots: dict[tuple[str, str, int], Snapshot] = {}
        self._whole: dict[str, int] = {}

    def put(self, snapshot: Snapshot) -> None:
        """Takes a snapshot over. One of the same device and step is replaced; what it outdates goes."""
        held = snapshot.held
        with self._lock:
            old = self._snapshots.pop((held.job, held.device, held.step), None)
            self._snapshots[held.job, held.device, held.step] = snapshot
            self._prune(held.job)
        if old is not None and old.fd != snapshot.fd:
            os.close(old.fd)

    def reserve(self, size: int) -> int:
        """A memory file for a snapshot of another node. Raises NoRoom beyond the limit."""
        with self._lock:
            used = sum(s.held.size for s in self._snapshots.values() if s.held.node != self._node)
        if used + size > self._limit:
            raise NoRoom(
                f"snapshots of other nodes use {used >> 20} MiB of {self._limit >> 20}: "
                f"{size >> 20} MiB more do not fit; raise [agent] snapshot_mib"
            )
        fd = os.memfd_create("elasticd-snapshot", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return fd

    def find(self, job: str, device: str, step: int) -> Snapshot | None:
        """A snapshot under a descriptor of the caller's, who closes it: the vault may drop its own."""
        with self._lock:
            found = self._snapshots.get((job, device, step))
            return None if found is None else Snapshot(held=found.held, fd=os.dup(found.fd))

    def whole(self, job: str, step: int) -> None:
        """All of the snapshots of that step are kept: older ones go."""
        with self._lock:
            self._whole[job] = max(step, self._whole.get(job, -1))
            self._prune(job)

    def held(self) -> tuple[Held, ...]:
        """All that is here."""
        with self._lock:
            return tuple(snapshot.held for snapshot in self._snapshots.values())

    def forget(self, jobs: Iterable[str]) -> None:
        """Of these jobs nothing is needed any more."""
        with self._lock:
            gone = [key for key in self._snapshots if key[0] in set(jobs)]
            for key in gone:
                os.close(self._snapshots.pop(key).fd)

    def close(self) -> None:
        self.forget({job for job, _, _ in self._snapshots})

    def _prune(self, job: str) -> None:
        whole = self._whole.get(job, -1)
        newest: dict[str, int] = {}
        for other, device, step in self._snapshots:
            if other == job:
                newest[device] = max(step, newest.get(device, -1))
        for key in [key for key in self._snapshots if key[0] == job]:
            _, device, step = key
            if step < whole or (step != whole and step < newest[device]):
                os.close(self._snapshots.pop(key).fd)


def checksum(view: memoryview) -> int:
    """The sum of all 64-bit words (the last one padded with zeros), modulo 2^64."""
    total = 0
    words = len(view) // 8 * 8
    for start in range(0, words, _PART):
        part = np.frombuffer(view[start : min(start + _PART, words)], dtype=np.uint64)
        total += int(part.sum(dtype=np.uint64))
    if words < len(view):
        total += int.from_bytes(bytes(view[words:]).ljust(8, b"\0"), "little")
    return total & (1 << 64) - 1
