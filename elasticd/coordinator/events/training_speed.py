"""How fast a job trains: tokens over wall time, beside the time of the steps themselves.

A step's own seconds end with it. The script's own code then runs until the next step begins: logging, an
evaluation, a checkpoint. Tokens a second are counted over all of that, from the end of one step to the end of
another, by the times at which the leader heard of the two ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from elasticd_planner.value import Value

from elasticd.coordinator.events.switch_gain import StepRecord

#: Newest steps whose tokens and wall time make the speed that is shown.
SPEED_STEPS = 10


class TimedStep(Protocol):
    """What is read of a step here."""

    @property
    def step(self) -> int:
        """Its index."""

    @property
    def tokens(self) -> int | None:
        """Tokens of all ranks."""

    @property
    def seconds(self) -> float:
        """Its own; 0 where they were not measured."""

    @property
    def time(self) -> float:
        """Unix seconds at which its end was heard of."""


class TrainingSpeed(Value, frozen=True, kw_only=True):
    """The newest step of a job, and how fast its newest steps were."""

    newest: StepRecord
    wall_seconds: float | None  # of wall time a step, in the mean over the newest steps (None: not measured)
    tokens_per_second: float | None  # tokens of those steps over their wall time


def training_speed(steps: Sequence[StepRecord]) -> TrainingSpeed | None:
    """The speed of the last of these steps, oldest first; None where there is none."""
    if not steps:
        return None
    seconds = wall_seconds(steps[-min(len(steps), SPEED_STEPS + 1)], steps[-1])
    counted = [step.tokens for step in steps[-SPEED_STEPS:] if step.tokens is not None]
    tokens = sum(counted) / len(counted) if counted else None
    return TrainingSpeed(
        newest=steps[-1],
        wall_seconds=seconds,
        tokens_per_second=tokens / seconds if tokens is not None and seconds else None,
    )


def wall_seconds(before: TimedStep | None, after: TimedStep) -> float | None:
    """Wall time a step, from the end of one step to the end of a later one. Where none is known before it, the
    step's own; None where that was not measured either."""
    if before is not None and after.step > before.step and after.time > before.time:
        return (after.time - before.time) / (after.step - before.step)
    return after.seconds or None


def tokens_per_second(step: TimedStep, seconds: float | None) -> float | None:
    """A step's tokens over these seconds; None where either is not known."""
    return step.tokens / seconds if step.tokens is not None and seconds else None
