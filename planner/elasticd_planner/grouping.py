"""TP groups inside a node: devices that are alike, the groups they can form, and the shares of members."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from elasticd_planner.cluster import Cluster, Rates
from elasticd_planner.cost import CostModel, GroupCost, rate_of

#: How many devices of each class: of the whole cluster, of a group, of a pipeline.
Counts = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Devices of one node with equal rate and memory: interchangeable in a plan."""

    node: str
    rate: float
    memory: int
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """A TP group by classes: `members` are (class, share units) of each member, sorted."""

    members: tuple[tuple[int, int], ...]
    counts: Counts
    node: str
    cost: GroupCost
    #: For each class and units that occur, a position that has them (for the memory).
    positions: tuple[tuple[int, int], ...]

    @cached_property
    def shares(self) -> tuple[int, ...]:
        return tuple(units for _, units in self.members)

    @property
    def width(self) -> int:
        return len(self.members)


def by_name(device: str) -> tuple[str, int]:
    """Sorts "n0/2" before "n0/10"."""
    node, _, index = device.rpartition("/")
    return node, int(index)


def classes(cluster: Cluster, rates: Rates) -> tuple[Alike, ...]:
    """The usable devices (rate below inf) by class, in the order of the cluster, fast before slow."""
    found: list[Alike] = []
    for node in cluster.nodes:
        alike: dict[tuple[float, int], list[str]] = {}
        for device in sorted(node.devices, key=lambda device: by_name(device.name)):
            rate = rate_of(rates, device.name)
            if math.isfinite(rate):
                alike.setdefault((rate, -device.memory), []).append(device.name)
        found += [
            Alike(node=node.name, rate=rate, memory=-memory, devices=tuple(names))
            for (rate, memory), names in sorted(alike.items())
        ]
    return tuple(found)


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
            counts = [0] * len(alike)
            for i in of_class:
                counts[i] += 1
            for shares in cost.shares(rates):
                members = tuple(zip(of_class, shares, strict=True))
                distinct = dict.fromkeys(members)
                found.append(
                    Group(
                        members=members,
                        counts=tuple(counts),
                        node=node,
                        cost=cost.group(rates, shares, cluster.inside),
                        positions=tuple((member[0], members.index(member)) for member in distinct),
                    )
                )
    return tuple(sorted(found, key=lambda group: (group.width, group.members)))
