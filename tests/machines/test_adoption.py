"""etcd is set up anew under a job that trains: it is left alone, and a user has its plan written back."""

from __future__ import annotations

import pytest
from msgspec import structs

from elasticd.coordinator.store_transactions import StoreTransactions
from elasticd.machines.coordinator import machine
from elasticd.machines.job.state.events import AdoptAsked, AgentUp, CoordinatorSend, Received, StopAsked
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.store.memory import MemoryStore
from elasticd.wire.coordinator import ToClient
from elasticd.wire.worker import Rejected, RunningPlan
from tests.machines.cast import JOB, FakeWorker
from tests.machines.checked import KEYS
from tests.machines.test_restored_job import train_until
from tests.machines.world import World

#: The highest number that workers have heard of: of a proposal that was given up.
HIGHEST = 7


def wiped(world: World, *, torchruns: bool = False, absent: tuple[str, ...] = ()) -> World:
    """The store is empty, and the daemons were started anew; workers come back to their agents, but for those
    that are absent. torchruns: these ask again, before the workers do."""
    plan = world.plan()
    assert plan is not None
    world.store = MemoryStore()
    world.ledger = StoreTransactions(KEYS, world.store.limits)
    for told in (world.numbers, world.recorded, world.told, world.sent, world.notes, world.inbox):
        told.clear()
    world.state = machine.takeover(1, [], world.settings, world.now)
    for record in world.records.values():
        world.say(AgentUp(record=record))
    if torchruns:
        for node in world.joins:
            world._join(node)
    running = RunningPlan(plan=plan, step=2, highest=HIGHEST)
    for worker in world.workers.values():
        if worker.device not in absent and worker.alive:
            returns(world, worker, running if worker.device in plan.binding else None)
    world.settle()
    return world


def returns(world: World, worker: FakeWorker, running: RunningPlan | None) -> None:
    """A worker comes back to its agent, which tells the leader."""
    hello = structs.replace(world.hello(worker), incarnation=worker.incarnation, running=running)
    world.say(Received(node=worker.node, message=worker.up(hello)))


def trained() -> World:
    world = World(memory=1 << 34)
    world.start()
    world.train(6)
    assert world.phase is JobPhase.RUNNING
    return world


def adopt(world: World) -> None:
    """As the leader does it: agents come back, and say all that still holds."""
    world.say(AdoptAsked(job=JOB, by="alice"))
    world.settle()
    for node in world.records:
        world.reconnect(node)
    world.settle()


def test_members_that_a_new_leader_hears_of_are_back_and_do_not_stand_by() -> None:
    world = trained()
    world.notes.clear()
    world.new_leader()
    world.settle()
    plan = world.plan()
    assert plan is not None
    told = {note.text for note in world.notes if note.kind == "joined"}
    assert told == {f"worker {device} is back" for device in plan.members}


def turned_away(world: World) -> list[CoordinatorSend]:
    return [
        sent
        for sent in world.sent
        if isinstance(sent.message, ToClient) and isinstance(sent.message.body, Rejected)
    ]


@pytest.mark.parametrize("torchruns", [False, True])
def test_job_that_trains_is_left_alone_and_told_of(torchruns: bool) -> None:
    world = wiped(trained(), torchruns=torchruns)
    for _ in range(20):
        world.tick(500.0)
    assert world.phase is JobPhase.ASSEMBLING
    assert not world.store.snapshot(KEYS.jobs).items, "nothing is decided"
    assert turned_away(world) == []
    assert "its workers run plan 1, which etcd lacks" in world.job.reason
    assert f"'elasticd adopt {JOB}'" in world.job.reason
    assert world.kinds().count("waiting") == 1
    assert world.planning is None


@pytest.mark.parametrize("torchruns", [False, True])
def test_adopted_job_is_planned_and_recovers_again(torchruns: bool) -> None:
    world = trained()
    steps = world.steps
    wiped(world, torchruns=torchruns)
    adopt(world)
    assert world.phase is JobPhase.RUNNING
    assert (world.job.number, world.job.spec is not None) == (1, True)
    world.train(3)
    assert world.steps == steps + 3
    world.kill("beta/1")
    train_until(world, lambda: world.phase is JobPhase.RUNNING and world.job.number > 1)
    assert min(world.numbers) > HIGHEST, "no number that the workers know is used again"
    world.finish()
    world.settle()
    assert world.phase is JobPhase.DONE


def test_new_leader_goes_on_with_an_adopted_job() -> None:
    world = wiped(trained())
    adopt(world)
    world.new_leader()
    world.settle()
    world.tick(5.0)
    assert (world.phase, world.job.number, world.job.takeover.unadopted) == (JobPhase.RUNNING, 1, None)


def test_job_that_is_adopted_without_one_of_its_workers_recovers() -> None:
    world = trained()
    world.workers["beta/1"].alive = False
    world.forgotten.add("beta/1")
    wiped(world)
    assert "of its members beta/1 is not heard of" in world.job.reason
    adopt(world)
    world.tick(5.0)
    train_until(world, lambda: world.phase is JobPhase.RUNNING and world.job.number > 1)
    plan = world.plan()
    assert plan is not None
    assert "beta/1" not in plan.members


def test_workers_that_end_while_their_job_is_left_alone_end_it() -> None:
    world = wiped(trained())
    for device in list(world.workers):
        assert world.phase is JobPhase.ASSEMBLING
        world.leave_cleanly(device, "the script ended")
        world.settle()
    assert world.phase is JobPhase.STOPPED
    assert world.job.ending.orderly
    assert "its workers ended, and etcd did not have their plan: the script ended" in world.job.reason


def test_user_ends_such_a_job_at_once() -> None:
    world = wiped(trained())
    world.say(StopAsked(job=JOB, by="alice", seconds=0.0))
    world.settle()
    assert world.phase is JobPhase.STOPPED


def test_job_that_etcd_knows_is_not_taken_for_one_that_it_lacks() -> None:
    world = trained()
    plan = world.plan()
    assert plan is not None
    world.new_leader()
    returns(world, world.workers["alpha/0"], RunningPlan(plan=plan, step=2, highest=1))
    world.settle()
    world.say(AdoptAsked(job=JOB, by="alice"))
    world.settle()
    world.tick(5.0)
    assert (world.phase, world.job.number, world.job.takeover.unadopted) == (JobPhase.RUNNING, 1, None)


def test_of_two_plans_that_workers_run_the_later_one_is_adopted() -> None:
    """The leader before, or etcd, went in the midst of a switch."""
    world = trained()
    plan = world.plan()
    assert plan is not None
    later = plan.replace(number=plan.number + 1)
    world.swapped.add(later.number)
    wiped(world, absent=("alpha/0", "alpha/1", "beta/0", "beta/1"))
    for device, running in (("alpha/0", later), ("alpha/1", plan), ("beta/0", plan), ("beta/1", later)):
        returns(world, world.workers[device], RunningPlan(plan=running, step=2, highest=running.number))
    world.settle()
    adopt(world)
    assert world.job.number == later.number
