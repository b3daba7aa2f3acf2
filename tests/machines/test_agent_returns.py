"""What an agent tells a worker that comes back to it: all that it may have missed, of fences and aborts."""

from __future__ import annotations

from dataclasses import replace

from elasticd.machines.agent_state import (
    Ended,
    FenceRead,
    LeaderRead,
    LinkDown,
    LinkUp,
    PlanRead,
    ProposalRead,
    Said,
    Tell,
)
from elasticd.messages import Abort, Fenced, Hello, Prepared, Up, WorkerLost
from elasticd.records import Fence, PlanRecord
from tests.machines.agent_scene import JOB, aborted, hello, plan, proposal, run, sent


def test_worker_that_comes_back_hears_of_the_abort_that_it_may_have_missed() -> None:
    mine = proposal(2, {"n0/0": "i0"})
    _, effects = run(ProposalRead(job=JOB, proposal=aborted(mine)), hello(0))
    assert sent(effects)[1:] == [("w0", Abort(number=2, reason="why"))]
    _, effects = run(ProposalRead(job=JOB, proposal=aborted(mine)), LeaderRead(epoch=6), hello(0))
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


def test_a_new_link_does_not_call_back_a_worker_whose_device_has_another() -> None:
    """Its hello would come before the living one's, and be taken for one that took its place."""
    old, new = hello(0), replace(hello(0), client="w9", incarnation="i9")
    state, _ = run(
        LinkUp(), old, Said(client=old.client, body=PREPARED), Ended(client=old.client, how="died"), new
    )
    state, _ = run(LinkDown(), state=state)
    _, effects = run(LinkUp(), state=state)
    words = [effect.message for effect in effects if isinstance(effect, Tell)]
    hellos = [word for word in words if isinstance(word, Up) and isinstance(word.body, Hello)]
    assert [word.incarnation for word in hellos] == ["i9"]
    assert [word.incarnation for word in words if isinstance(word, WorkerLost)] == ["i0"]
    assert [word.incarnation for word in words if isinstance(word, Up) and word.body == PREPARED] == ["i0"]
