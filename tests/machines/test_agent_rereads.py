"""An agent that reads the store anew learns what those obey that watched; a replaced leader gives no orders.

A leader's epoch is the revision at which its key was made; so is every record's a revision, of its last write.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.machines.agent.state import (
    AgentNote,
    DoneRead,
    Event,
    FenceRead,
    LeaderRead,
    PlanRead,
)
from elasticd.records import DoneRecord, Fence, PlanRecord
from elasticd.wire.worker import Abort, Fenced, Propose, Recorded, Shutdown
from tests.machines.agent_scene import JOB, aborted, hello, plan, proposal, read_proposal, run, sent

#: A leader of epoch 5 wrote these; the leader that followed has epoch 9.
OPEN = proposal(3, {"n0/0": "i0"}, epoch=5)
FENCE = Fence(number=2, epoch=5, gone={"n1/0": "x"}, reason="it died")
FOLLOWER = LeaderRead(epoch=9)


def records(revision: int) -> list[tuple[Event, type]]:
    """What the store may hold of the first leader, last written at `revision`, and what it says to a worker."""
    recorded = PlanRecord(plan=plan(3, {"n0/0": "i0"}), epoch=5, step=0)
    ended = DoneRecord(step=9, epoch=5, reason="why")
    return [
        (read_proposal(OPEN, revision=revision), Propose),
        (read_proposal(aborted(OPEN), revision=revision), Abort),
        (FenceRead(job=JOB, record=FENCE, revision=revision), Fenced),
        (PlanRead(job=JOB, record=recorded, revision=revision), Recorded),
        (DoneRead(job=JOB, record=ended, revision=revision), Shutdown),
    ]


@pytest.mark.parametrize("kind", range(5))
def test_what_was_written_before_the_present_leader_came_holds_still(kind: int) -> None:
    event, order = records(revision=7)[kind]
    state, effects = run(hello(0), FOLLOWER, event)
    assert [type(body) for _, body in sent(effects)][-1:] == [order]
    assert state.epoch == 9, "the highest seen stays"


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("revision", [9, 10, 1000])
def test_what_a_leader_writes_after_it_was_replaced_is_refused(kind: int, revision: int) -> None:
    event, _ = records(revision)[kind]
    state, effects = run(hello(0), FOLLOWER, event)
    assert [type(effect) for effect in effects] == [AgentNote]
    _, effects = run(hello(1), state=state)
    assert len(sent(effects)) == 1, "nor is it kept: whoever comes hears nothing of it but a welcome"


def test_a_worker_that_comes_back_to_an_agent_that_was_started_again_hears_what_holds() -> None:
    """It reads who leads first, and then what the leader before had written."""
    fence, _ = records(revision=6)[2]
    opened, _ = records(revision=7)[0]
    _, effects = run(FOLLOWER, fence, opened, hello(0))
    assert [type(body) for _, body in sent(effects)][1:] == [Fenced, Propose]
    _, effects = run(FOLLOWER, opened, hello(0))
    assert [type(body) for _, body in sent(effects)][1:] == [Propose]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_of_all_writes_in_the_store_those_alone_are_obeyed_whose_leader_led_then(writers: list[int]) -> None:
    """At each revision a leader is elected (0), or one of the last three writes, whether it leads or not: as if
    the store would let it. The agent watches."""
    state, _ = run(hello(0))
    leaders: list[int] = []
    for revision, writer in enumerate(writers, start=1):
        if writer == 0 or writer > len(leaders):
            leaders.append(revision)
            state, _ = run(LeaderRead(epoch=revision), state=state)
            continue
        record = proposal(revision, {"n0/0": "i0"}, epoch=leaders[-writer])
        read = read_proposal(record, revision=revision)
        state, effects = run(read, state=state)
        assert [body for _, body in sent(effects)] == ([Propose(proposal=record)] if writer == 1 else [])
