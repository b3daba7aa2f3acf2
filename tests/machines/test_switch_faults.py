"""Faults, rank by rank: wherever deaths fall, the survivors go on under one plan, from one step.

`World` plays the ranks' machines and a leader that fences, asks and recovers, as the coordinator's does. Of the
state only this is played: which copy a rank holds, and how many updates it has made in it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.machines.worker import switch as sw
from elasticd.machines.worker.switch import SwitchPhase, SwitchState
from elasticd.wire.worker import (
    Abort,
    Fenced,
    InDoubt,
    PeersLost,
    Prepared,
    Recorded,
    Rejected,
    Shutdown,
    StayedOnPlan,
)
from tests.sizes import examples

NAMES = ("a", "b", "c", "d", "e")


@dataclass
class Rank:
    """`copies`: plan number to updates made; `reduced`: the step whose gradients are kept for its update."""

    state: SwitchState = field(default_factory=SwitchState)
    alive: bool = True
    copies: dict[int, int] = field(default_factory=dict)
    inbox: list[sw.SwitchEvent] = field(default_factory=list)
    waits: str = ""
    said: object = None
    standing: dict[int, dict[int, int]] = field(default_factory=dict)
    updates: list[tuple[int, int]] = field(default_factory=list)
    interrupted: bool = False
    incarnation: int = 0


class World:
    """Ranks, and a leader that knows who died. `plans`: members by number."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.ranks = {name: Rank() for name in NAMES}
        self.plans: dict[int, tuple[str, ...]] = {1: ("a", "b", "c")}
        self.number = 1
        self.recorded = 1
        self.fence = 0
        self.open = 0
        self.steps: dict[int, int] = {}
        self.prepared: dict[int, set[str]] = {}
        self.groups: dict[int, tuple[str, ...]] = {}
        self.aborting = False
        self.kept: set[tuple[int, str]] = set()
        self.source = 1
        self.results: dict[tuple[int, str, int], tuple[object, ...]] = {}
        for name in self.plans[1]:
            rank = self.ranks[name]
            rank.state = SwitchState(phase=SwitchPhase.TRAINING, number=1, trains=True, seen=1)
            rank.copies = {1: 0}

    # the leader -------------------------------------------------------------------------------------------

    def living(self) -> tuple[str, ...]:
        return tuple(name for name, rank in self.ranks.items() if rank.alive)

    def propose(self) -> None:
        """An ordinary switch, to other members."""
        if self.open or self.fence:
            return
        self.number += 1
        self.open = self.number
        size = self.rng.randint(1, len(self.living()))
        self.plans[self.number] = tuple(sorted(self.rng.sample(self.living(), size)))
        self.source = self.recorded
        self._propose()

    def _propose(self) -> None:
        """To the members of both plans, as agents do."""
        wanted = {*self.plans[self.open], *self.plans[self.source]}
        alive = set(self.living()) if self.fence else set(NAMES)
        self.groups[self.open] = tuple(name for name in NAMES if name in wanted & alive)
        for name in self._transition(self.open):
            if self.ranks[name].alive:
                self.ranks[name].inbox.append(
                    sw.Proposed(number=self.open, joins=name in self.plans[self.open])
                )

    def give_up(self) -> None:
        """What was not prepared in time: an abort, or for a recovery another fence."""
        if self.open and self.fence:
            self.write_fence()
        elif self.open:
            self._tell(lambda name, number=self.open: Abort(number=number, reason="late"))  # type: ignore[misc]
            self.aborting = True

    def write_fence(self) -> None:
        self.number += 1
        self.fence, self.open, self.aborting = self.number, 0, False
        self._tell(lambda name: Fenced(number=self.fence, reason="death"))

    def _tell(self, event: object) -> None:
        for name in self.living():
            self.ranks[name].inbox.append(event(name))  # type: ignore[operator]

    def recover(self) -> None:
        """Once all that live have stood: the farthest copy, those behind it brought along by the vote."""
        held = {name: self.ranks[name].standing.get(self.fence) for name in self.living()}
        if not self.fence or self.open or any(copies is None for copies in held.values()):
            return
        options = [(step, number) for copies in held.values() for number, step in (copies or {}).items()]
        if not options:
            return
        step, source = max(options)
        for name, copies in held.items():
            if source in (copies or {}) and self.ranks[name].copies[source] == step - 1:
                assert self.ranks[name].said != "unreduced", "a vote completed without this rank's gradients"
                self.ranks[name].copies[source] = step
        sources = [name for name, copies in held.items() if source in (copies or {})]
        assert all(self.ranks[name].copies[source] == step for name in sources), "sources are at one step"
        self.number += 1
        self.open, self.source = self.number, source
        size = self.rng.randint(1, len(self.living()))
        self.plans[self.open] = tuple(sorted(self.rng.sample(self.living(), size)))
        self._propose()

    def _transition(self, number: int) -> tuple[str, ...]:
        """Old and new members; after a fence only those that lived when the recovery was proposed."""
        return self.groups[number]

    # the ranks --------------------------------------------------------------------------------------------

    def feed(self, name: str, event: sw.SwitchEvent) -> None:
        rank = self.ranks[name]
        rank.state, effects = sw.step(rank.state, event)
        for effect in effects:
            self._effect(name, rank, effect)

    def _effect(self, name: str, rank: Rank, effect: sw.SwitchEffect) -> None:
        match effect:
            case sw.Prepare(number=n):
                self.prepared.setdefault(n, set()).add(name)
                if self.prepared[n] == set(self.groups[n]):  # the transition group stands for all at once
                    for member in self.groups[n]:
                        self.ranks[member].inbox.append(Prepared(number=n))
                rank.interrupted = rank.interrupted and rank.state.trains and not rank.state.fenced
            case sw.MoveState():
                rank.waits, rank.said = "move", True
            case sw.AllGatherOk(ok=ok):
                rank.waits, rank.said = "ok", ok
            case sw.Swap(number=n, member=member):
                if member:
                    rank.copies[n] = self.steps[n]
                rank.waits = ""
                if n > self.recorded:
                    self.recorded = n
                    self._tell(lambda name: Recorded(number=n))
                    if n == self.open:
                        self.open, self.fence, self.aborting = 0, 0, False
            case sw.SendToLeader(message=StayedOnPlan(number=n)):
                self.kept.add((n, name))
                if n == self.open and not self.aborting:
                    self.give_up()
                if n == self.open and all((n, m) in self.kept for m in self.plans[self.recorded]):
                    self.open, self.aborting = 0, False
            case sw.SendToLeader(message=InDoubt() | PeersLost()):
                if not self.fence:
                    self.write_fence()
            case sw.ReportState(fence=fence):
                copies = dict(rank.copies)
                if rank.state.side and name in self.plans[rank.state.side]:
                    copies[rank.state.side] = self.steps[rank.state.side]
                rank.standing[fence] = copies
                rank.copies = copies
            case sw.DropOld():
                rank.copies = {
                    n: s for n, s in rank.copies.items() if n == rank.state.number and rank.state.trains
                }
            case sw.DropState():
                rank.copies = {}
            case sw.Interrupt():
                rank.interrupted = True
            case sw.Cancel(number=n):
                rank.waits = "" if rank.waits in ("move", "ok") else rank.waits
            case _:
                pass

    def turn(self, name: str) -> None:
        rank = self.ranks[name]
        if not rank.alive:
            return
        if rank.inbox and self.rng.random() < 0.6:
            self.feed(name, rank.inbox.pop(0))
        elif rank.waits:
            self._collective(name, rank)
        elif rank.state.phase is SwitchPhase.STOPPING:
            rank.interrupted = False
            self.feed(name, sw.Rested())
        elif rank.state.at_work:
            rank.interrupted = False
            self.feed(name, sw.Voting())
            rank.waits, rank.said = "vote", rank.state.voting

    def _key(self, rank: Rank) -> tuple[int, str, int]:
        if rank.waits == "vote":
            return rank.state.number, "vote", rank.copies[rank.state.number]
        return rank.state.proposal, rank.waits, 0

    def _collective(self, name: str, rank: Rank) -> None:
        key = self._key(rank)
        members = (
            self.plans[rank.state.number] if rank.waits == "vote" else self._transition(rank.state.proposal)
        )
        if key not in self.results:
            here = [self.ranks[m] for m in members]
            if all(r.alive and r.waits and self._key(r) == key and not r.interrupted for r in here):
                self.results[key] = tuple(r.said for r in here)
                if key[1] == "move":  # all are there: what moves is of one step
                    self.steps[key[0]] = max(r.copies.get(self.source, 0) for r in here)
        others = [self.ranks[m] for m in members]
        broken = rank.interrupted or any(not r.alive or r.interrupted for r in others)
        if rank.waits == "vote":  # who rests, or moves on to a recovery, votes no more
            broken = broken or any(r.state.fenced or r.state.phase is SwitchPhase.PEERS_LOST for r in others)
        kind, number = rank.waits, rank.state.proposal
        if key in self.results and not (broken and self.rng.random() < 0.5):
            rank.waits = ""
            result = self.results[key]
            if kind == "vote":
                assert not rank.state.fenced or rank.state.phase is SwitchPhase.STOPPING
                rank.copies[rank.state.number] += 1
                rank.updates.append((rank.state.number, rank.copies[rank.state.number]))
                self.feed(name, sw.Voted(prepared=result))  # type: ignore[arg-type]
            elif kind == "move":
                self.feed(name, sw.StateMoved(number=number))
            else:
                self.feed(name, sw.Gathered(number=number, oks=result))  # type: ignore[arg-type]
        elif broken:
            rank.waits = ""
            event: sw.SwitchEvent = PeersLost(step=0, reason="broken")
            if kind == "move":
                event = sw.MoveFailed(number=number, reason="broken")
            elif kind == "ok":
                event = sw.GatherFailed(number=number, reason="broken")
            self.feed(name, event)

    def kill(self, name: str) -> bool:
        """Only if every copy that may be needed stays with another: each is a whole state here."""
        others = [n for n in self.living() if n != name]
        safe = [n for n in others if any(number >= self.recorded for number in self.ranks[n].copies)]
        if len(others) < 2 or not safe:
            return False
        self.ranks[name].alive = False
        return True

    def settled(self) -> bool:
        """All that live train one plan, or stand by (a joiner waits in vain until the next proposal)."""
        states = [self.ranks[name].state for name in self.living()]
        rest = {SwitchPhase.TRAINING, SwitchPhase.STANDBY}
        training = {s.number for s in states if s.phase is SwitchPhase.TRAINING}
        resting = all(s.phase in rest or not (s.trains or s.fenced) for s in states)
        return resting and len(training) == 1


