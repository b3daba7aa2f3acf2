"""What a script may hang onto a job: callbacks on every rank, and metrics from the first one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from elasticd_planner.plan import Plan

from elasticd.runtime.step import Step

if TYPE_CHECKING:
    from elasticd.runtime.evaluation import Evaluation
    from elasticd.runtime.job import Job


class Callback:
    """Its methods are called on every rank that is in the plan, in the thread that trains, between steps: what
    they take, all wait for. What they raise ends the loop, as if its body had raised it."""

    def on_plan(self, job: Job, plan: Plan) -> None:
        """Another plan is in force, and this device is in it; of one that stands by nothing is told."""

    def on_step(self, job: Job, step: Step) -> None:
        """A step is done, and the loop is about to be given it."""

    def on_evaluation(self, job: Job, evaluation: Evaluation) -> None:
        """An evaluation of the script's is done."""

    def on_end(self, job: Job) -> None:
        """The last step is done, or the loop was left; the process has no plan any more."""


class Callbacks(Callback):
    """Several, called in order."""

    def __init__(self, callbacks: tuple[Callback, ...]) -> None:
        self._callbacks = callbacks
        self._plan: int | None = None

    def on_plan(self, job: Job, plan: Plan) -> None:
        """Told of each plan once."""
        if plan.number != self._plan:
            self._plan = plan.number
            for each in self._callbacks:
                each.on_plan(job, plan)

    def on_step(self, job: Job, step: Step) -> None:
        for each in self._callbacks:
            each.on_step(job, step)

    def on_evaluation(self, job: Job, evaluation: Evaluation) -> None:
        for each in self._callbacks:
            each.on_evaluation(job, evaluation)

    def on_end(self, job: Job) -> None:
        for each in self._callbacks:
            each.on_end(job)


class Metrics(Callback):
    """Hands numbers to `write(step, values)` on the plan's first rank alone: loss, norm, tokens, tokens/s, lr
    and plan after every `every`-th step, and of an evaluation its means as "NAME/MEASURE".

    The first rank may move to another process, and a step may be written again after a recovery that went back:
    whoever reads takes the last of a step."""

    def __init__(self, write: Callable[[int, Mapping[str, float]], None], *, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"metrics: every must be at least 1, not {every}")
        self._write, self._every = write, every
        self._tokens, self._since = 0, time.monotonic()

    def on_plan(self, job: Job, plan: Plan) -> None:
        self._begin()

    def _begin(self) -> None:
        self._tokens, self._since = 0, time.monotonic()

    def on_step(self, job: Job, step: Step) -> None:
        self._tokens += step.tokens
        if (step.index + 1) % self._every:
            return
        seconds = max(time.monotonic() - self._since, 1e-9)
        values = {
            "loss": step.loss,
            "norm": step.norm,
            "tokens": float(step.tokens),
            "tokens/s": self._tokens / seconds,
            "plan": float(step.plan),
        }
        if job.learning_rate is not None:
            values["lr"] = job.learning_rate
        self._begin()
        if job.rank == 0:
            self._write(step.index, values)

    def on_evaluation(self, job: Job, evaluation: Evaluation) -> None:
        if job.rank == 0:
            prefix = evaluation.name
            if evaluation.weights != "value":
                prefix += f"-{evaluation.weights}"
            means = {f"{prefix}/{key}": mean for key, mean in evaluation.means.items()}
            self._write(evaluation.step - 1, means)
