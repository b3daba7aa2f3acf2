"""What an agent reads of the store's records, whole or in parts, from a snapshot and by its watch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from elasticd_agent.store_watch import StoreWatch

from elasticd.codec import record_parts
from elasticd.codec.record_parts import cut
from elasticd.machines.agent.state import Event, PlanRead, ProposalRead
from elasticd.records import Keys, PlanRecord, Proposal, decode, encode
from elasticd.store.leader import LeaderRecord
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import Delete, Put, Sink, Snapshot, Watch, WatchEvent, WatchItem
from tests.releases.samples import PLAN

KEYS = Keys(cluster="test")
PROPOSAL = Proposal(number=4, epoch=1, plan=PLAN.replace(number=4), old=PLAN)
RECORDED = PlanRecord(plan=PLAN.replace(number=4), epoch=1, step=9)


class Reader:
    """An agent's records, and what became of them."""

    def __init__(self, store: MemoryStore) -> None:
        self.events: list[Event] = []
        self.followed: list[str | None] = []
        self._records = StoreWatch(
            *(store, KEYS, self.events.append),
            follow=self.followed.append,
            node_read=lambda node, record: None,
            refuse=lambda why: None,
        )

    async def read(self, come: Callable[[list[Event]], bool], do: Callable[[], None] = lambda: None) -> None:
        await self._records.start()
        do()
        async with asyncio.timeout(30):
            while not come(self.events):
                await asyncio.sleep(0.005)
        self._records.close()


def passed(event: ProposalRead) -> Proposal | None:
    """What a worker decodes of what its agent read."""
    return decode(bytes(event.proposal.stored), Proposal) if event.proposal is not None else None


class Counted(MemoryStore):
    """Notes which keys its client is told of: those that it reads, and those that its watches bring."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.told: set[str] = set()

    def snapshot(self, prefix: str) -> Snapshot:
        found = super().snapshot(prefix)
        self.told |= {item.key for item in found.items}
        return found

    def watch(self, prefix: str, revision: int, sink: Sink | None = None) -> Watch:
        assert sink is not None

        def counted(item: WatchItem) -> None:
            assert isinstance(item, WatchEvent)
            self.told.add(item.key)
            sink(item)

        return super().watch(prefix, revision, counted)


def put(store: MemoryStore, job: str, part: str, record: Proposal | PlanRecord) -> None:
    """As a leader writes it: the parts first."""
    index, made = cut(encode(record), index_of(part))
    for name, value in made.items():
        store.put(KEYS.job(job, "parts/") + name, value)
    store.put(f"{KEYS.jobs}{job}/{part}", encode(index))


def index_of(part: str) -> str:
    return {"proposal": "proposal", "plan": "running-plan"}[part]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    monkeypatch.setattr(record_parts, "PART_BYTES", 200)
    return MemoryStore(MemoryServer())


@pytest.mark.parametrize("watched", [True, False])
def test_records_in_parts_are_read_as_those_that_are_whole(store: MemoryStore, watched: bool) -> None:
    def write() -> None:
        put(store, "large", "proposal", PROPOSAL)
        put(store, "large", "plan", RECORDED)
        store.put(KEYS.job("small", "proposal"), encode(PROPOSAL))

    reader = Reader(store)
    if not watched:
        write()
    asyncio.run(reader.read(lambda events: len(events) == 3, write if watched else lambda: None))
    read = {(type(event), event.job) for event in reader.events if isinstance(event, ProposalRead | PlanRead)}
    assert read == {(ProposalRead, "large"), (PlanRead, "large"), (ProposalRead, "small")}
    assert all(passed(event) == PROPOSAL for event in reader.events if isinstance(event, ProposalRead))
    assert all(event.record == RECORDED for event in reader.events if isinstance(event, PlanRead))


def test_a_part_that_was_deleted_is_missed_by_the_record_that_needs_it_alone(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, "large", "plan", RECORDED)
    part = store.snapshot(KEYS.job("large", "parts/")).items[0]

    def write() -> None:
        index = store.get(KEYS.job("large", "plan"))
        assert index is not None
        store.transact((), (Delete(part.key), Put(index.key, index.value)))
        store.put(KEYS.job("small", "proposal"), encode(PROPOSAL))

    reader = Reader(store)
    asyncio.run(reader.read(lambda events: isinstance(events[-1], ProposalRead), write))
    assert [type(event) for event in reader.events] == [PlanRead, ProposalRead]
    assert f"its part {part.key.rpartition('/')[2]} is not in the store" in caplog.text


OF_NO_AGENT = (
    KEYS.journal + "000000000001",
    KEYS.config,
    KEYS.config_history(1),
    KEYS.member("job", "n0/0"),
    KEYS.root + "quotas/a",
)
OF_AGENTS = (KEYS.node("n1"), KEYS.leader, KEYS.schema, KEYS.job("job", "fence"))


@pytest.mark.parametrize("watched", [True, False])
def test_an_agent_is_told_of_no_key_that_no_agent_needs(watched: bool) -> None:
    """There is one of these for each device and for each second, and a thousand agents."""
    server = MemoryServer()
    store, counted = MemoryStore(server), Counted(server)

    def write() -> None:
        for key in (*OF_NO_AGENT, *OF_AGENTS):
            store.put(key, b"{}")
        store.put(KEYS.job("job", "proposal"), encode(PROPOSAL))

    if not watched:
        write()
    reader = Reader(counted)
    asyncio.run(reader.read(lambda events: bool(events), write if watched else lambda: None))
    assert counted.told == {*OF_AGENTS, KEYS.job("job", "proposal")}


def test_what_went_while_history_was_compacted_is_told_and_nothing_of_other_prefixes() -> None:
    server = MemoryServer()
    store, mine = MemoryStore(server), MemoryStore(server)
    leader = encode(LeaderRecord(name="c", value="http://c"))
    store.put(KEYS.leader, leader)
    store.put(KEYS.job("job", "proposal"), encode(PROPOSAL))
    reader = Reader(mine)

    def change() -> None:
        mine.outage(True)
        store.delete(KEYS.job("job", "proposal"))
        store.put(KEYS.job("other", "proposal"), encode(PROPOSAL))
        server.compact(server.revision)
        mine.outage(False)

    asyncio.run(reader.read(lambda events: [getattr(e, "job", "") for e in events][-1] == "other", change))
    read = [(event.job, passed(event)) for event in reader.events if isinstance(event, ProposalRead)]
    assert read == [("job", PROPOSAL), ("job", None), ("other", PROPOSAL)]
    assert {*reader.followed} == {"http://c"}, "the leader is the same all the time"
