"""How a job comes together, and who is not let in."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from elasticd_planner.spec.measurement import Measurement

from elasticd.machines.job.state.events import Received
from elasticd.machines.job.state.job_state import JobPhase, JobSettings, Worker, fresh
from elasticd.machines.job.state.parts.job_start import Joiner
from elasticd.wire.coordinator import FromClient, Unreached, Unread
from elasticd.wire.rendezvous import Joined, Leave
from elasticd.wire.worker import Hello, Report
from tests.machines.asked import refused
from tests.machines.cast import JOB, spec
from tests.machines.test_recovery import ROOM
from tests.machines.world import World


def test_gathering_waits_a_second_for_more_than_the_least() -> None:
    world = World(("alpha", "beta", "gamma"))
    world.join("alpha", 2, 3)
    world.settle()
    world.tick(5.0)
    assert world.phase is JobPhase.GATHERING, "one of two"
    world.join("beta", 2, 3)
    world.settle()
    world.tick(0.9)
    assert world.phase is JobPhase.GATHERING
    world.tick(0.2)
    assert world.phase is JobPhase.ASSEMBLING
    assert world.job.start.joined == ("alpha", "beta")


def test_gathering_forgets_who_left() -> None:
    world = World()
    world.join("alpha")
    world.leave("alpha")
    world.join("beta")
    world.settle()
    world.tick(2.0)
    assert world.phase is JobPhase.GATHERING
    world.disconnect("beta")
    world.settle()
    assert not world.job.start.joiners


def test_what_a_job_waits_for_before_it_begins_is_shown_and_told_once() -> None:
    world = World(("alpha", "beta", "gamma"))
    world.join("alpha", 3, 3)
    world.settle()
    world.tick(0.5)
    assert "waiting" not in world.kinds()
    world.tick(1.0)
    text = "waits for 2 of 3 nodes (alpha is there): give the same command on the other nodes"
    assert world.job.reason == text
    assert [note.text for note in world.notes if note.kind == "waiting"] == [text]
    world.join("beta", 3, 3)
    world.settle()
    world.tick(1.0)
    assert world.job.reason.startswith("waits for 1 of 3 nodes (alpha, beta are there)")
    assert world.kinds().count("waiting") == 1
    world.join("gamma", 3, 3)
    world.settle()
    assert world.phase is not JobPhase.GATHERING
    assert not world.job.reason


@pytest.mark.parametrize("who", ["its launcher leaves", "its agent goes"])
def test_a_job_that_never_began_is_gone_once_its_last_launcher_has_left(who: str) -> None:
    world = World(("alpha", "beta"))
    world.join("alpha", 2, 2)
    world.settle()
    if who == "its agent goes":  # torchruns ask its successor
        world.disconnect("alpha")
        world.tick(5.0)
        assert world.phase is JobPhase.GATHERING
        return
    world.leave("alpha")
    world.tick(0.5)
    assert JOB not in world.state.jobs
    world.join("beta", 1, 1)
    world.settle()
    world.tick(1.0)
    assert world.phase is not JobPhase.GATHERING, "the name is free"


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
    up = FromClient(client="odd", job=JOB, device="alpha/7", incarnation="x", body=other)
    world.say(Received(node="alpha", message=up))
    world.settle()
    (reason,) = refused(world, "odd")
    assert "global_batch is 16, not 8" in reason
    assert "seed is 5, not 0" in reason
    assert world.phase is JobPhase.STOPPED


def assembling() -> World:
    """A job of alpha's whose workers are awaited; beta has no part in it."""
    world = World(memory=ROOM)
    world.join("alpha", 1, 1)
    while not world.joined:
        world._event(world.inbox.popleft())
    world.inbox.clear()  # alpha's workers are on their way
    assert world.phase is JobPhase.ASSEMBLING
    return world


def strange(world: World, **changes: Any) -> Hello:
    return Hello(job=JOB, local_rank=0, world_size=2, pid=9, spec=spec(**changes))


def from_beta(world: World, body: Hello, job: str = JOB) -> None:
    up = FromClient(client="odd", job=job, device="beta/0", incarnation="x", body=body)
    world.say(Received(node="beta", message=up))
    world.settle()


@pytest.mark.parametrize("changes", [{"seed": 5}, {}])
def test_worker_of_a_node_that_takes_no_part_is_refused_and_changes_nothing(changes: dict[str, Any]) -> None:
    world = assembling()
    before = world.job
    from_beta(world, strange(world, **changes))
    (reason,) = refused(world, "odd")
    assert "no torchrun of node beta takes part in it" in reason
    assert world.job == before, "neither its spec nor its worker is the job's"
    for device in ("alpha/0", "alpha/1"):
        hello = msgspec.structs.replace(world.hello(world.workers[device]), world_size=2)
        world.up(device, hello)
    world.settle()
    world.train()
    assert world.phase is JobPhase.RUNNING


