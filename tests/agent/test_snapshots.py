"""Snapshots in agents' memory: what the vault keeps, and how they get from agent to agent."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from elasticd_agent.streams import Client, Identity, Server, StreamFailed
from elasticd_agent.vault import NoRoom, Snapshot, Vault, checksum
from hypothesis import given
from hypothesis import strategies as st

from elasticd.messages import Held


def snapshot(step: int = 1, device: str = "n0/0", data: bytes = b"state", node: str = "n0") -> Snapshot:
    fd = os.memfd_create("test")
    os.write(fd, data)
    held = Held(
        job="job", device=device, incarnation="i", plan=1, step=step, node=node, size=len(data), manifest="{}"
    )
    return Snapshot(held=held, fd=fd)


def content(found: Snapshot | None) -> bytes:
    assert found is not None
    with found.map() as memory:
        data = memory[:]
    os.close(found.fd)
    return data


@pytest.fixture
def vaults() -> Iterator[tuple[Vault, Vault]]:
    mine, theirs = Vault("n0", 1 << 20), Vault("n1", 1 << 20)
    yield mine, theirs
    mine.close()
    theirs.close()


def test_the_whole_one_and_the_newest_are_kept(vaults: tuple[Vault, Vault]) -> None:
    vault, _ = vaults
    for step in (1, 2):
        vault.put(snapshot(step))
    assert [held.step for held in vault.held()] == [2], "until one is whole, the newest alone"
    vault.whole("job", 2)
    for step in (3, 4):
        vault.put(snapshot(step))
    assert sorted(held.step for held in vault.held()) == [2, 4]
    vault.whole("job", 4)
    assert [held.step for held in vault.held()] == [4]
    vault.forget(["job"])
    assert vault.held() == ()


def test_a_found_snapshot_outlives_the_vaults_own(vaults: tuple[Vault, Vault]) -> None:
    vault, _ = vaults
    vault.put(snapshot(1, data=b"first"))
    found = vault.find("job", "n0/0", 1)
    vault.put(snapshot(2))
    assert content(found) == b"first"


def test_the_limit_is_for_other_nodes_snapshots(vaults: tuple[Vault, Vault]) -> None:
    vault, _ = vaults
    vault.put(snapshot(data=bytes(2 << 20)))  # a worker's own memory
    with pytest.raises(NoRoom, match=r"raise \[agent\] snapshot_mib"):
        vault.reserve(2 << 20)


@given(st.binary(max_size=100))
def test_checksum_is_the_sum_of_words(data: bytes) -> None:
    words = np.frombuffer(data.ljust(-(-len(data) // 8) * 8, b"\0"), dtype=np.uint64)
    assert checksum(memoryview(data)) == int(sum(int(word) for word in words)) & (1 << 64) - 1


class Pair:
    """Two agents' ends: n0 sends, n1 serves."""

    def __init__(self, vault: Vault, known: bool = True) -> None:
        self.mine, self.theirs = Identity.make("n0"), Identity.make("n1")
        self.arrived: list[Held] = []
        self.came = threading.Event()
        trusted = self.mine.certificate if known else Identity.make("n2").certificate
        self.server = Server("127.0.0.1", self.theirs, vault, lambda: trusted, self._arrive)
        self.client = Client("127.0.0.1", self.server.port, self.mine, self.theirs.certificate)

    def _arrive(self, held: Held) -> None:
        self.arrived.append(held)
        self.came.set()

    def close(self) -> None:
        self.client.close()
        self.server.close()


def test_a_snapshot_survives_on_another_node(vaults: tuple[Vault, Vault]) -> None:
    mine, theirs = vaults
    pair = Pair(theirs)
    try:
        data = os.urandom(700_001)
        sent = snapshot(7, data=data)
        mine.put(sent)
        pair.client.put(sent)
        assert pair.came.wait(5.0)
        assert content(theirs.find("job", "n0/0", 7)) == data
        back = pair.client.get(sent.held)
        assert back.held == sent.held
        assert content(back) == data
    finally:
        pair.close()


def test_who_is_not_in_the_store_is_not_spoken_to(vaults: tuple[Vault, Vault]) -> None:
    pair = Pair(vaults[1], known=False)
    try:
        with pytest.raises(StreamFailed, match=r"127\.0\.0\.1"):
            pair.client.put(snapshot())
        assert vaults[1].held() == ()
    finally:
        pair.close()


def test_what_is_not_there_or_does_not_fit_is_said(vaults: tuple[Vault, Vault]) -> None:
    pair = Pair(vaults[1])
    try:
        with pytest.raises(StreamFailed, match="no snapshot of n0/0 at step 3 is here"):
            pair.client.get(msgspec.structs.replace(snapshot().held, step=3))
        with pytest.raises(StreamFailed, match="snapshot_mib"):
            pair.client.put(snapshot(data=bytes(2 << 20)))
        pair.client.put(snapshot(4))  # on a new stream
        assert [held.step for held in vaults[1].held()] == [4]
    finally:
        pair.close()


def test_damage_on_the_way_is_refused(vaults: tuple[Vault, Vault], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(vaults[1])
    try:
        monkeypatch.setattr("elasticd_agent.streams.checksum", lambda view: len(view) + id(view) % 2**32)
        with pytest.raises(StreamFailed):
            pair.client.put(snapshot())
        assert vaults[1].held() == ()
    finally:
        pair.close()
