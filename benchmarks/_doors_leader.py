"""The coordinator of benchmarks/doors.py, in a process of its own.

    python benchmarks/_doors_leader.py FOLDER [--tls] [--connections N]

It asks for the tokens in FOLDER, over the memory store, and leads with the lease that coordinators have. Prints
its URL; for each line that it reads one `Figures` as JSON: of the time since the line before.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import time
from pathlib import Path

import msgspec
import psutil

from elasticd.config.security import SecuritySection
from elasticd.config.tree import ClusterSection, Config, CoordinatorSection
from elasticd.coordinator.daemon import Coordinator
from elasticd.coordinator.election import CannotLead
from elasticd.coordinator.garbage_collector import collecting
from elasticd.store.memory import MemoryStore
from elasticd.system.logs import LogSection, set_up

#: Seconds between looks at whether the loop is held up.
LOOK = 0.002


class Figures(msgspec.Struct, kw_only=True):
    """The time between two lines, as the coordinator's process saw it."""

    held_up: float  # seconds for which the loop was held up at most, by the clock
    processor: float  # seconds of all its threads in one such time, at most
    memory: int  # bytes that the process has
    descriptors: int  # that it has open
    connected: int  # agents
    deposed: int  # 1 once it leads no longer


class Watch:
    """Looks on while the coordinator works."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._process = psutil.Process()
        self.held_up = self.processor = 0.0
        self.deposed = 0

    async def look(self) -> None:
        """Until it is cancelled."""
        while True:
            began, used = time.monotonic(), time.process_time()
            await asyncio.sleep(LOOK)
            self.held_up = max(self.held_up, time.monotonic() - began - LOOK)
            self.processor = max(self.processor, time.process_time() - used)

    async def lead_out(self) -> None:
        """Notes that the coordinator leads no longer."""
        try:
            await self._coordinator.ended()
        except CannotLead:
            self.deposed = 1

    def take(self) -> Figures:
        """The figures, which begin anew."""
        figures = Figures(
            held_up=self.held_up,
            processor=self.processor,
            memory=self._process.memory_info().rss,
            descriptors=self._process.num_fds() - 1,  # the listing is one itself
            connected=len(self._coordinator.leading.connections),
            deposed=self.deposed,
        )
        self.held_up = self.processor = 0.0
        return figures


async def lead(folder: Path, tls: bool, connections: int) -> None:
    """Leads until standard input ends."""
    security = SecuritySection(
        viewers=str(folder / "viewers"),
        operators=str(folder / "operators"),
        agents=str(folder / "agents"),
        cert=str(folder / "server.pem") if tls else None,
        key=str(folder / "server.key") if tls else None,
        connections=connections,
    )
    config = Config(
        cluster=ClusterSection(name="doors"),
        coordinator=CoordinatorSection(name="c0", port=0),
        security=security,
    )
    coordinator = Coordinator(config, MemoryStore())
    await coordinator.start()
    watch = Watch(coordinator)
    tasks = [asyncio.create_task(work) for work in (watch.look(), watch.lead_out(), collecting())]
    print(coordinator.url, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        await asyncio.sleep(10 * LOOK)  # so that a time in which the loop was held up just now has been seen
        print(msgspec.json.encode(watch.take()).decode(), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await coordinator.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--connections", type=int, default=8192)
    parser.add_argument("--descriptors", type=int)
    asked = parser.parse_args()
    set_up(LogSection(level="error"), {})
    if asked.descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (asked.descriptors, asked.descriptors))
    asyncio.run(lead(asked.folder, asked.tls, asked.connections))
