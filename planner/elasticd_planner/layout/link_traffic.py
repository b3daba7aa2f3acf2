"""What operations put on links: elements from device to device, bytes by level of links, seconds.

Collectives are rings in the order of the devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from elasticd_planner.layout.resolve import Cell, Communication, Operation
from elasticd_planner.spec.cluster import Cluster, Link, node_of

#: Level of a link: among the devices of an island, of a node, of a group of nodes, or beyond.
Level = str

#: Times that a ring of collectives goes round: each time each device but one waits for the one before it.
_HOPS: dict[Operation, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


class Flow(NamedTuple):
    """An operation that is carried out a number of times, one after the other."""

    step: Communication
    itemsize: int  #: bytes of an element
    times: int = 1


def traffic(step: Communication, cell: Cell) -> Iterator[tuple[str, str, int]]:
    """The elements of one cell that go from device to device: (from, to, count)."""
    count, devices = cell.box.size, step.devices
    if step.operation in ("send", "relay"):
        for device in cell.needers:
            yield devices[0], device, count
    elif step.operation == "sum":
        for device in cell.sources:
            if device not in cell.needers:
                yield device, cell.needers[0], count
    elif step.operation == "all_reduce":  # each of the ring's links carries all but a part, there and back
        for number, (one, other) in enumerate(_ring(devices)):
            lacks = count // len(devices) + (number < count % len(devices))
            yield one, other, 2 * (count - lacks)
    elif step.operation == "all_gather":
        for one, other in _ring(devices):
            if other != cell.sources[0]:
                yield one, other, count
    elif step.operation == "reduce_scatter":
        for one, other in _ring(devices):
            if one != cell.needers[0]:
                yield one, other, count


def level_of(one: str, other: str, cluster: Cluster | None = None) -> Level:
    """The level of the link between two devices: "within islands", "inside nodes", "inside racks" of a level
    that the cluster calls rack, and "between nodes", or "between racks" where racks are its last level."""
    nodes = node_of(one), node_of(other)
    if nodes[0] != nodes[1]:
        levels = cluster.levels if cluster is not None else ()
        for level in levels:
            groups = {level.group_of.get(node) for node in nodes}
            if len(groups) == 1 and None not in groups:
                return f"inside {level.name}s"
        return f"between {levels[-1].name}s" if levels else "between nodes"
    local = [cluster.local_links(device) for device in (one, other)] if cluster else []
    islands = {link[2] for link in local if link is not None and link[0] != link[1]}
    return "within islands" if len(islands) == 1 else "inside nodes"


def levels_of(cluster: Cluster) -> tuple[Level, ...]:
    """All levels of a cluster's links, the farthest first."""
    names = [level.name for level in cluster.levels]
    far = f"between {names[-1]}s" if names else "between nodes"
    return (far, *(f"inside {name}s" for name in reversed(names)), "inside nodes", "within islands")


def bytes_by_level(flows: Iterable[Flow], cluster: Cluster | None = None) -> dict[Level, int]:
    """The bytes that go over links."""
    found: dict[Level, int] = defaultdict(int)
    known: dict[tuple[str, str], Level] = {}
    for step, itemsize, times in flows:
        for cell in step.cells:
            for one, other, count in traffic(step, cell):
                if (one, other) not in known:
                    known[one, other] = level_of(one, other, cluster)
                if count:
                    found[known[one, other]] += count * itemsize * times
    return dict(found)


def busiest_seconds(flows: Iterable[Flow], cluster: Cluster) -> float:
    """What the busiest device takes: its operations one after the other, what it sends and what it receives
    beside each other. A ring is as quick as its slowest link."""
    together: dict[str, float] = defaultdict(float)
    sent: dict[str, float] = defaultdict(float)
    received: dict[str, float] = defaultdict(float)
    reach: dict[tuple[str, ...], Link] = {}

    def link_of(devices: tuple[str, ...]) -> Link:
        if devices not in reach:
            reach[devices] = cluster.reach(devices)
        return reach[devices]

    for step, itemsize, times in flows:
        links: dict[tuple[str, str], int] = defaultdict(int)
        for cell in step.cells:
            for one, other, count in traffic(step, cell):
                links[one, other] += count * itemsize
        hops = _HOPS.get(step.operation, 0) * (len(step.devices) - 1)
        if hops:
            link = link_of(step.devices)
            taken = times * (hops * link.latency + max(links.values(), default=0) / link.bandwidth)
            for device in step.devices:
                together[device] += taken
        else:
            for pair, size in links.items():
                taken = times * link_of(pair).seconds(size)
                sent[pair[0]] += taken
                received[pair[1]] += taken
    devices = {*together, *sent, *received}
    return max((together[d] + max(sent[d], received[d]) for d in devices), default=0.0)


def _ring(devices: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from pairwise((*devices, devices[0]))
