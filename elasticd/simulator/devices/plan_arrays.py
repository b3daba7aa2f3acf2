"""A plan as arrays, by member, stage and pipeline, with what its communication takes on the modelled links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.spec.cluster import Cluster
from elasticd_planner.spec.plan import Pipeline, Plan, Stage
from elasticd_planner.value import refuse

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """By member in rank order: `devices` (index in the cluster), `fraction`, `layers`, whether it has embed or
    head, `micro_batches`, its `pipeline` and `stage_of`. By stage in order: `stage_start` (its first member),
    `waits` (seconds of collectives for one micro-batch), `boundary` (seconds to the next stage, one way).
    `alike`: pipelines of equal depth and micro-batches, as (micro-batches, pipelines, their stages). Each lane
    is a pipeline here."""

    devices: Ints
    fraction: Floats
    layers: Floats
    first: npt.NDArray[np.bool_]
    last: npt.NDArray[np.bool_]
    micro_batches: Ints
    pipeline: Ints
    stage_of: Ints
    stage_start: Ints
    waits: Floats
    boundary: Floats
    alike: tuple[tuple[int, Ints, Ints], ...]
    count: int
    reduction: float


def compiled(plan: Plan, profile: ModelProfile, cluster: Cluster, index: Mapping[str, int]) -> Compiled:
    """`index`: each device's place in the cluster."""
    pipelines = plan.by_lane
    if any(line.chunks > 1 for line in pipelines):
        refuse(f"plan {plan.number} has interleaved stages: the simulator plays plain ones alone")
    stages = [(p, s, stage) for p, line in enumerate(pipelines) for s, stage in enumerate(line.stages)]
    sizes = np.array([len(stage.devices) for _, _, stage in stages])
    stage_of = np.repeat(np.arange(len(stages)), sizes)
    pipeline = np.array([p for p, _, _ in stages])[stage_of]
    fraction = np.array([stage.fraction(i) for _, _, stage in stages for i in range(len(stage.devices))])
    layers = np.array([float(stage.layers) for _, _, stage in stages])[stage_of]
    first = np.array([s == 0 for _, s, _ in stages])[stage_of]
    last = np.array([stage.stop == profile.layers for _, _, stage in stages])[stage_of]
    held = fraction * (
        layers * profile.block.parameter_bytes
        + first * profile.embed.parameter_bytes
        + last * profile.head.parameter_bytes
    )
    ring = cluster.reach(plan.members).seconds(float(held.max()) / len(pipelines))
    return Compiled(
        devices=np.array([index[name] for name in plan.members]),
        fraction=fraction,
        layers=layers,
        first=first,
        last=last,
        micro_batches=np.array([line.micro_batches for line in pipelines])[pipeline],
        pipeline=pipeline,
        stage_of=stage_of,
        stage_start=np.concatenate(([0], np.cumsum(sizes)[:-1])),
        waits=np.array([_waits(stage, profile, cluster) for _, _, stage in stages]),
        boundary=np.array([_boundary(pipelines[p], s, profile, cluster) for p, s, _ in stages]),
        alike=tuple(_alike(pipelines)),
        count=len(pipelines),
        reduction=2 * (len(pipelines) - 1) * ring if len(pipelines) > 1 else 0.0,
    )


def _waits(stage: Stage, profile: ModelProfile, cluster: Cluster) -> float:
    """A stage's all-reduces for one micro-batch: rings over the slowest link of its group."""
    width = len(stage.devices)
    if width == 1:
        return 0.0
    count = stage.layers * profile.block.collectives
    count += profile.embed.collectives if stage.start == 0 else 0
    count += profile.head.collectives if stage.stop == profile.layers else 0
    size = profile.boundary_bytes * profile.tokens
    return count * 2 * (width - 1) * cluster.reach(stage.devices).seconds(size / width)


def _boundary(line: Pipeline, s: int, profile: ModelProfile, cluster: Cluster) -> float:
    """One micro-batch from a stage to the next, or back."""
    if s == len(line.stages) - 1:
        return 0.0
    ends = (line.stages[s].devices[0], line.stages[s + 1].devices[0])
    return cluster.reach(ends).seconds(profile.boundary_bytes * profile.tokens)


def _alike(pipelines: Sequence[Pipeline]) -> list[tuple[int, Ints, Ints]]:
    groups: dict[tuple[int, int], list[int]] = {}
    for p, line in enumerate(pipelines):
        groups.setdefault((len(line.stages), line.micro_batches), []).append(p)
    starts = np.concatenate(([0], np.cumsum([len(line.stages) for line in pipelines])))
    return [
        (micro_batches, np.array(which), starts[which][:, None] + np.arange(depth))
        for (depth, micro_batches), which in sorted(groups.items())
    ]
