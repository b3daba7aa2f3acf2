"""No phase lasts for ever without a word: an event names who is missing, and the job stops with that."""

from __future__ import annotations

import pytest

from elasticd.machines.job.lifecycle.phase_time import waited_seconds
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.wire.worker import Rejected, StayedOnPlan
from tests.machines.test_restored_job import proposed
from tests.machines.world import World

DAY = 86_400.0


def waiting(world: World) -> list[str]:
    return [note.text for note in world.notes if note.kind == "waiting"]


def assembling(*missing: str) -> World:
    """A job whose torchruns are there, and whose workers on these nodes never say hello."""
    world = World()
    world.cut = {*missing}
    for node in world.records:
        world.join(node)
    world.settle()
    assert world.phase is JobPhase.ASSEMBLING
    return world


def test_torchruns_that_wait_for_others_are_told_that_none_came() -> None:
    world = World(("alpha", "beta", "gamma"))
    world.join("alpha", 3, 3)
    world.settle()
    world.tick(800.0)
    world.join("beta", 3, 3)
    world.settle()
    world.tick(899.0)
    assert world.phase is JobPhase.GATHERING, "the time counts from the last one that came"
    assert waited_seconds(world.job, world.now) == 899.0
    world.tick(2.0)
    assert world.phase is JobPhase.STOPPED
    assert world.job.reason.startswith("waits for 1 of 3 nodes (alpha, beta are there)")
    assert "assemble_seconds" in world.job.reason
    assert not world.job.ending.orderly
    assert all(isinstance(world.told[f"t{node}"][-1], Rejected) for node in ("alpha", "beta"))
    assert waited_seconds(world.job, world.now) == 0.0


def test_workers_that_never_come_to_their_job_are_named_and_end_it() -> None:
    world = assembling("beta")
    world.tick(59.0)
    assert waiting(world) == []
    world.tick(2.0)
    text = (
        "its workers run, and 2 of 4 have made an elasticd.Job or called elasticd.live so far; missing: 2 "
        "workers of node beta"
    )
    assert waiting(world) == [f"waiting: {text}"]
    assert world.job.reason == text
    world.cut = set()
    world.up("beta/1", world.hello(world.workers["beta/1"]))
    world.settle()
    world.tick(898.0)
    assert world.phase is JobPhase.ASSEMBLING
    assert "3 of 4" in world.job.reason
    assert len(waiting(world)) == 1, "once"
    world.tick(2.0)
    assert world.phase is JobPhase.STOPPED
    assert "missing: 1 worker of node beta; it has waited for 900 s" in world.job.reason


def test_workers_that_come_at_last_leave_nothing_of_the_wait() -> None:
    world = assembling("beta")
    world.tick(70.0)
    assert world.job.reason
    world.cut = set()
    for device in ("beta/0", "beta/1"):
        world.up(device, world.hello(world.workers[device]))
    world.settle()
    assert world.phase not in (JobPhase.ASSEMBLING, JobPhase.STOPPED)
    assert not world.job.reason


def test_script_that_makes_no_job_is_told_of_and_not_ended() -> None:
    world = assembling("alpha", "beta")
    world.tick(61.0)
    assert waiting(world) == [
        "waiting: its workers run, and none has made an elasticd.Job or called elasticd.live so far"
    ]
    assert waited_seconds(world.job, world.now) == 0.0, "nobody waits"
    world.tick(10 * DAY)
    assert world.phase is JobPhase.ASSEMBLING


def test_job_whose_torchruns_went_with_the_leader_before_it_began_ends() -> None:
    world = assembling("beta")
    world.joins.clear()
    world.workers.clear()
    world.new_leader()
    world.settle()
    world.tick(899.0)
    assert (world.phase, world.job.start.joined) == (JobPhase.ASSEMBLING, ())
    world.tick(2.0)
    assert world.phase is JobPhase.STOPPED
    assert world.job.reason.startswith("the torchruns of its workers have not come back")


def test_job_whose_node_went_before_the_first_plan_names_it_and_ends() -> None:
    world = assembling("alpha")
    world.disconnect("beta")
    world.cut = set()
    for device in ("alpha/0", "alpha/1"):
        world.up(device, world.hello(world.workers[device]))
    world.settle()
    assert world.phase is JobPhase.PLANNING
    world.tick(61.0)
    text = "the first plan waits for node beta, whose agent cannot be reached"
    assert waiting(world) == [f"waiting: {text}"]
    world.tick(900.0)
    assert world.phase is JobPhase.STOPPED
    assert world.job.reason.startswith(text)


def aborting() -> World:
    """A plan that was given up, and a member that does not say that it kept the old one."""
    world = proposed()
    world.deaf = {"alpha/1"}
    worker = world.workers["beta/0"]
    world.outcome(worker, StayedOnPlan(number=world.numbers[-1], step=world.steps, reason="not ok"))
    world.settle()
    assert world.phase is JobPhase.ABORTING
    return world


def test_job_that_trains_while_a_member_does_not_say_which_plan_it_kept_is_told_of_and_trains_on() -> None:
    world = aborting()
    steps = world.steps
    world.train(1000)
    assert world.steps == steps + 1000
    assert world.phase is JobPhase.ABORTING
    text = f"alpha/1 did not say so far that plan {world.job.number} goes on; until then it is not planned anew"
    assert waiting(world) == [f"waiting: {text}"]
    world.outcome(world.workers["alpha/1"], StayedOnPlan(number=world.numbers[-1], step=world.steps))
    world.settle()
    assert world.phase is JobPhase.RUNNING
    world.train(1)
    assert not world.job.reason


def test_job_that_waits_for_such_a_member_without_steps_is_fenced() -> None:
    world = aborting()
    world.tick(899.0)
    assert world.phase is JobPhase.ABORTING
    world.tick(2.0)
    assert world.phase is not JobPhase.ABORTING
    assert world.job.losses.fence is not None
    assert "alpha/1 did not say" in world.job.losses.fence.reason


@pytest.mark.parametrize("taken_over", [False, True])
def test_job_that_waits_for_its_state_for_a_week_ends_with_whom_it_waits_for(taken_over: bool) -> None:
    world = World()
    world.start()
    world.train(3)
    world.deaf = {"beta/0", "beta/1"}
    world.cut = {"beta"}
    world.disconnect("beta")
    world.kill("alpha/0")
    world.settle()
    world.tick(60.0)
    assert world.phase is JobPhase.RECOVERING
    reason = world.job.reason
    assert "beta/0" in reason
    if taken_over:
        world.records.pop("beta")
        world.new_leader()
        world.settle()
    world.tick(6 * DAY)
    assert world.phase is JobPhase.RECOVERING
    world.tick(1.1 * DAY)
    assert world.phase is JobPhase.STOPPED
    assert "beta/0" in world.job.reason
    assert "recover_days" in world.job.reason
