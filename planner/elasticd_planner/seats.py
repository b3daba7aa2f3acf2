"""Where each member of a plan sits, in columns: its TP group, and what its group does in a step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from elasticd_planner.arrays import Bools, Floats, Ints

if TYPE_CHECKING:
    from elasticd_planner.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Seats:
    """The members that compute, in rank order, and their TP groups. Of a member: its `group`, and the `part` of
    each layer that it holds. Of a group: its width, its layers, its micro-batches in a step, its pipeline
    (counted over all modules), whether it makes activations again, whether it is first or last."""

    group: Ints  # [members]
    part: Floats  # [members]
    width: Ints  # [groups]; and all below
    layers: Ints
    micro_batches: Ints
    pipeline: Ints
    recompute: Bools
    first: Bools
    last: Bools

    @classmethod
    def of(cls, plan: Plan) -> Seats:
        pipelines = [pipeline for module in plan.modules for pipeline in module.pipelines]
        stages = [stage for pipeline in pipelines for stage in pipeline.stages]
        counts, layers = zip(*((len(pipeline.stages), pipeline.layers) for pipeline in pipelines), strict=True)
        width = np.array([len(stage.devices) for stage in stages])
        shares = np.fromiter(
            chain.from_iterable(stage.shares for stage in stages), np.float64, int(width.sum())
        )
        group = np.repeat(np.arange(len(stages)), width)
        start = np.cumsum(width) - width
        return cls(
            group=group,
            part=shares / np.add.reduceat(shares, start)[group],
            width=width,
            layers=np.array([stage.layers for stage in stages]),
            micro_batches=np.repeat([pipeline.micro_batches for pipeline in pipelines], counts),
            pipeline=np.repeat(np.arange(len(pipelines)), counts),
            recompute=np.array([stage.recompute for stage in stages]),
            first=np.array([stage.start == 0 for stage in stages]),
            last=np.array([stage.chunks[-1][1] for stage in stages]) == np.repeat(layers, counts),
        )


def seats_of(plan: Plan, devices: tuple[str, ...]) -> Ints:
    """The rank of each of these devices among the members that compute [devices]; -1 of one that does not."""
    if devices is plan.members or devices == plan.members:
        found = np.arange(len(devices))
        found[len(plan.places) :] = -1
        return found
    ranks = {name: rank for rank, name in enumerate(plan.places)}
    return np.array([ranks.get(name, -1) for name in devices])
