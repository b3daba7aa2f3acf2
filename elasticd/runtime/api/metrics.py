"""`Metrics`: a callback that hands the numbers of a job to a writer, on the first rank of its plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from elasticd_planner.spec.plan import Plan

from elasticd.runtime.api.evaluation import Evaluation
from elasticd.runtime.api.job import Callback, Job
from elasticd.runtime.api.step import Step


class Metrics(Callback):
    """Writes loss, norm, tokens, tokens/s, lr and plan of steps, and the means of evaluations as
    "NAME/MEASURE".

    The first rank may move to another process. A step may be written again after the job rolled back: of
    several values of a step the last one holds.
    """

    def __init__(self, write: Callable[[int, Mapping[str, float]], None], *, every: int = 1) -> None:
        """
        Args:
            write: called as write(step, values).
            every: steps from one call to the next.

        Raises:
            ValueError: `every` is below 1.
        """
        if every < 1:
            raise ValueError(f"metrics: every must be at least 1, not {every}")
        self._write, self._every = write, every
        self._tokens, self._since = 0, time.monotonic()

    def on_plan(self, job: Job, plan: Plan) -> None:
        """Measures tokens/s anew."""
        self._begin()

    def _begin(self) -> None:
        self._tokens, self._since = 0, time.monotonic()

    def on_step(self, job: Job, step: Step) -> None:
        """Writes the step, if it is due."""
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
        """Writes the means of the evaluation at the step that it came after."""
        if job.rank == 0:
            prefix = evaluation.name
            if evaluation.weights != "value":
                prefix += f"-{evaluation.weights}"
            means = {f"{prefix}/{key}": mean for key, mean in evaluation.means.items()}
            self._write(evaluation.step - 1, means)
