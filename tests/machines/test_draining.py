"""Workers that drain (SIGTERM): the leader goes on without them, and nobody is lost."""

from __future__ import annotations

import pytest
from elasticd_planner.spec.cluster import node_of

from elasticd.machines.job.state.job_state import JobPhase
from elasticd.records import DoneRecord, Proposal
from elasticd.wire.worker import DrainNotice
from tests.machines.test_drain import drain, train_until
from tests.machines.test_recovery import recovered, running
from tests.machines.world import World

WHY = "it has drained, and the job goes on without it"


def tell(world: World, *devices: str, saves: bool = False) -> None:
    for device in devices:
        world.outcome(world.workers[device], DrainNotice(reason="SIGTERM", saves=saves))


def members(world: World) -> set[str]:
    plan = world.plan()
    return {*plan.members} if plan is not None else set()


def left(world: World, *devices: str) -> bool:
    return world.phase is JobPhase.RUNNING and not members(world) & {*devices}


def depart(world: World, *devices: str) -> None:
    """As their processes do, once a plan without them is recorded."""
    for device in devices:
        assert device not in members(world)
        world.leave_cleanly(device, WHY)
    world.settle()


def test_one_that_is_told_to_go_is_left_and_its_end_is_no_loss() -> None:
    world = running()
    tell(world, "beta/1")
    train_until(world, lambda: left(world, "beta/1"))
    text = next(note.text for note in world.notes if note.kind == "leaving")
    assert text == "worker beta/1 drains (SIGTERM): the next plan leaves it"
    reason = next(note.text for note in reversed(world.notes) if note.kind == "proposed")
    assert "worker beta/1 drains" in reason
    number, asked = world.job.number, world.kinds().count("planning")
    depart(world, "beta/1")
    world.train(5)
    assert world.phase is JobPhase.RUNNING
    assert (world.job.number, world.kinds().count("planning")) == (number, asked), "nothing more to decide"
    assert "fenced" not in world.kinds()
    assert "beta/1" not in world.job.workers


def test_a_whole_node_is_told_to_go_and_the_other_goes_on() -> None:
    world = running()
    tell(world, "beta/0", "beta/1")
    train_until(world, lambda: left(world, "beta/0", "beta/1"))
    depart(world, "beta/0", "beta/1")
    world.leave("beta")
    world.train(3)
    assert world.phase is JobPhase.RUNNING
    assert members(world) <= {"alpha/0", "alpha/1"}
    assert "fenced" not in world.kinds()


@pytest.mark.parametrize("how", ["before", "between", "after"])
def test_a_leader_that_dies_at_any_event_of_it_leaves_another_that_ends_it(how: str) -> None:
    whole = running()
    start = whole.events
    tell(whole, "beta/1")
    train_until(whole, lambda: left(whole, "beta/1"))
    for at in range(start + 1, whole.events + 1):
        world = running()
        world.crash_at, world.crash_how = at, how
        tell(world, "beta/1")
        train_until(world, lambda world=world: left(world, "beta/1"))
        assert "fenced" not in world.kinds(), f"crash {how} event {at}"
        depart(world, "beta/1")
        world.train(2)
        assert world.phase is JobPhase.RUNNING


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("turns", range(14))
def test_one_whose_grace_ends_before_is_lost_and_the_others_recover(turns: int, clean: bool) -> None:
    """Also where it says goodbye: a job does not stop for it as for a script that leaves its loop."""
    world = running()
    tell(world, "beta/1")
    for _ in range(turns):
        if world.inbox or world.planning is not None:
            world.turn()
        else:
            world.train(1)
    if clean:
        world.leave_cleanly("beta/1", WHY)
    else:
        world.kill("beta/1")
    world.settle()
    train_until(world, lambda: recovered(world))
    world.train(3)
    assert world.phase is JobPhase.RUNNING
    assert "beta/1" not in members(world)
    assert world.done() is None


def test_all_told_to_go_end_the_job_and_it_says_so() -> None:
    world = running()
    tell(world, "beta/0", "beta/1", "alpha/0")
    world.settle()
    assert world.phase is not JobPhase.STOPPED
    tell(world, "alpha/1")
    world.settle()
    assert world.phase is JobPhase.STOPPED
    done = world.done()
    assert isinstance(done, DoneRecord)
    assert done.reason.startswith(f"all workers drain (SIGTERM), after {world.steps} steps")


@pytest.mark.parametrize("crash", [False, True])
def test_all_told_to_go_make_a_last_checkpoint_before_the_job_ends(crash: bool) -> None:
    world = running()
    everyone = sorted(members(world))
    tell(world, *everyone, saves=True)
    world.settle()
    if crash:
        world.new_leader()
        world.settle()
    tell(world, *everyone[1:])
    world.settle()
    assert world.phase is not JobPhase.STOPPED, "one has not said that it is made"
    assert world.done() is None
    tell(world, everyone[0])
    world.settle()
    assert world.phase is JobPhase.STOPPED


