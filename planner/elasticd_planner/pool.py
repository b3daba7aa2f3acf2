"""A pool: some nodes that form a number of pipelines among themselves, and the most that they do in a time.

A combination is a division for each node; they are tried best first by the bound of `bound`, which is a sum
over groups, until it says that none that is left can do more. Of a combination all pipelines and their best
partition are found at once (`shapes`, `partition`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from elasticd_planner.assign import EQUAL, Floats
from elasticd_planner.cost import CostModel, GroupCost
from elasticd_planner.division import Division, GroupType, NodeKind
from elasticd_planner.partition import Counts, Partition
from elasticd_planner.shapes import Column, Rules, Shapes, size

#: Combinations listed of a pool that is alone, and of one among others.
LISTED, POOLED = 400, 80

#: What a group is charged in the rankings, in micro-batches, by whether the objective is the steady figure.
PRICES = {False: (1.0, 2.0), True: (0.0, 1.0, 2.0)}

#: Divisions that nodes of one kind mix, two at a time.
MIXED = 10

#: The most pipelines by counts that are looked at: where one addition ends the partition, and where not.
WIDEST, WIDEST_TABLE = 1_500, 1_500


#: Divisions and how many nodes use each.
Option = tuple[tuple[int, int], ...]

#: Stands for the groups of a node that has none: it adds nothing.
NOTHING = (GroupType(cost=GroupCost(block=math.inf, embed=0.0, head=0.0), shares=(1,), memory=(0,)),)


class Columns:
    """Group types as columns of the arrays; types that cost and hold the same are one."""

    def __init__(self, cost: CostModel, rules: Rules, deepest: int) -> None:
        self.cost, self.rules = cost, rules
        self.deepest = max(1, min(deepest, rules.layers))
        self.columns: list[Column] = []
        self._of: dict[GroupType, int] = {}
        self._ids: dict[Column, int] = {}

    def of(self, kind: GroupType) -> int:
        if kind not in self._of:
            column = self._made(kind)
            if column not in self._ids:
                self._ids[column] = len(self.columns)
                self.columns.append(column)
            self._of[kind] = self._ids[column]
        return self._of[kind]

    def _made(self, kind: GroupType) -> Column:
        limits = {}
        for first in (False, True):
            limits[first] = tuple(
                most_layers(
                    self.cost, kind, self.rules.layers, first=first, last=behind == 0, in_flight=behind + 1
                )
                for behind in range(self.deepest)
            )
        return Column(
            block=kind.cost.block,
            embed=kind.cost.embed,
            head=kind.cost.head,
            most=limits[False],
            most_first=limits[True],
        )


def most_layers(
    cost: CostModel, kind: GroupType, layers: int, *, first: bool, last: bool, in_flight: int
) -> int:
    """The most layers that fit into the memory of every member (need is linear in the layers)."""
    most = layers
    seen = set()
    for position, (share, memory) in enumerate(zip(kind.shares, kind.memory, strict=True)):
        if (share, memory) in seen:
            continue
        seen.add((share, memory))
        none, one = (
            cost.memory(n, kind.shares, position, first=first, last=last, in_flight=in_flight) for n in (0, 1)
        )
        if none > memory:
            return 0
        if one > none:
            most = min(most, math.floor((memory - none) / (one - none) * (1 + EQUAL)))
    return most


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A group of a pool: of which of its nodes (kind, how manieth), and the classes of its members."""

    kind: int
    node: int
    type: GroupType
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A pipeline of a pool: its groups in canonical order, and its lines (o, S)."""

    groups: tuple[Group, ...]
    caps: Floats
    sums: Floats


class Pool:
    """Nodes (of each kind so many, with their candidate divisions) that form `pipelines` pipelines. `time`
    is the T / L at which combinations are first ranked."""

    def __init__(
        self,
        nodes: Sequence[tuple[NodeKind, Sequence[Division], int]],
        pipelines: int,
        columns: Columns,
        time: float,
    ) -> None:
        self.nodes = tuple(entry for entry in nodes if entry[2])
        self.pipelines, self.columns, self.rules = pipelines, columns, columns.rules
        self.evaluated = 0
        self._divisions = [
            (index, division) for index, (_, listed, _) in enumerate(self.nodes) for division in listed
        ]
        self._columns_of: dict[int, tuple[tuple[int, int], ...]] = {}
        self._inverse = np.array(
            [1 / kind.block for _, division in self._divisions for kind in division.types or NOTHING]
        )
        sizes = [max(1, len(division.types)) for _, division in self._divisions]
        self._starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self._known: tuple[float, Floats] = (math.nan, np.zeros(0))
        self._uses: list[Option] = []
        self._frontier: Option | None = ()
        self._more = self._combinations(time)
        self._shapes: dict[int, _Combination] = {}

    # Combinations.

    def _gains(self, time: float) -> Floats:
        """Micro-batches that each division adds at most."""
        if self._known[0] != time:
            less = 0.0 if self.rules.steady else 1.0
            each = np.maximum(self._inverse * time - less, 0)
            self._known = (time, np.add.reduceat(each, self._starts))
        return self._known[1]

    def _combinations(self, time: float) -> Iterator[Option]:
        """(division, how many nodes use it) of each combination; those of equal groups once. Ranked by the
        bound, and in turn by a bound that charges more for each group: memory makes deep pipelines dearer
        than the bound knows."""
        seen: set[tuple[tuple[int, int], ...]] = set()
        rankings = [self._ranked(time, price) for price in PRICES[self.rules.steady]]
        for _ in range(2 * LISTED):
            for which, ranking in enumerate(rankings):
                row = next(ranking, None)
                if which == 0:
                    self._frontier = row  # the bound's own ranking: what it has not named is worse
                if row is None:
                    continue
                key = tuple(sorted(self._counts(row).items()))
                if key and key not in seen:  # without a key every device is idle
                    seen.add(key)
                    yield row
            if len(seen) >= LISTED:
                return

    def _ranked(self, time: float, price: float) -> Iterator[Option]:
        gains = np.add.reduceat(self._inverse * time - price, self._starts)
        start = 0
        options = []
        for _, listed, count in self.nodes:
            options.append(_options(range(start, start + len(listed)), count, gains))
            start += len(listed)
        for chosen in _products(options):
            yield tuple(use for entry in chosen for use in entry)

    def exhausted(self, limit: float, need: int) -> bool:
        """Whether no combination that is still to come can do `need` micro-batches within `limit`. The ranking
        is that of another time, close to it: one micro-batch is allowed for that."""
        return self._frontier is None or self._reach(self._frontier, limit) + 1 < need

    def listed(self, index: int) -> bool:
        """Whether there is a combination of that number; they are made as they are asked for."""
        while len(self._uses) <= index:
            row = next(self._more, None)
            if row is None:
                return False
            self._uses.append(row)
        return True

    def _counts(self, row: Option) -> dict[int, int]:
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

    def _reach(self, row: Option, limit: float) -> int:
        """The most micro-batches that the bound allows a combination."""
        gains = self._gains(limit / self.rules.layers)
        total = sum(float(gains[index]) * count for index, count in row)
        return math.floor((total if self.rules.steady else total + self.pipelines) * (1 + EQUAL))

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
        return self._combination(index).partition(limit).most(self.pipelines) >= need

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
            groups = tuple(instances[index].pop(0) for index, count in enumerate(counts) for _ in range(count))
            caps, sums = combination.lines(counts)
            made.append(Chain(groups=groups, caps=caps, sums=sums))
        return made

    def _combination(self, index: int) -> _Combination:
        if index not in self._shapes:
            counts = self._counts(self._uses[index])
            widest = WIDEST if self.pipelines <= 2 else WIDEST_TABLE
            self._shapes[index] = _Combination(counts, self.columns, widest)
        return self._shapes[index]

    def _instances(self, which: int, combination: _Combination) -> list[list[Group]]:
        """The groups of a combination by its columns."""
        found: list[list[Group]] = [[] for _ in combination.of]
        place = {column: index for index, merged in enumerate(combination.of) for column in merged}
        used = [0] * len(self.nodes)
        for division_index, count in self._uses[which]:
            kind, division = self._divisions[division_index]
            for _ in range(count):
                for group_type, members in zip(division.types, division.members, strict=True):
                    group = Group(kind=kind, node=used[kind], type=group_type, members=members)
                    found[place[self.columns.of(group_type)]].append(group)
                used[kind] += 1
        return found


class _Combination:
    """All pipelines of a combination. Where there are too many, columns of nearly equal cost are merged, at
    the cost of the worse one (a real plan is never worse than that)."""

    def __init__(self, counts: dict[int, int], columns: Columns, widest: int) -> None:
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
        self.shapes = Shapes([c for _, c, _ in listed], [n for _, _, n in listed], columns.rules)
        self._last: tuple[float, Partition] | None = None

    def partition(self, limit: float) -> Partition:
        if self._last is None or self._last[0] != limit:
            self._last = (limit, Partition(self.shapes.micro_batches(limit)))
        return self._last[1]

    def lines(self, counts: Counts) -> tuple[Floats, Floats]:
        place = int(np.ravel_multi_index(counts, self.shapes.dims))
        row = int(np.searchsorted(self.shapes.rows, place))
        caps, sums = self.shapes.caps[row], self.shapes.sums[row]
        known = np.isfinite(caps)
        return caps[known], sums[known]


def _worse(a: Column, b: Column) -> Column:
    return Column(
        block=max(a.block, b.block),
        embed=max(a.embed, b.embed),
        head=max(a.head, b.head),
        most=tuple(map(min, a.most, b.most)),
        most_first=tuple(map(min, a.most_first, b.most_first)),
    )


def _options(divisions: range, count: int, gains: Floats) -> list[tuple[float, Option]]:
    """How `count` nodes of a kind may be divided: all alike, or in two ways; (gain, choice), best first."""
    best = sorted(divisions, key=lambda i: (-gains[i], i))
    made: list[tuple[float, Option]] = [(float(gains[i]) * count, ((i, count),)) for i in best]
    if count > 1:
        for a, i in enumerate(best[:MIXED]):
            for j in best[a + 1 : MIXED]:
                for some in range(1, count):
                    gain = float(gains[i]) * (count - some) + float(gains[j]) * some
                    made.append((gain, ((i, count - some), (j, some))))
    return sorted(made, key=lambda entry: (-entry[0], entry[1]))


def _products(options: Sequence[list[tuple[float, Option]]]) -> Iterator[list[Option]]:
    """One option of each list, in descending order of the sum of their gains."""
    if not all(options):
        return
    start = (0,) * len(options)
    heap = [(-sum(listed[0][0] for listed in options), start)]
    seen = {start}
    while heap:
        gain, where = heapq.heappop(heap)
        yield [listed[i][1] for listed, i in zip(options, where, strict=True)]
        for axis, listed in enumerate(options):
            following = where[axis] + 1
            if following < len(listed):
                after = (*where[:axis], following, *where[axis + 1 :])
                if after not in seen:
                    seen.add(after)
                    heapq.heappush(heap, (gain + listed[where[axis]][0] - listed[following][0], after))
