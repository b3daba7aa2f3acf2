"""Why a task has no plan: what is missing, by how much and where, and how many more nodes would help."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from elasticd_planner.grouping.node_partitions import hosts
from elasticd_planner.search.infeasible import readable
from elasticd_planner.search.task import Task
from elasticd_planner.spec.cluster import Device

Groups = tuple[tuple[Device, ...], ...]

#: More nodes than this are not proposed.
MOST_NODES = 8


def explain(task: Task) -> str:
    """One sentence with the smallest shortfall that was found, and the remedy."""
    usable = [device for devices, _ in hosts(task.cluster, task.rates, task.cost) for device in devices]
    pipelines = task.dp or 1
    if not usable:
        return "no device to plan for: every device is dead or in no group; add a node"
    widths = task.cost.widths(max(len(devices) for devices, _ in hosts(task.cluster, task.rates, task.cost)))
    if not widths:
        return "does not fit: no TP group of an allowed size can be made of the devices; allow a smaller size"
    if len(usable) < pipelines * widths[0]:
        missing = pipelines * widths[0] - len(usable)
        return (
            f"does not fit: {pipelines} pipelines need {pipelines * widths[0]} devices, "
            f"there are {len(usable)}; add {missing} or pin fewer pipelines"
        )
    nearest = _nearest(task)
    if nearest is None:
        return (
            f"does not fit: {task.layers} layers and {task.micro_batches} micro-batches cannot be divided over "
            f"{pipelines} pipeline{'s' if pipelines > 1 else ''}; pin fewer pipelines or use a larger batch"
        )
    lacking, device = nearest
    if lacking <= 0:
        return (
            f"no plan was found for {len(usable)} devices in {pipelines} pipeline"
            f"{'s' if pipelines > 1 else ''} within the search's limits; unpin tp or dp"
        )
    more = _nodes(task)
    remedy = "" if more is None else f", or {'one more node' if more == 1 else f'{more} more nodes'}"
    return f"does not fit: the nearest plan needs {readable(math.ceil(lacking))} more on {device}{remedy}"


def _nodes(task: Task) -> int | None:
    """How many more nodes, like the largest, make room."""
    largest = max(task.cluster.nodes, key=lambda node: sum(device.memory for device in node.devices))
    nodes = task.cluster.nodes
    for more in range(1, MOST_NODES + 1):
        name = f"more{more}"
        devices = tuple(
            Device(name=f"{name}/{i}", memory=device.memory) for i, device in enumerate(largest.devices)
        )
        nodes = (*nodes, msgspec.structs.replace(largest, name=name, devices=devices))
        cluster = msgspec.structs.replace(task.cluster, nodes=nodes)
        nearest = _nearest(
            Task(
                cluster=cluster,
                rates=task.rates,
                cost=task.cost,
                layers=task.layers,
                micro_batches=task.micro_batches,
                steady=task.steady,
                deep=task.deep,
                tp=task.tp,
                dp=task.dp,
            )
        )
        if nearest is not None and nearest[0] <= 0:
            return more
    return None


def _nearest(task: Task) -> tuple[float, str] | None:
    """The least bytes by which devices would have to be larger, and the device that is then fullest: over
    pipelines of all devices, for every width."""
    found: list[tuple[float, str]] = []
    places = hosts(task.cluster, task.rates, task.cost)
    pipelines = task.dp or 1
    for width in task.cost.widths(max(len(devices) for devices, _ in places)):
        if task.tp is not None and width != task.tp:
            continue
        groups = [
            devices[at : at + width]
            for devices, _ in places
            for at in range(0, len(devices) - width + 1, width)
        ]
        depth = min(len(groups) // pipelines, task.layers)
        if task.deep:
            depth = min(depth, task.micro_batches // pipelines)
        if depth < 1:
            continue
        shortages = [
            _shortage(tuple(groups[p * (len(groups) // pipelines) :][:depth]), task) for p in range(pipelines)
        ]
        found.append(max(shortages))
    return min(found, default=None)


def _shortage(groups: Groups, task: Task) -> tuple[float, str]:
    """The least bytes by which the devices of one chain would have to be larger, and the fullest device."""
    depth = len(groups)
    bases: list[tuple[float, float, str]] = []  # bytes over without layers, bytes a layer, device
    for index, members in enumerate(groups):
        shares = task.cost.shares((1.0,) * len(members))[0]
        position = max(range(len(members)), key=lambda i: (shares[i], -members[i].memory))
        device = min(members, key=lambda d: (d.memory, d.name))
        none, one = (
            task.cost.memory(
                n, shares, position, first=index == 0, last=index == depth - 1, in_flight=depth - index
            )
            for n in (0, 1)
        )
        bases.append((none - device.memory, one - none, device.name))

    def most(more: float) -> int:
        total = 0
        for over, each, _ in bases:
            count = task.layers if each <= 0 else math.floor((more - over) / each + 1e-9)
            if count < 1:
                return 0
            total += min(count, task.layers)
        return total

    high = max(over + each * task.layers for over, each, _ in bases) + 1.0
    if most(0.0) >= task.layers:
        return 0.0, bases[0][2]
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if most(middle) >= task.layers else (middle, high)
    return high, _fullest(bases, high)


def _fullest(bases: Sequence[tuple[float, float, str]], more: float) -> str:
    """The device with the least room left when all are `more` larger and full."""

    def left(entry: tuple[float, float, str]) -> float:
        over, each, _ = entry
        return (more - over) % each if each > 0 else math.inf

    return min(bases, key=left)[2]
