"""How a job comes together, and who is not let in."""

from __future__ import annotations

import msgspec
import pytest
from elasticd_planner.measurement import Measurement

from elasticd.machines.job.effects import Received
from elasticd.machines.job.state import Phase, Settings
from elasticd.messages import Hello, Joined, Report, Up
from tests.machines.asked import refused
from tests.machines.cast import JOB
from tests.machines.world import World


def test_gathering_waits_a_second_for_more_than_the_least() -> None:
    world = World(("alpha", "beta", "gamma"))
    world.join("alpha", 2, 3)
    world.settle()
    world.tick(5.0)
    assert world.phase is Phase.GATHERING, "one of two"
    world.join("beta", 2, 3)
    world.settle()
    world.tick(0.9)
    assert world.phase is Phase.GATHERING
    world.tick(0.2)
    assert world.phase is Phase.ASSEMBLING
    assert world.job.joined == ("alpha", "beta")


def test_gathering_forgets_who_left() -> None:
    world = World()
    world.join("alpha")
    world.leave("alpha")
    world.join("beta")
    world.settle()
    world.tick(2.0)
    assert world.phase is Phase.GATHERING
    world.disconnect("beta")
    world.settle()
    assert not world.job.joiners


def test_join_with_other_limits_is_refused_with_both_named() -> None:
    world = World()
    world.join("alpha", 2, 2)
    world.join("beta", 1, 2)
    world.settle()
    (reason,) = refused(world, "tbeta")
    assert "--nnodes=1:2" in reason
    assert "alpha --nnodes=2:2" in reason


def test_worker_with_another_spec_is_refused_with_the_difference_and_nobody_waits_for_ever() -> None:
    world = World()
    world.join("alpha", 1, 1)
    world.settle()
    worker = world.workers["alpha/0"]
    other = Hello(
        job=JOB,
        local_rank=1,
        world_size=4,
        pid=9,
        spec=msgspec.structs.replace(world.hello(worker).spec, seed=5, global_batch=16),
    )
    up = Up(client="odd", job=JOB, device="alpha/7", incarnation="x", body=other)
    world.say(Received(node="alpha", message=up))
    world.settle()
    (reason,) = refused(world, "odd")
    assert "global_batch is 16, not 8" in reason
    assert "seed is 5, not 0" in reason
    assert world.phase is Phase.STOPPED


def test_nodes_beyond_the_most_are_refused() -> None:
    world = World(("alpha", "beta", "gamma"))
    for name in world.records:
        world.join(name, 2, 2)
    for _ in range(6):
        world._event(world.inbox.popleft())
    assert world.job.joined == ("alpha", "beta")
    (reason,) = refused(world, "tgamma")
    assert "already has all the nodes that --nnodes lets it have (alpha, beta)" in reason


def test_torchrun_that_ends_before_its_workers_came_stops_the_job() -> None:
    world = World()
    world.join("alpha", 1, 1)
    while not world.joined:
        world._event(world.inbox.popleft())
    world.inbox.clear()
    world.leave("alpha")
    world.settle()
    assert world.phase is Phase.STOPPED
    assert "torchrun on node alpha ended" in world.job.reason


def test_measurements_without_any_work_do_not_end_the_leader() -> None:
    world = World()
    world.start()
    plan = world.plan()
    assert plan is not None
    for step in range(2, 20):
        for device in plan.members:
            empty = Measurement(device=device, plan=1, step=step, tokens=0, block_seconds=0.0, block_work=0.0)
            world.up(device, Report(measurement=empty))
    world.settle()
    assert world.phase is Phase.RUNNING
    assert world.job.profile is not None
    assert not world.job.profile.fitted


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="fit_steps"):
        Settings(fit_steps=3)


def test_answer_to_a_join_that_was_lost_is_given_again() -> None:
    world = World()
    world.join("alpha", 1, 1)
    while not world.joined:
        world._event(world.inbox.popleft())
    world.workers.clear()
    world.inbox.clear()
    world.join("alpha", 1, 1)
    world.settle()
    answers = [body for body in world.told["talpha"] if isinstance(body, Joined)]
    assert answers == [Joined(node_rank=0, nodes=1)] * 2
