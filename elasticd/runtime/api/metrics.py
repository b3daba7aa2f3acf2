"""Metrics of a job, written by the first rank of its plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from elasticd_planner.spec.plan import Plan

from elasticd.runtime.api.evaluation import Evaluation
from elasticd.runtime.api.job import Callback, Job
from elasticd.runtime.api.step import Step


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
