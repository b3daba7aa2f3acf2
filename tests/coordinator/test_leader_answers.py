"""Users are told the truth: an answer of success means that the decision is in the store, for every leader;
any other one says why, and nothing was changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.routing import Route

from elasticd.cli.status import unwritten
from elasticd.coordinator import commands, leader
from elasticd.coordinator.auth import Authorizer
from elasticd.coordinator.daemon import Coordinator
from elasticd.coordinator.http.api import Served
from elasticd.coordinator.http.app import application
from elasticd.coordinator.http.chaos import TO_DEVICES, TO_NODES
from elasticd.machines.job.state.events import Received
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.records import Keys, StopRecord, decode
from elasticd.store import lease
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.wire.coordinator import Drain, End
from elasticd.wire.worker import PeersLost
from tests.coordinator.agents import PLANNER, agent, config, coordinating, get, lead, post, until
from tests.coordinator.test_daemon import started
from tests.coordinator.test_metrics import samples
from tests.machines.cast import JOB, FakeWorker, node_record
from tests.machines.world import World

KEYS = Keys(cluster="test")
BY = {"by": "alice"}
#: Every request that changes something, by what it asks.
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "stop": (f"/v1/jobs/{JOB}/stop", {"by": "alice", "seconds": 60.0}),
    "stop at once": (f"/v1/jobs/{JOB}/stop", {"by": "alice", "seconds": 0.0}),
    "forget": ("/v1/nodes/gamma/forget", {"by": "alice"}),
    "drain": ("/v1/nodes/alpha/drain", {"on": True}),
    "config": ("/v1/config", {"by": "alice", "values": {"policy.paused": True}}),
    "forget a job": (f"/v1/jobs/{JOB}/forget", BY),
    "checkpoint": (f"/v1/jobs/{JOB}/checkpoint", BY),
    "adopt": (f"/v1/jobs/{JOB}/adopt", BY),
    **{
        f"chaos {action}": ("/v1/chaos", {"action": action, "device": "alpha/0", "factor": 2.0})
        for action in TO_DEVICES
    },
    **{f"chaos {action}": ("/v1/chaos", {"action": action, "node": "alpha"}) for action in TO_NODES},
    **{
        f"chaos {action} of two": ("/v1/chaos", {"action": action, "node": "alpha", "other": "beta"})
        for action in TO_NODES
    },
}


@asynccontextmanager
async def training(
    server: MemoryServer, store: MemoryStore
) -> AsyncIterator[tuple[Coordinator, list[FakeWorker]]]:
    """A job of two nodes, and a third node that is away."""
    coordinator = Coordinator(config(), store, planner=PLANNER)
    await lead(coordinator)
    try:
        async with (
            agent(coordinator, node_record("alpha")) as alpha,
            agent(coordinator, node_record("beta")) as beta,
        ):
            async with agent(coordinator, node_record("gamma")):
                await until(lambda: "gamma" in coordinator.leading.state.nodes)
            workers = await started(server, [alpha, beta])
            await until(lambda: coordinator.leading.state.jobs[JOB].phase is JobPhase.RUNNING)
            await until(lambda: not coordinator.leading.state.nodes["gamma"].connected)
            yield coordinator, workers
    finally:
        await coordinator.stop()


def decided(coordinator: Coordinator) -> Any:
    """All that a user's wish may change."""
    state = coordinator.leading.state
    job = state.jobs[JOB]
    nodes = [(name, node.paces, node.drain_asked) for name, node in sorted(state.nodes.items())]
    return job.phase, job.ending.stopping, nodes, coordinator.leading.changes, state.settings


def test_every_route_that_changes_something_is_asked_here() -> None:
    """What no read answers goes by the store (`Leader.decide`), as the tests below find out of each."""
    served = cast(Served, SimpleNamespace(access=Authorizer({}, asks=False), viewers=None))
    changing = [
        route
        for route in application(served, 1.0).routes
        if isinstance(route, Route) and not {*(route.methods or ())} <= {"GET", "HEAD"}
    ]
    assert len(changing) >= 8
    paths = [path for path, _ in ASKS.values()]
    assert [route.path for route in changing if not any(map(route.path_regex.match, paths))] == []