def test_a_plan_for_those_who_stay_is_not_proposed_once_nobody_does() -> None:
    world = running()
    world.train(12)
    world.planner_waits = True
    everyone = sorted(members(world))
    tell(world, *everyone[:1], saves=True)
    while world.planning is None:
        world.turn()
    tell(world, *everyone[1:], saves=True)
    while world.inbox:
        world.turn()
    assert world.planning is None, "it is ended"
    world.planner_waits = False
    world.train(3)
    assert world.phase is JobPhase.RUNNING
    assert world.kinds().count("proposed") == 1


@pytest.mark.parametrize("turns", range(1, 8))
def test_one_that_is_proposed_already_is_given_up(turns: int) -> None:
    world = running()
    world.train(12)
    everyone = sorted(members(world))
    tell(world, *everyone[:1], saves=True)
    number = world.job.number
    while world.phase is not JobPhase.PROPOSED:
        world.turn()
    for _ in range(turns):
        if world.inbox:
            world.turn()
    tell(world, *everyone[1:], saves=True)
    world.settle()
    train_until(world, lambda: world.phase is JobPhase.RUNNING)
    assert world.job.number == number
    assert world.kinds().count("aborted") == 1
    tell(world, *everyone)
    world.settle()
    assert world.phase is JobPhase.STOPPED


def test_one_that_dies_before_the_last_checkpoint_is_made_leaves_the_others_to_make_it() -> None:
    world = running()
    everyone = sorted(members(world))
    tell(world, *everyone, saves=True)
    world.settle()
    world.kill(everyone[0])
    world.settle()
    assert recovered(world)
    tell(world, *members(world))
    world.settle()
    assert world.phase is JobPhase.STOPPED


def test_a_leader_that_just_came_does_not_take_the_first_few_for_all() -> None:
    world = running()
    tell(world, "beta/0", "beta/1")
    world.settle()
    world.cut = {"alpha"}
    world.new_leader()
    world.settle()
    assert world.phase is not JobPhase.STOPPED
    world.cut = set()
    world.reconnect("alpha")
    world.settle()
    train_until(world, lambda: left(world, "beta/0", "beta/1"))
    assert "fenced" not in world.kinds()


def test_where_the_rest_has_no_room_the_plan_stays_and_it_is_said() -> None:
    world = World(("alpha", "beta"))  # of memory that is enough for the two together alone
    world.start()
    world.settle()
    world.train(2)
    tell(world, "beta/0", "beta/1")
    for _ in range(5):
        world.train(1)
    assert {node_of(device) for device in members(world)} == {"alpha", "beta"}
    assert "refused" in world.kinds()
    assert world.phase is JobPhase.RUNNING


def test_one_that_stands_by_just_goes() -> None:
    world = running()
    drain(world, "beta")
    train_until(world, lambda: left(world, "beta/0", "beta/1"))
    number = world.job.number
    tell(world, "beta/0")
    depart(world, "beta/0")
    world.train(3)
    assert world.job.number == number
    assert world.phase is JobPhase.RUNNING


def test_a_plan_that_was_to_take_it_up_is_given_up() -> None:
    world = running()
    drain(world, "beta")
    train_until(world, lambda: left(world, "beta/0", "beta/1"))
    world.deaf = {"beta/1"}
    drain(world, "beta", on=False)
    train_until(world, lambda: world.phase is JobPhase.PROPOSED)
    proposal = world.proposal()
    assert isinstance(proposal, Proposal)
    assert "beta/0" in proposal.plan.members
    tell(world, "beta/0")
    world.settle()
    text = next(note.text for note in world.notes if note.kind == "aborted")
    assert "worker beta/0, which was to join, drains" in text
    world.deaf = set()
    depart(world, "beta/0")
    train_until(world, lambda: world.phase is JobPhase.RUNNING)
    assert "fenced" not in world.kinds()


@pytest.mark.parametrize("turns", range(10))
def test_one_that_is_told_to_go_in_the_midst_of_a_fault_is_left_by_the_recovery_or_after_it(turns: int) -> None:
    world = running(("alpha", "beta", "gamma"))
    world.kill("beta/1")
    for _ in range(turns):
        world.turn()
    tell(world, "gamma/0")
    world.settle()
    train_until(world, lambda: recovered(world) and left(world, "gamma/0"))
    assert world.kinds().count("fenced") == 1
    depart(world, "gamma/0")
    world.train(2)
    assert world.phase is JobPhase.RUNNING
