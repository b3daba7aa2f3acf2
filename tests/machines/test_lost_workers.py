"""Members that a new leader has never met: their node is cut off while it takes over. They may come back."""

from __future__ import annotations

import pytest

from elasticd.machines.job.state.events import AgentDown, AgentUp, Received
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.records import Fence, decode
from elasticd.wire.worker import PeersLost, StateReport
from tests.machines.cast import FakeWorker
from tests.machines.test_recovery import recovered, running
from tests.machines.world import World

BETA = {"beta/0": "i0-beta/0", "beta/1": "i0-beta/1"}


def taken_over(world: World) -> World:
    """beta is cut off, its workers with it, and another leader comes, which alpha alone finds."""
    world.cut = {"beta"}
    world.new_leader()
    world.inbox.clear()
    world.reconnect("alpha")
    world.settle()
    return world


def lose(world: World, device: str = "alpha/0") -> None:
    """This member lost the others."""
    plan = world.plan()
    assert plan is not None
    word = PeersLost(step=world.steps, reason="connection reset", plan=plan.number)
    world.outcome(world.workers[device], word)
    world.settle()


def wait(world: World, seconds: float) -> None:
    for _ in range(int(seconds)):
        world.tick(1.0)


def back(world: World) -> None:
    """beta's agent finds the leader again, and its workers hear the last fence."""
    world.cut.clear()
    world.reconnect("beta")
    if world.fence_record:
        world.thaw("beta")
    world.settle()


def fence(world: World) -> Fence:
    return decode(world.fence_record, Fence)


def test_a_recovery_without_a_member_that_the_leader_never_met_fences_it_off() -> None:
    world = taken_over(running())
    world.train(4)
    lose(world)
    wait(world, 4)
    assert recovered(world), f"{world.phase} {world.job.reason}"
    assert fence(world).gone == BETA
    assert world.kinds().count("fenced") == 1
    back(world)
    assert world.workers["beta/0"].incarnation == "i0-beta/0+", "it comes again as another"
    for _ in range(40):
        world.train(1)
    plan = world.plan()
    assert plan is not None
    assert {"beta/0", "beta/1"} & {*plan.members}, "and is used again"
    assert world.kinds().count("fenced") == 1


def test_a_fault_that_began_before_the_takeover_is_not_ended_without_their_word() -> None:
    """The leader before wrote the fence, and beta has not read it."""
    world = running()
    world.cut = {"beta"}
    lose(world)
    world.tick(0.6)
    assert world.phase is JobPhase.RECOVERING
    assert fence(world).gone == {}
    world = taken_over(world)
    world.tick(1.0)
    assert not any(proposal.recovery for proposal in world.proposals), "agents are on their way still"
    wait(world, 5)
    assert recovered(world), f"{world.phase} {world.job.reason}"
    assert fence(world).gone == BETA


def test_state_that_they_alone_may_hold_is_waited_for() -> None:
    world = running(memory=3_000_000)  # no room for replicas
    world.cut = {"beta"}
    lose(world)
    world.tick(0.6)
    world = taken_over(world)
    wait(world, 20)
    assert world.phase is JobPhase.RECOVERING
    assert "beta/0, beta/1 may live, and hold what nobody else does" in world.job.reason
    back(world)
    wait(world, 5)
    assert recovered(world), f"{world.phase} {world.job.reason}"
    assert world.workers["beta/0"].incarnation == "i0-beta/0"


def test_a_node_that_this_leader_never_met_and_that_alone_holds_some_state_is_waited_for() -> None:
    """Found by the soak: its agent was started again, and came 200 ms after the job had ended for it."""
    world = taken_over(running(memory=3_000_000))  # no room for replicas
    wait(world, 4)
    lose(world)
    wait(world, 20)
    assert world.phase is JobPhase.RUNNING, f"{world.phase} {world.job.reason}"
    assert "cannot be reached" in world.job.reason
    back(world)
    wait(world, 5)
    assert recovered(world), f"{world.phase} {world.job.reason}"
    assert world.workers["beta/0"].incarnation == "i0-beta/0"


@pytest.mark.parametrize("when", ["while the job runs", "after a fence"])
def test_workers_that_are_not_back_at_an_agent_that_was_started_again_are_waited_for(when: str) -> None:
    """Found by the soak: the agent and the leader were started again at once, and a worker that alone held some
    state took longer than three seconds to find its agent."""
    world = running(memory=3_000_000)  # no room for replicas
    if when == "after a fence":
        world.cut = {"beta"}
        lose(world)
        world.tick(0.6)
    world = taken_over(world)
    world.forgotten = set(BETA)
    for device in BETA:
        world.workers[device].alive = False
    world.cut.clear()
    world.reconnect("beta")
    wait(world, 20)
    assert world.phase is (JobPhase.RUNNING if when == "while the job runs" else JobPhase.RECOVERING), (
        world.job.reason
    )
    assert "may live, and hold what nobody else does" in world.job.reason
    assert "waiting" in world.kinds()
    for device in BETA:
        world.workers[device].alive = True
    back(world)
    world.train(2)
    wait(world, 5)
    assert world.phase is JobPhase.RUNNING, f"{world.phase} {world.job.reason}"
    assert world.workers["beta/0"].incarnation == "i0-beta/0"


