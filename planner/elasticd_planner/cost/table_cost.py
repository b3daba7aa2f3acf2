"""The cost model of a table: slowdown by TP size, memory by stage from the end, shares in 64ths.

What shared planning problems are written in: a layer costs `slowdown[size] x size x max(w x rate)` units, w
being a member's part of the layer; equal parts give the slowest member's rate. Boundaries cost nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elasticd_planner.cost.group_bound import Paces, by_slowest, by_speed
from elasticd_planner.cost.model import GroupCost
from elasticd_planner.cost.pipeline_time import FORMULA, Timing
from elasticd_planner.spec.cluster import Link
from elasticd_planner.spec.plan import Plan, Stage

MIB = 1 << 20

#: Uneven shares are in parts of this many.
PARTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TableCost:
    """slowdown: of a layer by TP size, ascending sizes. The bytes are of a stage on a group of `full` equal
    members: `layer_bytes` by stage, the last entry being the last stage's; stages before the first entry use
    the first. `reserve` is left free on every device; `fixed` every device needs."""

    layers: int
    slowdown: tuple[tuple[int, float], ...]
    full: int
    uneven: bool
    layer_bytes: tuple[float, ...]
    embedding: float
    fixed: float
    reserve: float
    timing: Timing = FORMULA  # the format defines the step by the formula

    def beside_shares(self, stage: Stage) -> tuple[object, ...]:
        """Nothing else."""
        return ()

    def for_stage(self, stage: Stage) -> TableCost:
        """The format has neither recomputation nor sequence parallelism."""
        return self

    def under(self, plan: Plan) -> TableCost:
        """The format knows no state policy."""
        return self

    def equal(self) -> TableCost:
        """The same cost with equal shares alone."""
        return replace(self, uneven=False) if self.uneven else self

    def widths(self, most: int) -> tuple[int, ...]:
        """The sizes that a TP group may have, up to `most`: those that the table has a slowdown of."""
        return tuple(width for width, _ in self.slowdown if width <= most)

    def shares(self, rates: Sequence[float]) -> tuple[tuple[int, ...], ...]:
        """Shares worth trying for members of these rates, in parts of `PARTS`: equal ones first."""
        equal = (1,) * len(rates)
        if not self.uneven or len(set(rates)) == 1 or len(rates) > PARTS:
            return (equal,)
        # The fastest of those in which no member has more than `most`: no others are faster with less memory.
        most = PARTS
        options = [equal]
        while (shares := balanced(rates, PARTS, most)) is not None:
            options.append(shares)
            most = max(shares) - 1
        return tuple(options)

    @property
    def exact_shares(self) -> bool:
        """Of the shares that `shares` offers, one is the best that there is."""
        return True

    def group(self, rates: Sequence[float], shares: Sequence[int], link: Link) -> GroupCost:
        """Units of one micro-batch in one layer on a TP group; embedding and head cost nothing."""
        width = len(rates)
        slowest = max(share * rate for share, rate in zip(shares, rates, strict=True))
        block = self._factor(width) * slowest * width / sum(shares)
        return GroupCost(block=block, embed=0.0, head=0.0)

    def _factor(self, width: int) -> float:
        for known, factor in self.slowdown:
            if known == width:
                return factor
        raise KeyError(f"no slowdown for a TP group of {width}")

    def boundary(self, link: Link) -> float:
        """Nothing: boundaries cost no units."""
        return 0.0

    def timed(self, timing: Timing) -> TableCost:
        """The same cost with another timing."""
        return replace(self, timing=timing)

    def memory(
        self, layers: int, shares: Sequence[int], position: int, *, first: bool, last: bool, in_flight: int
    ) -> float:
        """`in_flight` micro-batches are alive in the stage that is the in_flight-th from the end."""
        table = self.layer_bytes
        each = table[max(0, len(table) - in_flight)]
        size = each * layers + (self.embedding if first or last else 0.0)
        return size * self.full * shares[position] / sum(shares) + self.fixed + self.reserve

    def carried(self, copies: int, devices: int) -> float:
        """Nothing: the format has no devices that carry state alone."""
        return 0.0

    def after(self, pipelines: int, fewest: int, link: Link, depth: int | None = None) -> float:
        """Nothing: a step ends with its slowest pipeline."""
        return 0.0

    def bound(self, rates: Sequence[float], micro_batches: int) -> float:
        """All work over the best pace of all speed."""
        pace = max(1 / (factor * width) for width, factor in self.slowdown)
        return micro_batches * self.layers / (pace * sum(1 / rate for rate in rates))

    def paces(self, rates: Sequence[float], link: Link) -> Paces:
        """The most that k groups of these devices, of one node, reach in sum(1 / block), for each k."""
        widths = self.widths(len(rates))
        if self.uneven:
            return by_speed(rates, {width: 1 / (self._factor(width) * width) for width in widths})
        return by_slowest(rates, widths, lambda width, rate: self._factor(width) * rate)


def balanced(rates: Sequence[float], parts: int, most: int | None = None) -> tuple[int, ...] | None:
    """Whole parts, at least one each and `most` at most, with the least max(part x rate): exact, since giving
    the next part to whoever is the least burdened with it never regrets. None where `most` is too little."""
    limit = parts if most is None else most
    if limit * len(rates) < parts:
        return None
    ideal = parts / sum(1 / rate for rate in rates)
    given = [min(limit, max(1, math.floor(ideal / rate))) for rate in rates]
    if sum(given) > parts:
        given = [1] * len(rates)
    heap = [((n + 1) * rate, i) for i, (n, rate) in enumerate(zip(given, rates, strict=True)) if n < limit]
    heapq.heapify(heap)
    for _ in range(parts - sum(given)):
        _, i = heapq.heappop(heap)
        given[i] += 1
        if given[i] < limit:
            heapq.heappush(heap, ((given[i] + 1) * rates[i], i))
    return tuple(given)
