"""What an agent tells a worker that comes back to it: all that it may have missed, of fences and aborts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticd.machines.agent.state import (
    AgentTell,
    DoneRead,
    Ended,
    FenceRead,
    LeaderRead,
    LinkDown,
    LinkUp,
    Opened,
    PlanRead,
    Said,
)
from elasticd.machines.worker import switch as sw
from elasticd.records import DoneRecord, Fence, PlanRecord
from elasticd.wire.coordinator import FromClient, WorkerLost
from elasticd.wire.worker import Abort, Fenced, Hello, Prepared, Recorded, RunningPlan
from tests.machines.agent_scene import JOB, aborted, hello, plan, proposal, read_proposal, run, sent


def test_worker_that_comes_back_hears_of_the_abort_that_it_may_have_missed() -> None:
    mine = proposal(2, {"n0/0": "i0"})
    _, effects = run(read_proposal(aborted(mine)), hello(0))
    assert sent(effects)[1:] == [("w0", Abort(number=2, reason="why"))]
    _, effects = run(read_proposal(aborted(mine)), LeaderRead(epoch=6), hello(0))
    assert sent(effects)[1:] == [("w0", Abort(number=2, reason="why"))], "it holds, whoever leads now"


def fence(number: int, gone: dict[str, str], epoch: int = 5) -> FenceRead:
    return FenceRead(job=JOB, record=Fence(number=number, epoch=epoch, gone=gone, reason="it froze"))


PREPARED = Prepared(number=7)
EVICTED = Fenced(number=3, reason="it froze", evicted=True)


def test_worker_that_comes_back_hears_that_it_was_fenced_off_also_after_the_fault_is_over() -> None:
    over_with = PlanRead(job=JOB, record=PlanRecord(plan=plan(4, {"n0/1": "i1"}), epoch=5, step=0))
    state, _ = run(fence(3, {"n0/0": "i0"}), over_with)
    assert sent(run(hello(0), state=state)[1])[1:] == [("w0", EVICTED)]
    assert sent(run(hello(1), state=state)[1])[1:] == [], "the others have nothing to stand still for"


OTHERS_WENT_ON = PlanRead(job=JOB, record=PlanRecord(plan=plan(4, {"n0/1": "i1"}), epoch=5, step=0))


def back(rank: int) -> Opened:
    """It has the incarnation already that the agent before this one gave it."""
    return hello(rank, incarnation=f"i{rank}")


def test_worker_that_missed_how_its_plan_ended_hears_it_when_it_comes_back() -> None:
    """Its agent was started again meanwhile: it keeps a copy for a switch that is over, and waits to go."""
    state, _ = run(OTHERS_WENT_ON)
    assert sent(run(back(0), state=state)[1])[1:] == [("w0", Recorded(number=4))]
    assert sent(run(back(1), state=state)[1])[1:] == [], "a member has nothing to drop"
    assert sent(run(hello(0), state=state)[1])[1:] == [], "who is new has missed nothing"
    left = sw.SwitchState(phase=sw.SwitchPhase.STANDBY, number=4, seen=4, holds_old=True, draining=True)
    assert obeyed(left, sent(run(back(0), state=state)[1])[1:]).phase is sw.SwitchPhase.STOPPED, "it departs"


def test_worker_that_lost_the_others_and_missed_the_recovery_stands_by_for_the_next_plan() -> None:
    """No fence names it: the leader of then never met it."""
    state, _ = run(fence(3, {"n1/0": "x"}), OTHERS_WENT_ON)
    _, effects = run(back(0), state=state)
    orders = sent(effects)[1:]
    assert orders == [("w0", Fenced(number=3, reason="it froze")), ("w0", Recorded(number=4))]
    stands_still = sw.SwitchState(phase=sw.SwitchPhase.PEERS_LOST, number=2, seen=2, trains=True)
    after = obeyed(stands_still, orders)
    assert after.phase is sw.SwitchPhase.STANDBY
    after, effects = sw.step(after, sw.Proposed(number=5, joins=True))
    assert effects == (sw.Prepare(number=5),)


@pytest.mark.parametrize(
    "phase", [sw.SwitchPhase.PREPARING, sw.SwitchPhase.MOVING, sw.SwitchPhase.ACKING, sw.SwitchPhase.IN_DOUBT]
)
def test_worker_that_joins_by_a_later_proposal_is_not_torn_out_of_it(phase: sw.SwitchPhase) -> None:
    """It knows nothing of a fence that was over before it came."""
    state, _ = run(fence(3, {"n1/0": "x"}), OTHERS_WENT_ON)
    joins = sw.SwitchState(phase=phase, proposal=5, seen=5, joins=True, ok=phase is sw.SwitchPhase.IN_DOUBT)
    after = obeyed(joins, sent(run(back(0), state=state)[1])[1:])
    assert (after.phase, after.proposal) == (phase, 5)
    after, _ = sw.step(after, Fenced(number=6, reason="death"))
    assert after.phase is not phase, "one that closes the proposal is obeyed"


def obeyed(state: sw.SwitchState, orders: list[tuple[str, Any]]) -> sw.SwitchState:
    """A worker's machine once it has read these."""
    for _, order in orders:
        state, _ = sw.step(state, order)
    return state


