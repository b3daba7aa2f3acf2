"""The best step time of a small problem by enumeration, under the schedule's exact time.

Devices that are alike count as numbers, all else is listed: every group, its offered shares, every order of
groups, all layers, all sets of pipelines, all micro-batches. It shares nothing with the search but the cost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import numpy as np
from elasticd_planner.cost.pipeline_time import Times
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.problem import Problem

from tests.planner.brute import compositions

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Lane:
    """A group: what it takes of each class, the class of each member, shares, and the node."""

    counts: Counts
    members: tuple[int, ...]
    shares: tuple[int, ...]
    node: str


@dataclass
class Enumeration:
    """All pipelines and plans of one problem."""

    problem: Problem
    classes: list[tuple[str, float, int]] = field(init=False)
    have: Counts = field(init=False)

    def __post_init__(self) -> None:
        problem = self.problem
        self.cost = ProfileCost(problem.profile)
        self.count = problem.global_batch // problem.micro_batch
        found = Counter((d.node, problem.rates.get(d.name, 1.0), d.memory) for d in problem.cluster.devices)
        self.classes = sorted(found)
        self.have = tuple(found[key] for key in self.classes)
        self.needs = cache(self._needs)

    def best(self) -> float:
        """Seconds of the best plan, inf where nothing fits."""
        curves = self.curves()
        return min(
            (self._plan(parts, curves) for parts in self._sets(sorted(curves), self.have)), default=math.inf
        )

    def curves(self) -> dict[Counts, np.ndarray]:
        """Of all devices that a pipeline may have, the best seconds by micro-batches."""
        by_depth: dict[int, list[tuple[Lane, ...]]] = {}
        for chain in self._chains(self.have):
            by_depth.setdefault(len(chain), []).append(chain)
        best: dict[Counts, np.ndarray] = {}
        for depth, chains in by_depth.items():
            if depth > self.problem.profile.layers:
                continue
            rows = [(chain, n) for chain in chains for n in compositions(self.problem.profile.layers, depth)]
            seconds = self.cost.timing.curve(self._times(rows), self.count)
            for index, (chain, layers) in enumerate(rows):
                one = np.where(self._fits(chain, layers), seconds[:, index], np.inf)
                counts = tuple(map(sum, zip(*(lane.counts for lane in chain), strict=True)))
                best[counts] = np.minimum(best.get(counts, np.inf), one)
        return best

    def _chains(self, left: Counts) -> Iterator[tuple[Lane, ...]]:
        for lane in self._lanes():
            if all(a <= b for a, b in zip(lane.counts, left, strict=True)):
                yield (lane,)
                rest = tuple(b - a for a, b in zip(lane.counts, left, strict=True))
                for more in self._chains(rest):
                    yield (lane, *more)

    def _lanes(self) -> list[Lane]:
        if not hasattr(self, "_all"):
            found = []
            for counts in product(*(range(n + 1) for n in self.have)):
                members = tuple(i for i, n in enumerate(counts) for _ in range(n))
                nodes = {self.classes[i][0] for i in members}
                if len(nodes) == 1 and len(members) in self.cost.widths(len(members)):
                    rates = [self.classes[i][1] for i in members]
                    # The offered shares come in the order of members; equal ones larger for the fast.
                    members = tuple(sorted(members, key=lambda i: (self.classes[i][1], -self.classes[i][2])))
                    rates = [self.classes[i][1] for i in members]
                    found += [Lane(counts, members, s, nodes.copy().pop()) for s in self.cost.shares(rates)]
            self._all = found
        return self._all

    def _times(self, rows: list[tuple[tuple[Lane, ...], tuple[int, ...]]]) -> Times:
        depth = len(rows[0][0])
        forward, backward = np.zeros((len(rows), depth)), np.zeros((len(rows), depth))
        hops = np.zeros((len(rows), depth - 1))
        cluster, groups = self.problem.cluster, {}
        for row, (chain, layers) in enumerate(rows):
            for stage, (lane, n) in enumerate(zip(chain, layers, strict=True)):
                if lane not in groups:
                    rates = [self.classes[i][1] for i in lane.members]
                    groups[lane] = self.cost.group(rates, lane.shares, cluster.inside)
                cost = groups[lane]
                work = n * cost.block + (stage == 0) * cost.embed + (stage == depth - 1) * cost.head
                forward[row, stage], backward[row, stage] = work * cost.forward, work * (1 - cost.forward)
                if stage:
                    link = cluster.inside if chain[stage - 1].node == lane.node else cluster.between
                    hops[row, stage - 1] = self.cost.boundary(link) / 2
        return Times(forward=forward, backward=backward, boundary=hops)

    def _fits(self, chain: tuple[Lane, ...], layers: tuple[int, ...]) -> np.ndarray:
        """Whether memory suffices with 1, 2, ... micro-batches."""
        depth, able = len(chain), self.count
        for stage, (lane, n) in enumerate(zip(chain, layers, strict=True)):
            for count in range(1, min(able, depth - stage) + 1):
                if not self.needs(lane, n, stage == 0, stage == depth - 1, count):
                    able = count - 1
                    break
        return np.arange(1, self.count + 1) <= able

    def _needs(self, lane: Lane, layers: int, first: bool, last: bool, in_flight: int) -> bool:
        return all(
            math.ceil(
                self.cost.memory(layers, lane.shares, position, first=first, last=last, in_flight=in_flight)
            )
            <= self.classes[member][2]
            for position, member in enumerate(lane.members)
        )

    def _sets(self, parts: list[Counts], left: Counts) -> Iterator[tuple[Counts, ...]]:
        for index, part in enumerate(parts):
            if all(a <= b for a, b in zip(part, left, strict=True)):
                yield (part,)
                rest = tuple(b - a for a, b in zip(part, left, strict=True))
                for more in self._sets(parts[index:], rest):
                    yield (part, *more)

    def _plan(self, parts: tuple[Counts, ...], curves: dict[Counts, np.ndarray]) -> float:
        """The best micro-batches: the least of the slowest, by dynamic programming."""
        if len(parts) > self.count:
            return math.inf
        best = np.full(self.count + 1, np.inf)
        best[0] = 0.0
        for part in parts:
            now = np.full(self.count + 1, np.inf)
            for m in range(1, self.count + 1):
                now[m] = min(max(best[m - k], curves[part][k - 1]) for k in range(1, m + 1))
            best = now
        cluster = self.problem.cluster
        nodes = {self.classes[i][0] for part in parts for i, n in enumerate(part) if n}
        link = cluster.between if len(nodes) > 1 else cluster.inside
        return float(best[-1]) + self.cost.after(len(parts), min(map(sum, parts)), link)


def best(problem: Problem) -> float:
    """Seconds of the best plan of a problem; inf where nothing fits."""
    return Enumeration(problem).best()
