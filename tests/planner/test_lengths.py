"""Lengths of sequences: what a step's are like, and what a model costs at others."""

import msgspec
import pytest
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.detection.fleet_baseline import Curve
from elasticd_planner.detection.lengths import attention_rise, evaluated
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.sequence_lengths import Lengths, bucket, even, histogram
from elasticd_planner.spec.step_measurements import Step
from elasticd_planner.value import Invalid
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.models import SPEC

SHORT = Lengths(mean=256, effective=300, longest=1024)
LONG = Lengths(mean=512, effective=900, longest=4096)


def measured(device: str, lengths: list[int]) -> Measurement:
    return Measurement(
        device=device,
        plan=1,
        step=3,
        tokens=sum(lengths),
        block_seconds=1.0,
        block_work=1.0,
        squares=sum(length**2 for length in lengths),
        longest=max(lengths, default=0),
        lengths=histogram(lengths),
    )


@given(st.lists(st.integers(1, 1 << 20), min_size=1))
def test_a_histogram_has_each_sequence_once_in_its_bucket(lengths: list[int]) -> None:
    counts = histogram(lengths)
    assert sum(counts.values()) == len(lengths)
    for length in lengths:
        assert 2 ** (bucket(length) / 4) <= length * (1 + 1e-9) < 2 ** ((bucket(length) + 1) / 4) * (1 + 1e-8)


def test_members_of_a_pipeline_count_its_sequences_once() -> None:
    one, two = [100, 300], [200, 800]
    turned = msgspec.structs.replace(measured("b", one), lengths=dict(reversed(histogram(one).items())))
    found = Step.of([measured("a", one), turned, measured("c", two), measured("d", [])]).lengths
    assert found == Lengths(mean=350, effective=(100**2 + 300**2 + 200**2 + 800**2) / 1400, longest=800)
    assert Step.of([measured("d", [])]).lengths is None


def test_times_follow_tokens_and_squares_and_memory_the_longest() -> None:
    profile = derive(SPEC, 256, 2)
    rise = attention_rise(SPEC)
    long = evaluated(profile, even(256), LONG, rise)
    assert long.tokens == 2 * 512
    assert long.block.seconds == pytest.approx(profile.block.seconds * (1 + rise * 900) / (1 + rise * 256))
    kept = profile.activation_bytes(profile.block, 4)
    assert long.activation_bytes(long.block, 4) == pytest.approx(kept * 4096 / 256)


def test_even_lengths_give_what_the_shapes_give() -> None:
    """Attention alone makes a longer sequence's tokens dearer, as in the derived profile."""
    found, made = (
        evaluated(derive(SPEC, 256, 2), even(256), even(1024), attention_rise(SPEC)),
        derive(SPEC, 1024, 2),
    )
    assert found.block.seconds == pytest.approx(made.block.seconds)
    assert found.tokens == made.tokens
    assert found.block.cut_activation == pytest.approx(made.block.cut_activation)


def test_there_and_back_again_is_the_same_profile() -> None:
    profile = derive(SPEC, 256, 2)
    back = evaluated(evaluated(profile, SHORT, LONG, 0.01), LONG, SHORT, 0.01)
    assert back.tokens == pytest.approx(profile.tokens)
    assert back.block.seconds == pytest.approx(profile.block.seconds)
    assert back.block.cut_activation == pytest.approx(profile.block.cut_activation)


def test_a_measured_rise_replaces_that_of_the_shapes_once_it_is_known() -> None:
    shapes = attention_rise(SPEC)
    assert attention_rise(SPEC, Curve(rise=0.5, middle=250, known=1.0)) == shapes
    assert attention_rise(SPEC, Curve(rise=0.5, middle=250, known=100.0)) == pytest.approx(0.002)


@pytest.mark.parametrize("numbers", [(0, 1, 2), (3, 2, 4), (2, 4, 3)])
def test_lengths_that_cannot_be_are_refused(numbers: tuple[int, int, int]) -> None:
    mean, effective, longest = numbers
    with pytest.raises(Invalid, match="mean <= effective <= longest"):
        Lengths(mean=mean, effective=effective, longest=longest)
    with pytest.raises(Invalid, match="cannot make a token cheaper"):
        evaluated(derive(SPEC, 256, 2), SHORT, LONG, -0.1)


def test_in_packed_rows_a_token_keeps_what_it_kept_whatever_the_lengths() -> None:
    profile = derive(SPEC, 256, 2)
    kept = profile.activation_bytes(profile.block, 4) / profile.tokens
    long = evaluated(profile, even(256), LONG, 0.01, rows=True)
    assert long.tokens == 2 * 512
    assert long.activation_bytes(long.block, 4) / long.tokens == pytest.approx(kept)
    padded = evaluated(profile, even(256), LONG, 0.01)  # a micro-batch of the longest must fit
    assert padded.activation_bytes(padded.block, 4) > 1.5 * kept * 2 * 512
