"""The wall time of a job: the part in steps that count, or into which kind of loss.

ETTR (effective training time ratio, as in ByteRobust, arXiv 2509.16293) is the part of the wall time since the
first step began that went into steps of the surviving history. What is left is lost, and each second of it has
one cause, by what happened since the step before:

    recovery       workers were lost, fenced off, hung or raised, and the job waited for it
    switch         another plan was put into force (a job's first plan is no switch)
    repeated steps steps that were done, and were done again after a roll back
    waiting        the job waited for devices or for a copy of its state
    checkpoint     a checkpoint became complete meanwhile
    between steps  nothing of these: the script's own code between two steps, and reports that came late

The script's own code runs between any two steps. So a cause has only what is beyond the usual time between two
steps, which is the median of those without a cause.

Goodput counts a step only for what it takes at the healthy speed: the fastest plan's median so far. A
`JobClock` is fed with the steps and events of one job in the order of their times, by the leader as they come,
and by whoever reads them later; the figures are the same.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from elasticd_planner.value import Value

from elasticd.explain.training_speed import TrainingSpeed
from elasticd.wire.job_time import JobTime
from elasticd.wire.step_record import StepRecord

#: Kinds of events by the loss that they announce; of several since a step the first of this order counts.
CAUSES: Mapping[str, tuple[str, ...]] = {
    "recovery": ("fenced", "worker_lost", "raised", "halted", "agent_restarted"),
    "switch": ("recorded", "swapped"),
    "waiting": ("waiting",),
    "checkpoint": ("checkpoint",),
}
OTHER, REPEATED = "between steps", "repeated steps"
#: Kinds of events by the reason that they are for a new plan; of several the first of this order counts.
REASONS: Mapping[str, tuple[str, ...]] = {
    "fault": ("fenced",),
    "drain": ("drained", "leaving"),
    "joined": ("joined", "node_up"),
    "slow": ("slow", "corrected"),
    "recovered": ("recovered", "faster"),
    "shifted": ("shifted",),
    "settings": ("configured",),
    "start": ("job_gathered",),
}
#: Steps of a plan until its median counts as a speed, and steps of it that the median is of.
LEAST_STEPS, MOST_STEPS = 5, 101
#: Steps in a row, at most, that count although no leader has their reports.
MOST_UNHEARD = 1000
#: Newest times between two steps, without another cause, whose median is the usual one.
USUAL_STEPS = 21


class ClockReading(Value, frozen=True, kw_only=True):
    """All that a clock has counted, at one moment."""

    time: JobTime | None  # None: no step was made yet
    replans: dict[str, int]  # proposals by reason
    moved_bytes: int  # sent in switches
    checkpoint_at: float | None = None  # unix seconds of the newest checkpoint
    stop_asked_at: float | None = None  # unix seconds of the newest wish to stop the job
    speed: TrainingSpeed | None = None  # of its newest steps (None: not asked, or no step was made yet)


class JobClock:
    """Counts the time of one job."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._last = self._productive = 0.0
        self._steps: deque[tuple[int, float]] = deque(maxlen=20_000)  # index and seconds, ascending
        self._clock = ""  # by which the newest step was timed
        self._count = self._repeated = 0
        self._lost: dict[str, float] = defaultdict(float)
        self._times: Counter[str] = Counter()
        self._between: deque[float] = deque(maxlen=USUAL_STEPS)  # seconds between two steps, without a cause
        self._since: set[str] = set()  # kinds of events since the last step
        self._plan, self._of_plan = -1, list[float]()  # the newest plan's seconds, sorted
        self._fastest: float | None = None  # the least median of the plans before it
        self._told: set[str] = set()  # kinds of events since the last proposal
        self.replans: Counter[str] = Counter()  # proposals by their reason
        self.moved_bytes = 0  # sent in switches, checksums included
        self._at: dict[str, float] = {}  # unix seconds of the newest event, by the kinds that are read

    def event(self, kind: str, data: Mapping[str, Any], time: float) -> None:
        """Something happened to the job, or to its cluster, at this time in unix seconds."""
        if kind in ("checkpoint", "stopping"):
            self._at[kind] = time
        if not self._is_in_force(kind, data):
            self._since.add(kind)
        if kind == "proposed":
            self.replans[_first(REASONS, self._told, "other")] += 1
            self._told.clear()
        else:
            self._told.add(kind)
        if kind == "swapped" and isinstance(sent := data.get("bytes_sent"), int):
            self.moved_bytes += sent

    def _is_in_force(self, kind: str, data: Mapping[str, Any]) -> bool:
        """Returns whether an event tells of a plan under which steps were made: a rank that tells it late, or
        again to a new leader, stops nobody."""
        number = data.get("number")
        return kind in CAUSES["switch"] and isinstance(number, int) and number <= self._plan

    def step(self, record: StepRecord) -> None:
        """A step was reported. One of an index that was reported before takes the place of that one and of all
        after it: they were rolled back."""
        if record.seconds <= 0.0:  # not measured
            return
        seconds, unheard = record.seconds, range(0)
        if self._began is None:
            self._began = record.time - seconds
        else:
            since = max(0.0, record.time - self._last)
            unheard = self._unheard(record)
            seconds = min(seconds, since / (1 + len(unheard)))
            self._lose(since - seconds * (1 + len(unheard)))
        while self._steps and self._steps[-1][0] >= record.step:
            _, again = self._steps.pop()
            self._count -= 1
            self._repeated += 1
            self._productive -= again
            self._lost[REPEATED] += again
            self._times[REPEATED] += 1
        for index in (*unheard, record.step):
            self._steps.append((index, seconds))
            self._count += 1
            self._productive += seconds
        self._last, self._clock = max(self._last, record.time), record.clock
        self._since.clear()
        self._paced(record)

    def _unheard(self, record: StepRecord) -> range:
        """The steps before this one whose reports were lost, with a leader that died. The worker that made the
        steps around them made these too, as its clock shows; they count as long as this one."""
        newest = self._steps[-1][0] if self._steps else record.step
        if not record.clock or record.clock != self._clock or record.step <= newest:
            return range(0)
        return range(max(newest + 1, record.step - MOST_UNHEARD), record.step)

    def _lose(self, seconds: float) -> None:
        cause = self.pending
        if cause == OTHER:
            self._between.append(seconds)
        else:
            usual = min(seconds, median(self._between)) if self._between else 0.0
            self._add_loss(OTHER, usual)
            seconds -= usual
        self._add_loss(cause, seconds)

    def _add_loss(self, cause: str, seconds: float) -> None:
        if seconds > 0:
            self._lost[cause] += seconds
            self._times[cause] += 1

    def _paced(self, record: StepRecord) -> None:
        """The first step of a plan pays for what is done once."""
        if record.plan != self._plan:
            self._fastest = self._healthy
            self._plan, self._of_plan = record.plan, []
        elif len(self._of_plan) < MOST_STEPS:
            insort(self._of_plan, record.seconds)

    @property
    def _healthy(self) -> float | None:
        """Seconds of a step at the healthy speed: the median of the fastest plan."""
        medians = [] if self._fastest is None else [self._fastest]
        if len(self._of_plan) >= LEAST_STEPS:
            medians.append(self._of_plan[len(self._of_plan) // 2])
        return min(medians, default=None)

    @property
    def time(self) -> JobTime | None:
        """The uses of the time; None before the first step."""
        if self._began is None:
            return None
        return JobTime(
            began=self._began,
            last=self._last,
            productive=max(0.0, self._productive),
            steps=self._count,
            repeated=self._repeated,
            lost=dict(self._lost),
            times=dict(self._times),
            healthy=self._healthy,
        )

    @property
    def reading(self) -> ClockReading:
        """All that was counted so far."""
        return ClockReading(
            time=self.time,
            replans=dict(self.replans),
            moved_bytes=self.moved_bytes,
            checkpoint_at=self._at.get("checkpoint"),
            stop_asked_at=self._at.get("stopping"),
        )

    @property
    def pending(self) -> str:
        """The cause of what is lost since the newest step, as far as it can be told now."""
        return _first(CAUSES, self._since, OTHER)


def _first(known: Mapping[str, tuple[str, ...]], told: set[str], default: str) -> str:
    return next((name for name, kinds in known.items() if told.intersection(kinds)), default)
