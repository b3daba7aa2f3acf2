"""Paired ratios and the interval that holds their median."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from _pairs import ratio, ratio_rows


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    found = ratio([2.0, 4.0, 6.0, 8.0, 10.0, 30.0, 14.0], [2.0] * 7)
    assert found.value == 4.0
    assert (found.low, found.high) == (1.0, 15.0)


def test_fewer_pairs_than_an_interval_needs_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 6"):
        ratio([1.0] * 5, [1.0] * 5)


def test_the_interval_holds_the_true_median_nineteen_times_of_twenty() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(400):
        found = ratio([rng.lognormvariate(0, 1) for _ in range(30)], [1.0] * 30)
        held += found.low <= 1.0 <= found.high
    assert held >= 0.93 * 400  # of so many, chance takes some


def test_a_ratio_above_its_goal_is_missed() -> None:
    value, interval = ratio_rows("x", ratio([1.2] * 6, [1.0] * 6), 1.1)
    assert (value.goal, value.met) == ("<= 1.1", False)
    assert interval.value == "1.200 to 1.200 (6 pairs)"
