"""Detection: quick where it is clear, silent under noise, with memory of who is slow."""

import msgspec
import pytest
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.detection.device_rates import as_mapping
from elasticd_planner.detection.fleet_baseline import fleet_cost
from elasticd_planner.detection.stragglers import (
    Change,
    DetectSettings,
    RateState,
    expectation,
    forget,
    observe,
    rounded,
)
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner import workers
from tests.planner.models import plan
from tests.sizes import examples

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


@settings(max_examples=examples(20))
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


def test_a_lasting_difference_within_the_tolerance_is_no_slowness() -> None:
    watch = Watch()
    assert watch.run(FOUR, 300, {"n0/1": 1.03}, noise=0.02) == []
    changes = watch.run(FOUR, 15, {"n0/1": 1.15}, noise=0.02)
    assert changes[0].kind == "slow"
    assert watch.state.rates == {"n0/1": pytest.approx(1.15, abs=0.03)}


def test_a_slow_device_that_strays_a_little_stays_at_its_rate() -> None:
    watch = Watch()
    watch.run(FOUR, 12, {"n0/1": 1.3})
    assert watch.run(FOUR, 40, {"n0/1": 1.27}) == watch.run(FOUR, 40, {"n0/1": 1.33}) == []
    assert watch.state.rates == {"n0/1": 1.3}


def test_a_first_guess_that_was_off_is_corrected_once() -> None:
    watch = Watch()
    watch.run(FOUR, 10)
    changes = watch.run(FOUR, 3, {"n0/1": 2.15}) + watch.run(FOUR, 30, {"n0/1": 2.0})
    assert [change.kind for change in changes] == ["slow", "corrected"]
    assert [change.after for change in changes] == pytest.approx([2.15, 2.0], abs=0.025)
    assert [episode.rate for episode in watch.state.devices["n0/1"].episodes] == [changes[-1].after]


def test_a_device_that_flaps_is_told_each_time_and_known_for_it() -> None:
    watch = Watch()
    watch.run(FOUR, 10)
    changes = [
        change for _ in range(5) for change in [*watch.run(FOUR, 10, {"n0/1": 2.0}), *watch.run(FOUR, 10)]
    ]
    assert [change.kind for change in changes] == ["slow", "recovered"] * 5
    found = watch.state.slowness("n0/1")
    assert (found.kind, found.period) == ("periodic", 20)


def test_a_slow_drift_is_followed() -> None:
    watch = Watch()
    changes = [
        change for step in range(300) for change in watch.run(FOUR, 1, {"n0/1": 1 + step / 300}, noise=0.03)
    ]
    assert 4 <= len(changes) <= 16
    assert watch.state.rates["n0/1"] == pytest.approx(2.0, rel=0.1)


def test_great_noise_is_measured_and_makes_detection_slower_not_wild() -> None:
    watch = Watch()
    assert watch.run(FOUR, 200, noise=0.2) == []
    assert watch.state.noise == pytest.approx(0.2, abs=0.1)
    (change,) = watch.run(FOUR, 8, {"n1/1": 4.0}, noise=0.2)
    assert change.device == "n1/1"


@pytest.mark.parametrize(
    "block",
    [
        SectionProfile(seconds=1e-6, slowdown={1: 1.0, 2: 1.3}),
        SectionProfile(seconds=0.7e-6, whole_seconds=0.3e-6),  # of half a block 0.65e-6 a token
    ],
)
def test_members_of_wider_groups_are_not_slow_for_their_width(block: SectionProfile) -> None:
    profile = ModelProfile(name="wide", layers=10, share_units=8, tokens=64, block=block)
    made = plan((10, [(4, ["n0/0"], [8]), (3, ["n1/0", "n1/1"], [4, 4]), (3, ["n0/1"], [8])]))
    wide = {"n1/0": 1.3, "n1/1": 1.3}
    states = [RateState(), RateState()]
    for step in range(30):
        measured = workers.measure(made, step, wide)
        for i, work in enumerate((None, expectation(profile, made))):
            states[i], _ = observe(states[i], measured, SETTINGS, work)
    assert (states[0].rates, states[1].rates) == (wide, {})


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
    assert (
        msgspec.json.decode(msgspec.json.encode(watch.state, enc_hook=as_mapping), type=RateState)
        == watch.state
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slow": 1.05}, "must be at least 1 and below slow"),
        ({"recovered": 0.9}, "must be at least 1"),
        ({"window": 0}, "window must be from 1 to 1,000,000 steps"),
        ({"refine_after_steps": 2}, "must be at least min_steps"),
        ({"false_alarms": 1.0}, r"false_alarms \(1.0\)"),
        ({"noise": 0.0}, r"noise \(0.0\)"),
        ({"tolerance": 0.2}, r"tolerance \(0.2\)"),
        ({"slowdown_change": 0.0}, r"slowdown_change \(0.0\)"),
        ({"link": 1.0}, r"link \(1.0\)"),
        ({"rounding": 0.0}, "rounding"),
    ],
)
def test_settings_that_would_flap_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        DetectSettings(**changes)  # type: ignore[arg-type]
