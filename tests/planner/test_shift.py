"""Shifts of the data: found soon, told once with what the new lengths are, and never made of noise."""

import math

import msgspec
import numpy as np
import pytest
from elasticd_planner.detection.data_shift import Shift, ShiftState, watch
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.spec.sequence_lengths import Lengths

SETTINGS = DetectSettings()


class Data:
    """Batches of log-normal sequences, fed to the detection one by one."""

    def __init__(self, seed: int, sequences: int = 64) -> None:
        self.rng = np.random.Generator(np.random.Philox(key=[seed, 0]))
        self.sequences, self.state, self.step = sequences, ShiftState(), 0

    def run(self, steps: int, times: float = 1.0) -> list[Shift]:
        told = []
        for _ in range(steps):
            drawn = times * self.rng.lognormal(math.log(512), 0.6, self.sequences)
            mean = float(drawn.mean())
            effective = float((drawn**2).sum() / drawn.sum())
            lengths = Lengths(mean=mean, effective=effective, longest=float(drawn.max()))
            self.state, shift = watch(self.state, self.step, lengths, SETTINGS)
            told += [shift] if shift else []
            self.step += 1
        return told


@pytest.mark.parametrize("times", [2.0, 0.5, 8.0])
def test_lengths_that_double_in_a_step_are_told_within_twenty(times: float) -> None:
    data = Data(1)
    assert data.run(100) == []
    told = data.run(20, times)
    assert told
    assert told[0].step < 120
    found = told[-1].after
    assert found.mean / told[0].before.mean == pytest.approx(times, rel=0.15)
    assert "the data's lengths shifted" in told[0].reason
    assert len(told) <= 2
    back = data.run(20)
    assert back
    assert back[-1].after.mean == pytest.approx(told[0].before.mean, rel=0.15)


def test_batches_that_only_stray_are_no_shift() -> None:
    for seed in range(5):
        assert Data(seed).run(400) == []
        assert Data(seed, sequences=4).run(400) == []


def test_a_tail_that_grows_is_a_shift_though_the_mean_stays() -> None:
    state = ShiftState()
    plain = Lengths(mean=500, effective=520, longest=700)
    tailed = Lengths(mean=510, effective=1500, longest=8000)
    for step in range(30):
        state, shift = watch(state, step, plain, SETTINGS)
        assert shift is None
    told = []
    for step in range(30, 40):
        state, shift = watch(state, step, tailed, SETTINGS)
        told += [shift] if shift else []
    (shift,) = told
    assert shift.after.effective == pytest.approx(tailed.effective)
    assert shift.after.longest == tailed.longest


def test_a_slow_drift_is_told_in_the_end() -> None:
    data = Data(2)
    data.run(50)
    told = [shift for step in range(300) for shift in data.run(1, 1 + step / 300)]
    assert 2 <= len(told) <= 10
    assert data.state.lengths is not None
    assert data.state.lengths.mean == pytest.approx(2 * 512 * math.exp(0.18), rel=0.15)


def test_old_steps_and_steps_without_lengths_change_nothing() -> None:
    data = Data(3)
    data.run(20)
    before = data.state
    assert watch(before, 5, before.lengths, SETTINGS) == (before, None)
    assert watch(before, 50, None, SETTINGS) == (before, None)
    assert msgspec.json.decode(msgspec.json.encode(before), type=ShiftState) == before
