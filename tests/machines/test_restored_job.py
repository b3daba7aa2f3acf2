"""A new leader at every point of a life: it goes on from the store and from what agents say again."""

from __future__ import annotations

from functools import cache

import pytest
from elasticd_planner.spec.plan import Strategy

from elasticd.machines.job.state.events import Received
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.wire.worker import StayedOnPlan, Switched
from tests import sizes
from tests.machines.world import World


def live(world: World) -> World:
    """A whole life: start, fit, a device becomes slow, a member refuses once, it recovers, the end."""
    for name in world.records:
        world.join(name)
    world.settle()
    train_until(world, lambda: world.plan() is not None)
    world.train(12)
    world.refuse = {"alpha/0"}
    world.rates = {"beta/1": 3.0}
    world.train(5)
    world.refuse = set()
    world.train(18)
    world.rates = {}
    world.train(12)
    world.finish()
    world.settle()
    world.tick(5.0)
    return world


def train_until(world: World, reached: object) -> None:
    assert callable(reached)
    for _ in range(20):
        if reached():
            return
        world.train(1)
    raise AssertionError(f"the job got stuck in {world.phase}: {world.job.reason}")


def last(world: World) -> tuple[Strategy, ...]:
    plan = world.plan()
    assert plan is not None
    return plan.strategies


@cache
def undisturbed() -> World:
    return live(World())


def test_undisturbed_life_goes_through_every_turn() -> None:
    world = undisturbed()
    kinds = set(world.kinds())
    assert {"fitted", "slow", "aborted", "recovered", "recorded", "finished"} <= kinds
    assert world.phase is JobPhase.DONE
    assert len(world.recorded) >= 4


HOWS = ("before", "between", "after")


@pytest.mark.parametrize("how", sizes.beside(["between"], HOWS))
def test_new_leader_at_any_event_ends_in_the_same_plan(how: str) -> None:
    """`how`: the old leader ends before it did anything about the event, after its writes alone, or after
    all of it. The world checks the machine's invariants at every write."""
    reference = undisturbed()
    for event in sizes.every(range(1, reference.events + 1), 3 * len(HOWS), 3 * HOWS.index(how)):
        world = World()
        world.crash_at, world.crash_how = event, how
        live(world)
        where = f"a new leader {how} event {event}"
        assert world.state.epoch == 2, where
        assert world.phase is JobPhase.DONE, f"{where}: {world.phase} {world.job.reason}"
        assert last(world) == last(reference), where
        assert world.numbers == sorted(set(world.numbers)), where
        assert len({worker.plan for worker in world.workers.values()}) == 1, where


def proposed() -> World:
    world = World()
    world.start()
    world.train(14)
    world.rates = {"beta/1": 3.0}
    while world.phase is not JobPhase.PROPOSED:
        world.train(1)
    return world


def test_new_leader_neither_aborts_nor_proposes_before_the_members_reported() -> None:
    world = proposed()
    number = world.numbers[-1]
    world.new_leader()
    world.inbox.clear()
    world.reconnect("alpha")
    world.tick(2.0)
    proposal = world.proposal()
    assert proposal is not None
    assert (proposal.number, proposal.status) == (number, "open")
    world.tick(1.5)
    proposal = world.proposal()
    assert proposal is not None
    assert proposal.status == "aborted", "beta was given its time"


def test_new_leader_records_a_swap_that_nobody_had_recorded() -> None:
    world = proposed()
    world._vote()
    world.new_leader()
    world.settle()
    plan = world.plan()
    assert plan is not None
    assert plan.number == world.numbers[-1]


def test_new_leader_finishes_an_abort_once_all_old_members_said_again_that_they_kept() -> None:
    world = proposed()
    world.deaf = {"alpha/1"}
    worker = world.workers["beta/0"]
    world.outcome(worker, StayedOnPlan(number=world.numbers[-1], step=world.steps, reason="not ok"))
    world.settle()
    assert world.phase is JobPhase.ABORTING
    world.new_leader()
    world.settle()
    assert world.phase is JobPhase.ABORTING
    world.outcome(world.workers["alpha/1"], StayedOnPlan(number=world.numbers[-1], step=world.steps))
    world.settle()
    assert world.phase is JobPhase.RUNNING


def test_new_leader_hears_of_an_end_from_workers_that_are_gone() -> None:
    world = proposed()
    world.finish()
    world.inbox.clear()
    for worker in world.workers.values():
        worker.alive = False
    world.new_leader()
    world.settle()
    assert world.phase is JobPhase.DONE


def test_worker_that_died_while_nobody_led_stops_the_job() -> None:
    world = proposed()
    world.workers["beta/1"].alive = False
    world.new_leader()
    world.settle()
    assert world.phase is JobPhase.RECOVERING, "agents may still come that keep its state"
    world.tick(3.0)
    assert world.phase is JobPhase.STOPPED
    assert "beta/1" in world.job.reason


def test_worker_that_vanished_without_a_word_stops_the_job_after_the_interval() -> None:
    world = proposed()
    world.workers["beta/1"].alive = False
    world.forgotten = {"beta/1"}
    world.new_leader()
    world.settle()
    world.tick(2.0)
    assert world.phase is JobPhase.PROPOSED
    world.tick(1.5)
    assert world.phase is JobPhase.PROPOSED
    assert "beta/1 may live, and hold what nobody else does" in world.job.reason
    for _ in range(int(world.settings.lone_seconds) + 5):
        world.tick(1.0)
    assert world.phase is JobPhase.STOPPED
    assert "beta/1" in world.job.reason
    assert "state is lost" in world.job.reason


@pytest.mark.parametrize("how", ["stopped", "done"])
def test_new_leader_says_the_end_again_under_its_own_epoch_where_workers_live_still(how: str) -> None:
    """Their agents may have missed it, and refuse the word of the leader before."""
    world = proposed()
    if how == "stopped":
        world.kill("beta/1")
    else:
        world.finish()
    world.settle()
    before = world.done()
    assert before is not None
    world.new_leader()
    world.settle()
    after = world.done()
    assert after is not None
    assert (after.step, after.reason) == (before.step, before.reason)
    assert after.epoch == before.epoch + 1 == world.state.epoch
    world.reconnect("alpha")
    world.settle()  # the world's check would find a second time


def test_statements_repeated_by_agents_change_nothing() -> None:
    world = proposed()
    world.train(3)
    before, numbers = world.plan(), list(world.numbers)
    for _ in range(3):
        world.reconnect("alpha")
        world.reconnect("beta")
        world.settle()
    assert world.plan() == before
    assert world.numbers == numbers
    told = [note for note in world.notes if note.kind == "swapped" and note.data["number"] == numbers[-1]]
    assert len(told) == 4, "each member's swap is told once"


def test_swap_to_a_plan_that_another_followed_is_old_news() -> None:
    world = proposed()
    world.train(3)
    worker = world.workers["alpha/0"]
    old = Switched(number=1, step=0, pause_seconds=0, bytes_sent=0, bytes_lacking=0, bytes_state=0)
    world.say(Received(node="alpha", message=worker.up(old)))
    world.settle()
    plan = world.plan()
    assert plan is not None
    assert plan.number == world.numbers[-1]
