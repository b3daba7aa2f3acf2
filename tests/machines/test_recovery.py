"""Faults as the leader handles them: a fence, what the survivors hold, and a recovery, at every prefix."""

from __future__ import annotations

import pytest
from elasticd_planner.problem import Problem

from elasticd.machines.job.state.events import AgentDown, Planned
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.machines.job.state.transaction import Transaction
from elasticd.machines.job.switch import propose
from elasticd.records import Fence, HistoryRecord, Vote, decode
from elasticd.wire.rendezvous import Joined
from elasticd.wire.worker import Copy, Finished, InDoubt, PeersLost, StateReport
from tests.machines.cast import JOB, answer_to
from tests.machines.checked import KEYS
from tests.machines.world import World

#: Enough for a whole replica on each device.
ROOM = 60_000_000


def running(nodes: tuple[str, ...] = ("alpha", "beta"), memory: int = ROOM) -> World:
    world = World(nodes, memory=memory)
    world.start()
    world.settle()
    world.train(2)
    assert world.phase is JobPhase.RUNNING
    return world


def recovered(world: World) -> bool:
    plan = world.plan()
    return (
        world.phase is JobPhase.RUNNING
        and plan is not None
        and all(
            (worker := world.workers.get(device)) is not None and worker.alive and worker.plan == plan.number
            for device in plan.members
        )
    )


def test_a_death_is_fenced_and_the_survivors_go_on() -> None:
    world = running()
    before = world.plan()
    assert before is not None
    world.kill("beta/1")
    world.settle()
    plan = world.plan()
    assert plan is not None
    assert recovered(world)
    assert "beta/1" not in plan.members
    assert plan.number > before.number + 1, "the fence has a number of its own"
    assert world.kinds().count("fenced") == 1
    assert world.job.losses.fence is None, "the record ends the fault"
    world.train(3)
    assert world.phase is JobPhase.RUNNING


@pytest.mark.parametrize("how", ["before", "between", "after"])
def test_a_leader_that_dies_at_any_event_of_a_fault_leaves_another_that_ends_it(how: str) -> None:
    whole = running()
    start = whole.events
    whole.kill("beta/1")
    whole.settle()
    for at in range(start + 1, whole.events + 1):
        world = running()
        world.crash_at, world.crash_how = at, how
        world.kill("beta/1")
        world.settle()
        for _ in range(12):
            world.tick(1.0)
            world.settle()
        assert recovered(world), f"crash {how} event {at}: {world.phase} {world.job.reason}"
        plan = world.plan()
        assert plan is not None
        assert "beta/1" not in plan.members


@pytest.mark.parametrize("more", range(12))
def test_a_second_death_at_any_event_of_a_fault(more: int) -> None:
    world = running(("alpha", "beta", "gamma"))
    world.kill("beta/1")
    for _ in range(more):
        world.turn()
    world.kill("gamma/0")
    world.settle()
    assert recovered(world), world.job.reason
    plan = world.plan()
    assert plan is not None
    assert not {"beta/1", "gamma/0"} & {*plan.members}


def test_a_fault_closes_the_proposal_that_is_open() -> None:
    world = running()
    world.train(10)
    world.deaf = {"alpha/1"}
    world.rates = {"alpha/0": 3.0}
    for _ in range(40):
        if world.phase is JobPhase.PROPOSED:
            break
        world.train(1)
    assert world.phase is JobPhase.PROPOSED
    closed = world.proposal()
    assert closed is not None
    assert closed.status == "open"
    world.deaf = set()
    world.kill("beta/0")
    world.settle()
    assert recovered(world), world.job.reason
    fence = decode(world.fence_record, Fence)
    assert fence.number > closed.number, "it closes every number so far"
    assert fence.gone == {"beta/0": "i0-beta/0"}
    last, recovery = world.proposals[-2:]
    assert (last.number, last.status) == (closed.number, "aborted")
    assert recovery.recovery is not None
    assert recovery.recovery.fence == fence.number
    plan = world.plan()
    assert plan is not None
    assert plan.number == recovery.number > fence.number
    assert "beta/0" not in plan.members
    assert all(worker.plan != closed.number for worker in world.workers.values()), "nobody swapped to it"


