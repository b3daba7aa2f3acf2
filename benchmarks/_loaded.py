"""A job on a machine that is twice oversubscribed: nobody may be taken for gone who is not.

What counts is what the store was told, whoever led: each fence is an eviction. Beside it the longest time
between two reports of a step at the leader, which is what detection goes by.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from _injections import Trained, training
from _results import Row, row

from elasticd.client import CannotReach
from elasticd.records import Fence, Keys, decode
from elasticd.system.parent_death_signal import ending_with_us
from tests.integration.fleet import CLUSTER

#: Seconds between two looks at what the leader was told.
LOOK = 2.0


@contextmanager
def oversubscribed() -> Iterator[int]:
    """Twice as many busy processes as there are cores; how many."""
    count = 2 * len(os.sched_getaffinity(0))
    command = ending_with_us([sys.executable, "-c", "while True: pass"])
    busy = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield count
    finally:
        for process in busy:
            process.kill()
            process.wait()


class Reports:
    """The leader's reports of steps, by when each came. `gap`: the longest between two of one leader, seconds;
    `unread`: how often no leader could be asked."""

    def __init__(self, job: Trained) -> None:
        self._job = job
        self._came: dict[str, tuple[int, float]] = {}
        self.gap, self.unread = 0.0, 0

    def look(self) -> None:
        leader = self._job.fleet.leader()
        if leader is None:
            self.unread += 1
            return
        last, came = self._came.get(leader.value, (-1, 0.0))
        try:
            with self._job.fleet.api() as api:
                for step in api.steps("job", last).steps:
                    self.gap = max(self.gap, step.time - came) if came else self.gap
                    last, came = step.step, step.time
        except CannotReach:
            self.unread += 1
        self._came = {leader.value: (last, came)}


def rows(minutes: float, nodes: tuple[str, ...]) -> Iterator[Row]:
    """Training under that load for so long."""
    with oversubscribed() as busy, training(nodes) as job:
        fleet, end = job.fleet, time.monotonic() + 60 * minutes
        since, began, reports = fleet.revision(), fleet.steps(), Reports(job)
        while time.monotonic() < end:
            time.sleep(LOOK)
            reports.look()
        fleet.advanced(1)  # it trains still
        key = Keys(cluster=CLUSTER).job("job", "fence")
        fences = [
            decode(event.item.value, Fence)
            for event in fleet.history(since)
            if event.key == key and event.kind == "put"
        ]
        name = f"false evictions in {minutes:g} minutes, machine twice oversubscribed ({busy} busy processes)"
        yield row(name, len(fences), "", goal="0", met=not fences)
        yield row("oversubscribed: largest gap between reports of steps at the leader", reports.gap, "s")
        yield row("oversubscribed: looks at which no leader answered", reports.unread, "")
        yield row("oversubscribed: steps made meanwhile", fleet.steps() - began, "steps")
        yield row("oversubscribed: load average of the last 15 minutes", os.getloadavg()[2], "")
        for fence in fences:
            print(f"evicted: fence {fence.number}: {msgspec.json.encode(fence.gone).decode()}: {fence.reason}")
        if fences:
            print(fleet.said())
