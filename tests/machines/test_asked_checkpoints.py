"""A user asks for a checkpoint now: one worker of the running plan is told, or the user why none can be."""

from __future__ import annotations

import msgspec

from elasticd.machines.job.copies.checkpoints import refusal
from elasticd.machines.job.state.events import CheckpointAsked
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.wire.coordinator import ToClient
from elasticd.wire.worker import SaveNow
from tests.machines.cast import JOB
from tests.machines.world import World


def trained(saves_now: bool = True) -> World:
    world = World()
    world.saves_now = saves_now
    world.start()
    world.train(2)
    assert world.phase is JobPhase.RUNNING
    return world


def told(world: World) -> list[str]:
    """The clients that were asked."""
    return [
        sent.message.client
        for sent in world.sent
        if isinstance(sent.message, ToClient) and isinstance(sent.message.body, SaveNow)
    ]


def client(world: World, device: str) -> str:
    return world.job.workers[device].client


def test_the_first_member_of_the_plan_that_hears_is_told() -> None:
    world = trained()
    assert world.job.plan is not None
    first, second, *_ = world.job.plan.members
    world.say(CheckpointAsked(job=JOB))
    world.settle()
    assert told(world) == [client(world, first)]
    frozen = msgspec.structs.replace(world.job.workers[first], frozen="it does not answer")
    job = msgspec.structs.replace(world.job, workers={**world.job.workers, first: frozen})
    world.state = msgspec.structs.replace(world.state, jobs={JOB: job})
    world.say(CheckpointAsked(job=JOB))
    world.settle()
    assert told(world) == [client(world, first), client(world, second)]


def test_a_job_whose_workers_cannot_is_refused_with_the_remedy() -> None:
    world = trained(saves_now=False)
    assert "has no folder for checkpoints (CheckpointingOptions(folder=...))" in refusal(world.job)
    world.say(CheckpointAsked(job=JOB))
    world.settle()
    assert told(world) == []


def test_a_job_that_does_not_train_is_refused() -> None:
    world = World()
    world.saves_now = True
    world.start()
    gathered = msgspec.structs.replace(world.job, phase=JobPhase.RECOVERING)
    assert "trains under no plan now (it is recovering): ask once it does" in refusal(gathered)
    assert refusal(msgspec.structs.replace(gathered, phase=JobPhase.DONE))


def test_after_a_takeover_nobody_is_told_before_all_workers_are_back() -> None:
    world = trained()
    world.records.pop("alpha")
    world.new_leader()
    world.settle()
    assert world.phase is JobPhase.RUNNING
    assert set(world.job.workers) == {"beta/0", "beta/1"}
    assert "have come back to this coordinator yet: try again" in refusal(world.job)
    world.say(CheckpointAsked(job=JOB))
    world.settle()
    assert told(world) == []
    assert world.phase is JobPhase.RUNNING
