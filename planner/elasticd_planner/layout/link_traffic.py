"""The load of operations on links: elements from device to device, bytes by level of links, seconds.

Collectives are rings in the order of the devices. A flow may say that its all-reduces are in two levels where
they can be (`two_level_sums`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise, permutations
from typing import NamedTuple

from elasticd_planner.layout.resolve import Cell, Communication, Operation
from elasticd_planner.layout.two_level_sums import two_levels
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
    two_level: bool = False  #: an all-reduce is carried out in two levels, where its devices allow it


def traffic(step: Communication, cell: Cell, *, two_level: bool = False) -> Iterator[tuple[str, str, int]]:
    """The elements of one cell that go from device to device: (from, to, count)."""
    count, devices = cell.box.size, step.devices
    nodes = two_levels(devices) if two_level and step.operation == "all_reduce" else None
    if nodes is not None:
        yield from _in_two_levels(nodes, count)
    elif step.operation in ("send", "relay"):
        for device in cell.needers:
            yield devices[0], device, count
    elif step.operation == "sum":
        for device in cell.sources:
            if device not in cell.needers:
                yield device, cell.needers[0], count
    elif step.operation == "all_reduce":
        yield from _all_reduced(devices, count)
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
    for step, itemsize, times, two_level in flows:
        for cell in step.cells:
            for one, other, count in traffic(step, cell, two_level=two_level):
                if (one, other) not in known:
                    known[one, other] = level_of(one, other, cluster)
                if count:
                    found[known[one, other]] += count * itemsize * times
    return dict(found)


def busiest_seconds(flows: Iterable[Flow], cluster: Cluster) -> float:
    """The seconds of the busiest device: its operations one after the other, what it sends and what it receives
    beside each other. A ring is as quick as its slowest link. In two levels a node's devices share its link."""
    together: dict[str, float] = defaultdict(float)
    sent: dict[str, float] = defaultdict(float)
    received: dict[str, float] = defaultdict(float)
    reach: dict[tuple[str, ...], Link] = {}

    def link_of(devices: tuple[str, ...]) -> Link:
        if devices not in reach:
            reach[devices] = cluster.reach(devices)
        return reach[devices]

    for step, itemsize, times, two_level in flows:
        nodes = two_levels(step.devices) if two_level and step.operation == "all_reduce" else None
        if nodes is not None:
            size = sum(cell.box.size for cell in step.cells) * itemsize
            taken = times * _two_level_seconds(nodes, size, link_of)
            for device in step.devices:
                together[device] += taken
            continue
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


def _all_reduced(devices: Sequence[str], count: int) -> Iterator[tuple[str, str, int]]:
    """Each of the ring's links carries all but a part, there and back."""
    for number, (one, other) in enumerate(_ring(devices)):
        lacks = count // len(devices) + (number < count % len(devices))
        yield one, other, 2 * (count - lacks)


def _in_two_levels(nodes: Sequence[tuple[str, ...]], count: int) -> Iterator[tuple[str, str, int]]:
    """Slices are of one length. Each device of a node gives every other one its slice of the terms, and at last
    the sum of its own; the devices with the same slice sum it between nodes."""
    length = -(-count // len(nodes[0]))
    for near in nodes:
        for one, other in permutations(near, 2):
            yield one, other, 2 * length
    for across in zip(*nodes, strict=True):
        yield from _all_reduced(across, length)


def _two_level_seconds(
    nodes: Sequence[tuple[str, ...]], size: int, link_of: Callable[[tuple[str, ...]], Link]
) -> float:
    """Seconds of one sum in two levels, one phase after the other."""
    near = max(map(link_of, nodes), key=lambda link: link.seconds(size))
    far = link_of(tuple(chain(*nodes)))
    inside = near.latency + size * (1 - 1 / len(nodes[0])) / near.bandwidth
    hops = 2 * (len(nodes) - 1)
    return 2 * inside + hops * (far.latency + size / len(nodes) / far.bandwidth)


def _ring(devices: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from pairwise((*devices, devices[0]))
