"""A pipeline's order of stages and layers under the schedule's exact time, from a good guess on.

The search at scale goes by the formula. The schedule hides what a stage can do ahead while the stages after it
are busy, which favours slow stages in front and other layers. Neighbours of a guess are: two stages change
places, with their layers or without, one stage moves elsewhere, one layer moves from a stage to another, in
short pipelines two of these. All are costed at once, in arrays; the best is the next guess, until none is
better.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from elasticd_planner.cost.pipeline_time import Times, Timing
from elasticd_planner.numeric import EQUAL, Bools, Floats, Ints

#: Steps from guess to guess at most.
STEPS = 40

#: Pipelines of so many stages at most change the order and move a layer in one step, too.
BOTH = 6


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Groups in the order of stages, by index, and layers by stage."""

    order: tuple[int, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """What the groups of one pipeline cost, by index: a block, embed and head, the part of it that is forward;
    hop[a, b]: the boundary from a to b, there and back; most[a, j]: the layers that a may have as stage j."""

    block: Floats
    embed: Floats
    head: Floats
    forward: Floats
    hop: Floats
    most: Ints

    def times(self, orders: Ints, layers: Ints) -> Times:
        """Of some ways to place the groups, [..., stage]."""
        work = self.block[orders] * layers
        work[..., 0] += self.embed[orders[..., 0]]
        work[..., -1] += self.head[orders[..., -1]]
        forward = work * self.forward[orders]
        boundary = self.hop[orders[..., :-1], orders[..., 1:]] / 2
        return Times(forward=forward, backward=work - forward, boundary=boundary)

    def fits(self, orders: Ints, layers: Ints) -> Bools:
        """Which of them have at least a layer on each stage, and room for it."""
        stages = np.arange(orders.shape[-1])
        return np.asarray(((layers >= 1) & (layers <= self.most[orders, stages])).all(axis=-1))


def improved(
    board: StageCosts, guesses: Iterable[Placed], micro_batches: int, timing: Timing, *, swap: bool
) -> Placed:
    """The best that neighbours lead to, from the best guess. `swap`: stages may change places."""
    placed = list(dict.fromkeys((guess.order, guess.layers) for guess in guesses))
    orders, layers = (np.array(part, dtype=np.int64) for part in zip(*placed, strict=True))
    seconds = timing.seconds(board.times(orders, layers), micro_batches)
    first = int(np.argmin(seconds))
    order, now, best = orders[first], layers[first], float(seconds[first])
    places, loads, shifts = _neighbours(len(order), swap=swap)
    for _ in range(STEPS):
        orders, layers = order[places], now[loads] + shifts
        fitting = board.fits(orders, layers)
        orders, layers = orders[fitting], layers[fitting]
        if not len(orders):
            break
        seconds = timing.seconds(board.times(orders, layers), micro_batches, best)
        least = int(np.argmin(seconds))
        if seconds[least] >= best * (1 - EQUAL):
            break
        order, now, best = orders[least], layers[least], float(seconds[least])
    return Placed(order=tuple(map(int, order)), layers=tuple(map(int, now)))


@cache
def _neighbours(stages: int, *, swap: bool) -> tuple[Ints, Ints, Ints]:
    """Stages that groups, and that layers, are taken from, and layers added: [neighbour, stage] each."""
    same, unit = np.arange(stages), np.eye(stages, dtype=np.int64)
    pairs = [(i, j) for i in range(stages) for j in range(stages) if i != j]
    shifts = [np.zeros(stages, dtype=np.int64), *(unit[i] - unit[j] for i, j in pairs)]
    seats = [(same, same)]
    for i, j in pairs if swap else ():
        moved = np.insert(np.delete(same, i), j, i)
        seats.append((moved, moved))
        if i < j:
            swapped = same.copy()
            swapped[[i, j]] = j, i
            seats += [(swapped, swapped), (swapped, same)]
    both = stages <= BOTH
    found = [
        (*seat, shift) for s, seat in enumerate(seats) for shift in (shifts if both or not s else shifts[:1])
    ]
    listed = np.array(found[1:], dtype=np.int64).reshape(-1, 3, stages)
    return listed[:, 0], listed[:, 1], listed[:, 2]
