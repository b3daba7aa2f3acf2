"""Orders of stages: all there are, and what each takes at least, layers counted as divisible.

With S the least way there and back and x = T - S, the inequality of `pipeline_time` says that stage j works on
a micro-batch for at most x / (m - 1 - h_j forward_j). What all stages may have must be all layers, which gives
the least x. A stage that hides more of the others' time may have more, so orders differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from elasticd_planner.cost.model import CostModel
from elasticd_planner.grouping.tp_groups import Group, hop
from elasticd_planner.numeric import Floats, Ints
from elasticd_planner.spec.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Least:
    """What groups cost, as arrays by their index; `hop`: boundaries between places (islands of nodes), there
    and back."""

    block: Floats
    embed: Floats
    head: Floats
    place: Ints
    hop: Floats
    layers: int
    hidden: float

    @classmethod
    def of(
        cls, groups: Sequence[Group], cluster: Cluster, cost: CostModel, layers: int, hidden: float
    ) -> Least:
        places: dict[tuple[str, int | None], Group] = {}
        for group in groups:
            places.setdefault((group.node, group.island), group)
        number = {place: i for i, place in enumerate(places)}
        hops = [[cost.boundary(hop(a, b, cluster)) for b in places.values()] for a in places.values()]
        return cls(
            block=np.array([group.cost.block for group in groups]),
            embed=np.array([group.cost.embed for group in groups]),
            head=np.array([group.cost.head for group in groups]),
            place=np.array([number[group.node, group.island] for group in groups], dtype=np.int64),
            hop=np.array(hops),
            layers=layers,
            hidden=hidden,
        )

    def seconds(self, listed: Ints, most: int) -> Floats:
        """Seconds that orders of groups, [order, stage], need at least for 1 ... `most` micro-batches:
        [order, micro-batches]."""
        block = self.block[listed]
        fixed = np.zeros(block.shape)
        fixed[:, 0] += self.embed[listed[:, 0]]
        fixed[:, -1] += self.head[listed[:, -1]]
        places = self.place[listed]
        hops = self.hop[places[:, :-1], places[:, 1:]].sum(axis=1)
        through = block.sum(axis=1) + fixed.sum(axis=1) + hops
        through += (self.layers - listed.shape[1]) * block.min(axis=1)
        count = np.arange(most)[:, None]
        again = count - self.hidden * np.minimum(count, np.arange(listed.shape[1] - 1, -1, -1))
        pace = np.divide(1.0, again, out=np.full(again.shape, np.inf), where=again > 0)
        least = (self.layers + (fixed / block).sum(axis=1))[:, None] / ((1 / block) @ pace.T)
        longest = ((block + fixed)[:, None, :] * again).max(axis=2)
        found: Floats = through[:, None] + np.maximum(least, longest)
        return found


def orders(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The distinct permutations of a sorted tuple, in ascending order."""
    if len(chosen) < 2:
        yield chosen
        return
    for index, item in enumerate(chosen):
        if index and item == chosen[index - 1]:
            continue
        for rest in orders(chosen[:index] + chosen[index + 1 :]):
            yield (item, *rest)
