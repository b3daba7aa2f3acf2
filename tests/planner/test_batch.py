"""Samples of a step: without replacement, a function of seed and step, each in one micro-batch."""

import pytest
from elasticd_planner.spec.batch import (
    BatchLengths,
    BatchPlan,
    BatchRow,
    Sampler,
    SequencePiece,
    TokenBatchSampler,
    batch_plan,
    ids_of,
    short_batch_plan,
)
from elasticd_planner.spec.plan import Pipeline, Plan, Stage
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.models import plan, planned, plans
from tests.sizes import examples


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 3))
def test_every_epoch_has_every_sample_once(size: int, batch: int, seed: int) -> None:
    sampler = Sampler(size=size, global_batch=batch, seed=seed)
    steps = -(-3 * size // batch)
    drawn = [i for step in range(steps) for i in sampler.samples(step)]
    for epoch in range(3):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_samples_depend_on_seed_and_step_and_nothing_else() -> None:
    first = Sampler(size=100, global_batch=10, seed=1)
    assert first.samples(4) == Sampler(size=100, global_batch=10, seed=1).samples(4)
    assert first.samples(4) != first.samples(5)
    assert first.samples(4) != Sampler(size=100, global_batch=10, seed=2).samples(4)
    assert first.samples(4) != first.samples(14)  # the next epoch has another order


@settings(max_examples=examples(40))
@given(plans())
def test_each_sample_is_in_one_micro_batch_of_the_planned_size(made: Plan) -> None:
    samples = tuple(range(100, 100 + made.global_batch))
    batch = batch_plan(made, 3, samples)
    assert batch.samples() == samples
    assert (batch.step, batch.plan) == (3, made.number)
    for place in made.places.values():
        count = made.pipeline(place).micro_batches
        assert [len(micro) for micro in batch.of(place)] == [made.micro_batch] * count


@settings(max_examples=examples(60))
@given(plans(), st.integers(1, 3), st.data())
def test_whatever_the_lengths_each_sample_is_dealt_once_and_lanes_have_no_gaps(
    made: Plan, micro_batch: int, data: st.DataObject
) -> None:
    made = made.replace(micro_batch=micro_batch, global_batch=made.global_batch * micro_batch)
    samples = tuple(data.draw(st.permutations(range(made.global_batch))))
    tokens = tuple(data.draw(st.integers(0, 50)) for _ in samples)
    length = dict(zip(samples, tokens, strict=True))
    for batch in (
        batch_plan(made, 0, samples),
        batch_plan(made, 0, samples, BatchLengths(tokens=tokens, linear=30)),
    ):
        assert sorted(batch.samples()) == sorted(samples)
        for pipeline, rows in zip(made.pipelines, batch.pipelines, strict=True):
            assert len(rows) == max(pipeline.micro_batches_by_lane)
            for lane, count in enumerate(pipeline.micro_batches_by_lane):
                assert [bool(row.lanes[lane]) for row in rows] == [i < count for i in range(len(rows))]
            for piece in (piece for row in rows for lane in row.lanes for piece in lane):
                assert piece.length in (0, length[piece.sample])
                assert (piece.start, piece.stop) == (0, -(-piece.length // 2)), "each sample is whole"
    few = data.draw(st.integers(0, made.global_batch))
    rest = short_batch_plan(made, 0, samples[:few])
    assert sorted(rest.samples()) == sorted(samples[:few])
    for place in made.places.values():
        assert len(rest.of(place)) <= made.pipeline(place).micro_batches
        assert all(len(micro) <= micro_batch for micro in rest.of(place))


def test_micro_batches_of_several_samples_stay_together() -> None:
    made = plan((1, [(1, ["n0/0"], [1])]), (2, [(1, ["n0/1"], [1])])).replace(micro_batch=2, global_batch=6)
    batch = batch_plan(made, 0, range(6))
    assert [tuple(map(ids_of, batch.of(place))) for place in made.places.values()] == [
        ((0, 1),),
        ((2, 3), (4, 5)),
    ]


def lanes(*rows: int) -> Plan:
    """One stage, a device for each lane."""
    devices = tuple(f"n0/{i}" for i in range(len(rows)))
    ones = (1,) * len(rows)
    stage = Stage(start=0, stop=1, devices=devices, shares=ones, lanes=ones)
    return planned(Pipeline(stages=(stage,), micro_batches=sum(rows), rows=rows))


def test_rows_are_dealt_in_order_and_short_lanes_have_none_in_the_last_ones() -> None:
    made = lanes(1, 3)
    batch = batch_plan(made, 0, range(4))
    assert [tuple(map(ids_of, batch.of(place))) for place in made.places.values()] == [
        ((0,),),
        ((1,), (2,), (3,)),
    ]
    assert [[bool(lane) for lane in row.lanes] for row in batch.pipelines[0]] == [
        [True, True],
        [False, True],
        [False, True],
    ]


def test_a_gap_in_a_lane_and_a_row_without_all_lanes_are_refused() -> None:
    one, none = (SequencePiece.whole(0),), ()
    rows = (BatchRow(lanes=(one, none)), BatchRow(lanes=(one, one)))
    with pytest.raises(Invalid, match="step 4: the rows of a lane must have no gap"):
        BatchPlan(step=4, plan=1, pipelines=(rows,))
    with pytest.raises(Invalid, match="must name all its lanes"):
        BatchPlan(step=4, plan=1, pipelines=((BatchRow(lanes=(one,)), *rows),))


def test_a_round_takes_no_more_than_a_step() -> None:
    with pytest.raises(Invalid, match="3 samples for a global batch of 2"):
        short_batch_plan(lanes(1, 1), 0, range(3))


def test_a_batch_of_another_size_and_an_empty_dataset_are_refused() -> None:
    with pytest.raises(Invalid, match="step 0: 2 samples for a global batch of 1"):
        batch_plan(plan((1, [(1, ["n0/0"], [1])])), 0, (1, 2))
    with pytest.raises(Invalid, match="dataset is empty"):
        Sampler(size=0, global_batch=1, seed=0)
    with pytest.raises(Invalid, match="global_batch must be at least 1"):
        Sampler(size=1, global_batch=0, seed=0)


@settings(max_examples=examples(60))
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(40, 200), st.integers(0, 3), st.data()
)
def test_steps_of_so_many_tokens_take_every_sample_once_an_epoch(
    lengths: list[int], global_tokens: int, seed: int, data: st.DataObject
) -> None:
    sampler = TokenBatchSampler(lengths, global_tokens, seed)
    steps = -(-3 * sum(lengths) // global_tokens)
    drawn = [sampler.samples(step) for step in range(steps)]
    assert all(drawn), "no step is empty"
    line = [sample for step in drawn for sample in step]
    for epoch in range(len(line) // len(lengths)):
        part = line[epoch * len(lengths) : (epoch + 1) * len(lengths)]
        assert sorted(part) == list(range(len(lengths)))
    tokens = [sum(lengths[sample] for sample in step) for step in drawn]
    assert all(abs(each - global_tokens) < max(lengths) for each in tokens)
    assert abs(sum(tokens) - steps * global_tokens) < max(lengths)
    # A step is a function of its index and the seed, whatever was asked for before.
    step = data.draw(st.integers(0, steps - 1))
    assert TokenBatchSampler(lengths, global_tokens, seed).samples(step) == drawn[step]


def test_a_sample_that_is_longer_than_a_step_is_refused_by_name() -> None:
    with pytest.raises(Invalid, match="global_tokens is 10, and sample 1 alone has 11 tokens"):
        TokenBatchSampler([3, 11, 4], 10, 0)
    with pytest.raises(Invalid, match="dataset is empty"):
        TokenBatchSampler([], 10, 0)
    assert TokenBatchSampler([0, 0, 0], 1, 0).samples(0) != (), "a sample without tokens counts as one"
