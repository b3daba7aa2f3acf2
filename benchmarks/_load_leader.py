"""The coordinator of benchmarks/load.py, in a process of its own.

    python benchmarks/_load_leader.py AGENTS DEVICES [--folder FOLDER] [--etcd ENDPOINT]

With a FOLDER of a token and certificates it is secured by them. With an etcd it writes there, and plans;
without, its store is the memory, and planning is paused. Prints its URL; for each line that it reads one of
JSON: what it has used and done since the line before.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
from _load_job import Job, write
from elasticd_planner.policy.policy import PolicySettings

from elasticd.config.security import SecuritySection
from elasticd.config.tree import ClusterSection, Config, CoordinatorSection
from elasticd.coordinator.connections import Connection
from elasticd.coordinator.daemon import Coordinator
from elasticd.coordinator.garbage_collector import collecting
from elasticd.coordinator.leader import Leader
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.records import Keys
from elasticd.store.etcd import EtcdStore
from elasticd.store.memory import MemoryStore
from elasticd.store.protocol import Store
from elasticd.store.session import EtcdOptions
from elasticd.wire.coordinator import FromClient, ToLeader
from elasticd.wire.worker import Report

#: Seconds between looks at whether the loop is held up.
LOOK = 0.01


class Figures(msgspec.Struct, kw_only=True):
    """Of the time between two lines: seconds of it and of processor, bytes of memory, reports, seconds to
    handle one, and from its sending until it was handled; the longest for which the loop was held up; the
    newest step that was judged; agents that are connected; plans that were asked for since the start."""

    seconds: float
    processor: float
    memory: int
    reports: int
    handled: dict[str, float]
    delayed: dict[str, float]
    held_up: float
    step: int
    connected: int
    planned: int
    beside: float = 0.0  # processor seconds of the thread that answers viewers


@dataclass
class Watch:
    """Looks on while the coordinator works."""

    leading: Leader
    since: float = field(default_factory=time.monotonic)
    used: float = 0.0
    handled: list[float] = field(default_factory=list)
    delayed: list[float] = field(default_factory=list)
    held_up: float = 0.0
    beside: float = 0.0

    def begin(self) -> None:
        heard = self.leading.heard

        async def timed(connection: Connection, message: ToLeader) -> None:
            began = time.monotonic()
            await heard(connection, message)
            if isinstance(message, FromClient) and isinstance(message.body, Report):
                now = time.monotonic()
                self.handled.append(now - began)
                self.delayed.append(now - message.body.measurement.input_seconds)

        self.leading.heard = timed  # type: ignore[method-assign]

    async def look(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(LOOK)
            self.held_up = max(self.held_up, time.monotonic() - began - LOOK)

    def take(self) -> Figures:
        now, used = time.monotonic(), _used()
        job = next(iter(self.leading.state.jobs.values()))
        found = Figures(
            seconds=now - self.since,
            processor=used - self.used,
            memory=psutil.Process().memory_info().rss,
            reports=len(self.handled),
            handled=parts(self.handled),
            delayed=parts(self.delayed),
            held_up=self.held_up,
            step=job.detection.rates.step,
            connected=len(self.leading.connections),
            planned=job.planning.token,
            beside=self.beside,
        )
        self.beside = 0.0
        self.since, self.used, self.held_up = now, used, 0.0
        self.handled.clear()
        self.delayed.clear()
        return found


def parts(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {name: ordered[min(len(ordered) - 1, int(part * len(ordered)))] for name, part in PARTS}


PARTS = (("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("worst", 1.0))


def _used() -> float:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime


def counted(coordinator: Coordinator) -> list[float]:
    """The processor seconds of the thread that answers viewers, in a list of one."""
    spent, beside = [0.0], coordinator.viewers.beside

    async def made(work: Callable[..., Any], *values: Any) -> Any:
        def timed(*given: Any) -> Any:
            began = time.thread_time()
            try:
                return work(*given)
            finally:
                spent[0] += time.thread_time() - began

        return await beside(timed, *values)

    coordinator.viewers.beside = made  # type: ignore[method-assign]
    return spent


async def main(agents: int, devices: int, folder: Path | None, etcd: str | None) -> None:
    security = SecuritySection()
    if folder is not None:
        security = SecuritySection(
            agents=str(folder / "agents"), cert=str(folder / "server.pem"), key=str(folder / "server.key")
        )
    config = Config(
        cluster=ClusterSection(name="load"),
        coordinator=CoordinatorSection(name="c0", port=0),
        security=security,
    )
    store: Store = MemoryStore() if etcd is None else EtcdStore(EtcdOptions(endpoints=(etcd,)))
    write(store, Keys(cluster="load"), Job(agents, devices).records())
    # These workers cannot switch: no plan may be worth it. A busy machine may be slow to connect all agents,
    # which is not what is measured.
    policy = PolicySettings(paused=etcd is None, minimum_saving=0.99)
    settings = JobSettings(policy=policy, reconnect_seconds=3600)
    coordinator = Coordinator(config, store, settings=settings)
    spent = counted(coordinator)
    await coordinator.start()
    watch = Watch(coordinator.leading)
    watch.begin()
    looking = asyncio.create_task(watch.look())
    garbage = asyncio.create_task(collecting())
    loop = asyncio.get_running_loop()
    print(coordinator.url, flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        watch.beside, spent[0] = spent[0], 0.0
        sys.stdout.write(msgspec.json.encode(watch.take()).decode() + "\n")
        sys.stdout.flush()
    looking.cancel()
    garbage.cancel()
    await coordinator.stop()
    store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("agents", type=int)
    parser.add_argument("devices", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--etcd")
    given = parser.parse_args()
    asyncio.run(main(given.agents, given.devices, given.folder, given.etcd))
