"""How fast a job trains: tokens over wall time, the steps' own time beside it, and the last step of all."""

from __future__ import annotations

import pytest
from elasticd_planner.spec.measurement import Measurement

from elasticd.coordinator.events.event_log import EventLog
from elasticd.coordinator.events.job_times import JobClock
from elasticd.explain.training_speed import SPEED_STEPS, training_speed, wall_seconds
from elasticd.machines.job.state.events import CoordinatorNote
from elasticd.wire.step_record import StepRecord
from elasticd.wire.worker import Finished, Report


def steps(count: int, *, body: float = 0.3, own: float = 0.1, tokens: int = 40) -> list[StepRecord]:
    """Steps of a loop whose body takes some seconds, too."""
    return [
        StepRecord(step=index, plan=1, loss=2.0, tokens=tokens, seconds=own, time=100.0 + (body + own) * index)
        for index in range(count)
    ]


def report(step: int, loss: float = 2.0) -> Report:
    measured = Measurement(
        device="a/0", plan=1, step=step, tokens=40, block_seconds=0.1, block_work=1.0, step_seconds=0.1
    )
    return Report(measurement=measured, loss=loss, tokens=40)


def test_tokens_are_counted_over_the_loops_body_too() -> None:
    found = training_speed(steps(30))
    assert found is not None
    assert found.wall_seconds == pytest.approx(0.4)
    assert found.tokens_per_second == pytest.approx(100.0)
    assert found.newest.seconds == 0.1


def test_a_speed_is_of_the_newest_steps_and_not_of_those_before() -> None:
    slow = steps(20, body=9.0)
    last = slow[-1]
    quick = [
        StepRecord(step=last.step + n, plan=1, loss=2.0, tokens=40, seconds=0.1, time=last.time + 0.2 * n)
        for n in range(1, SPEED_STEPS + 1)
    ]
    found = training_speed([*slow, *quick])
    assert found is not None
    assert found.wall_seconds == pytest.approx(0.2)


def test_a_first_step_is_as_long_as_it_took_itself() -> None:
    assert training_speed([]) is None
    found = training_speed(steps(1))
    assert found is not None
    assert (found.wall_seconds, found.tokens_per_second) == (0.1, pytest.approx(400.0))


def test_what_was_not_measured_has_no_speed() -> None:
    (step,) = steps(1, own=0.0)
    assert wall_seconds(None, step) is None
    found = training_speed([step])
    assert found is not None
    assert found.tokens_per_second is None


def test_steps_that_are_not_kept_count_as_the_others() -> None:
    found = training_speed([step for step in steps(12) if step.step not in (5, 6)])
    assert found is not None
    assert found.tokens_per_second == pytest.approx(100.0)


# -- the last step ---------------------------------------------------------------------------------------------


def test_the_last_steps_loss_is_kept_where_the_first_ranks_report_of_it_does_not_come() -> None:
    journal = EventLog()
    for index in range(5):
        journal.report("j", report(index), time=100.0 + index)
    said = Finished(step=6, plan=1, loss=1.25, tokens=40)
    kept = journal.finished("j", said, time=105.0)
    assert kept is not None
    newest = journal.newest("j")
    assert newest is not None
    assert (newest.step, newest.loss, newest.tokens) == (5, 1.25, 40)
    assert journal.finished("j", said, time=105.1) is None, "the others say the same"
    speed = journal.speed("j")
    assert speed is not None
    assert speed.tokens_per_second == pytest.approx(40.0)
    time = journal.clocks["j"].time
    assert time is not None
    assert (time.steps, time.repeated) == (5, 0), "of time nothing was measured"


def test_a_late_report_of_the_last_step_takes_the_place_of_what_others_said() -> None:
    journal = EventLog()
    journal.report("j", report(0), time=100.0)
    journal.finished("j", Finished(step=2, plan=1, loss=1.25, tokens=40), time=101.0)
    journal.report("j", report(1, loss=1.25), time=101.1)
    assert [step.seconds for step in journal.steps("j")] == [0.1, 0.1]
    time = journal.clocks["j"].time
    assert time is not None
    assert (time.steps, time.repeated) == (2, 0)


def test_a_release_that_does_not_say_the_loss_adds_no_step() -> None:
    journal = EventLog()
    journal.report("j", report(0), time=100.0)
    assert journal.finished("j", Finished(step=5), time=101.0) is None
    assert [step.step for step in journal.steps("j")] == [0]


def test_a_later_leader_knows_the_last_step_and_the_speed_of_those_before_it() -> None:
    journal = EventLog()
    for index in range(12):
        journal.report("j", report(index), time=100.0 + 0.4 * index)
    lines = journal.new(100, 100)
    assert lines is not None
    later = EventLog(term=2)
    later.restore(lines)
    assert later.speed("j") == journal.speed("j")


# -- where the time went ---------------------------------------------------------------------------------------


def lost(kind: str, gap: float) -> dict[str, float]:
    """Seconds by cause of a job whose loop has a body of 0.3 s, after an event and so long a gap."""
    clock = JobClock()
    for step in steps(10):
        clock.step(step)
    last = steps(10)[-1]
    clock.event(kind, {}, 0.0)
    clock.step(StepRecord(step=10, plan=1, loss=2.0, tokens=40, seconds=0.1, time=last.time + gap + 0.1))
    assert clock.time is not None
    return clock.time.lost


@pytest.mark.parametrize(("kind", "cause"), [("checkpoint", "checkpoint"), ("swapped", "switch")])
def test_a_cause_has_only_what_is_beyond_the_loops_body(kind: str, cause: str) -> None:
    found = lost(kind, 0.35)
    assert found[cause] == pytest.approx(0.05)
    assert found["between steps"] == pytest.approx(10 * 0.3)
    assert lost(kind, 0.2).get(cause, 0.0) == 0.0, "nothing was lost by it"


def test_the_pause_of_a_switch_is_that_which_its_ranks_measured() -> None:
    journal = EventLog()
    for index in range(5):
        journal.report("j", report(index), time=100.0 + 0.4 * index)
    for pause in (0.03, 0.049, 0.04):
        data = {"number": 2, "pause_seconds": pause}
        journal.tell(CoordinatorNote(kind="swapped", job="j", text="", data=data), time=102.0)
    gains = []
    for index in range(5, 40):
        measured = report(index).measurement
        quicker = Measurement(
            device="a/0",
            plan=2,
            step=measured.step,
            tokens=40,
            block_seconds=0.05,
            block_work=1.0,
            step_seconds=0.05,
        )
        found = journal.report("j", Report(measurement=quicker, loss=2.0, tokens=40), time=100.0 + 0.4 * index)
        gains += [found] if found is not None else []
    assert [gain.pause for gain in gains[:1]] == [0.049]
    assert gains[0].text.endswith("the switch took 0.049 s, paid back in 1 step")
