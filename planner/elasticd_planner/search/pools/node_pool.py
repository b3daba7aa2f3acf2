"""A pool: some nodes that form a number of pipelines among themselves, and the most that they do in a time.

A combination is a division for each node; they are tried best first by the bound of `group_bound`, which is a
sum over groups, until it says that none that is left can do more. Of a combination all pipelines and their best
partition are found at once (`pipeline_candidates`, `pipeline_partition`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from elasticd_planner.cost.model import GroupCost
from elasticd_planner.grouping.group_types import Column, Columns
from elasticd_planner.grouping.node_partitions import Division, GroupType, NodeKind
from elasticd_planner.numeric import EQUAL, Floats, Ints
from elasticd_planner.search.balance.micro_batch_split import Line
from elasticd_planner.search.bounds.integer_layers import IntegerLayerBound
from elasticd_planner.search.pools.pipeline_candidates import candidates, size
from elasticd_planner.search.pools.pipeline_partition import Counts, Partition
from elasticd_planner.search.pools.ranked_combinations import DivisionUses, choices, products

#: Combinations listed of a pool that is alone, of one that is searched thoroughly, and of one among others.
LISTED, LISTED_ALL, POOLED = 400, 3000, 80

#: Where whole layers and micro-batches rank combinations: at so many times the bound.
AHEAD = 1.1

#: The same in searches that are not thorough, and the micro-batches in flight in the middle of a pipeline.
AHEADS, MIDDLE = (1.02, 1.06), 5

#: Where heads rank combinations: at so many times the bound, which knows of no head. In a drawn job on
#: 12 devices, three of them slow, each of 1.3, 1.5 and both led to the plan of a search of 15 times as many
#: combinations.
HEADS_AHEAD = (1.15, 1.5)

#: What a group is charged in the rankings, in micro-batches, besides what filling costs.
PRICES = (1.0, 2.0)

#: The most pipelines by counts that are looked at: of a combination where one addition ends the partition, of a
#: step and of its steady state, and where not; of one of many combinations.
WIDEST, WIDEST_STEADY, WIDEST_TABLE, NARROW = 1_500, 3_000, 800, 150


#: Stands for the groups of a node that has none: it adds nothing.
NOTHING = (GroupType(cost=GroupCost(block=math.inf, embed=0.0, head=0.0), shares=(1,), memory=(0,)),)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolGroup:
    """A group of a pool: of which of its nodes (kind, how manieth), and the classes of its members."""

    kind: int
    node: int
    type: GroupType
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A pipeline of a pool: its groups, its lines, and the order of groups of each line."""

    groups: tuple[PoolGroup, ...]
    line: Line
    orders: tuple[tuple[int, ...], ...]

    def order(self, micro_batches: int) -> tuple[int, ...]:
        """Indices of groups from the first stage to the last, of the line that is best then."""
        return self.orders[int(self.line.each(micro_batches).argmin())]


