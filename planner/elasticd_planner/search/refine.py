"""From groups to a plan: the order of stages, exact layers and exact micro-batches under the whole cost.

The search keeps to a canonical order and to links between nodes; here each pipeline's orders are compared with
real hops, edges and memory by position, pipelines that are alike once. Where the time is the schedule's own,
what the formula found is the guess that `stage_swaps` goes on from, and micro-batches are dealt by exact
curves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from elasticd_planner.grouping.node_partitions import GroupType
from elasticd_planner.numeric import EQUAL, Floats, Ints
from elasticd_planner.search.balance.layer_split import Terms, fill
from elasticd_planner.search.balance.micro_batch_split import Line, pareto, split_by_lines, split_micro_batches
from elasticd_planner.search.balance.stage_swaps import Placed, StageCosts, improved
from elasticd_planner.search.task import Chained, DeviceGroup, NamedGroup, Signature, Task, pipeline_signature
from elasticd_planner.spec.cluster import Link, rate_of
from elasticd_planner.spec.plan import Pipeline

#: Orders are improved by swaps in pipelines of at most so many stages, in plans of so many pipelines.
SWAPPED_STAGES, SWAPPED_PIPELINES = 12, 8

#: In the schedule's time orders are improved in plans of so many different pipelines, and micro-batches are
#: dealt anew so often.
POLISHED, DEALT = 8, 3


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """Groups in the order of stages, with the terms and lines that follow. given, sums: layers of each stage
    and seconds of all stages, by line."""

    order: tuple[int, ...]
    terms: tuple[Terms, ...]
    line: Line
    given: Ints
    sums: Floats

    def layers(self, micro_batches: int) -> tuple[int, ...]:
        """The layers with the least seconds by the formula."""
        best = int(np.argmin((micro_batches - 1) * self.line.caps + self.sums))
        return tuple(self.given[best].tolist())


class Refiner:
    """Orders and divides the pipelines of one task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._orders: dict[tuple[Signature, int, bool], Ordered] = {}
        self._types: dict[tuple[tuple[float, ...], tuple[int, ...], tuple[int, ...], Link], GroupType] = {}
        self._named: dict[tuple[tuple[str, ...], tuple[int, ...]], GroupType] = {}
        #: By shares and memory of a group, whether it is a first stage, and the micro-batches in flight.
        self._most: dict[tuple[tuple[int, ...], tuple[int, ...], bool, int], int] = {}
        self._hops: dict[tuple[tuple[str, ...], tuple[str, ...]], float] = {}
        self._lines: dict[tuple[NamedGroup, ...], Line] = {}
        self._refined: dict[tuple[tuple[Chained, ...], bool], tuple[Pipeline, ...] | None] = {}
        self._first = task.cost.timing.first
        #: Whether the time is the schedule's own.
        self.exact = task.cost.timing.hidden > 0

    def pipelines(self, found: Sequence[Chained], *, keep: bool = False) -> tuple[Pipeline, ...] | None:
        """Pipelines with names; None where the groups cannot hold the layers after all. `keep`: in the order
        of stages that they have."""
        key = tuple(found), keep
        if key not in self._refined:
            self._refined[key] = self._pipelines(found, keep=keep)
        return self._refined[key]

    def _pipelines(self, found: Sequence[Chained], *, keep: bool) -> tuple[Pipeline, ...] | None:
        task = self.task
        swap = len(found) <= SWAPPED_PIPELINES
        if keep:
            ordered = [self.lined(chained, tuple(range(len(chained.groups)))) for chained in found]
        else:
            ordered = [self._ordered(chained, swap) for chained in found]
        if not all(len(one.line.caps) for one in ordered):
            return None
        given = split_by_lines([one.line for one in ordered], task.micro_batches)
        if given is None:
            return None
        placed = [self._placed(one, m) for one, m in zip(ordered, given, strict=True)]
        if self.exact:
            placed, given = self._scheduled(found, placed, given, keep=keep)
        made = zip(found, placed, given, strict=True)
        return tuple(self._pipeline(chained, one, m) for chained, one, m in made)

    def formula_seconds(self, found: Sequence[Chained]) -> float:
        """Seconds of the slowest of these pipelines by the formula, in the order of stages that they have; inf
        where the groups cannot hold the layers."""
        lines = []
        for chained in found:
            if chained.groups not in self._lines:
                self._lines[chained.groups] = self.lined(chained, tuple(range(len(chained.groups)))).line
            lines.append(self._lines[chained.groups])
        total = self.task.micro_batches
        counts = split_by_lines(lines, total) if all(len(line.caps) for line in lines) else None
        if counts is None:
            return math.inf
        return max(line.seconds(count) for line, count in zip(lines, counts, strict=True))

    def _placed(self, one: Ordered, micro_batches: int) -> Placed:
        """The formula's layers."""
        count = self.task.cost.timing.counted(max(micro_batches, len(one.order)))
        return Placed(order=one.order, layers=one.layers(count))

    def _pipeline(self, chained: Chained, placed: Placed, micro_batches: int) -> Pipeline:
        groups = [chained.groups[index] for index in placed.order]
        named = [(group.devices, group.shares) for group in groups]
        return Pipeline.from_layers(named, placed.layers, micro_batches)

    def _ordered(self, chained: Chained, swap: bool) -> Ordered:
        """The best order of stages for the micro-batches that the search thought of."""
        key = (pipeline_signature(self.task, chained.groups), chained.micro_batches, swap)
        if key not in self._orders:
            self._orders[key] = self._best(chained, swap and len(chained.groups) <= SWAPPED_STAGES)
        return self._orders[key]

    # The schedule's time.

    def _scheduled(
        self, found: Sequence[Chained], placed: Sequence[Placed], given: Sequence[int], *, keep: bool
    ) -> tuple[list[Placed], tuple[int, ...]]:
        """Places and micro-batches improved under the schedule's time: never slower than what was given."""
        task, timing = self.task, self.task.cost.timing
        alike = [pipeline_signature(self.task, chained.groups) for chained in found]
        boards = {key: self._board(chained) for key, chained in dict(zip(alike, found, strict=True)).items()}
        swap = not keep and len(boards) <= POLISHED
        most = min(task.micro_batches, max(given) + max(8, max(given) // 4))
        curves: dict[tuple[Signature, Placed], Floats] = {}
        better: dict[tuple[Signature, Placed, int], Placed] = {}

        def curve(key: Signature, one: Placed) -> Floats:
            if (key, one) not in curves:
                times = boards[key].times(np.array(one.order), np.array(one.layers))
                curves[key, one] = timing.curve(times, most)
            return curves[key, one]

        def slowest(places: Sequence[Placed], counts: Sequence[int]) -> float:
            rows = zip(alike, places, counts, strict=True)
            return max(float(curve(key, one)[m - 1]) for key, one, m in rows)

        best, counts = list(placed), tuple(given)
        for _ in range(DEALT):
            now = []
            for key, chained, one, m in zip(alike, found, best, counts, strict=True):
                if (key, one, m) not in better:
                    guesses = [one] if keep else [one, *self._guesses(chained, boards[key], one)]
                    wide = swap and len(one.order) <= SWAPPED_STAGES
                    better[key, one, m] = improved(boards[key], guesses, m, timing, swap=wide)
                now.append(better[key, one, m])
            dealt = split_micro_batches(
                [curve(key, one) for key, one in zip(alike, now, strict=True)], task.micro_batches
            )
            if dealt is None or slowest(now, dealt) >= slowest(best, counts) * (1 - EQUAL):
                break
            best, counts = now, dealt
        return best, counts

    def _guesses(self, chained: Chained, board: StageCosts, placed: Placed) -> Iterator[Placed]:
        """Other orders with the layers that the groups have, where they fit."""
        layers = dict(zip(placed.order, placed.layers, strict=True))
        for order in self._candidates(chained):
            guess = Placed(order=order, layers=tuple(layers[index] for index in order))
            if board.fits(np.array(order), np.array(guess.layers)):
                yield guess

    def _board(self, chained: Chained) -> StageCosts:
        groups, kinds = chained.groups, [self.type_of(group) for group in chained.groups]
        depth = len(kinds)
        held = {
            id(k): [self.most_layers(k, first=j == 0, in_flight=depth - j) for j in range(depth)]
            for k in {id(k): k for k in kinds}.values()
        }
        return StageCosts(
            block=np.array([kind.block for kind in kinds]),
            embed=np.array([kind.cost.embed for kind in kinds]),
            head=np.array([kind.cost.head for kind in kinds]),
            forward=np.array([kind.cost.forward for kind in kinds]),
            hop=np.array([[self._hop(a, b) for b in groups] for a in groups]),
            most=np.array([held[id(k)] for k in kinds]),
        )

    def _best(self, chained: Chained, swap: bool) -> Ordered:
        def value(one: Ordered) -> tuple[float, tuple[int, ...]]:
            return round(one.line.seconds(chained.micro_batches), 12), one.order

        best = min((self.lined(chained, order) for order in self._candidates(chained)), key=value)
        improved = swap and not self._settled(chained, best)
        while improved:
            improved = False
            for order in _swaps(best.order):
                other = self.lined(chained, order)
                if value(other)[0] < value(best)[0] * (1 - EQUAL):
                    best, improved = other, True
        return best

    def _settled(self, chained: Chained, best: Ordered) -> bool:
        """Whether no order can be better: nothing at the ends or between, and as quick as without any limit
        of memory."""
        if any(term.charged for term in best.terms):
            return False
        free = [Terms(block=t.block, fixed=0.0, most=(self.task.layers,) * len(best.terms)) for t in best.terms]
        caps, given = fill(free, self.task.layers, len(free))
        least = Line(caps=caps, sums=self._first(caps, given @ np.array([t.block for t in free])))
        count = chained.micro_batches
        return best.line.seconds(count) <= least.seconds(count) * (1 + EQUAL)

    def _candidates(self, chained: Chained) -> list[tuple[int, ...]]:
        groups = [self.type_of(group) for group in chained.groups]
        load = [kind.block * self.most_layers(kind, first=False, in_flight=3) for kind in groups]
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

    def lined(self, chained: Chained, order: tuple[int, ...]) -> Ordered:
        """A pipeline's groups in this order of stages."""
        return self.ordered(order, self.terms(chained, order))

    def ordered(self, order: tuple[int, ...], terms: tuple[Terms, ...]) -> Ordered:
        """Stages of these terms, with their lines."""
        caps, given = fill(terms, self.task.layers, len(order))
        sums = given @ np.array([t.block for t in terms]) + sum(t.charged for t in terms)
        kept = pareto(caps, sums)
        caps, sums = caps[kept], sums[kept]
        line = Line(caps=caps, sums=self._first(caps, sums), least=len(order) if self.task.deep else 1)
        return Ordered(order=order, terms=terms, line=line, given=given[kept], sums=sums)

    def terms(self, chained: Chained, order: tuple[int, ...]) -> tuple[Terms, ...]:
        """The terms of a pipeline's groups in this order of stages."""
        task, depth = self.task, len(order)
        room = max(0, task.layers - depth + 1)  # every stage has a layer
        terms = []
        for position, index in enumerate(order):
            group = chained.groups[index]
            kind = self.type_of(group)
            first, last = position == 0, position == depth - 1
            hop = 0.0 if last else self._hop(group, chained.groups[order[position + 1]])
            most = self.most_layers(kind, first=first, in_flight=depth - position)
            terms.append(Terms.of(kind.cost, (min(most, room),) * depth, first=first, last=last, hop=hop))
        return tuple(terms)

    def most_layers(self, kind: GroupType, *, first: bool, in_flight: int) -> int:
        """The most layers that a group of this kind holds with so many micro-batches in flight."""
        key = kind.shares, kind.memory, first, in_flight
        if key not in self._most:
            self._most[key] = kind.most_layers(self.task.cost, self.task.layers, in_flight, first=first)
        return self._most[key]

    def _hop(self, a: NamedGroup, b: NamedGroup) -> float:
        """Seconds of a micro-batch between two groups, there and back."""
        key = a.devices, b.devices
        if key not in self._hops:
            self._hops[key] = self.task.hop(a, b)
        return self._hops[key]

    def quickest(self, devices: tuple[str, ...]) -> DeviceGroup:
        """The TP group of these devices with the shares that are quickest."""
        options = self.task.cost.shares([rate_of(self.task.rates, name) for name in devices])
        groups = [DeviceGroup(devices=devices, shares=shares) for shares in options]
        return min(groups, key=lambda group: self.type_of(group).block) if len(groups) > 1 else groups[0]

    def type_of(self, group: NamedGroup) -> GroupType:
        """What a group costs and holds."""
        named = group.devices, group.shares
        if named not in self._named:
            self._named[named] = self._type_of(group)
        return self._named[named]

    def _type_of(self, group: NamedGroup) -> GroupType:
        cluster, link = self.task.cluster, self.task.cluster.reach(group.devices)
        rates = tuple(rate_of(self.task.rates, name) for name in group.devices)
        memory = tuple(cluster.memory[name] for name in group.devices)
        key = (rates, group.shares, memory, link)
        if key not in self._types:
            cost = self.task.cost.group(rates, group.shares, link)
            self._types[key] = GroupType(cost=cost, shares=group.shares, memory=memory)
        return self._types[key]


def _swaps(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for i, j in combinations(range(len(order)), 2):
        swapped = list(order)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        yield tuple(swapped)