def test_while_etcd_is_away_nothing_is_changed_and_the_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "WRITE_SECONDS", 0.5)

    async def body() -> None:
        server = MemoryServer()
        async with training(server, MemoryStore(server)) as (coordinator, _):
            before = decided(coordinator)
            server.outage(True)
            for path, wish in ASKS.values():  # the first finds out that etcd is away, and the others know
                status, answer = await post(coordinator, path, wish)
                assert status == 503, answer
                assert "etcd does not answer" in answer["error"]
                assert "nothing was changed" in answer["error"]
            server.outage(False)
            assert coordinator.leading.writer is not None
            await asyncio.wait_for(coordinator.leading.writer.drained(), 60)
            assert decided(coordinator) == before
            for key in (KEYS.job(JOB, "stop"), KEYS.config):
                assert MemoryStore(server).get(key) is None, "no later leader does what was refused"
            monkeypatch.setattr(commands, "WRITE_SECONDS", 60.0)
            assert (await post(coordinator, *ASKS["stop"]))[0] == 200
            assert coordinator.leading.state.jobs[JOB].ending.stopping == "stopped by alice"

    asyncio.run(body())


def test_at_etcds_quota_a_wish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "WRITE_SECONDS", 0.5)

    async def body() -> None:
        server = MemoryServer()
        async with training(server, MemoryStore(server)) as (coordinator, _):
            assert coordinator.leading.writer is not None
            await asyncio.wait_for(coordinator.leading.writer.drained(), 60)
            before = decided(coordinator)
            server.full = True
            for ask in ("stop", "stop at once", "config"):
                status, answer = await post(coordinator, *ASKS[ask])
                assert (status, "space exceeded" in answer["error"]) == (503, True), answer
                assert "nothing was changed" in answer["error"]
            assert decided(coordinator) == before
            server.full = False

    asyncio.run(body())


def test_a_fault_at_etcds_quota_waits_for_space_and_ends_no_job() -> None:
    """A fence that etcd refuses for want of space is written once there is some."""

    async def body() -> None:
        server = MemoryServer()
        async with training(server, MemoryStore(server)) as (coordinator, workers):
            writer = coordinator.leading.writer
            assert writer is not None
            await asyncio.wait_for(writer.drained(), 60)
            server.full = True
            stray = PeersLost(step=1, reason="all want an older state", back=0)
            coordinator.leading.apply(Received(node=workers[0].node, message=workers[0].up(stray)))
            await until(lambda: "space exceeded" in writer.full)
            job = coordinator.leading.state.jobs[JOB]
            assert (job.phase, job.reason) == (JobPhase.RECOVERING, ""), job.reason
            assert MemoryStore(server).get(KEYS.job(JOB, "fence")) is None
            server.full = False
            await until(lambda: MemoryStore(server).get(KEYS.job(JOB, "fence")) is not None)
            assert writer.full == ""

    asyncio.run(body())


def test_a_leader_that_was_replaced_says_so_and_changes_nothing() -> None:
    """It stood still for longer than its lease, and the first that it hears again is a user's wish."""

    async def body() -> None:
        server = MemoryServer()
        async with training(server, MemoryStore(server)) as (coordinator, _):
            before = decided(coordinator)
            item = MemoryStore(server).get(KEYS.leader)
            assert item is not None
            MemoryStore(server).revoke(item.lease)
            answers = await asyncio.gather(*(post(coordinator, *ask) for ask in ASKS.values()))
            assert [status for status, _ in answers] == [503] * len(ASKS), answers
            assert decided(coordinator) == before

    asyncio.run(body())


def test_the_next_leader_goes_on_with_a_stop() -> None:
    async def body() -> None:
        server = MemoryServer()
        async with training(server, MemoryStore(server)) as (coordinator, workers):
            assert (await post(coordinator, *ASKS["stop"]))[0] == 200
            item = MemoryStore(server).get(KEYS.job(JOB, "stop"))
            assert item is not None
            record = decode(item.value, StopRecord)
            assert (record.by, record.seconds, record.at > 1e9) == ("alice", 60.0, True)
        async with coordinating(server) as second, agent(second, node_record("alpha")) as alpha:
            job = second.leading.state.jobs[JOB]
            assert job.ending.stopping == "stopped by alice"
            assert 0 < job.ending.stop_at - second.leading.now() <= 60.0
            (shown,) = (await get(second, "/v1/status"))[1]["jobs"]
            assert shown["stopping"] is True
            await until(lambda: "alpha" in second.leading.state.nodes)
            await alpha.tell(workers[0].up(World().hello(workers[0])))
            await until(lambda: any(isinstance(order, End) for order in alpha.heard))

    asyncio.run(body())


