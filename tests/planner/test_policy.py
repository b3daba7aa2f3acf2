"""Replan only when the saving over the horizon outweighs the price of moving."""

import pytest
from elasticd_planner.policy import PolicySettings, decide
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
    assert decide(SETTINGS, 2.0, 1.0, 100_000_000, bandwidth=1e8).replan


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
