"""This machine's addresses by its routes; which a node takes, and which nodes are refused beside each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from elasticd_agent import command
from elasticd_agent.daemon import AgentError

from elasticd.config.tree import ClusterSection, Config
from elasticd.coordinator.connections import Connections
from elasticd.coordinator.http.server import url_of
from elasticd.records import Keys
from elasticd.store.leader import campaign
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.system import network_addresses
from elasticd.wire.coordinator import AgentHello
from tests.machines.cast import node_record


def table(known: dict[str, str]) -> Callable[[str], str | None]:
    return known.get


@pytest.mark.parametrize(
    ("leader", "stores", "known", "address", "why"),
    [
        ("head", (), {"head": "10.0.0.7"}, "10.0.0.7", "the route to the leader at head"),
        ("127.0.0.1", ("10.0.0.1",), {"10.0.0.1": "10.0.0.7"}, "127.0.0.1", "the leader at 127.0.0.1"),
        # The leader is on this machine; /etc/hosts has its name as 127.0.1.1.
        (
            "here",
            ("etcd0",),
            {"here": "127.0.0.1", "etcd0": "10.0.0.7"},
            "10.0.0.7",
            "the route to etcd at etcd0",
        ),
        ("here", ("etcd0",), {"etcd0": "127.0.0.1", "192.0.2.1": "10.0.0.7"}, "10.0.0.7", "the default route"),
        ("here", ("127.0.0.1",), {"2001:db8::1": "2001:db8::7"}, "2001:db8::7", "the default route"),
        ("here", ("127.0.0.1",), {}, "127.0.0.1", "no route that leaves this machine"),
        # Nobody leads.
        (None, ("a", "b"), {"a": "127.0.0.1", "b": "10.0.0.7"}, "10.0.0.7", "the route to etcd at b"),
        (None, ("127.0.0.1",), {"192.0.2.1": "10.0.0.7"}, "127.0.0.1", "no route that leaves this machine"),
    ],
)
def test_a_node_listens_at_its_address_on_the_route_to_the_leader(
    leader: str | None, stores: tuple[str, ...], known: dict[str, str], address: str, why: str
) -> None:
    found, told = network_addresses.chosen(leader, stores, table(known))
    assert found == address
    assert told.startswith(why)


def test_the_kernel_is_asked_for_the_route() -> None:
    assert network_addresses.local_address("127.0.0.1") == "127.0.0.1"
    assert network_addresses.local_address("127.0.0.3") in ("127.0.0.1", "127.0.0.3")
    assert network_addresses.local_address("no-such-host.invalid") is None
    assert len(network_addresses.host()) == 16
    assert network_addresses.host() == network_addresses.host()


@pytest.mark.parametrize(
    ("host", "stores", "secure", "url"),
    [
        ("10.0.0.7", (), False, "http://10.0.0.7:1"),
        ("::1", (), True, "https://[::1]:1"),
        ("0.0.0.0", ("etcd0",), False, "http://10.0.0.7:1"),
        ("0.0.0.0", ("etcd0",), True, "https://here:1"),
        ("::", ("127.0.0.1",), False, "http://here:1"),
    ],
)
def test_a_coordinator_on_all_addresses_names_one_that_others_reach(
    host: str, stores: tuple[str, ...], secure: bool, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    monkeypatch.setattr(
        "elasticd.coordinator.http.server.outward",
        lambda hosts: network_addresses.outward(hosts, table({"etcd0": "10.0.0.7", "127.0.0.1": "127.0.0.1"})),
    )
    assert url_of(host, 1, secure=secure, stores=stores) == url


def hello(node: str, address: str, host: str) -> AgentHello:
    record = msgspec.structs.replace(node_record(node), address=address, host=host)
    return AgentHello(record=record)


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        (("127.0.0.1", "aa"), ("127.0.0.1", "bb"), "node 'beta' would listen at 127.0.0.1"),
        (("10.0.0.1", "aa"), ("127.0.0.2", "bb"), "node 'beta' would listen at 127.0.0.2"),
        (("127.0.0.1", "aa"), ("127.0.0.1", "aa"), ""),
        (("10.0.0.1", "aa"), ("10.0.0.2", "bb"), ""),
        (("127.0.0.1", ""), ("127.0.0.1", "bb"), ""),  # an agent of 0.1.0 does not say
    ],
)
def test_nodes_of_two_machines_of_which_one_listens_for_itself_alone_are_refused_by_name(
    first: tuple[str, str], second: tuple[str, str], refused: str
) -> None:
    connections = Connections()
    connections.enter(hello("alpha", *first).record)
    said = connections.refusal(hello("beta", *second))
    assert said.startswith(refused)
    assert bool(said) == bool(refused)
    if refused:
        assert "Set address in section [agent]" in said


def test_the_node_that_listens_for_itself_alone_goes_when_one_of_another_machine_comes() -> None:
    """Whoever was first: else one wrong line in one file would lock all others out."""
    connections = Connections()
    lone = connections.enter(hello("alpha", "127.0.0.1", "aa").record)
    beside = connections.enter(hello("gamma", "10.0.0.1", "aa").record)
    coming = hello("beta", "10.0.0.2", "bb")
    assert connections.refusal(coming) == ""
    assert not lone.closed.is_set()
    connections.enter(coming.record)
    assert lone.closed.is_set()
    assert not beside.closed.is_set()
    assert "node 'alpha' would listen" in connections.refusal(hello("alpha", "127.0.0.1", "aa"))


def test_an_agent_without_an_address_asks_for_the_leader_and_goes_on_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "LEADER_SECONDS", 0.0)
    asked: list[str | None] = []

    def chosen(leader: str | None, stores: object) -> tuple[str, str]:
        asked.append(leader)
        return "10.0.0.7", "a route"

    monkeypatch.setattr("elasticd.system.network_addresses.chosen", chosen)
    config = Config(cluster=ClusterSection(name="c"))
    store = MemoryStore(MemoryServer())
    assert asyncio.run(command.with_address(config, store)).agent.listens == "10.0.0.7"
    campaign(store, Keys(cluster="c").leader, "one", "http://head:7471", 60)
    found = asyncio.run(command.with_address(config, store))
    assert asked == [None, "head"]
    assert asyncio.run(command.with_address(found, store)) is found, "the file's own is taken as it is"
    store.put(Keys(cluster="d").leader, b"not ours")
    foreign = Config(cluster=ClusterSection(name="d"))
    with pytest.raises(AgentError, match="another program's key"):
        asyncio.run(command.with_address(foreign, store))
