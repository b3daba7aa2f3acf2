"""Batches that a script gives: the same on every rank, the whole global one, indices or samples."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from elasticd_planner.spec.batch import Sampler, TokenBatchSampler
from elasticd_planner.spec.sample_order import MOST_PERMUTED
from PIL import Image

from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.prefetch import SampleError, SamplePrefetcher
from elasticd.runtime.data.step_samples import BatchesDiffer, MapStyleSamples
from tests.runtime.test_engine import UNEQUAL, engine_on
from tests.runtime.test_engine_parity import BATCH, Text, make_recipe

STEPS = 3


def feed(size: int = 64, batch: int = 4) -> MapStyleSamples:
    sampler = Sampler(size=size, global_batch=batch, seed=0)
    return MapStyleSamples(sampler, SamplePrefetcher(Text(), threads=0), None, 1)


def test_a_batch_of_a_job_whose_steps_have_tokens_may_be_a_tensor_of_indices() -> None:
    made = MapStyleSamples(TokenBatchSampler([3] * 64, 10, 0), SamplePrefetcher(Text(), threads=0), None, 1)
    made.give(0, torch.tensor([5, 1]))
    assert made.samples(0) == (5, 1)
    with pytest.raises(ValueError, match="got no sample"):
        made.give(1, torch.tensor([]))


def losses(give: Any) -> list[float]:
    """Of a layout whose every rank is given the batches `give(step, device)`; None: the job's own."""

    def worker(plan_groups: MemoryPlanGroups) -> list[float]:
        recipe = replace(make_recipe(), data=DataOptions(readers=0))
        engine = engine_on(plan_groups, recipe, UNEQUAL)
        found = []
        for step in range(STEPS):
            batch = give(step, plan_groups.me)
            if batch is not None:
                assert isinstance(engine._recipe.feed, MapStyleSamples)
                engine._recipe.feed.give(step, batch)
            found.append(engine.step(step, lambda: 0).outcome.vote.loss)
        return found

    found = run_threads(UNEQUAL.members, worker)
    assert all(each == found[UNEQUAL.members[0]] for each in found.values())
    return found[UNEQUAL.members[0]]


def test_indices_and_samples_that_are_given_train_like_the_jobs_own() -> None:
    own = losses(lambda step, device: None)
    sampler = make_recipe().sampler
    assert losses(lambda step, device: sampler.samples(step)) == own
    assert losses(lambda step, device: torch.tensor(sampler.samples(step))) == own
    assert losses(lambda step, device: [Text()[i] for i in sampler.samples(step)]) == own
    other = losses(lambda step, device: range(step * BATCH, (step + 1) * BATCH))
    assert other != pytest.approx(own, abs=1e-6)


@pytest.mark.parametrize("samples", [False, True])
def test_one_rank_that_gives_another_batch_stops_all_before_anything_is_computed(samples: bool) -> None:
    def give(step: int, device: str) -> Any:
        indices = [*range(BATCH)]
        if step == 1 and device == "a/2":
            indices[3] = 40
        return [Text()[i] for i in indices] if samples else indices

    with pytest.raises(BatchesDiffer, match=r"step 1: a/2 gave another batch than a/0"):
        losses(give)


@dataclass(frozen=True)
class Boxed:
    boxes: Any


ZEROS, PICTURE = np.zeros(4096, dtype=np.int64), Image.new("L", (64, 64))
#: Pairs of samples that differ in one place.
UNLIKE: list[tuple[Any, Any]] = [
    (ZEROS, np.where(np.arange(4096) == 2000, 7, 0)),
    (ZEROS, ZEROS.astype(np.int32)),
    (ZEROS, ZEROS.reshape(64, 64)),
    ({"ids": torch.zeros(4096)}, {"ids": (torch.arange(4096) == 2000).float()}),
    ((torch.tensor([1.00001]),), (torch.tensor([1.00002]),)),
    ([PICTURE, PICTURE], [PICTURE, PICTURE.rotate(90).point(lambda value: value + 1)]),
    ([1, 2, 3] * 1000, [*[1, 2, 3] * 999, 1, 2, 4]),
    (Boxed([np.ones(3)]), Boxed([np.array([1, 1, 1 + 1e-12])])),
    (["a", "b"], ["ab"]),
    ([["a"], "b"], [["a", "b"]]),
    ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
    (True, 1),
    (1.0, 1.0 + 2**-52),
    ("1", 1),
    (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float16)),
    (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
    (None, ""),
]


