"""Reports of many agents, whose steps end at one moment, are spread over the leader's window."""

from __future__ import annotations

import asyncio
import time

import pytest
from elasticd_agent.coordinator_link import GATHER_SECONDS, MOST_GATHER_SECONDS, Link, gather_seconds
from elasticd_planner.spec.measurement import Measurement
from websockets.asyncio.server import ServerConnection, serve

from elasticd.codec.message import encode
from elasticd.coordinator.connections import (
    FRAME_SECONDS,
    LEAST_WINDOW_SECONDS,
    MOST_WINDOW_SECONDS,
    Connection,
    Connections,
)
from elasticd.wire.coordinator import FromClient, ReportWindow, all_to_leader, to_agent
from elasticd.wire.rendezvous import Leave
from elasticd.wire.worker import Report
from tests.coordinator.agents import until
from tests.machines.cast import node_record


def windows(connection: Connection) -> list[float]:
    """The windows that wait to be sent to an agent; they are taken from there."""
    waiting = []
    while not connection._waiting.empty():
        message = to_agent(connection._waiting.get_nowait())
        assert isinstance(message, ReportWindow)
        waiting.append(message.seconds)
    return waiting


def test_few_agents_are_sent_no_window_and_many_one_that_is_long_enough_for_all() -> None:
    connections = Connections()
    few = int(LEAST_WINDOW_SECONDS / FRAME_SECONDS)
    agents = [connections.enter(node_record(f"n{n}")) for n in range(few)]
    assert [windows(agent) for agent in agents] == [[]] * few
    newest: dict[int, float] = {}
    for n in range(few, 4000):
        agents.append(connections.enter(node_record(f"n{n}")))
        needed = len(agents) * FRAME_SECONDS
        if sent := windows(agents[0]):  # at a new window, which all are sent
            assert len(sent) == 1
            newest[n] = sent[0]
            assert all(windows(agent) == sent for agent in agents[1:])
        else:
            assert windows(agents[-1]) == [list(newest.values())[-1]]
        assert list(newest.values())[-1] >= min(needed, MOST_WINDOW_SECONDS)
    assert len(newest) <= 7  # each is twice as long as the one before it: a thousand messages a time


def test_window_ends_once_agents_have_left_and_agents_that_come_and_go_do_not_change_it() -> None:
    connections = Connections()
    agents = [connections.enter(node_record(f"n{n}")) for n in range(400)]
    stays = agents[0]
    before = windows(stays)[-1]
    for _ in range(3):
        for agent in agents[300:]:
            connections.leave(agent)
        agents[300:] = [connections.enter(node_record(f"n{n}")) for n in range(300, 400)]
    assert windows(stays) == []
    for agent in agents[1:]:
        connections.leave(agent)
    shrunk = windows(stays)
    assert shrunk == sorted(shrunk, reverse=True)
    assert shrunk[-1] == 0.0 < shrunk[0] < before


@pytest.mark.parametrize(
    ("seconds", "place", "waits"),
    [
        (0.0, 0.9, GATHER_SECONDS),
        (0.8, 0.0, GATHER_SECONDS),
        (0.8, 0.5, 0.4),
        (1e9, 0.5, MOST_GATHER_SECONDS),  # a leader that is out of its mind
        (-1.0, 0.5, GATHER_SECONDS),
    ],
)
def test_reports_wait_for_their_place_in_the_window(seconds: float, place: float, waits: float) -> None:
    assert gather_seconds(ReportWindow(seconds=seconds), place) == waits


def test_reports_wait_in_the_agent_and_nothing_else_waits_with_them() -> None:
    def report(device: str) -> FromClient:
        body = Report(
            measurement=Measurement(device=device, plan=1, step=1, tokens=1, block_seconds=0.1, block_work=1.0)
        )
        return FromClient(client="w", job="j", device=device, incarnation="i", body=body)

    async def body() -> None:
        came: list[tuple[float, int]] = []

        async def leader(connection: ServerConnection) -> None:
            await connection.send(encode(ReportWindow(seconds=1.0)))
            async for data in connection:
                assert isinstance(data, bytes)
                came.append((time.monotonic(), len(all_to_leader(data))))

        async with serve(leader, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            link = Link(lambda _: None, {}, place=0.8)
            link.follow(f"http://127.0.0.1:{port}")
            await until(lambda: link._gather_seconds == 0.8, 60)
            began = time.monotonic()
            for device in ("a/0", "a/1"):
                link.send(report(device))
                await asyncio.sleep(0.05)  # longer than the reports of one node are waited for without a window
            await until(lambda: bool(came), 60)
            (ended, count) = came.pop()
            assert count == 2
            assert ended - began >= 0.8
            link.send(report("a/0"))
            link.send(FromClient(client="t", job="j", device="", incarnation="", body=Leave(job="j")))
            await asyncio.sleep(0.05)
            link.send(report("a/0"))
            await until(lambda: len(came) == 2, 60)
            assert [count for _, count in came] == [2, 1]
            await link.close()

    asyncio.run(body())
