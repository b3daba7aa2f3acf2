"""What the schedule takes lies between its bounds; the formula is what its name says."""

from __future__ import annotations

import numpy as np
import pytest
from elasticd_planner.cost.pipeline_time import Formula, Schedule, Times, at_least, at_least_in_turns, closed
from elasticd_planner.cost.schedule_timeline import played_seconds
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.sizes import examples


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Times, int]:
    """Stages as unequal as may be, some slow boundaries."""
    stages = draw(st.integers(1, 8))
    seconds = st.floats(0.01, 10.0)
    forward = np.array(draw(st.lists(seconds, min_size=stages, max_size=stages)))
    backward = forward * np.array(draw(st.lists(st.floats(0.5, 3.0), min_size=stages, max_size=stages)))
    boundary = draw(st.lists(st.floats(0.0, 3.0), min_size=stages - 1, max_size=stages - 1))
    return Times(forward=forward, backward=backward, boundary=np.array(boundary)), draw(st.integers(1, 30))


def played(times: Times, micro_batches: int) -> float:
    return played_seconds(times.forward, times.backward, times.boundary, micro_batches)


@settings(max_examples=examples(300))
@given(pipelines(), st.floats(0.15, 0.85))
def test_without_boundaries_the_schedule_takes_no_more_than_the_formula(
    case: tuple[Times, int], part: float
) -> None:
    """Where forward is the same part of every stage's work."""
    times, micro_batches = case
    alike = Times(forward=part * times.work, backward=(1 - part) * times.work, boundary=0 * times.boundary)
    most = float(Formula().seconds(alike, micro_batches))
    assert played(alike, micro_batches) <= most * (1 + 1e-9)


def test_the_formula_is_no_bound_where_boundaries_cost_or_only_some_stages_recompute() -> None:
    """Why nothing may be pruned by it."""
    forward, work = np.full(3, 0.84), np.array([0.14, 5.8, 0.27])
    far = Times(forward=forward * work, backward=(1 - forward) * work, boundary=np.array([3.0, 0.1]))
    assert played(far, 2) > 1.06 * float(Formula().seconds(far, 2))
    forward, work = np.array([0.25, 0.25, 1 / 3, 1 / 3, 1 / 3, 0.25]), np.array([0.5, 12, 12, 0.1, 0.5, 0.1])
    some = Times(forward=forward * work, backward=(1 - forward) * work, boundary=np.zeros(5))
    assert played(some, 6) > 1.02 * float(Formula().seconds(some, 6))


@settings(max_examples=examples(200))
@given(pipelines())
def test_the_schedule_takes_no_less_than_any_inequality(case: tuple[Times, int]) -> None:
    times, m = case
    seconds, work = played(times, m) * (1 + 1e-9), times.work
    through = times.charged
    assert at_least(times, m) <= seconds
    assert at_least_in_turns(times, m) <= seconds
    stages = len(work)
    for j in range(stages):
        turns = min(m - 1, stages - 1 - j)
        assert m * work[j] + through[:j].sum() <= seconds
        assert through.sum() + (m - 1) * work[j] - turns * times.forward[j] <= seconds


@settings(max_examples=examples(100))
@given(pipelines())
def test_what_is_hidden_is_the_largest_forward_part_of_the_slowest_stage(case: tuple[Times, int]) -> None:
    """The form that the search at scale and the bound go by."""
    times, m = case
    hidden = float((times.forward / times.work).max())
    again = m - 1 - hidden * min(m - 1, len(times.work) - 1)
    least = float(times.charged.sum() + again * times.work.max())
    assert least <= played(times, m) * (1 + 1e-9)


@settings(max_examples=examples(40))
@given(pipelines())
def test_seconds_are_those_of_the_events_and_curves_are_seconds(case: tuple[Times, int]) -> None:
    times, micro_batches = case
    assert float(Schedule().seconds(times, micro_batches)) == pytest.approx(played(times, micro_batches))
    for timing in (Formula(), Schedule()):
        each = [float(timing.seconds(times, m)) for m in range(1, micro_batches + 1)]
        np.testing.assert_allclose(timing.curve(times, micro_batches), each, rtol=1e-9)


#: Fewer micro-batches than stages: no stage has as many under way as the stages behind it.
FEW = Times(forward=np.ones(5), backward=np.array([1.0, 3.0, 1.0, 1.0, 0.5]), boundary=np.zeros(4)), 1


@settings(max_examples=examples(60))
@given(pipelines(), st.floats(0.5, 1.5), st.integers(0, 2**32 - 1))
@example(FEW, 1.0, 0)
def test_pipelines_within_a_limit_take_what_they_take_without_one(
    case: tuple[Times, int], part: float, seed: int
) -> None:
    one, micro_batches = case
    longer = np.random.default_rng(seed).uniform(0.5, 2.0, (12, 1))
    many = Times(
        forward=one.forward * longer, backward=one.backward * longer, boundary=one.boundary + 0 * longer
    )
    seconds = Schedule().seconds(many, micro_batches)
    limit = float(np.median(seconds)) * part
    limited = Schedule().seconds(many, micro_batches, limit)
    within = seconds <= limit
    # Sums of other numbers of pipelines at once are rounded otherwise.
    np.testing.assert_allclose(limited[within], seconds[within], rtol=1e-12, atol=0)
    assert (seconds[np.isinf(limited)] > limit).all()
    assert float(Schedule().seconds(one, micro_batches, limit=1e-9)) == np.inf


def test_the_formula_repeats_the_slowest_stage() -> None:
    assert closed([1.0, 3.0, 2.0], 4) == 3 * 3 + 6
    assert closed([1.0], 1) == 1
    times = Times(forward=np.array([1.0, 1.0]), backward=np.array([2.0, 1.0]), boundary=np.array([0.5]))
    assert Formula().seconds(times, 3) == 2 * (3 + 2 * 0.5) + (3 + 2 * 0.5) + 2


def test_a_slow_stage_in_front_is_quicker_than_one_behind() -> None:
    """While the rest of the first micro-batch is under way, the first stage goes ahead with others."""
    slow_first = Times(forward=np.array([2.0, 1.0]), backward=np.array([4.0, 2.0]), boundary=np.zeros(1))
    slow_last = Times(forward=np.array([1.0, 2.0]), backward=np.array([2.0, 4.0]), boundary=np.zeros(1))
    assert Schedule().seconds(slow_first, 8) < Schedule().seconds(slow_last, 8)
    assert Formula().seconds(slow_first, 8) == Formula().seconds(slow_last, 8)
