"""One node's share of what a leader has for all: bytes written to etcd, and bootstrap stores."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from elasticd.coordinator import write_shares
from elasticd.coordinator.connections import Connection
from elasticd.coordinator.leader import LOOK_SECONDS, Leader
from elasticd.machines.coordinator.finished_jobs import EMPTY_SECONDS
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.events import CoordinatorNote, CoordinatorTick
from elasticd.wire.coordinator import AgentHello, FromClient
from elasticd.wire.rendezvous import Join, Leave
from elasticd.wire.worker import FromWorker, StoreCall
from tests.machines.cast import node_record


class Led:
    """A leader without a store, and a clock that a test turns."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.failures: list[Exception] = []
        self.leading = Leader(
            CoordinatorState(epoch=1), chaos=False, failed=self.failures.append, clock=lambda: self.now
        )

    def agent(self, node: str) -> Connection:
        return self.leading.agent_up(AgentHello(record=node_record(node)))

    def says(self, connection: Connection, job: str, body: FromWorker) -> None:
        up = FromClient(client=f"t{connection.node}", job=job, device="", incarnation="", body=body)
        asyncio.run(self.leading.heard(connection, up))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.leading.apply(CoordinatorTick())
        self.leading.clear()


def test_events_of_a_job_count_for_the_node_that_spoke_last_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_shares, "WRITES_AT_ONCE", 1000)
    monkeypatch.setattr(write_shares, "WRITES_A_SECOND", 10.0)
    led = Led()
    alpha, beta = led.agent("alpha"), led.agent("beta")
    for connection, job in ((alpha, "a"), (beta, "b")):
        for _ in range(2):
            led.says(connection, job, Join(job=job, min_nodes=2, max_nodes=2, pid=1))
    led.leading.record(CoordinatorNote(kind="raised", job="a", text="x" * 500, data={"traceback": "y" * 700}))
    assert led.leading.shares.wait("alpha") > 15
    assert led.leading.shares.wait("beta") == 0
    led.leading.shares.wrote("b", 500)
    assert led.leading.shares.wait("beta") == 0
    led.leading.shares.wrote("b", 800)
    assert led.leading.shares.wait("beta") > 15
    led.leading.shares.wrote("nobody's", 5000)
    led.now += 60
    assert led.leading.shares.wait("alpha") == led.leading.shares.wait("beta") == 0
    assert not led.failures


def test_a_record_that_is_said_anew_again_and_again_counts_for_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(write_shares, "WRITES_AT_ONCE", 1000)
    led = Led()
    alpha = led.agent("alpha")
    led.agent("beta")
    for number in range(100):
        record = msgspec.structs.replace(node_record("alpha"), draining=number % 2 == 0)
        asyncio.run(led.leading.heard(alpha, AgentHello(record=record)))
    assert led.leading.shares.wait("alpha") > 0
    assert led.leading.shares.wait("beta") == 0


def test_the_store_of_a_job_that_never_began_goes_with_it() -> None:
    led = Led()
    alpha = led.agent("alpha")
    for job in ("left", "waits"):
        led.says(alpha, job, Join(job=job, min_nodes=2, max_nodes=2, pid=1))
        led.says(alpha, job, StoreCall(id=1, op="set", key="k", value=bytes(1000)))
    assert led.leading.stores.used_bytes == 2002
    led.says(alpha, "left", Leave(job="left"))
    led.tick(EMPTY_SECONDS / 2)
    assert led.leading.stores.used_bytes == 2002
    led.tick(EMPTY_SECONDS / 2)
    led.tick(LOOK_SECONDS)
    assert "left" not in led.leading.state.jobs
    assert led.leading.stores.used_bytes == 1001
