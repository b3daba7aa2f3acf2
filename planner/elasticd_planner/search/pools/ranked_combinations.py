"""Combinations of the nodes' divisions in descending order of what they are thought to add."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from elasticd_planner.numeric import Floats

#: Divisions that nodes of one kind mix, two at a time.
MIXED = 10

#: Divisions and how many nodes use each.
DivisionUses = tuple[tuple[int, int], ...]


def choices(divisions: range, count: int, gains: Floats) -> list[tuple[float, DivisionUses]]:
    """How `count` nodes of a kind may be divided: all alike, or in two ways; (gain, choice), best first."""
    best = sorted(divisions, key=lambda i: (-gains[i], i))
    made: list[tuple[float, DivisionUses]] = [(float(gains[i]) * count, ((i, count),)) for i in best]
    if count > 1:
        for a, i in enumerate(best[:MIXED]):
            for j in best[a + 1 : MIXED]:
                for some in range(1, count):
                    gain = float(gains[i]) * (count - some) + float(gains[j]) * some
                    made.append((gain, ((i, count - some), (j, some))))
    return sorted(made, key=lambda entry: (-entry[0], entry[1]))


def products(options: Sequence[list[tuple[float, DivisionUses]]]) -> Iterator[list[DivisionUses]]:
    """One option of each list, in descending order of the sum of their gains."""
    if not all(options):
        return
    start = (0,) * len(options)
    heap = [(-sum(listed[0][0] for listed in options), start)]
    seen = {start}
    while heap:
        gain, where = heapq.heappop(heap)
        yield [listed[i][1] for listed, i in zip(options, where, strict=True)]
        for axis, listed in enumerate(options):
            following = where[axis] + 1
            if following < len(listed):
                after = (*where[:axis], following, *where[axis + 1 :])
                if after not in seen:
                    seen.add(after)
                    heapq.heappush(heap, (gain + listed[where[axis]][0] - listed[following][0], after))
