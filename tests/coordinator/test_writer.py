"""The leader's writes: fenced, in order, patient, and read back when their outcome is unknown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from elasticd.coordinator.writer import Rank, WriteConflict, Writer, operations, ranks, stored
from elasticd.machines.job.effects import Note, Write
from elasticd.records import DoneRecord, Keys, decode
from elasticd.store.leader import LeadershipLost, campaign
from elasticd.store.memory import MemoryServer, MemoryStore

KEYS = Keys(cluster="test")
DONE = KEYS.job("demo", "done")


def write(step: int) -> Write:
    note = Note(kind="finished", text=str(step))
    return Write(job="demo", records=(DoneRecord(step=step, epoch=1),), notes=(note,))


class Desk:
    """A writer at work on a memory store, with what it told and why it failed."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.store = MemoryStore(self.server)
        self.leadership = campaign(self.store, KEYS.leader, "me", "http://me", 60)
        self.told: list[str] = []
        self.failures: list[Exception] = []

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
                    KEYS,
                    self.store.snapshot(KEYS.jobs).items,
                    told=lambda note: self.told.append(note.text),
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
    store.put(KEYS.member("demo", "alpha/0"), b"{}")
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
