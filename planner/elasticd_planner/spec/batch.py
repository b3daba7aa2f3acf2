"""The batch of a step: which samples each micro-batch of each pipeline trains on.

Made for each step, identically on every rank, never through the store: a pure function of plan, step, seed and,
where they are known, the samples' lengths. Everything that needs sample ids reads it and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

import numpy as np

from elasticd_planner.numeric import Ints
from elasticd_planner.spec import sample_packing
from elasticd_planner.spec.plan import ModulePlan, Plan
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
        at, left = step * self.global_batch, self.global_batch
        found: list[int] = []
        while left:
            epoch, first = divmod(at, self.size)
            part = _epoch(self.seed, epoch, self.size)[first : first + left].tolist()
            found += part
            at, left = at + len(part), left - len(part)
        return tuple(found)


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, size: int) -> Ints:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(size)


class BatchLengths(Value, frozen=True, kw_only=True):
    """What the samples of a step cost: tokens of each, in the order of the samples, and what a token's matrix
    products cost in units of its attention to one other (`sample_packing.linear_of`)."""

    tokens: tuple[int, ...]
    linear: int

    def __post_init__(self) -> None:
        if self.linear < 1 or any(count < 0 for count in self.tokens):
            refuse("lengths of samples must not be negative, and linear at least 1")


def batch_plan(plan: Plan, step: int, samples: Sequence[int], lengths: BatchLengths | None = None) -> BatchPlan:
    """Hands the samples of a step to the pipelines: in order, `micro_batch` at a time; with lengths so that all
    micro-batches cost alike, whatever the number of samples in each."""
    if len(samples) != plan.global_batch:
        refuse(f"step {step}: {len(samples)} samples for a global batch of {plan.global_batch}")
    if lengths is not None and len(lengths.tokens) != len(samples):
        refuse(f"step {step}: {len(lengths.tokens)} lengths for {len(samples)} samples")
    if lengths is None:
        modules = tuple(_in_order(plan, module, samples) for module in plan.modules)
    else:
        modules = tuple(_evenly(plan, module, samples, lengths) for module in plan.modules)
    return BatchPlan(step=step, plan=plan.number, modules=modules)


def _in_order(plan: Plan, module: ModulePlan, samples: Sequence[int]) -> tuple[tuple[MicroBatch, ...], ...]:
    micro = (tuple(samples[i : i + plan.micro_batch]) for i in range(0, len(samples), plan.micro_batch))
    return tuple(tuple(islice(micro, pipeline.micro_batches)) for pipeline in module.pipelines)


def _evenly(
    plan: Plan, module: ModulePlan, samples: Sequence[int], lengths: BatchLengths
) -> tuple[tuple[MicroBatch, ...], ...]:
    slots = [pipeline.micro_batches for pipeline in module.pipelines]
    cut = sample_packing.runs(lengths.tokens, sum(slots), plan.micro_batch, lengths.linear)
    costs = [sample_packing.cost(len(run), lengths.tokens[run[0]], lengths.linear) for run in cut]
    return tuple(
        tuple(tuple(samples[position] for position in cut[index]) for index in mine)
        for mine in sample_packing.dealt(costs, slots)
    )
