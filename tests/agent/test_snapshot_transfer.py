"""Snapshots from agent to agent over real TLS: who may send what, and what breaks."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import pytest
from elasticd_agent.snapshots.port import StreamFailed
from elasticd_agent.snapshots.store import NoRoom, Snapshot, SnapshotStore
from elasticd_agent.snapshots.tls import TlsIdentity
from elasticd_agent.snapshots.transfer import SnapshotSender, SnapshotServer

from elasticd.testing.waiting import until
from elasticd.wire.snapshots import Held
from tests.agent.snapshots import content, dying_agent, plan_of, snapshot


class Pair:
    """Two agents' ends: n0 sends, n1 receives."""

    def __init__(self, trusted: Callable[[TlsIdentity], Mapping[str, str]], address: str = "127.0.0.1") -> None:
        self.mine, self.theirs = TlsIdentity.make("a"), TlsIdentity.make("b")
        self.snapshots = SnapshotStore("n1", 1 << 20)
        self.arrived: list[Held] = []
        self.came = threading.Event()
        self.server = SnapshotServer(
            address,
            self.theirs,
            self.snapshots,
            lambda: trusted(self.mine),
            lambda one, gone: self._arrive(one),
        )
        self.sender = SnapshotSender(self.mine)
        self.address = f"{address}:{self.server.port}"

    def send(self, one: Snapshot, revoked: threading.Event | None = None) -> None:
        try:
            self.sender.send(one, revoked or threading.Event(), self.address, self.theirs.certificate)
        finally:
            os.close(one.fd)

    def _arrive(self, one: Held) -> None:
        self.arrived.append(one)
        self.came.set()

    def close(self) -> None:
        self.sender.close()
        self.server.close()
        for one in self.snapshots.forget("job"):
            os.close(one.fd)


def known(identity: TlsIdentity) -> Mapping[str, str]:
    return {"n2": TlsIdentity.make("c").certificate, "n0": identity.certificate}


@pytest.fixture
def make() -> Iterator[Callable[..., Pair]]:
    with ExitStack() as stack:

        def make(
            trusted: Callable[[TlsIdentity], Mapping[str, str]] = known, address: str = "127.0.0.1"
        ) -> Pair:
            pair = Pair(trusted, address)
            stack.callback(pair.close)
            return pair

        yield make


@pytest.mark.parametrize("size", [0, 1, 700_001])
def test_snapshot_arrives_as_it_was_with_its_plan(make: Callable[..., Pair], size: int) -> None:
    pair, data = make(), os.urandom(size)
    one = snapshot(7, data=data)
    plan = plan_of(1, {"n0/0": "i"})
    pair.send(Snapshot(held=one.held, fd=one.fd, plan=plan))
    assert pair.came.wait(60.0)
    assert pair.snapshots.plans("job") == (plan,)
    if size:
        assert content(pair.snapshots.find(one.held)) == data


def test_address_of_the_sixth_version_is_one_too(make: Callable[..., Pair]) -> None:
    pair = make(address="::1")
    pair.send(snapshot())
    assert pair.came.wait(60.0)


def test_who_is_not_in_the_store_is_not_spoken_to(make: Callable[..., Pair]) -> None:
    pair = make(lambda identity: {"n0": TlsIdentity.make("a").certificate})
    with pytest.raises(StreamFailed, match=r"127\.0\.0\.1"):
        pair.send(snapshot())
    assert pair.arrived == []


def test_agent_that_is_not_the_one_in_the_store_gets_nothing(make: Callable[..., Pair]) -> None:
    pair = make()
    pair.theirs = TlsIdentity.make("b")
    with pytest.raises(StreamFailed, match=r"certificate verify failed"):
        pair.send(snapshot())
    assert pair.arrived == []


def test_nobody_brings_what_is_another_nodes(make: Callable[..., Pair]) -> None:
    pair = make()
    for one in (snapshot(node="n2", device="n2/0"), snapshot(device="n2/0")):
        with pytest.raises(StreamFailed, match="is none of node n0's"):
            pair.send(one)
    assert pair.snapshots.held("job") == ()


def test_what_does_not_fit_is_refused_with_the_remedy_and_the_next_is_taken(make: Callable[..., Pair]) -> None:
    pair = make()
    with pytest.raises(StreamFailed, match="snapshot_mib"):
        pair.send(snapshot(data=bytes(2 << 20)))
    pair.send(snapshot(4))
    assert [one.step for one in pair.snapshots.held("job")] == [4]


def test_what_is_revoked_while_it_is_sent_does_not_arrive(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, revoked, real = make(), threading.Event(), os.preadv

    def preadv(fd: int, buffers: list[memoryview], at: int) -> int:
        count = real(fd, buffers, at)  # type: ignore[arg-type]
        revoked.set()  # and the worker writes to what was not read yet
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StreamFailed, match="not needed any more"):
        pair.send(snapshot(data=bytes(1000)), revoked)
    assert pair.snapshots.held("job") == ()

    def room() -> bool:
        try:
            os.close(pair.snapshots.reserve(1 << 20))
        except NoRoom:
            return False
        return True

    until(room)  # what it was to have is free again


def test_memory_file_that_is_too_short_does_not_arrive(make: Callable[..., Pair]) -> None:
    pair, one = make(), snapshot(data=bytes(1000))
    os.ftruncate(one.fd, 500)
    with pytest.raises(StreamFailed, match="ends after 500 of 1000 bytes"):
        pair.send(one)
    assert pair.snapshots.held("job") == ()


@pytest.mark.parametrize("port", ["9" * 30, "9" * 5000, "-1", "x", ""])
def test_an_address_of_another_node_that_is_none_is_a_failure_like_others(
    make: Callable[..., Pair], port: str
) -> None:
    pair = make()
    with pytest.raises(StreamFailed, match="the agent at"):
        pair.sender.cross(f"127.0.0.1:{port}", pair.theirs.certificate, 1)


def test_nobody_listening_is_said(make: Callable[..., Pair]) -> None:
    pair = make()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        pair.address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(StreamFailed, match="refused"):
            pair.send(snapshot())


def test_noise_on_the_port_harms_nobody(make: Callable[..., Pair]) -> None:
    pair = make()
    with socket.create_connection(("127.0.0.1", pair.server.port)) as noise:
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    pair.send(snapshot())
    assert pair.came.wait(60.0)


def test_agent_that_dies_in_the_midst_breaks_the_stream() -> None:
    mine = TlsIdentity.make("a")
    sender, one = SnapshotSender(mine), snapshot(data=bytes(16 << 20))
    try:
        with dying_agent(mine.certificate) as (process, record):
            with pytest.raises(StreamFailed):
                sender.send(one, threading.Event(), record.snapshots, record.certificate)
            assert process.wait(300) == -signal.SIGKILL
    finally:
        os.close(one.fd)
        sender.close()


def test_closing_breaks_off_what_hangs(make: Callable[..., Pair]) -> None:
    """A peer that takes the connection and says nothing."""
    pair = make()
    failed: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pair.address = f"127.0.0.1:{silent.getsockname()[1]}"

        def send() -> None:
            try:
                pair.send(snapshot())
            except StreamFailed as error:
                failed.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        taken, _ = silent.accept()
        with taken:
            assert taken.recv(1)  # its hello: it hangs in the handshake now
            pair.sender.close()
            thread.join(9.0)  # the silence that is borne is longer
            assert not thread.is_alive()
    assert failed
