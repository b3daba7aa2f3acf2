"""The schedule played out: the closed formula where it holds, and the exact recurrence."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from elasticd_planner.cost.schedule import most_alive, passes
from elasticd_planner.cost.schedule_timeline import (
    _Rounds,
    one_f_one_b_curve,
    one_f_one_b_seconds,
    pass_times,
    played_seconds,
)
from elasticd_planner.layout.pass_order import timed_passes
from elasticd_planner.numeric import Floats
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sizes import examples


def drawn(seed: int) -> tuple[Floats, Floats, Floats, int]:
    """A random pipeline: forward, backward, boundary, micro-batches."""
    rng = np.random.default_rng(seed)
    stages, micro_batches = int(rng.integers(1, 10)), int(rng.integers(1, 70))
    forward = rng.uniform(0.2, 2.0, stages)
    backward = forward * rng.uniform(1.0, 3.0, stages)
    boundary = rng.uniform(0, 0.5, stages - 1) * (rng.random() < 0.7)
    return forward, backward, boundary, micro_batches


@given(
    stages=st.integers(1, 9), micro_batches=st.integers(1, 40), ahead=st.floats(0.1, 3), back=st.floats(0.1, 3)
)
@settings(max_examples=examples(60))
def test_equal_stages_take_what_the_closed_formula_says(
    stages: int, micro_batches: int, ahead: float, back: float
) -> None:
    seconds = played_seconds([ahead] * stages, [back] * stages, (), micro_batches)
    assert seconds == pytest.approx((micro_batches + stages - 1) * (ahead + back))


def test_the_recurrence_is_exact_on_500_random_pipelines() -> None:
    for seed in range(500):
        forward, backward, boundary, micro_batches = drawn(seed)
        expected = played_seconds(forward, backward, boundary, micro_batches)
        assert float(one_f_one_b_seconds(forward, backward, boundary, micro_batches)) == pytest.approx(
            expected, rel=1e-12
        ), seed


@given(seed=st.integers(0, 10**6), micro_batches=st.integers(100, 400), scale=st.floats(0.3, 20))
@settings(max_examples=examples(60))
def test_it_is_exact_where_messages_limit_and_rounds_repeat_by_several(
    seed: int, micro_batches: int, scale: float
) -> None:
    forward, backward, _, _ = drawn(seed)
    forward, backward = forward[:5], backward[:5]
    boundary = np.random.default_rng(seed).uniform(0.5, 1, len(forward) - 1) * scale
    expected = played_seconds(forward, backward, boundary, micro_batches)
    found = one_f_one_b_seconds(forward, backward, boundary, micro_batches)
    assert float(found) == pytest.approx(expected, rel=1e-11)
    curve = one_f_one_b_curve(forward, backward, boundary, micro_batches)
    assert float(curve[-1]) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("boundary", [0.01, 0.9, 7.0])
def test_many_micro_batches_take_no_more_rounds(boundary: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, play = [0], _Rounds._forward

    def counted(self: _Rounds) -> None:
        rounds[0] += 1
        play(self)

    monkeypatch.setattr(_Rounds, "_forward", counted)
    forward, between = [1.0, 0.7, 1.3, 0.9], [boundary, 0.8 * boundary, boundary]
    one_f_one_b_seconds(forward, forward, between, 100_000)
    one_f_one_b_curve(forward, forward, between, 10_000)
    assert rounds[0] < 400


@given(seed=st.integers(0, 10**6), most=st.integers(1, 30))
@settings(max_examples=examples(20))
def test_a_curve_is_the_same_as_one_by_one(seed: int, most: int) -> None:
    forward, backward, boundary, _ = drawn(seed)
    one_by_one = [float(one_f_one_b_seconds(forward, backward, boundary, m)) for m in range(1, most + 1)]
    np.testing.assert_allclose(one_f_one_b_curve(forward, backward, boundary, most), one_by_one, rtol=1e-12)


def test_many_pipelines_at_once_are_the_same_as_each_alone() -> None:
    rng = np.random.default_rng(3)
    forward, boundary = rng.uniform(0.5, 1.5, (20, 2, 4)), rng.uniform(0, 0.2, (20, 2, 3))
    together = one_f_one_b_seconds(forward, 2 * forward, boundary, 33)
    curves = one_f_one_b_curve(forward, 2 * forward, boundary, 33)
    assert together.shape == (20, 2)
    for i, j in np.ndindex(20, 2):
        alone = float(one_f_one_b_seconds(forward[i, j], 2 * forward[i, j], boundary[i, j], 33))
        assert float(together[i, j]) == pytest.approx(alone, rel=1e-12)
        assert float(curves[-1, i, j]) == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("count", [20, 200])
def test_pipelines_that_end_within_a_limit_keep_their_seconds_and_others_have_them_or_inf(count: int) -> None:
    rng = np.random.default_rng(count)
    forward, boundary = rng.uniform(0.9, 1.1, (count, 6)), rng.uniform(0, 0.4, (count, 5))
    every = one_f_one_b_seconds(forward, 2 * forward, boundary, 45)
    limit = float(np.quantile(every, 0.3))
    some = one_f_one_b_seconds(forward, 2 * forward, boundary, 45, limit)
    np.testing.assert_allclose(some[every <= limit], every[every <= limit], rtol=1e-12)
    assert np.isinf(some).sum() > count // 2
    near = np.isfinite(some)
    np.testing.assert_allclose(some[near], every[near], rtol=1e-12)


def test_a_period_of_some_rounds_is_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, play = [0], _Rounds._forward

    def counted(self: _Rounds) -> None:
        rounds[0] += 1
        play(self)

    monkeypatch.setattr(_Rounds, "_forward", counted)
    forward, between = np.full(48, 1.0), np.full(47, 0.2)
    forward[10:12] = 1.5  # two micro-batches there and back over their boundary
    found = float(one_f_one_b_seconds(forward, 2 * forward, between, 256))
    assert rounds[0] < 100
    assert found == pytest.approx(played_seconds(forward, 2 * forward, between, 256), rel=1e-11)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(60))
def test_between_the_busiest_stage_and_one_pass_after_the_other(seed: int) -> None:
    forward, backward, boundary, micro_batches = drawn(seed)
    seconds = played_seconds(forward, backward, boundary, micro_batches)
    work = float((forward + backward).max()) * micro_batches
    alone = float((forward + backward).sum() + 2 * boundary.sum())
    assert seconds >= max(work, alone) * (1 - 1e-12)
    assert seconds <= alone * micro_batches * (1 + 1e-12)


@given(seed=st.integers(0, 10**6), grown=st.floats(0.01, 1.0))
@settings(max_examples=examples(40))
def test_more_work_never_takes_less_time(seed: int, grown: float) -> None:
    forward, backward, boundary, micro_batches = drawn(seed)
    before = float(one_f_one_b_seconds(forward, backward, boundary, micro_batches))
    stage = seed % len(forward)
    more = forward.copy()
    more[stage] += grown
    assert float(one_f_one_b_seconds(more, backward, boundary, micro_batches)) >= before * (1 - 1e-12)
    assert float(one_f_one_b_seconds(forward, backward, boundary, micro_batches + 1)) > before
    if boundary.size:
        assert float(one_f_one_b_seconds(forward, backward, boundary + grown, micro_batches)) >= before * (
            1 - 1e-12
        )


@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(30))
def test_intervals_are_whole_ordered_and_hold_no_more_activations_than_1f1b_allows(seed: int) -> None:
    forward, backward, boundary, micro_batches = drawn(seed)
    line = pass_times(forward, backward, boundary, micro_batches)
    ends: dict[tuple[str, int, int], float] = {}
    for stage, done in enumerate(line):
        assert len(done) == 2 * micro_batches
        assert all(a.stop <= b.start for a, b in pairwise(done))
        alive = most = 0
        for work in done:
            alive += 1 if work.kind == "forward" else -1
            most = max(most, alive)
            ends[work.kind, stage, work.micro_batch] = work.stop
        assert most == most_alive(len(forward), stage, micro_batches)
    for stage in range(len(forward) - 1):
        for work in line[stage + 1]:
            if work.kind == "forward":
                assert work.start >= ends["forward", stage, work.micro_batch] + boundary[stage] - 1e-9


def test_micro_batches_of_different_length_are_played_in_order() -> None:
    line = timed_passes(passes, [[1.0, 3.0], [1.0, 3.0]], [[1.0, 3.0], [1.0, 3.0]])
    # Stage 0: F0 0-1, F1 1-4, B0 4-5 (B0 of stage 1 ended at 3); stage 1: F1 4-7, B1 7-10; stage 0: B1 10-13.
    assert [(one.kind, one.micro_batch, one.start) for one in line[0]] == [
        ("forward", 0, 0.0),
        ("forward", 1, 1.0),
        ("backward", 0, 4.0),
        ("backward", 1, 10.0),
    ]
    assert max(one.stop for stage in line for one in stage) == 13.0


def test_a_link_carries_one_micro_batch_after_the_other() -> None:
    seconds = played_seconds([0.1, 0.1], [0.1, 0.1], [5.0], 4)
    assert seconds > 4 * 5.0, "four transfers each way over one link, though computation takes no time"


def test_no_micro_batch_is_refused() -> None:
    with pytest.raises(Invalid, match="at least 1"):
        one_f_one_b_seconds([1.0], [1.0], [], 0)
    with pytest.raises(Invalid, match="0 micro-batches"):
        pass_times([1.0], [1.0], [], 0)
