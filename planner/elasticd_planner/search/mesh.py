"""The plan of a job on a mesh: which of the allowed meshes, which devices, and the samples of each lane.

A step takes as long as its slowest lane: its samples times the slowdown of its slowest device, over the devices
that share the lane's work. Each next sample goes where it is done first, and each lane has one at least, since
all ranks take part in every collective. More devices are never slower by that but where one is so slow that a
single sample takes it longer than a step takes the others: then a mesh without it is the faster one.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import NamedTuple

from elasticd_planner.problem import MeshAnswer, MeshProblem
from elasticd_planner.readable import readable_seconds
from elasticd_planner.spec.cluster import NORMAL, node_of
from elasticd_planner.spec.mesh import SAME_SAMPLES, AllowedMesh, MeshPlan
from elasticd_planner.spec.plan import Prediction

#: Devices, the slowest ones, that a plan is tried without.
MOST_LEFT_OUT = 64

#: A mesh of fewer devices is taken if its step is shorter by this fraction of a step.
FEWER = 0.15


def plan_mesh(problem: MeshProblem, number: int = 0) -> MeshAnswer:
    """The plan with most devices, unless one with fewer is predicted to be faster by `FEWER`.

    Among meshes of as many devices the first of the allowed ones is taken. Its devices are the fastest; of
    equal ones those that the current plan has, which keep their ranks if the mesh does.

    Returns:
        The plan, or a refusal that says how many devices the meshes need.
    """
    options = list(_options(problem))
    if not options:
        return MeshAnswer(plan=None, refusal=_refusal(problem))
    best = options[0]
    for option in options[1:]:
        bar = 1 - FEWER if len(option.plan.members) < len(best.plan.members) else 1.0
        if seconds(problem, option.cost) < bar * seconds(problem, best.cost) - 1e-12:
            best = option
    current, there = problem.current, {device.name for device in problem.cluster.devices}
    known = None
    if current is not None and there.issuperset(current.members):
        known = seconds(problem, cost(current, problem.rates))
    predicted = Prediction(step_seconds=seconds(problem, best.cost), bound_seconds=_bound(problem))
    return MeshAnswer(
        plan=best.plan.replace(
            number=number,
            prediction=predicted if problem.sample_seconds else None,
            reason=_reason(problem, best),
        ),
        current_seconds=known,
        candidates=len(options),
    )


def cost(plan: MeshPlan, slowdowns: Mapping[str, float]) -> float:
    """The time of the slowest lane of a plan, in samples of a normal device."""
    return max(
        samples * paced for samples, paced in zip(plan.samples, lane_costs(plan.lanes, slowdowns), strict=True)
    )


def lane_costs(lanes: Sequence[Sequence[str]], slowdowns: Mapping[str, float]) -> list[float]:
    """The time of a sample in each lane, in samples of a normal device."""
    return [max(slowdowns.get(device, NORMAL) for device in lane) / len(lane) for lane in lanes]


def shared_samples(costs: Sequence[float], samples: int) -> tuple[int, ...]:
    """Samples of a step by lane: one each, and each next one where it is done first; of equals the first.

    No other shares of whole samples, one a lane at least, have a faster slowest lane.

    Args:
        costs: what a sample takes in each lane, in any unit.
        samples: of a step, at least as many as lanes.
    """
    shares = [1] * len(costs)
    done = [(2 * lane_cost, lane) for lane, lane_cost in enumerate(costs)]
    heapq.heapify(done)
    for _ in range(samples - len(costs)):
        _, lane = done[0]
        shares[lane] += 1
        heapq.heapreplace(done, ((shares[lane] + 1) * costs[lane], lane))
    return tuple(shares)


def seconds(problem: MeshProblem, cost: float) -> float:
    """Seconds of a step; before any was measured, in samples of a normal device."""
    return cost * (problem.sample_seconds or 1.0) + problem.other_seconds


class _Option(NamedTuple):
    """A plan with what its slowest lane takes, in samples of a normal device."""

    plan: MeshPlan
    cost: float


def _options(problem: MeshProblem) -> Iterator[_Option]:
    """A plan for each allowed mesh, of all devices that fill one and of all but the slowest ones: most devices
    first, and of as many those whose dimensions all have several."""
    devices = _fastest_first(problem)
    slow = min(MOST_LEFT_OUT, sum(problem.rates.get(device, NORMAL) > NORMAL for device in devices))
    sizes: dict[tuple[int, int, int], tuple[AllowedMesh, tuple[int, ...], list[str]]] = {}
    for left_out, (place, mesh) in product(range(slow + 1), enumerate(problem.meshes)):
        there = _in_lanes(mesh, devices[: len(devices) - left_out])
        shape = _shape(mesh, there, problem.global_batch)
        if shape is not None:
            alone = sum(size == 1 for size in shape)
            sizes.setdefault((-math.prod(shape), alone, place), (mesh, shape, there))
    for _, (mesh, shape, there) in sorted(sizes.items(), key=lambda size: size[0]):
        yield _option(problem, mesh, shape, there[: math.prod(shape)])


def _option(problem: MeshProblem, mesh: AllowedMesh, shape: tuple[int, ...], devices: Sequence[str]) -> _Option:
    members = _placed(problem.current, mesh, shape, devices)
    lanes = math.prod(s for s, name in zip(shape, mesh.names, strict=True) if name not in SAME_SAMPLES)
    chosen = {*members}
    plan = MeshPlan(
        number=0,
        names=mesh.names,
        shape=shape,
        members=members,
        samples=(1,) * lanes,
        idle=tuple(device.name for device in problem.cluster.devices if device.name not in chosen),
    )
    shares = shared_samples(lane_costs(plan.lanes, problem.rates), problem.global_batch)
    plan = plan.replace(samples=shares)
    return _Option(plan, cost(plan, problem.rates))


def _width(mesh: AllowedMesh) -> int:
    """The devices of a lane whose dimensions are the last ones of the mesh and have sizes; else 1."""
    sizes = mesh.sizes or (0,) * len(mesh.names)
    shared = [name in SAME_SAMPLES for name in mesh.names]
    last = [size for size, same in zip(sizes, shared, strict=True) if same]
    return math.prod(last) or 1 if shared == sorted(shared) else 1


def _in_lanes(mesh: AllowedMesh, devices: Sequence[str]) -> list[str]:
    """The devices that fill lanes inside nodes, if any node has as many as a lane takes; else all of them."""
    width, by_node = _width(mesh), dict[str, list[str]]()
    for device in devices:
        by_node.setdefault(node_of(device), []).append(device)
    kept = {device for held in by_node.values() for device in held[: len(held) // width * width]}
    return [device for device in devices if device in kept] if kept else list(devices)


def _placed(
    current: MeshPlan | None, mesh: AllowedMesh, shape: tuple[int, ...], devices: Sequence[str]
) -> tuple[str, ...]:
    """The devices in rank order: of the mesh that runs each lane where it is, and others in the gaps; else by
    name, so that the last dimensions lie inside nodes."""
    names, width = sorted(devices), _width(mesh)
    if current is None or (current.names, current.shape) != (mesh.names, shape):
        return tuple(names)
    there, ranks = {*devices}, range(0, len(current.members), width)
    lanes = [current.members[first : first + width] for first in ranks]
    intact = [lane if there.issuperset(lane) else () for lane in lanes]
    stays = {device for lane in intact for device in lane}
    others = iter([device for device in names if device not in stays])
    return tuple(device for lane in intact for device in lane or (*islice(others, width),))


def _fastest_first(problem: MeshProblem) -> list[str]:
    known = {*problem.current.members} if problem.current is not None else set[str]()
    names = [device.name for device in problem.cluster.devices]
    return sorted(names, key=lambda name: (problem.rates.get(name, NORMAL), name not in known, name))


def _shape(mesh: AllowedMesh, devices: Sequence[str], samples: int) -> tuple[int, ...] | None:
    """The shape of an allowed mesh of most of these devices; None where they do not fill one.

    Of several dimensions without a size the last one has the devices of a node, if all nodes have as many and
    there are several; else the earlier ones have 2 each, or 1 where that fills more: copies that outlive a
    device, with as few bytes on each as that allows.
    """
    sizes = mesh.sizes or (0,) * len(mesh.names)
    free = [d for d, size in enumerate(sizes) if not size]
    fixed = math.prod(size for size in sizes if size)
    best: tuple[int, ...] | None = None
    most = 0
    for extents in _divided(len(devices) // fixed, len(free), devices, fixed):
        shape = list(sizes)
        for d, extent in zip(free, extents, strict=True):
            shape[d] = extent
        lanes = math.prod(n for n, name in zip(shape, mesh.names, strict=True) if name not in SAME_SAMPLES)
        if lanes <= samples and math.prod(shape) > most:
            best, most = tuple(shape), math.prod(shape)
    return best


def _divided(most: int, free: int, devices: Sequence[str], fixed: int) -> Iterator[tuple[int, ...]]:
    """Extents of so many dimensions, of `most` devices in all at most; the preferred ones of equals first."""
    if not most:
        return
    if not free:
        yield ()
        return
    counts = {*Counter(map(node_of, devices)).values()}
    inside = next(iter(counts)) // fixed if len(counts) == 1 else 0
    if free > 1 and inside > 1:
        for outer in range(most // inside, 1, -1):
            yield (*(1,) * (free - 2), outer, inside)
    for firsts in product((2, 1), repeat=free - 1):
        for last in range(most // math.prod(firsts), 0, -1):
            yield (*firsts, last)


def _bound(problem: MeshProblem) -> float:
    """Seconds of a step whose samples were divided perfectly over all devices."""
    rates = (problem.rates.get(device.name, NORMAL) for device in problem.cluster.devices)
    return seconds(problem, problem.global_batch / sum(1 / rate for rate in rates))


def _reason(problem: MeshProblem, option: _Option) -> str:
    plan = option.plan
    text = f"a mesh of {plan.mesh_text} on {len(plan.members)} devices"
    if len({*plan.samples}) > 1:
        text += f", with {', '.join(map(str, plan.samples))} samples of a step in its lanes"
    if plan.idle:
        names = ", ".join(plan.idle[:3]) + (", ..." if len(plan.idle) > 3 else "")
        slow = max((problem.rates.get(device, NORMAL) for device in plan.idle), default=NORMAL)
        why = "no allowed mesh has a place for" if slow == NORMAL else "a step is faster without"
        text += f"; {why} {names}, which stand{'s' if len(plan.idle) == 1 else ''} by"
    if problem.sample_seconds:
        text += f"; a step is predicted to take {readable_seconds(seconds(problem, option.cost))}"
    return text


def _refusal(problem: MeshProblem) -> str:
    count = len(problem.cluster.devices)
    allowed = "; ".join(mesh.text for mesh in problem.meshes)
    return (
        f"{count} device{'s' if count != 1 else ''} with {problem.global_batch} samples a step fill none of "
        f"the meshes that the job may have ({allowed}): allow a smaller one in meshes=, or start more devices"
    )
