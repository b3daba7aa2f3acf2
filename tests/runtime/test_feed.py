"""Batches that a script gives: the same on every rank, the whole global one, indices or samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from elasticd_planner.spec.batch import Sampler

from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.prefetch import SampleError, SampleReader
from elasticd.runtime.data.step_samples import BatchesDiffer, Mapped
from tests.runtime.test_engine import UNEQUAL, engine_on
from tests.runtime.test_parity import BATCH, Text, make_recipe

STEPS = 3


def feed(size: int = 64, batch: int = 4) -> Mapped:
    sampler = Sampler(size=size, global_batch=batch, seed=0)
    return Mapped(sampler, SampleReader(Text(), threads=0), None, 1)


def losses(give: Any) -> list[float]:
    """Of a layout whose every rank is given the batches `give(step, device)`; None: the job's own."""

    def worker(plan_groups: MemoryPlanGroups) -> list[float]:
        recipe = replace(make_recipe(), data=DataOptions(readers=0))
        engine = engine_on(plan_groups, recipe, UNEQUAL)
        found = []
        for step in range(STEPS):
            batch = give(step, plan_groups.me)
            if batch is not None:
                assert isinstance(engine._recipe.feed, Mapped)
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
