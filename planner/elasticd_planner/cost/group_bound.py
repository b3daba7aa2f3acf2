"""A lower bound that holds whatever the search does: groups, node by node, in place of pipelines.

Theory of operation. A pipeline of `m` micro-batches on p stages, of which stage j has n_j of L layers at c_j
each, needs in 1F1B, with S the way of one micro-batch there and back, and every j (`pipeline_time`),

    S + (m - 1 - hidden x min(m - 1, p - 1)) n_j c_j  <=  T,        S >= sum_j n_j c_j.

By the formula hidden is 0; in the schedule it is the part of a stage's work that is forward, for a stage goes
ahead with as many forward passes as stages follow. Let o = max n_j c_j. For a given o the sum is least when the
cheapest groups are filled to o first, all but one full; then L = o (sum_full 1 / c_j + f / c_k), and dividing
by o

    m - 1 - hidden (p - 1)  <=  T / o - (full + f)  <=  sum over the groups used of (T / (L c_j) - 1)+,

so that the D pipelines of a plan take at most

    D (1 - hidden) + sum over all groups of (T / (L c) - 1)+ + hidden

micro-batches. The groups of a node depend on nothing but the node, so the sum is bounded node by node. With
`A` the most that k groups of u devices of a node reach in sum 1 / c, those with T / (L c) >= 1 add at most
T A / L - (1 - hidden) k; any others, no more than the devices left, add `hidden` each. The sum is the largest
of lines in T, so that Newton's method, from above, ends at the least T at which the bound reaches the batch.
In the steady state (m max_j t_j, `pipeline_time.Steady`) what is subtracted goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from elasticd_planner.cost.pipeline_time import Timing

#: Times this close (relatively) are one: what sums lose by rounding, and more.
_EXACT = 1e-12

#: (A, k, devices left over): the most that k groups of the other devices reach in sum 1 / c.
Paces = tuple[tuple[float, int, int], ...]


def by_slowest(rates: Sequence[float], widths: Sequence[int], block: Callable[[int, float], float]) -> Paces:
    """The bound where a group costs `block(width, its slowest member's rate)`: groups of neighbours in the
    order of rates are enough, since moving a faster device to a slower group helps nobody. Idle devices are the
    slowest."""
    ordered = sorted(rates)
    stops = range(1, len(ordered) + 1)
    runs = ((stop, width) for stop in stops for width in widths if width <= stop)
    return _reached(len(ordered), ((stop, w, 1 / block(w, ordered[stop - 1])) for stop, w in runs))


def by_speed(rates: Sequence[float], paces: Mapping[int, float]) -> Paces:
    """The bound where 1 / c of a group of width w is at most `paces[w]` x the sum of its members' speeds 1 /
    rate: for a choice of widths the fastest devices go to the widths of the best pace (rearrangement)."""
    total = list(accumulate(sorted((1 / rate for rate in rates), reverse=True), initial=0.0))
    widths = sorted(paces, key=lambda width: (-paces[width], width))
    runs = ((stop, width) for width in widths for stop in range(width, len(total)))
    return _reached(len(rates), ((stop, w, paces[w] * (total[stop] - total[stop - w])) for stop, w in runs))


def _reached(count: int, groups: Iterable[tuple[int, int, float]]) -> Paces:
    """The best that groups of `count` devices in a row reach. groups: (device after the last, width, 1 / c) of
    each that may be made, in turn."""
    best = [[-math.inf] * (count + 1) for _ in range(count + 1)]
    best[0][0] = 0.0
    for stop, width, gain in groups:
        for k in range(1, stop + 1):
            best[stop][k] = max(best[stop][k], best[stop - width][k - 1] + gain)
    return tuple(
        (pace, k, count - used)
        for used, row in enumerate(best)
        for k, pace in enumerate(row)
        if pace > -math.inf
    )


def hull(paces: Paces, hidden: float) -> Paces:
    """Those that are best for some T: more groups, and fewer devices left over, only where they reach more.
    What is left over counts only where time is hidden."""
    kept: list[tuple[float, int, int]] = []
    for pace, k, spare in sorted(paces, key=lambda entry: (entry[1], -entry[0], -entry[2])):
        spare = spare if hidden else 0
        if all(pace > known or spare > left for known, _, left in kept):
            kept.append((pace, k, spare))
    return tuple(kept)


def lines(choices: Paces, timing: Timing) -> list[tuple[float, float]]:
    """Micro-batches that a node adds at most, as lines: for a unit of T / L, and at no time."""
    hidden, shown = timing.hidden, timing.fill - timing.hidden
    return [(pace, hidden * spare - shown * k) for pace, k, spare in choices]


def least(
    nodes: Sequence[tuple[Paces, int]],
    layers: int,
    micro_batches: int,
    pipelines: int,
    timing: Timing,
) -> float:
    """The least T at which the bound lets `pipelines` take the batch; `nodes` are (choices, how many)."""
    fixed = pipelines * (timing.fill - timing.hidden)
    nodes_lines = [(lines(choices, timing), count) for choices, count in nodes]
    time = math.inf
    chosen = [(max(lines), count) for lines, count in nodes_lines]
    while True:
        pace = sum(count * line[0] for line, count in chosen)
        lacking = micro_batches - fixed - sum(count * line[1] for line, count in chosen)
        if pace <= 0:
            return math.inf if lacking > 0 else 0.0
        if lacking <= 0 or lacking / pace >= time * (1 - _EXACT):
            return max(0.0, min(time, lacking / pace)) * layers * (1 - _EXACT)
        time = lacking / pace
        chosen = [
            (max(lines, key=lambda line: time * line[0] + line[1]), count) for lines, count in nodes_lines
        ]
