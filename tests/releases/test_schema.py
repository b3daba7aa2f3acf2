"""The store's schema record: a leader writes it, and who is too far from it refuses in the same words."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from elasticd_agent.daemon import AgentError

from elasticd import records
from elasticd.codec import decoding
from elasticd.coordinator import election
from elasticd.coordinator.daemon import run
from elasticd.coordinator.election import CannotLead
from elasticd.records import SCHEMA_VERSION, Keys, SchemaRecord, decode, encode
from elasticd.store.leader import RECORD_VERSION, LeaderRecord, campaign, read_leader
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.testing.waiting import until
from elasticd.version import __version__
from elasticd.wire.worker import Closed, Shutdown
from tests.agent.support import CLUSTER, Node, closing_all
from tests.coordinator.agents import config, coordinating

KEYS = Keys(cluster="test")
FAR = encode(SchemaRecord(release="9.8.0", version=SCHEMA_VERSION + 2))
REFUSAL = (
    rf"the store's schema has version {SCHEMA_VERSION + 2} \(elasticd 9\.8\.0\), and elasticd "
    rf"{__version__} here knows version {SCHEMA_VERSION}: install the same release"
)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with closing_all() as register:
        yield Node(register, tmp_path)


def written(store: MemoryStore) -> SchemaRecord:
    item = store.get(KEYS.schema)
    assert item is not None
    return decode(item.value, SchemaRecord)


def test_a_leader_says_in_the_store_which_release_it_is() -> None:
    async def body() -> None:
        server = MemoryServer()
        store = MemoryStore(server)
        async with coordinating(server):
            assert written(store) == SchemaRecord(release=__version__)
            first = store.get(KEYS.schema)
        async with coordinating(server):
            assert store.get(KEYS.schema) == first  # it says so already

    asyncio.run(body())


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_leader_goes_on_with_what_the_release_beside_its_own_wrote(version: int) -> None:
    async def body() -> None:
        server = MemoryServer()
        store = MemoryStore(server)
        store.put(KEYS.schema, encode(SchemaRecord(release="0.9.9", version=version)))
        async with coordinating(server):
            assert written(store) == SchemaRecord(release=__version__)

    asyncio.run(body())


@pytest.mark.parametrize("value", [FAR, b"\xff", b'{"type": "fence"}'])
def test_a_coordinator_that_cannot_read_the_store_ends_without_leading(value: bytes) -> None:
    server = MemoryServer()
    store = MemoryStore(server)
    store.put(KEYS.schema, value)
    with pytest.raises(CannotLead, match=REFUSAL if value == FAR else "schema record cannot be read"):
        asyncio.run(run(config(), MemoryStore(server)))
    assert read_leader(store, KEYS.leader) is None
    found = store.get(KEYS.schema)
    assert found is not None
    assert found.value == value


def test_a_schema_that_comes_during_the_election_is_refused_and_the_key_given_back() -> None:
    server = MemoryServer()
    store = MemoryStore(server)

    def won(*args: object, **kwargs: object) -> object:
        store.put(KEYS.schema, FAR)
        return campaign(*args, **kwargs)  # type: ignore[arg-type]

    with patch.object(election, "campaign", won), pytest.raises(CannotLead, match=REFUSAL):
        asyncio.run(run(config(), MemoryStore(server)))
    assert read_leader(store, KEYS.leader) is None


def test_an_agent_does_not_start_on_what_it_cannot_read(node: Node) -> None:
    node.store.put(KEYS.schema, FAR)
    running = node.agent()
    running.join()
    assert isinstance(running.error, AgentError)
    with pytest.raises(AgentError, match=REFUSAL):
        raise running.error
    assert node.store.snapshot(KEYS.nodes).items == ()


def test_an_agent_ends_when_a_leader_far_from_it_takes_over(node: Node) -> None:
    node.store.put(KEYS.schema, encode(SchemaRecord(release="0.0.9", version=SCHEMA_VERSION - 1)))
    leader = node.leader()
    running = node.agent()
    until(lambda: leader.heard)
    node.store.put(KEYS.schema, FAR)
    running.join()
    with pytest.raises(AgentError, match=REFUSAL):
        raise running.error or AssertionError("it serves on")


def test_a_running_agent_goes_on_where_a_schema_cannot_be_read(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_logged", set())
    leader = node.leader()
    running = node.agent()
    until(lambda: leader.heard)
    for value in (b"\xff", b"{}"):
        node.store.put(KEYS.schema, value)
    worker = node.trainer()
    worker.welcomed(0)
    node.store.put(KEYS.job("job", "done"), encode(records.DoneRecord(step=1, epoch=leader.epoch)))
    assert isinstance(worker.hear(), Shutdown | Closed)  # what was written after the schema is read
    assert running.error is None
    assert sum("this agent goes on" in line.getMessage() for line in caplog.records) == 1
    node.store.put(KEYS.schema, FAR)
    running.join()
    with pytest.raises(AgentError, match=REFUSAL):
        raise running.error or AssertionError("it serves on")


@pytest.mark.parametrize("version", [RECORD_VERSION + 2, RECORD_VERSION + 1])
def test_a_leaders_record_of_a_far_version_is_no_other_programs_key(version: int) -> None:
    store = MemoryStore(MemoryServer())
    record = LeaderRecord(name="c", value="http://c", version=version)
    store.put(KEYS.leader, encode(record).replace(b"leader", b"leader" if version > 2 else b"other"))
    with pytest.raises(CannotLead) as refused:
        election.elect(
            store, KEYS, "me", "http://me", told=lambda _: None, ready=lambda: None, stopped=threading.Event()
        )
    assert KEYS.leader in str(refused.value)
    assert ("another program's key" in str(refused.value)) == (version == RECORD_VERSION + 1)
    assert (f"has version {version}" in str(refused.value)) == (version == RECORD_VERSION + 2)


def test_a_job_that_a_coordinator_cannot_read_is_named_by_its_key() -> None:
    server = MemoryServer()
    fence = records.Fence(number=1, epoch=1, gone={}, reason="r", version=records.RECORD_VERSION + 2)
    MemoryStore(server).put(KEYS.job("j", "fence"), encode(fence))
    with pytest.raises(CannotLead, match=rf"{KEYS.job('j', 'fence')}.*'fence' has version 3"):
        asyncio.run(run(config(), MemoryStore(server)))


def test_one_cluster_is_meant_in_both_halves_of_this_file() -> None:
    assert config().cluster.name == CLUSTER
    assert records.schema_refusal(encode(SchemaRecord(release=__version__))) == ""
