"""The port for other nodes' snapshots outlives strangers, exhausted descriptors, and peers that are slow."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
from elasticd_agent.snapshots import port as entrance
from elasticd_agent.snapshots import transfer
from elasticd_agent.snapshots.port import StreamFailed, Trust
from elasticd_agent.snapshots.store import NoRoom
from elasticd_agent.snapshots.tls import TlsIdentity
from elasticd_agent.snapshots.transfer import SnapshotSender

from elasticd.codec.message import encode
from elasticd.testing.waiting import until
from tests.agent.snapshots import held, snapshot
from tests.agent.support import closing_all
from tests.agent.test_snapshot_transfer import Pair, known
from tests.descriptors import few_descriptors


@pytest.fixture
def register() -> Iterator[Callable[..., Pair]]:
    with closing_all() as register:
        yield register


@pytest.fixture
def pair(register: Callable[[Pair], Pair]) -> Pair:
    return register(Pair(known))


def connected(pair: Pair, address: str = "127.0.0.1") -> socket.socket:
    port = int(pair.address.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), 60, (address, 0))


def threads() -> int:
    return sum(thread.name == "snapshot" for thread in threading.enumerate())


def arrives(pair: Pair, step: int = 1) -> None:
    """As a peer does it: what fails, as behind many strangers on a busy machine, is tried again."""
    pair.came.clear()
    until(lambda: _sent(pair, step))
    assert pair.came.wait(60.0)


def _sent(pair: Pair, step: int) -> bool:
    with contextlib.suppress(StreamFailed):
        pair.send(snapshot(step))
        return True
    return False


def test_port_outlives_the_end_of_descriptors(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    noise: list[socket.socket] = []
    sockets = [socket.socket() for _ in range(40)]  # there is none for their other ends

    def full() -> bool:
        with contextlib.suppress(OSError):
            while True:
                noise.append(connected(pair))
        if sockets:
            noise.append(sockets.pop())
            noise[-1].connect(("127.0.0.1", int(pair.address.rpartition(":")[2])))
        return "took no connection" in caplog.text

    with few_descriptors(spare=24):
        until(full)
        for one in (*noise, *sockets):
            one.close()
    assert len(noise) > 3
    arrives(pair)
    assert caplog.text.count("took no connection") == 1


def test_thread_that_cannot_be_started_costs_one_connection(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "snapshot":
            monkeypatch.setattr(threading.Thread, "start", real)
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with connected(pair) as one:
        assert one.recv(1) == b""
    arrives(pair)


def test_strangers_take_so_many_threads_and_a_peer_comes_in_meanwhile(pair: Pair) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3 * entrance.MOST_STRANGERS):
            stack.enter_context(connected(pair))
        until(lambda: threads() == entrance.MOST_STRANGERS)
        arrives(pair)
        until(lambda: threads() <= entrance.MOST_STRANGERS + 1)  # one that has left ends a little later


def test_room_is_made_by_the_address_that_has_the_most(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "MOST_STRANGERS", 3)
    with connected(pair, "127.0.0.2") as first, contextlib.ExitStack() as stack:
        until(lambda: threads() == 1)
        for _ in range(6):
            stack.enter_context(connected(pair, "127.0.0.3"))
        first.settimeout(0.5)
        with pytest.raises(TimeoutError):  # it is still waited for
            first.recv(1)


def test_handshake_that_does_not_end_is_dropped(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "HANDSHAKE_SECONDS", 0.1)
    with connected(pair) as one:
        one.sendall(b"\x16")  # the first byte of a handshake, and then nothing
        assert one.recv(1) == b""


def test_strangers_get_one_line_of_the_log(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(20):
        with connected(pair) as one:
            one.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(OSError):
                one.recv(100)
    until(lambda: threads() == 0)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "no other agent's" in warnings[0].getMessage()


def test_certificates_are_read_when_the_peers_change_and_not_for_each_connection() -> None:
    made: list[str] = []
    mine, one, two = TlsIdentity.make("x"), TlsIdentity.make("a"), TlsIdentity.make("b")

    class Counted(TlsIdentity):
        def context(self, *, server: bool, peers: str) -> ssl.SSLContext:
            made.append(peers)
            return mine.context(server=server, peers=peers)

    peers = {"n0": one.certificate}
    trust = Trust(Counted(certificate=mine.certificate, key=mine.key), lambda: peers)
    first = [trust.current() for _ in range(5)]
    assert len({id(context) for context, _ in first}) == len(made) == 1
    assert [*first[0][1].values()] == [{"n0"}]
    peers["n1"] = two.certificate
    context, nodes = trust.current()
    assert sorted(map(min, nodes.values())) == ["n0", "n1"]
    assert len(context.get_ca_certs()) == 2
    del peers["n0"]
    assert [*trust.current()[1].values()] == [{"n1"}]
    for name in range(3 * entrance.MOST_STRANGERS):  # those that are gone are let go of in the end
        peers["n0"] = TlsIdentity.make(f"c{name}").certificate
        context, nodes = trust.current()
        assert len(nodes) == 2
    assert len(context.get_ca_certs()) < 2 * entrance.MOST_STRANGERS


def test_node_that_is_gone_from_the_store_is_not_let_in_any_more(register: Callable[[Pair], Pair]) -> None:
    peers: dict[str, str] = {}

    def trusted(identity: TlsIdentity) -> Mapping[str, str]:
        return peers

    pair = register(Pair(trusted))
    peers["n0"] = pair.mine.certificate
    arrives(pair)
    peers["n9"] = peers.pop("n0")
    with pytest.raises(StreamFailed, match="is none of node n9's"):
        pair.send(snapshot(2))
    del peers["n9"]
    with pytest.raises(StreamFailed):
        pair.send(snapshot(3))
    assert [one.step for one in pair.arrived] == [1]


def test_certificate_that_cannot_be_read_keeps_nobody_else_out(register: Callable[[Pair], Pair]) -> None:
    def trusted(identity: TlsIdentity) -> Mapping[str, str]:
        wrong = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
        return {"n3": wrong, "n4": "none", "n5": 2 * identity.certificate, "n0": identity.certificate}

    arrives(register(Pair(trusted)))


@contextlib.contextmanager
def spoken_to(pair: Pair, identity: TlsIdentity) -> Iterator[ssl.SSLSocket]:
    """A stream of the agent with this identity, past its handshake."""
    context = identity.context(server=False, peers=pair.theirs.certificate)
    with connected(pair) as plain, context.wrap_socket(plain) as stream:
        yield stream


def test_streams_of_one_node_are_so_many(
    register: Callable[[Pair], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrance, "MOST_OF_NODE", 2)
    other = TlsIdentity.make("c")
    pair = register(Pair(lambda identity: {"n0": identity.certificate, "n2": other.certificate}))
    with spoken_to(pair, pair.mine), spoken_to(pair, pair.mine):
        until(lambda: sum(bool(guest.nodes) for guest in pair.server._guests) == 2)
        with pytest.raises(StreamFailed):
            pair.send(snapshot())
        sender = SnapshotSender(other)
        one = snapshot(device="n2/0", node="n2")
        try:
            sender.send(one, threading.Event(), pair.address, pair.theirs.certificate)
        finally:
            os.close(one.fd)
            sender.close()


def test_snapshot_of_a_negative_size_makes_no_room(pair: Pair) -> None:
    for wrong in (-1, -(1 << 40)):
        body = encode(transfer.Request(held=held())).replace(b'"size":5', f'"size":{wrong}'.encode())
        with spoken_to(pair, pair.mine) as stream:
            stream.sendall(transfer._LENGTH.pack(len(body)) + body)
            with contextlib.suppress(OSError):
                stream.recv(1000)
    with pytest.raises(NoRoom):
        os.close(pair.snapshots.reserve((1 << 20) + 1))
    arrives(pair)


def test_peer_that_is_too_slow_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STREAM_TIMEOUT_SECONDS", 0.2)
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(0.02):
                theirs.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        with ours, theirs:
            with pytest.raises(StreamFailed, match="a stream is to bring 1 MiB/s"):
                transfer._read(ours, 1 << 20)  # type: ignore[arg-type]
            with open(os.memfd_create("slow"), "wb") as file, pytest.raises(StreamFailed, match="MiB/s"):
                transfer._receive_into(ours, file.fileno(), 1 << 20)  # type: ignore[arg-type]
            ended.set()
    finally:
        ended.set()
        thread.join()
