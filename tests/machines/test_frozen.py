"""A worker that does not answer its agent: no loss while the job goes on, one once its steps have stopped."""

from __future__ import annotations

from elasticd_planner.spec.cluster import node_of

from elasticd.machines.job.state.events import Received
from elasticd.machines.job.state.job_state import JobPhase, JobSettings
from elasticd.wire.coordinator import Frozen
from tests.machines.cast import JOB
from tests.machines.test_recovery import recovered, running
from tests.machines.world import World

HOW = "it is stopped"


def freeze(world: World, device: str, how: str = HOW) -> None:
    worker = world.workers[device]
    told = Frozen(job=JOB, device=device, incarnation=worker.incarnation, how=how)
    world.say(Received(node=node_of(device), message=told))
    world.settle()


def test_a_frozen_worker_is_fenced_off_once_the_steps_have_stopped() -> None:
    world = running()
    freeze(world, "beta/1")
    world.train(2)
    assert "fenced" not in world.kinds(), "the job goes on all the same: a debugger, or a false alarm"
    world.deaf.add("beta/1")
    world.tick(JobSettings().hang_seconds / 2)
    assert "fenced" not in world.kinds()
    while "fenced" not in world.kinds():
        assert world.now < 60.0
        world.tick(0.1)
    assert recovered(world)
    plan = world.plan()
    assert plan is not None
    assert "beta/1" not in plan.members
    fenced = next(note for note in world.notes if note.kind == "fenced")
    assert "worker beta/1 is frozen: it is stopped" in fenced.text


def test_one_that_alone_holds_a_part_of_the_state_is_waited_for() -> None:
    """A debugger that stops it for a second ended the job, its state lost."""
    world = running(memory=2_600_000)  # all four are needed
    freeze(world, "beta/1")
    for _ in range(20):
        world.tick(1.0)
    assert world.phase is JobPhase.RUNNING, world.job.reason
    assert "beta/1 is frozen" in world.job.reason
    assert "nobody else holds" in world.job.reason
    assert world.kinds().count("waiting") == 1
    freeze(world, "beta/1", "")
    world.train(2)
    assert world.job.reason == ""
    assert "fenced" not in world.kinds()


def test_who_answers_again_in_time_stays() -> None:
    world = running()
    before = world.plan()
    freeze(world, "beta/1")
    freeze(world, "beta/1", how="")
    world.tick(30.0)
    assert world.plan() == before
    assert world.phase is JobPhase.RUNNING


def test_the_word_of_an_agent_that_links_anew_holds() -> None:
    world = running()
    freeze(world, "beta/1")
    world.reconnect("beta")  # which says hello of all its workers, and not that one is frozen
    world.settle()
    world.tick(30.0)
    assert "fenced" not in world.kinds()


def test_another_incarnations_silence_means_nothing() -> None:
    world = running()
    told = Frozen(job=JOB, device="beta/1", incarnation="one before", how=HOW)
    world.say(Received(node="beta", message=told))
    world.tick(30.0)
    assert "fenced" not in world.kinds()
