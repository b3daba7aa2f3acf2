"""The data network between two nodes, broken: which connections are shut, and which routes are set."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import cast

import pytest

from elasticd.chaos.faults import Fault
from elasticd.testing.network_namespaces import Namespaces
from tests.soak.network_cut import NetworkCut

#: Listens at each node's; connects to the port that it is told, and says when that connection ends.
_WORKER = """
import socket, sys
if sys.argv[1] == "listen":
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    held = [server.accept()[0] for _ in range(int(sys.argv[2]))]
else:
    held = [socket.create_connection(("127.0.0.1", int(sys.argv[2])))]
print("connected", flush=True)
print("ended" if held[0].recv(1) == b"" else "?", flush=True)
"""


class Routes:
    """Stands for namespaces: the routes that swallow now."""

    def __init__(self) -> None:
        self.swallowed: set[tuple[str, str]] = set()

    def swallow(self, node: str, peer: str) -> None:
        self.swallowed.add((node, peer))

    def deliver(self, node: str, peer: str) -> None:
        self.swallowed.discard((node, peer))


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def worker(stack: ExitStack, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _WORKER, *arguments], stdout=subprocess.PIPE, text=True
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_without_namespaces_the_connections_between_two_nodes_are_shut_and_no_other(started: ExitStack) -> None:
    server = worker(started, "listen", "1")
    port = said(server)
    client = worker(started, "connect", port)
    assert (said(server), said(client)) == ("connected", "connected")
    pids = {"alpha": [client.pid], "beta": [server.pid], "gamma": []}
    cuts = NetworkCut(None, lambda node: pids[node])
    assert not cuts.cut(Fault(kind="sever", node="alpha", peer="gamma", lasts=1.0, step=1))
    assert cuts.cut(Fault(kind="sever", node="alpha", peer="beta", lasts=1.0, step=1))
    assert (said(server), said(client)) == ("ended", "ended")
    assert not cuts, "another connection can be made at once"


@pytest.mark.parametrize(
    ("how", "ways"), [("both", {("alpha", "beta"), ("beta", "alpha")}), ("out", {("alpha", "beta")})]
)
def test_a_route_swallows_what_is_sent_until_the_time_is_over(how: str, ways: set[tuple[str, str]]) -> None:
    routes = Routes()
    cuts = NetworkCut(cast(Namespaces, routes), lambda node: ())
    assert cuts.cut(Fault(kind="sever", node="alpha", peer="beta", how=how, lasts=0.05, step=1))
    cuts.heal()
    assert routes.swallowed == ways
    assert ("alpha", "beta") in cuts
    assert cuts.nodes == {"alpha", "beta"}
    deadline = time.monotonic() + 10
    while cuts and time.monotonic() < deadline:
        cuts.heal()
    assert not routes.swallowed
