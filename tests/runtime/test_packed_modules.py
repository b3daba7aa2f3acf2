"""A model of two modules trains on packed rows, whole sequences and cut ones, like plain torch in one process.
In float64. A lane finds the rows of images at the tokens that it has, and no others."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
import torch
from elasticd_planner.batching.batch_summary import lane_work
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.batch import SequencePiece
from elasticd_planner.spec.item_batch import ItemBatch
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.sample_packing import linear_of
from torch import nn

from elasticd.models.decoder import next_token_loss
from elasticd.runtime.api.evaluation import Evaluation, HeldOut, evaluate
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads, unpaced
from elasticd.runtime.data.item_places import piece_rows
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.data.prefetch import SampleError, SamplePrefetcher
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.item_border import rows_in
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.model import Model, Module
from elasticd.runtime.model.validation import ModelError
from tests import sizes
from tests.models.mixture import LAYERS, WIDTH, MixtureBlock
from tests.models.mixture import RULES as MIXTURE_RULES
from tests.models.mixture import UNITS as MIXTURE_UNITS
from tests.models.test_experts import SHARED
from tests.runtime.drawn_placements import drawn_placement
from tests.runtime.image_model import (
    COUNTS,
    IMAGE,
    SEED,
    TEXT,
    VISION,
    Captions,
    Merge,
    OneProcess,
    in_one_process,
    is_image,
    model_of,
    pipeline,
    plan_of,
    stage,
    vision_sections,
)
from tests.runtime.test_cut_sequences import Cutting
from tests.runtime.test_modules import ADAM, STEPS, check, make_recipe, reference, sections, trained

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


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Merge, "forward", _strictly)


_merged = Merge.forward


def _strictly(self: Merge, batch: Mapping[str, Any]) -> torch.Tensor:
    """Takes exactly as many rows as it has tokens of images, if it gets some."""
    if batch["images"] is not None:
        assert len(batch["images"]) == int((batch["inputs"] == IMAGE).sum()) > 0
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


def frozen(plan: Plan) -> Plan:
    """The plan with an encoder that is not trained."""
    vision, language = plan.modules
    modules = (msgspec.structs.replace(vision, trainable=False), language)
    return plan.replace(strategies=(msgspec.structs.replace(plan.strategies[0], modules=modules),))


def test_of_a_frozen_encoder_nothing_goes_back() -> None:
    plan = frozen(PLACEMENTS["three lanes in two stages, encoders disjoint"])

    def worker(memory: Any) -> dict[str, Any]:
        return trained(memory.me, plan, memory, recipe=packed(make_recipe(frozen=True)), frozen=True)

    check(plan, run_threads(plan.members, worker), frozen=True)


def losses(plan: Plan, recipe: Recipe) -> list[float]:
    """Of three steps."""

    def worker(memory: Any) -> list[float]:
        engine = engine_of(plan, recipe, memory)
        found = [engine.step(step, lambda: 0, lambda: 0).outcome.vote.loss for step in range(STEPS)]
        engine.settle()
        return found

    first, *others = run_threads(plan.members, worker).values()
    assert all(other == first for other in others)
    return first


def engine_of(plan: Plan, recipe: Recipe, memory: Any) -> Engine:
    layouts = Layouts(recipe.model.specs, plan)
    engine = Engine(recipe, layouts, memory, unpaced)
    engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
    return engine


@pytest.mark.filterwarnings("ignore:.*tensor-parallel rules")
def test_dropouts_drop_the_same_elements_of_a_sample_packed_cut_and_padded() -> None:
    vision, language = copy.deepcopy(sections())
    vision[1], language[2] = (
        nn.Sequential(vision[1], nn.Dropout(0.3)),
        nn.Sequential(language[2], nn.Dropout(0.3)),
    )
    padded = replace(make_recipe(), model=model_of(vision, language, rules={}))
    alone = plan_of([pipeline(1, stage(0, 2, ("a/0", 1)))], [pipeline(5, stage(0, 5, ("a/0", 1)))])
    lanes = plan_of(
        [pipeline(1, stage(0, 2, ("a/0", 1)))],
        [pipeline((2, 3), stage(0, 5, ("a/0", 1), ("b/0", 1), lanes=(1, 1)))],
    )
    expected = losses(alone, padded)
    assert losses(lanes, packed(padded)) == pytest.approx(expected, abs=1e-12)
    assert expected != pytest.approx(reference()[0], abs=1e-3)


def test_an_evaluation_packs_samples_with_items_as_training_does() -> None:
    data = Measured()
    vision, language = sections()
    expected = OneProcess(vision, language, lr=0.0).step([data[index] for index in range(len(data))])
    plan = PLACEMENTS["2 + 1, the encoder on a device of both"]
    recipe = packed(make_recipe(), whole=True)

    def worker(memory: Any) -> Evaluation:
        engine = engine_of(plan, recipe, memory)
        return evaluate(engine, HeldOut(dataset=data), "held out", 0, next_token_loss, recipe.data, "value")

    for found in run_threads(plan.members, worker).values():
        assert found.loss == pytest.approx(expected, abs=1e-12)
        assert found.samples == len(data)


class Measured(Captions):
    """Captions of known lengths."""

    lengths = _LENGTHS


class Scattered(Measured):
    """Tokens that take rows of images are in several runs, also at both ends."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        order = torch.randperm(len(sample["inputs"]), generator=torch.Generator().manual_seed(index))
        if index % 2:
            order = order.flip(0)
        return sample | {"inputs": sample["inputs"][order], "targets": sample["targets"][order]}


