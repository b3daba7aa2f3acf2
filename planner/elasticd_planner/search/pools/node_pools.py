"""Pools that share a step's micro-batches: few slow nodes and pipelines are one pool, more are cut into many.

One pool alone tries its combinations one by one against the best so far. Of many the time T is bisected
between the bound and the best plan known: at each T every pool says how much it can do (pools that are alike
are solved once).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count as numbers_from

from elasticd_planner.grouping.group_types import Columns, Limits, Rules
from elasticd_planner.grouping.node_partitions import Division, NodeKind
from elasticd_planner.search.balance.micro_batch_split import split_by_lines
from elasticd_planner.search.pools.node_pool import NARROW, Chain, NodePool
from elasticd_planner.search.task import Chained, DeviceGroup, Found, Task

#: Where one pool ends: slow nodes and pipelines that are still solved as one.
POOL_SLOW, POOL_PIPELINES = 4, 8

#: Bisection ends at this relative distance.
CLOSE = 2e-4

#: Combinations of one pool that are looked at without one that is better than those before.
MOST_VAIN_COMBINATIONS = 30

#: Of one pool's combinations so many are looked at with little merged, the first ones; of the others so many of
#: those that came nearest once more.
WIDE, REFINED = 24, 4

#: A time, over the bound, in which everything that fits is done.
EVER = 1e4

#: New combinations looked at for each pool and each time asked, where there are many pools.
BUDGET_POOLED = 12

#: Nodes by kind.
Composition = tuple[int, ...]


class NodePools:
    """Pools for one number of pipelines. `divisions` of each kind of nodes; `time` is the T / L at which they
    are ranked; `budget` how many combinations one pool alone may look at, `orders` how many of
    them with every order of stages; `fewest` the devices that a pipeline has at least; `thorough`: all
    combinations with every order."""

    def __init__(
        self,
        task: Task,
        rules: Rules,
        kinds: Sequence[NodeKind],
        divisions: Sequence[Sequence[Division]],
        pipelines: int,
        time: float,
        budget: int,
        orders: int,
        fewest: int,
        thorough: bool,
        limits: Limits | None = None,
    ) -> None:
        self.budget, self.orders = budget, orders
        rules = replace(rules, each=max(1, rules.most - pipelines + 1), fewest=fewest)
        self.task, self.kinds = task, tuple(kinds)
        compositions = compose(self.kinds, pipelines)
        self.alone = len(compositions) == 1
        deepest = max(
            sum(max((len(d.types) for d in divisions[i]), default=0) * n for i, n in enumerate(composition))
            for composition, _ in compositions
        )
        self.columns = Columns(self.task.cost, rules, deepest, limits)
        self.pools: dict[tuple[Composition, int], NodePool] = {}
        for composition, number in compositions:
            if (composition, number) not in self.pools:
                nodes = [
                    (kind, listed, n)
                    for kind, listed, n in zip(self.kinds, divisions, composition, strict=True)
                ]
                self.pools[composition, number] = NodePool(
                    nodes, number, self.columns, time, thorough=thorough, alone=self.alone
                )
        self.times = Counter(compositions)

    @property
    def evaluated(self) -> int:
        """Combinations looked at so far, in all pools."""
        return sum(pool.evaluated for pool in self.pools.values())

    def solve(self, low: float, known: float) -> Found | None:
        """The least time between the bound and what is known already."""
        return self._alone(low, known) if self.alone else self._together(low, known)

    def _alone(self, low: float, known: float) -> Found | None:
        """One pool: its combinations one by one, each only if it beats the best so far. Then the best and those
        that came nearest: with less that is merged, and where memory binds with every order of stages."""
        (key, pool), best, high = next(iter(self.pools.items())), None, known
        which, patience = None, pool.evaluated + MOST_VAIN_COMBINATIONS
        for index in numbers_from():
            if math.isfinite(high) and pool.evaluated >= patience:
                break
            pool.widest = pool.most_shapes if pool.evaluated < WIDE else NARROW
            if pool.evaluated >= self.budget or not pool.listed(index) or self._ended(pool, low, high):
                break
            found = self._one(key, index, low, high)
            if found is not None:
                best, high, which = found, found.seconds, index
                patience = pool.evaluated + MOST_VAIN_COMBINATIONS
            pool.forget(index)

        def again(among: Iterable[int], most: int) -> None:
            """The best combination and those that came nearest to it."""
            nonlocal best, high, which
            near = sorted(among, key=lambda index: (index != which, -pool.taken.get(index, 0), index))
            for index in near[:most]:
                if not self._done(low, high):
                    found = self._one(key, index, low, high)
                    if found is not None:
                        best, high, which = found, found.seconds, index
                    pool.forget(index)

        pool.widest = pool.most_shapes
        again(pool.merged, REFINED)
        if not pool.every_order:
            pool.every_order = True
            again(pool.binding, self.orders)
        return best

    def _done(self, low: float, high: float) -> bool:
        """Whether a plan is as good as can be."""
        return math.isfinite(high) and high <= low * (1 + CLOSE)

    def _ended(self, pool: NodePool, low: float, high: float) -> bool:
        """Whether no other combination can be better."""
        return math.isfinite(high) and (self._done(low, high) or pool.exhausted(high, self.task.micro_batches))

    def _one(self, key: tuple[Composition, int], index: int, low: float, high: float) -> Found | None:
        """The best plan of one combination, if it is better than `high`."""
        known = math.isfinite(high)
        found = self._within(key, index, high * (1 - CLOSE)) if known else self._first(key, index, low)
        if found is not None:
            low = self.pools[key].lowest(index, low, found.seconds, self.task.micro_batches)
            found = _bisected(low, found, lambda limit: self._within(key, index, limit))
        return found if found is not None and found.seconds < high else None

    def _within(self, key: tuple[Composition, int], index: int, limit: float) -> Found | None:
        """A plan of one combination within `limit`."""
        able = self.pools[key].able(index, limit, self.task.micro_batches)
        return self._found(limit, {key: index}) if able else None

    def _first(self, key: tuple[Composition, int], index: int, low: float) -> Found | None:
        """A plan of one combination, however slow."""
        step = 0.01
        if not self.pools[key].able(index, low * EVER, self.task.micro_batches):
            return None
        while step < EVER:
            found = self._within(key, index, low * (1 + step))
            if found is not None:
                return found
            step *= 2
        return None

    def _together(self, low: float, known: float) -> Found | None:
        """Pools: the time is bisected, each says how much it can do in it."""
        best: Found | None = None
        if math.isfinite(known):
            best = self._at(known * (1 - CLOSE))
            if best is None:
                return None
        step = 0.01
        while best is None:
            best = self._at(low * (1 + step))
            if best is None:
                if step > 40:
                    return None
                low, step = low * (1 + step), step * 2
        return _bisected(low, best, self._at)

    def _at(self, limit: float) -> Found | None:
        """A plan within `limit` by pools, or None."""
        total = 0
        chosen: dict[tuple[Composition, int], int] = {}
        for key, pool in self.pools.items():
            done, which = pool.most(limit, BUDGET_POOLED)
            if which < 0 or done < 0:
                return None
            chosen[key] = which
            total += done * self.times[key]
        return self._found(limit, chosen) if total >= self.task.micro_batches else None

    def _found(self, limit: float, chosen: dict[tuple[Composition, int], int]) -> Found | None:
        chains = {key: pool.chains(limit, chosen[key]) for key, pool in self.pools.items()}
        listed: list[tuple[tuple[Composition, int], int, Chain]] = [
            (key, copy, chain)
            for key, copies in self.times.items()
            for copy in range(copies)
            for chain in chains[key]
        ]
        lines = [chain.line for _, _, chain in listed]
        given = split_by_lines(lines, self.task.micro_batches)
        if given is None:
            return None
        seconds = max(line.seconds(m) for line, m in zip(lines, given, strict=True))
        named = self._named(listed)
        pipelines = tuple(
            Chained(groups=tuple(groups[i] for i in chain.order(m)), micro_batches=m)
            for (_, _, chain), groups, m in zip(listed, named, given, strict=True)
        )
        return Found(pipelines=pipelines, seconds=seconds)

    def _named(
        self, listed: Sequence[tuple[tuple[Composition, int], int, Chain]]
    ) -> list[tuple[DeviceGroup, ...]]:
        """Groups with the names of devices: each pool takes its nodes of each kind in order."""
        next_node = [0] * len(self.kinds)
        taken: dict[tuple[tuple[Composition, int], int, int, int], list[list[str]]] = {}
        made = []
        for key, copy, chain in listed:
            pool = self.pools[key]
            groups = []
            for group in chain.groups:
                place = (key, copy, group.kind, group.node)
                kind = pool.nodes[group.kind][0]
                if place not in taken:
                    index = self.kinds.index(kind)
                    taken[place] = [list(names) for names in kind.nodes[next_node[index]]]
                    next_node[index] += 1
                devices = tuple(taken[place][i].pop(0) for i in group.members)
                groups.append(DeviceGroup(devices=devices, shares=group.type.shares))
            made.append(tuple(groups))
        return made


def _bisected(low: float, best: Found, plan_within: Callable[[float], Found | None]) -> Found:
    """The best plan between a bound and a known plan, by bisection of the time."""
    while best.seconds > low * (1 + CLOSE):
        middle = (low + best.seconds) / 2
        found = plan_within(middle)
        if found is None:
            low = middle
        elif found.seconds < best.seconds:
            best = found
        else:
            break
    return best


def compose(listed: Sequence[NodeKind], pipelines: int) -> list[tuple[Composition, int]]:
    """Pools: nodes by kind, and how many pipelines. One pool while that is small."""
    whole = tuple(len(kind.nodes) for kind in listed)
    slow = [i for i, kind in enumerate(listed) for _ in kind.nodes if not kind.normal]
    if pipelines < 4 or (len(slow) <= POOL_SLOW and pipelines <= POOL_PIPELINES):
        return [(whole, pipelines)]
    count = min(pipelines // 2, sum(whole))
    sizes = [pipelines // count + (1 if p < pipelines % count else 0) for p in range(count)]
    nodes = sum(whole)
    quota = [nodes // pipelines * size for size in sizes]
    across = max(1, min(count, -(-len(slow) // 2)))
    if nodes >= pipelines:  # what is over helps the pools with slow nodes first
        for extra in range(nodes - sum(quota)):
            quota[extra % across if extra < 2 * across else extra % count] += 1
    else:
        quota = [
            nodes * sum(sizes[: p + 1]) // pipelines - nodes * sum(sizes[:p]) // pipelines for p in range(count)
        ]
    pools = [[0] * len(listed) for _ in range(count)]
    slow.sort(key=lambda i: (listed[i].speed - listed[i].devices, i))
    for n, i in enumerate(slow):  # the slowest first, there and back: a pool has a bad one and a better one
        turn, at = divmod(n, across)
        pools[at if turn % 2 == 0 else across - 1 - at][i] += 1
    normal = [i for i, kind in enumerate(listed) for _ in kind.nodes if kind.normal]
    dealt = _interleaved(normal)
    for p in range(count):
        while sum(pools[p]) < quota[p] and dealt:
            pools[p][dealt.pop()] += 1
    for p in range(count):
        if dealt:
            pools[p][dealt.pop()] += 1
    for pool in pools:  # where most nodes are slow, some pools got none
        if not sum(pool):
            largest = max(pools, key=sum)
            kind = max(range(len(listed)), key=lambda i: largest[i])
            largest[kind] -= 1
            pool[kind] += 1
    return [(tuple(pool), size) for pool, size in zip(pools, sizes, strict=True)]


def _interleaved(items: Sequence[int]) -> list[int]:
    """The same items, each value spread evenly over the list."""
    counts = Counter(items)
    seen: Counter[int] = Counter()
    keyed = []
    for item in items:
        keyed.append(((seen[item] + 0.5) / counts[item], item))
        seen[item] += 1
    return [item for _, item in sorted(keyed)]
