"""The cost of a plan: step time by the 1F1B schedule with communication, memory by position, and the bound.

A stage with n blocks takes, for one micro-batch, forward and backward,

    t = n x (tokens x seconds x max over members(share x rate) + collectives) + embed, head

and a pipeline what the model's `timing` makes of its stages and the boundaries between them. A step takes as
long as its slowest pipeline, then reduces gradients between pipelines, then has a fixed overhead. Of an
interleaved pipeline each chunk of a stage has such a time.

The lanes of a pipeline pass their own micro-batches through their own TP groups and wait for each other nowhere
before the reduction: each costs what a pipeline does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from elasticd_planner.cost.group_bound import Paces
from elasticd_planner.cost.pipeline_time import FORWARD, Times, Timing
from elasticd_planner.spec.cluster import Cluster, Link, Rates, rate_of
from elasticd_planner.spec.plan import Pipeline, Plan, Stage
from elasticd_planner.value import refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCost:
    """Seconds that one micro-batch spends on a TP group, forward and backward: in one block, in embed, in
    head. `forward`: the part of them that is the forward pass."""

    block: float
    embed: float
    head: float
    forward: float = FORWARD


class CostModel(Protocol):
    """The cost model that the search asks. Implementations are pure and depend on devices only by rate, memory
    and node."""

    def for_stage(self, stage: Stage) -> CostModel:
        """The same cost for stages that make their activations again in the backward pass, and have sequence
        parallelism, as this one does."""

    def beside_shares(self, stage: Stage) -> tuple[object, ...]:
        """The values that the cost of a stage's group depends on besides rates, shares, link and what it makes
        again."""

    def under(self, plan: Plan) -> CostModel:
        """The same cost with what is the plan's: its state policy, how many pipelines and members it has."""

    def group(self, rates: Sequence[float], shares: Sequence[int], link: Link) -> GroupCost:
        """A TP group whose members have these rates and shares and talk over `link`."""

    def boundary(self, link: Link) -> float:
        """Seconds that one micro-batch spends between two stages, there and back."""

    @property
    def timing(self) -> Timing:
        """The seconds of a pipeline with given stages and boundaries."""

    def timed(self, timing: Timing) -> CostModel:
        """The same cost with another timing."""

    def memory(
        self, layers: int, shares: Sequence[int], position: int, *, first: bool, last: bool, in_flight: int
    ) -> float:
        """Bytes that a member needs in a stage with `in_flight` micro-batches alive."""

    def carried(self, copies: int, devices: int) -> float:
        """Bytes that each of `devices` needs which only carry so many copies of the optimizer's state."""

    def after(self, pipelines: int, fewest: int, link: Link, depth: int | None = None) -> float:
        """Seconds of a step after its slowest pipeline: reduction between `pipelines`, of which the smallest
        has `fewest` devices in `depth` stages (None: no less than of any), update, and the fixed overhead."""

    def bound(self, rates: Sequence[float], micro_batches: int) -> float:
        """Seconds that no plan on devices of these rates can beat."""

    def widths(self, most: int) -> tuple[int, ...]:
        """The sizes that a TP group may have, up to `most`, ascending."""

    def equal(self) -> CostModel:
        """The same cost with equal shares alone; itself where it has no others."""

    def shares(self, rates: Sequence[float]) -> tuple[tuple[int, ...], ...]:
        """Shares worth trying for members of these rates: equal ones first."""

    @property
    def exact_shares(self) -> bool:
        """True if no other shares than those of `shares` make a group faster."""

    def paces(self, rates: Sequence[float], link: Link) -> Paces:
        """A_0 ... A_n: the most that k groups of these devices, of one node, can reach in sum(1 / block)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownCosts:
    """Costs that were asked for before, of one cluster at one set of rates.

    Of TP groups by what they depend on (rates, shares, link, recomputation, sequence parallelism) and by their
    names; of boundaries, one way, by the devices on both sides.
    """

    groups: dict[tuple[tuple[float, ...], tuple[int, ...], Link, bool, bool, tuple[object, ...]], GroupCost] = (
        field(default_factory=dict)
    )
    stages: dict[tuple[tuple[str, ...], tuple[int, ...], bool, bool, tuple[object, ...]], GroupCost] = field(
        default_factory=dict
    )
    hops: dict[tuple[tuple[str, ...], tuple[str, ...]], float] = field(default_factory=dict)


def stage_times(
    pipeline: Pipeline, cluster: Cluster, rates: Rates, cost: CostModel, known: KnownCosts | None = None
) -> Times:
    """Seconds that one micro-batch spends on each stage, and between them; of an interleaved pipeline on each
    chunk, in the order in which the micro-batch meets them. The pipeline has a single lane (`by_lane`).
    `known`: costs that were asked for before; those of this pipeline are added."""
    if pipeline.rows:
        refuse("a pipeline of several lanes has no times of its own: ask for those of each lane")
    stages, spans = pipeline.stages, pipeline.spans
    known = KnownCosts() if known is None else known
    groups = [_group(stage, cluster, rates, cost, known) for stage in stages]
    around = (*stages, stages[0]) if pipeline.chunks > 1 else stages
    hops = [_hop(stage, after, cluster, cost, known) for stage, after in pairwise(around)]
    forward, backward = [], []
    for place, (start, stop) in enumerate(spans):
        group = groups[place % len(stages)]
        spent = (stop - start) * group.block
        if place == 0:
            spent += group.embed
        if place == len(spans) - 1:
            spent += group.head
        forward.append(spent * group.forward)
        backward.append(spent - forward[-1])
    boundary = (hops * pipeline.chunks)[: len(spans) - 1]
    return Times(forward=np.array(forward), backward=np.array(backward), boundary=np.array(boundary))


def _group(stage: Stage, cluster: Cluster, rates: Rates, cost: CostModel, known: KnownCosts) -> GroupCost:
    beside = cost.beside_shares(stage)
    named = stage.devices, stage.shares, stage.recompute, stage.sliced, beside
    if named not in known.stages:
        slowdowns = tuple([rate_of(rates, device) for device in stage.devices])
        key = slowdowns, stage.shares, cluster.reach(stage.devices), stage.recompute, stage.sliced, beside
        if key not in known.groups:
            known.groups[key] = cost.for_stage(stage).group(*key[:3])
        known.stages[named] = known.groups[key]
    return known.stages[named]


def _hop(stage: Stage, after: Stage, cluster: Cluster, cost: CostModel, known: KnownCosts) -> float:
    key = stage.devices, after.devices
    if key not in known.hops:
        known.hops[key] = cost.boundary(cluster.reach((*stage.devices, *after.devices))) / 2
    return known.hops[key]


def stage_seconds(pipeline: Pipeline, cluster: Cluster, rates: Rates, cost: CostModel) -> tuple[float, ...]:
    """Seconds that one micro-batch spends on each stage; a boundary is charged to the sender."""
    charged = stage_times(pipeline, cluster, rates, cost).charged
    return tuple(map(float, charged.reshape(pipeline.chunks, -1).sum(0)))


def pipeline_seconds(pipeline: Pipeline, cluster: Cluster, rates: Rates, cost: CostModel) -> float:
    """Seconds of a step of one pipeline by its schedule, before what comes after it: of its slowest lane."""
    if pipeline.rows:
        return max(pipeline_seconds(lane, cluster, rates, cost) for lane in pipeline.by_lane)
    times = stage_times(pipeline, cluster, rates, cost)
    if pipeline.chunks > 1:
        return cost.timing.interleaved(times, pipeline.micro_batches, pipeline.chunks)
    return float(cost.timing.seconds(times, pipeline.micro_batches))


def step_seconds(plan: Plan, cluster: Cluster, rates: Rates, cost: CostModel) -> float:
    """Seconds of one step under a plan, by the timing of its cost."""
    slowest = _slowest(plan.by_lane, cluster, rates, cost)
    return slowest + after_seconds(plan, cluster, cost)


def _slowest(pipelines: Sequence[Pipeline], cluster: Cluster, rates: Rates, cost: CostModel) -> float:
    """Seconds of the slowest pipeline. A large job has hundreds that are alike: those with as many stages and
    micro-batches are counted at once, and an interleaved one once for all that take the same."""
    known = KnownCosts()
    alike: dict[tuple[int, int, int], list[Times]] = {}
    for each in pipelines:
        key = each.chunks, len(each.stages), each.micro_batches
        alike.setdefault(key, []).append(stage_times(each, cluster, rates, cost, known))
    found = []
    for (chunks, _, micro_batches), times in alike.items():
        if chunks == 1:
            together = Times(
                forward=np.stack([each.forward for each in times]),
                backward=np.stack([each.backward for each in times]),
                boundary=np.stack([each.boundary for each in times]),
            )
            found.append(float(cost.timing.seconds(together, micro_batches).max()))
            continue
        different = {
            (each.forward.tobytes(), each.work.tobytes(), each.boundary.tobytes()): each for each in times
        }
        found += [cost.timing.interleaved(each, micro_batches, chunks) for each in different.values()]
    return max(found)


def after_seconds(plan: Plan, cluster: Cluster, cost: CostModel) -> float:
    """Seconds of a plan's step after its slowest pipeline."""
    fewest, depth = smallest(plan)
    return cost.under(plan).after(len(plan.by_lane), fewest, cluster.reach(plan.members), depth)


def smallest(plan: Plan) -> tuple[int, int]:
    """Devices and stages of a plan's smallest pipeline."""
    return min((sum(len(stage.devices) for stage in p.stages), len(p.stages)) for p in plan.by_lane)
