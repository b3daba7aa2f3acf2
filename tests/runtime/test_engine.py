"""Steps of whole layouts among threads: other schedules, unequal samples, unreadable ones, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from elasticd_migration.local_state import LocalState
from elasticd_planner.cost.schedule import Pass
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.batch import BatchPlan
from elasticd_planner.spec.plan import Plan, StatePolicy

from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.prefetch import SampleError
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.pipeline_stage import all_forward
from elasticd.runtime.engine.recipe import Recipe
from tests.runtime.state_reader import StateReader
from tests.runtime.test_engine_parity import SEED, Text, make_recipe, plan_of, stage, unpaced

TWO_STAGES = plan_of((8, [stage(0, 3, ("a/0", 1)), stage(3, 6, ("a/1", 1))]))
UNEQUAL = plan_of(
    (3, [stage(0, 2, ("a/0", 1)), stage(2, 6, ("a/1", 1), ("a/2", 2))]),
    (1, [stage(0, 6, ("b/0", 1))]),
    micro_batch=2,
)


def all_forward_all_backward(stages: int, stage: int, micro_batches: int, chunks: int) -> Iterator[Pass]:
    """GPipe's passes (Huang et al., 2019), the same on every stage: all micro-batches are held at once."""
    yield from all_forward(stages, stage, micro_batches, chunks)
    for chunk in reversed(range(chunks)):
        for index in range(micro_batches):
            yield Pass("backward", index, chunk)


def engine_on(plan_groups: Any, recipe: Recipe, plan: Plan, state: LocalState | None = None) -> Engine:
    layouts = Layouts(recipe.model.spec, plan)
    engine = Engine(replace(recipe), layouts, plan_groups, unpaced)
    engine.adopt(first_state(recipe.model, layouts, plan_groups.me, SEED) if state is None else state)
    return engine


def losses(recipe: Recipe, plan: Plan, steps: int = 3) -> list[float]:
    def worker(plan_groups: MemoryPlanGroups) -> list[float]:
        engine = engine_on(plan_groups, recipe, plan)
        return [engine.step(step, lambda: 0).outcome.vote.loss for step in range(steps)]

    found = run_threads(plan.members, worker)
    assert all(each == found[plan.members[0]] for each in found.values()), "all ranks fold the same bits"
    return found[plan.members[0]]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """What one device makes of it."""
    return losses(make_recipe(), plan_of((8, [stage(0, 6, ("a/0", 1))])))


def test_gpipe_trains_like_1f1b(alone: list[float]) -> None:
    recipe = replace(make_recipe(), schedule=all_forward_all_backward)
    assert losses(recipe, TWO_STAGES) == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize("readers", [0, 1])
def test_samples_dealt_by_their_lengths_train_alike(alone: list[float], readers: int) -> None:
    """Micro-batches of unequal numbers of samples, over pipelines of unequal shape."""
    data = DataOptions(length=lambda index: 5 + index % 9, readers=readers)
    recipe = replace(make_recipe(), data=data)
    sizes = {len(micro) for place in UNEQUAL.places.values() for micro in batch(recipe, UNEQUAL).of(place)}
    assert len(sizes) > 1
    assert losses(recipe, UNEQUAL) == pytest.approx(alone, abs=1e-12)


def batch(recipe: Recipe, plan: Plan) -> BatchPlan:
    return recipe.feed.dealing(plan, 0)()


class Torn(Text):
    """One sample cannot be read."""

    def __init__(self, index: int) -> None:
        self.torn = index

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.torn:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_ends_the_step_on_every_rank_and_leaves_the_state(
    alone: list[float],
) -> None:
    recipe = make_recipe()
    (_, first, second) = (recipe.sampler.samples(step) for step in range(3))
    torn = replace(recipe, dataset=Torn(next(i for i in second if i not in first)))

    def worker(plan_groups: MemoryPlanGroups) -> tuple[str, bool, bool]:
        engine = engine_on(plan_groups, torn, UNEQUAL)
        for step in range(2):
            assert engine.step(step, lambda: 0).outcome.vote.loss == pytest.approx(alone[step], abs=1e-12)
        before = {name: p.detach().clone() for name, (_, p) in engine.module.local.parameters.items()}
        with pytest.raises(SampleError, match=f"sample {torn.dataset.torn} ") as caught:  # type: ignore[attr-defined]
            engine.step(2, lambda: 0)
        same = all(torch.equal(before[n], p) for n, (_, p) in engine.module.local.parameters.items())
        left = any(p.grad is not None for _, p in engine.module.local.parameters.values())
        return str(caught.value), same, left

    found = run_threads(UNEQUAL.members, worker)
    assert all(same and not left for _, same, left in found.values())
    assert any("the disk is gone" in text for text, _, _ in found.values())


class Counted:
    """Counts the bytes of tensors that are kept because they were sent and not yet known to have arrived."""

    def __init__(self, group: Any) -> None:
        self.group, self.kept, self.most = group, dict[int, int](), 0
        self._send, self._arrived = group.send, group.arrived
        self._count = 0
        group.send, group.arrived = self.send, self.arrived

    def send(self, tensor: torch.Tensor, to: int, tag: int, label: str = "boundary") -> int:
        self._send(tensor, to, tag, label)
        self._count += 1
        self.kept[self._count] = tensor.nbytes
        self.most = max(self.most, sum(self.kept.values()))
        return self._count

    def arrived(self, numbers: Any) -> None:
        for number in numbers:
            self.kept.pop(number, None)


@pytest.mark.parametrize("zero", [0, 2])
def test_an_update_waits_for_what_still_reads_the_state_and_passes_do_not(zero: int) -> None:
    plan = UNEQUAL.replace(state=StatePolicy(zero=zero, replicas=1 if zero else None))

    def worker(plan_groups: MemoryPlanGroups) -> None:
        engine = engine_on(plan_groups, make_recipe(), plan)
        engine.step(0, lambda: 0)
        engine.settle()
        reader = StateReader(engine)
        engine.step(1, lambda: pytest.fail("it was waited for before the vote") if reader.waited_for else 0)
        assert reader.waited_for
        assert reader.changed()

    run_threads(plan.members, worker)


def test_a_state_that_is_still_read_is_not_set_aside() -> None:
    plan = plan_of((8, [stage(0, 6, ("a/0", 1))]))

    def worker(plan_groups: MemoryPlanGroups) -> None:
        engine = engine_on(plan_groups, make_recipe(), plan)
        engine.step(0, lambda: 0)
        reader = StateReader(engine)
        engine.set_aside({})
        assert reader.waited_for
        engine.back()

    run_threads(plan.members, worker)


def most_kept(plan: Plan) -> int:
    """The most bytes that a member keeps at once of what it sent in a step."""
    recipe = make_recipe()

    def worker(plan_groups: MemoryPlanGroups) -> int:
        make, counted = plan_groups.group, list[Counted]()

        def group(members: Any, label: str) -> Any:
            found = make(members, label)
            if label == "vote":
                counted.append(Counted(found))
            return found

        plan_groups.group = group  # type: ignore[method-assign]
        engine_on(plan_groups, recipe, plan).step(0, lambda: 0)
        return counted[0].most

    return max(run_threads(plan.members, worker).values())


def test_what_was_sent_is_let_go_as_its_answer_comes() -> None:
    """However many micro-batches a step has, a stage keeps no more than those that are between two stages."""
    longest = 13 * 32 * 8
    assert most_kept(TWO_STAGES) <= 4 * longest
