"""History for people: events and steps, bounded. They are stored by `elasticd.coordinator.events.event_pages`.

The id of an event grows by one, and from leader to leader: a later leader goes on above all that one before it
told, also above what that one had no time to write. So who reads events from an id on misses none that is kept
when the leader changes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Set
from itertools import islice, takewhile
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
from elasticd_planner.value import StoredValue

from elasticd.coordinator.events.job_times import ClockReading, JobClock
from elasticd.coordinator.events.step_clock import StepClock, clock_name
from elasticd.explain.switch_gain import AFTER, BEFORE, Gain, gain_of
from elasticd.explain.training_speed import SPEED_STEPS, TrainingSpeed, training_speed
from elasticd.machines.job.state.events import CoordinatorNote
from elasticd.wire.event_record import EVENTS_OF_A_TERM, EventRecord, Pacing
from elasticd.wire.step_record import StepRecord
from elasticd.wire.worker import Finished, Report

EVENTS = 10_000
STEPS = 20_000
#: Kinds of events after which what comes under a job's name is another start of it, or another job.
ANOTHER_START = ("started_again", "forgotten", "restart_mode")
#: Kinds of events with which a job's time begins to be counted.
BEGINS = ("job_gathered", "planning", "proposed")
#: Fences of a job whose numbers are kept: a plan answers the newest of them.
MOST_FENCES = 8


class Lines(StoredValue, frozen=True, kw_only=True, tag="journal-lines"):
    """A part of the journal."""

    events: tuple[EventRecord, ...] = ()  # oldest first
    #: by job, in the order in which they were reported
    steps: dict[str, tuple[StepRecord, ...]] = msgspec.field(default_factory=dict)
    #: unix seconds as its leader wrote it, by a clock that never runs back (0: of a release without stamps)
    stamp: float = 0.0
    led: float = 0.0  # seconds for which leaders had led then, in all (0: of a release that did not count)


class EventLog:
    """The events of all jobs and the steps of each; the oldest go when there are too many."""

    def __init__(self, events: int = EVENTS, steps: int = STEPS, *, term: int = 0) -> None:
        """term: the leader's, which is larger than those before it."""
        self._events: deque[EventRecord] = deque(maxlen=events)
        self._steps: dict[str, deque[StepRecord]] = {}
        self._pacing: dict[str, Pacing] = {}
        self._most_steps = steps
        self._next = max(1, term * EVENTS_OF_A_TERM)
        self._gained: set[tuple[str, int]] = set()
        self._pauses: dict[str, tuple[int, float]] = {}  # by job: its newest plan, and the longest pause for it
        self._fences: dict[str, deque[int]] = {}  # by job: the numbers of the newest
        self._clocks: dict[str, JobClock] = {}
        self._new_events: deque[EventRecord] = deque(maxlen=events)
        self._new_steps: dict[str, deque[StepRecord]] = {}
        self._step_clocks: dict[str, StepClock] = {}  # of each job's rank 0
        self._swapped: dict[
            str, tuple[int, Set[str]]
        ] = {}  # by job: its newest plan, and the ranks that run it

    def restore(self, lines: Lines) -> None:
        """Takes up what an earlier leader kept; the oldest lines first."""
        for event in lines.events:
            self._events.append(event)
            self._next = max(self._next, event.id + 1)
            if event.kind == "gained" and isinstance(number := event.data.get("number"), int):
                self._gained.add((event.job, number))
        ended = {event.job: event.time for event in lines.events if event.kind in ANOTHER_START}
        self.forget(*ended)
        for job, steps in lines.steps.items():
            for step in steps:
                if step.time > ended.get(job, -math.inf):
                    self._append(job, step)
        self._recount(lines)

    def _recount(self, lines: Lines) -> None:
        """Has the clocks of jobs count what a page has, in the order of its times."""
        steps = [(step.time, job, step) for job, records in lines.steps.items() for step in records]
        events = iter(sorted(lines.events, key=attrgetter("time")))
        event = next(events, None)
        for at, job, step in sorted(steps, key=itemgetter(0)):
            while event is not None and event.time <= at:
                self._count(event)
                event = next(events, None)
            self._clock(job).step(step)
        while event is not None:
            self._count(event)
            event = next(events, None)

    def _count(self, event: EventRecord) -> None:
        if event.kind in ANOTHER_START:
            by_job: tuple[dict[str, Any], ...] = (self._clocks, self._pauses, self._fences, self._swapped)
            for counted in by_job:
                counted.pop(event.job, None)
        if event.kind in BEGINS:
            self._clock(event.job)
        if event.kind == "swapped":
            self._paused(event)
            self._switched(event)
        if event.kind == "fenced" and isinstance(number := event.data.get("number"), int):
            self._fences.setdefault(event.job, deque(maxlen=MOST_FENCES)).append(number)
        known = self._clocks.get(event.job)
        for clock in self._clocks.values() if not event.job else () if known is None else (known,):
            clock.event(event.kind, event.data, event.time)

    def _paused(self, event: EventRecord) -> None:
        """A rank's pause in a switch: the longest is the job's."""
        number, pause = event.data.get("number"), event.data.get("pause_seconds")
        if isinstance(number, int) and isinstance(pause, float | int):
            known, longest = self._pauses.get(event.job, (number, 0.0))
            self._pauses[event.job] = number, max(pause, longest if known == number else 0.0)

    def _switched(self, event: EventRecord) -> None:
        """Notes which ranks told of the switch to a job's newest plan."""
        number, device = event.data.get("number"), event.data.get("device")
        if isinstance(number, int) and isinstance(device, str):
            known, devices = self._swapped.get(event.job, (0, frozenset[str]()))
            self._swapped[event.job] = number, {*devices, device} if known == number else {device}

    def repeats(self, note: CoordinatorNote) -> bool:
        """Returns whether an earlier leader told this: to a new one agents say again what still holds."""
        if note.kind != "swapped":
            return False
        number, devices = self._swapped.get(note.job, (0, frozenset[str]()))
        return note.data.get("number") == number and note.data.get("device") in devices

    def _clock(self, job: str) -> JobClock:
        if job not in self._clocks:
            self._clocks[job] = JobClock()
        return self._clocks[job]

    def tell(self, note: CoordinatorNote, time: float) -> EventRecord:
        """Keeps an event. time: unix seconds."""
        record = EventRecord(
            id=self._next, time=time, kind=note.kind, job=note.job, text=note.text, data=note.data
        )
        self._next += 1
        self._events.append(record)
        self._new_events.append(record)
        self._count(record)
        if note.kind == "gained":
            self._gained.add((note.job, note.data["number"]))
        return record

    def report(self, job: str, report: Report, time: float, incarnation: str = "") -> Gain | None:
        """Keeps rank 0's reports, the only ones with a loss or tokens. A step is done once; a later report of
        it, after a step was repeated, takes the place of the earlier. Of all ranks the pacing is summed.

        Args:
            job: its name.
            report: of one rank and step.
            time: unix seconds at which the report came.
            incarnation: of the worker that reports.

        Returns:
            What the switch to the running plan gained, once so many steps were made under it as tell it.
        """
        before = self.pacing(job)
        self._pacing[job] = Pacing(
            paced=before.paced + report.paced, overruns=before.overruns + report.overruns
        )
        if report.loss is None and report.tokens is None:
            return None
        measured, clock = report.measurement, clock_name(incarnation, report.ended_at)
        step = StepRecord(
            step=measured.step,
            plan=measured.plan,
            loss=report.loss,
            tokens=report.tokens,
            seconds=measured.step_seconds,
            time=self._ended(job, clock, report.ended_at, time) if clock else time,
            ended_at=report.ended_at if clock else 0.0,
            clock=clock,
        )
        self._append(job, step)
        self._clock(job).step(step)
        self._new_steps.setdefault(job, deque(maxlen=self._most_steps)).append(step)
        return self._gain(job, step.plan)

    def _ended(self, job: str, clock: str, ended_at: float, arrived_at: float) -> float:
        """Unix seconds of a step's end, which is not before that of the step before it."""
        step_clock = self._step_clocks.get(job)
        if step_clock is None or step_clock.name != clock:
            step_clock = self._step_clocks[job] = StepClock(clock, arrived_at - ended_at)
        ended, newest = step_clock.leader_time(ended_at, arrived_at), self.newest(job)
        return max(ended, newest.time) if newest is not None and newest.clock == clock else ended

    def finished(self, job: str, said: Finished, time: float) -> StepRecord | None:
        """Keeps the job's last step as the first rank that made it tells it, where rank 0's report of it has
        not come: that one takes its place, should it come still. Returns the step, where it is kept."""
        newest = self.newest(job)
        last = said.step - 1
        if (said.loss is None and said.tokens is None) or (newest is not None and newest.step >= last):
            return None
        step = StepRecord(step=last, plan=said.plan, loss=said.loss, tokens=said.tokens, seconds=0.0, time=time)
        self._append(job, step)
        self._new_steps.setdefault(job, deque(maxlen=self._most_steps)).append(step)
        return step

    def _append(self, job: str, step: StepRecord) -> None:
        steps = self._steps.setdefault(job, deque(maxlen=self._most_steps))
        while steps and steps[-1].step >= step.step:
            steps.pop()
        steps.append(step)
        if step.clock and (job not in self._step_clocks or self._step_clocks[job].name != step.clock):
            self._step_clocks[job] = StepClock(step.clock, step.time - step.ended_at)

    def _gain(self, job: str, plan: int) -> Gain | None:
        if (job, plan) in self._gained:
            return None
        last = [*islice(reversed(self._steps[job]), BEFORE + AFTER + 1)][::-1]
        if len(last) <= BEFORE + AFTER or any(step.plan != plan for step in last[BEFORE:]):
            return None
        number, pause = self._pauses.get(job, (plan, 0.0))
        if last[BEFORE - 1].plan == plan or number != plan:
            return None
        return gain_of(plan, last, pause, self._fences.get(job, ()))

    def new(self, most_events: int, most_steps: int) -> Lines | None:
        """At most so many events, and steps of all jobs, that no call before returned; None where there are
        none."""
        events = _taken(self._new_events, most_events)
        steps: dict[str, tuple[StepRecord, ...]] = {}
        for job, new_steps in self._new_steps.items():
            if most_steps <= 0:
                break
            steps[job] = _taken(new_steps, most_steps)
            most_steps -= len(steps[job])
        self._new_steps = {job: new_steps for job, new_steps in self._new_steps.items() if new_steps}
        if not events and not steps:
            return None
        return Lines(events=events, steps=steps)

    @property
    def new_events(self) -> int:
        """The number of events that `new` has to return."""
        return len(self._new_events)

    def forget(self, *jobs: str) -> None:
        """Drops the steps of jobs that nobody asks for any more; what was told of them stays."""
        kept_by_job: tuple[dict[str, Any], ...] = (
            self._steps,
            self._pacing,
            self._new_steps,
            self._clocks,
            self._pauses,
            self._fences,
            self._step_clocks,
            self._swapped,
        )
        for job in jobs:
            for kept in kept_by_job:
                kept.pop(job, None)
        self._gained = {(job, number) for job, number in self._gained if job not in jobs}

    @property
    def clocks(self) -> dict[str, JobClock]:
        """The wall time of each job by its use; by the job's name."""
        return self._clocks

    @property
    def readings(self) -> dict[str, ClockReading]:
        """The wall time of each job by its use, and its training speed."""
        return {
            job: msgspec.structs.replace(clock.reading, speed=self.speed(job))
            for job, clock in self._clocks.items()
        }

    def newest(self, job: str) -> StepRecord | None:
        """The newest step of a job, if one is kept."""
        steps = self._steps.get(job)
        return steps[-1] if steps else None

    @property
    def speeds(self) -> dict[str, TrainingSpeed]:
        """The newest step of each job, and how fast it trains."""
        speeds = {job: self.speed(job) for job in self._steps}
        return {job: speed for job, speed in speeds.items() if speed is not None}

    def speed(self, job: str) -> TrainingSpeed | None:
        """The newest step of a job, and how fast it trains; None where no step is kept."""
        return training_speed([*islice(reversed(self._steps.get(job, ())), SPEED_STEPS + 1)][::-1])

    @property
    def newest_id(self) -> int:
        """The id of the newest event; 0 where there is none."""
        return self._events[-1].id if self._events else 0

    @property
    def jobs(self) -> set[str]:
        """Those that steps are kept of, or whose time is counted."""
        return {*self._steps, *self._clocks}

    def events(self, after: int = 0) -> list[EventRecord]:
        """Events with an id above `after`, oldest first."""
        return _tail(self._events, lambda record: record.id > after)

    def pacing(self, job: str) -> Pacing:
        """The sum of the pacing that a job's emulated devices reported."""
        return self._pacing.get(job, Pacing())

    def steps(self, job: str, after: int = -1) -> list[StepRecord]:
        """A job's steps above index `after`, oldest first."""
        return _tail(self._steps.get(job, deque()), lambda record: record.step > after)


def _taken(records: deque[Any], most: int) -> tuple[Any, ...]:
    return tuple(records.popleft() for _ in range(min(most, len(records))))


def _tail(records: deque[Any], wanted: Any) -> list[Any]:
    """The newest records that are wanted, oldest first: they lie at the end, so the rest is not looked at."""
    return [*takewhile(wanted, reversed(records))][::-1]
