"""The steps of a job: the newest one, and those that count for the plan in force."""

from __future__ import annotations

import msgspec
from elasticd_planner.readable import counted
from elasticd_planner.spec.batch import BatchSummary
from elasticd_planner.spec.step_measurements import Reported, Step
from elasticd_planner.value import Value


class JobProgress(Value, frozen=True, kw_only=True):
    """The newest step that rank 0 reported."""

    step: int = 0  # updates so far
    at: float = 0.0  # when the last step was reported
    slowest: float = 0.0  # seconds of the slowest of late; what is long past counts less


class LeftOut(Value, frozen=True, kw_only=True):
    """Steps in a row whose update was left out, up to the newest one."""

    first: int  # index of the first of them
    count: int  # of them
    why: str  # of the last of them

    @property
    def words(self) -> str:
        """For people."""
        steps = f"{counted(self.count, 'step')} in a row, from step {self.first} on"
        return f"no progress: {steps}, changed no weight; of the last one, {self.why}"


class JobSteps(Value, frozen=True, kw_only=True):
    """Progress, and the newest steps of the plan in force."""

    #: reports by step, of steps that some members have not reported yet
    gathered: dict[int, Reported] = msgspec.field(default_factory=dict)
    last_steps: tuple[Step, ...] = ()  # complete ones of the plan in force
    batch: BatchSummary | None = None  # the newest packed batch
    progress: JobProgress = JobProgress()  # the newest step
    left_out: LeftOut | None = None  # the newest steps, if they change no weight
