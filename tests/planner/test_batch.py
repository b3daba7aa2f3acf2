"""Samples of a step: without replacement, a function of seed and step, each in one micro-batch."""

import pytest
from elasticd_planner.spec.batch import Sampler, batch_plan
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.models import plan, plans
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
    for pipeline, micro in zip(made.pipelines, batch.modules[0], strict=True):
        assert [len(part) for part in micro] == [made.micro_batch] * pipeline.micro_batches


def test_micro_batches_of_several_samples_stay_together() -> None:
    made = plan((1, [(1, ["n0/0"], [1])]), (2, [(1, ["n0/1"], [1])])).replace(micro_batch=2, global_batch=6)
    assert batch_plan(made, 0, range(6)).modules == ((((0, 1),), ((2, 3), (4, 5))),)


def test_a_batch_of_another_size_and_an_empty_dataset_are_refused() -> None:
    with pytest.raises(Invalid, match="step 0: 2 samples for a global batch of 1"):
        batch_plan(plan((1, [(1, ["n0/0"], [1])])), 0, (1, 2))
    with pytest.raises(Invalid, match="dataset is empty"):
        Sampler(size=0, global_batch=1, seed=0)
    with pytest.raises(Invalid, match="global_batch must be at least 1"):
        Sampler(size=1, global_batch=0, seed=0)
