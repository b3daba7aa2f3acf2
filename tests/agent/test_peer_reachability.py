"""Whether one agent's node reaches another's, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest
from elasticd_agent import peer_reachability
from elasticd_agent.peer_reachability import PeerReachability, unreached

from elasticd.records import Keys, NodeRecord, decode
from elasticd.testing.waiting import until
from elasticd.wire.coordinator import TryReach, Unreached
from tests.agent.support import CLUSTER, Node, closing_all


def full() -> tuple[socket.socket, list[socket.socket]]:
    """A port that answers no more: its backlog is full, so that the kernel drops who asks."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = []
    for _ in range(4):
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex(listener.getsockname())
        waiting.append(client)
    return listener, waiting


def test_who_answers_is_reached_and_who_refuses_or_is_silent_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_reachability, "TRY_SECONDS", 0.3)
    listener, waiting = full()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refused = f"127.0.0.1:{closed.getsockname()[1]}"
    told: list[Unreached] = []

    async def play() -> dict[str, str]:
        there = PeerReachability("127.0.0.1", told.append)
        await there.start()
        silent = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            targets = {"there": there.address, "refused": refused, "silent": silent, "odd": "no address"}
            return await unreached(targets)
        finally:
            await there.close()

    found = asyncio.run(play())
    for each in (listener, *waiting):
        each.close()
    assert {*found} == {"refused", "silent", "odd"}
    assert "no answer from" in found["silent"]


def test_all_are_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_reachability, "TRY_SECONDS", 0.5)
    listener, waiting = full()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    began = time.monotonic()
    found = asyncio.run(unreached({f"n{index}": address for index in range(50)}))
    for each in (listener, *waiting):
        each.close()
    assert len(found) == 50
    assert time.monotonic() - began < 10


def test_an_agent_says_where_it_is_reached_and_answers_its_leader(tmp_path: Path) -> None:
    with closing_all() as register:
        node = Node(register, tmp_path)
        leader = node.leader()
        node.agent()
        found = until(lambda: node.store.get(Keys(cluster=CLUSTER).node("n0")))
        record = decode(found.value, NodeRecord)
        assert record.reach.startswith("127.0.0.1:")
        until(lambda: leader.heard)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            refused = f"127.0.0.1:{closed.getsockname()[1]}"
        leader.send(TryReach(job="j", round=3, targets={"me": record.reach, "gone": refused}))
        answer = until(lambda: next((word for word in list(leader.heard) if isinstance(word, Unreached)), None))
        assert (answer.job, answer.round, {*answer.nodes}) == ("j", 3, {"gone"})
