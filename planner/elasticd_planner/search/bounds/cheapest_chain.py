"""Whole pipelines at prices: the cheapest chain of TP groups that takes m micro-batches within a time.

Theory of operation. Each group has a price v. `Cheapest` finds, for each m, what the groups of a pipeline that
takes m micro-batches within T cost at least. A dynamic programme places the stages from the last to the first:
f[l] is the least price of d stages that hold l layers. A stage holds what its memory allows at its position,
and what its time allows. In the steady state: m n c <= T. In a step: with s the seconds of the slowest stage,

    n c <= s,        (m - 1) s + (sum of n c)  <=  T,

so that s <= (T - L c_min) / (m - 1), and m n c + (L - n) c_min <= T. Where m is small the sum counts. Then
all s are cut into short spans (a, b]. A pipeline of a span has no stage with n c > b, one at least with n c >
a, and (m - 1) a + sum(n c) <= T. That sum has a price of its own, lambda: for any lambda >= 0 the groups cost
at least

    the least of  (sum of v + lambda n c)  +  lambda ((m - 1) a - T)

over the chains of the span. A few neighbouring m share lambda and spans (a class), so that one programme serves
them all. In the first span, up to b = T / (m - 1 + depth), the sum never counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from elasticd_planner.numeric import EQUAL, Bools, Floats, Ints

#: The last m of each class whose sum of seconds has a price. Any larger m is alone, and has none.
LAST = (4, 5, 7, 10, 15)

#: A span's end over its beginning.
SPAN = 1.06

#: Cases that have ended are left out where no more than this part goes on.
FEWER = 0.7

#: What an operation on an array costs besides its numbers, in numbers.
AHEAD = 10000


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Groups by piece: seconds of a layer, and the most layers by position from the end, [piece, position], of
    a stage that is not the first and of one that is. The last position stands for all further to the front.
    `price`: which price a piece has."""

    blocks: Floats
    rooms: Ints
    first: Ints
    price: Ints


@dataclass(frozen=True, kw_only=True)
class Limits:
    """layers: of the model. fill: of the timing, 0: the slowest stage alone counts. deep: whether a pipeline
    has as many micro-batches as stages at least. groups: in all nodes at most. most: micro-batches of a
    pipeline."""

    layers: int
    fill: int
    deep: bool
    groups: int
    most: int

    def depth(self, count: int) -> int:
        """Stages of a pipeline of so many micro-batches at most."""
        return min(self.layers, self.groups, count if self.deep else self.layers)


@dataclass(frozen=True, kw_only=True)
class CheapestChain:
    """A pipeline: how many groups it has of each price, its stages, the seconds of the slowest and of all."""

    groups: Ints
    depth: int
    slowest: float
    through: float


class Cases:
    """What is told apart in a time T, [case]: the class (-1: none), the seconds a and b of the slowest stage,
    and the most layers of a stage, [piece, case]. `of`: the cases of each m, and their factors of lambda."""

    def __init__(self, pieces: Pieces, limits: Limits, time: float, counts: Ints) -> None:
        self.pieces, self.limits, self.time = pieces, limits, time
        self.counts: list[int] = counts.tolist()
        self.fastest = float(pieces.blocks.min())
        listed: list[tuple[float, float, int, int]] = []  # b, a, class, m
        for first, last, which in self.classes():
            listed += self._spans(first, last, which)
        listed.sort(key=lambda case: (case[1] == 0, -case[0]))  # those with a price of seconds first
        self.stop, self.start, self.which, self.first = (
            np.array([case[i] for case in listed]) for i in range(4)
        )
        self.priced = self.start > 0
        self.most = self._most()
        self.of: dict[int, tuple[Ints, Floats]] = {}
        #: Stages at most: [case].
        self.deepest = np.zeros(len(listed), dtype=np.int64)
        for first, last, which in self.classes():
            cases = np.flatnonzero((self.which == which) & ((which >= 0) | (self.first == first)))
            for count in range(first, last + 1):
                own = cases[self.start[cases] < self.top(count) * (1 + EQUAL)]
                self.deepest[own] = np.maximum(self.deepest[own], limits.depth(count))
                self.of[count] = own, np.where(self.priced[own], (count - 1) * self.start[own] - time, 0.0)

    def classes(self) -> list[tuple[int, int, int]]:
        """(first m, last m, number of the class or -1), of those that are asked for."""
        found, rest = [], self.counts
        for which, last in enumerate(LAST if self.limits.fill else ()):
            own = [count for count in rest if count <= last]
            if own:
                found.append((own[0], own[-1], which))
                rest = rest[len(own) :]
        return found + [(count, count, -1) for count in rest]

    def top(self, count: int) -> float:
        """The seconds of a slowest stage at most."""
        fill = self.limits.fill
        rest = self.time - fill * self.limits.layers * self.fastest
        return max(rest, 0.0) / (count - fill) if count > fill else self.time

    def free(self, count: int) -> float:
        """Seconds of a slowest stage up to which all stages' sum never counts."""
        return self.time / (count - 1 + self.limits.depth(count))

    def _spans(self, first: int, last: int, which: int) -> list[tuple[float, float, int, int]]:
        top = self.top(first)
        if which < 0:
            return [(top, 0.0, which, first)]
        ends = [min(self.free(last), top)]
        while ends[-1] < top:
            ends.append(min(ends[-1] * SPAN, top))
        starts = [0.0, *ends[:-1]]
        return [(b, a, which, first) for a, b in zip(starts, ends, strict=True)]

    def _most(self) -> Ints:
        """The most layers of a stage by time: [piece, case]."""
        blocks, layers = self.pieces.blocks[:, None], self.limits.layers
        most = np.floor(self.stop / blocks * (1 + EQUAL))
        if self.limits.fill:
            rest, more = self.time - layers * self.fastest, self.first * blocks - self.fastest
            alone = np.full(most.shape, float(layers))
            np.divide(rest * (1 + EQUAL), more, out=alone, where=more > self.fastest * EQUAL)
            most = np.minimum(most, np.floor(np.maximum(alone, 0.0)))
        return np.minimum(most, layers).astype(np.int64)