def test_an_agent_that_reads_the_plan_after_its_workers_came_tells_all_of_them() -> None:
    """It does not know what they missed."""
    _, effects = run(hello(0), hello(1), OTHERS_WENT_ON)
    assert sent(effects) == [("w0", Recorded(number=4)), ("w1", Recorded(number=4))]


def test_a_new_link_does_not_call_back_a_worker_whose_device_has_another() -> None:
    """Its hello would come before the living one's, and be taken for one that took its place."""
    old, new = hello(0), replace(hello(0), client="w9", incarnation="i9")
    state, _ = run(
        LinkUp(), old, Said(client=old.client, body=PREPARED), Ended(client=old.client, how="died"), new
    )
    state, _ = run(LinkDown(), state=state)
    _, effects = run(LinkUp(), state=state)
    words = [effect.message for effect in effects if isinstance(effect, AgentTell)]
    hellos = [word for word in words if isinstance(word, FromClient) and isinstance(word.body, Hello)]
    assert [word.incarnation for word in hellos] == ["i9"]
    assert [word.incarnation for word in words if isinstance(word, WorkerLost)] == ["i0"]
    assert [word.incarnation for word in words if isinstance(word, FromClient) and word.body == PREPARED] == [
        "i0"
    ]


def test_workers_whose_plan_was_deleted_in_the_store_say_it_to_the_next_leader() -> None:
    record = PlanRecord(plan=plan(4, {"n0/0": "i0"}), epoch=5, step=9)
    gone = PlanRead(job=JOB, record=None)
    _, effects = run(hello(0), hello(1), PlanRead(job=JOB, record=record), fence(3, {}), gone, LinkUp())
    told = [effect.message for effect in effects if isinstance(effect, AgentTell)]
    hellos = {
        one.device: one.body for one in told if isinstance(one, FromClient) and isinstance(one.body, Hello)
    }
    assert hellos["n0/0"].running == RunningPlan(plan=record.plan, step=9, highest=4)
    assert (hellos["n0/0"].incarnation, hellos["n0/1"].running) == ("i0", None), "the other one stands by"


def test_workers_whose_job_was_forgotten_after_its_end_say_nothing_of_its_plan() -> None:
    record = PlanRecord(plan=plan(4, {"n0/0": "i0"}), epoch=5, step=9)
    over = DoneRead(job=JOB, record=DoneRecord(step=9, epoch=5))
    gone = PlanRead(job=JOB, record=None)
    _, effects = run(hello(0), PlanRead(job=JOB, record=record), over, gone, LinkUp())
    told = [effect.message for effect in effects if isinstance(effect, AgentTell)]
    (said,) = [one.body for one in told if isinstance(one, FromClient) and isinstance(one.body, Hello)]
    assert said.running is None
