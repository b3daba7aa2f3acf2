"""A lower bound that holds whatever the search does: groups, node by node, in place of pipelines.

Theory of operation. A pipeline of `m` micro-batches whose stages take t_j = n_j c_j needs, in 1F1B,

    (m - 1) max_j t_j + sum_j t_j  <=  T.

Let o = max_j t_j. For a given o the sum is least when the cheapest groups are filled to o first, all but one
full; then L = o (sum_full 1 / c_j + f / c_k) and m - 1 = T / o - (full + f), which is at most

    sum over the groups used of (T / (L c_j) - 1)+,

so that the D pipelines of a plan take at most D + sum over all groups of (T / (L c) - 1)+ micro-batches. The
groups of a node depend on nothing but the node, so the sum is bounded node by node: with `A_k` the most that
k groups of a node reach in sum 1 / c, a node adds at most max_k (T A_k / L - k). The least T at which the
bound reaches the batch is found by bisection. For the steady figure (m max_j t_j) the "- 1" and D go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

Paces = tuple[float, ...]

#: (A_k, k) worth having.
Choices = tuple[tuple[float, int], ...]


def by_slowest(rates: Sequence[float], widths: Sequence[int], block: Callable[[int, float], float]) -> Paces:
    """A_k where a group costs `block(width, its slowest member's rate)`: groups of neighbours in the order of
    rates are enough, since moving a faster device to a slower group helps nobody. Idle devices are the
    slowest. Returns A_0 ... A_n, -inf where no k groups can be made."""
    ordered = sorted(rates)
    count = len(ordered)
    best = [[-math.inf] * (count + 1) for _ in range(count + 1)]
    best[0][0] = 0.0
    for stop in range(1, count + 1):
        for width in widths:
            if width <= stop:
                gain = 1 / block(width, ordered[stop - 1])
                for k in range(1, stop + 1):
                    best[stop][k] = max(best[stop][k], best[stop - width][k - 1] + gain)
    return tuple(max(row[k] for row in best) for k in range(count + 1))


def by_speed(rates: Sequence[float], paces: Mapping[int, float]) -> Paces:
    """A_k where 1 / c of a group of width w is at most `paces[w]` x the sum of its members' speeds 1 / rate:
    for a choice of widths the fastest devices go to the widths of the best pace (rearrangement)."""
    speeds = sorted((1 / rate for rate in rates), reverse=True)
    count = len(speeds)
    total = [0.0]
    for speed in speeds:
        total.append(total[-1] + speed)
    best = [[-math.inf] * (count + 1) for _ in range(count + 1)]
    best[0][0] = 0.0
    for width in sorted(paces, key=lambda width: (-paces[width], width)):
        for stop in range(width, count + 1):
            gain = paces[width] * (total[stop] - total[stop - width])
            for k in range(1, stop + 1):
                best[stop][k] = max(best[stop][k], best[stop - width][k - 1] + gain)
    return tuple(max(row[k] for row in best) for k in range(count + 1))


def hull(paces: Paces) -> Choices:
    """The (A_k, k) that are best for some T: more groups only where they reach more."""
    kept: list[tuple[float, int]] = []
    for k, pace in enumerate(paces):
        if not kept or pace > kept[-1][0]:
            kept.append((pace, k))
    return tuple(kept)


def worth(choices: Choices, time: float, *, steady: bool) -> float:
    """Micro-batches that a node adds at most; `time` is T / L."""
    return max(time * pace - (0 if steady else k) for pace, k in choices)


def least(
    nodes: Sequence[tuple[Choices, int]],
    layers: int,
    micro_batches: int,
    pipelines: int,
    *,
    steady: bool,
) -> float:
    """The least T at which the bound lets `pipelines` take the batch; `nodes` are (choices, how many)."""
    fixed = 0 if steady else pipelines

    def most(time: float) -> float:
        return fixed + sum(count * worth(choices, time, steady=steady) for choices, count in nodes)

    low, high = 0.0, 1.0
    if most(0.0) >= micro_batches:
        return 0.0
    while most(high) < micro_batches:
        low, high = high, high * 2
        if not math.isfinite(high):
            return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if most(middle) >= micro_batches else (middle, high)
    return low * layers
