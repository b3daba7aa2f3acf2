"""A model of two modules trains on packed rows, whole sequences and cut ones, like plain torch in one process.
In float64. A lane finds the rows of images at the tokens that it has, and no others."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from elasticd_planner.spec.batch import BatchPlan
from elasticd_planner.spec.plan import Plan

from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.data.prefetch import SamplePrefetcher
from elasticd.runtime.engine.recipe import Recipe
from tests import sizes
from tests.runtime.drawn_placements import drawn_placement
from tests.runtime.image_model import COUNTS, IMAGE, Captions, Merge, pipeline, plan_of, stage
from tests.runtime.test_cut_sequences import Cutting
from tests.runtime.test_modules import check, make_recipe, trained

PLACEMENTS = {
    "2 + 1, the encoder on a device of both": plan_of(
        [pipeline(1, stage(0, 2, ("a/1", 1), ("b/0", 2)))],
        [pipeline((3, 2), stage(0, 5, ("a/0", 1), ("a/1", 1), ("b/0", 1), lanes=(2, 1)))],
        ahead=2,
    ),
    "three lanes in two stages, encoders disjoint": plan_of(
        [pipeline((1, 1), stage(0, 2, ("c/0", 1), ("c/1", 1), lanes=(1, 1)))],
        [
            pipeline(
                (2, 2, 1),
                stage(0, 2, ("a/0", 1), ("b/0", 2), ("b/1", 1), ("d/0", 1), lanes=(1, 2, 1)),
                stage(2, 5, ("a/1", 1), ("b/2", 1), ("d/1", 1), lanes=(1, 1, 1)),
            )
        ],
        ahead=3,
        lead=1,
    ),
    "two pipelines of lanes, partly shared, zero 1": plan_of(
        [
            pipeline(1, stage(0, 1, ("a/0", 1)), stage(1, 2, ("c/0", 1), ("c/1", 1))),
            pipeline(1, stage(0, 2, ("b/1", 1))),
        ],
        [
            pipeline((2, 1), stage(0, 5, ("a/0", 1), ("a/1", 1), lanes=(1, 1), recompute=True)),
            pipeline(
                (1, 1),
                stage(0, 3, ("b/0", 1), ("b/1", 1), ("b/2", 1), lanes=(1, 2)),
                stage(3, 5, ("d/0", 1), ("d/1", 1), lanes=(1, 1)),
            ),
        ],
        zero=1,
        ahead=2,
    ),
    "colocated, recomputed, sequence parallel, zero 2": plan_of(
        [
            pipeline(1, stage(0, 2, ("a/0", 1), ("a/1", 1), recompute=True)),
            pipeline(1, stage(0, 2, ("b/0", 1))),
        ],
        [
            pipeline(
                (3, 2),
                stage(
                    0,
                    5,
                    ("a/0", 1),
                    ("a/1", 2),
                    ("b/0", 1),
                    lanes=(2, 1),
                    recompute=True,
                    sequence_parallel=True,
                ),
            )
        ],
        zero=2,
        ahead=5,
    ),
}


def length(index: int) -> int:
    """Tokens of a sample of `Captions`."""
    return _LENGTHS[index]


_LENGTHS = [len(each["inputs"]) for each in map(Captions().__getitem__, range(len(COUNTS)))]


class CutCaptions(Cutting):
    """Cuts captions over drawn lanes in drawn shares."""

    length = staticmethod(length)
    dealt: list[BatchPlan]

    def dealing(self, plan: Plan, step: int, slowdown: Any = None) -> Any:
        make = super().dealing(plan, step, slowdown)
        self.dealt = [*getattr(self, "dealt", ()), make()]
        return make


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Merge, "forward", _strictly)


_merged = Merge.forward


def _strictly(self: Merge, batch: Mapping[str, Any]) -> torch.Tensor:
    """Takes exactly as many rows as it has tokens of images; none where it has none."""
    tokens = int((batch["inputs"] == IMAGE).sum())
    assert tokens == (0 if batch["images"] is None else len(batch["images"]))
    return _merged(self, batch)


def packed(recipe: Recipe, *, cut: bool = True, whole: bool = False) -> Recipe:
    """The recipe with packed rows, cut at random unless the plan deals them."""
    made = replace(recipe, data=DataOptions(length=length, packing=Packing(cut=cut, tokens=64, least=1)))
    if whole:
        return made
    reader = SamplePrefetcher(recipe.dataset, 0)
    return replace(made, source=CutCaptions(recipe.sampler, reader, length, 1))


def trained_packed(plan: Plan, **options: Any) -> dict[str, dict[str, Any]]:
    """What each member has after the steps of `test_modules`, on packed rows."""
    recipes: dict[str, Recipe] = {}

    def worker(memory: Any) -> dict[str, Any]:
        recipes[memory.me] = packed(make_recipe(micro_batch=plan.micro_batch), **options)
        return trained(memory.me, plan, cast(PlanGroups, memory), recipe=recipes[memory.me])

    return run_threads(plan.members, worker)


@pytest.mark.parametrize("whole", ["cut", "whole"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_two_modules_train_on_packed_rows_like_one_process(name: str, whole: str) -> None:
    check(PLACEMENTS[name], trained_packed(PLACEMENTS[name], cut=whole == "cut", whole=whole == "whole"))


@pytest.mark.parametrize("seed", sizes.beside(range(3), range(60)))
def test_so_they_do_under_drawn_plans(seed: int) -> None:
    plan = drawn_placement(seed, lanes=random.Random(seed).randint(1, 3))
    check(plan, trained_packed(plan))
