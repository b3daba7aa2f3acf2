"""Why nothing fits: the plan that comes nearest, the device that it overfills most, and what would help."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from elasticd_planner.numeric import Floats
from elasticd_planner.problem import Problem
from elasticd_planner.search.task import Task
from elasticd_planner.spec.cluster import Device, rate_of
from elasticd_planner.spec.model import apportion

Groups = tuple[tuple[Device, ...], ...]


def explain(problem: Problem, task: Task) -> str:
    """One sentence with the bytes that are missing, where, and the remedy."""
    short = shortage(problem, task)
    if short is None:
        return (
            f"does not fit: {task.layers} layers in {problem.profile.share_units} units cannot be divided over "
            f"the devices{f' in {task.dp} pipelines' if task.dp else ''}; add memory to them"
        )
    missing, device = short
    if missing <= 0:
        return "no plan was found within the search's limits; unpin tp or dp"
    remedy = "add a node" + (", or use smaller micro-batches" if problem.micro_batch > 1 else "")
    return f"does not fit: the smallest plan needs {readable(missing)} more on {device}; {remedy}"


def shortage(problem: Problem, task: Task) -> tuple[int, str] | None:
    """The least bytes by which every device would have to be larger, and the device that is then fullest: over
    pipelines of all devices (`task.dp`, else one, which asks the least), for every width of groups. None where
    no such plan can be made at all."""
    nearest: tuple[int, str] | None = None
    pipelines = task.dp or 1
    for groups in _chains(problem, task):
        each = len(groups) // pipelines
        depth = min(each, task.layers)
        if depth < 1 or (pipelines == 1 and each > task.layers):
            continue
        short = max(_shortage(groups[p * each : p * each + depth], problem, task) for p in range(pipelines))
        nearest = short if nearest is None else min(nearest, short)
    return nearest


def _chains(problem: Problem, task: Task) -> Iterator[Groups]:
    """Groups of all devices in order, for every width."""
    nodes = [
        tuple(d for d in node.devices if math.isfinite(rate_of(problem.rates, d.name)))
        for node in problem.cluster.nodes
    ]
    for width in task.cost.widths(max(map(len, nodes))):
        if task.tp in (None, width):
            yield tuple(
                devices[i : i + width]
                for devices in nodes
                for i in range(0, len(devices), width)
                if task.cost.widths(len(devices[i : i + width]))[-1:] == (len(devices[i : i + width]),)
            )


def _shortage(groups: Groups, problem: Problem, task: Task) -> tuple[int, str]:
    """The least bytes by which every device of one pipeline would have to be larger, and the device that is
    then fullest. What a member lacks is linear in the layers of its stage."""
    layers, depth = task.layers, len(groups)
    counts = np.arange(1, layers + 1)
    rows: list[Floats] = []
    names: list[list[str]] = []
    for index, group in enumerate(groups):
        shares = apportion(problem.profile.share_units, (1,) * len(group))
        lacks = []
        for position, device in enumerate(group):
            none, one = (
                task.cost.memory(
                    n,
                    shares,
                    position,
                    first=index == 0,
                    last=index == depth - 1,
                    in_flight=min(task.micro_batches, depth - index),
                )
                for n in (0, 1)
            )
            lacks.append(none - device.memory + (one - none) * counts)
        rows.append(np.max(lacks, axis=0))
        names.append([group[int(which)].name for which in np.argmax(lacks, axis=0)])

    def most(more: float) -> list[int]:
        return [int(np.searchsorted(row, more, side="right")) for row in rows]

    values = np.unique(np.concatenate(rows))
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        held = most(float(values[middle]))
        low, high = (low, middle) if min(held) >= 1 and sum(held) >= layers else (middle + 1, high)
    held = most(float(values[low]))
    fullest = max((float(row[n - 1]), name[n - 1]) for row, name, n in zip(rows, names, held, strict=True))
    return math.ceil(values[low]), fullest[1]


def readable(size: int) -> str:
    """Bytes for people: "3.1 GiB"."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
