"""What every store promises, held against the one in memory and against a real etcd."""

from __future__ import annotations

import threading

import pytest

from elasticd.store.confirm import settle
from elasticd.store.protocol import (
    Compare,
    Delete,
    DeletePrefix,
    LeaseLost,
    OutcomeUnknown,
    Put,
    Store,
    StoreTooLarge,
    StoreUnavailable,
    Watch,
    WatchEvent,
    WatchItem,
    WatchReset,
)
from elasticd.testing.waiting import until

PATIENCE = 15.0


def next_event(watch: Watch) -> WatchEvent:
    item = watch.get(timeout=PATIENCE)
    assert isinstance(item, WatchEvent), item
    return item


def values(watch: Watch, count: int) -> list[bytes]:
    return [next_event(watch).item.value for _ in range(count)]


def test_a_key_remembers_who_created_and_who_last_changed_it(store, world):
    key = world.prefix + "a"
    assert store.get(key) is None
    first = store.put(key, b"1")
    second = store.put(key, b"2")
    found = store.get(key)
    assert second == first + 1
    assert (found.key, found.value, found.version, found.lease) == (key, b"2", 2, 0)
    assert (found.create_revision, found.mod_revision) == (first, second)
    store.delete(key)
    assert store.get(key) is None
    again = store.put(key, b"3")
    assert store.get(key).create_revision == again
    assert store.get(key).version == 1


def test_deleting_what_is_absent_makes_no_revision(store, world):
    before = store.put(world.prefix + "a", b"")
    assert store.delete(world.prefix + "absent") == before


def test_a_snapshot_holds_the_prefix_sorted_and_nothing_else(store, world):
    for name in ("jobs/b", "jobs/a", "jobs", "jobsx", "job/", "z"):
        store.put(world.prefix + name, name.encode())
    snapshot = store.snapshot(world.prefix + "jobs/")
    assert [item.key for item in snapshot.items] == [world.prefix + "jobs/a", world.prefix + "jobs/b"]
    assert snapshot.revision == store.identity().revision
    assert [item.value for item in snapshot.items] == [b"jobs/a", b"jobs/b"]


def test_a_transaction_is_one_revision_or_changes_nothing(store, world):
    a, b = world.prefix + "a", world.prefix + "b"
    done = store.transact([Compare.absent(a)], [Put(a, b"1"), Put(b, b"1")])
    assert done.succeeded
    assert store.get(a).mod_revision == store.get(b).mod_revision == done.revision
    refused = store.transact([Compare.absent(a)], [Put(a, b"2"), Delete(b)])
    assert not refused.succeeded
    assert refused.revision == done.revision
    assert store.get(a).value == store.get(b).value == b"1"


@pytest.mark.parametrize("kind", ["created", "modified", "absent"])
def test_each_comparison_tells_true_from_false(store, world, kind):
    key, missing, out = (world.prefix + name for name in ("a", "missing", "out"))
    created = store.put(key, b"1")
    changed = store.put(key, b"2")
    true, false = {
        "created": (Compare.created(key, created), Compare.created(key, changed)),
        "modified": (Compare.modified(key, changed), Compare.modified(key, created)),
        "absent": (Compare.absent(missing), Compare.absent(key)),
    }[kind]
    assert store.transact([true], [Put(out, b"")]).succeeded
    assert not store.transact([true, false], [Put(out, b"")]).succeeded


