"""Replan only when the saving over the horizon outweighs the price of moving."""

import pytest
from elasticd_planner.policy.policy import Moved, PolicySettings, Price, decide, measured_price
from elasticd_planner.policy.stability import PayoffHorizon
from elasticd_planner.value import Invalid

SETTINGS = PolicySettings(horizon_steps=100, minimum_saving=0.05, bandwidth=1e6, pause_seconds=1.0)


def test_a_large_saving_is_worth_moving() -> None:
    decision = decide(SETTINGS, 2.0, 1.0, 10_000_000)
    assert decision.replan
    assert decision.saving_seconds == pytest.approx(100)
    assert decision.price_seconds == pytest.approx(11)
    assert "2000 ms a step now, 1000 ms" in decision.reason


def test_more_bytes_make_it_not_worth_it() -> None:
    assert not decide(SETTINGS, 2.0, 1.0, 100_000_000).replan
    assert decide(SETTINGS, 2.0, 1.0, 100_000_000, price=Price(pause_seconds=1.0, bandwidth=1e8)).replan


def test_a_job_near_its_end_stays() -> None:
    assert not decide(SETTINGS, 2.0, 1.0, 10_000_000, steps_left=5).replan


def test_a_small_saving_is_left_alone_even_if_nothing_moves() -> None:
    decision = decide(SETTINGS, 1.0, 0.96, 0)
    assert not decision.replan
    assert "less than 5% saved" in decision.reason


def test_a_worse_plan_is_never_taken() -> None:
    eager = PolicySettings(minimum_saving=0.0, pause_seconds=0.0)
    assert not decide(eager, 1.0, 1.0, 0).replan
    assert not decide(eager, 1.0, 1.1, 0).replan


@pytest.mark.parametrize("current", [None, float("inf")])
def test_a_plan_that_cannot_run_is_always_replaced(current: float | None) -> None:
    decision = decide(SETTINGS, current, 9.0, 10**12, steps_left=1)
    assert decision.replan
    assert "cannot run" in decision.reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"horizon_steps": 0}, "horizon_steps"),
        ({"minimum_saving": 1.0}, "minimum_saving"),
        ({"bandwidth": 0}, "bandwidth"),
        ({"pause_seconds": -1}, "pause_seconds"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        PolicySettings(**changes)  # type: ignore[arg-type]


def test_a_saving_that_does_not_last_is_looked_at_again_once_it_has_lasted_long_enough() -> None:
    restless = PayoffHorizon(steps=8, age=2, history="a/1 has changed its speed 6 times in 80 steps")
    decision = decide(SETTINGS, 2.0, 1.0, 10_000_000, payoff=restless)
    assert not decision.replan
    assert decision.again_in == 10, "11 s are saved in 11 steps, and must be more than the price"
    assert decision.reason.startswith(
        "a/1 has changed its speed 6 times in 80 steps; a switch pays once this lasts 12 steps"
    )
    assert decide(SETTINGS, 2.0, 1.0, 10_000_000, payoff=PayoffHorizon(steps=12, age=12)).replan


def test_a_saving_however_large_waits_for_a_restless_device_but_not_for_a_plan_that_cannot_run() -> None:
    waits = PayoffHorizon(steps=100, wait=25, age=5)
    decision = decide(SETTINGS, 100.0, 1.0, 0, payoff=waits)
    assert (decision.replan, decision.again_in) == (False, 25)
    assert decide(SETTINGS, None, 1.0, 0, payoff=waits).replan


def test_what_never_pays_is_not_looked_at_again() -> None:
    waits = PayoffHorizon(steps=8, wait=25, age=5)
    assert decide(SETTINGS, 1.0, 0.96, 0, payoff=waits).again_in is None
    assert decide(SETTINGS, 2.0, 1.0, 100_000_000, payoff=waits).again_in is None
    assert decide(SETTINGS, 2.0, 1.0, 0, payoff=waits, steps_left=1).again_in is None


def test_the_price_is_the_settings_until_a_switch_was_measured() -> None:
    assert measured_price(SETTINGS, ()) == Price(pause_seconds=1.0, bandwidth=1e6)


def moved(bytes_lacking: int, pause_seconds: float) -> Moved:
    return Moved(number=2, bytes_lacking=bytes_lacking, pause_seconds=pause_seconds)


def test_switches_of_different_sizes_tell_the_pause_from_the_bandwidth() -> None:
    price = measured_price(SETTINGS, [moved(1_000_000, 0.7), moved(5_000_000, 1.5), moved(9_000_000, 2.3)])
    assert price.pause_seconds == pytest.approx(0.5)
    assert price.bandwidth == pytest.approx(5e6)


@pytest.mark.parametrize(
    "switches",
    [
        [moved(10_000_000, 0.5)],
        [moved(1000, 0.04)],
        [moved(10_000_000_000, 30_000.0)],
        [moved(1000, 0.04), moved(1000, 0.06)],
    ],
)
def test_like_switches_are_expected_to_cost_what_they_did(switches: list[Moved]) -> None:
    mean = sum(switch.pause_seconds for switch in switches) / len(switches)
    price = measured_price(SETTINGS, switches)
    assert price.seconds(switches[0].bytes_lacking) == pytest.approx(mean)
    assert price.bandwidth >= SETTINGS.bandwidth, "a few bytes in a pause say nothing about many"


def test_a_line_that_no_switch_could_be_on_is_not_believed() -> None:
    price = measured_price(SETTINGS, [moved(2000, 0.04), moved(1000, 0.06)])
    assert price.pause_seconds == pytest.approx(0.05, rel=0.1)
    assert price.bandwidth == 1e6
