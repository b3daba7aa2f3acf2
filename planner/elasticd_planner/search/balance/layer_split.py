"""Layers over the stages of a pipeline by the formula.

A min-max problem with one budget. By the formula a pipeline takes sum_j s_j + (m - 1) max_j s_j with
s_j = block_j x n_j + fixed_j + hop_j: for a given cap on max_j s_j, stage j may have as many layers as stay
below it, and the least sum fills the cheapest stages first. The caps worth trying are the values that an s_j
can take, so trying all of them (at once, in arrays) is exact for every m.

The schedule takes no more than that, and no less than the same with the work t_j = block_j x n_j + fixed_j
under the cap and m - 1 - hidden x min(m - 1, p - 1) in place of m - 1 (`pipeline_time`): a bound by the same
arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elasticd_planner.cost.pipeline_time import FORWARD
from elasticd_planner.numeric import EQUAL, Floats, Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a stage contributes: seconds of one block, seconds besides blocks, and the most layers that its
    memory holds with 1, 2, ... `depth` micro-batches going through the pipeline (`depth`: its stages). `hop`:
    seconds of the boundary after it, there and back; `forward`: the part of its work that is forward."""

    block: float
    fixed: float
    most: tuple[int, ...]
    hop: float = 0.0
    forward: float = FORWARD

    @property
    def charged(self) -> float:
        """Seconds besides blocks, the boundary's included."""
        return self.fixed + self.hop


def fill(
    terms: Sequence[Terms], layers: int, micro_batches: int, *, charged: bool = True
) -> tuple[Floats, Ints]:
    """Caps on the slowest stage (`charged`: with the boundary after it), ascending, and for each the layers by
    stage of the least sum of seconds."""
    depth = len(terms)
    block = np.array([t.block for t in terms])
    fixed = np.array([t.charged if charged else t.fixed for t in terms])
    most = np.array([t.most[min(micro_batches, depth) - 1] for t in terms])
    room = layers - depth + 1  # every stage has a layer
    caps = np.unique(block[:, None] * np.arange(1, room + 1) + fixed[:, None])
    limit = np.floor((caps[:, None] * (1 + EQUAL) - fixed) / block).astype(np.int64)
    limit = np.minimum(limit, np.minimum(most, room))
    possible = (limit >= 1).all(axis=1) & (limit.sum(axis=1) >= layers)
    caps, limit = caps[possible], limit[possible]
    given = np.ones_like(limit)
    left = np.full(len(caps), layers - depth)
    for stage in np.argsort(block, kind="stable"):
        more = np.minimum(limit[:, stage] - 1, left)
        given[:, stage] += more
        left = left - more
    return caps, given


def curve(
    terms: Sequence[Terms], layers: int, micro_batches: int, *, steady: bool = False, hidden: float = 0.0
) -> Floats:
    """Seconds of the best layers for 1 ... `micro_batches` micro-batches; inf where the memory forbids it.
    `steady`: of the slowest stage alone, without fill and drain. `hidden`: not the formula's seconds but some
    that no layers beat in the schedule, in any order of the stages."""
    seconds = np.full(micro_batches, np.inf)
    depth = len(terms)
    if depth > layers:
        return seconds
    block = np.array([t.block for t in terms])
    fixed = sum(t.charged for t in terms)
    tight = any(t.most[0] != t.most[-1] for t in terms)
    start = 1
    for stop in range(1, depth + 1) if tight else (depth,):
        last = micro_batches if stop == depth else min(stop, micro_batches)
        if start > last:
            break
        caps, given = fill(terms, layers, stop, charged=not hidden)
        if len(caps):
            sums = given @ block + fixed
            count = np.arange(start, last + 1)
            if steady:
                seconds[start - 1 : last] = caps.min() * count
            else:
                again = (count - 1) - hidden * np.minimum(count - 1, depth - 1)
                seconds[start - 1 : last] = (sums[:, None] + caps[:, None] * again).min(axis=0)
        start = last + 1
    return seconds


def split_layers(terms: Sequence[Terms], layers: int, micro_batches: int) -> tuple[int, ...]:
    """Layers by stage with the least pipeline time; raises ValueError where the memory forbids all."""
    caps, given = fill(terms, layers, micro_batches)
    if not len(caps):
        raise ValueError(f"{layers} layers do not fit into the memory of {len(terms)} stages")
    sums = given @ np.array([t.block for t in terms])
    best = int(np.argmin(sums + caps * (micro_batches - 1)))
    return tuple(int(n) for n in given[best])
