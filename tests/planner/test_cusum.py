"""The sequential test: as quick and as quiet as its theory says, whatever single steps do."""

import math

import numpy as np
import pytest
from elasticd_planner.detection.cusum import NONE, CusumState, CusumTest, spread_of, trimmed
from elasticd_planner.numeric import middle
from hypothesis import given
from hypothesis import strategies as st

TENTH = CusumTest.of(math.log(1.1), 0.05, 1e-6, 3)


def steps(test: CusumTest, residuals: list[float]) -> int | None:
    """How many residuals it takes."""
    evidence = NONE
    for count, residual in enumerate(residuals, start=1):
        evidence = test.add(evidence, residual)
        if test.passed(evidence):
            return count
    return None


@given(st.floats(0.25, 10), st.integers(1, 6))
def test_what_is_far_out_takes_the_least_steps_and_no_fewer(residual: float, min_steps: int) -> None:
    test = CusumTest.of(math.log(1.1), 0.05, 1e-6, min_steps)
    assert steps(test, [residual] * 10) == min_steps


@given(st.lists(st.floats(-3, 3), max_size=40), st.data())
def test_single_wild_steps_and_pairs_of_them_never_pass(wild: list[float], data: st.DataObject) -> None:
    """Between any two of them come steps enough that were none."""
    residuals = []
    for residual in wild:
        residuals += [residual] * data.draw(st.integers(1, 2)) + [0.0] * 4
    assert steps(TENTH, residuals) is None


def test_noise_alone_passes_less_often_than_it_may() -> None:
    """A limit of 7 alarms once in e^7 = 1,100 steps at most; that of the default is out of a test's reach."""
    test = CusumTest.of(math.log(1.1), 0.05, math.exp(-7), 3)
    rng = np.random.Generator(np.random.Philox(key=[7, 0]))
    evidence, alarms, count = NONE, 0, 40_000
    for residual in rng.normal(0, 0.05, count).tolist():
        evidence = test.add(evidence, residual)
        if test.passed(evidence):
            evidence, alarms = NONE, alarms + 1
    assert alarms < count / math.exp(7)


def test_a_small_shift_takes_about_as_long_as_its_evidence_says() -> None:
    rng = np.random.Generator(np.random.Philox(key=[8, 0]))
    taken = sorted(steps(TENTH, rng.normal(TENTH.shift, 0.05, 100).tolist()) or 100 for _ in range(300))
    expected = TENTH.limit / TENTH.mean_weight
    assert 0.7 * expected < taken[150] < 1.2 * expected


def test_wild_steps_that_did_not_last_count_as_usual_ones() -> None:
    evidence = TENTH.add(TENTH.add(NONE, 1.0), 1.0)
    assert evidence == CusumState(total=0.0, clear=2, since=2)
    after = TENTH.add(evidence, TENTH.shift / 2)
    assert (after.clear, after.since) == (0, 3)
    assert after.total == pytest.approx(2 * TENTH.mean_weight)


def test_trimmed_means_ignore_the_ends() -> None:
    assert trimmed([1.0]) == 1.0
    assert trimmed([1.0, 3.0]) == 2.0
    assert trimmed([9.0, 1.0, 2.0]) == 2.0
    assert trimmed([1.0, 2.0, 3.0, 4.0, 5.0, 100.0]) == 3.5


def test_the_spread_is_that_of_the_signal_whatever_some_steps_do() -> None:
    rng = np.random.Generator(np.random.Philox(key=[9, 0]))
    signal = rng.normal(3.0, 0.05, 2000)
    signal[::25] += 2.0
    assert spread_of(middle(np.sort(np.abs(np.diff(signal))))) == pytest.approx(0.05, rel=0.15)
