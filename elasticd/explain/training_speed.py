"""The training speed of a job: tokens over wall time, beside the time of the steps themselves.

A step's own seconds end with it. The script's own code then runs until the next step begins: logging, an
evaluation, a checkpoint. Tokens a second are counted over all of that, from the end of one step to the end of
another, by the clock of the worker that made both. Two steps of different workers, or of two starts of one,
have no such time between them: a stop, or the wait for other workers, is no part of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from elasticd_planner.value import Value

from elasticd.wire.step_record import StepRecord

#: Newest steps whose tokens and wall time make the speed that is shown.
SPEED_STEPS = 10


class TimedStep(Protocol):
    """The part of a step's record that is read here."""

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
        """Unix seconds at which it ended."""

    @property
    def ended_at(self) -> float:
        """The same in seconds of the worker's clock (0: not known)."""

    @property
    def clock(self) -> str:
        """Name of that clock (empty: not known)."""


class TrainingSpeed(Value, frozen=True, kw_only=True):
    """The newest step of a job, and how fast its newest steps were."""

    newest: StepRecord
    wall_seconds: float | None  # of wall time a step, in the mean over the newest steps (None: not measured)
    tokens_per_second: float | None  # tokens of those steps over their wall time


def training_speed(steps: Sequence[StepRecord]) -> TrainingSpeed | None:
    """The speed of the last of these steps, oldest first; None where there is none."""
    if not steps:
        return None
    pairs = [*pairwise(steps[-SPEED_STEPS - 1 :])]
    walls = [(after, seconds) for before, after in pairs if (seconds := _between(before, after))]
    if not walls and (own := steps[-1].seconds):
        walls = [(steps[-1], own)]
    counted = [(step.tokens, seconds) for step, seconds in walls if step.tokens is not None]
    spent = sum(seconds for _, seconds in counted)
    return TrainingSpeed(
        newest=steps[-1],
        wall_seconds=sum(seconds for _, seconds in walls) / len(walls) if walls else None,
        tokens_per_second=sum(tokens for tokens, _ in counted) / spent if spent else None,
    )


def wall_seconds(before: TimedStep | None, after: TimedStep) -> float | None:
    """Wall time a step, from the end of one step to the end of a later one by the same clock. Where none is
    known before it, the step's own; None where that was not measured either."""
    return (_between(before, after) if before is not None else None) or after.seconds or None


def _between(before: TimedStep, after: TimedStep) -> float | None:
    """Wall time a step between the ends of two; None where no clock measured it."""
    if after.clock != before.clock:
        return None
    seconds = after.ended_at - before.ended_at if after.clock else after.time - before.time
    steps = after.step - before.step
    return seconds / steps if seconds > 0 and steps > 0 else None


def tokens_per_second(step: TimedStep, seconds: float | None) -> float | None:
    """A step's tokens over these seconds; None where either is not known."""
    return step.tokens / seconds if step.tokens is not None and seconds else None
