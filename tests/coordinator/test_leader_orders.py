"""Orders of users to agents: success means that the agent's process has the order, or will be told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from elasticd.coordinator import connections
from elasticd.coordinator.daemon import Coordinator
from elasticd.coordinator.http.chaos import TO_DEVICES
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.store.memory import MemoryServer
from elasticd.wire.coordinator import Harm
from elasticd.wire.worker import EmulatedSpeed
from tests.coordinator.agents import Agent, agent, coordinating, post, until
from tests.coordinator.test_cuts import stays
from tests.coordinator.test_daemon import started
from tests.machines.cast import JOB, node_record

PATH = "/v1/chaos"
SLOW = {"action": "slow", "device": "alpha/0", "factor": 3.0}
KILL = {"action": "kill", "device": "alpha/0"}
CUT = {"action": "cut", "node": "alpha", "seconds": 0.0}


@asynccontextmanager
async def training() -> AsyncIterator[tuple[Coordinator, Agent]]:
    """A job of two nodes, and the agent of one of them."""
    server = MemoryServer()
    async with (
        coordinating(server) as coordinator,
        agent(coordinator, node_record("alpha")) as alpha,
        agent(coordinator, node_record("beta")) as beta,
    ):
        await started(server, [alpha, beta])
        await until(lambda: coordinator.leading.state.jobs[JOB].phase is JobPhase.RUNNING)
        yield coordinator, alpha


def test_chaos_on_a_device_is_answered_once_the_agent_has_heard_of_it() -> None:
    async def body() -> None:
        async with training() as (coordinator, alpha):
            for action in TO_DEVICES:
                before = len(alpha.heard)
                status, answer = await post(coordinator, PATH, {**SLOW, "action": action})
                assert (status, answer.get("pending")) == (200, []), answer
                # The agent's process has it; this one reads it from its socket's queue next.
                await until(lambda before=before: bool(orders(alpha, before)), 1.0)
                speeds = {"slow": EmulatedSpeed(factor=3.0), "recover": EmulatedSpeed(factor=1.0)}
                assert orders(alpha, before) == [speeds.get(action, action)]

    asyncio.run(body())


def orders(this: Agent, after: int) -> list[object]:
    """What chaos had an agent do, of all that it heard after so many messages."""
    heard: list[Any] = this.heard[after:]
    found = [order.how if isinstance(order, Harm) else getattr(order, "body", None) for order in heard]
    return [order for order in found if isinstance(order, str | EmulatedSpeed)]


def test_agent_that_hears_nothing_is_told_of_its_slowness_later_and_its_kill_is_no_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process stands still: nothing is read of its connection, which the leader gives up."""
    monkeypatch.setattr(connections, "REACH_SECONDS", 60.0)  # it is the connection's end that decides

    async def body() -> None:
        async with training() as (coordinator, alpha):
            alpha.socket.transport.pause_reading()
            (slow, slowed), (kill, killed) = await asyncio.gather(
                *(post(coordinator, PATH, ask) for ask in (SLOW, KILL))
            )
            assert (slow, slowed["pending"]) == (200, ["alpha"])
            assert kill == 503
            assert "the agent of node alpha did not confirm the order to kill" in killed["error"]
            alpha.socket.transport.abort()
            async with agent(coordinator, node_record("alpha")) as again:
                await until(lambda: bool(again.bodies("device:alpha/0")))
                assert again.bodies("device:alpha/0") == [EmulatedSpeed(factor=3.0)]

    asyncio.run(body())


def test_cut_is_a_success_once_its_agent_keeps_the_connection_of_a_cut() -> None:
    """An agent that is cut leaves at once, and answers no ping any more."""

    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")) as alpha:
            ordered = asyncio.Event()
            healed = asyncio.Event()

            async def leave(order: object) -> None:
                if isinstance(order, Harm):
                    alpha.socket.transport.abort()
                    ordered.set()

            async def cut() -> None:
                await ordered.wait()
                async with stays(coordinator, "alpha"):
                    await healed.wait()

            alpha.on_down = leave
            await until(lambda: "alpha" in coordinator.leading.state.nodes)
            keeping = asyncio.create_task(cut())
            status, answer = await post(coordinator, PATH, CUT)
            assert status == 200, answer
            assert (await post(coordinator, PATH, {"action": "heal", "node": "alpha"}))[0] == 200
            healed.set()
            await keeping

    asyncio.run(body())


def test_cut_that_no_agent_carries_out_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")) as alpha:
            await until(lambda: "alpha" in coordinator.leading.state.nodes)
            monkeypatch.setattr("elasticd.coordinator.http.chaos.REACH_SECONDS", 0.1)
            alpha.socket.transport.pause_reading()
            status, answer = await post(coordinator, PATH, CUT)
            assert status == 503, answer
            alpha.socket.transport.abort()

    asyncio.run(body())
