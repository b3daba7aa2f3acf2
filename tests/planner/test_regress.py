"""A section's coefficients are found again in what they predict, and the error says how well."""

from __future__ import annotations

import numpy as np
import pytest
from elasticd_planner.profiling.regression import Coefficients, least_squares, line, regress, solve
from elasticd_planner.profiling.samples import SectionSample
from elasticd_planner.value import Invalid
from hypothesis import given
from hypothesis import strategies as st

TOKENS = (256, 512, 1024, 2048)


def timing(truth: Coefficients, width: int, tokens: int, share: float, factor: float = 1.0) -> SectionSample:
    seconds = truth.seconds(width, share, tokens) * factor
    return SectionSample(
        section="block", width=width, share=share, tokens=tokens, forward=seconds / 3, backward=seconds * 2 / 3
    )


@st.composite
def truths(draw: st.DrawFn) -> Coefficients:
    widths = sorted(draw(st.sets(st.integers(1, 8), min_size=1, max_size=4)))
    return Coefficients(
        fixed=draw(st.sampled_from([0.0, 1e-6, 1e-3, 0.1])),
        per_token=draw(st.floats(1e-7, 1e-3)),
        slowdown={width: 1.0 if width == widths[0] else draw(st.floats(0.5, 4)) for width in widths},
    )


@given(truths(), st.lists(st.sampled_from(TOKENS), min_size=2, max_size=4, unique=True), st.floats(0.8, 1.2))
def test_exact_times_give_the_coefficients_back(truth: Coefficients, counts: list[int], uneven: float) -> None:
    shares = {width: min(1.0, uneven / width) for width in truth.slowdown}
    found = solve([timing(truth, width, count, shares[width]) for width in shares for count in counts])
    assert found.slowdown.keys() == truth.slowdown.keys()
    for width, share in shares.items():
        for tokens in (100, 700, 5000):  # none of them was measured
            expected = truth.seconds(width, share, tokens)
            assert found.seconds(width, share, tokens) == pytest.approx(expected, rel=1e-6, abs=1e-12)


TRUTH = Coefficients(fixed=2e-3, per_token=1e-5, slowdown={1: 1.0, 2: 1.1, 4: 1.4})


def noisy(truth: Coefficients, spread: float, seed: int = 0) -> list[SectionSample]:
    rng = np.random.default_rng(seed)
    return [
        timing(truth, width, tokens, 1 / width, 1 + spread * float(rng.standard_normal()))
        for width in truth.slowdown
        for tokens in TOKENS
    ]


def test_error_of_the_fit_is_that_of_the_measurements() -> None:
    exact = regress(noisy(TRUTH, 0.0))
    assert exact.held_out is not None
    assert max(e.worst for e in exact.errors.values()) < 1e-9
    assert exact.held_out.worst < 1e-9
    fit = regress(noisy(TRUTH, 0.03))
    assert fit.held_out is not None
    assert 0.002 < max(e.median for e in fit.errors.values()) < 0.06
    assert fit.held_out.median > min(e.median for e in fit.errors.values())
    for width in TRUTH.slowdown:
        predicted = fit.coefficients.seconds(width, 1 / width, 1024)
        assert predicted == pytest.approx(TRUTH.seconds(width, 1 / width, 1024), rel=0.1)


def test_short_passes_count_as_much_as_long_ones() -> None:
    bent = [timing(TRUTH, 1, tokens, 1.0, 1.2 if tokens == 2048 else 1.0) for tokens in TOKENS]
    slope, fixed = np.polyfit(TOKENS, [t.seconds for t in bent], 1)
    unweighted = max(abs((fixed + slope * t.tokens) / t.seconds - 1) for t in bent)
    assert regress(bent).errors[1].worst < unweighted / 1.5


def test_held_out_sees_what_a_line_cannot_explain() -> None:
    curved = [
        SectionSample(section="head", width=1, share=1.0, tokens=t, forward=1e-9 * t**2, backward=1e-9 * t**2)
        for t in TOKENS
    ]
    fit = regress(curved)
    assert fit.held_out is not None
    assert fit.held_out.worst > fit.errors[1].worst > 0.1
    assert fit.coefficients.fixed == 0.0  # never below


def test_two_counts_leave_none_to_hold_out() -> None:
    fit = regress([timing(TRUTH, 1, tokens, 1.0) for tokens in TOKENS[:2]])
    assert fit.held_out is None
    assert fit.coefficients.fixed == pytest.approx(2e-3)


def test_one_count_is_refused_with_the_width() -> None:
    both = [timing(TRUTH, 1, tokens, 1.0) for tokens in TOKENS]
    with pytest.raises(Invalid, match=r"block at width 2: a fit needs two token counts at least, not \[512\]"):
        regress([*both, timing(TRUTH, 2, 512, 0.5)])


def test_where_a_width_does_not_grow_one_slope_stands_for_all() -> None:
    flat = timing(TRUTH, 2, TOKENS[0], 0.5).seconds
    odd = [
        SectionSample(
            section="embed", width=2, share=0.5, tokens=t, forward=flat * (1 - t / 10_000), backward=0.0
        )
        for t in TOKENS
    ]
    found = solve([*(timing(TRUTH, 1, tokens, 1.0) for tokens in TOKENS), *odd])
    assert found.slowdown == {1: 1.0, 2: 1.0}
    assert found.per_token > 0


def test_forward_and_recomputation_are_medians_of_parts() -> None:
    timings = [
        SectionSample(
            section="block", width=1, share=1, tokens=t, forward=t * 1.0, backward=t * 3.0, recomputed=t * 5.0
        )
        for t in TOKENS
    ]
    fit = regress(timings)
    assert fit.forward == pytest.approx(0.25)
    assert fit.recompute == pytest.approx(1.25)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=3))
def test_least_squares_finds_what_is_not_negative(x: list[float]) -> None:
    columns = np.random.default_rng(1).uniform(0.1, 1, (6, len(x)))
    assert least_squares(columns, columns @ np.array(x)) == pytest.approx(np.array(x), abs=1e-6)


def test_line_through_points() -> None:
    assert line([(1, 5.0), (2, 7.0), (4, 11.0)]) == pytest.approx((3.0, 2.0))
    assert line([(2, 6.0), (2, 8.0)]) == (0.0, 3.5)
    assert line([(1, 1.0), (2, 3.0)])[0] == 0.0
