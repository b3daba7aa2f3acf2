"""Chaos in an agent: signals by pidfd, and a store that is cut off and healed."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from elasticd_agent.chaos import cut_network
from elasticd_agent.chaos.cut_store import CuttableStore
from elasticd_agent.chaos.injector import FaultInjector

from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import StoreUnavailable, WatchEvent
from elasticd.testing.waiting import until
from elasticd.wire.coordinator import Harm
from tests.descriptors import open_descriptors


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(["sleep", "600"])
    yield started
    started.kill()
    started.wait()


def injector(process: subprocess.Popen[bytes], allowed: bool = True) -> FaultInjector:
    def pidfd(device: str) -> int | None:
        return os.pidfd_open(process.pid) if device == "n0/0" and process.poll() is None else None

    return FaultInjector("n0", allowed, CuttableStore(MemoryStore(MemoryServer())), pidfd, lambda url: None)


def status(process: subprocess.Popen[bytes]) -> str:
    return str(psutil.Process(process.pid).status())


def test_a_frozen_process_is_thawed_though_nobody_else_knows_it_any_more(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = injector(process)
    agent.take(Harm(how="freeze", device="n0/0"))
    until(lambda: status(process) == psutil.STATUS_STOPPED)
    monkeypatch.setattr(agent, "_pidfd", lambda device: None)
    agent.take(Harm(how="thaw", device="n0/0"))
    until(lambda: status(process) != psutil.STATUS_STOPPED)


def test_an_agent_that_ends_thaws_whom_it_froze(process: subprocess.Popen[bytes]) -> None:
    agent = injector(process)
    agent.take(Harm(how="freeze", device="n0/0"))
    until(lambda: status(process) == psutil.STATUS_STOPPED)
    asyncio.run(agent.close())
    until(lambda: status(process) != psutil.STATUS_STOPPED)


def test_a_device_without_a_worker_is_let_be(process: subprocess.Popen[bytes]) -> None:
    agent = injector(process)
    agent.take(Harm(how="kill", device="n0/1"))
    assert process.poll() is None
    agent.take(Harm(how="kill", device="n0/0"))
    assert process.wait(30) == -9
    agent.take(Harm(how="kill", device="n0/0"))


def test_an_agent_whose_configuration_has_chaos_off_does_nothing(
    process: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    agent = injector(process, allowed=False)
    agent.take(Harm(how="freeze", device="n0/0"))
    assert "chaos is off here" in caplog.text
    assert status(process) != psutil.STATUS_STOPPED


TALKS = """
import socket, sys
held = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:2]]
held += [socket.create_connection(("127.0.0.2", int(port))) for port in sys.argv[2:]]
print("there", flush=True)
sys.stdin.read()
"""


def test_without_the_right_to_set_routes_a_data_cut_shuts_the_connections_to_that_node_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cut_network, "_route", lambda verb, peer: "Operation not permitted")
    with socket.create_server(("127.0.0.1", 0)) as near, socket.create_server(("127.0.0.2", 0)) as far:
        ports = [str(each.getsockname()[1]) for each in (near, far)]
        process = subprocess.Popen(
            [sys.executable, "-c", TALKS, *ports], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"there\n"
            (kept, _), (cut, _) = near.accept(), far.accept()
            store = CuttableStore(MemoryStore(MemoryServer()))
            agent = FaultInjector(
                *("n0", True, store, lambda device: os.pidfd_open(process.pid), lambda url: None),
                devices=["n0/0"],
            )
            before = open_descriptors()
            agent.take(Harm(how="cut-data", peer="127.0.0.2"))
            cut.settimeout(30)
            assert cut.recv(1) == b""
            kept.setblocking(False)
            with pytest.raises(BlockingIOError):
                kept.recv(1)
            assert open_descriptors() <= before
            assert "Operation not permitted): 1 connections to 127.0.0.2 were shut instead" in caplog.text
        finally:
            process.kill()
            process.communicate()


def test_a_data_cut_is_a_route_until_it_is_healed_or_the_agent_ends(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(cut_network, "_route", lambda verb, peer: asked.append((verb, peer)) or "")

    async def play() -> None:
        agent = injector(process)
        for peer in ("10.0.0.1", "10.0.0.2", "10.0.0.3"):
            agent.take(Harm(how="cut-data", peer=peer, seconds=0.01 if peer == "10.0.0.2" else 0.0))
        agent.take(Harm(how="heal-data", peer="10.0.0.1"))
        agent.take(Harm(how="heal-data", peer="10.0.0.9"))
        while ("del", "10.0.0.2") not in asked:
            await asyncio.sleep(0.005)
        assert ("del", "10.0.0.3") not in asked
        await agent.close()

    asyncio.run(play())
    assert [peer for verb, peer in asked if verb == "del"] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def test_no_descriptor_is_left(process: subprocess.Popen[bytes]) -> None:
    agent = injector(process)
    before = open_descriptors()
    for _ in range(10):
        for how in ("freeze", "freeze", "thaw"):
            agent.take(Harm(how=how, device="n0/0"))  # type: ignore[arg-type]
    assert open_descriptors() <= before


def test_a_store_that_is_cut_fails_and_its_watches_go_on_where_they_were_once_it_is_healed() -> None:
    server = MemoryServer()
    other, store = MemoryStore(server), CuttableStore(MemoryStore(server))
    seen: list[str] = []
    store.watch("/a/", 1, lambda item: seen.append(item.key) if isinstance(item, WatchEvent) else None)
    other.put("/a/1", b"")
    store.cut()
    other.put("/a/2", b"")
    other.put("/a/3", b"")
    assert seen == ["/a/1"]
    for call in (lambda: store.get("/a/1"), lambda: store.put("/a/4", b""), lambda: store.keep_alive(1)):
        with pytest.raises(StoreUnavailable):
            call()
    assert other.get("/a/4") is None
    store.heal()
    assert seen == ["/a/1", "/a/2", "/a/3"]
    other.put("/a/5", b"")
    assert seen[-1] == "/a/5"
    assert store.get("/a/3") is not None
