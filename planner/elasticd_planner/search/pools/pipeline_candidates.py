"""Pipeline candidates: all pipelines that a set of TP groups can form, as arrays over counts of equal groups.

A pipeline is a vector v of counts by type of group, its stages in a canonical order of types or two. For a cap
o on a stage's seconds every stage may have floor((o - fixed) / block) layers, or what its memory at that
position allows; the layers go to the cheapest stages first. So each pipeline has a few lines (o, S): it takes m
micro-batches in (m - 1) o + S. The caps tried are those at which some stage gains a layer, just above the
real-valued optimum, and coarser ones far above it.

Where memory binds, the order of the stages matters, and `Ordering` looks at every order at once. Stages are
placed from the last to the first: with room r_j(p) for a stage of type j with p stages behind it (the lesser of
what the cap allows and what memory holds there),

    g[v] = max over types j of g[v - e_j] + r_j(|v| - 1)

so no order is left out. Of equal orders the one with the slower groups first is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from elasticd_planner.grouping.group_types import NEVER, Column, Rules
from elasticd_planner.numeric import EQUAL, Floats, Ints

#: Caps tried: so many values of each type from the real-valued optimum on, the nearest of all of them, and
#: multiples of that optimum.
VALUES, NEAREST = 3, 18
MULTIPLES = (1.08, 1.2, 1.35, 1.6, 2.0, 2.6, 3.5, 5.0)

#: Of other orders of stages than the canonical ones, caps up to so many times the least cap of those count.
NEAR = 1.1

#: Lines kept of a pipeline.
LINES = 12

#: Of `Ordering`: the most caps, and their range as factors of the cap that pipelines of equal pace would have.
MOST_CAPS, LEAST, LARGEST = 72, 0.6, 2.2

#: The columns of a pipeline's stages, from the first to the last.
Order = tuple[int, ...]

Small = npt.NDArray[np.int32]
Which = npt.NDArray[np.int8]


def orders(columns: Sequence[Column]) -> list[Order]:
    """Orders of stages, by column: those with the most memory for their load come first, or those that are
    slowest. Which is better where memory binds depends on how floors fall; both have slow groups first."""
    middle = [column.most[min(2, len(column.most) - 1)] for column in columns]
    indices = range(len(columns))
    by_load = sorted(indices, key=lambda i: (-columns[i].block * middle[i], -columns[i].block, i))
    by_block = sorted(indices, key=lambda i: (-columns[i].block, i))
    return [tuple(by_load)] if by_load == by_block else [tuple(by_load), tuple(by_block)]


class PipelineCandidates:
    """The lines of every pipeline of at most `counts` groups of each column. `pipelines`: where memory binds,
    every order of stages is looked at, under the caps that so many pipelines may come to (None: canonical
    orders alone). `listed`: of these pipelines alone, [column, pipeline]. `others`: so many pipelines must find
    memory in the groups that one leaves."""

    def __init__(
        self,
        columns: Sequence[Column],
        counts: Sequence[int],
        rules: Rules,
        pipelines: int | None = None,
        listed: Ints | None = None,
        others: int = 0,
    ) -> None:
        self.orders = orders(columns)
        self.columns, self.counts, self.rules = tuple(columns), tuple(counts), rules
        self.dims = tuple(count + 1 for count in counts)
        grid = np.indices(self.dims).reshape(len(self.dims), -1) if listed is None else listed
        self.grid: Ints = grid.astype(np.int64)
        self.depth: Ints = self.grid.sum(axis=0)
        self.binding = False
        devices = np.array([column.width for column in columns]) @ self.grid
        allowed = (self.depth >= 1) & (self.depth <= rules.layers) & (devices >= rules.fewest)
        room = np.array([max(*column.most, *column.most_first) for column in columns])
        held = room @ self.grid
        allowed &= held >= rules.layers
        if others:
            allowed &= room @ np.array(counts) - held >= others * rules.layers
        self.rows = np.flatnonzero(allowed)
        lines = [self._lines(self.orders[0])]
        self._ordering: Ordering | None = None
        if self.binding:
            lines += [self._lines(order) for order in self.orders[1:]]
            if pipelines is not None:
                least = np.min([caps.min(axis=1) for caps, _ in lines], axis=0)
                lines.append(self._ordered(pipelines, least))
        self._starts = np.cumsum([0, *(caps.shape[1] for caps, _ in lines)])
        caps = np.concatenate([caps for caps, _ in lines], axis=1)
        sums = np.concatenate([sums for _, sums in lines], axis=1)
        self.caps, self.sums, self.tried = _useful(caps, sums, LINES if rules.timing.fill else 1)

    def _ordered(self, pipelines: int, known: Floats) -> tuple[Floats, Floats]:
        """(o, S) with stages in the orders in which memory holds the most, under caps that are
        not far above the least `known` of each pipeline."""
        caps = caps_of(self.columns, self.counts, self.rules, pipelines)
        self._ordering = Ordering(self.columns, self.counts, self.rules, caps)
        holds = self._ordering.total[self.rows] >= self.rules.layers
        rows, which = np.nonzero(holds & (caps < known[:, None] * NEAR))
        sums = np.full(holds.shape, np.inf)
        sums[rows, which] = self._ordering.sums(self.rows[rows], which)
        caps = np.where(np.isfinite(sums), caps, np.inf)
        return caps, self.rules.timing.first(caps, sums)

    def order(self, row: int, line: int) -> Order:
        """The columns of the stages of one line, from the first to the last."""
        tried = int(self.tried[row, line])
        which = int(np.searchsorted(self._starts, tried, side="right")) - 1
        if which < len(self.orders):
            have = self.grid[:, self.rows[row]]
            return tuple(index for index in self.orders[which] for _ in range(have[index]))
        assert self._ordering is not None
        return self._ordering.order(int(self.rows[row]), tried - int(self._starts[which]))

    def _lines(self, order: Order) -> tuple[Floats, Floats]:
        """(o, S) by pipeline (row) and cap tried, stages in this order; inf where impossible."""
        have = self.grid[:, self.rows]
        tried = self._candidates(have, order)
        caps, sums = self._under(have, order, tried)
        if not self.binding:
            return caps, sums
        # Memory asks for larger caps of some than they would have: those next to the largest that is too small.
        first = caps.min(axis=1, initial=np.inf)
        below = np.where(np.isinf(caps) & (tried < first[:, None]), tried, 0.0).max(axis=1, initial=0.0)
        rows = np.flatnonzero(np.isfinite(first) & (below > 0))
        if not len(rows):
            return caps, sums
        more = self._candidates(have[:, rows], order, below[rows])
        near = np.full((2, len(have[0]), more.shape[1]), np.inf)
        near[:, rows] = self._under(have[:, rows], order, more)
        return np.concatenate([caps, near[0]], axis=1), np.concatenate([sums, near[1]], axis=1)

    def _under(self, have: Ints, order: Order, caps: Floats) -> tuple[Floats, Floats]:
        """(o, S) of pipelines of so many groups by column under these caps; inf where impossible."""
        rules, depth = self.rules, have.sum(axis=0)
        finite = np.where(np.isfinite(caps), caps, 0.0)
        limits = [self._room(have, order, index, finite) for index in range(len(self.columns))]
        total = np.zeros_like(caps)
        possible = np.isfinite(caps)
        for index, room in enumerate(limits):
            total += room
            possible &= room >= have[index][:, None]
        possible &= total >= rules.layers
        caps = np.where(possible, caps, np.inf)
        if not rules.timing.fill:  # how the layers are filled does not matter
            return caps, caps
        left = np.broadcast_to((rules.layers - depth)[:, None], caps.shape).astype(np.float64)
        sums = self._fixed(have, order)[:, None] + np.zeros_like(caps)
        for index in sorted(range(len(self.columns)), key=lambda i: self.columns[i].block):
            base = have[index][:, None]
            more = np.minimum(np.maximum(limits[index] - base, 0), left)
            left = left - more
            sums += (more + base) * self.columns[index].block
        return caps, np.where(possible, sums, np.inf)

    def _candidates(self, have: Ints, order: Order, above: Floats | None = None) -> Floats:
        """Caps to try: stages gain a layer there; coarser ones far above, where memory binds. None is below the
        seconds of a first and a last stage with one layer. above: those next to these alone."""
        rules, (first, last) = self.rules, self._ends(have, order)
        block, embed, head = (
            np.array([getattr(column, name) for column in self.columns]) for name in ("block", "embed", "head")
        )
        alone = have.sum(axis=0) == 1
        edges = embed[first] / block[first] + head[last] / block[last]
        least = (rules.layers + edges) / ((1 / block) @ have) if above is None else above
        ends = np.maximum(embed[first] + block[first] + np.where(alone, head[first], rules.hop), 0.0)
        ends = np.maximum(ends, head[last] + block[last] + np.where(alone, embed[last], 0.0))
        parts = []
        for index, column in enumerate(self.columns):
            away = np.where(have[index] > 0, 0.0, np.inf)[:, None]

            def gaining(fixed: float, count: int, block: float = column.block) -> Floats:
                low = np.maximum(least, ends - fixed) if fixed == rules.hop else np.maximum(least, ends) - fixed
                layers = np.maximum(1, np.ceil(low / block * (1 - EQUAL)))
                return np.asarray((layers[:, None] + np.arange(count)) * block + fixed)

            parts.append(gaining(rules.hop, VALUES) + away)
            parts += [gaining(fixed, 2) + away for fixed in column.ends(rules.hop) - {rules.hop}]
        near = np.concatenate(parts, axis=1)
        if near.shape[1] > NEAREST:
            near = np.partition(near, NEAREST - 1, axis=1)[:, :NEAREST]
        if above is not None:
            return near
        coarse = np.maximum(least, ends)[:, None] * np.array(MULTIPLES) + rules.hop
        return np.concatenate([near, coarse], axis=1)

    def _ends(self, have: Ints, order: Order) -> tuple[Ints, Ints]:
        """The columns of the first and of the last stage of each pipeline with stages in this order."""
        ordered = np.array(order)
        used = have[ordered] > 0
        return ordered[used.argmax(axis=0)], ordered[len(ordered) - 1 - used[::-1].argmax(axis=0)]

    def _room(self, have: Ints, order: Order, index: int, caps: Floats) -> Floats:
        """Layers that the stages of one column may have in all under each cap; all caps are finite."""
        column, layers = self.columns[index], self.rules.layers
        count = have[index]
        at = order.index(index)
        behind = have[list(order[at + 1 :])].sum(axis=0)  # their positions from the end start here
        before = have[list(order[:at])].sum(axis=0)

        def gained(caps: Floats, fixed: float | Floats) -> Floats:
            held = np.floor((caps - fixed) / column.block * (1 + EQUAL))
            return np.minimum(np.maximum(held, 0.0, out=held), layers, out=held)

        each = gained(caps, self.rules.hop)
        most = np.array(column.most)
        deepest = int((behind + count).max(initial=0))
        if int(each.max(initial=0)) <= int(most[: max(1, deepest)].min()):
            room: Floats = count[:, None] * each
        else:
            near = each[:, : -len(MULTIPLES)]
            self.binding |= bool((near > most[: max(1, deepest)].min()).any())
            table = _rooms(column.most, layers, _rounded(int(count.max(initial=0))), _rounded(deepest))
            room = table[each.astype(np.int64), np.minimum(behind, deepest)[:, None], count[:, None]].astype(
                np.float64
            )
        first = (count > 0) & (before == 0)
        last = (count > 0) & (behind == 0)
        top = np.maximum(behind + count - 1, 0)
        without = np.zeros(caps.shape, dtype=bool)  # a stage that holds no layer beside its embed or its head
        if len(rows := first.nonzero()[0]):
            place = top[rows]
            fixed = column.embed + np.where(place == 0, column.head, self.rules.hop)
            own = np.minimum(gained(caps[rows], fixed[:, None]), np.array(column.most_first)[place][:, None])
            room[rows] += own - np.minimum(each[rows], most[place][:, None])
            without[rows] = own < 1
        other = last & ~(first & (top == 0))
        if column.head != self.rules.hop and len(rows := other.nonzero()[0]):
            tail = np.minimum(gained(caps[rows], column.head), most[0])
            room[rows] += tail - np.minimum(each[rows], most[0])
            without[rows] |= tail < 1
        none = np.concatenate([[0], np.cumsum(most < 1)])
        if none[-1]:
            # Of a first stage the table for first stages counts, the others must each hold a layer.
            start, stop = behind, np.maximum(behind + count - first, behind)
            blocked = none[stop] > none[start]
            blocked |= first & (np.array(column.most_first)[top] < 1)
            without |= blocked[:, None]
        room[without] = -1.0
        room[count == 0] = 0.0
        return room

    def _fixed(self, have: Ints, order: Order) -> Floats:
        """Seconds besides blocks: embed of the first stage, head of the last, hops between."""
        first, last = self._ends(have, order)
        embed = np.array([column.embed for column in self.columns])
        head = np.array([column.head for column in self.columns])
        return np.asarray(embed[first] + head[last] + self.rules.hop * (have.sum(axis=0) - 1), dtype=np.float64)

    def micro_batches(self, limit: float) -> Ints:
        """By counts (one axis a column): how many micro-batches the pipeline does within `limit`; NEVER where
        it does not do the least that it must."""
        rules = self.rules
        with np.errstate(invalid="ignore"):
            done = np.floor((limit * (1 + EQUAL) - self.sums) / self.caps) + 1
        best = np.nan_to_num(done, nan=NEVER, neginf=NEVER).max(axis=1, initial=NEVER)
        least = self.depth[self.rows] if rules.deep else 1
        found = np.full(self.grid.shape[1], NEVER, dtype=np.int64)
        best = np.minimum(best, rules.each)
        found[self.rows] = np.where(best >= least, best, NEVER)
        return found.reshape(self.dims)


#: Candidates that are kept, and of how many pipelines at most: attempts with other pools and with equal shares
#: have many in common.
KEPT, KEPT_SIZE = 192, 2048


def candidates(
    columns: tuple[Column, ...], counts: tuple[int, ...], rules: Rules, pipelines: int | None, others: int
) -> PipelineCandidates:
    """The candidates of all pipelines of these groups, see `PipelineCandidates`; not made again where they are
    few."""
    make = _kept if size(counts) <= KEPT_SIZE else _kept.__wrapped__
    return make(columns, counts, rules, pipelines, others)


@lru_cache(maxsize=KEPT)
def _kept(
    columns: tuple[Column, ...], counts: tuple[int, ...], rules: Rules, pipelines: int | None, others: int
) -> PipelineCandidates:
    return PipelineCandidates(columns, counts, rules, pipelines, others=others)


def _rounded(count: int) -> int:
    """The next power of two: few tables serve all numbers."""
    return 1 << max(0, count - 1).bit_length()


@lru_cache(maxsize=128)
def _rooms(most: tuple[int, ...], layers: int, count: int, deepest: int) -> Small:
    """[layers under the cap, stages behind, how many] -> the sum of min(layers, memory by position).

    Args:
        most: layers that memory holds, by position from the end.
        layers: of the model.
        count: stages, at most.
        deepest: stages behind these, at most.
    """
    held, under = np.array(most), np.arange(layers + 1)
    positions = np.minimum(np.arange(deepest + 1)[:, None] + np.arange(count), len(held) - 1)
    each = np.minimum(under[:, None, None], held[positions][None])
    table = np.zeros((len(under), deepest + 1, count + 1), dtype=np.int32)
    np.cumsum(each, axis=2, out=table[:, :, 1:])
    table.setflags(write=False)
    return table


def _useful(caps: Floats, sums: Floats, most: int) -> tuple[Floats, Floats, Ints]:
    """Of each row the lines that are best for some number of micro-batches: a larger cap must pay by a
    smaller sum. At most `most`, those of the smallest caps; and which of those given they are."""
    order = np.argsort(caps, axis=1, kind="stable")
    caps, sums = np.take_along_axis(caps, order, axis=1), np.take_along_axis(sums, order, axis=1)
    before = np.minimum.accumulate(sums, axis=1)
    better = np.isfinite(caps)
    better[:, 1:] &= sums[:, 1:] < before[:, :-1] * (1 - EQUAL)
    rank = np.cumsum(better, axis=1) - 1
    kept_caps = np.full((len(caps), most), np.inf)
    kept_sums = np.full((len(caps), most), np.inf)
    rows, columns = np.nonzero(better & (rank < most))
    kept = np.zeros((len(caps), most), dtype=np.int64)
    kept_caps[rows, rank[rows, columns]] = caps[rows, columns]
    kept_sums[rows, rank[rows, columns]] = sums[rows, columns]
    kept[rows, rank[rows, columns]] = order[rows, columns]
    return kept_caps, kept_sums, kept


def size(counts: Sequence[int]) -> int:
    """How many pipelines, the empty one included, groups of so many of each type can form."""
    return math.prod(count + 1 for count in counts)


def caps_of(columns: Sequence[Column], counts: Sequence[int], rules: Rules, pipelines: int) -> Floats:
    """Seconds of the slowest stage that pipelines of these groups may come to: where a stage gains a layer."""
    pace = sum(count / column.block for column, count in zip(columns, counts, strict=True))
    typical = pipelines * rules.layers / pace
    found: set[float] = set()
    for column in columns:
        for fixed in column.ends(rules.hop) | {rules.hop}:
            edge = max(0.0, fixed - rules.hop)
            first = max(1, int(np.ceil((LEAST * typical - edge) / column.block)))
            last = min(rules.layers, max(first, int((LARGEST * typical - edge) / column.block)))
            found.update(n * column.block + fixed for n in range(first, last + 1))
    listed = np.array(sorted(found))
    if len(listed) > MOST_CAPS:
        listed = listed[np.linspace(0, len(listed) - 1, MOST_CAPS).round().astype(np.int64)]
    return listed


class Ordering:
    """The best orders of all pipelines of at most `counts` groups of each column, under each of `caps`.
    `total` has the most layers, by pipeline (in the order of its counts) and cap."""

    def __init__(self, columns: Sequence[Column], counts: Sequence[int], rules: Rules, caps: Floats) -> None:
        self.columns, self.rules, self.caps = tuple(columns), rules, caps
        dims = tuple(count + 1 for count in counts)
        self.grid: Ints = np.indices(dims).reshape(len(dims), -1)
        self.depth: Ints = self.grid.sum(axis=0)
        self.strides = np.array([np.prod(dims[at + 1 :]) for at in range(len(dims))], dtype=np.int64)
        deepest = min(int(self.depth.max(initial=0)), rules.layers, rules.each if rules.deep else rules.layers)
        shape = (self.grid.shape[1], len(caps))
        self.total: Small = np.full(shape, NEVER, dtype=np.int32)
        #: The type of the first stage, of those in front of whom others stand and of whole pipelines.
        self._chosen: Which = np.full(shape, -1, dtype=np.int8)
        self._first: Which = np.full(shape, -1, dtype=np.int8)
        self._inner, self._front = (self._rooms(deepest, first=first) for first in (False, True))
        before: Small = np.full(shape, NEVER, dtype=np.int32)
        before[0] = 0
        for behind in range(deepest):
            rows = np.flatnonzero(self.depth == behind + 1)
            self.total[rows], self._first[rows] = self._placed(rows, before, self._front[behind])
            before[rows], self._chosen[rows] = self._placed(rows, before, self._inner[behind])

    def _rooms(self, deepest: int, *, first: bool) -> Small:
        """Layers of a stage by stages behind it, column and cap; NEVER where it has none."""
        found = np.zeros((deepest, len(self.columns), len(self.caps)), dtype=np.int32)
        for index, column in enumerate(self.columns):
            most = column.most_first if first else column.most
            held = np.array([most[min(behind, len(most) - 1)] for behind in range(deepest)])
            fixed = np.full(deepest, (column.embed if first else 0.0) + self.rules.hop)
            fixed[:1] += column.head - self.rules.hop
            room = np.floor((self.caps - fixed[:, None]) / column.block * (1 + EQUAL))
            found[:, index] = np.minimum(room, np.minimum(held, self.rules.layers)[:, None])
        found[found < 1] = NEVER
        return found

    def _placed(self, rows: Ints, before: Small, rooms: Small) -> tuple[Small, Which]:
        """One more stage in front of those of `before`: layers, and its type."""
        best: Small = np.full((len(rows), len(self.caps)), 0, dtype=np.int32)
        which: Which = np.full(best.shape, -1, dtype=np.int8)
        for index in sorted(range(len(self.columns)), key=lambda i: -self.columns[i].block):
            have = np.flatnonzero(self.grid[index, rows] > 0)
            value = before[rows[have] - self.strides[index]] + rooms[index]
            better = value > best[have]
            best[have] = np.where(better, value, best[have])
            which[have] = np.where(better, np.int8(index), which[have])
        return np.where(best > 0, best, NEVER).astype(np.int32), which

    def order(self, row: int, cap: int) -> tuple[int, ...]:
        """Columns of the stages from the first to the last, of one pipeline under one cap."""
        index = int(self._first[row, cap])
        found = [index]
        row -= int(self.strides[index])
        while row:
            index = int(self._chosen[row, cap])
            found.append(index)
            row -= int(self.strides[index])
        return tuple(found)

    def sums(self, rows: Ints, caps: Ints) -> Floats:
        """The seconds of one micro-batch through pipelines under caps (both by number, pairwise), the cheapest
        stages filled first. Each must hold all layers."""
        rules = self.rules
        room = np.zeros((len(self.columns), len(rows)), dtype=np.int64)
        block, embed, head = (
            np.array([getattr(column, name) for column in self.columns]) for name in ("block", "embed", "head")
        )
        at = rows.copy()
        pairs = np.arange(len(rows))
        sums = rules.hop * (self.depth[rows] - 1).astype(np.float64)
        first = True
        while len(pairs):
            chosen = (self._first if first else self._chosen)[at[pairs], caps[pairs]].astype(np.int64)
            behind = self.depth[at[pairs]] - 1
            table = self._front if first else self._inner
            room[chosen, pairs] += table[behind, chosen, caps[pairs]]
            sums[pairs] += np.where(behind == 0, head[chosen], 0.0) + (embed[chosen] if first else 0.0)
            at[pairs] -= self.strides[chosen]
            pairs = pairs[at[pairs] > 0]
            first = False
        left = rules.layers - self.depth[rows]
        for index in np.argsort(block, kind="stable"):
            base = self.grid[index, rows]
            more = np.minimum(np.maximum(room[index] - base, 0), left)
            left = left - more
            sums += (more + base) * block[index]
        return sums
