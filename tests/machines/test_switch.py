"""The switch, rank by rank: every interleaving keeps all that live on one and the same plan, or in doubt.

`World` plays the ranks' machines against each other. Its collectives behave as real ones do: each rank
arrives by itself, and a rank gets the result once all have arrived, or an error once a member is dead.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.machines.worker import switch as sw
from elasticd.machines.worker.switch import SwitchPhase, SwitchState
from elasticd.wire.worker import Abort, Prepared, Recorded, Refused, Shutdown, StayedOnPlan
from tests.sizes import examples

OLD, NEW = ("a", "b", "c"), ("b", "c", "d")  # a leaves, d joins


def stayed(effect: sw.SwitchEffect) -> bool:
    """Whether this effect says that a proposal is off here."""
    return isinstance(effect, sw.SendToLeader) and isinstance(effect.message, StayedOnPlan)


@dataclass
class Rank:
    state: SwitchState
    alive: bool = True
    inbox: list[sw.SwitchEvent] = field(default_factory=list)
    copies: set[int] = field(default_factory=set)
    ends: list[sw.SwitchEffect] = field(default_factory=list)
    waits: str | None = None
    said: dict[str, object] = field(default_factory=dict)


class World:
    """Three old members, three new ones, one leader that proposes once and may abort once."""

    def __init__(self, initial: bool = False) -> None:
        self.initial = initial
        names = NEW if initial else sorted({*OLD, *NEW})
        self.ranks = {name: Rank(SwitchState()) for name in names}
        if not initial:
            for name in OLD:
                self.ranks[name].state = SwitchState(phase=SwitchPhase.TRAINING, number=1, trains=True, seen=1)
                self.ranks[name].copies = {1}
        self.votes = 0
        self.recorded = False

    # what a rank does when it is given a turn -------------------------------------------------------------

    def feed(self, name: str, event: sw.SwitchEvent) -> None:
        rank = self.ranks[name]
        rank.state, effects = sw.step(rank.state, event)
        for effect in effects:
            self._effect(name, rank, effect)

    def _effect(self, name: str, rank: Rank, effect: sw.SwitchEffect) -> None:
        match effect:
            case sw.Prepare(number=n):
                rank.inbox.append(Prepared(number=n))
            case sw.MoveState():
                rank.waits = "move"
                rank.said["move"] = True
            case sw.AllGatherOk(ok=ok):
                rank.waits = "ok"
                rank.said["ok"] = ok
            case sw.Swap(number=n, member=member):
                rank.ends.append(effect)
                if member:
                    rank.copies.add(n)
                rank.waits = None
                rank.said = {}
            case sw.Cancel():
                rank.waits = None
                rank.said = {}
            case sw.DropOld():
                rank.copies.discard(1)
            case sw.StopTraining():
                rank.waits = None
            case _ if stayed(effect):
                rank.ends.append(effect)
            case _:
                pass

    def turn(self, name: str, coin: Callable[[], bool]) -> None:
        """One thing that this rank can do now: read a message, vote, or get on with a collective."""
        rank = self.ranks[name]
        if not rank.alive:
            return
        if rank.inbox and (rank.waits is None or coin()):
            self.feed(name, rank.inbox.pop(0))
            return
        if (
            rank.waits is None
            and rank.state.trains
            and rank.state.phase not in (SwitchPhase.IN_DOUBT, SwitchPhase.STOPPED)
        ):
            self.feed(name, sw.Voting())
            rank.waits, rank.said["vote"] = "vote", rank.state.voting
        elif rank.waits is not None:
            self._collective(name, rank, rank.waits, coin)

    def _collective(self, name: str, rank: Rank, kind: str, coin: Callable[[], bool]) -> None:
        members = self._members(rank, kind)
        left = [
            m for m in members if not self.ranks[m].alive or self.ranks[m].state.phase is SwitchPhase.IN_DOUBT
        ]
        arrived = {m: self.ranks[m].said.get(kind) for m in members if kind in self.ranks[m].said}
        done = rank.said.get(kind + "/done")
        if done is None and len(arrived) == len(members):
            result = tuple(arrived[m] for m in members)
            for m in members:
                self.ranks[m].said[kind + "/done"] = result
            done = result
        if done is not None and not (left and coin()):  # a death may cut off the result on its way
            del rank.said[kind], rank.said[kind + "/done"]
            rank.waits = None
            self._completed(name, rank, kind, done)
        elif left:
            rank.said = {}
            rank.waits = None
            event: sw.SwitchEvent
            if kind == "vote":
                event = Shutdown(reason="a member died")
            elif kind == "ok":
                event = sw.GatherFailed(number=2, reason="a member died")
            else:
                event = sw.MoveFailed(number=2, reason="a member died")
            self.feed(name, event)

    def _completed(self, name: str, rank: Rank, kind: str, result: object) -> None:
        assert isinstance(result, tuple)
        if kind == "vote":
            self.votes += 1
            self.feed(name, sw.Voted(prepared=result))
        elif kind == "move":
            self.feed(name, sw.StateMoved(number=2))
        else:
            self.feed(name, sw.Gathered(number=2, oks=result))
            assert all(result) or rank.state.number != 2, "somebody said not ok, and this rank swapped"

    def _members(self, rank: Rank, kind: str) -> tuple[str, ...]:
        if kind == "vote":
            return OLD if rank.state.number == 1 else NEW
        return tuple(self.ranks)

    # invariants -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        living = {name: rank for name, rank in self.ranks.items() if rank.alive}
        swapped = {n for n, r in self.ranks.items() if any(isinstance(e, sw.Swap) for e in r.ends)}
        kept = {n for n, r in self.ranks.items() if any(map(stayed, r.ends))}
        assert not (swapped and kept), f"{swapped} swapped and {kept} kept"
        for name, rank in living.items():
            if rank.state.trains:
                assert rank.state.number in rank.copies, f"{name} trains a plan that it does not hold"
            if rank.state.phase is SwitchPhase.IN_DOUBT:
                assert rank.copies >= ({1} if name in OLD and not self.initial else set())
        if not self.initial and any(1 not in self.ranks[n].copies for n in OLD):
            assert swapped or self.recorded, "the old copy is gone although nobody swapped"
            if not self.recorded:
                assert swapped >= {n for n in NEW if self.ranks[n].alive}

    def settle(self, rng: random.Random, turns: int = 4000) -> None:
        names = list(self.ranks)
        for _ in range(turns):
            self.turn(rng.choice(names), lambda: rng.random() < 0.5)
            self.check()


def propose(world: World) -> None:
    for name, rank in world.ranks.items():
        rank.inbox.append(sw.Proposed(number=2, joins=name in NEW))


@given(seed=st.integers(0, 10**9), abort=st.integers(0, 60) | st.none(), death=st.integers(0, 90) | st.none())
@settings(max_examples=examples(300))
def test_any_order_with_an_abort_and_a_death_at_any_moment(
    seed: int, abort: int | None, death: int | None
) -> None:
    rng = random.Random(seed)
    world = World()
    propose(world)
    names = list(world.ranks)
    for turn in range(140):
        if turn == abort:
            for rank in world.ranks.values():
                rank.inbox.append(Abort(number=2, reason="the leader said so"))
        if turn == death:
            world.ranks[rng.choice(names)].alive = False
        world.turn(rng.choice(names), lambda: rng.random() < 0.5)
        world.check()
    world.settle(rng, 600)
    living = [rank for rank in world.ranks.values() if rank.alive]
    if death is None:
        numbers = {world.ranks[name].state.number for name in ("b", "c")}
        assert numbers in ({1}, {2})
        assert world.votes > 0
        assert not any(rank.state.phase is SwitchPhase.IN_DOUBT for rank in living)
        if abort is None:
            assert numbers == {2}, "without an abort or a death the switch happens"
            assert world.ranks["b"].copies == world.ranks["c"].copies == {2}, "the old copy is dropped"
            assert world.ranks["a"].state.phase is SwitchPhase.STANDBY
            assert world.ranks["a"].copies == {1}, "a leaver keeps its copy until the plan is recorded"
            world.recorded = True
            world.feed("a", Recorded(number=2))
            assert world.ranks["a"].copies == set()


@given(seed=st.integers(0, 10**9))
@settings(max_examples=examples(50))
def test_a_job_starts_as_a_switch_from_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = World(initial=True)
    propose(world)
    world.settle(rng, 300)
    assert {rank.state.number for rank in world.ranks.values()} == {2}


def test_the_life_of_one_rank_interrupted_by_an_abort_after_every_prefix() -> None:
    """Wherever the abort falls, one end follows, and the rank trains on under one plan."""
    life: list[sw.SwitchEvent] = [
        sw.Proposed(number=2, joins=True),
        sw.Voting(),
        sw.Voted(prepared=(0, 0)),
        Prepared(number=2),
        sw.Voting(),
        sw.Voted(prepared=(2, 2)),
        sw.StateMoved(number=2),
    ]
    for cut in range(1, len(life) + 1):
        state = SwitchState(phase=SwitchPhase.TRAINING, number=1, trains=True, seen=1)
        ends: list[sw.SwitchEffect] = []
        said: list[bool] = []
        for event in [*life[:cut], Abort(number=2, reason="x"), *life[cut:]]:
            if isinstance(event, sw.Voted) and event.prepared == (2, 2) and state.voting != 2:
                event = sw.Voted(prepared=(state.voting, 2))
            try:
                state, effects = sw.step(state, event)
            except sw.Unexpected:
                continue  # the rest of a life that the abort ended
            ends += [e for e in effects if stayed(e) or isinstance(e, sw.Swap)]
            said += [e.ok for e in effects if isinstance(e, sw.AllGatherOk)]
        if state.phase is SwitchPhase.ACKING:
            assert said == [cut == len(life)], "after an abort not ok is said"
            state, effects = sw.step(state, sw.Gathered(number=2, oks=(said[0], True)))
            ends += [e for e in effects if stayed(e) or isinstance(e, sw.Swap)]
        assert len(ends) == 1
        assert state.phase is SwitchPhase.TRAINING
        assert state.number == (2 if isinstance(ends[0], sw.Swap) else 1)


def test_a_refusal_votes_zero_until_the_abort() -> None:
    state = SwitchState(phase=SwitchPhase.TRAINING, number=1, trains=True, seen=1)
    state, _ = sw.step(state, sw.Proposed(number=2, joins=True))
    refused = Refused(number=2, reason="no memory")
    state, effects = sw.step(state, refused)
    assert effects == (sw.SendToLeader(message=refused),)
    state, _ = sw.step(state, sw.Voting())
    assert state.voting == 0
    state, _ = sw.step(state, sw.Voted(prepared=(2, 0)))
    state, effects = sw.step(state, Abort(number=2, reason="refused"), 7)
    word = StayedOnPlan(number=2, step=7, reason="refused")
    assert effects == (sw.Cancel(number=2), sw.SendToLeader(message=word)), "after seven updates"
    assert state.phase is SwitchPhase.TRAINING


def test_an_event_that_a_phase_cannot_meet_raises() -> None:
    with pytest.raises(sw.Unexpected, match="Moved of 2 in phase training"):
        sw.step(SwitchState(phase=SwitchPhase.TRAINING, number=1, trains=True), sw.StateMoved(number=2))


def test_the_end_of_a_superseded_move_does_not_touch_the_next() -> None:
    """A joiner waits in vain for plan 1; while it wakes up, plan 2 is already being entered."""
    state, _ = sw.step(SwitchState(), sw.Proposed(number=1, joins=True))
    state, _ = sw.step(state, Prepared(number=1))
    state, effects = sw.step(state, sw.Proposed(number=2, joins=True))
    word = StayedOnPlan(number=1, step=0, reason="superseded by 2")
    assert effects[:2] == (sw.Cancel(number=1), sw.SendToLeader(message=word))
    state, _ = sw.step(state, Prepared(number=2))
    after, effects = sw.step(state, sw.MoveFailed(number=1, reason="shut"))
    assert (after, effects) == (state, ())


def test_a_member_that_reads_only_the_abort_says_that_it_kept() -> None:
    state = SwitchState(phase=SwitchPhase.TRAINING, number=1, trains=True, seen=1)
    state, effects = sw.step(state, Abort(number=2, reason="x"))
    assert effects == (sw.SendToLeader(message=StayedOnPlan(number=2, step=0, reason="x")),)
    assert sw.step(state, Abort(number=2, reason="x")) == (state, ())
    assert sw.step(SwitchState(), Abort(number=2, reason="x"))[1] == (), "a standby kept nothing"


def test_a_proposal_read_twice_is_prepared_once() -> None:
    state, _ = sw.step(SwitchState(), sw.Proposed(number=1, joins=True))
    again, effects = sw.step(state, sw.Proposed(number=1, joins=True))
    assert (again, effects) == (state, ())
