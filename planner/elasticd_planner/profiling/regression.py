"""A section's coefficients from what was measured of it, and how far the fit is from the measurements.

    seconds = fixed + per_token x tokens x share x slowdown[width]

Least squares in relative errors, so that a short pass counts as much as a long one, with no coefficient
below zero. `fixed` is one for all widths: what a pass costs before its first token (kernel launches, Python).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from elasticd_planner.profiling.samples import SectionSample
from elasticd_planner.value import Value, refuse

#: Token counts that can be left out one by one, for the check, from.
HELD_OUT_FROM = 3


class Errors(Value, frozen=True, kw_only=True):
    """Relative errors |predicted / measured - 1| over some measurements."""

    median: float
    worst: float


class Coefficients(Value, frozen=True, kw_only=True):
    """fixed: seconds of a pass. per_token: seconds of one token on the whole section. slowdown: by width, how
    many times longer a part takes than that part of the whole; 1 at the least width that was measured."""

    fixed: float
    per_token: float
    slowdown: dict[int, float]

    def seconds(self, width: int, share: float, tokens: float) -> float:
        """Forward and backward of one micro-batch; raises KeyError for a width that was not measured."""
        return self.fixed + self.per_token * self.slowdown[width] * tokens * share


class SectionFit(Value, frozen=True, kw_only=True):
    """A section's coefficients with the errors at the measurements, by width, and `held_out`: at each token
    count by the coefficients fitted without it (None: fewer than three counts). forward is its part of
    forward and backward; recompute how many times longer the section takes that recomputes (None: not
    measured); noise the median of the timings'."""

    section: str
    coefficients: Coefficients
    errors: dict[int, Errors]
    held_out: Errors | None
    forward: float
    recompute: float | None
    noise: float


def regress(timings: Sequence[SectionSample], *, one_size: bool = False) -> SectionFit:
    """Fits one section's timings.

    Args:
        timings: of the section.
        one_size: there may be a single token count, that of all passes to come. All seconds go by the token
            then.

    Raises:
        Invalid: there are fewer than two token counts at a width.
    """
    if not timings:
        refuse("nothing was measured of a section")
    section = timings[0].section
    by_width: dict[int, set[int]] = {}
    for timing in timings:
        by_width.setdefault(timing.width, set()).add(timing.tokens)
    for width, counts in by_width.items():
        if len(counts) < 2 and not one_size:
            refuse(f"{section} at width {width}: a fit needs two token counts at least, not {sorted(counts)}")
    coefficients = solve(timings)
    again = [timing.recomputed / timing.seconds for timing in timings if timing.recomputed is not None]
    return SectionFit(
        section=section,
        coefficients=coefficients,
        errors={
            width: errors(coefficients, [timing for timing in timings if timing.width == width])
            for width in sorted(by_width)
        },
        held_out=_held_out(timings),
        forward=median(timing.forward / timing.seconds for timing in timings),
        recompute=max(1.0, median(again)) if again else None,
        noise=median(timing.noise for timing in timings),
    )


def solve(timings: Sequence[SectionSample]) -> Coefficients:
    """The coefficients of least relative squares over timings of one section. Where noise leaves no growth at
    some width, one slope stands for all of them; the errors then say how well."""
    widths = sorted({timing.width for timing in timings})
    work = np.array([timing.tokens * timing.share for timing in timings])
    mine = np.array([[timing.width == width for width in widths] for timing in timings])
    if len({timing.tokens for timing in timings}) == 1:
        seconds = [timing.seconds for timing in timings]
        slopes = [
            median(seconds[at] / work[at] for at, timing in enumerate(timings) if timing.width == width)
            for width in widths
        ]
        return _coefficients(0.0, slopes, widths)
    fixed, slopes = _slopes(timings, mine * work[:, None])
    if min(slopes) <= 0:
        fixed, slopes = _slopes(timings, work[:, None])
        slopes *= len(widths)
    return _coefficients(fixed, slopes, widths)


def _coefficients(fixed: float, slopes: Sequence[float], widths: Sequence[int]) -> Coefficients:
    """From the seconds of a token at each width."""
    per_token = slopes[0]
    factors = [slope / per_token if per_token else 1.0 for slope in slopes]
    return Coefficients(fixed=fixed, per_token=per_token, slowdown=dict(zip(widths, factors, strict=True)))


def _slopes(timings: Sequence[SectionSample], columns: NDArray[np.float64]) -> tuple[float, list[float]]:
    seconds = np.array([timing.seconds for timing in timings])
    columns = np.column_stack([np.ones(len(timings)), columns]) / seconds[:, None]
    fixed, *slopes = least_squares(columns, np.ones(len(timings))).tolist()
    return fixed, slopes


def errors(coefficients: Coefficients, timings: Sequence[SectionSample]) -> Errors:
    """The errors of the coefficients at these timings."""
    off = [abs(coefficients.seconds(t.width, t.share, t.tokens) / t.seconds - 1) for t in timings]
    return Errors(median=median(off), worst=max(off))


def least_squares(columns: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 with the least |columns x - values|: whatever comes out negative is taken out, the most negative
    first (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23, without its way back)."""
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    left = list(range(columns.shape[1]))
    found = np.zeros(columns.shape[1])
    while left:
        part, *_ = np.linalg.lstsq(columns[:, left] / scale[left], values, rcond=None)
        worst = int(np.argmin(part))
        if part[worst] >= 0:
            found[left] = part / scale[left]
            break
        del left[worst]
    return found


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(intercept, slope), neither negative, of y over x > 0 in least relative squares. With one x, a slope
    alone."""
    x = np.array([float(point[0]) for point in points])
    y = np.array([float(point[1]) for point in points])
    if len(set(x.tolist())) == 1:
        return 0.0, float(median((y / x).tolist()))
    intercept, slope = least_squares(np.column_stack([1 / y, x / y]), np.ones(len(points))).tolist()
    return intercept, slope


def _held_out(timings: Sequence[SectionSample]) -> Errors | None:
    """The prediction of each token count by all the others."""
    counts = sorted({timing.tokens for timing in timings})
    if len(counts) < HELD_OUT_FROM:
        return None
    off = []
    for count in counts:
        found = solve([timing for timing in timings if timing.tokens != count])
        out = [timing for timing in timings if timing.tokens == count and timing.width in found.slowdown]
        off += [abs(found.seconds(t.width, t.share, t.tokens) / t.seconds - 1) for t in out]
    return Errors(median=median(off), worst=max(off)) if off else None
