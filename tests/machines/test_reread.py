"""Chaos changes the lengths of a job's sequences: by a plan, on all ranks alike, and for every plan to come."""

from __future__ import annotations

from elasticd.machines.job.state.events import Reread
from elasticd.machines.job.state.job_state import JobPhase
from tests.machines.cast import JOB
from tests.machines.test_coordinator_faults import running
from tests.machines.world import World


def ordered(tokens: int = 256) -> World:
    world = running()
    world.train(20)
    world.say(Reread(job=JOB, tokens=tokens))
    world.settle()
    return world


def test_an_order_is_a_proposal_of_the_plan_in_force_with_other_sequences() -> None:
    world = running()
    world.train(20)
    before = world.plan()
    world.say(Reread(job=JOB, tokens=256))
    world.settle()
    assert world.phase is JobPhase.PROPOSED
    assert world.proposals[-1].plan.sequence == 256
    world.train(2)
    after = world.plan()
    assert before is not None
    assert after is not None
    assert (after.strategies, after.sequence) == (before.strategies, 256)
    assert after.digest != before.digest, "it does not train alike"
    count = len(world.proposals)
    world.train(10)
    assert len(world.proposals) == count, "once"


def test_each_later_plan_keeps_it_also_after_a_fault_and_under_another_leader() -> None:
    world = ordered()
    world.train(2)
    world.new_leader()
    world.settle()
    world.train(5)
    world.kill("beta/1")
    world.settle()
    world.train(20)
    plan = world.plan()
    assert plan is not None
    assert "beta/1" not in plan.members
    assert plan.sequence == 256


def test_what_a_member_cannot_do_is_given_up_for_good() -> None:
    world = running()
    world.train(20)
    world.refuse.add("alpha/0")
    world.say(Reread(job=JOB, tokens=256))
    world.settle()
    world.train(5)
    world.refuse.clear()
    world.train(200)
    plan = world.plan()
    assert plan is not None
    assert plan.sequence == world.job.sequence == 0
    assert "aborted" in world.kinds()


def test_the_data_as_it_was_is_an_order_like_the_others() -> None:
    world = ordered()
    world.train(5)
    world.say(Reread(job=JOB, tokens=0))
    world.settle()
    world.train(2)
    plan = world.plan()
    assert plan is not None
    assert plan.sequence == 0


def test_a_recovery_takes_up_no_order_that_is_still_open() -> None:
    """Members could refuse it, and there is no plan to stay with."""
    world = ordered()
    assert world.phase is JobPhase.PROPOSED
    world.kill("beta/1")
    world.settle()
    assert world.proposals[-1].recovery is not None
    assert world.proposals[-1].plan.sequence == 0
    world.train(20)
    plan = world.plan()
    assert plan is not None
    assert "beta/1" not in plan.members
