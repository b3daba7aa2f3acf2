"""Micro-batches over unequal pipelines, exact: a pipeline's seconds are given by lines, or by a curve.

By lines (`split_by_lines`, for any number of pipelines) a pipeline takes m micro-batches in min over them of
(m - 1) o + S; by a curve (`split_micro_batches`) in any seconds that rise with m. The least T at
which all pipelines together take the batch is found by bisection; what is too much then is taken from whoever
is slowest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elasticd_planner.numeric import EQUAL, Floats, Ints


@dataclass(frozen=True, kw_only=True)
class Line:
    """The lines of one pipeline, and the least micro-batches that it must take."""

    caps: Floats  # o: seconds of the slowest stage
    sums: Floats  # S: seconds of the first micro-batch
    least: int = 1

    def each(self, micro_batches: int) -> Floats:
        """Seconds by line."""
        return (micro_batches - 1) * self.caps + self.sums

    def seconds(self, micro_batches: int) -> float:
        """Seconds of the best line; inf where there is none."""
        return float(self.each(micro_batches).min(initial=math.inf))

    def capacity(self, limit: float) -> int:
        """Micro-batches within `limit`; 0 where that is less than the least."""
        count = math.floor(float(((limit * (1 + EQUAL) - self.sums) / self.caps).max()) + 1)
        return count if count >= self.least else 0


def split_by_lines(lines: Sequence[Line], total: int) -> tuple[int, ...] | None:
    """Micro-batches by pipeline with the least time of the slowest; None where the least is too much."""
    if sum(line.least for line in lines) > total:
        return None
    same: dict[tuple[bytes, bytes, int], list[int]] = {}
    for index, line in enumerate(lines):
        same.setdefault((line.caps.tobytes(), line.sums.tobytes(), line.least), []).append(index)
    distinct = [(lines[indices[0]], len(indices)) for indices in same.values()]
    if len(distinct) == 1:
        most, rest = divmod(total, len(lines))
        return (most + 1,) * rest + (most,) * (len(lines) - rest)

    def excess_at(limit: float) -> int:
        """Micro-batches beyond the total that are done within the limit; negative where it is not enough."""
        done = [(line.capacity(limit), count) for line, count in distinct]
        return sum(m * count for m, count in done) - total if all(m for m, _ in done) else -1

    high = max(line.seconds(max(total, line.least)) for line, _ in distinct)
    low, excess = max(line.seconds(line.least) for line, _ in distinct), 1
    while excess and high - low > high * EQUAL / 4:
        middle = (low + high) / 2
        if (more := excess_at(middle)) >= 0:
            high, excess = middle, more
        else:
            low = middle
    given = [line.capacity(high) for line in lines]
    excess = sum(given) - total
    heap = [
        (-round(line.seconds(m), 9), -index)
        for index, (line, m) in enumerate(zip(lines, given, strict=True))
        if m > line.least
    ]
    heapq.heapify(heap)
    while excess:
        _, negative = heapq.heappop(heap)
        index = -negative
        given[index] -= 1
        excess -= 1
        if given[index] > lines[index].least:
            seconds = round(lines[index].seconds(given[index]), 9)
            heapq.heappush(heap, (-seconds, negative))
    return tuple(given)


def pareto(caps: Floats, sums: Floats) -> Ints:
    """The indices of the lines that are best for some number of micro-batches."""
    order = np.lexsort((sums, caps))
    rising = sums[order]
    before = np.concatenate([[math.inf], np.minimum.accumulate(rising)[:-1]])
    kept: Ints = order[rising < before * (1 - EQUAL)]
    return kept


def capacity(seconds: Floats, limit: float) -> int:
    """The most micro-batches that a pipeline with this curve finishes within `limit`."""
    return int(np.searchsorted(seconds, limit * (1 + EQUAL), side="right"))


def split_micro_batches(
    curves: Sequence[Floats], total: int, least: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """Micro-batches by pipeline, at least one each (or `least`), with the least time of the slowest pipeline;
    among those the last micro-batches are taken from whoever is slowest with them. None where it is
    impossible."""
    least = least or (1,) * len(curves)
    if total < sum(least):
        return None
    values = np.unique(np.concatenate([c[np.isfinite(c)] for c in curves]))
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        given = [capacity(c, float(values[middle])) for c in curves]
        if all(m >= n for m, n in zip(given, least, strict=True)) and sum(given) >= total:
            high = middle
        else:
            low = middle + 1
    if low == len(values):
        return None
    given = [capacity(c, float(values[low])) for c in curves]
    while sum(given) > total:
        spare = [i for i, m in enumerate(given) if m > least[i]]
        given[max(spare, key=lambda i: (round(float(curves[i][given[i] - 1]), 9), i))] -= 1
    return tuple(given)
