"""The best divisions of a node with unlike devices: the most that any groups of given sizes reach.

Theory of operation. With v devices used by class and s groups made by size,

    best[v, s] = max over groups g of best[v - g, s - size(g)] + 1 / c(g)

is the most that such groups reach in sum 1 / c, for all v and s at once, in arrays. Devices may be idle. The
groups are found by walking back. The ranking of divisions charges a group for being one, whatever it costs, so
that of as many groups those that reach the most lead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from elasticd_planner.numeric import EQUAL, Floats

#: Sets of sizes that lead, of as many groups.
LEADING = 2

#: The most numbers in the array.
LARGEST = 1 << 18

#: The devices of a group by class; of a division the groups by size.
Taken = tuple[int, ...]


def possible(counts: Sequence[int], widths: Sequence[int]) -> list[Taken]:
    """The devices by class that a group may be made of, wide groups first."""
    listed = (t for t in product(*(range(count + 1) for count in counts)) if sum(t) in widths)
    return sorted(listed, key=lambda t: (sum(t), t), reverse=True)


def tractable(counts: Sequence[int], widths: Sequence[int]) -> bool:
    """Returns True if the array is small."""
    sizes = math.prod(sum(counts) // width + 1 for width in widths)
    return math.prod(count + 1 for count in counts) * sizes <= LARGEST


def add_groups(best: Floats, taken: Sequence[int], counts: Sequence[int], pace: float | Floats) -> None:
    """Raises `best` [devices used by class, ...] in place to what any number of these groups more reaches."""
    after = best[tuple(slice(n, None) for n in taken)]
    before = best[tuple(slice(0, size - n) for n, size in zip(taken, best.shape, strict=False))]
    for _ in range(min(have // n for have, n in zip(counts, taken, strict=False) if n)):
        np.maximum(after, before + pace, out=after)


class BestPartitions:
    """The divisions of a node with so many devices by class. `paces`: 1 / c of each of the `groups`."""

    def __init__(
        self, counts: Sequence[int], widths: Sequence[int], groups: Sequence[Taken], paces: Sequence[float]
    ) -> None:
        self.counts, self.widths = tuple(counts), tuple(widths)
        self._steps = [(*taken, *(int(sum(taken) == width) for width in widths)) for taken in groups]
        self._paces = tuple(paces)
        made = [sum(counts) // width + 1 for width in widths]
        best = np.full((*(count + 1 for count in counts), *made), -np.inf)
        best.reshape(-1, math.prod(made))[:, 0] = 0.0
        for step, pace in zip(self._steps, self._paces, strict=True):
            add_groups(best, step, counts, pace)
        self._best = best
        whole = best[self.counts]
        #: The most by how many groups of each size there are.
        self.reached: dict[Taken, float] = {
            tuple(map(int, sizes)): float(whole[tuple(sizes)]) for sizes in np.argwhere(np.isfinite(whole))
        }

    def paces(self) -> Iterator[tuple[float, int, int]]:
        """The values that a bound reads (`group_bound.Paces`): (the most, how many groups, devices left
        over)."""
        for sizes, pace in self.reached.items():
            used = sum(n * width for n, width in zip(sizes, self.widths, strict=True))
            yield pace, sum(sizes), sum(self.counts) - used

    def divisions(self) -> Iterator[tuple[Taken, ...]]:
        """Those that lead, by their groups."""
        by_number: dict[int, list[tuple[float, Taken]]] = {}
        for sizes, pace in self.reached.items():
            if any(sizes):
                by_number.setdefault(sum(sizes), []).append((-pace, sizes))
        for number in sorted(by_number):
            for _, sizes in sorted(by_number[number])[:LEADING]:
                yield self._walked_back(sizes)

    def _walked_back(self, sizes: Taken) -> tuple[Taken, ...]:
        """Groups of these sizes that reach the most."""
        found: list[Taken] = []
        at, classes = (*self.counts, *sizes), len(self.counts)
        while any(at[classes:]):
            least = float(self._best[at]) * (1 - EQUAL)
            for step, pace in zip(self._steps, self._paces, strict=True):
                before = tuple(have - n for have, n in zip(at, step, strict=True))
                if min(before) >= 0 and self._best[before] + pace >= least:
                    found.append(step[:classes])
                    at = before
                    break
        return tuple(found)
