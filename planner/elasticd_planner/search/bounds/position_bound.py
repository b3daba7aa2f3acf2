"""A lower bound for few devices: the layers that stages hold by their positions in whole pipelines.

In 1F1B a stage with k stages after it hides at most min(m - 1, k) forward passes of its m micro-batches
(`pipeline_time`). With n layers at cost c, of which the part h is forward, and S the way of one micro-batch
there and back through the whole pipeline,

    S + (m - 1 - h min(m - 1, k)) n c  <=  T.

A pipeline of given TP groups has one layer on each at least, so that S is no less than the sum of their costs,
the other layers on the fastest of them (those of this stage at its own), and the borders between the stages. So
each position holds a whole number of layers at most, and more at the front. Groups of one cost take the
positions that hold most; groups of other costs may take the same ones, which makes the bound smaller, and no
less true. Where the positions of a pipeline hold fewer layers than the model has, it cannot take m
micro-batches in T. All ways are looked at to divide the groups of each division of the nodes among pipelines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, combinations, combinations_with_replacement, product
from math import comb, floor, prod

from elasticd_planner.grouping.node_partitions import NodeKind
from elasticd_planner.numeric import EQUAL
from elasticd_planner.search.task import Task
from elasticd_planner.spec.cluster import Link

#: Divisions of all nodes together that are looked at; where there are more, the bound says nothing.
DIVISIONS = 4096

#: Halvings of what is between the bound and a plan.
HALVINGS = 6

#: A TP group: the least seconds of a layer, and how many devices it has.
Piece = tuple[float, int]

#: How many groups there are of each piece.
Counts = tuple[int, ...]


class PositionBound:
    """The bound of one task."""

    def __init__(self, task: Task, kinds: Sequence[NodeKind]) -> None:
        """
        Args:
            task: to be planned by the schedule.
            kinds: of its nodes, few.
        """
        self._task, self._kinds = task, kinds
        self._layers, self._micro_batches = task.layers, task.micro_batches
        self._hidden = task.cost.timing.hidden
        cluster = task.cluster
        self._between = [cluster.between, *(level.link for level in cluster.levels)]
        self._inside = [link for node in cluster.nodes for link in cluster.inner(node)]
        self._hop = min(map(task.cost.boundary, self._inside))
        self._far_hop = max(self._hop, min(map(task.cost.boundary, self._between)))
        self._widest = max(kind.devices for kind in kinds)
        self._taken: dict[Counts, int] = {}
        self._most: dict[tuple[int, Counts], int] = {}

    def least(self, pipelines: int, low: float, high: float) -> float:
        """Seconds that no plan of so many pipelines can beat: `low`, or more.

        Args:
            pipelines: how many.
            low: a bound that is known.
            high: seconds from which on it is of no use to know more.
        """
        if pipelines > self._micro_batches:
            return high
        devices = sum(kind.devices * len(kind.nodes) for kind in self._kinds)
        across = self._least(
            pipelines, self._divisions, self._after(pipelines, devices, self._between), low, high
        )
        after = self._after(pipelines, self._widest, self._inside)
        return min(across, self._least(pipelines, self._in_one_node, after, low, high))

    def _after(self, pipelines: int, devices: int, links: Sequence[Link]) -> float:
        """Seconds that no plan of so many pipelines on so many devices beats after its passes."""
        fewest, after = devices // pipelines, self._task.cost.after
        if not fewest:
            return math.inf
        depths = range(1, min(fewest, self._layers) + 1)
        return min(after(pipelines, fewest, link, depth) for link in links for depth in depths)

    def _least(
        self, pipelines: int, divisions: Sequence[Counts], after: float, low: float, high: float
    ) -> float:
        if not divisions:
            return low
        if self._enough(pipelines, divisions, low - after):
            return low
        if not self._enough(pipelines, divisions, high - after):
            return high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            enough = self._enough(pipelines, divisions, middle - after)
            low, high = (low, middle) if enough else (middle, high)
        return low

    @cached_property
    def _nodes(self) -> list[tuple[list[tuple[Piece, ...]], int]]:
        """The groups of a node, by division; and how many such nodes there are."""
        return [(sorted(set(self._divided(kind))), len(kind.nodes)) for kind in self._kinds]

    def _divided(self, kind: NodeKind) -> Iterator[tuple[Piece, ...]]:
        task = self._task
        pinned = task.fixed_tp if kind.normal else None
        widths = [pinned] if pinned is not None else task.cost.widths(kind.devices)
        for groups in _partitions(kind.rates, widths):
            yield tuple(sorted((self._cost(group), len(group)) for group in groups))

    def _cost(self, rates: tuple[float, ...]) -> float:
        """The least seconds of a layer on a group of these slowdowns, whatever its shares."""
        if rates not in self._costs:
            paces = [
                pace
                for link in self._task.cluster.links
                for pace, groups, spare in self._task.cost.paces(rates, link)
                if groups == 1 and not spare
            ]
            self._costs[rates] = 1 / max(paces)
        return self._costs[rates]

    @cached_property
    def _costs(self) -> dict[tuple[float, ...], float]:
        return {}

    @cached_property
    def _pieces(self) -> list[Piece]:
        return sorted({piece for divisions, _ in self._nodes for pieces in divisions for piece in pieces})

    @cached_property
    def _divisions(self) -> list[Counts]:
        """The groups of all nodes together; none where there are too many ways."""
        ways = prod(comb(len(divisions) + count - 1, count) for divisions, count in self._nodes)
        if ways > DIVISIONS:
            return []
        listed = (combinations_with_replacement(divisions, count) for divisions, count in self._nodes)
        return _largest({self._counts(chain(*chain(*parts))) for parts in product(*listed)})

    @cached_property
    def _in_one_node(self) -> list[Counts]:
        """The groups of a single node."""
        return _largest({self._counts(pieces) for divisions, _ in self._nodes for pieces in divisions})

    def _counts(self, pieces: Iterable[Piece]) -> Counts:
        found = Counter(pieces)
        return tuple(found[piece] for piece in self._pieces)

    def _enough(self, pipelines: int, divisions: Sequence[Counts], limit: float) -> bool:
        """Returns True if so many pipelines may take the batch within a limit."""
        self._taken.clear()
        self._most.clear()
        return any(self._together(pipelines, counts, limit) >= self._micro_batches for counts in divisions)

    def _together(self, pipelines: int, counts: Counts, limit: float) -> int:
        """Micro-batches that so many pipelines of these groups take at most; groups may be left out."""
        if not any(counts):
            return -1
        key = pipelines, counts
        if key not in self._most:
            best = -1
            for own in product(*(range(count + 1) for count in counts)):
                first = self._alone(own, limit)
                if first < 1:
                    continue
                if pipelines > 1:
                    rest = tuple(have - used for have, used in zip(counts, own, strict=True))
                    others = self._together(pipelines - 1, rest, limit)
                    first = first + others if others > 0 else -1
                best = max(best, first)
                if best >= self._micro_batches:
                    break
            self._most[key] = best
        return self._most[key]

    def _alone(self, counts: Counts, limit: float) -> int:
        """Micro-batches that one pipeline of all of these groups takes at most; 0: none."""
        if counts not in self._taken:
            low, high = 0, self._micro_batches
            if not 0 < sum(counts) <= self._layers:
                high = 0
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self._holds(counts, middle, limit) else (low, middle - 1)
            self._taken[counts] = low
        return self._taken[counts]

    def _holds(self, counts: Counts, micro_batches: int, limit: float) -> bool:
        """Returns True if the positions of a pipeline of these groups may hold all layers."""
        groups = [(cost, count) for (cost, _), count in zip(self._pieces, counts, strict=True) if count]
        stages, fastest = sum(counts), groups[0][0]
        devices = sum(width * count for (_, width), count in zip(self._pieces, counts, strict=True))
        far = -(-devices // self._widest) - 1  # borders between nodes
        borders = far * self._far_hop + (stages - 1 - far) * self._hop
        way = sum(cost * count for cost, count in groups) + (self._layers - stages) * fastest
        left = (limit - way - borders) * (1 + EQUAL)
        if left < 0:
            return False
        layers, more = 0, micro_batches - 1
        for cost, count in groups:
            slower = cost - fastest  # of each layer here but one, in the way of a micro-batch
            for after in range(stages - 1, stages - 1 - count, -1):
                spent = (more - self._hidden * min(more, after)) * cost + slower
                whole = floor((left + slower) / spent * (1 + EQUAL)) if spent > 0 else self._layers
                if whole < 1:
                    return False
                layers += min(whole, self._layers)
        return layers >= self._layers and self._in_flight(counts, fastest, micro_batches, left)

    def _in_flight(self, counts: Counts, fastest: float, micro_batches: int, left: float) -> bool:
        """Returns True if the last stages of these groups may hold all layers. From one of them on, at most as
        many micro-batches are on their way as stages are left. `left`: of the limit besides the way of one."""
        stages = sum(counts)
        narrowest = min(width for (_, width), count in zip(self._pieces, counts, strict=True) if count)
        layers, more = 0, micro_batches - 1
        for after in range(stages):
            turns, first = divmod(more, after + 1)
            spent = (more - self._hidden * min(more, after)) * fastest
            own = floor(left / spent * (1 + EQUAL)) if spent > 0 else self._layers
            layers += own
            far = -(-(after + 1) * narrowest // self._widest) - 1
            borders = far * self._far_hop + (after - far) * self._hop
            for times, forwards in ((turns, first), (turns - 1, after)):
                if times > 0:
                    way = (left - forwards * self._hidden * fastest) / times - borders
                    layers = min(layers, floor(way / fastest * (1 + EQUAL)))
            if layers < after + 1:
                return False
        return layers >= self._layers


def _partitions(rates: tuple[float, ...], widths: Sequence[int]) -> Iterator[list[tuple[float, ...]]]:
    """All ways to divide devices of these slowdowns in groups of these widths, some left out."""
    if not rates:
        yield []
        return
    first, others = rates[0], rates[1:]
    if 1 not in widths:  # else a group of one may be left out as well
        yield from _partitions(others, widths)
    for width in widths:
        seen = set()
        for chosen in combinations(range(len(others)), width - 1):
            group = (first, *(others[i] for i in chosen))
            if group not in seen:
                seen.add(group)
                rest = tuple(rate for i, rate in enumerate(others) if i not in chosen)
                yield from ([group, *parts] for parts in _partitions(rest, widths))


def _largest(made: set[Counts]) -> list[Counts]:
    """Those that no other one has all groups of."""
    return [
        counts
        for counts in made
        if not any(
            other != counts and all(a <= b for a, b in zip(counts, other, strict=True)) for other in made
        )
    ]
