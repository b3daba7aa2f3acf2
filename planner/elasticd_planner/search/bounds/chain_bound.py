"""A lower bound of table problems with whole pipelines: prices of groups that no plan within a time can pay.

Theory of operation. Give every kind of TP group a price v >= 0. Whatever a plan's division of the nodes, its
groups are worth at most what the best division of each node is worth: `total`. A pipeline of m micro-batches
that ends within T is worth at least w(m), the price of the cheapest chain that does (`chains`). So where
pipelines share the batch as m_1 + ... + m_D = M,

    w(m_1) + ... + w(m_D)  <=  total

in every plan within T. Prices that break this prove that no plan within T shares the batch that way; where each
way is excluded, by prices of its own or of several, there is no plan within T. This is the dual of a linear
programme over all chains and all divisions (Dantzig and Wolfe). It knows what `table_bound` does not: how whole
layers of several stages fit together, memory by position, and the time of a slow group's other stages.

Good prices are found by cuts (`prices`). Where prices do not exclude a way, the chains and divisions that keep
it possible must be worth more than they are: a cut. Chains and divisions are kept, so that most cuts cost
little; only a proof asks for all chains. First prices for all ways are looked for, which exclude most; the
others are excluded one by one. Where the search for prices ends early the bound is smaller, and no less true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from elasticd_planner.grouping.best_partitions import add_groups
from elasticd_planner.numeric import EQUAL, Floats, Ints
from elasticd_planner.search.bounds.analytic_centre import centre
from elasticd_planner.search.bounds.cheapest_chain import LAST, Cases, Cheapest, CheapestChain, Limits, Pieces

#: The part of what is between the bound and a plan that the bound is raised by first. A rise by less than this
#: part of the bound is not worth another look, and a plan this near to the bound needs none.
RISE, LEAST_RISE, NEAR = 0.4, 4e-3, 0.02

#: Prices that excluded the most ways, tried first in another time.
AGAIN = 3

#: Where more than this part of the ways is left by so many prices in turn, the others are excluded one by one.
FALL, IDLE = 0.8, 4

#: Chains that a proof adds to those known: of each m of the cheapest way so many that are not the cheapest.
OTHERS = 8

#: Prices above what all nodes are worth are not told apart.
CEILING = 1.0001

#: What a programme and a centre cost besides their numbers, in numbers.
PROGRAMME, CENTRE = 1e6, 5e5

#: Centres looked at for some ways.
CENTRES = 200


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Alike nodes. counts: devices by rate. groups: the devices of each group by rate, and its pieces (one for
    each of its shares). runs: with equal shares the piece of each width and slowest device. fixed: the pieces
    of a node that has one division."""

    number: int
    counts: tuple[int, ...] = ()
    groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    runs: tuple[tuple[tuple[int, int], ...], ...] = ()
    fixed: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        """Groups of one node at most."""
        return len(self.fixed) or len(self.runs) or sum(self.counts)

    def most(self, values: Floats) -> Floats:
        """The most that the groups of one node add: [piece, case] to [case]."""
        if self.fixed:
            return np.asarray(values[list(self.fixed)].sum(axis=0))
        if self.runs:
            return self._by_run(values)[-1]
        table = np.zeros((*(count + 1 for count in self.counts), values.shape[1]))
        for taken, pieces in self.groups:
            add_groups(table, taken, self.counts, values[list(pieces)].max(axis=0))
        return np.asarray(table[self.counts])

    def _by_run(self, values: Floats) -> list[Floats]:
        """The most that the first 0, 1, ... devices of a node add."""
        best = [np.zeros(values.shape[1])]
        for stop, ends in enumerate(self.runs, 1):
            found = best[stop - 1]
            for width, piece in ends:
                found = np.maximum(found, best[stop - width] + values[piece])
            best.append(found)
        return best

    def chosen(self, prices: Floats) -> tuple[float, Ints]:
        """The most that the groups of one node add, and how many groups of each piece do."""
        counts = np.zeros(len(prices), dtype=np.int64)
        if self.fixed:
            np.add.at(counts, list(self.fixed), 1)
            return float(prices @ counts), counts
        if self.runs:
            best, at = [float(worth[0]) for worth in self._by_run(prices[:, None])], len(self.runs)
            while at:
                width = 1
                if best[at] > best[at - 1]:
                    ends = self.runs[at - 1]
                    width, piece = max(ends, key=lambda end: best[at - end[0]] + float(prices[end[1]]))
                    counts[piece] += 1
                at -= width
            return best[-1], counts
        table = np.zeros(tuple(count + 1 for count in self.counts))
        values = []
        for taken, pieces in self.groups:
            piece = max(pieces, key=lambda piece: float(prices[piece]))
            values.append((taken, piece, float(prices[piece])))
            add_groups(table, taken, self.counts, values[-1][2])
        left, least = self.counts, EQUAL * float(table[self.counts])
        while table[left] > least:
            for taken, piece, value in values:
                rest = tuple(have - n for have, n in zip(left, taken, strict=True))
                if min(rest) >= 0 and table[rest] + value >= table[left] - least:
                    counts[piece] += 1
                    left = rest
                    break
            else:
                break
        return float(table[self.counts]), counts


