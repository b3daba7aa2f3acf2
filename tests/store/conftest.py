"""Stores to test against: one real etcd for the session, and a server in memory for each test."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from typing import Protocol

import pytest

from elasticd.clock import VirtualClock
from elasticd.store.etcd import EtcdStore
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import Store
from elasticd.store.server import EtcdServer
from elasticd.store.session import EtcdOptions, EtcdSession, Guard

_counter = itertools.count()


class LossyProxy:
    """A TCP relay in front of a server that can swallow what the server answers from now on."""

    def __init__(self, upstream: str) -> None:
        host, port = upstream.split(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._swallowing: set[socket.socket] = set()
        self._servers: list[socket.socket] = []
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def swallow_answers(self) -> None:
        """Of the present connections; new ones are relayed in full."""
        self._swallowing.update(self._servers)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._upstream)
                self._servers.append(server)
                self._sockets += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._relay, args=(source, target), daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if source not in self._swallowing:
                    target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


class World(Protocol):
    """One kind of store, with the means to disturb it."""

    prefix: str

    def client(self) -> Store:
        """Another client of the same store."""

    def stop(self) -> None:
        """Take the server down, keeping its data."""

    def start(self) -> None:
        """Bring it back."""

    def compact(self, revision: int) -> None:
        """Drop the history before `revision`."""

    def age(self, seconds: float) -> None:
        """Let `seconds` pass for the leases."""

    def client_that_loses_an_answer(self) -> Store:
        """A client whose next change is carried out while its answer is lost."""


class MemoryWorld:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.server = MemoryServer(self.clock)
        self.prefix = "/test/"

    def client(self) -> Store:
        return MemoryStore(self.server)

    def stop(self) -> None:
        self.server.outage(True)

    def start(self) -> None:
        self.server.outage(False)

    def compact(self, revision: int) -> None:
        self.server.compact(revision)

    def age(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def client_that_loses_an_answer(self) -> Store:
        store = MemoryStore(self.server)
        store.lose_next_reply(applied=True)
        return store

    def close(self) -> None:
        pass


class EtcdWorld:
    def __init__(self, server: EtcdServer) -> None:
        self.server = server
        self.prefix = f"/test{next(_counter)}/"
        self._stores: list[EtcdStore] = []
        self._proxies: list[LossyProxy] = []

    def client(self) -> Store:
        return self._client(self.server.endpoint)

    def stop(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.start()

    def compact(self, revision: int) -> None:
        options = EtcdOptions(endpoints=(self.server.endpoint,))
        session = EtcdSession(options, self.server.endpoint, Guard())
        session.unary("kvstub", "Compact", session.rpc.CompactionRequest(revision=revision))
        session.close()

    def age(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def client_that_loses_an_answer(self) -> Store:
        proxy = LossyProxy(self.server.endpoint)
        self._proxies.append(proxy)
        store = self._client(proxy.endpoint, call_timeout=1.0)
        store.identity()
        proxy.swallow_answers()
        return store

    def close(self) -> None:
        for store in self._stores:
            store.close()
        for proxy in self._proxies:
            proxy.close()
        self.server.start()

    def _client(self, endpoint: str, call_timeout: float = 5.0) -> EtcdStore:
        store = EtcdStore(EtcdOptions(endpoints=(endpoint,), call_timeout=call_timeout))
        self._stores.append(store)
        return store


@pytest.fixture(scope="package")
def etcd_server() -> Iterator[EtcdServer]:
    with EtcdServer(fsync=False) as server:
        yield server


@pytest.fixture
def lossy_proxy(etcd_server: EtcdServer) -> Iterator[LossyProxy]:
    proxy = LossyProxy(etcd_server.endpoint)
    yield proxy
    proxy.close()


@pytest.fixture(params=["memory", "etcd"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = MemoryWorld() if request.param == "memory" else EtcdWorld(request.getfixturevalue("etcd_server"))
    yield made
    made.close()


@pytest.fixture
def store(world: World) -> Iterator[Store]:
    made = world.client()
    yield made
    made.close()
