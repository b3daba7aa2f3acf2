"""Pacing: a set time for a block, computation that is already there taken off."""

from __future__ import annotations

import time

import pytest

from elasticd.runtime.telemetry import emulation
from elasticd.runtime.telemetry.emulation import SpeedEmulator
from elasticd.wire.worker import EmulatedSpeed


class Clock:
    """Time that passes where it is slept, or said to pass. Who sleeps wakes `late` seconds after his time."""

    def __init__(self) -> None:
        self.now, self.late = 1000.0, 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(emulation, "time", made)
    return made


def paced(
    clock: Clock, pacer: SpeedEmulator, kind: str, tokens: int, share: float, computed: float = 0.0
) -> float:
    """Seconds of a pass that computed for `computed` of them."""
    start = clock.now
    clock.now += computed
    pacer(kind, tokens, share, start, 0.0)
    return clock.now - start


def test_a_block_takes_seconds_by_tokens_share_and_rate(clock: Clock) -> None:
    pacer = SpeedEmulator(EmulatedSpeed(forward=0.0002, backward=0.0004))
    assert paced(clock, pacer, "forward", 100, 1.0, computed=0.005) == pytest.approx(0.02)
    assert paced(clock, pacer, "backward", 100, 1.0, computed=0.005) == pytest.approx(0.04)
    pacer.pace = EmulatedSpeed(forward=0.0002, backward=0.0004, factor=3.0)
    assert paced(clock, pacer, "forward", 100, 0.5, computed=0.005) == pytest.approx(0.03)
    assert pacer.take() == (3, 0)
    assert pacer.take() == (0, 0)


def test_attention_takes_as_long_as_all_else_where_sequences_are_as_long_as_said(clock: Clock) -> None:
    pacer = SpeedEmulator(EmulatedSpeed(forward=0.0002, backward=0.0004, attention_tokens=50))
    start = clock.now
    pacer("forward", 100, 1.0, start, 0.0, squares=100 * 50.0)
    assert clock.now - start == pytest.approx(0.04)
    start = clock.now
    pacer("backward", 100, 0.5, start, 0.0, squares=100 * 100.0)
    assert clock.now - start == pytest.approx(0.06)


def test_the_clock_is_the_real_one() -> None:
    start = time.perf_counter()
    assert SpeedEmulator(EmulatedSpeed(forward=0.0002))("forward", 100, 1.0, start, 0.0) >= start + 0.02
    assert time.perf_counter() - start >= 0.02


def test_communication_comes_on_top(clock: Clock) -> None:
    pacer = SpeedEmulator(EmulatedSpeed(forward=0.0002, backward=0.0004))
    start = clock.now
    clock.now += 0.055
    pacer("forward", 100, 1.0, start, 0.05)  # 50 ms had gone into the TP group
    assert clock.now - start == pytest.approx(0.07)


def test_passes_in_a_row_end_by_the_table_however_late_each_wakes(clock: Clock) -> None:
    pacer = SpeedEmulator(EmulatedSpeed(forward=0.001, backward=0.002))
    clock.late = 0.003
    start = ended = clock.now
    for _ in range(20):
        ended = pacer("forward", 10, 0.5, ended, 0.0)
    assert ended - start == pytest.approx(0.1)
    assert pacer.take() == (20, 0)
    late = clock.now - 1.0
    assert pacer("forward", 10, 0.5, late, 0.0) == clock.now, "an overrun ends when it is over"


def test_what_was_slept_too_long_is_not_stretched_once_more(clock: Clock) -> None:
    pacer = SpeedEmulator(EmulatedSpeed(factor=3.0))
    clock.late = 0.003
    ended = pacer("forward", 10, 1.0, clock.now - 0.01, 0.0)
    assert ended == clock.now == pytest.approx(1000.023)


def test_an_overrun_is_counted(clock: Clock) -> None:
    pacer = SpeedEmulator(EmulatedSpeed(forward=1e-9, backward=1e-9))
    pacer("forward", 1, 1.0, clock.now - 0.01, 0.0)
    assert pacer.take() == (1, 1)


def test_without_a_table_a_slow_device_stretches_what_was_computed(clock: Clock) -> None:
    pacer = SpeedEmulator(None)
    assert paced(clock, pacer, "forward", 100, 1.0, computed=0.02) == pytest.approx(0.02)
    pacer.pace = EmulatedSpeed(factor=3.0)
    assert paced(clock, pacer, "forward", 100, 1.0, computed=0.02) == pytest.approx(0.06)
    assert pacer.take() == (0, 0)
