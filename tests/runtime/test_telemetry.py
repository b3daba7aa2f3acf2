"""Telemetry: computation without the communication in it, by pass, and what the step's sequences were like."""

import time

import pytest
import torch

from elasticd.runtime.accelerator import CPU
from elasticd.runtime.data.collate import pad
from elasticd.runtime.telemetry.comm_timer import Stopwatch
from elasticd.runtime.telemetry.step_times import SequenceHere, Telemetry


def spend(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_passes_are_told_apart_and_communication_is_no_computation() -> None:
    stopwatch = Stopwatch()
    telemetry = Telemetry("n0/0", stopwatch)
    telemetry.mark()
    spend(0.01)
    with stopwatch.measure("tensor"):
        spend(0.05)
    telemetry.passed("forward")
    spend(0.03)
    telemetry.passed("backward")
    with stopwatch.measure("input"):
        spend(0.02)
    made = telemetry.finish(1, 7)
    assert made.tensor_seconds >= 0.05
    assert made.input_seconds >= 0.02
    assert made.forward_seconds >= 0.01
    assert made.backward_seconds >= 0.03
    assert made.block_seconds == pytest.approx(made.forward_seconds + made.backward_seconds)
    assert made.step_seconds >= made.block_seconds + made.tensor_seconds + made.input_seconds


def test_sequences_are_counted_by_length_with_the_sum_of_their_squares() -> None:
    telemetry = Telemetry("n0/0", Stopwatch(), memory=lambda: 123)
    telemetry.worked(4 * 256, 3, 0.5, [SequenceHere(256, 256, True)] * 4)
    telemetry.worked(2 * 1024, 3, 0.5, [SequenceHere(1024, 1024, True)] * 2)
    made = telemetry.finish(1, 0)
    assert (made.tokens, made.block_work, made.micro_batches) == (3072, 3072 * 1.5, 2)
    assert made.squares == 4 * 256**2 + 2 * 1024**2
    assert (made.longest, made.lengths, made.memory_bytes) == (1024, {32: 4, 40: 2}, 123)
    telemetry.begin()
    again = telemetry.finish(1, 1)
    assert (again.squares, again.longest, again.lengths) == (0.0, 0, {})


def test_a_part_of_a_sequence_counts_its_tokens_by_the_length_of_the_whole_and_the_sequence_once() -> None:
    parts = [Telemetry("n0/0", Stopwatch()), Telemetry("n0/1", Stopwatch())]
    for begins, (telemetry, tokens) in zip((True, False), zip(parts, (768, 256), strict=True), strict=True):
        telemetry.worked(tokens, 1, 1.0, [SequenceHere(tokens, 1024, begins)])
    made = [telemetry.finish(1, 0) for telemetry in parts]
    assert sum(each.squares for each in made) == 1024**2
    assert [each.lengths for each in made] == [{40: 1}, {}]


def test_a_failed_section_counts_for_nothing_and_memory_is_that_of_the_process() -> None:
    telemetry, began = Telemetry("n0/0", Stopwatch()), time.perf_counter()
    telemetry.mark()
    spend(0.05)
    telemetry.mark()
    telemetry.passed("forward")
    assert telemetry.finish(1, 0).block_seconds < time.perf_counter() - began - 0.05
    assert CPU.used_bytes() > 1 << 20


def test_modalities_are_counted_where_the_batches_name_them() -> None:
    telemetry = Telemetry("n0/0", Stopwatch())
    samples = [
        {"inputs": torch.zeros(3), "modalities": {"image": 2}},
        {"inputs": torch.zeros(1), "modalities": {"image": 1, "audio": 4}},
    ]
    telemetry.named(pad(samples))
    telemetry.named({"modalities": {"audio": 1}})
    telemetry.named({"inputs": torch.zeros(1)})
    telemetry.named((torch.zeros(1),))
    assert telemetry.finish(1, 0).modalities == {"image": 3, "audio": 5}
    telemetry.begin()
    assert telemetry.finish(1, 1).modalities == {}
