"""Infeasible problems: why a task has no plan, by how many bytes and where, and what would help.

Over pipelines of all usable devices, for every TP size, the shortage is the least number of bytes by which
every device would have to be larger. The bytes that a member needs are linear in the layers of its stage, so
that the shortage is one of (stage, layers)'s values: a bisection over them finds the least with which the
stages hold all layers.
"""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np

from elasticd_planner.cost.memory import least_need, need
from elasticd_planner.grouping.node_partitions import hosts
from elasticd_planner.numeric import EQUAL, Floats
from elasticd_planner.problem import Refusal
from elasticd_planner.readable import readable
from elasticd_planner.search.task import Task, alive
from elasticd_planner.spec.cluster import Device

Groups = tuple[tuple[Device, ...], ...]

#: Bytes that every device lacks, and the device that is then fullest.
Shortage = tuple[int, str]

#: The most additional nodes that a refusal proposes.
MOST_NODES = 8

#: Positions and widths looked at for the least memory of a layer; those beyond need no less.
DEEPEST = 64


def most_copies(task: Task) -> float:
    """The most copies of all layers that memory holds, each layer at the least bytes that any stage needs. Of a
    job that is the last stage; a table names the bytes of each."""
    places = [devices for devices, _ in hosts(task.cluster, task.rates, task.cost)]
    widest, deepest = max(map(len, places), default=0), min(task.layers, sum(map(len, places)), DEEPEST)
    flying = range(1, deepest + 1) if task.deep else (1,)
    layer, empty = least_need(task.cost, min(widest, DEEPEST), flying)
    room = sum(max(0.0, device.memory - empty) for devices in places for device in devices)
    return room / (layer * task.layers) * (1 + EQUAL) if layer > 0 else math.inf


def impossible_pin(task: Task) -> str:
    """The refusal of a pinned TP size that no group can have; empty where there is none."""
    pinned, sizes = task.fixed_tp, task.cost.widths(1 << 30)
    if pinned is None or pinned in sizes or not sizes:
        return ""
    through = sizes == tuple(range(sizes[0], sizes[-1] + 1))
    allowed = f"{sizes[0]} to {sizes[-1]}" if through else " or ".join(map(str, sizes))
    return (
        f"tp is pinned to {pinned}, and TP groups of this model can have {allowed} members; "
        "pin one of these sizes, or unpin tp"
    )


def explain_infeasible(task: Task, *, setting: str = "", micro_batch: int = 1) -> Refusal:
    """One sentence with the smallest shortage and the remedy.

    Args:
        task: what has no plan.
        setting: the settings that ask the least memory, in words, where several were searched.
        micro_batch: samples of a micro-batch, if smaller ones are a remedy.
    """
    places = [devices for devices, _ in hosts(task.cluster, task.rates, task.cost)]
    usable, pipelines = sum(map(len, places)), task.fixed_dp or 1
    counted = f"{pipelines} pipeline{'s' if pipelines > 1 else ''}"
    if not alive(task):
        return Refusal("no device to plan for: every device is dead or in no group; add a node")
    widths = task.cost.widths(max(map(len, places), default=0))
    if not widths:
        text = "does not fit: no TP group of an allowed size can be made of the devices; allow a smaller size"
        return Refusal(text)
    widest = max(map(len, places))
    if task.fixed_tp is not None and task.fixed_tp > widest and not task.crosses_nodes:
        return Refusal(
            f"does not fit: tp is pinned to {task.fixed_tp}, and no node has more than {widest} devices that "
            "can be used; pin a smaller tp"
        )
    if usable < pipelines * widths[0]:
        needed = pipelines * widths[0]
        return Refusal(
            f"does not fit: {pipelines} pipelines need {needed} devices, there are {usable}; "
            f"add {needed - usable} or pin fewer pipelines"
        )
    nearest = shortage(task)
    if nearest is None:
        return Refusal(
            f"does not fit: {task.layers} layers and {task.micro_batches} micro-batches cannot be divided over "
            f"{counted}; pin fewer pipelines or use a larger batch"
        )
    missing, device = nearest
    under = f" ({setting})" if setting else ""
    if missing <= 0:
        return Refusal(
            f"no plan was found for {usable} devices in {counted} within the search's limits{under}; "
            "unpin tp or dp"
        )
    more = _more_nodes(task)
    nodes = "" if more is None else f", or {'one more node' if more == 1 else f'{more} more nodes'}"
    smaller = "; smaller micro-batches need less" if micro_batch > 1 else ""
    text = f"does not fit: the nearest plan needs {readable(missing)} more on {device}{under}{nodes}{smaller}"
    return Refusal(text, "memory")


