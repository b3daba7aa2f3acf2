"""Agreed slowdowns: they follow a straggler in a few steps, and do not follow noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from elasticd_planner.batching.lane_slowdown import LEAST, MOST, SlowdownState, log2, step
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sizes import beside, examples, number

LANES = 8


def played(
    steps: int, slowness: Callable[[int, int], float], state: SlowdownState | None = None
) -> tuple[list[tuple[int, ...]], int]:
    """The slowdowns after each step of lanes that are so slow, and how many changes there were."""
    state = state or SlowdownState.begin((64,) * LANES)
    found, changed = [], 0
    for now in range(steps):
        work = [1000.0 + 37 * ((now + lane) % 5) for lane in range(LANES)]
        spent = [0.001 * each * slowness(now, lane) for lane, each in enumerate(work)]
        state, changes = step(state, spent, work)
        found.append(state.slowdown)
        changed += len(changes)
    return found, changed


@settings(max_examples=examples(200))
@given(st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=20))
def test_logarithms_are_right(values: list[float]) -> None:
    for value, found in zip(values, log2(values).tolist(), strict=True):
        assert found <= 4096 * math.log2(value) + 1e-6 < found + 1.01


@settings(max_examples=examples(200))
@given(st.integers(LEAST, MOST))
def test_a_known_slowdown_is_kept_as_it_is(slowdown: int) -> None:
    assert SlowdownState.begin((slowdown, 64)).slowdown == (slowdown, 64)


@pytest.mark.parametrize("times", [1.35, 1.5, 2.0, 3.0, 10.0])
@pytest.mark.parametrize("after", [0, 3, 50])
def test_a_straggler_is_followed_within_two_steps_of_its_showing(times: float, after: int) -> None:
    found, _ = played(after + 2, lambda now, lane: times if lane == 3 and now >= after else 1.0)
    assert found[-1][3] == pytest.approx(64 * times, rel=0.1)
    assert found[-1][:3] + found[-1][4:] == (64,) * 7


@pytest.mark.parametrize("times", [1.1, 1.2, 1.25])
def test_a_small_step_is_adopted_within_four_steps_and_then_followed(times: float) -> None:
    found, _ = played(40, lambda now, lane: times if lane == 3 and now >= 20 else 1.0)
    assert found[23][3] == pytest.approx(64 * times, rel=0.1)
    assert found[-1][3] == pytest.approx(64 * times, rel=0.05)


def test_a_device_that_recovers_gets_its_share_back() -> None:
    found, _ = played(60, lambda now, lane: 2.0 if lane == 3 and 20 <= now < 40 else 1.0)
    assert found[39][3] == 128
    assert found[42][3] == 64


def test_the_median_lane_is_normal() -> None:
    """Where all lanes slow down at once nothing moves."""
    assert played(40, lambda now, lane: 3.0 if now >= 20 else 1.0)[1] == 0


def test_a_lane_without_work_keeps_its_slowdown() -> None:
    state = SlowdownState.begin((64, 128, 64))
    for _ in range(20):
        state, changes = step(state, (1.0, 0.0, 1.0), (10, 0, 10))
        assert not changes
    assert state.slowdown == (64, 128, 64)
    assert step(state, (0.0, math.nan, -1.0), (1, 1, 1)) == (state, ())


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32), st.floats(0, 0.03), st.sampled_from(("uniform", "alternating", "period")))
def test_noise_below_three_per_cent_moves_nothing(seed: int, most: float, kind: str) -> None:
    """Whatever its form: the mean of eight steps is in the dead band, and no two steps are far."""
    draw = random.Random(seed)
    period = draw.randrange(2, 12)

    def slowness(now: int, lane: int) -> float:
        if kind == "uniform":
            return 1 + draw.uniform(-most, most) * 0.8
        if kind == "alternating":
            return 1 + most * (-1) ** (now + lane)
        return 1 + most * (1 if (now // period + lane) % 2 else -1) * 0.8

    assert played(300, slowness)[1] == 0


def test_gaussian_noise_of_three_per_cent_changes_shares_three_times_in_ten_thousand_steps_at_most() -> None:
    draw = random.Random(1)
    assert played(number(10_000, 2500), lambda now, lane: math.exp(draw.gauss(0, 0.03)))[1] <= 3


def test_noise_that_lasts_changes_shares_ten_times_in_ten_thousand_steps_at_most() -> None:
    """AR(1) with 0.95, of a stationary deviation of 3 %."""
    draw, last = random.Random(2), [0.0] * LANES

    def slowness(now: int, lane: int) -> float:
        last[lane] = 0.95 * last[lane] + draw.gauss(0, 0.03 * math.sqrt(1 - 0.95**2))
        return math.exp(last[lane])

    assert played(number(10_000, 2500), slowness)[1] <= 10


def test_after_a_burst_shares_are_back_within_ten_steps() -> None:
    """Of 20 % for five steps, each hundred steps, on one lane, with noise of 1 %."""
    draw = random.Random(3)

    def slowness(now: int, lane: int) -> float:
        burst = 1.2 if lane == 3 and now % 100 >= 95 else 1.0
        return burst * math.exp(draw.gauss(0, 0.01))

    found, _ = played(number(10_000, 2500), slowness)
    for now in range(109, len(found), 100):
        assert found[now][3] == pytest.approx(64, rel=0.055)
        assert found[now][0] == pytest.approx(64, rel=0.055)


def share_of_lane_3(period: int, steps: int = 800) -> list[int]:
    """Its slowdown while it is 1.6 times as slow for a period, then normal for one, and so on."""
    found, _ = played(steps, lambda now, lane: 1.6 if lane == 3 and now // period % 2 else 1.0)
    return [each[3] for each in found]


def test_a_device_that_oscillates_slowly_is_followed_each_time() -> None:
    """Its normal period is longer than what a wrong share costs: 3 steps x 1.6 x 7 other lanes = 33."""
    found = share_of_lane_3(80)
    for now in range(160, 800, 160):
        assert found[now - 75] == pytest.approx(102, rel=0.1)
        assert found[now + 2] == pytest.approx(64, rel=0.1), "it was normal for longer than counts"


def test_a_device_that_oscillates_quickly_keeps_the_share_of_its_slow_state() -> None:
    found = share_of_lane_3(10)
    assert found[11] == pytest.approx(102, rel=0.1)
    assert found[21] == pytest.approx(64, rel=0.1), "once it is taken at its word"
    assert found[43] == pytest.approx(64, rel=0.1), "the second time after four steps"
    assert found[100] == pytest.approx(102, rel=0.1)
    assert {*found[100:]} == {found[100]}


def test_a_device_that_oscillated_and_is_normal_for_good_gets_its_share_back() -> None:
    found, _ = played(300, lambda now, lane: 1.6 if lane == 3 and now < 150 and now // 10 % 2 else 1.0)
    assert found[149][3] == pytest.approx(102, rel=0.1)
    assert found[150 + 33][3] == 64
    assert {each[3] for each in found[183:]} == {64}


@pytest.mark.parametrize(("lanes", "times"), [(2, 2.5), (4, 2.5), (8, 1.6)])
@pytest.mark.parametrize("period", beside([7, 60], [3, 7, 20, 60, 100]))
def test_a_device_that_oscillates_costs_little_more_than_twice_what_the_better_of_two_rules_costs(
    lanes: int, times: float, period: int
) -> None:
    """Shares that always follow, and shares that are always those of its slow state: each loses so much over
    shares that are right in every step. Waits that double lose some more before they are at their longest."""
    work = [1000.0] * lanes
    state, dealt = SlowdownState.begin((64,) * lanes), [(64,) * lanes] * 2
    spent = followed = kept = known = 0.0
    for now in range(2000):
        slow = [times if lane == 0 and now // period % 2 else 1.0 for lane in range(lanes)]

        def seconds(slowdown: tuple[float, ...], slow: list[float] = slow) -> float:
            shares = [1 / each for each in slowdown]
            return max(share / sum(shares) * each for share, each in zip(shares, slow, strict=True)) * lanes

        spent += seconds(dealt[0])
        late = times if (now - 3) // period % 2 else 1.0
        followed += seconds((late, *(1.0,) * (lanes - 1)))
        kept += seconds((times, *(1.0,) * (lanes - 1)))
        known += seconds(tuple(slow))
        state, _ = step(state, [0.001 * w * s for w, s in zip(work, slow, strict=True)], work)
        dealt = [dealt[1], state.slowdown]
    assert spent - known <= 2.2 * (min(followed, kept) - known) + 20


def test_two_ranks_have_the_same_state() -> None:
    draw = random.Random(4)
    steps = [([draw.uniform(0.5, 3) for _ in range(LANES)], [draw.uniform(1, 9)] * LANES) for _ in range(100)]
    states = []
    for form in (list, lambda each: np.array(each, dtype=np.float64)):
        state = SlowdownState.begin((64,) * LANES)
        for spent, work in steps:
            state, _ = step(state, form(spent), form(work))
        states.append(state)
    assert states[0] == states[1]


def test_slowdowns_stay_in_their_limits() -> None:
    found, _ = played(10, lambda now, lane: {2: 1000.0, 3: 0.001}.get(lane, 1.0))
    assert found[-1][2:4] == (MOST, LEAST)


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(Invalid, match="slowdowns must be at least 1"):
        SlowdownState.begin(())
    with pytest.raises(Invalid, match="1 seconds and 2 works for 2 lanes"):
        step(SlowdownState.begin((64, 64)), (1.0,), (1, 2))