@given(seed=st.integers(0, 10**9), deaths=st.lists(st.integers(0, 120), max_size=2))
@settings(max_examples=examples(400))
def test_wherever_deaths_fall_the_survivors_go_on_under_one_plan(seed: int, deaths: list[int]) -> None:
    rng = random.Random(seed)
    world = World(rng)
    dead = 0
    for turn in range(160):
        if rng.random() < 0.05:
            world.propose()
        if turn in deaths and world.kill(rng.choice(world.living())):
            dead += 1
            if rng.random() < 0.5:
                world.write_fence()  # its agent saw it before anybody lost it
        world.turn(rng.choice(NAMES))
        world.recover()
    for _ in range(6000):
        if world.settled() and not world.open:
            break
        lost = [n for n in world.plans[world.recorded] if not world.ranks[n].alive]
        if (lost or (world.open and not all(world.ranks[n].alive for n in world._transition(world.open)))) and (
            not world.fence or (world.open and rng.random() < 0.02)
        ):
            world.write_fence()
        elif world.open and not world.aborting and rng.random() < 0.005:
            world.give_up()
        world.turn(rng.choice(NAMES))
        world.recover()
    assert world.settled(), {n: world.ranks[n].state for n in world.living()}
    made: dict[int, set[str]] = {}
    for name in world.living():
        rank = world.ranks[name]
        in_force = {rank.state.number} if rank.state.trains else set()
        assert rank.state.holds_old or rank.copies.keys() <= in_force, f"{name} will never drop {rank.copies}"
        if rank.state.phase is SwitchPhase.TRAINING:
            assert rank.state.number in rank.copies
            made.setdefault(rank.copies[rank.state.number], set()).add(name)
    assert max(made) - min(made) <= 1, "who trains is at most one vote apart"


