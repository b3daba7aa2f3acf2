"""A step's reports, gathered one by one."""

from __future__ import annotations

import msgspec
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.step_measurements import NONE_REPORTED, Reported, Step, row_of


def measured(device: str, seconds: float = 1.0) -> Measurement:
    return Measurement(device=device, plan=1, step=1, tokens=1, block_seconds=seconds, block_work=1.0)


def whole(found: Reported, *devices: str) -> Step:
    return found.whole(plan=1, step=1, devices=devices)


def test_each_device_counts_once_and_its_last_word_holds() -> None:
    found = NONE_REPORTED
    for device in ("a/0", "b/0", "a/1", "a/0"):
        found = found.after(measured(device))
    found = found.after(measured("b/0", 2.0))
    assert found.count == 3
    assert whole(found, "b/0", "a/1", "a/0") == Step.of(
        [measured("b/0", 2.0), measured("a/1"), measured("a/0")]
    )


def test_a_report_changes_no_value_that_was_there_before() -> None:
    before = NONE_REPORTED.after(measured("a/0"))
    before.after(measured("a/1"))
    assert [device for held in before.buckets.values() for device in held] == ["a/0"]
    assert NONE_REPORTED.count == 0


def test_rows_of_another_release_are_not_mixed_with_ones_of_this() -> None:
    other = Reported(buckets={0: {"a/0": row_of(measured("a/0"))}}, columns=("block_work",))
    assert other.after(measured("a/1")) == NONE_REPORTED.after(measured("a/1"))


def test_what_release_0_1_was_gathering_is_nothing_here() -> None:
    recorded = b'{"count": 1, "nodes": {"a": {"a/0": {"job": "job"}}}}'
    assert msgspec.json.decode(recorded, type=Reported).after(measured("a/1")) == NONE_REPORTED.after(
        measured("a/1")
    )