class NodePool:
    """Nodes (of each kind so many, with their candidate divisions) that form `pipelines` pipelines. `time`
    is the T / L at which combinations are first ranked. `thorough`: what layers are whole and memory holds is
    weighed from the start, and every order of stages looked at. `alone`: its pipelines take the whole batch."""

    def __init__(
        self,
        nodes: Sequence[tuple[NodeKind, Sequence[Division], int]],
        pipelines: int,
        columns: Columns,
        time: float,
        *,
        thorough: bool = False,
        alone: bool = False,
    ) -> None:
        self.nodes = tuple(entry for entry in nodes if entry[2])
        self.pipelines, self.columns, self.rules, self.alone = pipelines, columns, columns.rules, alone
        self.evaluated = 0
        #: Whether every order of stages is looked at, and combinations in which memory asks for that.
        self.every_order = self.thorough = thorough
        self.binding: set[int] = set()
        #: Pipelines by counts that are looked at, and combinations that have more.
        self._fill = columns.rules.timing.fill
        widest = WIDEST if self._fill else WIDEST_STEADY
        self.widest = self.most_shapes = widest if pipelines <= 2 else WIDEST_TABLE
        self.merged: set[int] = set()
        #: Micro-batches that each combination did when last asked.
        self.taken: dict[int, int] = {}
        self._divisions = [
            (index, division) for index, (_, listed, _) in enumerate(self.nodes) for division in listed
        ]
        borders = accumulate((len(listed) for _, listed, _ in self.nodes), initial=0)
        self._of_kind = [range(a, b) for a, b in pairwise(borders)]
        self._columns_of: dict[int, tuple[tuple[int, int], ...]] = {}
        self._inverse = np.array(
            [1 / kind.block for _, division in self._divisions for kind in division.types or NOTHING]
        )
        sizes = [max(1, len(division.types)) for _, division in self._divisions]
        self._starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self._known: tuple[float, Floats] = (math.nan, np.zeros(0))
        self._known_whole: tuple[float, Floats] = (math.nan, np.zeros(0))
        self._whole = self._pieces()
        self._uses: list[DivisionUses] = []
        self._frontier: DivisionUses | None = ()
        self._more = self._combinations(time)
        self._shapes: dict[int, _Combination] = {}

    # Combinations.

    def _gains(self, time: float) -> Floats:
        """Micro-batches that each division adds at most."""
        if self._known[0] != time:
            each = np.maximum(self._inverse * time - self._fill, 0)
            self._known = (time, np.add.reduceat(each, self._starts))
        return self._known[1]

    def _pieces(self) -> tuple[IntegerLayerBound, Floats, Ints, Ints]:
        """What the bound for whole layers reads: distinct groups' costs, what memory holds of them at most, and
        which of them the divisions have."""
        place: dict[tuple[float, int], int] = {}
        flat = []
        for _, division in self._divisions:
            for kind in division.types or NOTHING:
                room = self.rules.layers
                if self.thorough and division.types:
                    column = self.columns.columns[self.columns.of(kind)]
                    room = max(*column.most, *column.most_first)
                flat.append(place.setdefault((kind.block, room), len(place)))
        costs, rooms = (np.array(values) for values in zip(*place, strict=True))
        few = self.alone and self.pipelines <= 2
        whole = IntegerLayerBound(
            layers=self.rules.layers,
            fastest=float(costs.min()) if self._fill and np.isfinite(costs).all() else 0.0,
            most=self.rules.most if few else self.rules.each,
            pipelines=self.pipelines if few else 0,
        )
        return whole, costs, rooms.astype(np.int64), np.array(flat, dtype=np.int64)

    def _whole_gains(self, limit: float) -> Floats:
        """Micro-batches that each division adds at most, layers being whole (`IntegerLayerBound.adds`)."""
        if self._known_whole[0] != limit:
            whole, costs, rooms, flat = self._whole
            each = whole.adds(costs, rooms, limit)
            self._known_whole = (limit, np.add.reduceat(each[flat], self._starts, axis=0))
        return self._known_whole[1]

    def _combinations(self, time: float) -> Iterator[DivisionUses]:
        """(division, how many nodes use it) of each combination; those of equal groups once. Ranked by the
        bound, and in turn by a bound that charges more for each group: memory makes deep pipelines dearer
        than the bound knows."""
        seen: set[tuple[tuple[int, int], ...]] = set()
        prices = list(dict.fromkeys((float(self._fill), *PRICES)))
        if self.thorough and self.rules.deep:
            prices.append(self._price(time))
        rankings = [self._ranked(self._priced(time, price)) for price in prices]
        most = LISTED
        if self.thorough:
            gains = self._whole_gains(time * self.rules.layers * AHEAD)
            rankings.append(self._ranked(gains.max(axis=1)))
            rankings += [self._ranked(gains) for gains in self._with_heads(time)]
            most = LISTED_ALL
        else:
            rankings += [self._ranked(self._layered(time * ahead)) for ahead in AHEADS]
        left = list(enumerate(rankings))
        for _ in range(2 * most):
            for which, ranking in tuple(left):
                row = next(ranking, None)
                if which == 0:
                    self._frontier = row  # the bound's own ranking: what it has not named is worse
                if row is None:
                    left.remove((which, ranking))
                    continue
                key = tuple(sorted(self._counts(row).items()))
                if key and key not in seen:  # without a key every device is idle
                    seen.add(key)
                    yield row
            if len(seen) >= most or not left:
                return

    def _priced(self, time: float, price: float) -> Floats:
        """What each division adds if a group is charged so many micro-batches."""
        return np.asarray(np.add.reduceat(self._inverse * time - price, self._starts), dtype=np.float64)

    def _with_heads(self, time: float) -> Iterator[Floats]:
        """Micro-batches that each division adds if the last stages are on the nodes of one kind, for each kind.
        A head takes its group as long as so many layers of every micro-batch."""
        layers = [
            min(kind.cost.head / kind.block for kind in division.types or NOTHING)
            for _, division in self._divisions
        ]
        lost = np.array(layers) * self.rules.most / self.rules.layers
        if not lost.any():
            return
        for ahead in HEADS_AHEAD:
            added = self._priced(time * ahead, self._fill)
            for own in self._of_kind:
                gains = added.copy()
                gains[own.start : own.stop] -= lost[own.start : own.stop]
                yield gains

    def _layered(self, time: float) -> Floats:
        """The whole layers that each division holds, if pipelines are alike and take `time` x L: each group in
        the middle of one, charged for the way through it."""
        rules, inverse = self.rules, self._inverse
        depth = self._groups(np.add.reduceat(np.maximum(inverse * time - 1, 0.0), self._starts))
        turns = max(1, rules.most + self._fill * (depth - self.pipelines))
        cap = time * rules.layers * self.pipelines / turns
        price = self._fill * rules.layers * self.pipelines / turns
        layers = np.minimum(np.floor(cap * inverse * (1 + EQUAL)), self._middle)
        return np.asarray(np.add.reduceat(np.maximum(layers - price, 0.0), self._starts), dtype=np.float64)

    @cached_property
    def _middle(self) -> Ints:
        """The most layers that each group holds in the middle of a pipeline."""
        known: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        found = []
        for _, division in self._divisions:
            for kind in division.types or NOTHING:
                key = (kind.shares, kind.memory)
                if key not in known:
                    known[key] = kind.most_layers(self.columns.cost, self.rules.layers, MIDDLE, first=False)
                found.append(known[key])
        return np.array(found, dtype=np.int64)

    def _price(self, time: float) -> float:
        """The largest charge at which the best combination has more groups than there are micro-batches, of
        which each stage asks for one; 0 where it never has."""
        low, high = 0.0, float(self._inverse.max(initial=0.0)) * time
        for _ in range(16):
            middle = (low + high) / 2
            few = self._groups(self._priced(time, middle)) <= self.rules.most
            low, high = (low, middle) if few else (middle, high)
        return low

    def _groups(self, gains: Floats) -> int:
        """How many groups there are in the divisions that add the most."""
        best = [own[int(gains[own.start : own.stop].argmax())] for own in self._of_kind]
        counts = (count for _, _, count in self.nodes)
        return sum(n * len(self._divisions[at][1].types) for n, at in zip(counts, best, strict=True))

    def _ranked(self, gains: Floats) -> Iterator[DivisionUses]:
        counts = (count for _, _, count in self.nodes)
        options = [choices(own, count, gains) for own, count in zip(self._of_kind, counts, strict=True)]
        for chosen in products(options):
            yield tuple(use for entry in chosen for use in entry)

    def exhausted(self, limit: float, need: int) -> bool:
        """Whether no combination that is still to come can do `need` micro-batches within `limit`. The ranking
        is that of another time, close to it: one micro-batch is allowed for that."""
        return self._frontier is None or self._reach_ranked(self._frontier, limit) + 1 < need

    def listed(self, index: int) -> bool:
        """Whether there is a combination of that number; they are made as they are asked for."""
        while len(self._uses) <= index:
            row = next(self._more, None)
            if row is None:
                return False
            self._uses.append(row)
        return True

    def _counts(self, row: DivisionUses) -> dict[int, int]:
        """Groups by column."""
        counts: dict[int, int] = {}
        for index, many in row:
            if index not in self._columns_of:
                found: dict[int, int] = {}
                for kind in self._divisions[index][1].types:
                    column = self.columns.of(kind)
                    found[column] = found.get(column, 0) + 1
                self._columns_of[index] = tuple(found.items())
            for column, count in self._columns_of[index]:
                counts[column] = counts.get(column, 0) + count * many
        return counts

    # What they do.

    def _reach(self, row: DivisionUses, limit: float) -> int:
        """The most micro-batches that the bounds allow a combination."""
        divisions, counts = zip(*row, strict=True)
        whole = float((np.array(counts) @ self._whole_gains(limit)[list(divisions)]).max())
        return min(self._reach_ranked(row, limit), math.floor(whole * (1 + EQUAL)))

    def _reach_ranked(self, row: DivisionUses, limit: float) -> int:
        """The same by the bound that ranks combinations."""
        gains = self._gains(limit / self.rules.layers)
        total = sum(float(gains[index]) * count for index, count in row)
        return math.floor((total + self._fill * self.pipelines) * (1 + EQUAL))

    def most(self, limit: float, budget: int) -> tuple[int, int]:
        """The most micro-batches within `limit`, and the combination that does them (-1: none). `budget`: new
        combinations looked at, at most."""
        self.listed(POOLED - 1)
        reach = [self._reach(row, limit) for row in self._uses[:POOLED]]
        best, which = -1, -1
        for index in sorted(range(len(reach)), key=lambda i: (-reach[i], i)):
            if reach[index] <= best:
                break
            if index not in self._shapes:
                if budget <= 0:
                    continue
                budget -= 1
                self.evaluated += 1
            done = self._combination(index).partition(limit).most(self.pipelines)
            if done > best:
                best, which = done, index
        return best, which

    def lowest(self, index: int, low: float, high: float, need: int) -> float:
        """The least time between `low` and `high` in which the bound lets a combination do `need`, about."""
        row = self._uses[index]
        for _ in range(10):
            middle = (low + high) / 2
            low, high = (low, middle) if self._reach(row, middle) >= need else (middle, high)
        return low

    def able(self, index: int, limit: float, need: int) -> bool:
        """Whether a combination does `need` micro-batches within `limit`."""
        if self._reach(self._uses[index], limit) < need:
            return False
        if index not in self._shapes:
            self.evaluated += 1
        self.taken[index] = self._combination(index).partition(limit).most(self.pipelines)
        return self.taken[index] >= need

    def forget(self, index: int) -> None:
        """Frees what a combination holds."""
        self._shapes.pop(index, None)

    def chains(self, limit: float, which: int) -> list[Chain]:
        """The pipelines of a combination that do the most within `limit`."""
        combination = self._combination(which)
        parts = combination.partition(limit).split(self.pipelines)
        instances = self._instances(which, combination)
        made = []
        for counts in parts:
            places = [index for index, count in enumerate(counts) for _ in range(count)]
            groups = tuple(instances[index].pop(0) for index in places)
            caps, sums, orders = combination.lines(counts)
            of_line = []
            for order in orders:
                free = {index: [i for i, place in enumerate(places) if place == index] for index in set(places)}
                of_line.append(tuple(free[index].pop(0) for index in order))
            line = Line(caps=caps, sums=sums, least=len(groups) if self.rules.deep else 1)
            made.append(Chain(groups=groups, line=line, orders=tuple(of_line)))
        return made

    def _combination(self, index: int) -> _Combination:
        if index not in self._shapes:
            counts = self._counts(self._uses[index])
            orders = self.pipelines if self.every_order else None
            self._shapes[index] = _Combination(counts, self.columns, self.widest, orders, self.pipelines)
            if size(list(counts.values())) > self.widest:
                self.merged.add(index)
            if self._shapes[index].shapes.binding:
                self.binding.add(index)
        return self._shapes[index]

    def _instances(self, which: int, combination: _Combination) -> list[list[PoolGroup]]:
        """The groups of a combination by its columns."""
        found: list[list[PoolGroup]] = [[] for _ in combination.of]
        place = {column: index for index, merged in enumerate(combination.of) for column in merged}
        used = [0] * len(self.nodes)
        for division_index, count in self._uses[which]:
            kind, division = self._divisions[division_index]
            for _ in range(count):
                for group_type, members in zip(division.types, division.members, strict=True):
                    group = PoolGroup(kind=kind, node=used[kind], type=group_type, members=members)
                    found[place[self.columns.of(group_type)]].append(group)
                used[kind] += 1
        return found


