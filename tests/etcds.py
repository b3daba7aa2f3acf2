"""One real etcd for each pytest process, for tests that merely need one.

Tests share it and keep apart by the names of their clusters: all that a cluster writes lies under
`/elasticd/{name}/`. A test that stops, freezes, wipes, secures or compacts etcd starts its own: an
`EtcdServer`, or a `Trio` of three members.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest

from elasticd.store.etcd import EtcdStore
from elasticd.store.server import EtcdServer
from elasticd.store.session import EtcdOptions


class SharedEtcd:
    """The endpoint of this process's etcd, and names for clusters in it. No test can stop the server by it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint  # "host:port"
        self._number = itertools.count(1)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """As the configuration has them."""
        return (self.endpoint,)

    def cluster(self, prefix: str = "test") -> str:
        """A cluster's name that this etcd has not seen."""
        return f"{prefix}-{next(self._number)}"

    @contextlib.contextmanager
    def store(self) -> Iterator[EtcdStore]:
        """A client of it, closed at the end."""
        store = EtcdStore(EtcdOptions(endpoints=self.endpoints))
        try:
            yield store
        finally:
            store.close()


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[SharedEtcd]:
    """The etcd of this pytest process, started when a test first asks for it."""
    with EtcdServer(fsync=False) as server:
        yield SharedEtcd(server.endpoint)
