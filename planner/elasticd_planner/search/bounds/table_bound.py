"""A lower bound of table problems that counts whole layers, memory by position and every division of a node.

Theory of operation. A stage of a pipeline of m micro-batches has at most phi_j(m) layers: what memory holds,
and what T allows, n whole with m n c + (L - n) c_min <= T (in the steady state m n c <= T). A pipeline's stages
have L layers. With a weight a + m for a pipeline, over D pipelines that share M micro-batches,

    (a D + M) L  <=  sum over all groups of max over the pipelines' m of (a + m) phi_j(m).

a = 0 counts micro-batches; a large a counts room: D pipelines must hold D L layers at all. Memory holds more in
a pipeline's last stages. It has one of each, so the layers that position i may hold beyond those from position
k on are taken off its L, for each i < k. Few pipelines share the batch in so many ways, which are all
looked at, with weights of their own besides: slow groups may find room in a pipeline that takes little, and the
others must do without them. Of more pipelines, or more ways, any m may be among theirs, and they need at least
the lower convex envelope.

A node adds what its best division does: a dynamic programme over how many devices of each rate are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial
from itertools import combinations_with_replacement, islice, product

import numpy as np

from elasticd_planner.cost.table_cost import TableCost
from elasticd_planner.grouping.node_partitions import NodeKind
from elasticd_planner.numeric import EQUAL, Floats, Ints
from elasticd_planner.search.bounds.chain_bound import Budget, ChainBound, Nodes
from elasticd_planner.search.bounds.cheapest_chain import Limits, Pieces
from elasticd_planner.search.task import Task

#: Weights a of a pipeline, besides its micro-batches.
WEIGHTS = (0.0, 4.0, 16.0, 64.0, 1e6)

#: The bound is found to this relative precision; where there is a plan this near nothing more is looked at.
PRECISE, NEAR = 5e-4, 5e-4

#: Whole pipelines are looked at where a plan is further from the bound and pieces are no more than these; and
#: so many numbers in their arrays, more where a plan is further from the bound than WIDE, MORE times at most.
#: Of a problem with a gap of 13 % a proof took 4.7e8 and left 8 %, another 3.9e8 and left 4 %.
WORTH, PIECES, WHOLE, WIDE, MORE = 0.035, 80, 3e8, 0.05, 4.0

#: Prices of groups that are enough, and how near groups are that have the same where there are more.
PRICES, CLOSE = 16, (0.01, 0.02, 0.04, 0.08)

#: Cases that are looked at at once where there are few ways to share the batch.
CASES = 1024

#: Weights of pipelines that share the batch in one way, and ways that are weighed at once.
GRID, WEIGHED = (0.0, 0.25, 0.5, 0.75, 1.0), 16

#: Of so many pipelines every way to share the batch is looked at, if these are no more.
SHARED, WAYS = 4, 1100

#: States of a node that are looked at at most.
STATES = 600

#: Numbers in one array of the dynamic programme.
AT_ONCE = 1 << 19


#: The layers that groups hold, [piece, micro-batches], and those that a pipeline needs besides what its last
#: stages hold more, [micro-batches].
Level = tuple[Floats, Floats]


class TableBound:
    """The bounds of one task whose cost is a table's."""

    def __init__(self, task: Task, kinds: Sequence[NodeKind]) -> None:
        assert isinstance(task.cost, TableCost)
        self.task, self.cost = task, task.cost
        self._ways_of: dict[int, Ints | None] = {}
        self._places: dict[tuple[float, float, int], int] = {}
        self.nodes = tuple(self._node(kind) for kind in kinds)
        pieces = list(self._places)
        self.blocks = np.array([block for block, _, _ in pieces])
        #: Seconds of a layer that the other stages take at least of a micro-batch's way.
        self.fastest = float(self.blocks.min(initial=math.inf)) if task.cost.timing.fill else 0.0
        self._budget: Budget | None = None
        self._parts = np.array([part for _, part, _ in pieces])
        self._memory = np.array([memory for _, _, memory in pieces], dtype=np.float64)
        # Of stages that are not the first, and of first ones.
        self._rooms, self._first_rooms = (self._held(first=first) for first in (False, True))

    # Nodes.

    def _node(self, kind: NodeKind) -> Nodes:
        rates, memory = kind.rates, max(memory for _, memory, _ in kind.classes)
        widths = self.cost.widths(len(rates))
        number, size = len(kind.nodes), self.task.fixed_tp
        if size is not None and kind.normal:
            ends = range(size - 1, len(rates), size)
            return Nodes(number=number, fixed=tuple(self._equal(size, rates[end], memory) for end in ends))
        classes = sorted(set(rates))
        if not self.cost.uneven or len(classes) == 1:
            runs = tuple(
                tuple((width, self._equal(width, rates[stop - 1], memory)) for width in widths if width <= stop)
                for stop in range(1, len(rates) + 1)
            )
            return Nodes(number=number, runs=runs)
        counts = tuple(rates.count(rate) for rate in classes)
        groups = []
        for taken in product(*(range(count + 1) for count in counts)):
            if sum(taken) in widths:
                members = tuple(rate for rate, n in zip(classes, taken, strict=True) for _ in range(n))
                pieces = tuple(self._place(block, part, memory) for block, part in paced(self.cost, members))
                groups.append((taken, pieces))
        return Nodes(number=number, counts=counts, groups=tuple(groups))

    def _equal(self, width: int, slowest: float, memory: int) -> int:
        return self._place(dict(self.cost.slowdown)[width] * slowest, 1 / width, memory)

    def _place(self, block: float, part: float, memory: int) -> int:
        return self._places.setdefault((block, part, memory), len(self._places))

    def _total(self, values: Floats) -> Floats:
        """The most that all nodes add: [piece, case] to [case]."""
        total = np.zeros(values.shape[1])
        for node in self.nodes:
            states = math.prod(count + 1 for count in node.counts)
            step = max(1, AT_ONCE // states)
            for start in range(0, values.shape[1], step):
                total[start : start + step] += node.number * node.most(values[:, start : start + step])
        return total

    @property
    def small(self) -> bool:
        """Whether the dynamic programmes are."""
        return all(math.prod(count + 1 for count in node.counts) <= STATES for node in self.nodes)

    # Bounds.

    def least(self, pipelines: int, low: float, known: float) -> float:
        """Units that no plan of so many pipelines can beat: `low`, or more where that can be shown. `known`:
        those of a plan."""
        if known <= low * (1 + NEAR):
            return low
        low = self._least(pipelines, low, known)
        if known <= low * (1 + WORTH):
            return low
        if self._budget is None:
            self._budget = Budget(left=WHOLE * min(MORE, max(1.0, (known / low - 1) / WIDE)))
        whole = self.whole(pipelines) if self._budget.left > 0 else None
        return whole.least(low, known, self._budget) if whole is not None else low

    def whole(self, pipelines: int) -> ChainBound | None:
        """The bound of whole pipelines, where the ways to share the batch are few and the prices not many."""
        ways, task = self._shared(pipelines), self.task
        if ways is None or not ways.size or len(self.blocks) > PIECES:
            return None
        limits = Limits(
            layers=task.layers,
            fill=task.cost.timing.fill,
            deep=task.deep,
            groups=sum(node.number * node.devices for node in self.nodes),
            most=task.micro_batches - (pipelines - 1) * self._shallowest,
        )
        pieces = Pieces(blocks=self.blocks, rooms=self._rooms, first=self._first_rooms, price=self._prices)
        return ChainBound(pieces, limits, self.nodes, partial(self._within, pipelines, ways))

    def _least(self, pipelines: int, low: float, known: float) -> float:
        """The same without whole pipelines."""
        ways = self._shared(pipelines)
        if self._left(pipelines, low * (1 + PRECISE), ways) is not None:
            return low
        low, high = low * (1 + PRECISE), known
        while high > low * (1 + PRECISE):
            middle = (low + high) / 2
            left = self._left(pipelines, middle, ways)
            if left is None:
                low = middle
            else:  # what is excluded in this time is excluded in less
                high, ways = middle, left if ways is not None else None
        return low

    def _within(self, pipelines: int, ways: Ints, limit: float) -> Ints:
        """The ways to share the batch that nothing here excludes within a time."""
        left = self._left(pipelines, limit, ways)
        return ways[:, :0] if left is None else left

    def _left(self, pipelines: int, limit: float, ways: Ints | None) -> Ints | None:
        """Those ways to share the batch in which the groups may hold all layers; None where there is none. Of
        many pipelines (no ways are given) any array says that they may."""
        task, total = self.task, self.task.micro_batches
        most = total - (pipelines - 1) * self._shallowest
        if most < self._shallowest:
            return None
        counts = np.arange(total + 1)
        layers = self._layers(limit, np.maximum(counts, 1))
        levels = []
        for level in reversed(range(self._rooms.shape[1])):
            held = np.minimum(layers, self._rooms[:, level:].max(axis=1)[:, None])
            placed = np.minimum(layers[:, :, None], self._rooms[:, None, :level])
            extra = (placed - held[:, :, None]).max(axis=0, initial=0).sum(axis=1)
            levels.append((held, task.layers - extra))
        if ways is None:
            allowed = slice(self._shallowest, most + 1)
            return counts if self._any(levels, pipelines, allowed) else None
        tests = list(product(levels, WEIGHTS))
        while tests and ways.size:
            many = max(1, CASES // ways.shape[1])
            ways = self._possible(tests[:many], ways)
            tests = tests[many:]
        for held, needed in levels if pipelines > 1 else ():
            ways = self._weighed(held, needed, ways)
        return ways if ways.size else None

    def _any(self, levels: Sequence[Level], pipelines: int, allowed: slice) -> bool:
        """Whether pipelines may hold all layers if each takes any number of micro-batches that is allowed."""
        total = self.task.micro_batches
        counts = np.arange(total + 1)
        values, least = [], []
        for (held, needed), weight in product(levels, WEIGHTS):
            need = ((weight + counts) * needed)[allowed]
            least.append(pipelines * _envelope(need, total / pipelines - self._shallowest))
            values.append(((weight + counts) * held)[:, allowed].max(axis=1))
        most = self._total(np.stack(values, axis=1))
        return bool((most >= np.array(least) * (1 - EQUAL)).all())

    def _possible(self, tests: Sequence[tuple[Level, float]], ways: Ints) -> Ints:
        """The ways to share the batch that none of these weights a exclude, those with the most room first."""
        counts = np.arange(self.task.micro_batches + 1)
        values, least = [], []
        for (held, needed), weight in tests:
            each = (weight + counts) * held
            best = each[:, ways[0]]
            for one in ways[1:]:
                np.maximum(best, each[:, one], out=best)
            values.append(best)
            least.append(((weight + counts) * needed)[ways].sum(axis=0))
        most = self._total(np.concatenate(values, axis=1)).reshape(len(tests), -1)
        over = (most / np.maximum(least, EQUAL)).min(axis=0)
        order = np.argsort(-over, kind="stable")
        return ways[:, order[over[order] >= 1 - EQUAL]]

    def _weighed(self, held: Floats, needed: Floats, ways: Ints) -> Ints:
        """The ways to share the batch that no weights of GRID exclude. Some ways after the other are looked at:
        the first that have any left end it."""
        grid = np.array(_weights(len(ways))).T[:, None, :]  # [pipeline, way, weights]
        start, many = 0, WEIGHED
        while start < ways.shape[1]:
            some = ways[:, start : start + many]
            for power in (0, 1):
                weights = ((some / some.max(axis=0)) ** power)[:, :, None] * grid
                best = held[:, some[0], None] * weights[0]
                for one in range(1, len(some)):
                    np.maximum(best, held[:, some[one], None] * weights[one], out=best)
                most = self._total(best.reshape(len(best), -1)).reshape(best.shape[1:])
                least = (weights * needed[some][:, :, None]).sum(axis=0)
                some = some[:, (most >= least * (1 - EQUAL)).all(axis=1)]
                if not some.size:
                    break
            if some.size:
                return np.concatenate([some, ways[:, start + many :]], axis=1)
            start, many = start + many, many * 4
        return ways[:, :0]

    def _shared(self, pipelines: int) -> Ints | None:
        """Every way in which so many pipelines share the batch: [pipeline, way]; None where they are many."""
        if pipelines > SHARED:
            return None
        if pipelines not in self._ways_of:
            listed = list(islice(_partitions(self.task.micro_batches, pipelines, self._shallowest), WAYS + 1))
            few = len(listed) <= WAYS
            self._ways_of[pipelines] = np.array(listed).reshape(-1, pipelines).T if few else None
        return self._ways_of[pipelines]

    def _layers(self, limit: float, counts: Ints) -> Floats:
        """The most layers of a stage in pipelines of so many micro-batches: [piece, count]."""
        layers = self.task.layers
        blocks = self.blocks[:, None]
        through = limit - layers * self.fastest
        if through < 0:
            return np.zeros((len(self.blocks), len(counts)))
        more = counts * blocks - self.fastest
        found = np.full(more.shape, float(layers))
        np.divide(through * (1 + EQUAL), more, out=found, where=more > self.fastest * EQUAL)
        whole: Floats = np.minimum(np.floor(found), layers)
        return whole

    def _held(self, *, first: bool) -> Ints:
        """The most layers that memory holds: [piece, position from the end]. The last column stands for all
        positions further to the front."""
        cost, layers = self.cost, self.task.layers
        deepest = len(cost.layer_bytes) + 1
        found = np.full((len(self.blocks), deepest), layers, dtype=np.int64)
        free = (self._memory - cost.reserve - cost.fixed) / (cost.full * self._parts)
        for position in range(deepest):
            each = cost.layer_bytes[max(0, deepest - 2 - position)]
            room = free - (cost.embedding if first or position == 0 else 0.0)
            if each > 0:
                held = np.floor(np.maximum(room, 0.0) / each * (1 + 1e-6))
                found[:, position] = np.minimum(held, layers)
            found[room < 0, position] = 0
        return found

    @cached_property
    def _prices(self) -> Ints:
        """Which price a piece has. Pieces of the same devices with other shares have the same: a division may
        choose among them. Where prices are many, pieces that are nearly alike have the same, too."""
        alike = list(range(len(self.blocks)))

        def least(piece: int) -> int:
            while alike[piece] != piece:
                piece = alike[piece]
            return piece

        for node in self.nodes:
            for _, pieces in node.groups:
                for piece in pieces[1:]:
                    alike[least(piece)] = least(pieces[0])
        found = np.unique([least(piece) for piece in alike], return_inverse=True)[1]
        for close in CLOSE:
            if found.max() < PRICES:
                break
            found = self._closer(found, close)
        return found

    def _closer(self, prices: Ints, close: float) -> Ints:
        """Fewer prices: those are one whose fastest pieces' costs, and memory, differ by this part at most."""
        many = int(prices.max()) + 1
        blocks, rooms = np.full(many, np.inf), np.zeros((many, self._rooms.shape[1]))
        np.minimum.at(blocks, prices, self.blocks)
        np.maximum.at(rooms, prices, self._rooms)
        made: list[int] = []
        found = np.zeros(many, dtype=np.int64)
        for i in np.argsort(blocks, kind="stable").tolist():
            near = [
                k
                for k, first in enumerate(made)
                if blocks[i] <= blocks[first] * (1 + close)
                and (np.abs(rooms[i] - rooms[first]) <= 2 * close * rooms[first]).all()
            ]
            if not near:
                made.append(i)
            found[i] = near[0] if near else len(made) - 1
        return np.asarray(found[prices])

    @cached_property
    def _shallowest(self) -> int:
        """Micro-batches that a pipeline takes at least: in the deep rule, its stages."""
        if not self.task.deep:
            return 1
        rooms = self._rooms.max(axis=0)
        held = np.cumsum(np.concatenate([rooms, np.full(self.task.layers, rooms[-1])]))
        return int(np.searchsorted(held, self.task.layers)) + 1


@lru_cache(maxsize=20000)
def paced(cost: TableCost, rates: tuple[float, ...]) -> tuple[tuple[float, float], ...]:
    """(cost of a layer, largest part of a member) of a group with each of its shares."""
    width = len(rates)
    factor = dict(cost.slowdown)[width] * width
    found = []
    for shares in cost.shares(rates):
        slowest = max(share * rate for share, rate in zip(shares, rates, strict=True))
        found.append((factor * slowest / sum(shares), max(shares) / sum(shares)))
    return tuple(found)


@lru_cache(maxsize=8)
def _weights(pipelines: int) -> tuple[tuple[float, ...], ...]:
    """Weights of pipelines, of which those that take more have no less; the largest is 1."""
    return tuple((*smaller, 1.0) for smaller in combinations_with_replacement(GRID, pipelines - 1))


def _partitions(total: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    """Ascending numbers, none under `least`, that sum to `total`."""
    if parts == 1:
        if total >= least:
            yield (total,)
        return
    for first in range(least, total // parts + 1):
        for rest in _partitions(total - first, parts - 1, first):
            yield (first, *rest)


def _envelope(values: Floats, at: float) -> float:
    """The lower convex envelope of values at 0, 1, 2, ..."""
    low, high = math.floor(at), math.ceil(at)
    if low == high or high >= len(values):
        low, high = min(low, len(values) - 1), min(low, len(values) - 1) + 1
    before, after = np.arange(low + 1), np.arange(high, len(values))
    least = float(values[low]) if low == at else math.inf
    if not len(after):
        return least
    part = (at - before[:, None]) / (after - before[:, None])
    lines = values[before][:, None] * (1 - part) + values[after] * part
    return min(least, float(lines.min()))