def plain_losses(recipe: Recipe) -> list[float]:
    """Of three steps of one process."""
    data: Any = recipe.dataset
    batches = [[data[index] for index in recipe.sampler.samples(step)] for step in range(STEPS)]
    return in_one_process(*sections(), batches, **ADAM)[0]


@pytest.mark.parametrize("whole", ["cut", "whole"])
def test_the_tokens_of_an_image_may_be_in_several_runs(whole: str) -> None:
    recipe = replace(make_recipe(), dataset=Scattered())
    made = packed(recipe, whole=whole == "whole")
    plan = PLACEMENTS["2 + 1, the encoder on a device of both"]
    assert losses(plan, made) == pytest.approx(plain_losses(recipe), abs=1e-12)


@pytest.mark.parametrize(
    "name", ["2 + 1, the encoder on a device of both", "colocated, recomputed, sequence parallel, zero 2"]
)
def test_steps_of_so_many_tokens_have_other_numbers_of_samples_and_items(name: str) -> None:
    data = DataOptions(packing=Packing(tokens=16, least=1), global_tokens=41)
    recipe = replace(make_recipe(), dataset=Measured(), data=data)
    counts = {len(recipe.sampler.samples(step)) for step in range(STEPS)}
    assert len(counts) > 1
    assert losses(PLACEMENTS[name], recipe) == pytest.approx(plain_losses(recipe), abs=1e-12)


class Albums(Captions):
    """Long samples of two images each."""

    def __init__(self) -> None:
        self.counts = {"images": [2] * 32}
        self.lengths = [len(self[index]["inputs"]) for index in range(32)]

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        text = torch.full((40,), 2 + index % 20)
        more = {key: torch.cat([sample[key], text]) for key in ("inputs", "targets")}
        return sample | more


def test_shares_of_tokens_follow_packed_lanes_beside_shares_of_items() -> None:
    """A lane of the decoder takes twice, and a lane of the encoder three times as long as planned."""
    plan = plan_of(
        [pipeline(1, stage(0, 2, ("a/0", 1))), pipeline(1, stage(0, 2, ("c/0", 1)))],
        [pipeline((3, 2), stage(0, 5, ("a/0", 1), ("b/0", 1), lanes=(1, 1)))],
    )
    recipe = replace(make_recipe(), dataset=Albums(), data=DataOptions(packing=Packing(least=4)))
    linear = linear_of(recipe.model.spec)

    def worker(memory: Any) -> list[tuple[list[int], dict[str, int]]]:
        engine, found = engine_of(plan, recipe, memory), list[tuple[list[int], dict[str, int]]]()
        lane = {"a/0": 0, "b/0": 1}.get(memory.me)
        if lane is not None:
            engine._telemetry.block_seconds = lambda: 1e-9 * found[-1][0][lane] * (1 + lane)  # type: ignore[method-assign]
        if (vision := engine.modules.get("vision")) is not None and vision.runner is not None:
            slow, own = 3 if memory.me == "c/0" else 1, vision.telemetry
            assert own is not None
            counted = own.passes
            own.passes = lambda: (1e-6 * slow * counted()[1], *counted()[1:])  # type: ignore[method-assign]
        for step in range(9):
            batch = engine._batches.of(step)
            found.append((lane_work(engine.loss_plan, batch, linear), {}))
            engine.step(step, lambda: 0, lambda: 0)
            assert engine._several is not None
            now = engine._several._now
            assert now is not None
            items = now[1].batches["vision"]
            assert isinstance(items, ItemBatch)
            for key, group in items.walk():
                head = ("a/0", "c/0")[key.pipeline]
                found[-1][1][head] = found[-1][1].get(head, 0) + len(group.items)
        engine.settle()
        return found

    results = run_threads(plan.members, worker)
    first, *others = results.values()
    assert all(other == first for other in others)
    tokens = [work[1] / sum(work) for work, _ in first]
    assert tokens[0] == pytest.approx(0.4, abs=0.1)
    assert tokens[5:] == pytest.approx([1 / 3] * 4, rel=0.1)
    assert first[0][1]["c/0"] == first[0][1]["a/0"]
    assert all(dealt.get("c/0", 0) <= 3 for _, dealt in first[5:]), first


