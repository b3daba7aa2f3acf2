"""`WriteShares`: how much of what is written to etcd each node is the cause of.

A node whose messages have too much written is heard again once its share has grown back (`Allowance`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container

from elasticd.store.write_allowance import Allowance

#: Bytes that are written to etcd for a node's messages, records and events: at once, and a second. A plan of
#: 8,000 devices takes 0.2 MiB.
WRITES_AT_ONCE, WRITES_A_SECOND = 32 << 20, 64 << 10
#: Nodes of which the log says once that they are heard more slowly.
MOST_WARNINGS = 256

_log = logging.getLogger(__name__)


class WriteShares:
    """The share of each node, and of each job the node that caused its last decision."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._causes: dict[str, str] = {}  # by job: the node that sent its last message
        self._shares: dict[str, Allowance] = {}  # by node
        self._warned: set[str] = set()

    def caused(self, job: str, node: str) -> None:
        """A node sent the last message about a job."""
        self._causes[job] = node

    def wrote(self, job: str, size: int) -> None:
        """So many bytes went to etcd for a job. They count for the node that sent the last message about it:
        a decision may follow a tick after its cause."""
        if (node := self._causes.get(job)) is not None:
            self.wrote_for(node, size)

    def wrote_for(self, node: str, size: int) -> None:
        """So many bytes went to etcd for a node."""
        self._share(node).spend(size, self._clock())

    def wait(self, node: str) -> float:
        """Seconds for which a node is not heard, as its messages had too much written; mostly 0."""
        seconds = self._share(node).wait(self._clock())
        if seconds and node not in self._warned and len(self._warned) < MOST_WARNINGS:
            self._warned.add(node)
            text = "node %s is heard more slowly: its messages have more than %d bytes a second written to etcd"
            _log.warning(text, node, WRITES_A_SECOND)
        return seconds

    def forget(self, job: str) -> None:
        """A job is not known any more."""
        self._causes.pop(job, None)

    def keep(self, jobs: Container[str]) -> None:
        """Only these jobs are known."""
        self._causes = {job: node for job, node in self._causes.items() if job in jobs}

    def _share(self, node: str) -> Allowance:
        return self._shares.setdefault(node, Allowance(WRITES_AT_ONCE, WRITES_A_SECOND))
