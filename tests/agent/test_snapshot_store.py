"""What the store keeps, what it lets go of, and when."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from elasticd_agent.snapshots.store import RESERVATION_SECONDS, NoRoom, Snapshot, SnapshotStore
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agent.snapshots import content, held, snapshot
from tests.sizes import examples

LATER = RESERVATION_SECONDS * 100


def alive(device: str) -> bool:
    return True


def dead(device: str) -> bool:
    return False


def drop(gone: list[Snapshot]) -> list[tuple[int, int]]:
    """Closes what was let go of: their plans and steps."""
    for one in gone:
        os.close(one.fd)
    return [(one.held.plan, one.held.step) for one in gone]


def versions(store: SnapshotStore) -> list[tuple[int, int]]:
    return [(one.plan, one.step) for one in store.held("job")]


def copied(store: SnapshotStore, step: int, peer: str = "b", plan: int = 1) -> None:
    """It was sent to the agent `peer`, or to nobody."""
    one = held(step, plan=plan)
    lent = store.lend(one)
    assert lent is not None
    drop(store.settle(one, lent, peer, 0.0))


@pytest.fixture
def store() -> Iterator[SnapshotStore]:
    store = SnapshotStore("n0", 1 << 20)
    yield store
    drop(store.forget("job"))


def test_whole_set_outdates_older_ones_and_none_else_does(store: SnapshotStore) -> None:
    for step in (1, 2, 3):
        assert drop(store.put(snapshot(step))) == []
    assert drop(store.whole("job", (1, 2))) == [(1, 1)]
    assert versions(store) == [(1, 2), (1, 3)]
    assert drop(store.whole("job", (1, 1))) == [], "an older hint is none"
    assert drop(store.put(snapshot(1))) == [(1, 1)], "what comes too late is not kept"


def test_plan_counts_before_step(store: SnapshotStore) -> None:
    drop(store.put(snapshot(90, plan=1)))
    drop(store.put(snapshot(50, plan=2)))  # after a recovery from step 40
    assert drop(store.whole("job", (2, 50))) == [(1, 90)]


def test_set_that_never_becomes_whole_is_let_go_of_in_time(store: SnapshotStore) -> None:
    for step in (1, 2, 3):
        drop(store.put(snapshot(step)))
    drop(store.whole("job", (1, 1)))
    assert drop(store.expire(time.monotonic() + LATER, alive)) == [], "this agent has not done its part"
    copied(store, 2)
    copied(store, 3)
    assert drop(store.expire(time.monotonic() + RESERVATION_SECONDS / 2, alive)) == []
    assert drop(store.expire(time.monotonic() + LATER, dead)) == [(1, 2)]
    assert drop(store.expire(time.monotonic() + LATER, alive)) == [(1, 3)]
    assert drop(store.expire(time.monotonic() + LATER, alive)) == [], "the whole one stays"


def test_newest_stays_where_none_is_whole(store: SnapshotStore) -> None:
    for step in (1, 2):
        drop(store.put(snapshot(step)))
        copied(store, step, peer="")
    assert drop(store.expire(time.monotonic() + LATER, alive)) == [(1, 1)]
    assert versions(store) == [(1, 2)]


def test_patience_grows_with_what_the_copy_took(store: SnapshotStore) -> None:
    for step in (1, 2):
        one = held(step)
        drop(store.put(snapshot(step)))
        lent = store.lend(one)
        assert lent is not None
        drop(store.settle(one, lent, "b", RESERVATION_SECONDS))
    assert drop(store.expire(time.monotonic() + 9 * RESERVATION_SECONDS, alive)) == []
    assert drop(store.expire(time.monotonic() + 11 * RESERVATION_SECONDS, alive)) == [(1, 1)]


def test_what_is_being_sent_is_kept_until_it_was(store: SnapshotStore) -> None:
    drop(store.put(snapshot(1)))
    one = held(1)
    lent = store.lend(one)
    assert lent is not None
    assert store.lend(one) is None, "it is sent once at a time"
    drop(store.put(snapshot(2)))
    assert drop(store.whole("job", (1, 2))) == []
    assert not lent.is_set()
    assert drop(store.settle(one, lent, "b", 0.0)) == [(1, 1)]


def test_what_is_forgotten_while_it_is_sent_is_revoked_at_once(store: SnapshotStore) -> None:
    drop(store.put(snapshot(1)))
    lent = store.lend(held(1))
    assert lent is not None
    assert drop(store.forget("job")) == [(1, 1)]
    assert lent.is_set()
    assert store.settle(held(1), lent, "b", 0.0) == []


def test_lost_copies_are_to_be_sent_again_the_oldest_first(store: SnapshotStore) -> None:
    for step in (1, 2):
        drop(store.put(snapshot(step)))
    drop(store.put(snapshot(1, device="n1/0", node="n1")))
    assert [one.step for one in store.unsent()] == [1, 2], "others' are not sent on"
    copied(store, 1, peer="b")
    copied(store, 2, peer="c")
    assert store.unsent() == []
    store.lost(["b"])
    assert [one.step for one in store.unsent()] == [1]


def test_found_snapshot_outlives_the_vaults_own(store: SnapshotStore) -> None:
    drop(store.put(snapshot(1, data=b"first")))
    found = store.find(held(1))
    drop(store.forget("job"))
    assert content(found) == b"first"


def test_limit_is_for_other_nodes_snapshots_and_counts_those_on_their_way(store: SnapshotStore) -> None:
    drop(store.put(snapshot(data=bytes(2 << 20))))  # a worker's own memory
    fd = store.reserve(1 << 20)
    with pytest.raises(NoRoom, match=r"raise \[agent\] snapshot_mib"):
        store.reserve(1)
    data = bytes(1 << 20)
    os.write(fd, data)
    drop(store.put(Snapshot(held=held(1, device="n1/0", node="n1", data=data), fd=fd)))
    store.release(1 << 20)
    with pytest.raises(NoRoom, match="use 1 MiB of 1"):
        store.reserve(1)
    drop(store.whole("job", (1, 2)))
    os.close(store.reserve(1 << 20))


_STEPS = st.integers(1, 4)
_MOVES = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 2), _STEPS),
    st.tuples(st.just("whole"), st.integers(1, 2), _STEPS),
    st.tuples(st.just("lend"), st.integers(1, 2), _STEPS),
    st.tuples(st.just("settle"), st.integers(1, 2), _STEPS),
    st.tuples(st.just("expire"), st.just(0), st.just(0)),
)


@settings(max_examples=examples(200))
@given(st.lists(_MOVES, max_size=30))
def test_each_snapshot_is_let_go_of_once_and_the_whole_and_the_newest_stay(
    moves: list[tuple[str, int, int]],
) -> None:
    store = SnapshotStore("n0", 1 << 20)
    lent, put, gone, whole = {}, 0, 0, (0, 0)
    for kind, plan, step in moves:
        one = held(step, plan=plan)
        before, released = set(versions(store)), []
        if kind == "put":
            put += 1
            released = store.put(snapshot(step, plan=plan))
            if one in lent and (plan, step) in before:
                del lent[one]  # another took its place
        elif kind == "whole" and before:
            whole = max(whole, (plan, step))
            released = store.whole("job", (plan, step))
        elif kind == "lend" and one not in lent and (event := store.lend(one)) is not None:
            lent[one] = event
        elif kind == "settle" and one in lent:
            released = store.settle(one, lent.pop(one), "b", 0.0)
        elif kind == "expire":
            released = store.expire(time.monotonic() + LATER, alive)
            kept = {version for version in before if version >= whole}
            assert not kept or set(versions(store)) & kept, "never the last one"
        gone += len(released)
        drop(released)
        now = versions(store)
        assert len(now) == put - gone
        assert whole not in before or whole in now
        assert {(one.plan, one.step) for one in lent} <= set(now)
    assert len(drop(store.forget("job"))) == put - gone
