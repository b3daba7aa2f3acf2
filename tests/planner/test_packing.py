"""Samples of unequal length in a step's micro-batches."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import pytest
from elasticd_planner.spec.batch import BatchLengths, BatchPlan, batch_plan, ids_of
from elasticd_planner.spec.model import ModelSpec, Parameter
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.sample_packing import cost, dealt, linear_of, runs
from elasticd_planner.value import Invalid
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.models import plan


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """Lengths, micro-batches, samples in each, linear."""
    count, most = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(0, 40), min_size=count * most, max_size=count * most))
    return lengths, count, most, draw(st.integers(1, 30))


def costs(cut: tuple[tuple[int, ...], ...], lengths: list[int], linear: int) -> list[int]:
    return [cost(len(run), max(1, *(lengths[i] for i in run)), linear) for run in cut]


@given(problems())
def test_every_sample_is_in_one_micro_batch_and_none_is_empty(given: tuple[list[int], int, int, int]) -> None:
    lengths, count, most, linear = given
    cut = runs(lengths, count, most, linear)
    assert len(cut) == count
    assert sorted(i for run in cut for i in run) == list(range(len(lengths)))
    assert all(run for run in cut)


@given(problems())
def test_no_micro_batch_has_more_tokens_than_equal_counts_may_have(
    given: tuple[list[int], int, int, int],
) -> None:
    lengths, count, most, linear = given
    longest = max(1, *lengths)
    for run in runs(lengths, count, most, linear):
        assert len(run) * max(lengths[i] for i in run) <= most * longest


@given(problems())
def test_the_costliest_micro_batch_is_the_least_that_runs_of_sorted_samples_allow(
    given: tuple[list[int], int, int, int],
) -> None:
    """Against all ways to cut the sorted samples within the tokens that are allowed."""
    lengths, count, most, linear = given
    descending = sorted((max(1, length) for length in lengths), reverse=True)
    room = most * descending[0]
    cuts = [(0, *inner, len(lengths)) for inner in combinations(range(1, len(lengths)), count - 1)]
    best = min(
        max(cost(b - a, descending[a], linear) for a, b in pairwise(ends))
        for ends in cuts
        if all((b - a) * descending[a] <= room for a, b in pairwise(ends))
    )
    assert max(costs(runs(lengths, count, most, linear), lengths, linear)) == best


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.data())
def test_each_pipeline_gets_its_number_of_micro_batches(weights: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(weights)))
    slots = [count for count in (first, len(weights) - first) if count]
    found = dealt(weights, slots)
    assert [len(each) for each in found] == slots
    assert sorted(i for each in found for i in each) == list(range(len(weights)))


def test_short_samples_share_a_micro_batch_and_a_long_one_has_its_own() -> None:
    made = plan((1, [(1, ["n0/0"], [1])]), (1, [(1, ["n1/0"], [1])])).replace(micro_batch=4, global_batch=8)
    lengths = BatchLengths(tokens=(10, 10, 10, 70, 10, 10, 10, 10), linear=1000)
    assert dealt_to(made, batch_plan(made, 0, range(100, 108), lengths)) == [
        ((103,),),
        ((100, 101, 102, 104, 105, 106, 107),),
    ]


def dealt_to(made: Plan, batch: BatchPlan) -> list[tuple[tuple[int, ...], ...]]:
    """The samples that the members get, in rank order."""
    return [tuple(map(ids_of, batch.of(place))) for place in made.places.values()]


def test_pipelines_of_unequal_speed_get_work_as_planned() -> None:
    """Three micro-batches to one: the work goes as three to one, though samples are of all lengths."""
    made = plan((3, [(1, ["n0/0"], [1])]), (1, [(1, ["n1/0"], [1])])).replace(micro_batch=16, global_batch=64)
    tokens = tuple(50 + (i * 37) % 400 for i in range(64))
    pipelines = dealt_to(made, batch_plan(made, 0, range(64), BatchLengths(tokens=tokens, linear=3000)))
    work = [sum(cost(len(m), max(tokens[i] for i in m), 3000) for m in pipeline) for pipeline in pipelines]
    assert work[0] / work[1] == pytest.approx(3.0, rel=0.1)


def test_lengths_that_do_not_fit_are_refused() -> None:
    made = plan((1, [(1, ["n0/0"], [1])]))
    with pytest.raises(Invalid, match="2 lengths for 1 samples"):
        batch_plan(made, 0, (1,), BatchLengths(tokens=(1, 2), linear=1))
    with pytest.raises(Invalid, match="must not be negative"):
        BatchLengths(tokens=(-1,), linear=1)


def test_what_a_token_costs_follows_from_the_blocks_matrices() -> None:
    kind = (
        Parameter(name="norm", shape=(8,), dtype="float32"),
        Parameter(name="w", shape=(32, 8), dtype="float32"),
    )
    spec = ModelSpec(
        name="m", embed=(), kinds=(kind,), layers=(0, 0), head=(), units=(), ties=(), width=8, dtype="float32"
    )
    assert linear_of(spec) == 32


def test_so_many_micro_batches_of_one_sample_take_little_time() -> None:
    """The time grows about as the batch does: by eight for eight times the samples, not by eight cubed."""

    def seconds(count: int) -> float:
        lengths = [5 + 37 * index % 300 for index in range(count)]
        begin = time.thread_time()
        assert len(runs(lengths, count, 1, 1000)) == count
        return time.thread_time() - begin

    assert min(seconds(512) for _ in range(3)) < 64 * min(seconds(64) for _ in range(3))
