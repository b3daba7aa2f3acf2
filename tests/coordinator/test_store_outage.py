"""The store is out when a worker dies: the leader knows, but nobody is told before it is written."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elasticd.codec.message import encode
from elasticd.config.tree import AgentSection, ClusterSection, Config
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.records import Fence, Keys, decode
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.wire.rendezvous import Join, Joined
from elasticd.wire.worker import (
    Fenced,
    Hello,
    Ping,
    Prepared,
    Propose,
    Recorded,
    StoreAnswer,
    StoreCall,
    Switched,
    Welcome,
)
from tests.agent.support import RunningAgent, Trainer
from tests.coordinator.agents import coordinating, until
from tests.machines.cast import JOB, spec

ROOT = Path(__file__).resolve().parents[2]
KEYS = Keys(cluster="test")
VICTIM = """
import os, sys
import msgspec
from elasticd.wire.worker import from_worker
from tests.agent.support import Trainer
from tests.coordinator.test_store_outage import switch
hello = msgspec.structs.replace(from_worker(sys.argv[2].encode()), pid=os.getpid())
trainer = Trainer(sys.argv[1])
trainer.sock.settimeout(None)
trainer.say(hello)
switch(trainer)
trainer.hear()
"""


def switch(trainer: Trainer) -> None:
    """A worker's part until the first plan is recorded."""
    while not isinstance(message := trainer.hear(), Recorded):
        assert isinstance(message, Welcome | Propose | Ping), message
        if isinstance(message, Propose):
            number = message.proposal.number
            trainer.say(Prepared(number=number))
            swapped = {"step": 0, "pause_seconds": 0.0, "bytes_sent": 0, "bytes_lacking": 0, "bytes_state": 0}
            trainer.say(Switched(number=number, **swapped))  # type: ignore[arg-type]


def hello(rank: int) -> Hello:
    return Hello(job=JOB, local_rank=rank, world_size=2, pid=os.getpid(), spec=spec())


@contextmanager
def victim(path: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", VICTIM, path, encode(hello(1)).decode()]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_nobody_is_told_of_a_death_before_the_store_is_back(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")

    async def body(server: MemoryServer) -> None:
        async with coordinating(server) as coordinator:
            torchrun, survivor = await asyncio.to_thread(lambda: (Trainer(path), Trainer(path)))
            try:
                torchrun.say(Join(job=JOB, min_nodes=1, max_nodes=1, pid=os.getpid()))
                assert isinstance(await asyncio.to_thread(torchrun.hear), Joined)
                survivor.say(hello(0))
                with victim(path) as process:
                    await asyncio.to_thread(switch, survivor)
                    server.outage(True)
                    process.kill()
                    await until(lambda: coordinator.leading.state.jobs[JOB].phase is JobPhase.RECOVERING)
                writer = coordinator.leading.writer
                assert writer is not None
                await until(lambda: writer.away)
                # The answer to a call passes nothing by that the leader sent before it.
                survivor.say(StoreCall(id=1, op="set", key="k"))
                assert await asyncio.to_thread(survivor.hear) == StoreAnswer(id=1)
                server.outage(False)
                told = await asyncio.to_thread(survivor.hear)
                assert isinstance(told, Fenced)
                assert "worker alpha/1" in told.reason
                assert not told.evicted
                fence = MemoryStore(server).get(KEYS.job(JOB, "fence"))
                assert fence is not None
                assert decode(fence.value, Fence).reason == told.reason
            finally:
                survivor.close()
                torchrun.close()

    server = MemoryServer()
    section = AgentSection(node="alpha", socket=path, devices=2, memory=1 << 30)
    agent = RunningAgent(
        Config(cluster=ClusterSection(name="test"), agent=section), MemoryStore(server), lease_seconds=30
    )
    try:
        asyncio.run(body(server))
    finally:
        agent.stop()
    assert agent.error is None
