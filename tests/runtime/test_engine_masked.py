"""A micro-batch without a single target adds nothing, though its mean loss, as most write it, is NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.box import Box
from torch import Tensor

from elasticd.models import Decoder, next_token_loss
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads, unpaced
from elasticd.runtime.data.collate import pad
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.recipe import Recipe
from tests.runtime.test_engine import TWO_STAGES
from tests.runtime.test_engine_parity import CONFIG, SEED, Text, make_recipe

STEPS = 2


class Masked(Text):
    """Of two samples in three the prompt alone is left: they have no target."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return sample if index % 3 == 0 else {**sample, "targets": torch.full_like(sample["targets"], -100)}


def mean_loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    count = int((batch["targets"] != -100).sum())
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten()) * count, count


def masked() -> Recipe:
    return replace(make_recipe(), dataset=Masked(), loss=mean_loss, clip=None)


def test_micro_batches_without_targets_train_like_one_process() -> None:
    recipe, model = masked(), Decoder(CONFIG)
    drawn = [[index % 3 == 0 for index in recipe.sampler.samples(step)] for step in range(STEPS)]
    assert all(any(each) and not all(each) for each in drawn)
    assert TWO_STAGES.micro_batch == 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(recipe.model.first_value(name, Box.whole(parameter.shape), SEED))
    update = torch.optim.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        batch = pad([Masked()[index] for index in recipe.sampler.samples(step)])
        total, count = next_token_loss(model(batch), batch)
        update.zero_grad()
        (total / count).backward()
        update.step()
        losses.append(float(total.detach()) / count)
    weights = dict(model.named_parameters())

    def member(plan_groups: MemoryPlanGroups) -> tuple[list[Any], dict[str, Any]]:
        recipe = masked()
        layouts = Layouts(recipe.model.spec, TWO_STAGES)
        engine = Engine(recipe, layouts, plan_groups, unpaced)  # type: ignore[arg-type]
        engine.adopt(first_state(recipe.model, layouts, plan_groups.me, SEED))
        done = [engine.step(step, lambda: 0, lambda: 0) for step in range(STEPS)]
        return [each.outcome.vote.loss for each in done], engine.module.local.parameters

    for made, parameters in run_threads(TWO_STAGES.members, member).values():
        assert made == pytest.approx(losses, abs=1e-10)
        for name, ((box,), value) in parameters.items():
            expected = weights[name][box.slices(Box.whole(weights[name].shape))]
            assert float((value.detach().cpu() - expected).abs().max()) < 1e-10, name


def weighted(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Its count is a sum of weights, below one."""
    total, count = next_token_loss(output, batch)
    return 0.01 * total, torch.tensor(0.01 * float(count))


def test_a_count_may_be_a_fraction() -> None:
    def member(loss: Any) -> Any:
        def trained(plan_groups: MemoryPlanGroups) -> list[Any]:
            recipe = replace(make_recipe(), loss=loss)
            layouts = Layouts(recipe.model.spec, TWO_STAGES)
            engine = Engine(recipe, layouts, plan_groups, unpaced)  # type: ignore[arg-type]
            engine.adopt(first_state(recipe.model, layouts, plan_groups.me, SEED))
            return [engine.step(step, lambda: 0, lambda: 0).outcome.vote.loss for step in range(STEPS)]

        return trained

    for losses in zip(
        *(run_threads(TWO_STAGES.members, member(loss)).values() for loss in (weighted, next_token_loss)),
        strict=True,
    ):
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
