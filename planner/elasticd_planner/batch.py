"""The batch of a step: which samples each micro-batch of each pipeline trains on.

Made for each step, identically on every rank, never through the store: a pure function of plan, step and
seed. Everything that needs sample ids reads it and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from elasticd_planner.plan import Plan
from elasticd_planner.value import Value, refuse

MicroBatch = tuple[int, ...]


class BatchPlan(Value, frozen=True, kw_only=True):
    """One strategy's micro-batches: for each module and pipeline, tuples of sample ids."""

    step: int
    plan: int
    modules: tuple[tuple[tuple[MicroBatch, ...], ...], ...]

    def samples(self, module: int = 0) -> tuple[int, ...]:
        """All sample ids of the step, in order."""
        return tuple(i for pipeline in self.modules[module] for micro in pipeline for i in micro)


class Sampler(Value, frozen=True, kw_only=True):
    """Samples of a map-style dataset without replacement, epoch by epoch, as a function of (seed, step)."""

    size: int
    global_batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.size < 1:
            refuse("dataset is empty: it must hold at least one sample")
        if self.global_batch < 1:
            refuse(f"global_batch must be at least 1, not {self.global_batch}")

    def samples(self, step: int) -> tuple[int, ...]:
        """The ids of a step. Every epoch is a permutation of the dataset; a batch may span two epochs."""
        first = step * self.global_batch
        positions = range(first, first + self.global_batch)
        return tuple(int(_epoch(self.seed, p // self.size, self.size)[p % self.size]) for p in positions)


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, size: int) -> npt.NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(size)


def batch_plan(plan: Plan, step: int, samples: Sequence[int]) -> BatchPlan:
    """Hands the samples of a step to the pipelines in order, `micro_batch` at a time."""
    if len(samples) != plan.global_batch:
        refuse(f"step {step}: {len(samples)} samples for a global batch of {plan.global_batch}")
    modules = []
    for module in plan.modules:
        micro = [tuple(samples[i : i + plan.micro_batch]) for i in range(0, len(samples), plan.micro_batch)]
        pipelines = []
        for pipeline in module.pipelines:
            pipelines.append(tuple(micro[: pipeline.micro_batches]))
            micro = micro[pipeline.micro_batches :]
        modules.append(tuple(pipelines))
    return BatchPlan(step=step, plan=plan.number, modules=tuple(modules))