def test_after_a_fence_nothing_is_updated_until_a_recovery_swapped() -> None:
    state = SwitchState(phase=SwitchPhase.TRAINING, number=1, trains=True, seen=1)
    state, effects = sw.step(state, Fenced(number=2, reason="death"))
    assert effects == (sw.Interrupt(),)
    state, effects = sw.step(state, PeersLost(step=0, reason="shut"))
    assert (state.phase, effects) == (SwitchPhase.FENCED, (sw.ReportState(fence=2),))
    state, _ = sw.step(state, sw.Proposed(number=3, joins=True))
    state, effects = sw.step(state, Prepared(number=3))
    assert effects == (sw.SendToLeader(message=Prepared(number=3)), sw.MoveState(number=3)), "without a vote"
    state, _ = sw.step(state, sw.StateMoved(number=3))
    state, effects = sw.step(state, sw.Gathered(number=3, oks=(True, True)))
    assert state.phase is SwitchPhase.TRAINING
    assert (state.number, state.fenced, state.holds_old) == (3, False, True)


def test_a_verified_copy_outlives_the_doubt() -> None:
    state = SwitchState(
        phase=SwitchPhase.ACKING, number=1, trains=True, joins=True, seen=2, proposal=2, ok=True
    )
    state, _ = sw.step(state, sw.GatherFailed(number=2, reason="reset"))
    assert state.phase is SwitchPhase.IN_DOUBT
    state, effects = sw.step(state, Fenced(number=3, reason="death"))
    assert state.phase is SwitchPhase.FENCED
    assert state.side == 2, "no cancel: the others may have swapped"
    assert not any(isinstance(effect, sw.Cancel) for effect in effects)
    assert effects[-1] == sw.ReportState(fence=3)


