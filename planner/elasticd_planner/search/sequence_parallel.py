"""Sequence parallelism only where memory demands it: a plan that has it everywhere, with it left out again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elasticd_planner.cost.memory import pipeline_memory
from elasticd_planner.cost.model import CostModel
from elasticd_planner.spec.cluster import Cluster
from elasticd_planner.spec.plan import Pipeline, Stage


def sliced(pipelines: Sequence[Pipeline], *, on: bool) -> tuple[Pipeline, ...]:
    """The same pipelines with sequence parallelism in every TP group, or in none."""

    def changed(stage: Stage) -> Stage:
        return msgspec.structs.replace(stage, sequence_parallel=on and len(stage.devices) > 1)

    return tuple(pipeline.with_stages(changed) for pipeline in pipelines)


def where_needed(pipelines: Sequence[Pipeline], cost: CostModel, cluster: Cluster) -> tuple[Pipeline, ...]:
    """The same layers, with sequence parallelism in those stages alone that do not fit without it."""
    made = []
    for pipeline, plain in zip(pipelines, sliced(pipelines, on=False), strict=True):
        needed = pipeline_memory(plain, cost)
        stages = [
            other if all(needed[name] <= cluster.memory[name] for name in stage.devices) else stage
            for stage, other in zip(pipeline.stages, plain.stages, strict=True)
        ]
        made.append(msgspec.structs.replace(pipeline, stages=tuple(stages)))
    return tuple(made)
