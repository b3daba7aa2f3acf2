"""A step's reports, gathered one by one."""

from __future__ import annotations

from elasticd_planner.measurement import Measurement

from elasticd.machines.job.state import NOTHING


def measured(device: str, seconds: float = 1.0) -> Measurement:
    return Measurement(device=device, plan=1, step=1, tokens=1, block_seconds=seconds, block_work=1.0)


def test_each_device_counts_once_and_its_last_word_holds() -> None:
    found = NOTHING
    for device in ("a/0", "b/0", "a/1", "a/0"):
        found = found.after(measured(device))
    found = found.after(measured("b/0", 2.0))
    assert found.count == 3
    assert found.by_device() == {
        "a/0": measured("a/0"),
        "a/1": measured("a/1"),
        "b/0": measured("b/0", 2.0),
    }


def test_a_report_changes_no_value_that_was_there_before() -> None:
    before = NOTHING.after(measured("a/0"))
    before.after(measured("a/1"))
    assert before.by_device() == {"a/0": measured("a/0")}
    assert NOTHING.count == 0