def test_workers_that_never_come_back_end_the_job_in_the_end() -> None:
    world = taken_over(running(memory=3_000_000))
    world.forgotten = set(BETA)
    for device in BETA:
        world.workers[device].alive = False
    world.cut.clear()
    world.reconnect("beta")
    lose(world)
    wait(world, int(world.settings.lone_seconds) + 20)
    assert world.phase is JobPhase.STOPPED, f"{world.phase} {world.job.reason}"
    assert "state is lost" in world.job.reason


def test_nobody_is_fenced_off_while_the_steps_go_on() -> None:
    world = taken_over(running())
    for _ in range(20):
        world.train(1)
    assert "fenced" not in world.kinds()
    world.cut.clear()
    world.reconnect("beta")
    world.settle()
    assert world.job.takeover.unmet == {}
    assert world.job.all_reported


@pytest.mark.parametrize("when", ["while the job runs", "after a fence"])
def test_those_that_ended_before_their_agent_came_back_are_lost(when: str) -> None:
    world = running()
    if when == "after a fence":
        world.cut = {"beta"}
        lose(world)
        world.tick(0.6)
    world = taken_over(world)
    if when == "after a fence":
        wait(world, 2)
    else:
        world.train(4)
    world.cut.clear()
    world.forgotten = set(BETA)
    for device in BETA:
        world.workers[device].alive = False
    world.reconnect("beta")
    wait(world, 5)
    assert recovered(world), f"{world.phase} {world.job.reason}"
    assert fence(world).gone == BETA
    assert "it ended while no coordinator led" in fence(world).reason


def test_a_second_takeover_knows_them_still() -> None:
    world = taken_over(running())
    world = taken_over(world)
    assert world.job.takeover.unmet == BETA
    world.say(AgentDown(node="alpha"))
    world.settle()
    wait(world, 20)
    assert "fenced" not in world.kinds(), "it may be this leader that is cut off"


def alone() -> World:
    """alpha goes on without beta, which is back as two workers that stand by."""
    world = taken_over(running())
    world.train(4)
    lose(world)
    wait(world, 4)
    back(world)
    assert recovered(world)
    return world


def quiet(world: World) -> None:
    before = world.kinds().count("fenced")
    for _ in range(3):
        world.tick(1.0)
    assert world.phase is JobPhase.RUNNING
    assert world.kinds().count("fenced") == before


def test_who_is_no_member_of_the_plan_lost_nobody() -> None:
    world = alone()
    world.outcome(world.workers["beta/0"], PeersLost(step=world.steps, reason="reset"))
    quiet(world)


def test_a_member_that_lost_others_under_a_plan_before_lost_nobody_now() -> None:
    world = alone()
    plan = world.plan()
    assert plan is not None
    world.outcome(world.workers["alpha/0"], PeersLost(step=1, reason="reset", plan=plan.number - 2))
    quiet(world)
    world.outcome(world.workers["alpha/0"], PeersLost(step=world.steps, reason="reset", plan=plan.number))
    world.settle()
    world.tick(1.0)
    assert world.kinds().count("fenced") == 2


def test_an_answer_to_a_fence_that_is_over_takes_back_no_word_of_a_loss() -> None:
    world = alone()
    lose(world)
    world.outcome(world.workers["alpha/0"], StateReport(fence=fence(world).number - 1, copies=()))
    world.tick(1.0)
    assert world.kinds().count("fenced") == 2


def test_a_worker_that_another_process_followed_is_lost_though_it_left_cleanly() -> None:
    """A new leader hears of the new process first: that one lives, and those not met yet are no leavers."""
    world = running()
    world.train(4)
    old = world.workers["alpha/0"]
    world.cut = {"alpha", "beta"}
    world.new_leader()
    world.cut.clear()
    world.inbox.clear()
    world.say(AgentUp(record=world.records["alpha"]))
    new = world.workers["alpha/0"] = FakeWorker(device=old.device, incarnation="after")
    world.up(new.device, world.hello(new))
    world.settle()
    world.say(Received(node="alpha", message=world.lost(old, clean=True, how="its script ended")))
    world.settle()
    assert world.phase is not JobPhase.STOPPED, world.job.reason
    known = world.job.workers["alpha/0"]
    assert (known.incarnation, known.left_at) == ("after", None)
