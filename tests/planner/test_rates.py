"""Detection: quick where it is clear, silent under noise, with memory of who is slow."""

import msgspec
import pytest
from elasticd_planner.measurement import Measurement
from elasticd_planner.plan import Plan
from elasticd_planner.rates import (
    Change,
    DetectSettings,
    RateState,
    fleet_cost,
    forget,
    observe,
    rounded,
)
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner import workers
from tests.planner.models import plan

SETTINGS = DetectSettings()
FOUR = plan((5, [(5, ["n0/0", "n0/1"], [4, 4])]), (5, [(5, ["n1/0", "n1/1"], [4, 4])]))
UNEVEN = plan((10, [(2, ["n0/0", "n0/1"], [6, 2]), (3, ["n1/0", "n1/1"], [4, 4])]), number=2)


class Watch:
    """Feeds synthetic steps to the detection, one after the other."""

    def __init__(self, given: DetectSettings = SETTINGS) -> None:
        self.settings, self.state, self.step = given, RateState(), 0

    def run(
        self, made: Plan, steps: int, rates: dict[str, float] | None = None, **options: object
    ) -> list[Change]:
        changes: list[Change] = []
        for _ in range(steps):
            measured = workers.measure(made, self.step, rates, **options)  # type: ignore[arg-type]
            self.state, found = observe(self.state, measured, self.settings)
            changes += found
            self.step += 1
        return changes


def test_three_times_slow_is_seen_within_three_steps() -> None:
    watch = Watch()
    assert watch.run(FOUR, 10, noise=0.02) == []
    (change,) = watch.run(FOUR, 3, {"n0/1": 3.0}, noise=0.02)
    assert change.device == "n0/1"
    assert (change.before, change.after) == (1.0, pytest.approx(3.0, abs=0.2))
    assert change.step <= 12
    assert "n0/1 is slow: it takes" in change.reason
    assert watch.state.rates == {"n0/1": change.after}


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_noise_of_five_percent_and_single_wild_steps_never_alarm(start: int) -> None:
    watch = Watch()
    watch.step = start
    for round_ in range(8):
        assert watch.run(FOUR, 4, noise=0.05) == []
        assert watch.run(FOUR, 1, noise=0.05, wild={FOUR.members[round_ % 4]: 6.0}) == []


def test_what_slows_everybody_slows_nobody() -> None:
    watch = Watch()
    watch.run(FOUR, 5)
    assert watch.run(FOUR, 5, dict.fromkeys(FOUR.members, 3.0)) == []


def test_a_change_in_the_middle_of_a_step_is_one_change_to_the_full_rate() -> None:
    watch = Watch()
    watch.run(FOUR, 10)
    changes = watch.run(FOUR, 1, {"n0/1": 1.8}) + watch.run(FOUR, 12, {"n0/1": 3.0})
    assert [change.after for change in changes] == [3.0]
    changes = watch.run(FOUR, 1, {"n0/1": 1.8}) + watch.run(FOUR, 12)
    assert [change.after for change in changes] == [1.0]


def test_a_device_that_is_slow_from_the_start_is_seen() -> None:
    (change,) = Watch().run(FOUR, 6, {"n1/0": 2.0})
    assert (change.device, change.after) == ("n1/0", 2.0)


@pytest.mark.parametrize("slow", [("n0/0",), ("n0/0", "n0/1")])
def test_slow_devices_do_not_drag_the_fleet(slow: tuple[str, ...]) -> None:
    watch = Watch()
    changes = watch.run(FOUR, 8, dict.fromkeys(slow, 3.0))
    assert {change.device: change.after for change in changes} == dict.fromkeys(slow, 3.0)


def test_one_of_two_devices_is_seen() -> None:
    two = plan((4, [(5, ["n0/0", "n0/1"], [1, 1])]))
    assert [change.device for change in Watch().run(two, 6, {"n0/0": 1.5})] == ["n0/0"]


