"""Election and fencing, on every store: one leader at a time, and none that writes after it was replaced."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Container

import pytest

from elasticd.clock import VirtualClock
from elasticd.coordinator import election
from elasticd.records import Keys
from elasticd.store.leader import (
    AlreadyLed,
    ElectedLeader,
    LeadershipLost,
    await_vacancy,
    campaign,
    read_leader,
)
from elasticd.store.lease import LeaseKeeper
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import Compare, LeaseLost, Put, StoreReplaced

PATIENCE = 15.0


def test_the_winner_leads_and_everybody_sees_who_it_is(store, world):
    key = world.prefix + "leader"
    assert read_leader(store, key) is None
    won = campaign(store, key, "alpha", "127.0.0.1:8000", 5)
    assert read_leader(world.client(), key) == ElectedLeader(
        name="alpha", value="127.0.0.1:8000", term=won.term
    )
    assert store.get(key).lease == won.lease


def test_a_second_coordinator_is_told_who_leads(store, world):
    key = world.prefix + "leader"
    campaign(store, key, "alpha", "127.0.0.1:8000", 60)
    with pytest.raises(AlreadyLed, match=r"'alpha' at 127\.0\.0\.1:8000 leads already.*stop it first") as error:
        campaign(world.client(), key, "beta", "127.0.0.1:8001", 60)
    assert error.value.leader.name == "alpha"
    assert read_leader(store, key).name == "alpha"


def test_resigning_lets_a_successor_in_at_once(store, world):
    key = world.prefix + "leader"
    first = campaign(store, key, "alpha", "a", 60)
    first.resign(store)
    assert campaign(world.client(), key, "beta", "b", 60).term > first.term
    assert read_leader(store, key).name == "beta"


def test_a_replaced_leader_can_write_nothing(store, world):
    key, plan = world.prefix + "leader", world.prefix + "plan"
    old = campaign(store, key, "alpha", "a", 60)
    assert old.transact(store, [], [Put(plan, b"old")]).succeeded
    old.resign(store)
    new = campaign(world.client(), key, "beta", "b", 60)
    assert not store.transact([old.guard()], [Put(plan, b"stale")]).succeeded
    with pytest.raises(LeadershipLost, match=f"no longer that of term {old.term}"):
        old.transact(store, [], [Put(plan, b"stale")])
    assert new.transact(store, [], [Put(plan, b"new")]).succeeded
    assert store.get(plan).value == b"new"


def test_a_failed_comparison_is_not_taken_for_lost_leadership(store, world):
    leadership = campaign(store, world.prefix + "leader", "alpha", "a", 60)
    absent = Compare.created(world.prefix + "plan", 1)
    assert not leadership.transact(store, [absent], [Put(world.prefix + "plan", b"")]).succeeded


def test_a_candidate_recognises_its_own_key_when_the_answer_was_lost(world):
    # The lossy client loses what it sends first, on etcd the lease's grant, in memory the key's put.
    store = world.client_that_loses_an_answer()
    won = campaign(store, world.prefix + "leader", "alpha", "a", 60)
    assert store.get(world.prefix + "leader").create_revision == won.term


def test_a_candidate_that_fails_leaves_no_lease_behind(world):
    store = MemoryStore(MemoryServer())
    campaign(store, "/leader", "alpha", "a", 60)
    with pytest.raises(AlreadyLed):
        campaign(store, "/leader", "beta", "b", 60)
    assert len(store.server._leases) == 1


class Slow(MemoryStore):
    """Answers so late to some transactions, counted from one, that a lease of `seconds` runs out before."""

    def __init__(self, late: Container[int], seconds: float = 3.0) -> None:
        self.time = VirtualClock()
        super().__init__(MemoryServer(self.time))
        self._late, self._seconds, self._sent = late, seconds, 0

    def transact(self, compares, then):
        self._sent += 1
        if self._sent in self._late:
            self.time.advance(self._seconds)
        return super().transact(compares, then)


def test_a_candidate_says_that_its_lease_ran_out():
    store = Slow([1])
    with pytest.raises(LeaseLost):
        campaign(store, "/leader", "alpha", "a", 2)
    assert store.get("/leader") is None


@pytest.mark.parametrize("late", [1, 2], ids=["before the key is won", "before the schema is written"])
def test_a_standby_whose_lease_runs_out_at_takeover_tries_again(late, caplog):
    """The second transaction is the first of a leader: it finds its key gone."""
    store, keys, ready = Slow([late, late + 1]), Keys(cluster="test"), []
    with caplog.at_level(logging.WARNING):
        term = election.elect(
            *(store, keys, "alpha", "http://a"),
            told=lambda leader: None,
            ready=lambda: ready.append(1),
            stopped=threading.Event(),
        )
    assert term is not None
    assert read_leader(store, keys.leader).term == term.leadership.term
    assert len(ready) > 1
    assert "too slow for the election" in caplog.text


def test_a_foreign_value_under_the_leaders_key_is_named(store, world):
    key = world.prefix + "leader"
    store.put(key, b"not json")
    with pytest.raises(ValueError, match="does not hold a leader's record"):
        read_leader(store, key)


def test_the_keeper_keeps_the_lease_and_tells_once_when_it_is_lost(store, world):
    lost: list[str] = []
    gone = threading.Event()

    def on_lost(reason: str) -> None:
        lost.append(reason)
        gone.set()

    lease = store.grant(1)
    keeper = LeaseKeeper(store, lease, 1, on_lost).start()
    store.revoke(lease)
    assert gone.wait(PATIENCE)
    assert keeper.lost
    assert not keeper.refresh()
    keeper.stop()
    assert len(lost) == 1


def test_a_defect_does_not_end_the_thread_that_keeps_a_lease(caplog):
    class Failing(MemoryStore):
        asked = 0

        def keep_alive(self, lease):
            self.asked += 1
            if self.asked <= 2:
                raise RuntimeError("a defect")
            return super().keep_alive(lease)

    store = Failing(MemoryServer())
    keeper = LeaseKeeper(store, store.grant(60), 0.03, pytest.fail).start()
    deadline = time.monotonic() + PATIENCE
    while store.asked < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    keeper.stop()
    assert store.asked >= 4
    assert caplog.text.count("elasticd failed to refresh lease") == 1


def test_a_holder_that_does_not_work_loses_its_lease(caplog):
    store, lost = MemoryStore(MemoryServer()), threading.Event()
    working = threading.Event()
    working.set()
    keeper = LeaseKeeper(store, store.grant(1), 1, lambda _: lost.set(), works=working.is_set).start()
    assert not lost.wait(2.0), "it works"
    working.clear()
    deadline = time.monotonic() + PATIENCE
    while "stands still" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(1.5)
    working.set()
    assert lost.wait(PATIENCE)
    keeper.stop()
    assert caplog.text.count("stands still") == 1


def test_a_leader_whose_loop_stands_still_lets_another_lead(monkeypatch):
    monkeypatch.setattr(election, "STILL_SECONDS", 1.0)
    server, keys, lost = MemoryServer(), Keys(cluster="test"), []
    store = MemoryStore(server)

    async def lead() -> None:
        term = await asyncio.to_thread(
            election.elect, store, keys, "a", "u", told=print, ready=lambda: None, stopped=threading.Event()
        )
        keeper = election.keep(store, term, lost.append)
        try:
            other = MemoryStore(server)
            time.sleep(1.0)  # the loop hangs
            deadline = time.monotonic() + PATIENCE
            while read_leader(other, keys.leader) is not None and time.monotonic() < deadline:
                time.sleep(0.05)
            assert read_leader(other, keys.leader) is None
            while not lost and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
        finally:
            await asyncio.to_thread(keeper.stop)

    asyncio.run(lead())
    assert isinstance(lost[0], election.Deposed)


def test_the_keeper_takes_an_outage_for_no_loss(store, world):
    lease = store.grant(60)
    keeper = LeaseKeeper(store, lease, 60, lambda reason: pytest.fail(reason))
    world.stop()
    assert keeper.refresh()
    world.start()
    assert keeper.refresh()
    assert not keeper.lost
    keeper.stop(revoke=True)


def test_who_stands_by_hears_who_leads_and_goes_on_when_nobody_does(store, world):
    key = world.prefix + "leader"
    told: list[ElectedLeader] = []
    stopped = threading.Event()
    first = campaign(store, key, "alpha", "a", 60)
    free: list[bool] = []
    standby = threading.Thread(
        target=lambda: free.append(await_vacancy(world.client(), key, told.append, stopped))
    )
    standby.start()
    deadline = time.monotonic() + PATIENCE
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    first.resign(store)
    standby.join(PATIENCE)
    assert free == [True]
    assert [leader.name for leader in told] == ["alpha"]


def test_who_stands_by_waits_for_a_store_that_is_away_and_ends_when_told(store, world):
    key = world.prefix + "leader"
    stopped = threading.Event()
    campaign(store, key, "alpha", "a", 60)
    client, told = world.client(), threading.Event()
    free: list[bool] = []
    standby = threading.Thread(
        target=lambda: free.append(await_vacancy(client, key, lambda leader: told.set(), stopped))
    )
    standby.start()
    assert told.wait(PATIENCE)
    world.stop()
    standby.join(0.7)  # longer than between two looks
    assert standby.is_alive()
    stopped.set()
    standby.join(PATIENCE)
    world.start()
    assert free == [False]


def test_keeper_says_once_that_the_store_refuses_us_and_goes_on():
    class Replaced(MemoryStore):
        refuses = True

        def keep_alive(self, lease: int) -> int:
            if self.refuses:
                raise StoreReplaced("another cluster")
            return super().keep_alive(lease)

    store, refused, lost = Replaced(MemoryServer()), [], []
    keeper = LeaseKeeper(store, store.grant(60), 60, lost.append, on_refused=refused.append)
    assert keeper.refresh()
    assert keeper.refresh()
    assert [str(error) for error in refused] == ["another cluster"]
    store.refuses = False
    assert keeper.refresh()
    store.refuses = True
    assert keeper.refresh()
    assert len(refused) == 2
    assert not lost
