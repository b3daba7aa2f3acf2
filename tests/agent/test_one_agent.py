"""One agent for a node and a socket: a second one ends, a successor takes over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from elasticd_agent.registration import NodeTaken

from elasticd.records import Keys, NodeRecord, decode, encode
from elasticd.testing.waiting import until
from elasticd.wire import unix_socket
from tests.agent.support import CLUSTER, Node, closing_all

KEYS = Keys(cluster=CLUSTER)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with closing_all() as register:
        yield Node(register, tmp_path)


def test_second_agent_under_one_node_name_ends_and_the_first_goes_on(node: Node) -> None:
    first = node.agent(ttl=3)
    until(lambda: node.store.get(KEYS.node("n0")))
    second = node.agent(path=str(node.folder / "b.sock"), ttl=3)
    second.join()
    assert isinstance(second.error, NodeTaken)
    assert f"node 'n0' is served by agent {first.agent.record.agent}" in str(second.error)
    assert "--node" in str(second.error)
    assert not (node.folder / "b.sock").exists()
    assert node.trainer().welcomed(0)


def test_successor_of_a_crashed_agent_waits_for_its_lease_and_serves(node: Node) -> None:
    lease = node.store.grant(1)
    node.store.put(KEYS.node("n0"), encode(NodeRecord(node="n0", devices=(), address="x", agent="dead")), lease)
    unix_socket.listen(node.path).close()  # a crashed agent leaves its socket file, too
    running = node.agent(ttl=1)
    assert node.trainer().welcomed(0)
    found = node.store.get(KEYS.node("n0"))
    assert found is not None
    assert decode(found.value, NodeRecord).agent == running.agent.record.agent


def test_second_agent_at_one_socket_ends_and_the_first_goes_on(node: Node) -> None:
    node.agent()
    node.trainer().welcomed(0)
    second = node.agent(node="n1")
    second.join()
    assert isinstance(second.error, unix_socket.SocketTaken)
    assert node.trainer().welcomed(1)
