"""Which words an agent that was started again is told, and in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticd.codec.message import Message, encode
from elasticd.records import Proposal
from elasticd.runtime.control.outbox import LASTING, MOST_PROPOSED, Outbox, PlanMemory
from elasticd.wire.worker import (
    Abort,
    DrainNotice,
    Fenced,
    Finished,
    InDoubt,
    PeersLost,
    Prepared,
    Propose,
    Recorded,
    Refused,
    Saved,
    StateReport,
    StayedOnPlan,
    Switched,
    from_worker,
)
from tests.machines.test_snapshot_sets import plan as made_plan


def swapped(number: int) -> Switched:
    return Switched(number=number, step=3, pause_seconds=0.1, bytes_sent=1, bytes_lacking=1, bytes_state=2)


def standing(fence: int) -> StateReport:
    return StateReport(fence=fence, copies=())


BEREFT = PeersLost(step=3, reason="reset")


def left(*said: Message) -> list[Message]:
    words = Outbox()
    for message in said:
        words.add(message, encode(message))
    return [from_worker(data) for data in words]


def test_the_newest_word_comes_last_also_where_one_of_its_kind_was_said_first() -> None:
    saved = Saved(name="c", step=2, plan=1)
    assert left(standing(2), saved, standing(4)) == [saved, standing(4)]


def test_a_loss_that_is_over_is_not_told_again() -> None:
    """A healthy job would be fenced for it."""
    assert left(BEREFT) == [BEREFT]
    assert left(BEREFT, standing(2)) == [standing(2)]
    assert left(BEREFT, standing(2), Prepared(number=3), swapped(3)) == [Prepared(number=3), swapped(3)]
    again = PeersLost(step=9, reason="timeout")
    assert left(BEREFT, standing(2), swapped(3), again) == [swapped(3), again]


def test_a_word_outdates_all_about_lower_numbers() -> None:
    doubt = InDoubt(number=2, step=3, reason="reset")
    assert left(Prepared(number=2), doubt) == [Prepared(number=2), doubt]
    assert left(Prepared(number=2), doubt, standing(3)) == [standing(3)]
    assert left(standing(3), Refused(number=4, reason="no memory")) == [Refused(number=4, reason="no memory")]
    assert left(StayedOnPlan(number=2, step=3), Finished(step=9)) == [
        StayedOnPlan(number=2, step=3),
        Finished(step=9),
    ]


def test_that_it_is_told_to_go_outlasts_all_else_that_is_said() -> None:
    leaving = DrainNotice(reason="SIGTERM")
    assert left(leaving, BEREFT, standing(2), swapped(3)) == [leaving, swapped(3)]


NUMBERS = st.integers(1, 6)
WORDS = st.one_of(
    st.builds(Prepared, number=NUMBERS),
    st.builds(swapped, NUMBERS),
    st.builds(standing, NUMBERS),
    st.builds(StayedOnPlan, number=NUMBERS, step=st.just(1)),
    st.builds(Finished, step=st.just(9)),
    st.builds(DrainNotice, reason=st.just("SIGTERM")),
    st.builds(PeersLost, step=st.integers(0, 3), reason=st.just("")),
)


@given(st.lists(WORDS, max_size=12))
def test_what_is_left_is_in_the_order_in_which_it_was_said_and_the_last_word_is_in_it(
    said: list[Message],
) -> None:
    kept = left(*said)
    assert kept[-1:] == said[-1:]
    last = [max(i for i, other in enumerate(said) if type(other) is type(word)) for word in kept]
    assert last == sorted(last)
    assert kept == [said[i] for i in last], "of each kind the newest"
    assert all(type(word) in LASTING for word in kept)


def proposed(number: int) -> Propose:
    plan = made_plan(["a/0"], number)
    return Propose(proposal=Proposal(number=number, epoch=1, plan=plan, old=None))


def running(*words: Message) -> tuple[int, int, int] | None:
    """The number, first step and highest number of the plan that a worker runs after these words."""
    memory = PlanMemory()
    for word in words:
        memory.said(word) if isinstance(word, Switched) else memory.heard(word)
    found = memory.plan
    return None if found is None else (found.plan.number, found.step, found.highest)


def test_plan_that_runs_is_the_last_one_switched_to_whatever_was_proposed_since() -> None:
    assert running(proposed(1)) is None
    assert running(proposed(1), swapped(1)) == (1, 3, 1)
    assert running(proposed(1), swapped(1), proposed(2), Abort(number=2, reason="")) == (1, 3, 2)
    assert running(proposed(1), swapped(1), Fenced(number=4, reason="")) == (1, 3, 4)
    assert running(proposed(1), swapped(1), proposed(2), swapped(2), Recorded(number=2)) == (2, 3, 2)
    assert running(proposed(1), swapped(1), proposed(2), Recorded(number=2), swapped(2)) == (2, 3, 2)


def test_plans_of_proposals_that_were_given_up_are_not_kept() -> None:
    """A job that tries for weeks to use a device that stands by proposes hundreds."""
    memory = PlanMemory()
    for number in range(1, 1000):
        memory.heard(proposed(number))
        memory.heard(Abort(number=number, reason=""))
    assert len(memory._proposed) == MOST_PROPOSED
    memory.said(swapped(999))
    assert memory.plan is not None
    assert memory.plan.plan.number == 999


def test_worker_that_a_recorded_plan_leaves_out_runs_none() -> None:
    assert running(proposed(1), swapped(1), proposed(2), Recorded(number=2)) is None