def test_a_change_of_plan_changes_no_rate() -> None:
    watch = Watch()
    watch.run(FOUR, 5)
    watch.run(FOUR, 4, {"n0/1": 3.0})
    assert watch.run(UNEVEN, 20, {"n0/1": 3.0}, noise=0.03) == []
    assert watch.state.rates == {"n0/1": 3.0}
    assert watch.run(FOUR.replace(number=3), 20, {"n0/1": 3.0}, noise=0.03) == []


def test_steps_right_after_a_change_of_plan_do_not_count() -> None:
    watch = Watch(DetectSettings(warmup=3))
    watch.run(FOUR, 8)
    assert watch.run(UNEVEN, 3, wild={"n1/1": 9.0}) == []
    assert watch.run(UNEVEN, 8) == []


def test_recovery_is_seen_within_three_steps_and_rates_it_normal() -> None:
    watch = Watch()
    watch.run(FOUR, 8, {"n0/1": 3.0})
    (change,) = watch.run(FOUR, 3, noise=0.02)
    assert (change.device, change.after) == ("n0/1", 1.0)
    assert "recovered" in change.reason
    assert watch.state.rates == {}


def test_between_the_thresholds_nothing_flaps() -> None:
    watch = Watch()
    assert watch.run(FOUR, 20, {"n0/1": 1.18}) == []
    watch.run(FOUR, 10, {"n0/1": 1.3})
    assert watch.state.rates != {}
    assert watch.run(FOUR, 20, {"n0/1": 1.18}) == []


@pytest.mark.parametrize(("rate", "word"), [(4.5, "slower"), (2.0, "faster")])
def test_a_slow_device_that_changes_a_lot_is_rated_again(rate: float, word: str) -> None:
    watch = Watch()
    watch.run(FOUR, 8, {"n0/1": 3.0})
    assert watch.run(FOUR, 8, {"n0/1": 3.1}) == []
    (change,) = watch.run(FOUR, 8, {"n0/1": rate})
    assert (change.before, change.after) == (3.0, pytest.approx(rate, abs=0.11))
    assert word in change.reason


def test_old_steps_and_idle_devices_change_nothing() -> None:
    watch = Watch()
    watch.run(FOUR, 5)
    before = watch.state
    assert observe(before, workers.measure(FOUR, 2, {"n0/1": 9.0}), SETTINGS) == (before, ())
    idle = Measurement(device="n0/0", plan=1, step=9, tokens=0, block_seconds=0.0, block_work=0.0)
    assert observe(before, [idle], SETTINGS) == (before, ())
    assert observe(before, [], SETTINGS) == (before, ())


def test_measurements_of_two_steps_at_once_are_refused() -> None:
    both = workers.measure(FOUR, 1)[:2] + workers.measure(FOUR, 2)[2:]
    with pytest.raises(Invalid, match="one step at a time"):
        observe(RateState(), both, SETTINGS)


def test_a_new_worker_on_a_slow_device_starts_normal() -> None:
    watch = Watch()
    watch.run(FOUR, 8, {"n0/1": 3.0})
    assert forget(watch.state, "n0/1").rates == {}


def test_where_only_slow_devices_work_their_rates_say_what_is_normal() -> None:
    assert fleet_cost({"a": 3.0, "b": 2.0}, {"a": 3.0, "b": 2.0}) == 1.0


def test_rates_are_rounded_more_coarsely_where_they_are_larger() -> None:
    assert [rounded(r, 0.05) for r in (0.9, 1.0, 1.52, 2.94, 3.06, 9.1)] == [1.0, 1.0, 1.5, 2.9, 3.1, 9.2]


def test_the_state_survives_json() -> None:
    watch = Watch()
    watch.run(FOUR, 8, {"n0/1": 3.0})
    assert msgspec.json.decode(msgspec.json.encode(watch.state), type=RateState) == watch.state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slow": 1.1}, "must be at least 1 and below slow"),
        ({"recovered": 0.9}, "must be at least 1"),
        ({"window": 0}, "window and confirmations"),
        ({"rounding": 0.0}, "rounding"),
    ],
)
def test_settings_that_would_flap_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        DetectSettings(**changes)  # type: ignore[arg-type]
