"""Two-level sums: the devices of a set by node, where a sum inside each node first spares the links between.

A ring over k devices puts 2 (k - 1) / k of what is summed on each node's link, whatever the number m of nodes.
In two levels each device gets its node's sum of one slice, the slices are summed between nodes, and are
gathered inside of each: that puts 2 (m - 1) / m there. A ring enters and leaves each node once only where the
devices of a node are next to each other, so all sets are ordered so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from elasticd_planner.spec.cluster import node_of


def node_by_node(devices: Iterable[str]) -> tuple[str, ...]:
    """The same devices, those of one node next to each other: nodes by their first device, else in order."""
    return tuple(device for near in _by_node(devices) for device in near)


def two_levels(devices: Sequence[str]) -> tuple[tuple[str, ...], ...] | None:
    """The devices of each node, where a set is summed in two levels: on several nodes, on each the same number
    of devices, and more than one. None: where it is one ring."""
    nodes = _by_node(devices)
    sizes = {len(near) for near in nodes}
    return tuple(nodes) if len(nodes) > 1 and len(sizes) == 1 and min(sizes) > 1 else None


def _by_node(devices: Iterable[str]) -> list[tuple[str, ...]]:
    found: dict[str, list[str]] = defaultdict(list)
    for device in devices:
        found[node_of(device)].append(device)
    return [tuple(near) for near in found.values()]
