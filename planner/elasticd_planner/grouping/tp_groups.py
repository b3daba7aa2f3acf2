"""TP groups inside a node: devices that are alike, the groups they can form, and the shares of members."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from elasticd_planner.cost.model import CostModel, GroupCost
from elasticd_planner.cost.table_cost import balanced
from elasticd_planner.spec.cluster import Cluster, Link, Rates, rate_of

#: How many devices of each class: of the whole cluster, of a group, of a pipeline.
Counts = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Devices of one island of a node with equal rate and memory: interchangeable in a plan."""

    node: str
    island: int
    rate: float
    memory: int
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """A TP group by classes: `members` are (class, share units) of each member, sorted."""

    members: tuple[tuple[int, int], ...]
    counts: Counts
    node: str
    #: The island that it lies in, None where it crosses islands.
    island: int | None
    cost: GroupCost

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Share units of each member, in the order of `members`."""
        return tuple(units for _, units in self.members)

    @property
    def width(self) -> int:
        """Devices of the group."""
        return len(self.members)


def at_best(group: Group, alike: Sequence[Alike]) -> Group:
    """A group of equal shares that takes the time of the quickest shares, in whole units: no shares give it
    less time, nor the most loaded of its members less to hold."""
    rates = [alike[index].rate for index, _ in group.members]
    least = balanced(rates, sum(group.shares))
    if least is None or len({*rates}) == 1:
        return group
    now, best = (max(n * rate for n, rate in zip(part, rates, strict=True)) for part in (group.shares, least))
    part, cost = min(1.0, best / now), group.cost
    quick = replace(cost, block=part * cost.block, embed=part * cost.embed, head=part * cost.head)
    return replace(group, cost=quick)


def by_name(device: str) -> tuple[str, int]:
    """Sorts "n0/2" before "n0/10"."""
    node, _, index = device.rpartition("/")
    return node, int(index)


def classes(cluster: Cluster, rates: Rates) -> tuple[Alike, ...]:
    """The usable devices (rate below inf) by class, in the order of the cluster, fast before slow."""
    found: list[Alike] = []
    for node in cluster.nodes:
        within, inside = cluster.inner(node)
        alike: dict[tuple[float, int, int], list[str]] = {}
        for device in sorted(node.devices, key=lambda device: by_name(device.name)):
            rate = rate_of(rates, device.name)
            island = node.island_of(device.name) if within != inside else 0
            if math.isfinite(rate):
                alike.setdefault((rate, -device.memory, island), []).append(device.name)
        found += [
            Alike(node=node.name, island=island, rate=rate, memory=-memory, devices=tuple(names))
            for (rate, memory, island), names in sorted(alike.items())
        ]
    return tuple(found)


def hop(a: Group, b: Group, cluster: Cluster) -> Link:
    """The link between two groups: the slowest among all their members."""
    if a.node != b.node:
        return cluster.join((a.node, b.node))
    within, inside = cluster.inner(next(node for node in cluster.nodes if node.name == a.node))
    return within if a.island == b.island is not None else inside


def span(alike: Iterable[Alike], cluster: Cluster) -> Link:
    """The slowest link among devices of these classes."""
    return cluster.reach(a.devices[0] for a in alike)


def groups(alike: Sequence[Alike], cluster: Cluster, cost: CostModel) -> tuple[Group, ...]:
    """Every TP group that the devices of one node can form, narrow ones first."""
    found: list[Group] = []
    for node in dict.fromkeys(a.node for a in alike):
        here = [i for i, a in enumerate(alike) if a.node == node]
        widths = cost.widths(sum(len(alike[i].devices) for i in here))
        for taken in product(*(range(len(alike[i].devices) + 1) for i in here)):
            if sum(taken) not in widths:
                continue
            of_class = [i for i, count in zip(here, taken, strict=True) for _ in range(count)]
            rates = [alike[i].rate for i in of_class]
            islands = {alike[i].island for i in of_class}
            link = span((alike[i] for i in of_class), cluster)
            counts = [0] * len(alike)
            for i, count in zip(here, taken, strict=True):
                counts[i] = count
            for shares in cost.shares(rates):
                members = tuple(zip(of_class, shares, strict=True))
                found.append(
                    Group(
                        members=members,
                        counts=tuple(counts),
                        node=node,
                        island=min(islands) if len(islands) == 1 else None,
                        cost=cost.group(rates, shares, link),
                    )
                )
    return tuple(sorted(found, key=lambda group: (group.width, group.members)))
