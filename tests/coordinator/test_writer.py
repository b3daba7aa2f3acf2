"""The leader's writes: fenced, in order, patient, and read back when their outcome is unknown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from elasticd.coordinator.store_transactions import Asked, Rank, RendezvousSweep, StoreTransactions, operations
from elasticd.coordinator.store_writer import WriteConflict, Writer, in_restart_mode, ranks, stored
from elasticd.machines.job.state.events import CoordinatorNote, Write
from elasticd.records import CheckpointsRecord, DoneRecord, Keys, OutRecord, PublishedCheckpoint, decode, encode
from elasticd.store.etcd import EtcdStore
from elasticd.store.leader import LeadershipLost, campaign
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import DeletePrefix, Limits, Snapshot, Store, StoreRefused, StoreTooLarge
from elasticd.store.session import EtcdOptions
from elasticd.wire.rendezvous import Torchrun
from tests.etcds import SharedEtcd

KEYS = Keys(cluster="test")
DONE = KEYS.job("demo", "done")


def write(step: int) -> Write:
    note = CoordinatorNote(kind="finished", text=str(step))
    return Write(job="demo", records=(DoneRecord(step=step, epoch=1),), notes=(note,))


class Desk:
    """A writer at work on a store, with what it told and why it failed: one in memory if none is given."""

    store: MemoryStore

    def __init__(self, store: Store | None = None, keys: Keys = KEYS) -> None:
        self.server = MemoryServer()
        self.keys = keys
        self.store = store or MemoryStore(self.server)  # type: ignore[assignment]
        self.leadership = campaign(self.store, keys.leader, "me", "http://me", 60)
        self.told: list[str] = []
        self.failures: list[Exception] = []
        self.refused: list[tuple[Asked, Exception]] = []

    def step(self) -> int:
        item = MemoryStore(self.server).get(DONE)
        assert item is not None
        return decode(item.value, DoneRecord).step

    def run(self, body: Callable[[Writer], Awaitable[None]]) -> None:
        async def main() -> None:
            with ThreadPoolExecutor(1) as executor:
                writer = Writer(
                    self.store,
                    executor,
                    self.leadership,
                    self.keys,
                    StoreTransactions(self.keys, self.store.limits, self.store.snapshot(self.keys.jobs).items),
                    told=lambda note: self.told.append(note.text),
                    refused=lambda asked, error: self.refused.append((asked, error)),
                    failed=self.failures.append,
                )
                task = asyncio.create_task(writer.run())
                try:
                    await asyncio.wait_for(body(writer), 60)
                finally:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

        asyncio.run(main())

    async def failed(self) -> None:
        while not self.failures:
            await asyncio.sleep(0.005)


def test_writes_are_done_in_order_and_told_when_done() -> None:
    desk = Desk()

    async def body(writer: Writer) -> None:
        for step in range(1, 6):
            writer.put(write(step))
        await writer.drained()

    desk.run(body)
    assert desk.told == ["1", "2", "3", "4", "5"]
    assert desk.step() == 5


def test_outage_delays_a_write_and_loses_none() -> None:
    desk = Desk()

    async def body(writer: Writer) -> None:
        desk.server.outage(True)
        writer.put(write(1))
        writer.put(write(2))
        while not writer.away:
            await asyncio.sleep(0.005)
        assert desk.told == []
        desk.server.outage(False)
        await writer.drained()

    desk.run(body)
    assert desk.told == ["1", "2"]
    assert desk.step() == 2


@pytest.mark.parametrize("applied", [True, False])
def test_lost_answer_is_settled(applied: bool) -> None:
    desk = Desk()

    async def body(writer: Writer) -> None:
        desk.store.lose_next_reply(applied=applied)
        writer.put(write(1))
        writer.put(write(2))
        await writer.drained()

    desk.run(body)
    assert desk.told == ["1", "2"]
    assert desk.step() == 2


def test_leader_that_was_replaced_writes_nothing_and_is_told() -> None:
    desk = Desk()
    other = MemoryStore(desk.server)
    other.delete(KEYS.leader)
    campaign(other, KEYS.leader, "other", "http://other", 60)

    async def body(writer: Writer) -> None:
        writer.put(write(1))
        await desk.failed()

    desk.run(body)
    assert isinstance(desk.failures[0], LeadershipLost)
    assert desk.store.get(DONE) is None
    assert desk.told == []


def test_record_changed_by_somebody_else_is_not_written_over() -> None:
    desk = Desk()

    async def body(writer: Writer) -> None:
        writer.put(write(1))
        await writer.drained()
        MemoryStore(desk.server).put(DONE, b"{}")
        writer.put(write(2))
        await desk.failed()

    desk.run(body)
    assert isinstance(desk.failures[0], WriteConflict)
    found = desk.store.get(DONE)
    assert found is not None
    assert found.value == b"{}"


def test_job_with_members_alone_is_no_job_yet() -> None:
    store = MemoryStore()
    store.put(f"{KEYS.jobs}demo/members/alpha:0", b"{}")  # as release 0.1 has them
    assert stored(KEYS, store.snapshot(KEYS.jobs).items) == []
    store.transact((), operations(KEYS, write(7)))
    (found,) = stored(KEYS, store.snapshot(KEYS.jobs).items)
    assert found.done is not None
    assert found.done.step == 7


def test_what_torchruns_tell_of_their_ranks_is_kept_until_the_job_is_over() -> None:
    desk = Desk()
    told = [Rank(job="demo", key=f"rdzv/role_info/{node}", value=b"%d" % node) for node in range(2)]

    async def tells(writer: Writer) -> None:
        for rank in (*told, told[1], Rank(job="other", key="rdzv/x", value=b"y")):
            writer.put(rank)
        await writer.drained()

    desk.run(tells)
    found = desk.store.snapshot(KEYS.jobs)
    assert ranks(KEYS, found.items) == [*told, Rank(job="other", key="rdzv/x", value=b"y")]
    assert stored(KEYS, found.items) == [], "nobody decided anything yet"

    async def ends(writer: Writer) -> None:
        writer.put(Rank(job="demo"))
        writer.put(Rank(job="demo"))
        await writer.drained()

    desk.run(ends)
    assert [rank.job for rank in ranks(KEYS, desk.store.snapshot(KEYS.jobs).items)] == ["other"]
    assert not desk.failures


@pytest.fixture(params=["memory", "etcd"])
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    if request.param == "memory":
        yield Desk()
        return
    shared: SharedEtcd = request.getfixturevalue("shared_etcd")
    with shared.store() as store:
        yield Desk(store, Keys(cluster=shared.cluster("writer")))


def test_a_job_of_more_torchruns_than_a_transaction_has_operations_ends(desk: Desk) -> None:
    """`elasticd run` starts one for each device, and each tells its ranks."""
    count = 2 * desk.store.limits.operations

    async def body(writer: Writer) -> None:
        for n in range(count):
            writer.put(Rank(job="demo", key=f"rdzv/role_info/{n}", value=b"x"))
        writer.put(Rank(job="demo2", key="rdzv/role_info/0", value=b"x"))
        await writer.drained()
        assert len(desk.store.snapshot(desk.keys.job("demo", "ranks/")).items) == count
        writer.put(write(7))
        writer.put(Rank(job="demo"))
        await writer.drained()

    desk.run(body)
    found = desk.store.snapshot(desk.keys.jobs).items
    assert [rank.job for rank in ranks(desk.keys, found)] == ["demo2"]
    assert desk.told == ["7"]
    assert not desk.failures
    assert not desk.refused


def test_ranks_that_follow_each_other_are_written_together_and_the_last_of_a_key_stays() -> None:
    desk = Desk()
    begun: list[int] = []

    async def body(writer: Writer) -> None:
        begun.append(desk.store.identity().revision)
        for n in range(300):
            writer.put(Rank(job="demo", key=f"rdzv/{n % 100}", value=b"%d" % n))
        writer.put(write(1))
        writer.put(Rank(job="demo", key="rdzv/late", value=b"x"))
        writer.put(write(2))
        await writer.drained()

    desk.run(body)
    assert desk.store.identity().revision - begun[0] <= 300 / 64 + 1 + 3
    found = {rank.key: rank.value for rank in ranks(KEYS, desk.store.snapshot(KEYS.jobs).items)}
    assert found == {f"rdzv/{n}": b"%d" % (200 + n) for n in range(100)} | {"rdzv/late": b"x"}
    assert desk.told == ["1", "2"]


def test_a_rank_that_is_refused_takes_none_along_that_was_put_with_it() -> None:
    desk = Desk()
    values = {"rdzv/a": 10, "rdzv/b": 3_000_000, "rdzv/c": 10, "rdzv/d": 1_000_000, "rdzv/e": 1_000_000}

    async def body(writer: Writer) -> None:
        for key, size in values.items():
            writer.put(Rank(job="demo", key=key, value=b"x" * size))
        writer.put(write(1))
        await writer.drained()

    desk.run(body)
    found = [rank.key for rank in ranks(KEYS, desk.store.snapshot(KEYS.jobs).items)]
    assert found == ["rdzv/a", "rdzv/c", "rdzv/d", "rdzv/e"]
    assert [asked.key for asked, _ in desk.refused if isinstance(asked, Rank)] == ["rdzv/b"]
    assert desk.told == ["1"]
    assert not desk.failures


@pytest.mark.parametrize("applied", [True, False])
def test_a_deletion_that_lands_late_takes_nothing_along_that_was_told_since(applied: bool) -> None:
    desk = Desk()
    sent: list[tuple[Any, Any]] = []

    class Recorded(MemoryStore):
        def transact(self, compares, then):  # type: ignore[no-untyped-def]
            sent.append((tuple(compares), then))
            return super().transact(*sent[-1])

    desk.store = Recorded(desk.server)

    async def body(writer: Writer) -> None:
        writer.put(Rank(job="demo", key="rdzv/a", value=b"x"))
        await writer.drained()
        desk.store.lose_next_reply(applied=applied)
        writer.put(Rank(job="demo"))
        writer.put(Rank(job="demo", key="rdzv/b", value=b"x"))
        await writer.drained()

    desk.run(body)
    (first, *_, last) = [once for once in sent if isinstance(once[1][0], DeletePrefix)]
    for late in (first, last):
        assert not MemoryStore(desk.server).transact(*late).succeeded
    assert [rank.key for rank in ranks(KEYS, desk.store.snapshot(KEYS.jobs).items)] == ["rdzv/b"]
    assert not desk.failures


def test_others_may_write_while_an_answer_is_lost() -> None:
    """What is known of a key is its own revision, not what the store had come to when that was found out."""
    desk = Desk()
    other = MemoryStore(desk.server)

    class Busy(MemoryStore):
        def transact(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            other.put("/somebody/else", b"")
            return super().transact(*args, **kwargs)

    desk.store = Busy(desk.server)

    async def body(writer: Writer) -> None:
        desk.store.lose_next_reply(applied=True)
        for step in (1, 2, 3):
            writer.put(write(step))
        await writer.drained()

    desk.run(body)
    assert not desk.failures
    assert desk.told == ["1", "2", "3"]
    assert desk.step() == 3


def large() -> Write:
    """The name of a checkpoint that no store has room for, however well it can be compressed."""
    published = (PublishedCheckpoint(name="x" * (17 << 20), step=1, plan=1),)
    record = CheckpointsRecord(published=published, epoch=1)
    return Write(job="large", records=(record,), notes=(CoordinatorNote(kind="checkpoint", text="never"),))


def test_a_write_that_is_too_large_is_refused_with_its_reason_and_the_next_one_is_made(desk: Desk) -> None:
    too_large = large()

    async def body(writer: Writer) -> None:
        for asked in (write(1), too_large, write(2)):
            writer.put(asked)
        await writer.drained()
        assert not writer.away

    desk.run(body)
    assert desk.told == ["1", "2"]
    ((asked, error),) = desk.refused
    assert asked is too_large
    assert isinstance(error, StoreTooLarge)
    assert "'checkpoints' has 17,8" in str(error)
    assert not desk.failures


@pytest.mark.parametrize("size", [1_200_000, 3_000_000])
def test_what_an_etcd_with_less_room_refuses_is_that_write_s_failure_too(
    shared_etcd: SharedEtcd, size: int
) -> None:
    """Below and above what gRPC lets through to etcd."""
    anything = Limits(request_bytes=1 << 30, operations=1 << 20)
    store = EtcdStore(EtcdOptions(endpoints=shared_etcd.endpoints, limits=anything))
    desk = Desk(store, Keys(cluster=shared_etcd.cluster("writer")))
    rank = Rank(job="demo", key="rdzv/large", value=b"x" * size)

    async def body(writer: Writer) -> None:
        writer.put(rank)
        writer.put(write(2))
        await writer.drained()

    desk.run(body)
    store.close()
    assert [asked for asked, _ in desk.refused] == [rank]
    assert desk.told == ["2"]
    assert not desk.failures


def test_a_value_that_the_store_would_refuse_is_known_before_it_is_put() -> None:
    desk = Desk()

    async def body(writer: Writer) -> None:
        assert "bytes is more than the store takes" in writer.refusal(
            Rank(job="j", key="k", value=b"x" * 3_000_000)
        )
        assert "bytes is more than the store takes" in writer.refusal(Rank(job="j", key="k" * 3_000_000))
        assert "surrogates" in writer.refusal(Rank(job="j", key="\ud800"))
        assert writer.refusal(Rank(job="j", key="k", value=b"x" * 1_000_000)) == ""

    desk.run(body)


def test_a_write_that_cannot_be_encoded_is_refused_and_ends_nothing() -> None:
    desk = Desk()
    wrong = Write(job="\ud800", records=(DoneRecord(step=1, epoch=1),))

    async def body(writer: Writer) -> None:
        writer.put(wrong)
        writer.put(write(2))
        await writer.drained()

    desk.run(body)
    assert [asked for asked, _ in desk.refused] == [wrong]
    assert desk.told == ["2"]


def test_a_store_that_refuses_us_ends_the_leader_with_its_reason() -> None:
    desk = Desk()

    class Refusing(MemoryStore):
        def transact(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            raise StoreRefused("denies access")

    desk.store = Refusing(desk.server)

    async def body(writer: Writer) -> None:
        writer.put(write(1))
        await desk.failed()

    desk.run(body)
    assert isinstance(desk.failures[0], StoreRefused)
    assert not desk.refused


ROUNDS = KEYS.rendezvous("demo")


@pytest.mark.parametrize("there", [True, False])
def test_rounds_of_a_job_in_restart_mode_are_deleted_once_no_torchrun_is_there(there: bool) -> None:
    desk = Desk()
    out = OutRecord(torchrun="t1", epoch=1, reason="it is slow")
    others = (KEYS.job("demo", "done"), KEYS.rendezvous("demo-2") + "state")
    for key in (ROUNDS + "state", *others, *([ROUNDS + "torchruns/t2"] if there else [])):
        desk.store.put(key, b"{}")
    ended = encode(Torchrun(node="n", store="", status="died"))
    desk.store.put(ROUNDS + "torchruns/t3", ended if not there else encode(Torchrun(node="n", store="")))
    desk.store.delete(others[0])
    before = {item.key for item in desk.store.snapshot(KEYS.jobs).items}
    assert in_restart_mode(KEYS, desk.store.snapshot(KEYS.jobs).items) == ["demo", "demo-2"]

    async def body(writer: Writer) -> None:
        writer.put(Write(job="demo", records=(out,)))
        await writer.drained()
        desk.store.put(ROUNDS + "state", b"changed by an agent")
        writer.put(RendezvousSweep(job="demo"))
        writer.put(RendezvousSweep(job="none"))
        writer.put(Write(job="demo", records=(out,)))  # as the leader may write it again
        await writer.drained()

    desk.run(body)
    left = {item.key for item in desk.store.snapshot(KEYS.jobs).items}
    gone = set() if there else {ROUNDS + "state", ROUNDS + "torchruns/t3"}
    assert left == {ROUNDS + "out/t1", *before} - gone
    assert desk.failures == []


def test_torchrun_that_comes_at_the_last_moment_keeps_its_rounds() -> None:
    desk = Desk()
    desk.store.put(ROUNDS + "state", b"{}")
    real = desk.store.snapshot

    def snapshot(prefix: str) -> Snapshot:
        found = real(prefix)
        if prefix == ROUNDS:
            desk.store.put(ROUNDS + "torchruns/t1", b"{}")
        return found

    async def body(writer: Writer) -> None:
        desk.store.snapshot = snapshot  # type: ignore[method-assign]
        writer.put(RendezvousSweep(job="demo"))
        writer.put(write(3))
        await writer.drained()

    desk.run(body)
    assert {item.key for item in real(ROUNDS).items} == {ROUNDS + "state", ROUNDS + "torchruns/t1"}
    assert (desk.failures, desk.step()) == ([], 3)