@pytest.mark.parametrize("joins", [True, False])
def test_a_verified_copy_that_others_go_on_from_is_dropped_as_an_old_one(joins: bool) -> None:
    """By one that was to join: it trained under no plan before."""
    state = SwitchState()
    life: list[sw.SwitchEvent] = [
        sw.Proposed(number=2, joins=True),
        Prepared(number=2),
        sw.StateMoved(number=2),
        sw.GatherFailed(number=2, reason="reset"),
        Fenced(number=3, reason="death"),
        sw.Proposed(number=4, joins=joins),
        Prepared(number=4),
        sw.StateMoved(number=4),
        sw.Gathered(number=4, oks=(True, True)),
    ]
    for event in life:
        state, effects = sw.step(state, event)
        assert sw.DropOld() not in effects, "one that did not hear of the end may go on from it"
    assert state.holds_old
    ends: list[sw.SwitchEvent] = [sw.Voting(), sw.Voted(prepared=(0, 0))] if joins else [Recorded(number=4)]
    for event in ends:
        state, effects = sw.step(state, event)
    assert sw.DropOld() in effects
    assert not state.holds_old


def test_an_evicted_rank_drops_its_state_only_at_rest() -> None:
    state = SwitchState(phase=SwitchPhase.TRAINING, number=1, trains=True, seen=1)
    state, effects = sw.step(state, Fenced(number=2, reason="death", evicted=True))
    assert effects == (sw.Interrupt(),)
    state, effects = sw.step(state, sw.Rested())
    assert effects == (sw.DropStateAndRejoin(),)
    assert state == SwitchState(seen=2, fence=2)


def test_a_fenced_rank_does_not_go_back_to_a_proposal_that_it_put_off_before_a_newer_one() -> None:
    state = SwitchState(phase=SwitchPhase.FENCED, number=1, trains=True, fenced=True, fence=2, seen=2)
    effects: tuple[sw.SwitchEffect, ...] = ()
    for event in (
        *(sw.Proposed(number=3, joins=True), Prepared(number=3), sw.StateMoved(number=3)),
        *(sw.Proposed(number=4, joins=True), sw.Gathered(number=3, oks=(True, False))),
        *(sw.Proposed(number=5, joins=True), Prepared(number=5), sw.StateMoved(number=5)),
        sw.Gathered(number=5, oks=(True, True)),
    ):
        state, effects = sw.step(state, event, 7)
    assert (state.phase, state.number, state.seen) == (SwitchPhase.TRAINING, 5, 5)
    assert effects == (sw.Swap(number=5, member=True),)


def test_a_worker_that_the_leader_does_not_take_is_refused_and_one_whose_job_ended_is_not() -> None:
    for order, is_refused in ((Rejected(reason="another release"), True), (Shutdown(reason="over"), False)):
        _, (effect,) = sw.step(SwitchState(), order)
        assert effect == sw.StopTraining(reason=order.reason, refused=is_refused)


def test_the_end_may_come_between_two_steps() -> None:
    """The main thread has not heard of it when it takes its number for the vote, and hears its outcome."""
    state, effects = sw.step(SwitchState(trains=True), Shutdown(reason="over"))
    assert effects == (sw.StopTraining(reason="over"),)
    for event in (sw.Voting(), sw.Voted(prepared=(0, 0)), PeersLost(step=0, reason="they ended too")):
        state, effects = sw.step(state, event)
        assert (state.phase, effects) == (SwitchPhase.STOPPED, ())