def shortage(task: Task) -> Shortage | None:
    """The least shortage over `task.fixed_dp` pipelines (without it one, which asks the least) of all devices,
    for every TP size; None where no such pipelines can be formed."""
    places = [devices for devices, _ in hosts(task.cluster, task.rates, task.cost)]
    pipelines = task.fixed_dp or 1
    found: list[Shortage] = []
    for width in task.cost.widths(max(map(len, places), default=0)):
        if task.fixed_tp not in (None, width):
            continue
        every = [devices[at : at + width] for devices in places for at in range(0, len(devices), width)]
        for least in (1, width):  # with what is left of nodes in narrower groups, and without it
            groups = [g for g in every if len(g) >= least and len(g) in task.cost.widths(width)]
            each = len(groups) // pipelines
            depth = min(each, task.layers)
            if task.deep:
                depth = min(depth, task.micro_batches // pipelines)
            if depth:
                chains = (tuple(groups[p * each : p * each + depth]) for p in range(pipelines))
                found.append(max(_chain_shortage(chain, task) for chain in chains))
    return min(found, default=None)


def _chain_shortage(groups: Groups, task: Task) -> Shortage:
    """The shortage of one pipeline whose stages are these TP groups with equal shares."""
    layers, depth = task.layers, len(groups)
    counts = np.arange(1, layers + 1)
    rows: list[Floats] = []  # of each stage the bytes that its worst member lacks, by layers
    names: list[list[str]] = []
    for index, group in enumerate(groups):
        shares = task.cost.shares((1.0,) * len(group))[0]
        edges = {"first": index == 0, "last": index == depth - 1}
        flying = min(task.micro_batches, depth - index)
        lacks = []
        for position, device in enumerate(group):
            none, each = need(task.cost, shares, position, **edges, in_flight=flying)
            lacks.append(none - device.memory + each * counts)
        rows.append(np.max(lacks, axis=0))
        names.append([group[int(which)].name for which in np.argmax(lacks, axis=0)])

    def held(more: float) -> list[int]:
        return [int(np.searchsorted(row, more, side="right")) for row in rows]

    values = np.unique(np.concatenate(rows))
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        most = held(float(values[middle]))
        low, high = (low, middle) if min(most) >= 1 and sum(most) >= layers else (middle + 1, high)
    most = held(float(values[low]))
    fullest = max((float(row[n - 1]), name[n - 1]) for row, name, n in zip(rows, names, most, strict=True))
    return math.ceil(values[low]), fullest[1]


def _more_nodes(task: Task) -> int | None:
    """How many more nodes like the largest make room; None where MOST_NODES do not."""
    nodes = task.cluster.nodes
    largest = max(nodes, key=lambda node: sum(device.memory for device in node.devices))
    for more in range(1, MOST_NODES + 1):
        name = f"more{more}"
        devices = tuple(
            Device(name=f"{name}/{i}", memory=device.memory) for i, device in enumerate(largest.devices)
        )
        nodes = (*nodes, msgspec.structs.replace(largest, name=name, devices=devices))
        nearest = shortage(replace(task, cluster=msgspec.structs.replace(task.cluster, nodes=nodes)))
        if nearest is not None and nearest[0] <= 0:
            return more
    return None