def test_drain_is_in_the_store_before_the_answer_and_known_to_the_next_leader() -> None:
    async def body() -> None:
        server, path = MemoryServer(), "/v1/nodes/alpha/drain"
        async with coordinating(server) as first, agent(first, node_record("alpha")) as alpha:
            await until(lambda: "alpha" in first.leading.state.nodes)
            assert (await post(first, path, {"on": True}))[0] == 200
            assert MemoryStore(server).get(KEYS.drains + "alpha") is not None
            await until(lambda: Drain(on=True) in alpha.heard)
        async with coordinating(server) as second:
            async with agent(second, node_record("alpha")) as alpha:  # started anew, it knows of nothing
                await until(lambda: Drain(on=True) in alpha.heard)
                (shown,) = (await get(second, "/v1/status"))[1]["nodes"]
                assert (shown["draining"], shown["drain_asked"]) == (True, True)
                assert (await post(second, path, {"on": False}))[0] == 200
                await until(lambda: Drain(on=False) in alpha.heard)
            await until(lambda: not any(node.connected for node in second.leading.state.nodes.values()))
            assert (await post(second, "/v1/nodes/alpha/forget", BY))[0] == 200
            assert MemoryStore(server).get(KEYS.drains + "alpha") is None

    asyncio.run(body())


def test_changes_of_the_configuration_at_one_moment_are_all_kept() -> None:
    async def body() -> None:
        server = MemoryServer()
        async with coordinating(server) as coordinator:
            wishes: list[dict[str, Any]] = [
                {"policy.paused": True},
                {"policy.horizon_steps": 77},
                {"policy.paused": False},
            ]
            asks = [post(coordinator, "/v1/config", {"by": "alice", "values": values}) for values in wishes]
            assert [status for status, _ in await asyncio.gather(*asks)] == [200, 200, 200]
            kept = (await get(coordinator, "/v1/config"))[1]
            assert len(kept["history"]) == 3
            assert [change["number"] for change in kept["history"]] == [1, 2, 3]
            assert kept["values"]["policy.horizon_steps"] == 77

    asyncio.run(body())


def test_a_leader_with_nothing_to_write_finds_out_that_etcd_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "AWAY_SECONDS", 0.2)

    async def body() -> None:
        server = MemoryServer()
        async with coordinating(server, lease_seconds=6) as coordinator:
            assert not coordinator.leading.store_away
            server.outage(True)
            await until(lambda: coordinator.leading.store_away and "does not answer" in caplog.text)
            assert samples(coordinator.leading.exposition().decode())["elasticd_store_away", ()] == 1
            server.outage(False)
            await until(lambda: not coordinator.leading.store_away)
            assert caplog.text.count("the store does not answer") == 1
            assert caplog.text.count("the store answers again") == 1

    asyncio.run(body())


def test_status_says_for_how_long_etcd_has_not_taken_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "UNWRITTEN_SECONDS", 0.05)

    async def body() -> None:
        server = MemoryServer()
        async with training(server, MemoryStore(server)) as (coordinator, _):
            assert coordinator.leading.writer is not None
            await asyncio.wait_for(coordinator.leading.writer.drained(), 60)
            assert (await coordinator.status()).unwritten_seconds == 0.0
            server.outage(True)
            coordinator.commands.stop(JOB, 600.0, "alice")
            await until(lambda: coordinator.leading.unwritten_seconds > 0.1)
            found = await coordinator.status()
            assert found.unwritten_seconds > 0.1
            (line,) = unwritten(found)
            assert "etcd has not taken what was decided" in line.plain
            server.outage(False)
            await asyncio.wait_for(coordinator.leading.writer.drained(), 60)
            found = await coordinator.status()
            assert (found.unwritten_seconds, [*unwritten(found)]) == (0.0, [])

    asyncio.run(body())