def test_opening_that_cannot_be_read_of_a_node_that_takes_no_part_stops_no_job() -> None:
    world = assembling()
    unread = Unread(client="odd", job=JOB, device="beta/0", incarnation="x", reason="no")
    world.say(Received(node="beta", message=unread))
    world.settle()
    assert refused(world, "odd")
    assert world.phase is JobPhase.ASSEMBLING


def test_device_that_another_job_has_stops_no_job_that_its_node_takes_no_part_in() -> None:
    world = assembling()
    worker = Worker(device="beta/0", incarnation="x", node="beta", client="w", pid=1)
    other = msgspec.structs.replace(fresh("other", JobPhase.ASSEMBLING, 0.0), workers={"beta/0": worker})
    world.state = msgspec.structs.replace(world.state, jobs={**world.state.jobs, "other": other})
    from_beta(world, strange(world))
    (reason,) = refused(world, "odd")
    assert "in use by job other" in reason
    assert world.phase is JobPhase.ASSEMBLING
    joiner = Joiner(node="beta", client="t", pid=1, min_nodes=1, max_nodes=2, answered=True)
    job = world.job.changed("start", joined=("alpha", "beta"), joiners={"beta": joiner})
    world.state = msgspec.structs.replace(world.state, jobs={**world.state.jobs, JOB: job})
    from_beta(world, strange(world))
    assert world.phase is JobPhase.STOPPED, "its others would wait for it for ever"


def test_worker_that_no_torchrun_came_before_begins_no_job_and_sets_no_spec() -> None:
    world = World()
    from_beta(world, strange(world))
    assert not world.state.jobs
    assert refused(world, "odd")
    world.join("alpha", 2, 2)
    world.settle()
    from_beta(world, strange(world))
    assert world.job.spec is None


def test_torchrun_leaves_for_its_own_node_alone() -> None:
    world = assembling()
    leave = FromClient(client="talpha", job=JOB, device="", incarnation="", body=Leave(job=JOB))
    world.say(Received(node="beta", message=leave))
    world.settle()
    assert world.phase is JobPhase.ASSEMBLING
    assert world.job.start.joined == ("alpha",)


def test_nodes_beyond_the_most_are_refused() -> None:
    world = World(("alpha", "beta", "gamma"))
    for name in world.records:
        world.join(name, 2, 2)
    for _ in range(6):
        world._event(world.inbox.popleft())
    assert world.job.start.joined == ("alpha", "beta")
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
    assert world.phase is JobPhase.STOPPED
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
    assert world.phase is JobPhase.RUNNING
    assert world.job.learned.profile is not None
    assert not world.job.learned.profile.fitted


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="fit_steps"):
        JobSettings(fit_steps=3)


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


def planning(nodes: tuple[str, ...] = ("alpha", "beta"), most: int = 2) -> World:
    """The first plan is being made."""
    world = World(nodes, memory=ROOM)
    world.planner_waits = world.counts_joined = True
    for node in nodes[:2]:
        world.join(node, 2, most)
    world.settle()
    world.tick(2.0)
    assert world.phase is JobPhase.PLANNING
    return world


def test_torchrun_that_was_heard_of_again_before_the_first_plan_may_start_its_workers_again() -> None:
    world = planning()
    world.disconnect("beta")
    world.reconnect("beta")  # its agent repeats that a torchrun has joined
    for device in ("beta/0", "beta/1"):
        world.kill(device)
    world.settle()
    assert world.phase is JobPhase.ASSEMBLING
    world.restart("beta")
    world.planner_waits = False
    world.settle()
    world.train(2)
    assert world.phase is JobPhase.RUNNING


@pytest.mark.parametrize("leaves", [False, True])
def test_torchrun_that_comes_while_the_first_plan_is_made_is_none_of_those_that_are_waited_for(
    leaves: bool,
) -> None:
    world = planning(("alpha", "beta", "gamma"), most=3)
    world.join("gamma", 2, 3)
    world.settle()
    assert world.job.start.joined == ("alpha", "beta")
    if leaves:
        world.leave("gamma")
        world.settle()
        assert {*world.job.start.joiners} == {"alpha", "beta"}
    for device in ("beta/0", "beta/1"):
        world.kill(device)
    world.settle()
    assert world.phase is JobPhase.ASSEMBLING
    world.restart("beta")
    world.settle()
    assert world.phase is JobPhase.PLANNING, "all that it waits for are there"
    world.planner_waits = False
    world.settle()
    world.train(2)
    assert world.phase is JobPhase.RUNNING
    assert ("gamma" in world.joined) is not leaves, "it starts its workers once the first plan runs"


def test_late_answers_of_agents_and_workers_to_a_leader_before_fill_no_log() -> None:
    world = World()
    world.join("alpha")
    world.settle()
    assert world.phase is JobPhase.GATHERING
    world.say(Received(node="alpha", message=Unreached(job=JOB, round=1, nodes={"beta": "no answer"})))
    world.settle()
    assert not world.logs
