"""Devices without work, rated by probes: new ones at once, known ones by two in a row."""

from __future__ import annotations

from elasticd_planner.detection.idle_probes import ProbeState, judged
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.stragglers import Change, RateState, all_believed

SETTINGS = DetectSettings()


class Fleet:
    """Devices that are probed, and what is believed of them."""

    def __init__(self, **factors: float) -> None:
        self.probes, self.rates = ProbeState(), RateState()
        for device, factor in factors.items():
            self.hear(device, factor)

    def hear(self, device: str, factor: float) -> None:
        disturbed = (1.9, 1.01, 1.0, 1.03, 4.0)
        self.probes = self.probes.heard(device, [0.002 * factor * each for each in disturbed])

    def judge(self) -> list[Change]:
        self.probes, self.rates, changes = judged(self.probes, self.rates, SETTINGS)
        return list(changes)

    def probe(self, device: str, factor: float) -> list[Change]:
        self.hear(device, factor)
        return self.judge()


def test_a_device_that_is_new_is_rated_by_its_first_probe_whatever_disturbs_most_of_it() -> None:
    fleet = Fleet(a=1.0, b=1.02, c=2.5, d=0.99)
    (change,) = fleet.judge()
    assert (change.device, change.kind, change.after) == ("c", "slow", 2.5)
    assert "the same matrix product" in change.reason
    assert fleet.rates.rates == {"c": 2.5}
    assert fleet.judge() == [], "once"


def test_of_two_devices_the_slow_one_is_found() -> None:
    (change,) = Fleet(a=3.0, b=1.0).judge()
    assert (change.device, change.after) == ("a", 3.0)


def test_a_known_device_changes_by_two_probes_in_a_row_alone() -> None:
    fleet = Fleet(a=1.0, b=1.0, c=1.0)
    assert fleet.judge() == []
    assert fleet.probe("c", 2.0) == [], "one may be disturbed from beginning to end"
    assert fleet.probe("c", 1.0) == []
    assert fleet.probe("c", 2.0) == []
    (change,) = fleet.probe("c", 2.1)
    assert (change.kind, change.after) == ("slow", 2.0)
    assert fleet.probe("c", 1.0) == []
    (change,) = fleet.probe("c", 1.02)
    assert (change.kind, change.after) == ("recovered", 1.0)


def test_what_was_probed_before_it_worked_makes_no_device_well_that_is_slow_at_work() -> None:
    fleet = Fleet(a=1.0, b=1.0, c=1.0)
    fleet.judge()
    fleet.probes = fleet.probes.worked(1, ("a", "b", "c"))
    fleet.rates, changes = all_believed(fleet.rates, {"c": (3.0, 3.0)}, SETTINGS, "the fleet")
    assert len(changes) == 1
    assert fleet.probe("c", 1.0) == []
    (change,) = fleet.probe("c", 1.0)
    assert (change.kind, fleet.rates.rates) == ("recovered", {})


def test_another_rate_is_believed_where_two_probes_agree_on_the_direction() -> None:
    fleet = Fleet(a=1.0, b=1.0, c=2.0)
    fleet.judge()
    assert fleet.probe("c", 3.0) == []
    (change,) = fleet.probe("c", 3.1)
    assert (change.kind, change.before) == ("slower", 2.0)
    assert fleet.rates.rates == {"c": 3.1}


def test_times_that_are_none_are_not_counted() -> None:
    probes = ProbeState().heard("a", (0.0, -1.0, float("inf"), float("nan")))
    assert not probes.devices
    assert ProbeState().heard("a", (0.0, 0.5)).devices["a"].cost == 0.5
