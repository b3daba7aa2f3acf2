"""From groups to a plan: the order of stages, exact layers and exact micro-batches under the whole cost.

The search keeps to a canonical order and to links between nodes; here each pipeline's orders are compared with
real hops, edges and memory by position, pipelines that are alike once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from elasticd_planner.assign import EQUAL, Floats, Terms, fill, split_layers
from elasticd_planner.cost import rate_of, reach
from elasticd_planner.deal import Line, deal, pareto
from elasticd_planner.division import GroupType
from elasticd_planner.plan import Pipeline, Stage
from elasticd_planner.pool import most_layers
from elasticd_planner.task import Chained, Group, Task

#: Orders are improved by swaps in pipelines of at most so many stages, in plans of so many pipelines.
SWAPPED_STAGES, SWAPPED_PIPELINES = 12, 8

#: What makes two groups alike in a pipeline: rates, shares, memory, and which node of the pipeline it is on.
Alike = tuple[tuple[float, ...], tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """Groups in the order of stages, with the terms and lines that follow."""

    order: tuple[int, ...]
    terms: tuple[Terms, ...]
    caps: Floats
    sums: Floats

    def seconds(self, micro_batches: int, *, steady: bool) -> float:
        if not len(self.caps):
            return float("inf")
        if steady:
            return float(self.caps.min() * micro_batches)
        return float(((micro_batches - 1) * self.caps + self.sums).min())


class Finisher:
    """Orders and divides the pipelines of one task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._orders: dict[tuple[tuple[Alike, ...], int, bool], Ordered] = {}
        self._types: dict[tuple[tuple[float, ...], tuple[int, ...], tuple[int, ...], bool], GroupType] = {}
        self._most: dict[tuple[GroupType, bool, int], int] = {}

    def pipelines(self, found: Sequence[Chained], *, keep: bool = False) -> tuple[Pipeline, ...] | None:
        """Pipelines with names; None where the groups cannot hold the layers after all. `keep`: in the order
        of stages that they have."""
        task = self.task
        swap = len(found) <= SWAPPED_PIPELINES
        if keep:
            ordered = [self._lined(chained, tuple(range(len(chained.groups)))) for chained in found]
        else:
            ordered = [self._ordered(chained, swap) for chained in found]
        if not all(len(one.caps) for one in ordered):
            return None
        lines = [
            Line(caps=one.caps, sums=one.sums, least=len(one.order) if task.deep else 1) for one in ordered
        ]
        given = deal(lines, task.micro_batches, steady=task.steady)
        if given is None:
            return None
        made = [self._pipeline(chained, one, m) for chained, one, m in zip(found, ordered, given, strict=True)]
        return tuple(made)

    def _pipeline(self, chained: Chained, one: Ordered, micro_batches: int) -> Pipeline:
        task = self.task
        if task.steady:  # the least largest stage; among those the shortest way through
            layers = split_layers(one.terms, task.layers, 10**6)
        else:
            layers = split_layers(one.terms, task.layers, max(micro_batches, len(one.order)))
        stages = []
        start = 0
        for index, count in zip(one.order, layers, strict=True):
            group = chained.groups[index]
            stages.append(Stage(start=start, stop=start + count, devices=group.devices, shares=group.shares))
            start += count
        return Pipeline(stages=tuple(stages), micro_batches=micro_batches)

    def _ordered(self, chained: Chained, swap: bool) -> Ordered:
        """The best order of stages for the micro-batches that the search thought of."""
        nodes: dict[str, int] = {}
        keys = []
        for group in chained.groups:
            node = nodes.setdefault(group.devices[0].rpartition("/")[0], len(nodes))
            keys.append((self._rates(group), group.shares, group.memory, node))
        key = (tuple(keys), chained.micro_batches, swap)
        if key not in self._orders:
            self._orders[key] = self._best(chained, swap and len(keys) <= SWAPPED_STAGES)
        return self._orders[key]

    def _best(self, chained: Chained, swap: bool) -> Ordered:
        def value(one: Ordered) -> tuple[float, tuple[int, ...]]:
            return round(one.seconds(chained.micro_batches, steady=self.task.steady), 12), one.order

        best = min((self._lined(chained, order) for order in self._candidates(chained)), key=value)
        improved = swap and not self._settled(chained, best)
        while improved:
            improved = False
            for order in _swaps(best.order):
                other = self._lined(chained, order)
                if value(other)[0] < value(best)[0] * (1 - EQUAL):
                    best, improved = other, True
        return best

    def _settled(self, chained: Chained, best: Ordered) -> bool:
        """Whether no order can be better: nothing at the ends or between, and as quick as without any limit
        of memory."""
        if any(term.fixed for term in best.terms):
            return False
        free = [Terms(block=t.block, fixed=0.0, most=(self.task.layers,) * len(best.terms)) for t in best.terms]
        caps, given = fill(free, self.task.layers, len(free))
        sums = given @ np.array([t.block for t in free])
        least = Ordered(order=best.order, terms=tuple(free), caps=caps, sums=sums)
        steady, m = self.task.steady, chained.micro_batches
        return best.seconds(m, steady=steady) <= least.seconds(m, steady=steady) * (1 + EQUAL)

    def _candidates(self, chained: Chained) -> list[tuple[int, ...]]:
        groups = [self._type(group) for group in chained.groups]
        load = [kind.block * self._most_layers(kind, False, 3) for kind in groups]
        indices = range(len(groups))

        def ranked(key: Callable[[int], tuple[float, ...]]) -> tuple[int, ...]:
            return tuple(sorted(indices, key=key))

        found = [
            tuple(indices),
            ranked(lambda i: (-load[i], -groups[i].block, i)),
            ranked(lambda i: (-groups[i].block, i)),
            ranked(lambda i: (load[i], groups[i].block, i)),
        ]
        return list(dict.fromkeys(found))

    def _lined(self, chained: Chained, order: tuple[int, ...]) -> Ordered:
        terms = self._terms(chained, order)
        caps, given = fill(terms, self.task.layers, len(order))
        if not len(caps):
            return Ordered(order=order, terms=terms, caps=np.zeros(0), sums=np.zeros(0))
        sums = given @ np.array([t.block for t in terms]) + sum(t.fixed for t in terms)
        caps, sums = pareto(caps, sums)
        return Ordered(order=order, terms=terms, caps=caps, sums=sums)

    def _terms(self, chained: Chained, order: tuple[int, ...]) -> tuple[Terms, ...]:
        task, depth = self.task, len(order)
        terms = []
        for position, index in enumerate(order):
            group = chained.groups[index]
            kind = self._type(group)
            fixed = kind.cost.embed if position == 0 else 0.0
            if position == depth - 1:
                fixed += kind.cost.head
            else:
                following = chained.groups[order[position + 1]].devices[0]
                fixed += task.cost.boundary(reach(task.cluster, (group.devices[0], following)))
            most = self._most_layers(kind, position == 0, depth - position)
            terms.append(Terms(block=kind.block, fixed=fixed, most=(most,) * depth))
        return tuple(terms)

    def _most_layers(self, kind: GroupType, first: bool, in_flight: int) -> int:
        key = (kind, first, in_flight)
        if key not in self._most:
            self._most[key] = most_layers(
                self.task.cost, kind, self.task.layers, first=first, last=in_flight == 1, in_flight=in_flight
            )
        return self._most[key]

    def _type(self, group: Group) -> GroupType:
        link = reach(self.task.cluster, group.devices)
        key = (self._rates(group), group.shares, group.memory, link is self.task.cluster.inside)
        if key not in self._types:
            cost = self.task.cost.group(key[0], group.shares, link)
            self._types[key] = GroupType(cost=cost, shares=group.shares, memory=group.memory)
        return self._types[key]

    def _rates(self, group: Group) -> tuple[float, ...]:
        return tuple(rate_of(self.task.rates, device) for device in group.devices)


def _swaps(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for i in range(len(order)):
        for j in range(i + 1, len(order)):
            swapped = list(order)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            yield tuple(swapped)
