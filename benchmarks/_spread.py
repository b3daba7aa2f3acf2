"""Rows of the spread of seconds: median, 95th percentile and maximum."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from _results import Row, row


def p95(values: Sequence[float]) -> float:
    """The least of the values that 95 % of them do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(0.95 * len(ordered)) - 1]


def spread(name: str, values: Sequence[float], most: float | None = None, goal: str = "") -> Iterator[Row]:
    """Median, p95 and maximum in seconds; `most` is what p95 must not exceed."""
    yield row(f"{name}, median", statistics.median(values), "s")
    high = p95(values)
    text = goal or f"<= {most} s"
    met = None if most is None else high <= most
    yield row(f"{name}, p95 of {len(values)}", high, "s", goal=text if most is not None else None, met=met)
    yield row(f"{name}, maximum", max(values), "s")
