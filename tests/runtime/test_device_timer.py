"""Times of a device that computes behind its host's back: read without waiting, communication taken out."""

from __future__ import annotations

import pytest

from elasticd.runtime.accelerator import CPU
from elasticd.runtime.telemetry.comm_timer import Stopwatch
from elasticd.runtime.telemetry.device_timer import DeviceTimer, spans_of
from elasticd.runtime.telemetry.step_times import Telemetry


class Device:
    """A device with a queue, as CUDA has: `work` takes its milliseconds when the device comes to it."""

    def __init__(self) -> None:
        self.queued = self.done = 0.0
        self.made = 0

    def work(self, milliseconds: float) -> None:
        self.queued += milliseconds

    def run(self) -> None:
        self.done = self.queued

    def event(self) -> Mark:
        self.made += 1
        return Mark(self)


class Mark:
    """A place in the queue."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, -1.0

    def record(self) -> None:
        self.at = self.device.queued

    def query(self) -> bool:
        return self.device.done >= self.at

    def elapsed_time(self, later: Mark) -> float:
        assert self.query(), "an event that the device has not passed cannot be read"
        assert later.query(), "nor this one"
        return later.at - self.at


def step(device: Device, telemetry: Telemetry, stopwatch: Stopwatch, factor: float = 1.0) -> None:
    device.work(50)  # of no section
    telemetry.mark()
    device.work(10 * factor)
    with stopwatch.measure("tensor"):
        device.work(5)
    device.work(2 * factor)
    telemetry.passed("forward")
    device.work(20 * factor)
    telemetry.passed("backward")
    device.run()  # as when the host has the vote
    telemetry.mark()
    device.work(3)
    telemetry.passed("optimizer")


def test_computation_is_apart_from_communication_and_what_is_not_done_is_read_a_step_later() -> None:
    device, stopwatch = Device(), Stopwatch()
    telemetry = Telemetry("n0/0", stopwatch, spans=DeviceTimer(device.event))
    step(device, telemetry, stopwatch)
    made = telemetry.finish(1, 0)
    assert made.forward_seconds == pytest.approx(0.012)
    assert made.backward_seconds == pytest.approx(0.020)
    assert made.block_seconds == pytest.approx(0.032)
    assert made.tensor_seconds == pytest.approx(0.005)
    assert made.optimizer_seconds == 0.0, "the device is at it still"
    telemetry.begin()
    step(device, telemetry, stopwatch, factor=2.0)
    made = telemetry.finish(1, 1)
    assert made.block_seconds == pytest.approx(0.064), "of this step alone"
    assert made.optimizer_seconds == pytest.approx(0.003), "of the step before"


def test_events_are_used_again_and_a_failed_section_counts_for_nothing() -> None:
    device, stopwatch = Device(), Stopwatch()
    telemetry = Telemetry("n0/0", stopwatch, spans=DeviceTimer(device.event))
    for number in range(20):
        telemetry.begin()
        step(device, telemetry, stopwatch)
        telemetry.finish(1, number)
    assert device.made <= 16
    telemetry.begin()
    telemetry.finish(1, 20)
    telemetry.mark()
    device.work(100)
    with stopwatch.measure("tensor"):
        device.work(5)
    telemetry.mark()  # of the next that runs: the first never came to its end
    device.work(7)
    telemetry.passed("forward")
    device.run()
    made = telemetry.finish(1, 21)
    assert made.forward_seconds == pytest.approx(0.007)
    assert made.tensor_seconds == 0.0


def test_an_evaluation_of_any_size_keeps_no_events_and_the_optimizer_of_the_step_before_counts() -> None:
    device, stopwatch = Device(), Stopwatch()
    telemetry = Telemetry("n0/0", stopwatch, spans=DeviceTimer(device.event))
    step(device, telemetry, stopwatch)
    telemetry.finish(1, 0)
    made = 0
    for number in range(100):
        telemetry.mark()
        telemetry.worked(8, 2, 1.0)
        for _ in range(10):
            with stopwatch.measure("tensor"):
                device.work(1)
        telemetry.passed("forward")
        device.run()  # as when the sums of a round are read
        telemetry.forget()
        made = made or device.made
        assert device.made == made, f"round {number}"
    telemetry.begin()
    step(device, telemetry, stopwatch)
    after = telemetry.finish(1, 1)
    assert after.optimizer_seconds == pytest.approx(0.003)
    assert after.forward_seconds == pytest.approx(0.012)
    assert after.micro_batches == 0, "those of the evaluation are none of the step's"


def test_processors_need_no_events() -> None:
    assert spans_of(CPU) is None