@dataclass(kw_only=True)
class Budget:
    """Numbers in the arrays of all programmes that may still be looked at (`Cheapest.work`)."""

    left: float


class Known:
    """Chains and divisions that were found, as arrays."""

    def __init__(self, prices: int, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self.chains: list[CheapestChain] = []
        #: Groups by price, of each chain and of each division of each kind of nodes.
        self.groups: Ints = np.zeros((0, prices), dtype=np.int64)
        self.divisions: list[Ints] = [np.zeros((0, prices), dtype=np.int64) for _ in numbers]

    def add(self, chain: CheapestChain) -> int:
        """The number of a chain."""
        for index in np.flatnonzero((self.groups == chain.groups).all(axis=1)).tolist():
            known = self.chains[index]
            if (known.slowest, known.through) == (chain.slowest, chain.through):
                return int(index)
        self.chains.append(chain)
        self.groups = np.concatenate([self.groups, chain.groups[None]])
        return len(self.chains) - 1

    def divided(self, node: int, counts: Ints) -> None:
        """Adds the groups of a division of one of the nodes."""
        if not (self.divisions[node] == counts).all(axis=1).any():
            self.divisions[node] = np.concatenate([self.divisions[node], counts[None]])

    def best(self, prices: Floats) -> Ints:
        """The groups of the best known division of every node, together."""
        chosen = [listed[int((listed @ prices).argmax())] for listed in self.divisions]
        return np.asarray(sum(n * counts for n, counts in zip(self._numbers, chosen, strict=True)))


class _Able:
    """What the known chains do in some cases: the factor of lambda, [chain, m]; inf where one cannot."""

    def __init__(self, known: Known, cases: Cases) -> None:
        self._known, self._cases = known, cases
        self.excess = np.zeros((0, cases.limits.most + 1))
        self.more()

    def more(self) -> None:
        """Adds chains that have become known."""
        new, cases = self._known.chains[len(self.excess) :], self._cases
        if not new:
            return
        excess = np.full((len(new), self.excess.shape[1]), np.inf)
        slowest, through, depth = np.array([(chain.slowest, chain.through, chain.depth) for chain in new]).T
        for first, last, which in cases.classes():
            starts = np.unique(cases.start[cases.which == which]) if which >= 0 else np.zeros(1)
            start = starts[np.maximum(np.searchsorted(starts, slowest * (1 - EQUAL)) - 1, 0)]
            for count in range(first, last + 1):
                able = (slowest <= cases.top(count) * (1 + EQUAL)) & (depth <= cases.limits.depth(count))
                value = np.where(start > 0, through + (count - 1) * start - cases.time, 0.0)
                excess[:, count] = np.where(able, value, np.inf)
        self.excess = np.concatenate([self.excess, excess])


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """A way to share the batch, chains that do, and the groups of a division of all nodes."""

    way: tuple[int, ...]
    chains: tuple[int, ...]
    division: Ints


class ChainBound:
    """The bound of one number of pipelines. `ways`: those to share the batch that nothing else excludes within
    a time, [pipeline, way]."""

    def __init__(
        self,
        pieces: Pieces,
        limits: Limits,
        nodes: Sequence[Nodes],
        ways: Callable[[float], Ints],
    ) -> None:
        self.pieces, self.limits, self.nodes, self.ways = pieces, limits, nodes, ways
        self.size = int(pieces.price.max()) + 1
        self.known = Known(self.size, [node.number for node in nodes])
        self._proofs: list[tuple[int, Floats]] = []
        self._cuts: list[_Cut] = []
        self._scale = np.ones(self.size + len(LAST))
        self._at = np.full(self.size + len(LAST), 0.5)

    def least(self, low: float, known: float, budget: Budget) -> float:
        """Units that no plan can beat: `low`, or more where that can be shown. `known`: those of a plan."""
        self._budget = budget
        high = known
        time = low + (high - low) * RISE
        self._scale = self._first(time)
        while budget.left > 0 and known > low * (1 + NEAR) and high > low * (1 + LEAST_RISE):
            if self._excluded(time):
                low = time
            else:
                high = time
            time = (low + high) / 2
        return low

    def _first(self, time: float) -> Floats:
        """Prices to begin with: the most micro-batches times layers that a piece adds to a pipeline."""
        counts = np.unique(self.ways(time))
        layers = np.floor(time / (counts * self.pieces.blocks[:, None]))
        layers = np.minimum(layers, self.pieces.rooms.max(axis=1)[:, None])
        worth = (counts * np.minimum(layers, self.limits.layers)).max(axis=1, initial=1.0)
        prices = np.zeros(self.size)
        np.maximum.at(prices, self.pieces.price, worth)
        return np.concatenate([prices + 1e-3 * prices.max(), np.full(len(LAST), 4 * prices.mean() / time)])

    # One time.

    def _excluded(self, time: float) -> bool:
        """Whether prices were found to show that no plan ends within `time`."""
        ways = self.ways(time)
        if not ways.size:
            return True
        cases = Cases(self.pieces, self.limits, time, np.unique(ways))
        best = sorted(self._proofs, key=lambda proof: -proof[0])[:AGAIN]
        self._proofs = []
        for _, prices in best:
            ways = self._left(cases, prices, ways)
        found = self._search(cases, ways, IDLE)
        while found is not None and found.size:
            way = np.array(self._cuts[-1].way)[:, None]
            own = Cases(self.pieces, self.limits, time, np.unique(way))
            if self._search(own, way, CENTRES) is None:
                return False
            found = self._left(cases, self._proofs[-1][1], found)
        return found is not None

    def _search(self, cases: Cases, ways: Ints, patience: int) -> Ints | None:
        """Those ways that are left when prices were found that exclude all of them, or so many prices in turn
        excluded few; None where there are no prices to be found."""
        able, idle = _Able(self.known, cases), 0
        for _ in range(CENTRES):
            if not ways.size or idle >= patience:
                return ways
            prices = self._centre(able, ways)
            if prices is None or self._budget.left <= 0:
                return None
            cut = self._cheap(able, cases, prices, ways)
            if cut is not None:
                self._cuts.append(cut)
                continue
            left = self._left(cases, prices, ways)
            idle = idle + 1 if left.shape[1] > FALL * ways.shape[1] else 0
            ways = left
            able.more()
        return None

    def _centre(self, able: _Able, ways: Ints) -> Floats | None:
        """Prices that no known cut of these ways excludes; cuts of other ways are dropped."""
        left, rows, kept = set(map(tuple, ways.T.tolist())), [], []
        for cut in self._cuts:
            row = self._row(able, cut) if cut.way in left else None
            if row is not None:
                kept.append(cut)
                rows.append(row)
        self._cuts = kept
        at = centre(np.array(rows).reshape(-1, len(self._scale)) * self._scale, self._at)
        if at is None:
            return None
        self._at = at
        self._budget.left -= CENTRE
        return at * self._scale

    def _row(self, able: _Able, cut: _Cut) -> Floats | None:
        """What a cut's prices must be positive with; None where its chains are not able."""
        excess = able.excess[cut.chains, cut.way]
        if not np.isfinite(excess).all():
            return None
        row = np.zeros(len(self._scale))
        row[: self.size] = self.known.groups[list(cut.chains)].sum(axis=0) - cut.division
        for value, count in zip(excess.tolist(), cut.way, strict=True):
            if value:
                row[self.size + int(np.searchsorted(LAST, count))] += value
        return row

    def _cheap(self, able: _Able, cases: Cases, prices: Floats, ways: Ints) -> _Cut | None:
        """A cut of known chains and divisions, if there is one."""
        if not len(able.excess):
            return None
        division = self.known.best(prices[: self.size])
        seconds = np.zeros(self.limits.most + 1)
        for first, last, which in cases.classes():
            seconds[first : last + 1] = prices[self.size + which] if which >= 0 else 0.0
        possible = np.isfinite(able.excess)
        times = np.where(possible, able.excess, 0.0) * seconds
        worth = np.where(possible, (self.known.groups @ prices[: self.size])[:, None] + times, np.inf)
        sums = worth.min(axis=0)[ways].sum(axis=0)
        best = int(sums.argmin())
        if sums[best] > float(division @ prices[: self.size]):
            return None
        way = tuple(ways[:, best].tolist())
        return _Cut(way=way, chains=tuple(worth.argmin(axis=0)[list(way)].tolist()), division=division)

    def _left(self, cases: Cases, prices: Floats, ways: Ints) -> Ints:
        """The ways that these prices do not exclude. Of the cheapest of them there is a new cut, the last."""
        total, own = 0.0, prices[: self.size]
        for index, node in enumerate(self.nodes):
            value, counts = node.chosen(own[self.pieces.price])
            self.known.divided(index, np.bincount(self.pieces.price, counts, self.size).astype(np.int64))
            total += node.number * value
        total *= 1 + EQUAL
        cheapest = Cheapest(cases, own, prices[self.size :], total * CEILING)
        self._budget.left -= cheapest.work + PROGRAMME
        worth = np.full(self.limits.most + 1, np.inf)
        for count in np.unique(ways).tolist():
            worth[count] = cheapest.least(count)
        sums = worth[ways].sum(axis=0)
        left = ways[:, sums <= total]
        self._proofs.append((ways.shape[1] - left.shape[1], prices))
        if left.size:
            way = tuple(ways[:, int(sums.argmin())].tolist())
            chains = tuple(self.known.add(cheapest.chain(*cheapest.best(count, 1)[0])) for count in way)
            for count in set(way):
                for case, stages in cheapest.best(count, 1 + OTHERS)[1:]:
                    self.known.add(cheapest.chain(case, stages))
            self._cuts.append(_Cut(way=way, chains=chains, division=self.known.best(own)))
        return left
