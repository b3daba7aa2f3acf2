"""Drawn jobs of real models, and the same jobs with less freedom: a plan of these is a plan of those."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from elasticd_planner.problem import Problem, without
from elasticd_planner.spec.cluster import Node

from tests.planner.real_models import REAL, ZERO, job

#: Devices by node: clusters that tests plan, and larger ones.
FEW = ((2,), (4,), (8,), (2, 2, 2), (4, 4), (4, 4, 2), (8, 4), (8, 8))
MANY = ((8,) * 4, (8,) * 8, (4,) * 12, (8,) * 32, (8,) * 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restricted:
    """A problem with less freedom, and the words of what it lacks."""

    words: str
    problem: Problem


def drawn(rng: random.Random, nodes: tuple[tuple[int, ...], ...], *, slow: bool | None = None) -> Problem:
    """A job of a real model: its batch, links, memory and freedom are drawn. Of half the jobs (`slow`: of all,
    or of none) one to three devices are slow."""
    counts = rng.choice(nodes)
    names = [f"n{n}/{i}" for n, count in enumerate(counts) for i in range(count)]
    rates: dict[str, float] = {}
    if rng.random() < 0.5 if slow is None else slow:
        chosen = rng.sample(names, min(len(names), rng.randint(1, 3)))
        rates = {name: rng.choice([1.2, 1.5, 2.57, 5.42]) for name in chosen}
    batch = rng.choice([16, 32, 64, 128, 256])
    return job(
        rng.choice(list(REAL)),
        counts,
        batch=max(batch, 2 * len(names)) if len(names) > 64 else batch,
        tokens=rng.choice([1024, 2048, 4096]),
        flops=rng.choice([1.5e14, 4e14]),
        rates=rates,
        links={
            "gigabytes": rng.choice([24.0, 40.0, 75.0, 75.0]),
            "inside": rng.choice([50.0, 300.0]),
            "between": rng.choice([1.0, 5.0, 25.0]),
        },
        micro_batches=rng.choice([(), (1, 2), (1, 2, 4)]),
        states=rng.choice([ZERO[:1], ZERO[:2], ZERO]),
        recompute=rng.choice([True, False]),
    )


def restricted(rng: random.Random, problem: Problem, count: int) -> Iterator[Restricted]:
    """The problem with so many different restrictions: pins of TP size and number of pipelines, one micro-batch
    size, one state policy, recomputation everywhere or nowhere, devices or nodes left out; up to three each."""
    seen: set[str] = set()
    for _ in range(20 * count):
        one, words = problem, []
        for restrict in rng.sample(_RESTRICTIONS, rng.choice([1, 1, 2, 2, 3])):
            made = restrict(rng, one)
            if made is not None:
                one, word = made
                words.append(word)
        name = ", ".join(sorted(words))
        if words and name not in seen:
            seen.add(name)
            yield Restricted(words=name, problem=one)
        if len(seen) == count:
            return


def _space(problem: Problem, **fields: object) -> Problem:
    return msgspec.structs.replace(
        problem, search_space=msgspec.structs.replace(problem.search_space, **fields)
    )


def _tp(rng: random.Random, problem: Problem) -> tuple[Problem, str] | None:
    if problem.rates:
        return None  # on nodes with slow devices a pin leaves the sizes free
    widest = max(len(node.devices) for node in problem.cluster.nodes)
    size = rng.choice([size for size in (1, 2, 4, 8) if size <= widest])
    return _space(problem, fixed_tp=size), f"tp {size}"


def _dp(rng: random.Random, problem: Problem) -> tuple[Problem, str]:
    most = min(len(problem.cluster.devices), problem.global_batch)
    number = rng.choice([n for n in (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256) if n <= most])
    return _space(problem, fixed_dp=number), f"dp {number}"


def _micro_batch(rng: random.Random, problem: Problem) -> tuple[Problem, str] | None:
    if not problem.search_space.micro_batches:
        return None
    size = rng.choice(problem.search_space.micro_batches)
    return _space(problem, micro_batches=(size,)), f"micro-batch {size}"


def _state(rng: random.Random, problem: Problem) -> tuple[Problem, str] | None:
    if len(problem.search_space.states) == 1:
        return None
    state = rng.choice(problem.search_space.states)
    return _space(problem, states=(state,)), f"ZeRO {state.zero}"


def _recompute(rng: random.Random, problem: Problem) -> tuple[Problem, str] | None:
    if problem.search_space.recompute is not True:
        return None
    everywhere = rng.choice([True, False])
    return _space(problem, recompute="always" if everywhere else False), f"recompute {everywhere}"


def _nodes(rng: random.Random, problem: Problem) -> tuple[Problem, str] | None:
    nodes = problem.cluster.nodes
    if len(nodes) == 1:
        return None
    left = sorted(rng.sample(range(len(nodes)), rng.randint(1, len(nodes) - 1)))
    return _of_nodes(problem, tuple(nodes[i] for i in left)), f"nodes {_counted(left)}"


def _device(rng: random.Random, problem: Problem) -> tuple[Problem, str] | None:
    devices = [device.name for device in problem.cluster.devices]
    if len(devices) == 1:
        return None
    name = rng.choice(devices)
    return without(problem, name), f"without {name}"


def _counted(indices: list[int]) -> str:
    return ",".join(map(str, indices)) if len(indices) <= 4 else f"{len(indices)} from {indices[0]}"


def _of_nodes(problem: Problem, nodes: tuple[Node, ...]) -> Problem:
    names = {device.name for node in nodes for device in node.devices}
    return msgspec.structs.replace(
        problem,
        cluster=msgspec.structs.replace(problem.cluster, nodes=nodes),
        rates={name: rate for name, rate in problem.rates.items() if name in names},
    )


_RESTRICTIONS = (_tp, _dp, _micro_batch, _state, _recompute, _nodes, _device)
