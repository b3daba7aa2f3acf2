"""While replanning is paused plans stay; faults and drains are answered; afterwards all goes on."""

from __future__ import annotations

import msgspec

from elasticd.machines.job.state.events import Configured
from elasticd.machines.job.state.job_state import JobPhase
from tests.machines.test_recovery import recovered, running
from tests.machines.world import World


def paused(world: World, on: bool) -> None:
    settings = world.state.settings
    policy = msgspec.structs.replace(settings.policy, paused=on)
    world.say(Configured(detect=settings.detect, policy=policy, changes="by a test"))
    world.settle()


def slowed(world: World) -> None:
    world.train(12)
    world.rates["beta/1"] = 3.0
    world.train(12)


def test_a_slow_device_costs_no_plan_until_replanning_goes_on() -> None:
    world = running()
    world.train(12)
    paused(world, on=True)
    number = world.job.number
    slowed(world)
    assert "slow" in world.kinds(), "it is still found"
    assert world.job.number == number
    paused(world, on=False)
    world.train(12)
    assert world.job.number > number


def test_a_death_is_answered_all_the_same() -> None:
    world = running()
    paused(world, on=True)
    world.kill("beta/1")
    world.settle()
    assert recovered(world)


def test_an_answer_that_comes_while_paused_is_not_followed_but_asked_for_again() -> None:
    world = running()
    world.train(12)
    world.planner_waits = True
    slowed(world)
    assert world.planning is not None
    number = world.job.number
    paused(world, on=True)
    world.planner_waits = False
    world.train(3)
    assert (world.job.number, world.phase) == (number, JobPhase.RUNNING)
    paused(world, on=False)
    world.train(12)
    assert world.job.number > number
