"""Agreed slowdowns: they follow a straggler in a few steps, and do not follow noise."""

from __future__ import annotations

import math
import random
import zlib
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
    assert step(state, (1e308, 5e-324, math.inf), (1e-10, 1e10, 1)) == (state, ())


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


@pytest.mark.parametrize(("noise", "slow"), [(0.02, 1.12), (0.03, 1.2)])
def test_a_small_slowdown_is_followed_though_steps_are_noisy(noise: float, slow: float) -> None:
    draw = random.Random(5)
    found, _ = played(
        460, lambda now, lane: (slow if lane == 3 and now >= 400 else 1.0) * math.exp(draw.gauss(0, noise))
    )
    assert found[-1][3] == pytest.approx(64 * slow, rel=0.06)


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


#: Lanes, how many of them oscillate together, times as slow, steps that they are slow and that they are not.
TOGETHER = [(8, 4, 2.5, 10, 50), (16, 8, 1.6, 20, 40), (8, 4, 2.5, 7, 7), (16, 4, 2.5, 10, 60)]
ALONE = [
    (lanes, 1, times, each, each)
    for lanes, times in ((2, 2.5), (4, 2.5), (8, 1.6))
    for each in (3, 7, 20, 60, 100)
]
SOME = [*TOGETHER[:2], (2, 1, 2.5, 7, 7), (4, 1, 2.5, 20, 20), (8, 1, 1.6, 60, 60)]


@pytest.mark.parametrize(("lanes", "node", "times", "slow", "normal"), beside(SOME, [*TOGETHER, *ALONE]))
def test_devices_that_oscillate_cost_little_more_than_twice_what_the_better_of_two_rules_costs(
    lanes: int, node: int, times: float, slow: int, normal: int
) -> None:
    """Shares that always follow, and shares that are always those of their slow state: each loses so much over
    shares that are right in every step. Waits that double lose some more before they are at their longest.
    The lanes of a node oscillate together."""

    def slowness(now: int) -> tuple[float, ...]:
        return (times if now % (slow + normal) >= normal else 1.0,) * node + (1.0,) * (lanes - node)

    work = [1000.0] * lanes
    state, dealt = SlowdownState.begin((64,) * lanes), [(64,) * lanes] * 2
    spent = followed = kept = known = 0.0
    for now in range(2000):
        true = slowness(now)

        def seconds(slowdown: tuple[float, ...], true: tuple[float, ...] = true) -> float:
            shares = [1 / each for each in slowdown]
            return max(share / sum(shares) * each for share, each in zip(shares, true, strict=True)) * lanes

        spent += seconds(dealt[0])
        followed += seconds(slowness(now - 3))
        kept += seconds(slowness(normal))
        known += seconds(true)
        state, _ = step(state, [0.001 * w * s for w, s in zip(work, true, strict=True)], work)
        dealt = [dealt[1], state.slowdown]
    assert spent - known <= 2.2 * (min(followed, kept) - known) + 20


def test_lanes_of_a_node_that_oscillate_together_are_waited_for_only_while_that_is_worth_it() -> None:
    """Half of all lanes lack their shares: 3 steps x 1.6 x 4 / 4 lanes."""
    found, _ = played(800, lambda now, lane: 1.6 if lane < 4 and now % 60 >= 40 else 1.0)
    for now in range(300, 800, 60):
        assert found[now - 1][:4] == pytest.approx((102,) * 4, rel=0.1)
        assert found[now + 5] == (64,) * LANES


def test_a_single_slow_step_does_not_keep_a_lane_that_oscillated_from_its_share() -> None:
    """Shares would not follow such a step, either."""

    def slowness(now: int, lane: int) -> float:
        slow = now // 25 % 2 if now < 1000 else now % 20 == 0
        return 1.6 if lane == 3 and slow else 1.0

    found, _ = played(1200, slowness)
    assert found[999][3] == pytest.approx(102, rel=0.1)
    assert {each[3] for each in found[1040:]} == {64}


def test_a_lane_that_becomes_slow_in_several_jumps_is_waited_for_as_after_one() -> None:
    def slowness(now: int, lane: int) -> float:
        part = now % 10
        return 1.0 if lane != 3 or part < 5 else 1.6 if part == 5 else 4.0

    state = SlowdownState.begin((64,) * LANES)
    for now in range(20):
        state, _ = step(state, [slowness(now, lane) for lane in range(LANES)], [1.0] * LANES)
    assert state.slowdown[3] == pytest.approx(256, rel=0.1)
    assert state.lanes[3].wait == 4, "it was slow twice"


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


def test_ranks_of_several_releases_find_the_same() -> None:
    """Nodes of one job may run several releases of one `PEERS_VERSION`: raise that where this changes after a
    release, for a rank that deals otherwise is refused by the vote."""
    draw = random.Random(9)

    def slowness(now: int, lane: int) -> float:
        slow = now // 40 % 2 if lane == 3 else lane < 2 and now % 90 < 30
        return draw.uniform(0.95, 1.05) * (1.7 if slow else 1.1 if lane == 5 else 1.0)

    found, changed = played(1000, slowness)
    assert (changed, zlib.crc32(repr(found).encode())) == (71, 3508092137)
