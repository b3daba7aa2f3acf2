"""Rows of packed batches played by events, and divisions by brute force: written without the planner's own
code.

A lane begins its rows in order. A row with a part of a shared sequence begins when all the lanes that share
one, directly or through others, have come to it, and goes layer by layer with the slowest of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import product

from elasticd_planner.spec.batch import BatchRow


def seconds(rows: Sequence[BatchRow], slowdown: Sequence[int], linear: int, fixed: int) -> Fraction:
    """When the last lane of a pipeline of one stage ends; exchanges take no time."""
    ready = [Fraction(0) for _ in slowdown]
    for row in rows:
        for lanes in meeting(row):
            works = [
                fixed
                + sum(Fraction(p.tokens * (linear + p.length) * slowdown[lane], 64) for p in row.lanes[lane])
                for lane in lanes
            ]
            end = max(ready[lane] for lane in lanes) + max(works)
            for lane in lanes:
                ready[lane] = end
    return max(ready)


def meeting(row: BatchRow) -> list[set[int]]:
    """The lanes that have something in a row, in sets that share sequences."""
    sets: list[set[int]] = []
    samples = {piece.sample for lane in row.lanes for piece in lane}
    for lanes in [
        {at for at, lane in enumerate(row.lanes) if any(p.sample == s for p in lane)} for s in samples
    ]:
        touched = [each for each in sets if each & lanes]
        sets = [each for each in sets if not each & lanes] + [lanes.union(*touched)]
    return sets


def best_laminar(
    lengths: Sequence[int], vertices: Sequence[tuple[int, int]], capacity: int, linear: int, fixed: int
) -> Fraction:
    """The least time of any assignment of sequences to vertices (equal lanes) and of these to rows."""
    lanes = max(stop for _, stop in vertices)
    best: int | None = None
    for chosen in product(range(len(vertices)), repeat=len(lengths)):
        loads = [0] * lanes  # in twelfths, so that two, three and four lanes divide
        for number in set(chosen):
            a, b = vertices[number]
            own = tuple(length for length, each in zip(lengths, chosen, strict=True) if each == number)
            rows = _fewest_rows(own, capacity * (b - a))
            if not rows:
                break
            time = sum(12 * each * (linear + each) // (b - a) for each in own) + 12 * rows * fixed
            for lane in range(a, b):
                loads[lane] += time
        else:
            best = max(loads) if best is None else min(best, max(loads))
    assert best is not None, "no division holds the sequences"
    return Fraction(best, 12)


@lru_cache(maxsize=10_000)
def _fewest_rows(lengths: tuple[int, ...], capacity: int) -> int:
    """By trying every way to put sequences into rows; 0: none has room."""
    if max(lengths) > capacity:
        return 0
    return min(len(rows) for rows in _partitions(list(lengths)) if all(sum(row) <= capacity for row in rows))


def _partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    head, *rest = items
    for found in _partitions(rest):
        yield [[head], *found]
        for at in range(len(found)):
            yield [*found[:at], [head, *found[at]], *found[at + 1 :]]
