"""The search's task: a planning problem in the terms of the search, and the pipelines that the search finds.

A pipeline has three forms. While it is searched, its groups are counted by classes of devices
(`tp_groups.Group`, `node_partitions.GroupType`). Once found it has names: `Chained`, and with its layers the
plan's own `Pipeline`. Bounds and numerics have it as arrays: `Terms` of stages, `StageCosts`, the `Line` of its
time, the `Column` of a type of group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import msgspec

from elasticd_planner.cost.model import CostModel, step_seconds
from elasticd_planner.cost.table_cost import TableCost
from elasticd_planner.layout.optimizer_sharding import with_carriers
from elasticd_planner.placement.state_movement import strategy
from elasticd_planner.problem import Problem
from elasticd_planner.spec.cluster import NORMAL, Cluster, Device, Place, Rates, node_of, rate_of
from elasticd_planner.spec.plan import Pipeline, Plan, Stage

#: The most devices for which every plan is enumerated.
EXACT_DEVICES = 8

#: Of these so many shapes and combinations are looked at; where there are more, the search for any number of
#: devices goes on. A shape whose curve is made counts as so many.
ENUMERATED, CURVE = 3_000_000, 50

#: The same of all settings together, where there are several.
ENUMERATED_SETTINGS = 1_000_000

#: The same of a packed problem's view: with more, none of ten drawn packed jobs had a quicker plan.
ENUMERATED_PACKED = 100_000


class UnitProblem(Problem, frozen=True, kw_only=True):
    """A problem in units (layer x micro-batch) instead of seconds: a problem file without `model.times`. Of its
    `profile` only the bytes count, for what moves between plans. Each pipeline has at least as many
    micro-batches as stages."""

    table: TableCost  # what a layer costs in units, and its memory


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be planned, in the terms of the search. fixed_tp: size of groups on nodes of normal devices;
    fixed_dp: number of pipelines; None: searched. deep: as many micro-batches as stages at least."""

    cluster: Cluster
    rates: Rates
    cost: CostModel
    layers: int
    micro_batches: int
    deep: bool = False
    fixed_tp: int | None = None
    fixed_dp: int | None = None

    @property
    def work_bound(self) -> float:
        """Seconds that no plan can beat: all work over the speed of all usable devices."""
        return self.cost.bound([rate_of(self.rates, d.name) for d in alive(self)], self.micro_batches)

    def seconds(self, plan: Plan) -> float:
        """The objective: seconds (or units) of a step by the timing of the cost."""
        return step_seconds(plan, self.cluster, self.rates, self.cost)

    def hop(self, a: NamedGroup, b: NamedGroup) -> float:
        """Seconds that one micro-batch spends between two TP groups, there and back."""
        return self.cost.boundary(self.cluster.reach((*a.devices, *b.devices)))

    @cached_property
    def normal_nodes(self) -> frozenset[str]:
        """The nodes all of whose devices are normal, where groups have the pinned size."""
        rates, nodes = self.rates, self.cluster.nodes
        return frozenset(n.name for n in nodes if all(rate_of(rates, d.name) <= NORMAL for d in n.devices))

    def may_have(self, width: int, nodes: Iterable[str]) -> bool:
        """Returns whether the pin allows a TP group of this size on these nodes."""
        return self.fixed_tp in (None, width) or not self.normal_nodes.issuperset(nodes)

    def ranked(self, names: Iterable[str]) -> tuple[str, ...]:
        """Devices in order: fast ones first, then those with more memory."""
        return tuple(sorted(names, key=lambda name: (rate_of(self.rates, name), -self.cluster.memory[name])))

    @property
    def crosses_nodes(self) -> bool:
        """Whether no TP group fits in a node, so that groups must cross nodes."""
        return not self.cost.widths(max((len(node.devices) for node in self.cluster.nodes), default=0))


def alive(given: Problem | Task) -> tuple[Device, ...]:
    """The devices that can be used: those with a finite rate."""
    return tuple(d for d in given.cluster.devices if math.isfinite(rate_of(given.rates, d.name)))


def plan_of(problem: Problem, pipelines: Sequence[Pipeline], number: int) -> Plan:
    """The plan of these pipelines under the first state policy of a problem. Other devices are idle, or carry
    replicas."""
    used = {name for pipeline in pipelines for stage in pipeline.stages for name in stage.devices}
    plan = Plan(
        number=number,
        strategies=(strategy(pipelines),),
        state=problem.search_space.states[0],
        micro_batch=problem.micro_batch,
        global_batch=problem.global_batch,
        idle=tuple(device.name for device in problem.cluster.devices if device.name not in used),
    )
    return with_carriers(plan) if plan.state.replicas else plan


def dealt(pipelines: Sequence[Pipeline], counts: Sequence[int]) -> tuple[Pipeline, ...]:
    """The same pipelines with so many micro-batches each."""
    pairs = zip(pipelines, counts, strict=True)
    return tuple(msgspec.structs.replace(pipeline, micro_batches=count) for pipeline, count in pairs)


class NamedGroup(Protocol):
    """A TP group by the names of its devices: a stage of a plan, or a `DeviceGroup`."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the members, in the order of their shares."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Share units by member."""


#: What the time and the memory of a pipeline depend on.
Signature = tuple[object, ...]


def pipeline_signature(task: Task, groups: Sequence[NamedGroup]) -> Signature:
    """Equal for pipelines that cost the same in each order of their stages with equal micro-batches: of each TP
    group the shares and of each member slowdown, memory and place; of a plan's stages layers, recomputation and
    sequence parallelism too."""
    nodes: dict[str, int] = {}
    joined: dict[Place, int] = {}  # the groups of further levels
    found: list[object] = []
    for group in groups:
        members = tuple(
            (
                rate_of(task.rates, name),
                task.cluster.memory[name],
                nodes.setdefault(node_of(name), len(nodes)),
                task.cluster.local_links(name),
                *(joined.setdefault(place, len(joined)) for place in task.cluster.joining(name)),
            )
            for name in group.devices
        )
        found.append((members, group.shares))
        if isinstance(group, Stage):
            found.append((group.chunks, group.recompute, group.sliced))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceGroup:
    """A TP group with names: devices and their shares, in the order of the plan."""

    devices: tuple[str, ...]
    shares: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chained:
    """A pipeline whose layers are not divided yet: its groups in order (those found, or a plan's stages), and
    its micro-batches."""

    groups: tuple[NamedGroup, ...]
    micro_batches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The pipelines, and the seconds that the search gives them."""

    pipelines: tuple[Chained, ...]
    seconds: float

    @property
    def smallest(self) -> int:
        """Devices of the smallest pipeline."""
        return min(sum(len(group.devices) for group in chained.groups) for chained in self.pipelines)