@pytest.mark.parametrize("first", ["the plan", "the words"])
def test_a_death_before_the_first_swap_starts_the_job_anew_whichever_comes_first(first: str) -> None:
    world = World(("alpha", "beta"), memory=ROOM)
    world.deaf = {"beta/0"}  # it prepares nothing
    for node in world.records:
        world.join(node)
    world.settle()
    assert world.phase is JobPhase.PROPOSED
    world.deaf = set()
    world.planner_waits = first == "the words"
    if first == "the plan":
        world.deaf = {"alpha/0", "alpha/1", "beta/0"}
    world.kill("beta/1")
    world.settle()
    assert world.phase is JobPhase.RECOVERING or first == "the words"
    assert (world.job.planning.remedy is not None) == (first == "the plan")
    world.deaf, world.planner_waits = set(), False
    world.thaw("alpha/0")
    for _ in range(5):
        world.train(1)
    assert recovered(world), f"{world.phase} {world.job.reason}"
    plan = world.plan()
    assert plan is not None
    assert "beta/1" not in plan.members


def _first_plan_is_proposed(nodes: tuple[str, ...]) -> World:
    world = World(nodes, memory=ROOM)
    world.deaf = {f"{nodes[-1]}/0"}  # it prepares nothing
    for node in nodes:
        world.join(node, len(nodes), len(nodes))
    world.settle()
    assert world.phase is JobPhase.PROPOSED
    return world


@pytest.mark.parametrize("leaders", [1, 2])
def test_job_whose_workers_all_die_before_the_first_swap_starts_with_those_that_torchruns_start(
    leaders: int,
) -> None:
    world = _first_plan_is_proposed(("alpha", "beta"))
    for device in [*world.workers]:
        world.kill(device)
    world.settle()
    assert world.phase is JobPhase.ASSEMBLING, "no worker is left whom a plan could be made for"
    if leaders == 2:
        world.new_leader()
        world.settle()
    world.deaf = set()
    for node in world.records:
        world.restart(node)
    world.settle()
    world.tick(5.0)
    world.train(2)
    assert recovered(world), f"{world.phase} {world.job.reason}"
    plan = world.plan()
    assert plan is not None
    assert len(plan.members) == 4


def test_job_that_begins_anew_without_a_node_does_not_wait_for_it_when_another_worker_dies() -> None:
    world = _first_plan_is_proposed(("alpha", "beta", "gamma"))
    world.planner_waits = True
    for device in ("gamma/0", "gamma/1"):
        world.kill(device)
    world.settle()
    assert world.phase is JobPhase.PLANNING
    for device in ("beta/0", "beta/1"):
        world.kill(device)
    world.settle()
    assert world.phase is JobPhase.ASSEMBLING
    world.planner_waits, world.deaf = False, set()
    world.restart("beta")
    world.settle()
    world.train(2)
    assert recovered(world), f"{world.phase} {world.job.reason}"
    plan = world.plan()
    assert plan is not None
    assert {*plan.members} == {"alpha/0", "alpha/1", "beta/0", "beta/1"}


def test_job_that_finished_under_a_recovery_whose_record_no_leader_wrote_is_done() -> None:
    """A recovery has no vote: its members go on as soon as they have read its proposal. Here their leader died
    before it heard of that, and the next one closed the number, as it reached nobody: the proposal in the store
    is what their steps were made under."""
    world = running()
    world.kill("beta/1")
    for _ in range(20):
        if world.phase is JobPhase.PROPOSED:
            break
        world.turn()
    recovery = world.proposal()
    assert recovery is not None
    assert recovery.recovery is not None
    assert recovery.number in world.swapped, "its members run it"
    world.cut = {"alpha", "beta"}
    world.new_leader()
    for node in ("alpha", "beta"):
        world.disconnect(node)
    for _ in range(60):
        world.tick(1.0)
    world.cut = set()
    for worker in world.workers.values():
        if worker.alive:
            world.outcome(worker, Finished(step=world.steps))
    for node in ("alpha", "beta"):
        world.reconnect(node)
    world.settle()
    done = world.done()
    assert done is not None
    assert (done.step, done.reason) == (world.steps, "")
    assert recovery.number not in world.recorded, "no leader knew at which step it was in force"


def test_a_new_leader_says_the_fence_again_for_those_who_refuse_the_old_ones_word() -> None:
    """An agent that has seen the new leader's epoch takes no order of the old one: its workers never heard of
    the fence, and are not lost for that."""
    world = running(("alpha", "beta", "gamma"))
    world.deaf = set(world.workers)
    world.kill("beta/1")
    world.settle()
    old = decode(world.fence_record, Fence)
    world.deaf = set()
    world.new_leader()
    world.settle()
    for _ in range(8):
        world.tick(0.5)
    fence = decode(world.fence_record, Fence)
    assert (old.epoch, fence.epoch) == (1, 2)
    assert fence.number > old.number
    assert (fence.gone, fence.reason) == (old.gone, old.reason)
    assert recovered(world), f"{world.phase} {world.job.reason}"
    plan = world.plan()
    assert plan is not None
    assert "beta/1" not in plan.members
    assert plan.binding == {device: f"i0-{device}" for device in plan.members}, "nobody else is lost"


