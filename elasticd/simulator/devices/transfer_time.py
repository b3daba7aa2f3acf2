"""The bytes that a switch moves, and its seconds on the modelled links."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from elasticd_planner.placement.state_movement import bytes_by_member
from elasticd_planner.spec.cluster import NODE, Place
from elasticd_planner.spec.plan import Plan

from elasticd.simulator.devices.device_model import DeviceModel


@dataclass(frozen=True, kw_only=True)
class Move:
    """Bytes that each member of the new plan lacks, and the seconds until all have them."""

    lacking: dict[str, int]
    seconds: float

    @property
    def total(self) -> int:
        """Bytes, summed over all members of the new plan."""
        return sum(self.lacking.values())


def move(truth: DeviceModel, old: Plan | None, new: Plan, sources: Collection[str] | None = None) -> Move:
    """Of all modules of two plans. A job's first plan is filled from the seed and moves nothing. After a fault
    only `sources` hold what they held under the old plan.

    Every device takes what it lacks over its node's link to others, which its node's devices share, and no
    faster than over the link inside: as if none of it were on its own node, which is the worst case. The same
    holds of a rack's link, and of any further level's.
    """
    if old is None:
        return Move(lacking=dict.fromkeys(new.members, 0), seconds=0.0)
    cluster, lacking_bytes = truth.cluster, dict.fromkeys(new.members, 0.0)
    for module in (each.module for each in new.modules):
        views = old.view(module), new.view(module)
        for device, size in bytes_by_member(truth.profile_of(module), *views, sources).items():
            lacking_bytes[device] += size
    lacking = {name: round(size) for name, size in lacking_bytes.items()}
    seconds = max(lacking.values(), default=0) / cluster.inside.bandwidth
    for level in range(NODE, NODE + 1 + len(cluster.levels)):
        groups: dict[Place, int] = {cluster.places(f"{node.name}/0")[level]: 0 for node in cluster.nodes}
        if len(groups) == 1:
            break
        for name, size in lacking.items():
            group = cluster.places(name)[level]
            groups[group] = groups.get(group, 0) + size
        busiest = max(groups.values(), default=0)
        seconds = max(seconds, busiest / cluster.exit(cluster.nodes[0].name + "/0", level).bandwidth)
    return Move(lacking=lacking, seconds=seconds)
