"""A stop after any one or two deaths ends soon, with a last checkpoint of those that live."""

from __future__ import annotations

import pytest

from elasticd.machines.job.state.events import StopAsked
from elasticd.machines.job.state.job_state import JobPhase
from tests import sizes
from tests.machines.cast import JOB
from tests.machines.stop_scene import END_SECONDS, StopScene
from tests.machines.test_draining import tell
from tests.machines.test_recovery import running
from tests.machines.walk import whole

SCENES = sizes.number(full=1500, quick=24)


@pytest.mark.parametrize("part", range(2))
def test_stop_after_any_one_or_two_deaths_ends_soon_and_costs_no_step_that_somebody_holds(
    part: int, seed: int
) -> None:
    for number in range(seed + part, seed + SCENES, 2):
        scene = StopScene(number)
        scene.play()
        line = f"scene {number}: {scene.seconds} s, {scene.lost_steps} steps lost: {scene.job.reason}"
        assert scene.over, line
        assert scene.seconds <= END_SECONDS, line
        assert scene.lost_steps == 0 or not whole(scene), line


def test_plan_that_was_asked_for_before_the_stop_is_not_proposed_after_it() -> None:
    world = running()
    world.planner_waits = True
    world.rates = {"beta/1": 4.0}
    for _ in range(30):
        if world.planning is not None:
            break
        world.train(1)
    assert world.planning is not None
    world.say(StopAsked(job=JOB, by="alice", seconds=60.0))
    tell(world, *world.workers, saves=True)
    world.settle()
    proposals = len(world.proposals)
    world.planner_waits = False
    world.settle()
    assert (world.phase, len(world.proposals)) == (JobPhase.RUNNING, proposals)
    assert world.job.planning.asked is None


def test_node_that_is_gone_while_a_proposal_is_given_up_is_fenced_once_the_steps_stop() -> None:
    world = running(("alpha", "beta", "gamma"))
    world.rates = {"beta/1": 4.0}
    world.deaf = {"gamma/0"}
    for _ in range(60):
        if world.phase is JobPhase.PROPOSED:
            break
        world.train(1)
    world.now += 12.0
    world.tick()
    assert world.phase is JobPhase.ABORTING
    for worker in world.workers.values():
        worker.alive = worker.alive and worker.node != "gamma"
    world.cut.add("gamma")
    world.disconnect("gamma")
    for _ in range(12):
        world.tick(1.0)
    assert world.phase is JobPhase.RUNNING, world.job.reason
    plan = world.plan()
    assert plan is not None
    assert not {"gamma/0", "gamma/1"} & {*plan.members}