def test_lost_state_is_named_and_never_filled_in() -> None:
    world = running(memory=3_000_000)  # no room for replicas
    plan = world.plan()
    assert plan is not None
    world.kill(plan.members[-1])
    world.settle()
    done = world.done()
    assert done is not None
    assert "state is lost" in done.reason
    assert "is held by nobody who lives" in done.reason


def test_members_that_lose_each_other_without_a_death_recover_too() -> None:
    world = running()
    plan = world.plan()
    assert plan is not None
    for device in plan.members[:2]:
        world.outcome(world.workers[device], PeersLost(step=world.steps, reason="connection reset"))
    world.settle()
    assert world.phase is JobPhase.RUNNING, "somebody's death may be on its way"
    world.tick(0.6)
    world.settle()
    assert recovered(world)
    assert {*world.plan().members} == {*plan.members}  # type: ignore[union-attr]


def test_doubt_is_resolved_by_what_all_hold() -> None:
    """One swapped and died before it said so; the others are in doubt with both copies."""
    world = running()
    world.train(10)
    world.deaf = set(world.workers)
    world.rates = {"alpha/0": 3.0}
    for _ in range(40):
        if world.phase is JobPhase.PROPOSED:
            break
        world.train(1)
    proposal = world.proposal()
    assert proposal is not None
    world.deaf = set()
    for device in proposal.plan.members:
        worker = world.workers[device]
        worker.copies = (
            Copy(number=worker.plan, step=world.steps),
            Copy(number=proposal.number, step=world.steps),
        )
        world.outcome(worker, InDoubt(number=proposal.number, step=world.steps, reason="reset"))
    world.settle()
    world.tick(0.6)
    world.settle()
    assert recovered(world), world.job.reason
    history = [note for note in world.notes if note.kind == "proposed"]
    assert "lost the other members" in history[-1].text


def test_who_has_not_heard_the_last_vote_is_told_its_outcome() -> None:
    world = running()
    plan = world.plan()
    assert plan is not None
    vote = Vote(step=world.steps, loss=1.0, norm=1.0, count=8.0, tokens=64, apply=True)
    world.deaf = set(world.workers)
    world.kill("beta/1")
    world.settle()
    fence = world.job.losses.fence
    assert fence is not None
    ahead, *behind = [device for device in plan.members if device != "beta/1"]
    number, step = plan.number, world.steps
    for device in behind:
        copies = (Copy(number=number, step=step, behind=True),)
        world.stand(device, StateReport(fence=fence.number, copies=copies))
    world.stand(ahead, StateReport(fence=fence.number, copies=(Copy(number=number, step=step + 1),), vote=vote))
    world.deaf = set()
    world.settle()
    proposal = next(p for p in reversed(world.proposals) if p.recovery is not None)
    assert proposal.recovery is not None
    assert (proposal.recovery.step, proposal.recovery.vote) == (step + 1, vote)
    assert {*proposal.recovery.sources} == {ahead, *behind}


def test_a_node_that_cannot_be_reached_is_dead_only_once_the_steps_stop() -> None:
    world = running()
    world.say(AgentDown(node="beta"))
    world.settle()
    for _ in range(5):
        world.train(1)
    assert world.kinds().count("fenced") == 0, "its workers train on"
    world.cut = {"beta"}
    for _ in range(6):
        world.tick(1.0)
        world.settle()
    assert world.kinds().count("fenced") == 1
    plan = world.plan()
    assert plan is not None
    assert all(device.startswith("alpha/") for device in plan.members)


def test_a_leader_that_reaches_nobody_fences_nobody() -> None:
    world = running()
    for node in ("alpha", "beta"):
        world.say(AgentDown(node=node))
    for _ in range(20):
        world.tick(1.0)
        world.settle()
    assert world.kinds().count("fenced") == 0


def test_workers_that_torchrun_starts_again_join_and_are_used() -> None:
    world = running()
    world.train(12)
    world.kill("beta/1")
    world.kill("beta/0")
    world.settle()
    assert recovered(world)
    world.restart("beta")
    world.settle()
    assert isinstance(world.told["tbeta"][-1], Joined)
    for _ in range(40):
        world.train(1)
    plan = world.plan()
    assert plan is not None
    assert {"beta/0", "beta/1"} & {*plan.members}, world.notes[-1].text