class Odd(Captions):
    """One sample's last image has a row more than its text has places for."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = self.counts["images"].index(3)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        if index == self.odd:
            sample["images"][-1] = torch.cat([sample["images"][-1], sample["images"][-1][:1]])
        return sample


class Missing(Odd):
    """One sample's images cannot be read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return sample | {"images": [object()] * 3} if index == self.odd else sample


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Odd, "its text has places for .* rows of images, and its images have"),
        (Missing, "images.0. is no tensor"),
    ],
)
def test_a_sample_whose_items_do_not_fit_its_text_ends_the_step_by_its_name_on_every_rank(
    data: type[Odd], said: str
) -> None:
    """Also where it is cut over lanes."""
    plan = PLACEMENTS["2 + 1, the encoder on a device of both"]
    odd = data().odd
    recipe = packed(replace(make_recipe(), dataset=data()))
    step = next(at for at in range(STEPS) if odd in recipe.sampler.samples(at))

    def worker(memory: Any) -> str:
        engine = engine_of(plan, recipe, memory)
        with pytest.raises(SampleError) as raised:
            engine.step(step, lambda: 0, lambda: 0)
        assert raised.value.index == odd
        return str(raised.value)

    found = run_threads(plan.members, worker).values()
    assert any(re.search(said, each) for each in found), found


def test_a_part_of_a_sample_takes_the_rows_at_its_tokens() -> None:
    """An item at the border of two parts, a part without a row, a sample of rows alone."""
    mask = torch.tensor([False, True, True, True, True, False, False, True])
    parts = [SequencePiece(0, 8, start, stop) for start, stop in ((0, 1), (1, 3), (3, 4))]
    assert [piece_rows(mask, part).spans for part in parts] == [
        ((0, 0), (4, 5)),
        ((0, 2), (4, 4)),
        ((2, 4),),
    ]
    assert {piece_rows(mask, part).places for part in parts} == {5}
    assert piece_rows(torch.ones(8, dtype=torch.bool), parts[1]).spans == ((1, 3), (5, 7))
    items = [torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]
    assert [part.tolist() for part in rows_in(items, ((2, 4), (4, 4), (4, 5)))] == [[[2.0]], [[3.0]], [[4.0]]]
    assert rows_in(items, ((0, 3),))[0] is items[0]
    named = [{"rows": items[0], "deep": items[0] + 5}]
    (taken,) = rows_in(named, ((1, 2),))
    assert {name: part.tolist() for name, part in taken.items()} == {"rows": [[1.0]], "deep": [[6.0]]}
    with pytest.raises(ModelError, match="'one' has 1: its sample is cut"):
        rows_in([{"rows": items[0], "one": items[0][:1]}], ((1, 2),))


@pytest.mark.filterwarnings("ignore:.*tensor-parallel rules")
@pytest.mark.parametrize("made", ["padded", "packed"])
def test_lanes_share_experts_beside_an_encoder(made: str) -> None:
    """A lane without a part of a row serves there."""
    torch.manual_seed(2)
    vision: list[nn.Module] = [*vision_sections()[:-1], nn.Linear(VISION.width, WIDTH)]
    language: list[nn.Module] = [
        Words(),
        *(MixtureBlock() for _ in range(LAYERS)),
        nn.Linear(WIDTH, TEXT.vocabulary),
    ]
    vision, language = ([part.double() for part in each] for each in (vision, language))
    recipe, data = make_recipe(), Captions()
    batches = [[data[index] for index in recipe.sampler.samples(step)] for step in range(STEPS)]
    expected, _ = in_one_process(vision, language, batches, **ADAM)
    modules = {
        "vision": Module(
            embed=vision[0], blocks=vision[1:-1], head=vision[-1], width=16, items="images", rules={}
        ),
        "language": Module(
            embed=language[0],
            blocks=language[1:-1],
            head=language[-1],
            rules=MIXTURE_RULES,
            units=MIXTURE_UNITS,
            takes={"images": "vision"},
            places={"images": is_image},
        ),
    }
    recipe = replace(recipe, model=Model(modules=modules))
    plan = plan_of(
        [pipeline(1, stage(0, 2, ("a/1", 1))), pipeline(1, stage(0, 2, ("c/0", 1)))],
        [pipeline((4, 1), SHARED)],
        ahead=2,
    )
    assert losses(plan, packed(recipe) if made == "packed" else recipe) == pytest.approx(expected, abs=1e-12)


class Words(Merge):
    """Of the width of the mixture's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TEXT.vocabulary, WIDTH)


@pytest.mark.parametrize("seed", sizes.beside(range(3), range(60)))
def test_so_they_do_under_drawn_plans(seed: int) -> None:
    plan = drawn_placement(seed, lanes=random.Random(seed).randint(1, 3))
    check(plan, trained_packed(plan))
