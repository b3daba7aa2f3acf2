"""Whether stages may be interleaved and pipelines have lanes is the policy's to say: a running job is planned
anew when that changes."""

from __future__ import annotations

import msgspec
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.sequence_lengths import even

from elasticd.machines.job.state.events import Configured
from elasticd.machines.job.state.job_state import JobPhase
from tests.machines.test_recovery import ROOM, recovered, running
from tests.machines.world import World


def allowed(world: World, chunks: int, lanes: int = 1) -> None:
    settings = world.state.settings
    policy = msgspec.structs.replace(settings.policy, interleave=chunks, lanes=lanes)
    world.say(Configured(detect=settings.detect, policy=policy, changes="by a test"))
    world.settle()


def test_a_running_job_is_planned_anew_when_its_stages_may_be_interleaved_and_not_otherwise() -> None:
    world = running()
    world.train(12)
    world.planner_waits = True
    allowed(world, 1)
    world.train(2)
    assert world.planning is None, "nothing has changed"
    allowed(world, 3)
    world.train(2)
    assert world.planning is not None
    assert world.planning.problem.search_space.interleave == 3


def test_a_recovery_is_planned_without_and_the_job_anew_once_it_runs() -> None:
    """The search for chunks takes longer, and survivors stand still meanwhile."""
    world = running()
    world.train(12)
    allowed(world, 3)
    world.train(2)
    world.planner_waits = True
    world.kill("beta/1")
    while world.planning is None:
        world.turn()
    assert world.phase is JobPhase.RECOVERING
    assert world.planning.problem.search_space.interleave == 1
    world.planner_waits = False
    while world.phase is not JobPhase.RUNNING or world.planning is None:
        world.turn()
    assert world.planning.problem.search_space.interleave == 3
    world.settle()
    assert recovered(world)


def test_a_running_job_is_planned_anew_when_its_pipelines_may_have_lanes() -> None:
    world = running()
    world.train(12)
    world.planner_waits = True
    allowed(world, 1, lanes=2)
    world.train(2)
    assert world.planning is not None
    assert world.planning.problem.search_space.lanes == 2
    world.planner_waits = False
    world.settle()
    assert world.phase is JobPhase.RUNNING


def test_a_job_whose_sequences_may_be_cut_is_planned_with_as_many_lanes_as_there_are() -> None:
    world = World(("alpha", "beta"), memory=ROOM)
    world.of_spec = {"packed": PackedSequences(sequences=8.0, lengths=even(64.0), longest=64, linear=96)}
    world.start()
    world.settle()
    assert world.job.planning.decided is not None
    assert world.job.planning.decided.lanes == len(world.job.planning.decided.devices) > 1
    world.train(12)
    world.planner_waits = True
    allowed(world, 1, lanes=1)
    world.train(2)
    assert world.planning is not None
    assert world.planning.problem.search_space.lanes == 1, "the policy forbids it"
