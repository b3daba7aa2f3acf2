"""Clusters as they are, drawn by seed: few slow devices, slow nodes, many devices that are mildly unlike.

The clusters, models and pins are those of the golden problems, larger ones the 70B model's on more nodes. A
drawn problem always has a plan: what a device's memory holds does not depend on its rate, so that the plan of
the healthy cluster fits it, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import msgspec
from elasticd_planner.problem import Objective
from elasticd_planner.problem_files.file_format import TableProblem

from tests.planner.tables import golden, large

Pattern = Literal["few", "node", "nodes", "many"]

#: few: up to six slow devices. node: a slow node, and up to three slow devices elsewhere. nodes: two slow
#: nodes. many: a third of all devices, 5 to 60 % slow.
PATTERNS: tuple[Pattern, ...] = ("few", "node", "nodes", "many")
OBJECTIVES: tuple[Objective, ...] = ("step", "steady")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A problem, what it is planned for, and its name: cluster, pattern, objective, shares, seed."""

    problem: TableProblem
    objective: Objective
    pattern: Pattern
    name: str

    @property
    def uneven(self) -> bool:
        return self.problem.model.uneven_shares


def with_shares(problem: TableProblem, *, uneven: bool) -> TableProblem:
    """The same problem with uneven shares allowed, or not."""
    return msgspec.structs.replace(problem, model=msgspec.structs.replace(problem.model, uneven_shares=uneven))


def drawn(seed: int, count: int) -> Iterator[Drawn]:
    """`count` problems of 32 and 64 devices: every pattern under both objectives, with equal and with uneven
    shares, on the golden clusters in turn."""
    for number, (name, cell) in enumerate(_cells(("32b", "70b", "110b"), count)):
        pattern, objective, uneven = cell
        rng = random.Random(f"{seed}/{number}")
        problem = golden(name, uneven=uneven)
        yield _named(name, problem, pattern, objective, rng, f"{seed}/{number}")


def drawn_large(seed: int, count: int) -> Iterator[Drawn]:
    """The same on 256 and 1,024 devices."""
    for number, (name, cell) in enumerate(_cells(("256", "1024"), count)):
        pattern, objective, uneven = cell
        rng = random.Random(f"{seed}/{name}/{number}")
        problem = large(int(name), 0, pinned=True, uneven=uneven)
        yield _named(f"{name} devices", problem, pattern, objective, rng, f"{seed}/{number}")


def _cells(names: tuple[str, ...], count: int) -> Iterator[tuple[str, tuple[Pattern, Objective, bool]]]:
    """Clusters and cells in turn, so that any count has about as many of each."""
    cells = list(product(PATTERNS, OBJECTIVES, (False, True)))
    for number in range(count):
        turn, at = divmod(number, len(cells))
        yield names[(turn + at) % len(names)], cells[at]


def _named(
    name: str, problem: TableProblem, pattern: Pattern, objective: Objective, rng: random.Random, seed: str
) -> Drawn:
    rates = _rates(problem, pattern, rng)
    shares = "uneven" if problem.model.uneven_shares else "equal"
    return Drawn(
        problem=msgspec.structs.replace(problem, rates=rates),
        objective=objective,
        pattern=pattern,
        name=f"{name} {pattern} {objective} {shares} {seed}",
    )


def _rates(problem: TableProblem, pattern: Pattern, rng: random.Random) -> dict[str, float | None]:
    nodes = {node.name: [f"{node.name}/{i}" for i in range(node.devices)] for node in problem.cluster.nodes}
    everything = [device for devices in nodes.values() for device in devices]
    if pattern == "few":
        return {device: _slow(rng) for device in rng.sample(everything, rng.randint(1, 6))}
    if pattern == "many":
        third = rng.sample(everything, round(len(everything) / 3))
        return {device: round(rng.uniform(1.05, 1.6), 2) for device in third}
    whole = rng.sample(list(nodes), 1 if pattern == "node" else 2)
    rates: dict[str, float | None] = {}
    for name in whole:
        rates |= dict.fromkeys(nodes[name], _slow(rng))
    if pattern == "node":
        elsewhere = [device for device in everything if device not in rates]
        rates |= {device: _slow(rng) for device in rng.sample(elsewhere, rng.randint(1, 3))}
    return rates


def _slow(rng: random.Random) -> float:
    """The golden rows' rates, or any from a little slow to six times."""
    return rng.choice([2.57, 5.42, 12.53, round(rng.uniform(1.2, 2.0), 2), round(rng.uniform(1.2, 6.0), 2)])