def test_compare_and_set_lets_exactly_one_of_many_win(world):
    key, clients = world.prefix + "counter", [world.client() for _ in range(4)]
    clients[0].put(key, b"0")

    def add_five(client: Store) -> None:
        for _ in range(5):
            while True:
                seen = client.get(key)
                new = str(int(seen.value) + 1).encode()
                if client.transact([Compare.modified(key, seen.mod_revision)], [Put(key, new)]).succeeded:
                    break

    threads = [threading.Thread(target=add_five, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert clients[0].get(key).value == b"20"
    assert clients[0].get(key).version == 21


def test_all_keys_of_a_prefix_are_deleted_as_one_operation(store, world):
    begun = store.put(world.prefix + "jobs", b"kept")
    for at in range(0, 200, 100):
        store.transact([], [Put(f"{world.prefix}jobs/{n:03d}", b"x") for n in range(at, at + 100)])
    last = store.put(world.prefix + "jobs.", b"kept")
    result = store.transact([], [DeletePrefix(world.prefix + "jobs/"), Put(world.prefix + "over", b"y")])
    assert result.revision == last + 1
    left = [item.key.removeprefix(world.prefix) for item in store.snapshot(world.prefix).items]
    assert left == ["jobs", "jobs.", "over"]
    watch = store.watch(world.prefix, last + 1)
    events = [next_event(watch) for _ in range(201)]
    assert {event.mod_revision for event in events} == {result.revision}
    assert [(event.kind, event.key) for event in events] == [
        *(("delete", f"{world.prefix}jobs/{n:03d}") for n in range(200)),
        ("put", world.prefix + "over"),
    ]
    assert store.transact([], [DeletePrefix(world.prefix + "jobs/")]).revision == result.revision
    assert begun < last


def test_a_prefix_is_compared_with_the_revision_that_none_of_its_keys_was_changed_after(store, world):
    prefix, out = world.prefix + "in/", world.prefix + "out"
    assert store.transact([Compare.untouched(prefix, 0)], [Put(out, b"")]).succeeded, "nothing is there"
    store.put(prefix + "a", b"1")
    last = store.put(prefix + "b", b"1")
    store.put(world.prefix + "in", b"2")
    assert store.transact([Compare.untouched(prefix, last)], [Put(out, b"")]).succeeded
    assert not store.transact([Compare.untouched(prefix, last - 1)], [Put(out, b"")]).succeeded
    store.put(prefix + "a", b"2")
    assert not store.transact([Compare.untouched(prefix, last)], [Put(out, b"")]).succeeded


def test_a_transaction_has_at_most_so_many_operations_and_one_with_more_harms_nobody(store, world):
    most = store.limits.operations
    ops = [Put(f"{world.prefix}{n:04d}", b"") for n in range(most + 1)]
    with pytest.raises(StoreTooLarge, match=f"{most + 1} operations.*{most} are the most"):
        store.transact([], ops)
    with pytest.raises(StoreTooLarge, match="operations"):
        store.transact([Compare.absent(op.key) for op in ops], ops[:1])
    assert store.snapshot(world.prefix).items == ()
    assert store.transact([Compare.absent(op.key) for op in ops[1:]], ops[1:]).succeeded


def test_a_request_has_at_most_so_many_bytes_and_a_larger_one_harms_nobody(store, world):
    key, most = world.prefix + "a", store.limits.request_bytes
    for size in (most + 1, 2 * most):
        with pytest.raises(StoreTooLarge, match="bytes is more than the store takes"):
            store.put(key, b"x" * size)
    assert store.get(key) is None
    store.put(key, b"x" * (most - 500))
    assert len(store.get(key).value) == most - 500


@pytest.mark.parametrize("kind", [Put, Delete])
def test_touching_a_key_under_a_prefix_that_is_deleted_is_refused(store, world, kind):
    op = Put(world.prefix + "a", b"1") if kind is Put else Delete(world.prefix + "a")
    with pytest.raises(ValueError, match="twice"):
        store.transact([], [op, DeletePrefix(world.prefix)])


def test_what_is_read_may_be_larger_than_any_request(store, world):
    """A prefix, and a watch's past: twice what gRPC takes of a message unless it is told otherwise."""
    value, count = b"x" * (store.limits.request_bytes - 1000), 6
    revisions = [store.put(f"{world.prefix}{n:02d}", value) for n in range(count)]
    items = store.snapshot(world.prefix).items
    assert [(item.mod_revision, item.value == value) for item in items] == [(at, True) for at in revisions]
    watch = store.watch(world.prefix, revisions[0])
    assert all(told == value for told in values(watch, count))
    watch.cancel()


def test_touching_a_key_twice_is_refused_before_anything_is_sent(store, world):
    key = world.prefix + "a"
    with pytest.raises(ValueError, match="twice"):
        store.transact([], [Put(key, b"1"), Delete(key)])
    assert store.get(key) is None


@pytest.mark.parametrize("ttl", [0, -1, 1.5])
def test_a_lease_needs_whole_seconds(store, ttl):
    with pytest.raises(ValueError, match="whole seconds"):
        store.grant(ttl)


def test_the_empty_prefix_is_refused(store):
    with pytest.raises(ValueError, match="prefix is empty"):
        store.snapshot("")
    with pytest.raises(ValueError, match="prefix is empty"):
        store.watch("", 1)


def test_a_lease_takes_its_keys_along_when_it_expires(store, world):
    lease = store.grant(3)
    revision = store.put(world.prefix + "mine", b"x", lease)
    store.put(world.prefix + "kept", b"x")
    assert store.get(world.prefix + "mine").lease == lease
    watch = store.watch(world.prefix + "mine", revision + 1)
    world.age(3.0)
    assert next_event(watch).kind == "delete"
    assert [item.key for item in store.snapshot(world.prefix).items] == [world.prefix + "kept"]
    with pytest.raises(LeaseLost):
        store.keep_alive(lease)
    with pytest.raises(LeaseLost):
        store.put(world.prefix + "mine", b"x", lease)


def test_a_lease_lives_while_it_is_refreshed(store, world):
    lease = store.grant(3)
    store.put(world.prefix + "mine", b"x", lease)
    for _ in range(8):
        world.age(0.5)
        assert store.keep_alive(lease) >= 1
    assert store.get(world.prefix + "mine") is not None


def test_revoking_a_lease_deletes_its_keys_at_once_and_twice_is_harmless(store, world):
    lease = store.grant(60)
    store.put(world.prefix + "a", b"x", lease)
    store.put(world.prefix + "b", b"x", lease)
    store.put(world.prefix + "b", b"y")
    store.revoke(lease)
    store.revoke(lease)
    assert [item.key for item in store.snapshot(world.prefix).items] == [world.prefix + "b"]


def test_a_watch_reports_the_past_and_the_future_of_its_prefix_only(store, world):
    first = store.put(world.prefix + "in/a", b"1")
    store.put(world.prefix + "out", b"-")
    watch = store.watch(world.prefix + "in/", first)
    store.put(world.prefix + "in/b", b"2")
    store.delete(world.prefix + "in/a")
    store.put(world.prefix + "in", b"-")
    events = [next_event(watch) for _ in range(3)]
    assert [(event.kind, event.key[-1], event.item.value) for event in events] == [
        ("put", "a", b"1"),
        ("put", "b", b"2"),
        ("delete", "a", b""),
    ]
    assert [event.mod_revision for event in events] == [first, first + 2, first + 3]
    assert watch.get(timeout=0.1) is None


def test_a_cancelled_watch_ends_its_reader(store, world):
    watch = store.watch(world.prefix, store.identity().revision + 1)
    seen: list[WatchItem] = []
    reader = threading.Thread(target=lambda: seen.extend(watch))
    reader.start()
    watch.cancel()
    reader.join(PATIENCE)
    assert not reader.is_alive()
    store.put(world.prefix + "a", b"")
    assert seen == []


def test_a_sink_may_use_the_store_and_may_fail_without_losing_what_follows(store, world):
    seen: list[bytes] = []

    def sink(item: WatchItem) -> None:
        assert isinstance(item, WatchEvent)
        seen.append(item.item.value)
        store.put(world.prefix + "out/" + item.item.value.decode(), b"")
        raise RuntimeError("a reader's mistake")

    store.watch(world.prefix + "in/", store.identity().revision + 1, sink)
    for value in (b"1", b"2", b"3"):
        store.put(world.prefix + "in/a", value)
    until(lambda: len(store.snapshot(world.prefix + "out/").items) == 3)
    assert seen == [b"1", b"2", b"3"]


def test_an_outage_is_said_and_ends(store, world):
    store.put(world.prefix + "a", b"1")
    world.stop()
    with pytest.raises(StoreUnavailable):
        store.get(world.prefix + "a")
    with pytest.raises(StoreUnavailable):
        store.put(world.prefix + "a", b"2")
    world.start()
    assert store.get(world.prefix + "a").value == b"1"


def test_watches_go_on_over_restarts_without_gap_or_duplicate(world):
    writer, reader = world.client(), world.client()
    live = reader.watch(world.prefix, writer.identity().revision + 1)
    sent: list[bytes] = []
    seen: list[bytes] = []
    for round_ in range(3):
        for number in range(20):
            sent.append(f"{round_}.{number}".encode())
            writer.put(world.prefix + "a", sent[-1])
        # So that the watch has a place to resume from, in the midst of what was sent.
        seen += values(live, len(sent) - len(seen) - 5)
        world.stop()
        with pytest.raises(StoreUnavailable):
            writer.get(world.prefix + "a")
        world.start()
        sent.append(f"{round_}.after".encode())
        writer.put(world.prefix + "a", sent[-1])
    seen += values(live, len(sent) - len(seen))
    assert seen == sent
    assert live.get(timeout=0.3) is None


def test_a_watch_may_begin_during_an_outage(store, world):
    revision = store.put(world.prefix + "a", b"1")
    world.stop()
    watch = store.watch(world.prefix, revision)
    world.start()
    assert values(watch, 1) == [b"1"]


def test_a_lease_outlives_a_short_outage(store, world):
    lease = store.grant(2)
    store.put(world.prefix + "a", b"1", lease)
    world.stop()
    world.age(3.0)
    world.start()
    assert store.keep_alive(lease) == 2
    assert store.get(world.prefix + "a") is not None


def test_a_compacted_watch_gets_the_prefix_afresh_and_goes_on(store, world):
    first = store.put(world.prefix + "a", b"1")
    store.put(world.prefix + "b", b"1")
    store.delete(world.prefix + "a")
    last = store.put(world.prefix + "b", b"2")
    world.compact(last)
    watch = store.watch(world.prefix, first)
    reset = watch.get(timeout=PATIENCE)
    assert isinstance(reset, WatchReset)
    assert [(item.key[-1], item.value) for item in reset.snapshot.items] == [("b", b"2")]
    assert reset.snapshot.revision == last
    store.put(world.prefix + "b", b"3")
    assert values(watch, 1) == [b"3"]


def test_a_change_whose_answer_is_lost_is_unknown_and_settled_by_reading_back(store, world):
    key = world.prefix + "plan"
    lossy = world.client_that_loses_an_answer()
    with pytest.raises(OutcomeUnknown):
        lossy.transact([Compare.absent(key)], [Put(key, b"first")])
    until(lambda: store.get(key) is not None)
    revision = store.get(key).mod_revision

    lossy = world.client_that_loses_an_answer()
    result = settle(lossy, [Compare.modified(key, revision)], [Put(key, b"second")])
    assert result.succeeded
    assert (store.get(key).value, store.get(key).version) == (b"second", 2)


def test_settling_a_change_that_lost_to_another_says_so(store, world):
    key = world.prefix + "plan"
    revision = store.put(key, b"first")
    store.put(key, b"another's")
    lossy = world.client_that_loses_an_answer()
    result = settle(lossy, [Compare.modified(key, revision)], [Put(key, b"ours")])
    assert not result.succeeded
    assert store.get(key).value == b"another's"


class LosesOneAnswer:
    """A store whose first change is carried out and its answer lost; `meanwhile` is what others do then."""

    def __init__(self, store: Store, meanwhile) -> None:
        self._store, self._meanwhile = store, meanwhile

    def transact(self, compares, then):
        result = self._store.transact(compares, then)
        if self._meanwhile is not None:
            self._meanwhile, meanwhile = None, self._meanwhile
            meanwhile()
            raise OutcomeUnknown("the answer was lost")
        return result

    def __getattr__(self, name):
        return getattr(self._store, name)


@pytest.mark.parametrize("with_a_put", [True, False])
def test_settling_tells_at_which_revision_the_change_was_made_whoever_wrote_since(store, world, with_a_put):
    key, gone, other = world.prefix + "plan", world.prefix + "gone/", world.prefix + "other"
    before = store.put(key, b"first")
    store.put(gone + "a", b"")
    seen: list[int] = []

    def meanwhile() -> None:
        seen.append(store.identity().revision)
        for _ in range(3):
            store.put(other, b"")

    ops = [Put(key, b"second")] if with_a_put else [Delete(key)]
    lossy = LosesOneAnswer(store, meanwhile)
    result = settle(lossy, [Compare.modified(key, before)], [*ops, DeletePrefix(gone)])
    assert result.succeeded
    assert store.snapshot(gone).items == ()
    if with_a_put:
        assert result.revision == store.get(key).mod_revision == seen[0]
        assert store.transact([Compare.modified(key, result.revision)], [Put(key, b"third")]).succeeded
    else:
        assert store.get(key) is None


def test_a_closed_store_has_cancelled_its_watches_and_refuses_calls(store, world):
    watch = store.watch(world.prefix, 1)
    store.close()
    assert watch.cancelled
    with pytest.raises(StoreUnavailable, match="closed"):
        store.get(world.prefix)
    with pytest.raises(StoreUnavailable, match="closed"):
        store.watch(world.prefix, 1)
