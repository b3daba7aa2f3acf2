"""A coordinator on a real etcd: elected, patient over a restart of etcd, gone without a trace."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.config.tree import Config, with_overrides
from elasticd.coordinator import election
from elasticd.coordinator.daemon import Coordinator, serve
from elasticd.records import JobSpec, Keys, decode
from elasticd.store.leader import read_leader
from elasticd.store.server import EtcdServer
from elasticd.store.state_file import StateFile
from elasticd.wire.coordinator import FromClient
from elasticd.wire.rendezvous import Join
from elasticd.wire.worker import Hello
from tests.coordinator.agents import PLANNER, agent, config, lead, until
from tests.etcds import SharedEtcd
from tests.machines.cast import JOB, FakeWorker, node_record
from tests.machines.world import World

pytestmark = pytest.mark.slow
KEYS = Keys(cluster="test")


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer(fsync=False) as server:
        yield server


def configured(endpoint: str) -> Config:
    return with_overrides(config(), {"etcd.endpoints": (endpoint,)})


def test_leader_outlasts_a_restart_of_etcd_and_writes_what_waited(etcd: EtcdServer) -> None:
    async def body() -> None:
        store = await asyncio.to_thread(election.connect, configured(etcd.endpoint))
        coordinator = Coordinator(configured(etcd.endpoint), store, planner=PLANNER)
        await lead(coordinator)
        try:
            async with agent(coordinator, node_record("alpha", devices=1)) as alpha:
                join = Join(job=JOB, min_nodes=1, max_nodes=1, pid=1)
                await alpha.tell(FromClient(client="t", job=JOB, device="", incarnation="", body=join))
                await until(lambda: bool(alpha.bodies("t")))
                await asyncio.to_thread(etcd.kill)
                worker = FakeWorker(device="alpha/0", incarnation="a")
                hello: Hello = World().hello(worker)
                await alpha.tell(worker.up(hello))
                writer = coordinator.leading.writer
                assert writer is not None
                await until(lambda: writer.away)
                await asyncio.to_thread(etcd.start)
                await asyncio.wait_for(writer.drained(), 60)
                found = await asyncio.to_thread(store.get, KEYS.job(JOB, "spec"))
                assert found is not None
                assert decode(found.value, JobSpec) == hello.spec
                assert coordinator.ready() == ""
        finally:
            await coordinator.stop()
        assert await asyncio.to_thread(read_leader, store, KEYS.leader) is None
        store.close()

    asyncio.run(body())


def test_etcd_that_is_not_the_one_remembered_is_refused_with_the_file_to_delete(
    etcd: EtcdServer, shared_etcd: SharedEtcd, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = with_overrides(configured(shared_etcd.endpoint), {"coordinator.state": str(tmp_path)})

    async def leads() -> None:
        memory = StateFile(str(tmp_path), "test", "coordinator", "c0")
        store = election.connect(configured(etcd.endpoint), memory)
        coordinator = Coordinator(configured(etcd.endpoint), store, planner=PLANNER, memory=memory)
        await coordinator.start()
        await until(lambda: memory.identity is not None)
        await coordinator.stop()
        store.close()

    asyncio.run(leads())
    assert serve(lambda: other) == 1
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"elasticd coordinator: etcd at {shared_etcd.endpoint} is")
    assert f"{tmp_path}/test-coordinator-c0.json: if this etcd is the right one" in said
    assert "delete that file, or use another cluster name" in said
