"""The age of the history's rows: whatever clock is wrong, by however much, nothing that is young is old."""

from __future__ import annotations

import pytest

from elasticd.dashboard.age_clock import AgeClock
from elasticd.trusted_time import JUMP_SECONDS

NOW, DAY = 1.8e9, 86_400.0


def test_a_clock_that_is_right_is_read_as_it_is() -> None:
    clock = AgeClock(NOW - DAY / 2, NOW, 100.0)
    assert clock.read(NOW, 100.0) == NOW
    assert clock.read(NOW + 5 * DAY, 100.0 + 5 * DAY) == NOW + 5 * DAY


def test_a_history_of_which_nothing_is_known_goes_by_the_machine() -> None:
    assert AgeClock(0.0, NOW, 100.0).read(NOW, 100.0) == NOW


@pytest.mark.parametrize("days", [8, 3000])
def test_a_machine_whose_clock_is_ahead_at_the_start_gains_a_jump_at_most(days: int) -> None:
    assert AgeClock(NOW, NOW + days * DAY, 100.0).read(NOW + days * DAY, 100.0) == NOW + JUMP_SECONDS


def test_a_clock_that_jumps_ahead_gains_as_much_as_time_goes_by() -> None:
    clock = AgeClock(NOW, NOW, 100.0)
    assert clock.read(NOW + 300 * DAY, 160.0) == NOW + 120.0


def test_a_clock_that_jumps_back_and_forth_comes_back_to_the_truth() -> None:
    clock = AgeClock(NOW, NOW, 0.0)
    assert clock.read(0.0, 10.0) == 0.0, "1970: nothing is old"
    assert clock.read(NOW + 20.0, 20.0) == NOW + 20.0


def test_after_a_long_pause_it_catches_up() -> None:
    clock = AgeClock(NOW, NOW + 10 * DAY, 0.0)
    for day in range(12):
        clock.read(NOW + (10 + day) * DAY, day * DAY)
    assert clock.read(NOW + 22 * DAY, 12 * DAY) == NOW + 22 * DAY
