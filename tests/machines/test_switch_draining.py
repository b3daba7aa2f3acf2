"""A rank that drains: it is a source as before, until it holds nothing that the others may need."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticd.machines.worker import switch as sw
from elasticd.machines.worker.switch import SwitchPhase, SwitchState
from elasticd.wire.worker import Abort, Fenced, Prepared, Recorded
from tests.machines.test_switch import NEW, OLD, World, propose
from tests.machines.test_switch_faults import Rank
from tests.machines.test_switch_faults import World as Faults
from tests.sizes import examples

TRAINING = SwitchState(phase=SwitchPhase.TRAINING, number=1, trains=True, seen=1)
#: From the proposal of a plan without it to the record of that plan.
LIFE: list[sw.SwitchEvent] = [
    sw.Proposed(number=2, joins=False),
    sw.Voting(),
    sw.Voted(prepared=(0, 0)),
    Prepared(number=2),
    sw.Voting(),
    sw.Voted(prepared=(2, 2)),
    sw.StateMoved(number=2),
    sw.Gathered(number=2, oks=(True, True)),
    Recorded(number=2),
]


@pytest.mark.parametrize("cut", range(len(LIFE) + 1))
def test_told_after_any_prefix_of_the_switch_it_goes_at_its_end_and_changes_nothing_before(cut: int) -> None:
    state, told, plain, effects = TRAINING, [], [], ()
    for event in LIFE:
        state, effects = sw.step(state, event)
        plain += effects
    state = TRAINING
    for event in [*LIFE[:cut], sw.DrainRequested(), *LIFE[cut:]]:
        assert state.phase is not SwitchPhase.STOPPED, "before the end"
        state, effects = sw.step(state, event)
        told += effects
    assert told == [*plain, sw.LeaveJob()]
    assert plain[-1] == sw.DropOld(), "its copy goes with the record, not before"
    assert state.phase is SwitchPhase.STOPPED


def test_one_that_hears_of_the_record_before_its_own_end_of_the_switch_goes_all_the_same() -> None:
    state, _ = sw.step(TRAINING, sw.DrainRequested())
    for event in [*LIFE[:-2], Recorded(number=2)]:
        state, effects = sw.step(state, event)
        assert sw.LeaveJob() not in effects
    state, effects = sw.step(state, LIFE[-2])
    assert effects[-2:] == (sw.DropOld(), sw.LeaveJob())


def test_one_that_stands_by_goes_at_once_and_hears_what_still_comes() -> None:
    state, effects = sw.step(SwitchState(), sw.DrainRequested())
    assert effects == (sw.LeaveJob(),)
    for event in (
        sw.Proposed(number=2, joins=True),
        Fenced(number=3, reason="death"),
        Recorded(number=4),
        sw.DrainRequested(),
    ):
        state, effects = sw.step(state, event)
        assert (state.phase, effects) == (SwitchPhase.STOPPED, ())


def test_one_that_was_to_join_goes_after_the_abort() -> None:
    state, _ = sw.step(SwitchState(), sw.Proposed(number=2, joins=True))
    state, effects = sw.step(state, sw.DrainRequested())
    assert effects == ()
    state, effects = sw.step(state, Abort(number=2, reason="it was told to go"))
    assert effects[-1] == sw.LeaveJob()


def test_one_that_is_fenced_off_or_of_no_use_to_the_others_goes_at_rest() -> None:
    state, _ = sw.step(TRAINING, sw.DrainRequested())
    evicted, _ = sw.step(state, Fenced(number=2, reason="death", evicted=True))
    _, effects = sw.step(evicted, sw.Rested())
    assert effects == (sw.DropState(), sw.LeaveJob()), "it does not come again"
    fenced, _ = sw.step(state, Fenced(number=2, reason="death"))
    fenced, effects = sw.step(fenced, sw.Rested())
    assert effects == (sw.ReportState(fence=2),), "what it holds may be what they go on from"
    _, effects = sw.step(fenced, Recorded(number=3))
    assert effects == (sw.DropState(), sw.LeaveJob())


def held(rank: Rank) -> int:
    """The newest plan that it holds a copy of, in force or verified."""
    verified = rank.state.proposal if rank.state.ok else rank.state.side
    return max([*rank.copies, verified])


def departed(world: World | Faults, name: str) -> bool:
    return bool(world.ranks[name].state.draining) and world.ranks[name].state.phase is SwitchPhase.STOPPED


@given(seed=st.integers(0, 10**9), at=st.integers(0, 140), who=st.sampled_from(sorted({*OLD, *NEW})))
@settings(max_examples=examples(200))
def test_in_any_order_the_switch_ends_as_without_it_and_the_leaver_goes(seed: int, at: int, who: str) -> None:
    rng = random.Random(seed)
    world = World()
    propose(world)
    names = list(world.ranks)
    for turn in range(140):
        if turn == at:
            world.feed(who, sw.DrainRequested())
        if departed(world, who):
            assert who == "d", "the only one that may hold nothing yet"
            return  # its agent says that it is gone, and the leader gives the proposal up
        world.turn(rng.choice(names), lambda: rng.random() < 0.5)
        world.check()
    world.settle(rng, 600)
    world.feed(who, sw.DrainRequested())
    assert {world.ranks[name].state.number for name in ("b", "c")} == {2}
    assert not departed(world, who), "it holds a copy still"
    world.recorded = True
    world.feed("a", Recorded(number=2))
    assert departed(world, "a") == (who == "a")
    assert world.ranks["a"].copies == set()


@given(seed=st.integers(0, 10**9), at=st.integers(0, 150), deaths=st.lists(st.integers(0, 120), max_size=1))
@example(seed=656, at=118, deaths=[100])  # it left with a verified copy that others went on from
@settings(max_examples=examples(200))
def test_nobody_departs_with_the_only_copy_also_where_others_die(seed: int, at: int, deaths: list[int]) -> None:
    rng = random.Random(seed)
    world = Faults(rng)
    who = rng.choice(("a", "b", "c"))
    for turn in range(400):
        if turn == at and world.ranks[who].alive:
            world.feed(who, sw.DrainRequested())
        if rng.random() < 0.05:
            world.propose()
        if turn in deaths and world.kill(rng.choice([name for name in world.living() if name != who] or [who])):
            world.write_fence()
        world.turn(rng.choice(sorted(world.ranks)))
        if departed(world, who):
            assert not world.ranks[who].copies, "it holds nothing"
            assert any(held(world.ranks[name]) >= world.recorded for name in world.living() if name != who)
            return
        world.recover()