class _Combination:
    """All pipelines of a combination. Where there are too many, columns of nearly equal cost are merged, at
    the cost of the worse one (a real plan is never worse than that)."""

    def __init__(
        self, counts: dict[int, int], columns: Columns, widest: int, orders: int | None, pipelines: int
    ) -> None:
        listed: list[tuple[tuple[int, ...], Column, int]] = [
            ((index,), columns.columns[index], count) for index, count in counts.items()
        ]
        listed.sort(key=lambda entry: (entry[1].block, entry[0]))
        while size([count for _, _, count in listed]) > widest and len(listed) > 1:
            at = min(
                range(len(listed) - 1),
                key=lambda i: (
                    (listed[i + 1][1].block / listed[i][1].block) ** min(listed[i][2], listed[i + 1][2])
                ),
            )
            (a, left, m), (b, right, n) = listed[at], listed[at + 1]
            listed[at : at + 2] = [((*a, *b), _worse(left, right), m + n)]
        self.of = tuple(of for of, _, _ in listed)
        self.shapes = candidates(
            tuple(c for _, c, _ in listed), tuple(n for _, _, n in listed), columns.rules, orders, pipelines - 1
        )
        self._last: tuple[float, Partition] | None = None

    def partition(self, limit: float) -> Partition:
        if self._last is None or self._last[0] != limit:
            self._last = (limit, Partition(self.shapes.micro_batches(limit)))
        return self._last[1]

    def lines(self, counts: Counts) -> tuple[Floats, Floats, list[tuple[int, ...]]]:
        place = int(np.ravel_multi_index(counts, self.shapes.dims))
        row = int(np.searchsorted(self.shapes.rows, place))
        caps, sums = self.shapes.caps[row], self.shapes.sums[row]
        known = np.flatnonzero(np.isfinite(caps))
        return caps[known], sums[known], [self.shapes.order(row, int(line)) for line in known]


def _worse(a: Column, b: Column) -> Column:
    return Column(
        block=max(a.block, b.block),
        embed=max(a.embed, b.embed),
        head=max(a.head, b.head),
        most=tuple(map(min, a.most, b.most)),
        most_first=tuple(map(min, a.most_first, b.most_first)),
        width=min(a.width, b.width),
    )