def hash_of(value: Any) -> int:
    made = feed(batch=1)
    made.give(0, [{"x": value, "inputs": torch.arange(3)}])
    return made._given[0].hash


@pytest.mark.parametrize(("one", "other"), UNLIKE)
def test_samples_are_compared_by_all_their_values(one: Any, other: Any) -> None:
    assert hash_of(one) == hash_of(copy.deepcopy(one))
    assert hash_of(other) == hash_of(copy.deepcopy(other))
    assert hash_of(one) != hash_of(other)


def test_keys_in_another_order_are_the_same_sample() -> None:
    assert hash_of({"a": 1, 2: 3}) == hash_of({2: 3, "a": 1})


def test_what_no_rank_can_compare_by_its_value_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"sample 0 has a object under 'x.1.o', which ranks cannot compare"):
        hash_of([1, {"o": object()}])


def test_indices_of_numpy_are_indices() -> None:
    made = feed()
    made.give(0, np.array([3, 1, 2, 0]))  # type: ignore[arg-type]
    assert made.samples(0) == (3, 1, 2, 0)
    with pytest.raises(TypeError, match="indices of the dataset, or samples"):
        made.give(0, np.array([3.0, 1, 2, 0]))  # type: ignore[arg-type]


def test_what_is_no_global_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="got 3 samples: a batch is the whole global one, 4"):
        feed().give(0, [1, 2, 3])
    with pytest.raises(ValueError, match="the index 64 of a dataset of 64 samples"):
        feed().give(0, [1, 2, 3, 64])
    with pytest.raises(ValueError, match="the index -1 "):
        feed().give(0, [1, 2, 3, -1])
    for mixed in ([1, 2, 3, Text()[4]], [[1], [2], [3], [4]]):
        with pytest.raises(TypeError, match="indices of the dataset, or samples"):
            feed().give(0, mixed)


def test_what_was_given_for_the_step_before_is_remembered() -> None:
    made = feed()
    for step in range(4):
        made.give(step, [step] * 4)
    assert made.samples(2) == (2,) * 4
    assert made.samples(3) == (3,) * 4
    assert not made.ahead


def test_a_sample_beyond_a_given_batch_is_named() -> None:
    def worker(plan_groups: MemoryPlanGroups) -> None:
        made = feed()
        made.give(0, [Text()[i] for i in range(4)])
        made.begin(0, UNEQUAL, plan_groups.group(("a/0",), "vote"), None)  # type: ignore[arg-type]
        assert torch.equal(made.take(2)["inputs"], Text()[2]["inputs"])
        with pytest.raises(SampleError, match="sample 4"):
            made.take(4)

    run_threads(("a/0",), worker)


class Large(Text):
    """So many samples that no epoch is permuted as a whole."""

    def __len__(self) -> int:
        return 2 * MOST_PERMUTED

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index % 64)


@pytest.mark.parametrize("old", [False, True])
def test_the_order_of_a_large_dataset_is_carried_by_the_state(old: bool) -> None:
    """A state of a release that permuted it, which carries none, keeps that order."""
    recipe = replace(make_recipe(), dataset=Large())
    order = Sampler(
        size=len(Large()), global_batch=BATCH, seed=recipe.seed, order="permutation" if old else "feistel"
    )

    def worker(plan_groups: MemoryPlanGroups) -> list[tuple[int, ...]]:
        engine = engine_on(plan_groups, replace(recipe), UNEQUAL)
        found = [] if old else [engine.step(0, lambda: 0).samples]
        engine.settle()
        state = engine.state()
        assert ("data" in state.extras) == (not old)
        later = engine_on(plan_groups, recipe, UNEQUAL, state)
        return [*found, *(later.step(step, lambda: 0).samples for step in (1, 2))]

    steps = range(1, 3) if old else range(3)
    expected = [order.samples(step) for step in steps]
    assert all(each == expected for each in run_threads(UNEQUAL.members, worker).values())
