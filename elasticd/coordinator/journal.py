"""What people may look back at: events and steps of late, bounded, in the leader's memory."""

from __future__ import annotations

from collections import deque
from typing import Any

from elasticd_planner.value import Value

from elasticd.machines.job.effects import Note
from elasticd.messages import Report

EVENTS = 10_000
STEPS = 20_000


class EventRecord(Value, frozen=True, kw_only=True):
    """Something that happened; `id` grows by one, `time` is in unix seconds."""

    id: int
    time: float
    kind: str
    job: str
    text: str
    data: dict[str, Any]


class StepRecord(Value, frozen=True, kw_only=True):
    """A step as rank 0 reported it: mean loss per token, tokens of all ranks, seconds of wall time, and the
    unix time at which the report came."""

    step: int
    plan: int
    loss: float | None
    tokens: int | None
    seconds: float
    time: float


class Pacing(Value, frozen=True, kw_only=True):
    """What all ranks of a job reported of emulated devices: sections paced, and those that took too long."""

    paced: int = 0
    overruns: int = 0


class Journal:
    """The events of all jobs and the steps of each; the oldest go when there are too many."""

    def __init__(self, events: int = EVENTS, steps: int = STEPS) -> None:
        self._events: deque[EventRecord] = deque(maxlen=events)
        self._steps: dict[str, deque[StepRecord]] = {}
        self._pacing: dict[str, Pacing] = {}
        self._most_steps = steps
        self._next = 1

    def tell(self, note: Note, time: float) -> EventRecord:
        record = EventRecord(
            id=self._next, time=time, kind=note.kind, job=note.job, text=note.text, data=note.data
        )
        self._next += 1
        self._events.append(record)
        return record

    def report(self, job: str, report: Report, time: float) -> None:
        """Keeps rank 0's reports, the only ones with a loss or tokens. A step is done once; a later report of
        it, after a step was repeated, takes the place of the earlier. Of all ranks the pacing is summed."""
        before = self.pacing(job)
        self._pacing[job] = Pacing(
            paced=before.paced + report.paced, overruns=before.overruns + report.overruns
        )
        if report.loss is None and report.tokens is None:
            return
        measured = report.measurement
        steps = self._steps.setdefault(job, deque(maxlen=self._most_steps))
        while steps and steps[-1].step >= measured.step:
            steps.pop()
        steps.append(
            StepRecord(
                step=measured.step,
                plan=measured.plan,
                loss=report.loss,
                tokens=report.tokens,
                seconds=measured.step_seconds,
                time=time,
            )
        )

    def forget(self, job: str) -> None:
        """The steps of a job are not looked at any more; its events go with their age."""
        self._steps.pop(job, None)
        self._pacing.pop(job, None)

    def events(self, after: int = 0) -> list[EventRecord]:
        return _tail(self._events, lambda record: record.id > after)

    def pacing(self, job: str) -> Pacing:
        return self._pacing.get(job, Pacing())

    def steps(self, job: str, after: int = -1) -> list[StepRecord]:
        return _tail(self._steps.get(job, deque()), lambda record: record.step > after)


def _tail(records: deque[Any], wanted: Any) -> list[Any]:
    """The newest records that are wanted, oldest first: they lie at the end, so the rest is not looked at."""
    found: list[Any] = []
    for record in reversed(records):
        if not wanted(record):
            break
        found.append(record)
    found.reverse()
    return found
