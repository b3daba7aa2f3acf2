"""A whole cluster for tests: the real coordinator and agents on a thread, over a store in memory or etcd, and
real worker processes; only torchrun is played (it joins and starts the workers), so that a test is quick."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
from elasticd_agent.daemon import Agent
from elasticd_planner.spec.plan import Plan

from elasticd.codec.message import encode
from elasticd.config.tree import Config, with_overrides
from elasticd.coordinator.daemon import Coordinator
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.store.etcd import EtcdStore
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import Store
from elasticd.store.session import EtcdOptions
from elasticd.testing.waiting import CONDITION_TIMEOUT_SECONDS, until
from elasticd.wire import unix_socket
from elasticd.wire.rendezvous import Join, Joined
from elasticd.wire.worker import to_worker
from tests import forkserver
from tests.coordinator.agents import lead
from tests.forkserver import Forked
from tests.planners import Planners

ROOT = Path(__file__).resolve().parents[2]
JOB = "job"
T = TypeVar("T")
#: Steps of a job that ends when its test says so.
MANY = 100_000
#: How many times slower a device is made. Beside other processes a step of these tiny models takes several
#: times as long as its blocks are said to take, and most of the slowness is lost in that.
SLOW = 6.0
#: Steps after which nobody waits for the fit of the profile any more.
FITTED_BY = 50


class Cluster:
    """`nodes` gives the number of devices of each node. `plans` answers the planner's questions by the
    slowest device ("" when none is slow); without it the command `planner` is asked, by default a real one.
    `etcd`: an endpoint; without it the store is one in memory. `emulated`: workers pace their blocks; else
    they compute as fast as they can. `flops`: of a device, by which the planner guesses before steps were
    measured; 0: the default, by which one device is fastest for a tiny model."""

    def __init__(
        self,
        nodes: Mapping[str, int],
        *,
        plans: Mapping[str, Plan] | None = None,
        planner: tuple[str, ...] = (),
        settings: JobSettings | None = None,
        forward: float = 5e-4,
        memory: int = 1 << 30,
        etcd: str = "",
        emulated: bool = True,
        flops: float = 0.0,
    ) -> None:
        self._etcd = etcd
        self._stores: list[Store] = []
        self.nodes = dict(nodes)
        self._folder = tempfile.TemporaryDirectory(prefix="elasticd-test-")
        self.folder = Path(self._folder.name)
        self._settings = settings
        script = () if plans is None else self._scripted(plans)
        self._planners = None if planner else Planners(self.folder, *script)
        self._planner = self._planners.command if self._planners is not None else planner
        self.config = with_overrides(
            Config(),
            {
                "cluster.name": "test",
                "coordinator.port": 0,
                "chaos.enabled": True,
                "emulate.enabled": emulated,
                "emulate.forward": forward,
                "emulate.backward": 2 * forward,
                "emulate.memory": memory,
                **({"planner.flops": flops} if flops else {}),
            },
        )
        self.server = MemoryServer()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._agents: dict[str, Agent] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        self.workers: dict[str, Forked] = {}
        self._torchruns: dict[str, socket.socket] = {}

    def _scripted(self, plans: Mapping[str, Plan]) -> tuple[str, ...]:
        path = self.folder / "plans.json"
        path.write_bytes(msgspec.json.encode(dict(plans)))
        return str(Path(__file__).with_name("scripted_planner.py")), str(path)

    def __enter__(self) -> Cluster:
        self._thread.start()
        try:
            self.call(self._start())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None):
        self.close()

    async def _start(self) -> None:
        self.coordinator = Coordinator(
            self.config, self._store(), settings=self._settings, planner=self._planner
        )
        await lead(self.coordinator)
        for node in self.nodes:
            self._start_agent(node)

    def _store(self) -> Store:
        if self._etcd:
            self._stores.append(EtcdStore(EtcdOptions(endpoints=(self._etcd,))))
        else:
            self._stores.append(MemoryStore(self.server))
        return self._stores[-1]

    def _start_agent(self, node: str) -> None:
        config = with_overrides(
            self.config,
            {"agent.node": node, "agent.socket": self.socket(node), "agent.devices": self.nodes[node]},
        )
        self._agents[node] = Agent(config, self._store())
        self._serving[node] = asyncio.create_task(self._agents[node].run())

    def restart_agent(self, node: str) -> None:
        """Ends a node's agent and starts another."""

        async def restart() -> None:
            self._agents[node].stop()
            await self._serving[node]
            self._start_agent(node)

        self.call(restart())

    def lose_store(self) -> None:
        """The store is lost with all that is in it; coordinator and agents are started anew over an empty one.
        Workers train on."""

        async def begin_anew() -> None:
            for node in self.nodes:
                self._agents[node].stop()
                await self._serving[node]
            await self.coordinator.stop()
            self.server = MemoryServer()
            await self._start()

        self.call(begin_anew())

    def lose_node(self, node: str) -> None:
        """Ends a node's agent, and then kills its workers, so that nobody tells of their deaths."""

        async def stop() -> None:
            self._agents.pop(node).stop()
            await self._serving.pop(node)

        self.call(stop())
        for device, worker in self.workers.items():
            if device.startswith(f"{node}/"):
                worker.kill()
        self._torchruns.pop(node).close()

    def call(self, work: Coroutine[Any, Any, T], seconds: float = 30.0) -> T:
        """Runs a coroutine on the cluster's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def close(self) -> None:
        for worker in self.workers.values():
            if worker.poll() is None:
                worker.kill()
            worker.wait()
        for torchrun in self._torchruns.values():
            torchrun.close()
        if self._thread.is_alive():
            try:
                self.call(self._stop())
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(10)
        for store in self._stores:
            store.close()
        if self._planners is not None:
            self._planners.close()
        self._folder.cleanup()

    async def _stop(self) -> None:
        for agent in self._agents.values():
            agent.stop()
        await asyncio.gather(*self._serving.values(), return_exceptions=True)
        if hasattr(self, "coordinator"):
            await self.coordinator.stop()

    def socket(self, node: str) -> str:
        return str(self.folder / f"{node}.sock")

    # -- a job -------------------------------------------------------------------------------------------------

    def run(self, script: Path, **options: Mapping[str, Any] | Any) -> None:
        """Joins as one torchrun for each node would, and starts the workers. Options go to the script as
        JSON in $OPTIONS; one under a device's name is for that worker alone. Without `steps` it trains until
        `finish`."""
        names = sorted(self.nodes)
        for node in names:
            self._torchruns[node] = unix_socket.connect(self.socket(node), 20)
            self._ask(node)
        for node in names:
            self._joined(node)
        for node in names:
            for index in range(self.nodes[node]):
                self.start_worker(f"{node}/{index}", script, options)

    def finish(self) -> int:
        """Lets the job end a few steps from now; how many steps it makes in all. For `train.py`."""
        (self.folder / "end").touch()
        until(lambda: (self.folder / "last").exists(), self.events)
        return int((self.folder / "last").read_text())

    def rejoin(self, node: str) -> None:
        """As a torchrun does whose workers died: it asks again, before it starts others."""
        self._ask(node)
        self._joined(node)

    def _ask(self, node: str) -> None:
        join = Join(job=JOB, min_nodes=len(self.nodes), max_nodes=len(self.nodes), pid=os.getpid())
        unix_socket.send(self._torchruns[node], encode(join))

    def _joined(self, node: str) -> None:
        sock = self._torchruns[node]
        sock.settimeout(60)
        data = unix_socket.receive(sock)
        assert data is not None
        answer = to_worker(data)
        assert isinstance(answer, Joined), answer

    def start_worker(self, device: str, script: Path, options: Mapping[str, Any]) -> None:
        node, _, index = device.rpartition("/")
        environment = dict(
            os.environ,
            ELASTICD_DEVICE="cpu",
            OMP_NUM_THREADS="1",
            PYTHONPATH=str(ROOT),
            ELASTICD_SOCKET=self.socket(node),
            TORCHELASTIC_RUN_ID=JOB,
            LOCAL_RANK=index,
            WORLD_SIZE=str(sum(self.nodes.values())),
            OPTIONS=json.dumps({"out": str(self.folder), "steps": MANY, **options, **options.get(device, {})}),
        )
        log = self.folder / f"log-{device.replace('/', ':')}"
        log.unlink(missing_ok=True)  # of the worker before it
        self.workers[device] = forkserver.start(script, environment=environment, output=log)

    def log(self, device: str) -> str:
        return (self.folder / f"log-{device.replace('/', ':')}").read_text()

    def wait(self, seconds: float = 90.0) -> dict[str, int]:
        """The workers' exit codes, once all have ended."""
        deadline = time.monotonic() + max(seconds, CONDITION_TIMEOUT_SECONDS)
        codes = {}
        for device, worker in self.workers.items():
            try:
                codes[device] = worker.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logs = "\n".join(f"-- {name}:\n{self.log(name)[-1500:]}" for name in self.workers)
                raise AssertionError(f"{device} did not end\n{self.events()}\n{logs}") from None
        return codes

    # -- what the coordinator shows ---------------------------------------------------------------------------

    def job(self) -> dict[str, Any]:
        async def look() -> dict[str, Any]:
            found = (await self.coordinator.status()).job(JOB)
            return msgspec.to_builtins(found) if found is not None else {}

        return self.call(look())

    def pace(self, device: str, factor: float) -> None:
        async def pace() -> None:
            self.coordinator.commands.pace(device, factor)

        self.call(pace())

    def slow(self, device: str) -> None:
        """Slows a device once the leader has fitted the profile to steps of the first plan: until then it makes
        no plan for a slow device, and ten steps that are `SLOW` times as long would be waited for."""

        def fitted() -> bool:
            return bool(self.events("fitted")) or (self.job().get("step") or 0) >= FITTED_BY

        until(fitted, lambda: str([event["text"] for event in self.events()]))
        self.pace(device, SLOW)

    def checkpoint(self) -> None:
        async def ask() -> None:
            self.coordinator.commands.checkpoint(JOB)

        self.call(ask())

    def adopt(self) -> None:
        async def ask() -> None:
            commands = self.coordinator.commands
            await commands.decide(lambda: commands.adopt(JOB, "alice"), lambda: None)

        self.call(ask())

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        async def look() -> list[dict[str, Any]]:
            return [msgspec.to_builtins(event) for event in self.coordinator.leading.journal.events(0)]

        return [event for event in self.call(look()) if not kinds or event["kind"] in kinds]

    def runs(self, number: int, steps: int = 0, seconds: float = 60.0) -> None:
        """Waits until plan `number` is recorded and `steps` steps ran under it."""

        def there() -> bool:
            for device, worker in self.workers.items():
                assert worker.poll() in (None, 0), f"{device}: {self.log(device)[-3000:]}"
            job = self.job()
            plan = job.get("plan")
            if not plan or plan["number"] < number:
                return False
            recorded = [e["data"]["step"] for e in self.events("recorded") if e["data"]["number"] == number]
            return bool(recorded) and (job.get("step") or 0) >= recorded[0] + steps

        until(
            there,
            lambda: f"plan {number}; events: {[e['text'] for e in self.events()]}",
            seconds=max(seconds, CONDITION_TIMEOUT_SECONDS),
        )


def plan_from(strategies: Any, **fields: Any) -> Plan:
    return Plan(number=0, strategies=strategies, **fields)


__all__: Sequence[str] = ["JOB", "Cluster", "plan_from"]