class _Columns:
    """Columns of the programme. `own`: cases, those first whose seconds have a price, `priced` of them. These
    have two columns each: chains with a stage that takes longer than a, and then chains without one yet."""

    def __init__(self, own: Ints, priced: int) -> None:
        self.own, self.priced = own, priced
        self.case = np.concatenate([own[:priced], own])
        self.begin = slice(priced, None)

    def any(self, of: Bools) -> Bools:
        """By case: whether it is so of any of its columns."""
        p = self.priced
        return np.concatenate([of[:p] | of[p : 2 * p], of[2 * p :]])

    def columns(self, kept: Bools) -> Bools:
        """The columns of the cases that are kept."""
        return np.concatenate([kept[: self.priced], kept])


class Cheapest:
    """The cheapest chains of some cases at prices, and at prices of seconds by class."""

    def __init__(self, cases: Cases, prices: Floats, seconds: Floats, ceiling: float) -> None:
        self.cases, self.prices, self.ceiling = cases, prices[cases.pieces.price], ceiling
        self._many = len(prices)
        self.rate = np.where(cases.priced, seconds[np.maximum(cases.which, 0)], 0.0)
        self._kept = self._useful()
        self._held: list[tuple[_Columns, Floats]] = []
        self._costed: dict[tuple[int, int], tuple[_Columns, Floats]] = {}
        self._filled: dict[tuple[int, bool], tuple[_Columns, list[tuple[Ints, Floats]]]] = {}
        #: Numbers in the arrays that were looked at, about.
        self.work = 0.0
        #: The least price of chains of 1, 2, ... stages, [stages, case].
        self.found = self._run()

    def least(self, count: int) -> float:
        """The least price of a pipeline of so many micro-batches; inf where there is none. Where that is above
        the ceiling it is the ceiling."""
        return min(float(self._values(count).min(initial=np.inf)), self.ceiling)

    def best(self, count: int, many: int) -> list[tuple[int, int]]:
        """(case, stages) of cheap chains of so many micro-batches, one of each case, the cheapest first."""
        values = self._values(count)
        if not values.size:
            return []
        each = values.min(axis=0)
        order = np.argsort(each, kind="stable")[:many]
        return [
            (int(self.cases.of[count][0][k]), int(values[:, k].argmin()) + 1)
            for k in order.tolist()
            if np.isfinite(each[k])
        ]

    def _values(self, count: int) -> Floats:
        """Prices of pipelines of so many micro-batches: [stages, own case]."""
        own, times = self.cases.of[count]
        depth = min(self.cases.limits.depth(count), len(self.found))
        return np.asarray(self.found[:depth, own] + self.rate[own] * times)

    def _useful(self) -> list[int]:
        """Pieces that no other one replaces: cheaper, faster and with as much memory everywhere."""
        pieces = self.cases.pieces
        some = np.flatnonzero(self.cases.most.max(axis=1, initial=0) > 0)
        kept: list[int] = []
        for i in some[np.lexsort((pieces.blocks[some], self.prices[some]))].tolist():
            better = (pieces.blocks[kept] <= pieces.blocks[i]) & (pieces.rooms[kept] >= pieces.rooms[i]).all(
                axis=1
            )
            if not (better & (pieces.first[kept] >= pieces.first[i]).all(axis=1)).any():
                kept.append(i)
        return kept

    @cached_property
    def _ranked(self) -> Ints:
        """In the steady state the pieces of each case that no other one replaces, [rank, case]; -1: none."""
        cases, pieces = self.cases, self.cases.pieces
        kept = np.array(self._kept, dtype=np.int64)
        kept = kept[np.argsort(self.prices[kept], kind="stable")]
        rooms = np.concatenate([pieces.rooms[kept], pieces.first[kept]], axis=1)
        most = np.minimum(cases.most[kept][:, :, None], rooms[:, None, :]).astype(np.int16)
        useful = most.max(axis=2) > 0
        for i in range(1, len(kept)):
            useful[i] &= ~((most[:i] >= most[i]).all(axis=2) & useful[:i]).any(axis=0)
        ranked = np.full((int(useful.sum(axis=0).max(initial=0)), useful.shape[1]), -1)
        ranked[(np.cumsum(useful, axis=0) - 1)[useful], np.nonzero(useful)[1]] = kept[np.nonzero(useful)[0]]
        return ranked

    def _full(self, state: _Columns, place: int, *, first: bool) -> list[tuple[Ints, Floats]]:
        """In the steady state layers and price of a stage with as many layers as there may be, by column."""
        known = self._filled.get((place, first))
        if known is not None and known[0] is state:
            return known[1]
        pieces = self._ranked[:, state.case]
        rooms = self.cases.pieces.first if first else self.cases.pieces.rooms
        most = np.minimum(self.cases.most[pieces, state.case], rooms[pieces, place])
        price = np.where((pieces >= 0) & (most > 0), self.prices[pieces], np.inf)
        made = list(zip(most, price, strict=True))
        self._filled[place, first] = state, made
        return made

    def _run(self) -> Floats:
        cases, limits = self.cases, self.cases.limits
        layers, size, deepest = limits.layers, len(cases.stop), cases.pieces.rooms.shape[1]
        credit = self.rate * np.minimum((cases.first - 1) * cases.start - cases.time, 0.0)
        best = np.full(size, self.ceiling) - credit
        rest = np.arange(layers, -1, -1)[:, None] * self._each()
        state = _Columns(np.arange(size), int(cases.priced.sum()))
        held = np.full((layers + 1, len(state.case)), np.inf)
        held[0, state.begin] = 0.0
        found = []
        for stages in range(int(cases.deepest.max(initial=0))):
            self._held.append((state, held))
            place = min(stages, deepest - 1)
            done = np.full(size, np.inf)
            done[state.own] = self._ended(state, held, place)
            found.append(done)
            best = np.minimum(best, done)
            held = self._added(state, held, place)
            # A case ends where no deeper chain is cheaper: what layers still lack costs at least so much.
            going = state.any((held + rest[:, state.case]).min(axis=0) < best[state.case])
            going &= cases.deepest[state.own] > stages + 1
            many = int(going.sum())
            if not many:
                break
            if many < FEWER * len(going):
                held = np.ascontiguousarray(held[:, state.columns(going)])
                state = _Columns(state.own[going], int(going[: state.priced].sum()))
        return np.array(found).reshape(-1, size)

    def _each(self) -> Floats:
        """What a layer costs at least: [case]."""
        cases = self.cases
        most = np.minimum(cases.most[self._kept], cases.pieces.rooms.max(axis=1)[self._kept, None])
        with np.errstate(divide="ignore"):
            each = self.prices[self._kept, None] / most + self.rate * cases.pieces.blocks[self._kept, None]
        found: Floats = np.where(most > 0, each, np.inf).min(axis=0, initial=np.inf)
        return np.where(np.isfinite(found), found, 0.0)

    def _costs(self, i: int, state: _Columns, room: int) -> Floats:
        """Of a stage of piece i with 1, 2, ... layers, `room` at most: [layers - 1, column]."""
        known = self._costed.get((i, room))
        if known is not None and known[0] is state:
            return known[1]
        most = np.minimum(self.cases.most[i, state.case], room)
        n = np.arange(1, int(most.max(initial=0)) + 1)[:, None]
        each: Floats = self.prices[i] + self.rate[state.case] * (n * self.cases.pieces.blocks[i])
        each[most < n] = np.inf
        self._costed[i, room] = state, each
        return each

    def _slow(self, state: _Columns, rooms: Ints) -> Floats:
        """The least costs of a stage with 1, 2, ... layers, longer than a: [layers - 1, priced case]."""
        cases, p = self.cases, state.priced
        found = np.full((cases.limits.layers, p), np.inf)
        for i in self._kept:
            costs = self._costs(i, state, int(rooms[i]))[:, :p]
            n = np.arange(1, len(costs) + 1)[:, None]
            slow = n * cases.pieces.blocks[i] > cases.start[state.own[:p]] * (1 - EQUAL)
            np.minimum(found[: len(costs)], np.where(slow, costs, np.inf), out=found[: len(costs)])
        most: int = np.isfinite(found).any(axis=1).nonzero()[0].max(initial=-1)
        return np.asarray(found[: most + 1])

    def _ended(self, state: _Columns, held: Floats, place: int) -> Floats:
        """The least prices of all layers with one more stage, the first: [own case]."""
        cases, layers, p = self.cases, self.cases.limits.layers, state.priced
        found = np.full(len(state.case), np.inf)
        if not cases.limits.fill:
            for most, price in self._full(state, place, first=True):
                np.minimum(found, held[layers - most, np.arange(len(found))] + price, out=found)
            return found
        for i in self._kept:
            costs = self._costs(i, state, int(cases.pieces.first[i, place]))
            if len(costs):
                value = (costs + held[layers - len(costs) : layers][::-1]).min(axis=0)
                np.minimum(found, value, out=found)
        if p:
            slow = self._slow(state, cases.pieces.first[:, place])
            if len(slow):
                value = (slow + held[layers - len(slow) : layers, p : 2 * p][::-1]).min(axis=0)
                found[:p] = np.minimum(found[:p], value)
        return np.concatenate([found[:p], found[2 * p :]])

    def _added(self, state: _Columns, held: Floats, place: int) -> Floats:
        """The least prices with one more stage: [layers, column]."""
        cases, layers, p = self.cases, self.cases.limits.layers, state.priced
        found, more = np.full(held.shape, np.inf), np.empty(held.shape)
        if not cases.limits.fill:
            wanted, column = np.arange(layers + 1)[:, None], np.arange(held.shape[1])
            flat = held.ravel()
            for most, price in self._full(state, place, first=False):
                index = np.maximum(wanted - most, 0) * held.shape[1] + column
                np.take(flat, index, out=more, mode="clip")
                more += price
                np.minimum(found, more, out=found)
                self.work += 4 * more.size + AHEAD
            return found
        for i in self._kept:
            costs = self._costs(i, state, int(cases.pieces.rooms[i, place]))
            for n, cost in enumerate(costs, 1):
                np.add(held[:-n], cost, out=more[n:])
                np.minimum(found[n:], more[n:], out=found[n:])
            self.work += len(costs) * (more.size + AHEAD)
        if p:
            for n, cost in enumerate(self._slow(state, cases.pieces.rooms[:, place]), 1):
                target = found[n:, :p]
                np.minimum(target, held[:-n, p : 2 * p] + cost, out=target)
        return found

    def chain(self, case: int, stages: int) -> CheapestChain:
        """The chain of one case with so many stages."""
        cases, left = self.cases, self.cases.limits.layers
        pieces, deepest = cases.pieces, cases.pieces.rooms.shape[1]
        which, n = self._options
        seconds = n * pieces.blocks[which]
        costs = self.prices[which] + self.rate[case] * seconds
        slow = seconds > cases.start[case] * (1 - EQUAL)
        counts, slowest, through = np.zeros(self._many, dtype=np.int64), 0.0, 0.0
        wanted = bool(cases.priced[case])  # a stage that takes longer than a
        for at in range(stages - 1, -1, -1):
            rooms = (pieces.first if at == stages - 1 else pieces.rooms)[which, min(at, deepest - 1)]
            state, held = self._held[at]
            place, before = int(np.searchsorted(state.own, case)), np.maximum(left - n, 0)
            column = place if place < state.priced else place + state.priced
            value = held[before, column] + costs
            if bool(cases.priced[case]):
                other = np.where(slow | (not wanted), held[before, place + state.priced] + costs, np.inf)
                value = np.minimum(value, other) if wanted else other
            value[(n > np.minimum(cases.most[which, case], rooms)) | ((n > left) & bool(cases.limits.fill))] = (
                np.inf
            )
            best = int(value.argmin())
            if wanted and slow[best] and value[best] == other[best]:
                wanted = False
            counts[pieces.price[which[best]]] += 1
            slowest, through = max(slowest, float(seconds[best])), through + float(seconds[best])
            left = max(0, left - int(n[best]))
        return CheapestChain(groups=counts, depth=stages, slowest=slowest, through=through)

    @cached_property
    def _options(self) -> tuple[Ints, Ints]:
        """Every piece with every number of layers: [option]."""
        most = np.minimum(
            self.cases.most[self._kept].max(axis=1), self.cases.pieces.rooms[self._kept].max(axis=1)
        )
        which = np.repeat(self._kept, most)
        return which, np.concatenate([np.arange(1, many + 1) for many in most])
