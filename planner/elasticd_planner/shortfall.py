"""Why nothing fits: the plan that comes nearest, the device that it overfills most, and what would help."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from elasticd_planner.cluster import Device
from elasticd_planner.cost import CostModel, rate_of
from elasticd_planner.problem import Problem
from elasticd_planner.profiled import ProfileCost
from elasticd_planner.rules import apportion

Groups = tuple[tuple[Device, ...], ...]


def explain(problem: Problem) -> str:
    """One sentence with the bytes that are missing, where, and the remedy."""
    cost = ProfileCost(problem.profile)
    micro_batches = problem.global_batch // problem.micro_batch
    nearest: tuple[int, str] | None = None
    for groups in _chains(problem):
        if len(groups) <= problem.profile.layers:
            short = _shortage(groups, problem, cost, micro_batches)
            nearest = short if nearest is None else min(nearest, short)
    if nearest is None:
        return (
            f"does not fit: {problem.profile.layers} layers in {problem.profile.share_units} units cannot be "
            "divided over the devices; add memory to them"
        )
    missing, device = nearest
    remedy = "add a node" + (", or use smaller micro-batches" if problem.micro_batch > 1 else "")
    return f"does not fit: the smallest plan needs {readable(missing)} more on {device}; {remedy}"


def _chains(problem: Problem) -> Iterator[Groups]:
    """Pipelines over all devices, which need the least memory of each, for every width of the TP groups."""
    nodes = [
        tuple(d for d in node.devices if math.isfinite(rate_of(problem.rates, d.name)))
        for node in problem.cluster.nodes
    ]
    widest = min(max(map(len, nodes)), problem.profile.share_units)
    for width in range(1, widest + 1):
        yield tuple(
            devices[i : i + width] for devices in nodes for i in range(0, len(devices), width) if devices
        )


def _shortage(groups: Groups, problem: Problem, cost: CostModel, micro_batches: int) -> tuple[int, str]:
    """The least bytes by which every device would have to be larger, and the device that is then fullest."""
    layers, units = problem.profile.layers, problem.profile.share_units
    depth = len(groups)

    def lack(index: int, count: int) -> tuple[float, str]:
        shares = apportion(units, (1,) * len(groups[index]))
        return max(
            (
                cost.memory(
                    count,
                    shares,
                    position,
                    first=index == 0,
                    last=index == depth - 1,
                    in_flight=min(micro_batches, depth - index),
                )
                - device.memory,
                device.name,
            )
            for position, device in enumerate(groups[index])
        )

    table = [[lack(index, count) for count in range(1, layers + 1)] for index in range(depth)]
    for more, _ in sorted(entry for row in table for entry in row):
        most = [sum(short <= more for short, _ in row) for row in table]
        if min(most) >= 1 and sum(most) >= layers:
            return math.ceil(more), max(_full(table, most))[1]
    return math.ceil(max(table[0])[0]), groups[0][0].name


def _full(table: Sequence[Sequence[tuple[float, str]]], most: Sequence[int]) -> list[tuple[float, str]]:
    return [row[count - 1] for row, count in zip(table, most, strict=True)]


def readable(size: int) -> str:
    """Bytes for people: "3.1 GiB"."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