def test_who_was_fenced_off_and_lives_comes_again_as_another() -> None:
    world = running()
    world.train(12)
    incarnation = world.workers["beta/1"].incarnation
    world.deaf = {"beta/1"}  # frozen: it answers nothing
    world.outcome(world.workers["alpha/0"], PeersLost(step=world.steps, reason="timeout"))
    for _ in range(20):
        world.tick(1.0)
        world.settle()
    assert recovered(world)
    world.reconnect("beta")  # its agent says its hello again, and knows no better
    world.settle()
    assert "beta/1" not in world.job.workers
    world.deaf = set()
    world.thaw("beta/1")
    world.settle()
    again = world.workers["beta/1"].incarnation
    assert again != incarnation
    fence = decode(world.fence_record, Fence)
    assert fence.gone == {"beta/1": incarnation}
    without = world.plan()
    assert without is not None
    assert "beta/1" not in without.members
    assert world.workers["beta/1"].plan == 0, "it owns nothing"
    for _ in range(40):
        world.train(1)
    plan = world.plan()
    assert plan is not None
    assert plan.binding.get("beta/1") == again, "it is used, as the one that it is now"
    assert plan.number > without.number
    world.finish()
    world.settle()
    assert world.phase is JobPhase.DONE
    assert world.done().step == world.steps  # type: ignore[union-attr]
    assert any(isinstance(body, Finished) for body in world.workers["alpha/0"].said)


def test_an_agent_that_is_only_started_again_does_not_cost_its_workers_when_another_dies() -> None:
    """Its node is away when the fence is written, and has been for longer than a node may be that is gone."""
    world = running(("alpha", "beta", "gamma"))
    world.cut.add("gamma")
    world.disconnect("gamma")
    world.now += world.settings.node_seconds + 0.1
    world.kill("beta/1")
    world.settle()
    assert world.phase is JobPhase.RECOVERING
    assert world.job.losses.fence is not None
    assert {*world.job.losses.fence.gone} == {"beta/1"}
    world.cut.clear()
    world.fence_at(world.job.losses.fence, {"gamma"})
    world.reconnect("gamma")
    world.settle()
    assert recovered(world)
    plan = world.plan()
    assert plan is not None
    assert {device for device in plan.members if device.startswith("gamma")}, "they are part of it"


def test_an_answer_that_names_a_worker_lost_since_is_dropped() -> None:
    world = running()
    plan = world.plan()
    assert plan is not None
    turn = Transaction(world.job, world.state.nodes, world.state.epoch, world.settings, world.now)
    turn.drop("beta/1")
    answer = answer_to(world_problem(world))
    assert answer.plan is not None
    propose(turn, answer.plan, world_problem(world), "it was asked for before")
    assert turn.job.phase is JobPhase.RUNNING
    assert turn.job.planning.decided is None, "another is asked for"
    assert not turn.effects


def world_problem(world: World) -> Problem:
    """What the plan in force was made for."""
    record = world.store.get(KEYS.history(JOB, world.job.number))
    assert record is not None
    return decode(record.value, HistoryRecord).problem


def test_what_is_asked_for_is_dropped_when_a_plan_made_before_it_is_proposed() -> None:
    """A recovery's plan waits for the words of survivors. A device that comes meanwhile asks for another plan;
    the words come before that answer, and the answer before anything else."""
    world = running()
    world.planner_waits, world.deaf = True, {"alpha/0", "alpha/1"}
    world.kill("beta/0")
    world.kill("beta/1")
    world.settle()
    assert world.phase is JobPhase.RECOVERING
    world.turn()  # the planner's answer
    assert world.job.planning.remedy is not None
    world.restart("beta")
    world.settle()
    asked = world.planning
    assert asked is not None, "a plan with the devices that came is asked for"
    world.deaf = set()
    world.thaw("alpha/0")
    world.thaw("alpha/1")
    while world.inbox and world.phase is JobPhase.RECOVERING:
        world.turn()
    assert world.phase is JobPhase.PROPOSED
    assert world.planning is None, "the planner need not go on"
    late = Planned(job=JOB, token=asked.token, answer=answer_to(asked.problem))
    proposed = world.job.number
    world.inbox.appendleft(late)
    world.settle()
    assert recovered(world), f"{world.phase} {world.job.reason}"
    assert "defect" not in world.kinds()
    assert world.job.number >= proposed
    world.planner_waits = False
    for _ in range(40):
        world.train(1)
    plan = world.plan()
    assert plan is not None
    assert {"beta/0", "beta/1"} & {*plan.members}, "they are asked about again"
