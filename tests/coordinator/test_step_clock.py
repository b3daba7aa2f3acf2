"""The time of a step is that of its end at the worker, however long its report waited on its way."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from elasticd_planner.spec.measurement import Measurement
from hypothesis import given
from hypothesis import strategies as st

from elasticd.coordinator.events.event_log import EventLog
from elasticd.coordinator.events.step_clock import LATE_SECONDS, StepClock
from elasticd.explain.training_speed import wall_seconds
from elasticd.machines.job.state.events import CoordinatorNote
from elasticd.wire.worker import Report

TOKENS, OWN, WALL = 40, 0.1, 0.4
#: Unix seconds of the leader at which a worker's monotonic clock began.
BOOT = 1_700_000_000.0
TRUE_SPEED = TOKENS / WALL


def report(step: int, ended_at: float, *, plan: int = 1) -> Report:
    measured = Measurement(
        device="a/0",
        plan=plan,
        step=step,
        tokens=TOKENS,
        block_seconds=0.05,
        block_work=1.0,
        step_seconds=OWN,
    )
    return Report(measurement=measured, loss=2.0, tokens=TOKENS, ended_at=ended_at)


def trained(journal: EventLog, steps: range, *, delay: float = 0.01, worker: str = "first") -> None:
    """Steps that are reported as they are made."""
    for step in steps:
        ended = 5.0 + WALL * step
        journal.report("j", report(step, ended), BOOT + ended + delay, worker)


def handed_over(journal: EventLog, steps: range, at: float, worker: str = "first") -> None:
    """Steps whose reports waited for a leader, and come all at once."""
    for number, step in enumerate(steps):
        journal.report("j", report(step, 5.0 + WALL * step), at + 3e-4 * number, worker)


def next_leader(journal: EventLog) -> EventLog:
    lines = journal.new(10_000, 10_000)
    assert lines is not None
    later = EventLog(term=2)
    later.restore(msgspec.json.decode(msgspec.json.encode(lines), type=type(lines)))
    return later


def speeds(journal: EventLog) -> list[float]:
    """Tokens over wall time of each step that has one before it, as curves have them."""
    walls = [wall_seconds(before, after) for before, after in pairwise(journal.steps("j"))]
    return [TOKENS / seconds for seconds in walls if seconds]


def test_steps_that_waited_for_a_leader_are_as_fast_as_they_were_made() -> None:
    first = EventLog(term=1)
    trained(first, range(30))
    later = next_leader(first)
    handed_over(later, range(30, 60), BOOT + 5.0 + WALL * 60)
    speed = later.speed("j")
    assert speed is not None
    assert speed.tokens_per_second == pytest.approx(TRUE_SPEED)
    assert speeds(later) == pytest.approx([TRUE_SPEED] * 59)
    times = [step.time for step in later.steps("j")]
    assert times == pytest.approx([BOOT + 5.01 + WALL * step for step in range(60)])


def test_a_leader_that_the_reports_waited_for_has_lost_no_time() -> None:
    first = EventLog(term=1)
    trained(first, range(30))
    later = next_leader(first)
    handed_over(later, range(30, 60), BOOT + 5.0 + WALL * 60)
    time = later.clocks["j"].time
    assert time is not None
    assert time.ettr() == pytest.approx((60 * OWN) / (OWN + 59 * WALL))
    assert time.lost == pytest.approx({"between steps": 59 * (WALL - OWN)})


def test_a_leader_whose_predecessor_wrote_nothing_shows_no_speed_that_was_not() -> None:
    journal = EventLog(term=2)
    handed_over(journal, range(30, 60), BOOT + 5.0 + WALL * 60)
    trained(journal, range(60, 65))
    speed = journal.speed("j")
    assert speed is not None
    assert speed.tokens_per_second == pytest.approx(TRUE_SPEED)
    assert max(speeds(journal)) == pytest.approx(TRUE_SPEED)


@pytest.mark.parametrize("lost", [1, 10])
def test_steps_whose_reports_a_leader_took_with_it_are_no_lost_time(lost: int) -> None:
    first = EventLog(term=1)
    trained(first, range(30))
    later = next_leader(first)
    trained(later, range(30 + lost, 60))
    time = later.clocks["j"].time
    assert time is not None
    assert (time.steps, time.repeated) == (60, 0)
    assert time.ettr() == pytest.approx((60 * OWN) / (OWN + 59 * WALL))
    assert time.lost == pytest.approx({"between steps": 59 * (WALL - OWN)})


def test_steps_between_two_starts_of_a_worker_are_not_taken_for_made() -> None:
    journal = EventLog()
    trained(journal, range(30))
    trained(journal, range(40, 50), worker="second")
    time = journal.clocks["j"].time
    assert time is not None
    assert time.steps == 40


@pytest.mark.parametrize("pause", [0.0, 60.0])
def test_the_time_between_two_starts_of_a_worker_is_no_step(pause: float) -> None:
    journal = EventLog()
    trained(journal, range(30))
    for step in range(30, 33):
        ended = 1.0 + WALL * step  # another machine's clock, on which this is sooner
        journal.report("j", report(step, ended), BOOT + 300.0 + pause + ended, "second")
    speed = journal.speed("j")
    assert speed is not None
    assert speed.tokens_per_second == pytest.approx(TRUE_SPEED)
    assert wall_seconds(journal.steps("j")[29], journal.steps("j")[30]) == OWN


def test_a_leaders_clock_that_is_set_is_followed() -> None:
    clock = StepClock("first", BOOT)
    for second in range(int(LATE_SECONDS) + 2):
        told = clock.leader_time(float(second), BOOT + 3600.0 + second)
    assert told == BOOT + 3600.0 + second
    assert clock.leader_time(second + 1.0, BOOT + second + 1.0) == BOOT + second + 1.0, "set back at once"


@given(delays=st.lists(st.floats(0, 30), min_size=20, max_size=60))
def test_no_delay_changes_what_lies_between_two_steps(delays: list[float]) -> None:
    journal = EventLog()
    trained(journal, range(5), delay=0.0)
    arrived = BOOT
    for step, delay in enumerate(delays, start=5):
        ended = 5.0 + WALL * step
        arrived = max(arrived, BOOT + ended + delay)  # reports of one worker come in their order
        journal.report("j", report(step, ended), arrived, "first")
    assert speeds(journal) == pytest.approx([TRUE_SPEED] * (len(delays) + 4))


@pytest.mark.parametrize("ended_at", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_clock_that_says_nothing_leaves_the_arrival(ended_at: float) -> None:
    journal = EventLog()
    journal.report("j", report(0, ended_at), BOOT, "first")
    newest = journal.newest("j")
    assert newest is not None
    assert (newest.time, newest.ended_at, newest.clock) == (BOOT, 0.0, "")


# -- another start of the job --------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [1, 2])
def test_a_later_leader_has_nothing_of_an_earlier_start_of_the_job(pages: int) -> None:
    first = EventLog(term=1)
    trained(first, range(30))
    lines = [first.new(100, 1000)] if pages == 2 else []
    first.forget("j")
    first.tell(CoordinatorNote(kind="started_again", job="j", text="", data={"number": 3}), BOOT + 90.0)
    for step in range(20, 50):
        ended = 200.0 + WALL * step
        gain = first.report("j", report(step, ended, plan=4), BOOT + ended, "second")
        assert gain is None, "nothing is compared over the time between two starts"
    lines.append(first.new(100, 1000))
    later = EventLog(term=2)
    for page in lines:
        assert page is not None
        later.restore(page)
    assert [step.step for step in later.steps("j")] == [*range(20, 50)]
    assert later.speed("j") == first.speed("j")
    assert later.clocks["j"].time == first.clocks["j"].time


def test_what_agents_say_again_to_a_new_leader_is_told_once() -> None:
    first = EventLog(term=1)
    data = {"number": 2, "device": "a/0", "pause_seconds": 0.1, "bytes_sent": 7}
    switched = CoordinatorNote(kind="swapped", job="j", text="", data=data)
    other = CoordinatorNote(kind="swapped", job="j", text="", data={**data, "device": "a/1"})
    assert not first.repeats(switched)
    first.tell(switched, BOOT)
    assert (first.repeats(switched), first.repeats(other)) == (True, False)
    later = next_leader(first)
    assert (later.repeats(switched), later.repeats(other)) == (True, False)
    assert not later.repeats(CoordinatorNote(kind="swapped", job="j", text="", data={**data, "number": 3}))
    later.tell(CoordinatorNote(kind="started_again", job="j", text="", data={}), BOOT)
    assert not later.repeats(switched)


# -- what is lost in switches ----------------------------------------------------------------------------------


def told(journal: EventLog, kind: str, number: int, at: float) -> None:
    data = {"number": number, "pause_seconds": 0.01, "device": "a/0"}
    journal.tell(CoordinatorNote(kind=kind, job="j", text="", data=data), at)  # type: ignore[arg-type]


def test_a_first_plan_is_no_switch_whenever_its_ranks_tell_of_it() -> None:
    journal = EventLog(term=1)
    told(journal, "swapped", 1, BOOT)
    trained(journal, range(1))
    told(journal, "swapped", 1, BOOT + 5.02)
    told(journal, "recorded", 1, BOOT + 5.03)
    journal.report("j", report(1, 5.0 + 3.0), BOOT + 8.0, "first")
    later = next_leader(journal)
    told(later, "swapped", 1, BOOT + 8.5)  # agents say again what still holds
    later.report("j", report(2, 5.0 + 6.0), BOOT + 11.0, "first")
    time = later.clocks["j"].time
    assert time is not None
    assert set(time.lost) == {"between steps"}


def test_a_switch_counts_once_however_late_its_ranks_tell_of_it() -> None:
    journal = EventLog()
    trained(journal, range(10))
    told(journal, "swapped", 2, BOOT + 9.0)
    for step in (10, 11, 12):
        ended = 7.0 + WALL * step
        journal.report("j", report(step, ended, plan=2), BOOT + ended, "first")
        told(journal, "swapped", 2, BOOT + ended + 0.01)
    time = journal.clocks["j"].time
    assert time is not None
    assert time.times["switch"] == 1
    assert time.lost["switch"] == pytest.approx(2.0 - 0.01, abs=0.02)
