"""What only the store in memory has: virtual time, outages of one client, bounded history."""

from __future__ import annotations

import pytest

from elasticd.clock import VirtualClock
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import OutcomeUnknown, StoreFull, StoreUnavailable, WatchEvent, WatchReset


def test_watchers_hear_of_a_change_before_the_call_that_made_it_returns():
    store, seen = MemoryStore(MemoryServer(VirtualClock())), []
    store.watch("/", 1, lambda item: seen.append(item.item.value))
    store.put("/a", b"1")
    assert seen == [b"1"]


def test_leases_expire_inside_advance_in_order_of_their_time():
    clock = VirtualClock()
    store, seen = MemoryStore(MemoryServer(clock)), []
    for name, ttl in (("late", 5), ("early", 2), ("refreshed", 2)):
        lease = store.grant(ttl)
        store.put(f"/{name}", b"", lease)
    store.watch("/", store.identity().revision + 1, lambda item: seen.append((clock.now(), item.key)))
    clock.advance(1)
    store.keep_alive(lease)
    clock.advance(10)
    assert seen == [(2.0, "/early"), (3.0, "/refreshed"), (5.0, "/late")]


def test_a_client_that_is_cut_off_catches_up_while_the_others_go_on():
    server = MemoryServer(VirtualClock())
    cut, other = MemoryStore(server), MemoryStore(server)
    watch = cut.watch("/", 2)
    cut.outage(True)
    other.put("/a", b"1")
    with pytest.raises(StoreUnavailable):
        cut.get("/a")
    assert watch.get(timeout=0) is None
    cut.outage(False)
    event = watch.get(timeout=0)
    assert isinstance(event, WatchEvent)
    assert event.item.value == b"1"


def test_an_answer_may_be_lost_without_the_change_having_been_made():
    store = MemoryStore(MemoryServer(VirtualClock()))
    store.lose_next_reply(applied=False)
    with pytest.raises(OutcomeUnknown):
        store.put("/a", b"1")
    assert store.get("/a") is None
    store.put("/a", b"1")
    assert store.get("/a") is not None


def test_a_store_at_its_quota_reads_and_refreshes_leases_and_changes_nothing():
    """As etcd at its quota: tests/store/test_etcd.py."""
    store = MemoryStore(MemoryServer(VirtualClock()))
    lease = store.grant(5)
    store.put("/before", b"1")
    store.server.full = True
    asks = (lambda: store.put("/more", b"1"), lambda: store.delete("/before"), lambda: store.grant(5))
    for ask in asks:
        with pytest.raises(StoreFull):
            ask()
    assert store.keep_alive(lease) == 5
    assert [item.key for item in store.snapshot("/").items] == ["/before"]
    store.server.full = False
    store.put("/more", b"1")


def test_history_is_bounded_and_a_watch_of_what_was_dropped_is_reset():
    store = MemoryStore(MemoryServer(VirtualClock(), history_limit=10))
    for number in range(100):
        store.put("/a", str(number).encode())
    assert len(store.server._history) <= 10
    reset = store.watch("/", 2).get(timeout=0)
    assert isinstance(reset, WatchReset)
    assert reset.snapshot.items[0].value == b"99"


def test_compacting_what_is_gone_or_yet_to_come_is_refused():
    store = MemoryStore(MemoryServer(VirtualClock()))
    with pytest.raises(ValueError, match="compact between"):
        store.server.compact(store.identity().revision + 1)
