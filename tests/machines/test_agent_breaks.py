"""The agent's machine, interrupted after every prefix: nothing is lost, no stale order is forwarded."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.machines.agent.machine import step
from elasticd.machines.agent.state import (
    AgentState,
    AgentTell,
    AgentTick,
    DoneRead,
    Ended,
    Event,
    LeaderRead,
    LinkDown,
    LinkUp,
    PlanRead,
    ProposalRead,
    Said,
)
from elasticd.records import DoneRecord, PlanRecord
from elasticd.wire.coordinator import FromClient, WorkerLost
from elasticd.wire.worker import (
    Abort,
    Finished,
    Goodbye,
    InDoubt,
    Prepared,
    Propose,
    Recorded,
    Refused,
    Shutdown,
    StayedOnPlan,
    Switched,
)
from tests.machines.agent_scene import (
    JOB,
    RECORD,
    aborted,
    hello,
    join,
    proposal,
    read_proposal,
    run,
    said,
    sent,
    swapped,
)
from tests.sizes import examples

# -- interrupted after every prefix --------------------------------------------------------------------------

FIRST, SECOND = proposal(1, {"n0/0": "i0", "n0/1": "i1"}), proposal(2, {"n0/0": "i0"}, old={"n0/1": "i1"})
LIFE: tuple[Event, ...] = (
    LeaderRead(epoch=5),
    join(),
    hello(0),
    hello(1),
    read_proposal(FIRST),
    said(Prepared(number=1), "w0"),
    said(Refused(number=1, reason="no"), "w1"),
    read_proposal(aborted(FIRST)),
    said(StayedOnPlan(number=1, step=0), "w0"),
    said(StayedOnPlan(number=1, step=0), "w1"),
    read_proposal(SECOND),
    said(Prepared(number=2), "w0"),
    said(swapped(2), "w0"),
    said(InDoubt(number=2, step=3, reason="?"), "w1"),
    Ended(client="w1", how="its process ended"),
    PlanRead(job=JOB, record=PlanRecord(plan=SECOND.plan, epoch=5, step=3)),
    said(Finished(step=9), "w0"),
    said(Goodbye(), "w0"),
    Ended(client="w0", how="its process ended"),
)
#: After it nothing said of the job matters any more.
END: tuple[Event, ...] = (
    hello(0, client="w9"),
    DoneRead(job=JOB, record=DoneRecord(step=9, epoch=5, reason="why")),
)


def outdated(events: list[Event]) -> int:
    """Numbers below this one are settled, as the store shows."""
    numbers = [e.proposal.head.number for e in events if isinstance(e, ProposalRead) and e.proposal]
    return max([*numbers, 0])


def check_all_is_told(events: list[Event], words: list[AgentTell]) -> None:
    """Every outcome said so far that the store has not outdated is among the words of the present link."""
    bodies = [(m.client, m.body) for m in (word.message for word in words) if isinstance(m, FromClient)]
    lost = [m.incarnation for m in (word.message for word in words) if isinstance(m, WorkerLost)]
    settled = outdated(events)
    for event in events:
        if isinstance(event, Said) and isinstance(event.body, Finished):
            assert (event.client, event.body) in bodies
        elif isinstance(event, Said) and isinstance(
            event.body, Prepared | Refused | Switched | StayedOnPlan | InDoubt
        ):
            assert event.body.number < settled or (event.client, event.body) in bodies
        elif isinstance(event, Ended) and event.client != "t":
            assert f"i{event.client[1:]}" in lost


@settings(max_examples=examples(150))
@given(st.lists(st.integers(0, len(LIFE)), max_size=6))
def test_nothing_said_is_lost_whenever_the_link_breaks_and_returns(breaks: list[int]) -> None:
    state, linked = AgentState(record=RECORD), False
    happened: list[Event] = []
    words: list[AgentTell] = []

    def feed(event: Event) -> None:
        nonlocal state
        state, effects = step(state, event, 0.0)
        words.extend(effect for effect in effects if isinstance(effect, AgentTell))

    def toggle() -> None:
        nonlocal linked
        words.clear()  # what was sent on a broken link may not have arrived
        feed(LinkDown() if linked else LinkUp())
        linked = not linked

    for at in range(len(LIFE) + 1):
        for _ in range(breaks.count(at)):
            toggle()
        if at < len(LIFE):
            happened.append(LIFE[at])
            feed(LIFE[at])
        if linked:
            check_all_is_told(happened, words)
    if not linked:
        toggle()
    check_all_is_told(happened, words)


@pytest.mark.parametrize("cut", range(len(LIFE) + len(END)))
def test_new_leader_after_every_prefix_forwards_no_order_of_the_old_one(cut: int) -> None:
    life = (*LIFE, *END)
    state, _ = run(*life[:cut])
    state, _ = run(LeaderRead(epoch=50), state=state)
    for event in life[cut:]:
        state, effects = step(state, event, 0.0)
        orders = [b for _, b in sent(list(effects)) if isinstance(b, Propose | Abort | Recorded | Shutdown)]
        assert orders == []


@pytest.mark.parametrize("cut", range(len(LIFE) + 1))
def test_step_changes_no_state_that_it_was_given(cut: int) -> None:
    state, _ = run(*LIFE[:cut])
    before = msgspec.to_builtins(state, enc_hook=repr)
    for event in (*LIFE, LinkUp(), AgentTick()):
        step(state, event, 1.0)
    assert msgspec.to_builtins(state, enc_hook=repr) == before
