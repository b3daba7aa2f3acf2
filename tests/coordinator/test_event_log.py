"""Events and steps of late: bounded, in order, from a point on."""

from __future__ import annotations

import msgspec
from elasticd_planner.spec.measurement import Measurement

from elasticd.coordinator.events.event_log import EventLog
from elasticd.machines.job.state.events import CoordinatorNote
from elasticd.wire.event_record import Pacing
from elasticd.wire.worker import Report


def report(step: int, loss: float | None = 1.0) -> Report:
    measured = Measurement(
        device="a/0", plan=1, step=step, tokens=10, block_seconds=1, block_work=10, step_seconds=0.5
    )
    return Report(measurement=measured, loss=loss, tokens=10 if loss is not None else None)


def test_events_have_ids_that_grow_and_the_oldest_go() -> None:
    journal = EventLog(events=3)
    for i in range(5):
        journal.tell(CoordinatorNote(kind="slow", text=str(i)), time=float(i))
    assert [record.id for record in journal.events()] == [3, 4, 5]
    assert [record.text for record in journal.events(after=4)] == ["4"]
    assert journal.events(after=5) == []


def test_steps_are_rank_zeros_and_a_repeated_one_counts_once() -> None:
    journal = EventLog(steps=10)
    for step in (1, 2, 3, 2, 3, 4):
        journal.report("demo", report(step), time=float(step))
        journal.report("demo", report(step, loss=None), time=float(step))
    assert [record.step for record in journal.steps("demo")] == [1, 2, 3, 4]
    assert [record.step for record in journal.steps("demo", after=2)] == [3, 4]
    assert journal.steps("demo")[0].seconds == 0.5
    assert journal.steps("nobody") == []


def test_pacing_is_summed_over_all_ranks() -> None:
    journal = EventLog()
    for loss in (1.0, None):
        journal.report("demo", msgspec.structs.replace(report(1, loss), paced=30, overruns=1), time=1.0)
    assert journal.pacing("demo") == Pacing(paced=60, overruns=2)
    assert journal.pacing("nobody") == Pacing()
