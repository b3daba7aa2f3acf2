"""What the user trains, the same under every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from elasticd_planner.spec.batch import BatchPlan, Sampler
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.sample_packing import linear_of
from torch import nn

from elasticd.runtime.data.loader import Collate, Dataset, at_length, length_of
from elasticd.runtime.data.prefetch import Reader
from elasticd.runtime.data.step_samples import Feed, Mapped
from elasticd.runtime.engine.mixed_precision import Precision
from elasticd.runtime.engine.pipeline_schedule import Schedule, one_forward_one_backward
from elasticd.runtime.engine.pipeline_stage import Loss
from elasticd.runtime.model.model import Model
from elasticd.runtime.snapshot.restore import Snapshots

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the user trains, the same under every plan. `clip` is the largest gradient norm, if any; `length`
    gives the tokens of a sample by its index, where they are unequal; `readers` threads read samples ahead; the
    folder `checkpoints` has what a job may start from, `snapshots` gives what this node's agent keeps of it;
    `source` gives the samples, where they are not those of a map-style dataset. precision: what `model` was
    `lowered` to (None: it is as it was made); `recomputed` are the blocks that make their activations again
    whatever the plan says."""

    model: Model
    loss: Loss
    optimizer: MakeOptimizer
    dataset: Dataset
    collate: Collate
    sampler: Sampler
    clip: float | None = None
    scheduler: MakeScheduler | None = None
    checkpoints: Path | None = None
    snapshots: Snapshots = field(default_factory=Snapshots)
    schedule: Schedule = one_forward_one_backward
    length: Callable[[int], int] | None = None
    readers: int = 1
    source: Feed | None = None
    recomputed: tuple[int, ...] = ()
    precision: Precision | None = None

    @property
    def master(self) -> torch.dtype | None:
        """The type of master weights, where there are any."""
        return self.precision.master if self.precision is not None and self.precision.separate else None

    @cached_property
    def reader(self) -> Reader:
        """One under all plans, so that a new one finds what is read already."""
        return Reader(self.dataset, self.readers)

    @cached_property
    def feed(self) -> Feed:
        """One under all plans, too."""
        return self.source or Mapped(self.sampler, self.reader, self.length, linear_of(self.model.spec))

    @cached_property
    def _shifted(self) -> dict[int, Recipe]:
        return {}

    def read_as(self, plan: Plan) -> Recipe:
        """The same for a plan under which the data is read in other sequences. Raises ValueError where the
        dataset cannot be."""
        tokens = plan.sequence
        if not tokens:
            return self
        if tokens not in self._shifted:
            shifted = at_length(self.dataset, tokens)
            made = replace(self, dataset=shifted, length=length_of(shifted), source=None)
            if isinstance(self.feed, Mapped):
                made = replace(made, source=self.feed.reading(made.reader, made.length))
            self._shifted[tokens] = made
        return self._shifted[tokens]

    def batch(self, plan: Plan, step: int) -> BatchPlan:
        """The samples of a step under a plan, the same on every rank."""
        return self.feed.batch(plan, step)
