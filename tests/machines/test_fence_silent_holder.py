"""A survivor that answered an earlier fence and cannot be reached now may hold what nobody else does."""

from __future__ import annotations

import pytest

from elasticd.machines.job.state.job_state import JobPhase
from elasticd.wire.worker import PeersLost
from tests.machines.test_recovery import recovered, running
from tests.machines.world import World


def alone() -> World:
    """alpha/1 is the last that lives; it answered the first fence, and its node went away before the second."""
    world = running()
    world.planner_waits = True  # so that the first recovery is not proposed before the second fault
    world.kill("beta/0")
    world.kill("beta/1")
    world.settle()
    standing = world.job.workers["alpha/1"].standing
    assert standing is not None
    assert standing.fence == world.job.highest
    world.cut, world.deaf = {"alpha"}, {"alpha/1"}
    world.kill("alpha/0")
    world.disconnect("alpha")
    standing = world.job.workers["alpha/1"].standing
    assert standing is not None
    assert standing.fence < world.job.highest, "it answered the fence before"
    return world


def test_it_is_waited_for_although_it_answered_only_the_fence_before() -> None:
    world = alone()
    world.planner_waits = False
    for _ in range(20):
        world.tick(1.0)
    assert world.phase is JobPhase.RECOVERING
    assert "alpha/1 may live, and hold what nobody else does" in world.job.reason


def test_the_job_goes_on_from_it_when_it_is_back() -> None:
    world = alone()
    world.planner_waits = False
    for _ in range(20):
        world.tick(1.0)
    world.cut, world.deaf = set(), set()
    world.reconnect("alpha")
    world.thaw("alpha/1")
    world.settle()
    for _ in range(5):
        world.tick(1.0)
    assert recovered(world), world.job.reason
    plan = world.plan()
    assert plan is not None
    assert plan.members == ("alpha/1",)


def split() -> World:
    """Each device holds what no other does, and nothing was saved; beta was cut off, so the steps stop."""
    world = running(memory=3_000_000)  # no room for replicas
    plan = world.plan()
    assert plan is not None
    assert plan.nodes == {"alpha", "beta"}
    world.cut = {"beta"}
    world.disconnect("beta")
    for device in plan.members:
        if device.startswith("alpha/"):
            world.up(device, PeersLost(plan=world.job.number, step=world.steps, reason="reset"))
    return world


@pytest.mark.parametrize("seconds", [1, 30])
def test_a_node_that_alone_holds_some_state_is_waited_for(seconds: int) -> None:
    world = split()
    before = world.plan()
    for _ in range(seconds):
        world.tick(1.0)
    assert world.phase is JobPhase.RUNNING, world.job.reason
    assert "node beta cannot be reached" in world.job.reason
    assert "nobody else holds" in world.job.reason
    world.cut = set()
    world.reconnect("beta")
    world.settle()
    for _ in range(5):
        world.tick(1.0)
    assert recovered(world), world.job.reason
    after = world.plan()
    assert before is not None
    assert after is not None
    assert after.binding == before.binding, "nobody is lost"


def test_but_not_for_ever() -> None:
    world = split()
    for _ in range(70):
        world.tick(1.0)
    assert world.phase is JobPhase.STOPPED
    assert "node beta cannot be reached" in world.job.reason
    assert "state is lost" in world.job.reason


def all_away() -> World:
    """Nobody could be reached for a while, and alpha's agent is the first to be back: the workers train on."""
    world = running()
    world.cut = {"alpha", "beta"}
    for node in ("alpha", "beta"):
        world.disconnect(node)
    for _ in range(10):
        world.tick(1.0)
    world.cut = {"beta"}
    world.reconnect("alpha")
    world.settle()
    return world


def test_steps_of_a_time_in_which_nobody_could_tell_of_them_are_not_missed() -> None:
    world = all_away()
    world.tick(0.1)
    assert "fenced" not in world.kinds(), "beta's agent is on its way as well"
    world.cut = set()
    world.reconnect("beta")
    world.settle()
    world.train(3)
    world.tick(0.1)
    assert world.phase is JobPhase.RUNNING
    assert "fenced" not in world.kinds()


def test_a_node_that_stays_away_is_missed_once_those_that_are_back_tell_of_no_step() -> None:
    world = all_away()
    for _ in range(10):
        world.tick(1.0)
    (fence,) = [note.text for note in world.notes if note.kind == "fenced"]
    assert "node beta cannot be reached, and the job's steps have stopped" in fence
