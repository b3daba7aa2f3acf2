"""Detection on a recorded trace: real computation on a machine that has other work beside.

`recorded/busy_machine.csv` has a line a step and a column a process: microseconds of a block, by `Telemetry`,
of four processes that multiplied matrices in step with each other, on two cores that were wanted about twenty
times over. The third made three times as much in steps 80 to 129, and said nothing of it. The others' times
stray by a fifth from step to step; the third was about twice as slow as they were, since it had more of the
cores while they waited.
"""

from pathlib import Path

import pytest
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.stragglers import Change, RateState, observe
from elasticd_planner.spec.measurement import Measurement

RECORDED = Path(__file__).parent / "recorded" / "busy_machine.csv"
DEVICES = ("n0/0", "n0/1", "n1/0", "n1/1")


def replayed(settings: DetectSettings) -> tuple[RateState, list[Change]]:
    state, changes = RateState(), []
    for step, line in enumerate(RECORDED.read_text().splitlines()):
        measured = [
            Measurement(
                device=device,
                plan=1,
                step=step,
                tokens=1000,
                block_seconds=int(spent) * 1e-6,
                block_work=1000.0,
            )
            for device, spent in zip(DEVICES, line.split(","), strict=True)
        ]
        state, found = observe(state, measured, settings)
        changes += found
    return state, changes


def test_the_slow_process_is_found_soon_and_no_other_in_spite_of_the_noise() -> None:
    state, changes = replayed(DetectSettings())
    assert {change.device for change in changes} == {"n1/0"}
    first, *_, last = changes
    assert (first.kind, last.kind) == ("slow", "recovered")
    assert 80 <= first.step <= 86
    assert 130 <= last.step <= 140
    assert 1.5 < first.after < 2.5
    assert state.rates == {}
    assert state.noise == pytest.approx(0.2, abs=0.05)


def test_what_counts_as_slow_is_a_setting() -> None:
    """Three times as slow does not come up in it: the process was about twice as slow."""
    _, changes = replayed(DetectSettings(slow=5.0))
    assert changes == []
