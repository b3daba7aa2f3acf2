"""What a plan costs: step time by the 1F1B formula with communication, memory by position, and the bound.

A stage with n blocks takes, for one micro-batch, forward and backward,

    t = n x (tokens x seconds x max over members(share x rate) + collectives) + embed, head + boundary

and a pipeline with m micro-batches (m - 1) x max_j t_j + sum_j t_j. A step takes as long as its slowest
pipeline, then reduces gradients between pipelines, then has a fixed overhead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from elasticd_planner.bound import Paces
from elasticd_planner.cluster import Cluster, Link, Rates
from elasticd_planner.plan import Pipeline, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCost:
    """Seconds that one micro-batch spends on a TP group: in one block, in embed, in head."""

    block: float
    embed: float
    head: float


class CostModel(Protocol):
    """What the search asks. Implementations are pure and depend on devices only by rate, memory and node."""

    def group(self, rates: Sequence[float], shares: Sequence[int], link: Link) -> GroupCost:
        """A TP group whose members have these rates and shares and talk over `link`."""
        ...

    def boundary(self, link: Link) -> float:
        """Seconds that one micro-batch spends between two stages, there and back."""
        ...

    def memory(
        self, layers: int, shares: Sequence[int], position: int, *, first: bool, last: bool, in_flight: int
    ) -> float:
        """Bytes that a member needs in a stage with `in_flight` micro-batches alive."""
        ...

    def after(self, pipelines: int, fewest: int, link: Link) -> float:
        """Seconds of a step after its slowest pipeline: reduction between `pipelines`, of which the smallest
        has `fewest` devices, and the fixed overhead."""
        ...

    def bound(self, rates: Sequence[float], micro_batches: int) -> float:
        """Seconds that no plan on devices of these rates can beat."""
        ...

    def widths(self, most: int) -> tuple[int, ...]:
        """The sizes that a TP group may have, up to `most`, ascending."""
        ...

    def shares(self, rates: Sequence[float]) -> tuple[tuple[int, ...], ...]:
        """Shares worth trying for members of these rates: equal ones first."""
        ...

    @property
    def exact_shares(self) -> bool:
        """Whether no other shares than those of `shares` make a group faster."""
        ...

    def paces(self, rates: Sequence[float], link: Link) -> Paces:
        """A_0 ... A_n: the most that k groups of these devices, of one node, can reach in sum(1 / block)."""
        ...


def reach(cluster: Cluster, devices: Sequence[str]) -> Link:
    """The slowest link among some devices: between nodes unless all are in one."""
    return cluster.between if len({name.rpartition("/")[0] for name in devices}) > 1 else cluster.inside


def rate_of(rates: Rates, device: str) -> float:
    return rates.get(device, 1.0)


def pipeline_seconds(stages: Sequence[float], micro_batches: int) -> float:
    """1F1B over unequal stages: the slowest runs without a gap, the others fill and drain."""
    return (micro_batches - 1) * max(stages) + sum(stages)


def stage_seconds(pipeline: Pipeline, cluster: Cluster, rates: Rates, cost: CostModel) -> tuple[float, ...]:
    """Seconds that one micro-batch spends on each stage; a boundary is charged to the sender."""
    stages = pipeline.stages
    seconds = []
    for index, stage in enumerate(stages):
        speed = [rate_of(rates, device) for device in stage.devices]
        group = cost.group(speed, stage.shares, reach(cluster, stage.devices))
        spent = stage.layers * group.block
        if index == 0:
            spent += group.embed
        if index == len(stages) - 1:
            spent += group.head
        else:
            spent += cost.boundary(reach(cluster, (stage.devices[0], stages[index + 1].devices[0])))
        seconds.append(spent)
    return tuple(seconds)


def step_seconds(plan: Plan, cluster: Cluster, rates: Rates, cost: CostModel) -> float:
    """Seconds of one step under a plan."""
    pipelines = plan.modules[0].pipelines
    slowest = max(pipeline_seconds(stage_seconds(p, cluster, rates, cost), p.micro_batches) for p in pipelines)
    fewest = min(sum(len(stage.devices) for stage in p.stages) for p in pipelines)
    return slowest + cost.after(len(pipelines), fewest, reach(cluster, plan.members))


def memory_by_device(plan: Plan, cost: CostModel) -> dict[str, int]:
    """Bytes that each member needs: its state, and activations of min(m, stages - position) micro-batches."""
    needed: dict[str, int] = {}
    for pipeline in plan.modules[0].pipelines:
        depth = len(pipeline.stages)
        for index, stage in enumerate(pipeline.stages):
            for position, device in enumerate(stage.devices):
                size = cost.memory(
                    stage.layers,
                    stage.shares,
                    position,
                    first=index == 0,
                    last=index == depth - 1,
                    in_flight=min(pipeline.micro_batches, depth - index),
                )
                needed[device] = math.ceil(size)
    return needed
