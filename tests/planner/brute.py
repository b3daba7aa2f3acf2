"""Every plan of a small problem, one by one and by names, sharing nothing with the search but the cost."""

import math
from collections.abc import Iterator
from itertools import combinations

from elasticd_planner.cost.memory import memory_by_device
from elasticd_planner.cost.model import step_seconds
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.problem import Problem
from elasticd_planner.spec.cluster import Device
from elasticd_planner.spec.model import apportion
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy

Groups = tuple[tuple[Device, ...], ...]


def best(problem: Problem) -> tuple[float, Plan | None]:
    """The least step time of all plans that fit, and one that has it."""
    found: tuple[float, Plan | None] = (math.inf, None)
    for plan in every(problem):
        seconds = step_seconds(plan, problem.cluster, problem.rates, ProfileCost(problem.profile))
        if seconds < found[0] and fits(plan, problem):
            found = (seconds, plan)
    return found


def fits(plan: Plan, problem: Problem) -> bool:
    needed = memory_by_device(plan, ProfileCost(problem.profile))
    return all(size <= problem.cluster.device(name).memory for name, size in needed.items())


def looked_at(plan: Plan, problem: Problem) -> bool:
    """Whether `every` has the plan: the shares of each of its groups are equal, or by the devices' rates."""

    def has(stage: Stage) -> bool:
        group = tuple(map(problem.cluster.device, stage.devices))
        shares = dict(zip(stage.devices, stage.shares, strict=True))
        return any(dict(zip(*members, strict=True)) == shares for (members,) in shares_of((group,), problem))

    return all(has(stage) for _, _, stage in plan.walk())


def every(problem: Problem) -> Iterator[Plan]:
    micro_batches = problem.global_batch // problem.micro_batch
    for pipelines in arrangements(problem.cluster.devices):
        if not pipelines or len(pipelines) > micro_batches:
            continue
        for counts in compositions(micro_batches, len(pipelines)):
            for made in product_of(pipelines, counts, problem):
                yield Plan(
                    number=0,
                    strategies=(Strategy(modules=(ModulePlan(module="m", pipelines=made),)),),
                    micro_batch=problem.micro_batch,
                    global_batch=problem.global_batch,
                )


def arrangements(devices: tuple[Device, ...]) -> Iterator[tuple[Groups, ...]]:
    """All sets of pipelines of ordered groups; the first device is idle, or its pipeline comes first."""
    if not devices:
        yield ()
        return
    first, rest = devices[0], devices[1:]
    yield from arrangements(rest)
    for size in range(len(rest) + 1):
        for others in combinations(rest, size):
            left = tuple(d for d in rest if d not in others)
            for groups in sequences((first, *others)):
                for more in arrangements(left):
                    yield (groups, *more)


def sequences(devices: tuple[Device, ...]) -> Iterator[Groups]:
    """All ways to put all devices into an ordered list of groups, each inside one node."""
    if not devices:
        yield ()
        return
    for size in range(1, len(devices) + 1):
        for group in combinations(devices, size):
            if len({d.node for d in group}) == 1:
                for rest in sequences(tuple(d for d in devices if d not in group)):
                    yield (group, *rest)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as `parts` positive integers."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def product_of(
    pipelines: tuple[Groups, ...], counts: tuple[int, ...], problem: Problem
) -> Iterator[tuple[Pipeline, ...]]:
    if not pipelines:
        yield ()
        return
    for rest in product_of(pipelines[1:], counts[1:], problem):
        for shares in shares_of(pipelines[0], problem):
            if len(pipelines[0]) > problem.profile.layers:
                continue
            for layers in compositions(problem.profile.layers, len(pipelines[0])):
                stages = []
                start = 0
                for count, (devices, units) in zip(layers, shares, strict=True):
                    stages.append(Stage(start=start, stop=start + count, devices=devices, shares=units))
                    start += count
                yield (Pipeline(stages=tuple(stages), micro_batches=counts[0]), *rest)


Members = tuple[tuple[str, ...], tuple[int, ...]]


def shares_of(groups: Groups, problem: Problem) -> Iterator[tuple[Members, ...]]:
    """Equal shares or shares by inverse rate for each group; the fast have the larger equal ones."""
    if not groups:
        yield ()
        return
    members = sorted(groups[0], key=lambda d: (problem.rates.get(d.name, 1.0), -d.memory))
    names = tuple(d.name for d in members)
    weights = tuple(round(1e6 / problem.rates.get(name, 1.0)) for name in names)
    units = problem.profile.share_units
    for rest in shares_of(groups[1:], problem):
        if len(names) <= units:
            for shares in {apportion(units, (1,) * len(names)), apportion(units, weights)}:
                yield ((names, shares), *rest)
