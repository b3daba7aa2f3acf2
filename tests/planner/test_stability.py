"""How long conditions last, and that a restless device causes few switches however it changes."""

from __future__ import annotations

import math

from elasticd_planner.policy.policy import Decision, PolicySettings, decide
from elasticd_planner.policy.stability import (
    FREE,
    Stability,
    changed,
    corrected,
    first_wait,
    payoff_horizon,
    settled,
    switched,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sizes import examples

SETTINGS = PolicySettings()
HORIZON = SETTINGS.horizon_steps


def bound(steps: int) -> float:
    """Switches for one device in so many steps, where no condition lasts a whole horizon."""
    return FREE + 1 + 2 * math.log2(steps / (2 * first_wait(HORIZON)) + 1)


def lived(lifetimes: list[int], saving: float = 1.0, late: int = 0) -> list[int]:
    """The steps of the switches while a device is slow and normal in turn, and is answered at once or `late`
    steps after; each switch would save `saving` seconds a step, and nothing moves."""
    state, step, switches = Stability(), 0, []
    for count, lifetime in enumerate(lifetimes):
        rate = 2.0 if count % 2 == 0 else 1.0
        rates = {"a/1": rate} if rate > 1 else {}
        state = changed(state, "a/1", rate, step, HORIZON)
        if rates == state.planned:
            state = settled(state, step)
        else:
            found = _first_switch(state, rates, step + late, step + lifetime, saving)
            if found is not None:
                state = switched(state, rates, found, HORIZON)
                switches.append(found)
        step += lifetime
    return switches


def _first_switch(state: Stability, rates: dict[str, float], step: int, end: int, saving: float) -> int | None:
    """Looks again only when the decision says so."""
    while step < end:
        decision: Decision = decide(
            SETTINGS, 1.0 + saving, 1.0, 0, payoff=payoff_horizon(state, rates, step, HORIZON)
        )
        if decision.replan:
            return step
        if decision.again_in is None:
            return None
        step += decision.again_in
    return None


@given(lifetimes=st.lists(st.integers(1, 1000), max_size=80), late=st.integers(0, 4))
@settings(max_examples=examples(200))
def test_switches_are_bounded_whatever_the_times_of_change(lifetimes: list[int], late: int) -> None:
    lasted = sum(lifetime // HORIZON for lifetime in lifetimes)
    assert len(lived(lifetimes, late=late)) <= bound(sum(lifetimes)) + lasted


@given(lifetimes=st.lists(st.integers(1, HORIZON - 1), min_size=200, max_size=400))
@settings(max_examples=examples(50))
def test_conditions_that_do_not_last_cause_few_switches(lifetimes: list[int]) -> None:
    assert len(lived(lifetimes)) <= bound(sum(lifetimes))


def test_an_adversary_that_leaves_right_after_each_switch_gets_no_more_than_the_bound() -> None:
    """It stays until it is answered, and then changes: every other time it waits twice as long."""
    lifetimes = [1] * FREE + [first_wait(HORIZON) * 2 ** (i // 2) + 1 for i in range(14)]
    found = lived(lifetimes)
    assert FREE + 10 <= len(found) <= bound(sum(lifetimes))


@given(slow=st.integers(10, 2000), then=st.integers(10, 2000))
@settings(max_examples=examples(50))
def test_a_device_that_becomes_slow_and_recovers_is_answered_at_once(slow: int, then: int) -> None:
    assert lived([slow, then]) == [0, slow]


def test_conditions_that_last_are_answered_at_once_for_ever() -> None:
    lifetimes = [3 * HORIZON] * 40
    assert lived(lifetimes) == [3 * HORIZON * count for count in range(40)]


def test_a_restless_device_that_settles_is_answered_in_the_end() -> None:
    flips = [4] * 40
    found = lived([*flips, 5000])
    assert len(found) == FREE, "its slow plan is in force, and slow is how it stays"
    again = lived([*flips[1:], 5000])
    assert again[-1] == sum(flips[1:]) + first_wait(HORIZON), "normal for good: answered after the first wait"


def test_short_lives_shorten_the_horizon_and_a_long_one_lengthens_it() -> None:
    state, step = Stability(), 100
    for count in range(5):
        state = changed(state, "a/1", 1.0 + (count + 1) % 2, step, HORIZON)
        now = payoff_horizon(state, {"a/1": 2.0}, step, HORIZON).steps
        assert now == [200, 136, 73, 10, 10][count], "the mean of three, unseen ones last as the setting says"
        step += 10
    at = [payoff_horizon(state, {"a/1": 2.0}, 140 + age, HORIZON).steps for age in (0, 9, 11, 50, 900)]
    assert at == [10, 10, 11, 50, HORIZON]


def test_a_device_that_is_slow_half_of_the_time_is_left_with_the_plan_for_its_slow_times() -> None:
    for period in range(4, HORIZON):
        assert len(lived([period] * 60)) % 2 == 1


def test_another_device_that_changes_is_answered_while_one_is_restless() -> None:
    state = Stability()
    for count in range(9):
        rates = {"a/1": 2.0} if count % 2 == 0 else {}
        state = changed(state, "a/1", rates.get("a/1", 1.0), 4 * count, HORIZON)
        if count < FREE:
            state = switched(state, rates, 4 * count, HORIZON)
    state = changed(state, "a/1", 1.0, 40, HORIZON)
    assert payoff_horizon(state, {}, 40, HORIZON).wait == first_wait(HORIZON)
    told = payoff_horizon(state, {}, 44, HORIZON)
    assert (told.wait, told.age) == (first_wait(HORIZON) - 4, 4)
    assert told.history == "a/1 has changed its speed 10 times in 44 steps"
    state = changed(state, "b/0", 3.0, 41, HORIZON)
    assert payoff_horizon(state, {"b/0": 3.0}, 41, HORIZON).wait == 0
    assert payoff_horizon(state, {"b/0": 3.0}, 41, HORIZON).steps == HORIZON


def test_a_corrected_rate_is_the_same_condition() -> None:
    state = changed(Stability(), "a/1", 2.0, 100, HORIZON)
    state = switched(state, {"a/1": 2.0}, 103, HORIZON)
    better = corrected(state, "a/1", 2.1)
    before, after = state.devices["a/1"], better.devices["a/1"]
    assert after.rate == 2.1
    assert (after.since, after.lifetimes, after.changes) == (before.since, before.lifetimes, before.changes)
    assert (after.switches, after.answered) == (before.switches, before.answered)
    assert payoff_horizon(better, {"a/1": 2.1}, 110, HORIZON).wait == 0
    assert corrected(state, "b/2", 2.0) == state
