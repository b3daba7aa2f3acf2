"""A user stops a job: agents are told, a last checkpoint is made, and the job ends, whatever comes between."""

from __future__ import annotations

import msgspec
import pytest

from elasticd.coordinator.store_writer import stored
from elasticd.machines.coordinator import machine
from elasticd.machines.job.lifecycle.stop_request import unheard
from elasticd.machines.job.state.events import StopAsked
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.records import DoneRecord
from elasticd.wire.coordinator import End
from elasticd.wire.worker import Closed
from tests.machines.cast import JOB
from tests.machines.test_draining import tell
from tests.machines.test_recovery import running
from tests.machines.world import KEYS, World


def ask(world: World, seconds: float = 60.0) -> None:
    world.say(StopAsked(job=JOB, by="alice@host", seconds=seconds))
    world.settle()


def ended(world: World) -> str:
    """Why it is over."""
    assert world.phase is JobPhase.STOPPED
    done = world.done()
    assert isinstance(done, DoneRecord)
    assert done.requested
    return done.reason


def told(world: World) -> list[str]:
    """The nodes whose agents are to pass the order on."""
    return [sent.node for sent in world.sent if isinstance(sent.message, End)]


def test_all_agents_are_told_and_the_job_ends_once_all_workers_have_their_last_checkpoint() -> None:
    world = running()
    ask(world)
    assert told(world) == ["alpha", "beta"]
    assert world.phase is JobPhase.RUNNING
    assert "stopping" in world.kinds()
    devices = [*world.workers]
    tell(world, *devices, saves=True)
    world.settle()
    assert world.phase is JobPhase.RUNNING, "the checkpoint is being made"
    texts = [note.text for note in world.notes if note.kind == "leaving"]
    ending = "drains (SIGTERM): the job ends with all its workers"
    assert texts == [f"worker {device} {ending}" for device in devices]
    tell(world, *devices)
    world.settle()
    assert ended(world).startswith(f"stopped by alice@host, after {world.steps} steps")


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_nodes_whose_agents_are_too_old_to_pass_it_on_are_named(seconds: float) -> None:
    world = running()
    beta = world.state.nodes["beta"]
    assert unheard(world.job, world.state.nodes, seconds) == {}
    old = msgspec.structs.replace(beta, release="0.1.3")
    world.state = msgspec.structs.replace(world.state, nodes={**world.state.nodes, "beta": old})
    assert unheard(world.job, world.state.nodes, seconds) == ({"beta": "0.1.3"} if seconds else {})
    ask(world, seconds)
    said = [note.text for note in world.notes if note.kind == "stopping"]
    assert all("the workers of beta (elasticd 0.1.3) are not told" in text for text in said)
    assert len(said) == (seconds > 0), "at once it ends by the store, which that agent reads"
    if seconds:
        tell(world, "beta/0", "beta/1")  # somebody sent them SIGTERM
        world.settle()
        assert unheard(world.job, world.state.nodes, seconds) == {}


def test_no_plan_is_made_for_those_who_have_not_heard_yet() -> None:
    world = running()
    before = world.kinds().count("planning")
    ask(world)
    tell(world, "beta/0", "beta/1")
    world.settle()
    world.train(3)
    assert world.kinds().count("planning") == before


def test_without_time_for_a_checkpoint_it_ends_at_once_and_else_when_the_time_is_up() -> None:
    world = running()
    ask(world, 0.0)
    assert ended(world).startswith("stopped by alice@host")
    assert told(world) == []
    world = running()
    ask(world, 5.0)
    world.tick(4.0)
    assert world.phase is JobPhase.RUNNING
    world.tick(2.0)
    assert ended(world).startswith("stopped by alice@host")


def test_torchruns_that_wait_for_others_are_told_that_there_is_no_job() -> None:
    world = World(("alpha", "beta"))
    world.join("alpha", 2, 2)
    world.settle()
    ask(world)
    assert ended(world).startswith("stopped by alice@host")
    (said,) = [body for body in world.told["talpha"] if isinstance(body, Closed)]
    assert f"job {JOB} is over: stopped by alice@host" in said.reason


def test_an_agent_that_comes_back_and_a_worker_that_torchrun_starts_meanwhile_are_told_too() -> None:
    world = running()
    world.disconnect("beta")
    ask(world)
    assert told(world) == ["alpha"]
    world.reconnect("beta")
    world.settle()
    assert "beta" in told(world)
    before = len(told(world))
    world.up("beta/1", world.hello(world.workers["beta/1"]))
    world.settle()
    assert len(told(world)) > before


@pytest.mark.parametrize("heard", [False, True])
def test_a_new_leader_ends_it_whether_the_workers_had_heard_or_not(heard: bool) -> None:
    world = running()
    ask(world)
    if heard:
        tell(world, *world.workers)
        world.inbox.clear()  # the leader dies before it hears them
    world.new_leader()
    world.settle()
    if not heard:
        assert world.job.ending.stopping == "stopped by alice@host"
        before = len(told(world))
        assert before > 2, "the new leader tells both nodes' agents again"
        tell(world, *world.workers)
        world.settle()
    assert world.phase is JobPhase.STOPPED


def test_workers_whose_grace_is_over_before_their_checkpoint_is_made_leave_a_job_that_ends() -> None:
    world = running()
    ask(world)
    devices = [*world.workers]
    tell(world, *devices, saves=True)
    for device in devices:
        world.kill(device)
    world.settle()
    assert ended(world).startswith("stopped by alice@host")


def test_a_job_that_is_over_stays_as_it_ended() -> None:
    world = running()
    world.finish()
    world.settle()
    ask(world)
    assert world.phase is JobPhase.DONE


def test_a_new_leader_gives_the_workers_the_time_that_is_left() -> None:
    world = running()
    ask(world, seconds=100.0)
    (job,) = stored(KEYS, world.store.snapshot(KEYS.jobs).items)
    assert job.stop is not None
    for elapsed, left in ((0.0, 100.0), (30.0, 70.0), (500.0, 0.0)):
        found = msgspec.structs.replace(job, stop_seconds=elapsed)
        state = machine.takeover(9, [found], world.settings, 1000.0)
        assert (state.jobs[JOB].ending.stopping, state.jobs[JOB].ending.stop_at) == (
            "stopped by alice@host",
            1000.0 + left,
        )


def test_a_job_that_finishes_has_no_reason_left_of_a_fault_before() -> None:
    world = running()
    waiting = msgspec.structs.replace(world.job, reason="worker beta/1 died: killed by signal 9")
    world.state = msgspec.structs.replace(world.state, jobs={**world.state.jobs, JOB: waiting})
    world.finish()
    world.settle()
    assert (world.phase, world.job.reason) == (JobPhase.DONE, "")
