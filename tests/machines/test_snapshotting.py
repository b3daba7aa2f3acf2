"""Snapshots: all ranks copy at the same steps, and no slot is written that somebody still has."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.machines.worker import snapshotting as sn
from tests.sizes import examples


@dataclass
class Rank:
    """A rank's machine, the files that it has orders to make, and what its agent holds: slot by mark."""

    state: sn.SnapshotState
    orders: list[sn.Make] = field(default_factory=list)
    held: dict[tuple[int, int], int] = field(default_factory=dict)

    def take(self, step: sn._Step) -> None:
        self.state, effects = step
        for make in effects:
            assert make.slot not in self.held.values(), "a slot in use gets no other file"
            assert make.slot not in [order.slot for order in self.orders], "one file at a time"
            self.orders.append(make)

    def copy(self, plan: int, step: int, bits: list[bool]) -> bool:
        self.state, slot = sn.voted(self.state, step, bits)
        if slot is None:
            return False
        assert slot not in self.held.values(), "a slot in use is never written"
        assert self.state.slots[slot].room >= self.state.need
        self.held[plan, step] = slot
        return True


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("vote"), st.integers(0, 2)),  # which rank's agent speaks between record and outcome
        st.tuples(st.just("free"), st.integers(0, 2)),
        st.tuples(st.just("make"), st.integers(0, 2)),
        st.tuples(st.just("lack"), st.integers(0, 2)),
        st.tuples(st.just("agent"), st.integers(0, 2)),
        st.tuples(st.just("plan"), st.integers(1, 1000)),
    ),
    max_size=60,
)


@settings(max_examples=examples(400))
@given(every=st.integers(1, 3), actions=ACTIONS, data=st.data())
def test_all_copy_alike_and_a_slot_in_use_is_left_alone(every: int, actions: list, data: st.DataObject) -> None:
    ranks = [Rank(sn.first(every)) for _ in range(3)]
    plan, step = 0, 0
    for what, number in actions:
        if what == "plan":
            plan += 1
            for rank in ranks:
                rank.take(sn.sized(rank.state, plan, number))
            continue
        rank = ranks[number]
        if what == "vote":
            step += 1
            bits = [r.state.ready(plan, step) for r in ranks]
            between(data, rank)
            copied = {r.copy(plan, step, bits) for r in ranks}
            assert copied == {all(bits)}, "all copy or none does"
            assert not copied.pop() or step % every == 0
        else:
            act(data, rank, what)


def between(data: st.DataObject, rank: Rank) -> None:
    act(data, rank, data.draw(st.sampled_from(["free", "make", "lack", "agent", "nothing"])))


def act(data: st.DataObject, rank: Rank, what: str) -> None:
    if what == "free" and rank.held:
        mark = data.draw(st.sampled_from(sorted(rank.held)))
        del rank.held[mark]
        rank.take(sn.freed(rank.state, *mark))
    elif what == "make" and rank.orders:
        order = rank.orders.pop(0)
        rank.take(sn.made(rank.state, order.slot, order.size))
    elif what == "lack" and rank.orders:
        order = rank.orders.pop(0)
        rank.take(sn.unmade(rank.state, order.slot, order.size))
    elif what == "agent":
        rank.held.clear()
        rank.take(sn.left(rank.state))


def test_a_word_of_the_agent_about_what_is_not_here_changes_nothing() -> None:
    state = sn.SnapshotState(every=1)
    assert sn.freed(state, 3, 4) == (state, ())


def test_a_share_that_grows_gets_larger_files_as_slots_come_free() -> None:
    state, first = sn.sized(sn.SnapshotState(every=1), 1, 100)
    assert first == (sn.Make(slot=0, size=100), sn.Make(slot=1, size=100))
    assert not state.ready(1, 1)
    for make in first:
        state, _ = sn.made(state, make.slot, make.size)
    assert state.ready(1, 1)
    assert not state.ready(2, 1), "under a plan whose share was not measured"
    state, slot = sn.voted(state, 1, [True, True])
    state, effects = sn.sized(state, 2, 300)
    assert slot == 0
    assert effects == (sn.Make(slot=1, size=300),)
    state, effects = sn.freed(state, 1, 1)
    assert effects == (sn.Make(slot=0, size=300),)


def test_where_there_was_no_memory_for_a_file_the_next_plan_tries_again() -> None:
    state, makes = sn.sized(sn.SnapshotState(every=1), 1, 100)
    for make in makes:
        state, again = sn.unmade(state, make.slot, make.size)
        assert not again, "not for the same share"
    assert sn.left(state)[1] == ()
    assert not state.ready(1, 1)
    state, makes = sn.sized(state, 2, 60)
    assert makes == (sn.Make(slot=0, size=60), sn.Make(slot=1, size=60))
    state, makes = sn.sized(state, 3, 40)
    state, makes = sn.unmade(state, 0, 60)
    assert makes == (sn.Make(slot=0, size=40),), "it was the larger share of the plan before"
    state, _ = sn.made(state, 0, 40)
    assert state.ready(3, 3)


def test_while_both_slots_are_in_use_nobody_is_asked_to_copy() -> None:
    state, makes = sn.sized(sn.SnapshotState(every=2), 1, 10)
    for make in makes:
        state, _ = sn.made(state, make.slot, 10)
    for step in (2, 4):
        assert state.ready(1, step)
        state, _ = sn.voted(state, step, [True])
    assert not state.ready(1, 6)
    assert sn.voted(state, 6, [True, False])[1] is None
    state, _ = sn.freed(state, 1, 2)
    assert state.ready(1, 6)
    assert not state.ready(1, 7), "it is not due"
