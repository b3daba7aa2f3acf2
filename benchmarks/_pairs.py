"""Two ways to do the same thing, taken in turns: the ratio of their times, and how sure it is.

Each pair is one ratio, so that what slows the machine for a while slows both halves. The value is the median
of the ratios; the interval holds the true median with at least 95 % whatever the ratios' distribution is, for
it is made of order statistics (Conover, Practical Nonparametric Statistics, 1999, section 3.2).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from _results import Kind, Row, row

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The median of paired ratios, and the interval that holds the true one."""

    value: float
    low: float
    high: float
    pairs: int

    @property
    def noise(self) -> float:
        """Half the interval's width, as a fraction of the value."""
        return (self.high - self.low) / 2 / self.value


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of ours over theirs, pair by pair. Raises ValueError for fewer pairs than an interval needs (6)."""
    found = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    low = _outer(len(found))
    return Ratio(value=statistics.median(found), low=found[low], high=found[-1 - low], pairs=len(found))


def _outer(count: int) -> int:
    """How many of the smallest, and of the largest, lie outside of the interval."""
    tail, below = 0.0, 0
    while True:
        tail += math.comb(count, below) / 2**count
        if tail > (1 - CONFIDENCE) / 2:
            break
        below += 1
    if below == 0:
        raise ValueError(f"{count} pairs are too few for an interval: there must be at least 6")
    return below - 1


def ratio_rows(name: str, found: Ratio, most: float, *, kind: Kind = "measured") -> Iterator[Row]:
    """The ratio against its goal, and the interval in words."""
    yield row(name, found.value, "x", kind=kind, goal=f"<= {most}", met=found.value <= most, noise=found.noise)
    yield row(
        f"{name}: 95 % interval", f"{found.low:.3f} to {found.high:.3f} ({found.pairs} pairs)", "", kind=kind
    )
