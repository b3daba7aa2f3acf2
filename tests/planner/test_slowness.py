"""Persistent, periodic and transient stragglers, told apart by when a device was slow."""

import pytest
from elasticd_planner.detection.slowness_history import Episode, classify, detect_period
from hypothesis import given
from hypothesis import strategies as st

CHRONIC = 200


def episode(start: int, stop: int | None) -> Episode:
    return Episode(start=start, stop=stop, rate=2.0)


@pytest.mark.parametrize(
    ("episodes", "spikes", "now", "kind", "words"),
    [
        ((), (), 50, "", "never slow"),
        ((episode(10, 20),), (), 50, "one-off", "slow once, in steps 10 to 19"),
        ((episode(10, None),), (), 50, "one-off", "slow since step 10, for the first time"),
        ((episode(-1, None),), (), 5, "one-off", "slow since before the first step, for the first time"),
        ((episode(-1, 9),), (), 50, "one-off", "slow once, from before the first step to step 8"),
        ((episode(-1, -1),), (), 50, "one-off", "slow once, before the first step"),
        ((episode(10, None),), (), 210, "chronic", "slow for 201 steps"),
        ((episode(10, 20), episode(100, 120)), (), 150, "irregular", "2 times, 30 of the last 141 steps"),
        (tuple(episode(s, s + 9) for s in (10, 60, 111, 160)), (), 180, "periodic", "about every 50 steps"),
        ((), (7,), 50, "one-off", "a single slow step, 7"),
        ((), (7, 30), 50, "irregular", "2 single slow steps, the last was 30"),
        ((), (100, 200, 201, 300, 400), 450, "periodic", "slow for a step about every 100 steps"),
    ],
)
def test_kinds(episodes: tuple[Episode, ...], spikes: tuple[int, ...], now: int, kind: str, words: str) -> None:
    found = classify(episodes, spikes, now, CHRONIC)
    assert found.kind == kind
    assert words in found.reason


@given(st.integers(5, 500), st.integers(4, 12), st.integers(0, 1000))
def test_a_regular_distance_is_a_period(period: int, count: int, start: int) -> None:
    assert detect_period([start + i * period for i in range(count)]) == period


def test_a_missed_time_does_not_break_it_and_chance_makes_none() -> None:
    assert detect_period([0, 50, 100, 200, 250, 300]) == 50
    assert detect_period([0, 13, 90, 100, 260, 300, 317]) is None
    assert detect_period([0, 50, 100]) is None
    assert detect_period([1, 2, 3, 4, 5]) is None
