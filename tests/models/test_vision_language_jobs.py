"""Vision-language models of transformers train through `from_hf` as they do in one process."""

from __future__ import annotations

import copy
import math
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import PackedLane, Plan
from msgspec.structs import replace

import elasticd
from elasticd.models.huggingface import sample_of, their_name
from elasticd.models.huggingface.described import from_description
from elasticd.models.huggingface.small_images import IMAGE_TOKEN
from elasticd.runtime.api import pretrained_folder
from elasticd.runtime.api.pretrained_folder import Folder
from elasticd.runtime.api.several_modules import module_specs
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads, unpaced
from elasticd.runtime.comm.torch_store import TorchStore
from elasticd.runtime.data.collate import pad
from elasticd.runtime.data.prefetch import SampleError
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.recipe import Recipe
from tests import sizes
from tests.models.double import DoubleThroughout
from tests.runtime.image_model import BATCH, SEED, pipeline, plan_of, stage
from tests.runtime.test_modules import ADAM, PLACEMENTS, STEPS

transformers = pytest.importorskip("transformers")
pictured = pytest.importorskip("tests.models.pictured")
vision_language = pytest.importorskip("tests.models.vision_language")


#: The gradient of a bias of keys is zero but for rounding, which AdamW divides by its eps.
EPS = 1e-6


class Case:
    """A small model of a class, its data, and what it trains to in one process."""

    def __init__(self, name: str) -> None:
        model = vision_language.made(name, depth=3 if name == "Llava" else 2, layers=5)  # whose last is unused
        self.data = pictured.Pictured(model)
        own = copy.deepcopy(model)
        self.model = elasticd.from_hf(own)
        self.layers = self.model.layers
        with DoubleThroughout():
            batches = [self.recipe().sampler.samples(step) for step in range(STEPS)]
            self.losses, self.weights = pictured.in_one_process(own, self.data, batches, eps=EPS, **ADAM)

    def recipe(self, **options: Any) -> Recipe:
        given: dict[str, Any] = {
            "model": self.model,
            "loss": self.model.loss,
            "optimizer": lambda named: torch.optim.AdamW(named, eps=EPS, **ADAM),
            "dataset": self.data,
            "global_batch": BATCH,
            "seed": SEED,
        }
        return Recipe(**given | options)

    def apart(self, plan: Plan) -> float:
        """The furthest that a loss or a weight is off after some steps under a plan."""
        results = run_threads(
            plan.members, lambda memory: self._trained(memory.me, plan, cast(PlanGroups, memory))
        )
        furthest, seen = 0.0, set[str]()
        for losses, parts in results.values():
            furthest = max(furthest, *(abs(a - b) for a, b in zip(losses, self.losses, strict=True)))
            for full, (box, value) in parts.items():
                expected = self.weights[their_name(self.model, full)]
                expected = expected.reshape(-1) if expected.shape != _shape(self.model, full) else expected
                whole = expected.reshape(_shape(self.model, full))
                furthest = max(furthest, float((value - whole[box.slices(Box.whole(whole.shape))]).abs().max()))
                seen.add(full)
        assert seen == {f"{m}.{n}" for m, each in self.model.graph.modules.items() for n in _names(each)}
        return furthest

    def in_bf16(
        self, plan: Plan, eps: float, within: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> dict[str, torch.Tensor]:
        """The master weights after these steps in bfloat16, whole, by name. within: each member runs in it."""
        whole: dict[str, torch.Tensor] = {}

        def train(memory: Any) -> None:
            recipe = self.recipe(
                micro_batch=plan.micro_batch,
                parallelism=elasticd.ParallelismOptions(precision="bf16"),
                optimizer=lambda named: torch.optim.AdamW(named, eps=eps, **ADAM),
            )
            layouts = Layouts(recipe.model.specs, plan)
            engine = Engine(recipe, layouts, memory, unpaced)
            engine.adopt(first_state(recipe.model, layouts, memory.me, SEED, recipe.master))
            with within():
                for step in range(STEPS):
                    engine.step(step, lambda: 0, lambda: 0)
            engine.settle()
            for part in engine.owned:
                shape = _shape(self.model, part.name)
                value = whole.setdefault(part.name, torch.full(shape, torch.nan))
                value[part.box.slices(Box.whole(shape))] = part.parameter.detach().reshape(part.box.shape)

        run_threads(plan.members, train)
        return whole

    def length(self, index: int) -> int:
        """Tokens of a sample."""
        return len(self.data[index]["input_ids"])

    @property
    def row(self) -> int:
        """Tokens of a packed row of a lane, which the longest sample of the first step is not held by."""
        return math.ceil(0.6 * max(map(self.length, self.recipe().sampler.samples(0))))

    def _trained(self, me: str, plan: Plan, plan_groups: PlanGroups) -> Any:
        with DoubleThroughout():
            packing = elasticd.Packing(tokens=self.row, least=1) if plan.packed else None
            data = elasticd.DataOptions(packing=packing, length=self.length if plan.packed else None)
            recipe = self.recipe(micro_batch=plan.micro_batch, data=data)
            layouts = Layouts(recipe.model.specs, plan)
            engine = Engine(recipe, layouts, plan_groups, unpaced)
            engine.adopt(first_state(recipe.model, layouts, me, SEED))
            losses = [engine.step(step, lambda: 0, lambda: 0).outcome.vote.loss for step in range(STEPS)]
            engine.settle()
            return losses, {
                module.prefix + name: (box, parameter.detach())
                for module in engine.modules.values()
                for name, ((box,), parameter) in module.local.parameters.items()
            }


def _shape(model: Any, full: str) -> tuple[int, ...]:
    module, rest = model.graph.named(full)
    return tuple(module.parameter(rest).shape)


def _names(module: Any) -> list[str]:
    return [
        f"{s}.{p.name}"
        for s in module.sections
        for p in module.spec.section(s)
        if p.kind != "buffer" and f"{s}.{p.name}" not in module.ties
    ]


case = cache(Case)


def placed(name: str, layers: int = 5) -> Plan:
    """A placement of the model by hand, whose language model has so many layers. What passes between stages is
    more than one tensor, so that members of a TP group have no slices of tokens."""

    plan = PLACEMENTS[name]
    encoder, language = (replace(each, pipelines=_unsliced(each)) for each in plan.modules)
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(
                    stage,
                    stop=_stop(stage.stop, layers),
                    later=tuple((start, _stop(stop, layers)) for start, stop in stage.later),
                )
                for stage in pipeline.stages
            ),
        )
        for pipeline in language.pipelines
    )
    modules = (encoder, replace(language, pipelines=pipelines))
    return plan.replace(strategies=(replace(plan.strategies[0], modules=modules),))


def cut(layers: int) -> Plan:
    """Samples are packed, and long ones cut over two unlike lanes of two stages; images beside and apart."""
    devices = [[(f"{name}/{index}", share) for index, share in enumerate((1, 2, 1))] for name in "ab"]
    stages = (
        stage(0, 2, *devices[0], lanes=(2, 1)),
        stage(2, layers, *devices[1], lanes=(2, 1), recompute=True),
    )
    rows = (PackedLane(capacity=64), PackedLane(capacity=64, slowdown=96))
    language = replace(pipeline((1, 1), *stages), packed=rows)
    vision = [pipeline(2, stage(0, 2, ("a/0", 1))), pipeline(1, stage(0, 2, ("b/2", 1), ("c/0", 1)))]
    return plan_of(vision, [language], ahead=2, zero=1)


def _stop(stop: int, layers: int) -> int:
    return layers if stop == 5 else stop


def _unsliced(module: Any) -> Any:
    return tuple(
        replace(p, stages=tuple(replace(stage, sequence_parallel=False) for stage in p.stages))
        for p in module.pipelines
    )


CHOSEN = [("Qwen3VL", "encoder pp 2, language interleaved"), ("Qwen3VL", "partly shared, unequal")]


@pytest.mark.parametrize(
    ("name", "placement"),
    sizes.beside(CHOSEN, [(name, each) for name in vision_language.MODELS[:5] for each in PLACEMENTS]),
)
def test_trains_as_in_one_process(name: str, placement: str) -> None:
    one = case(name)
    assert one.apart(placed(placement, one.layers)) < 1e-12


@pytest.mark.parametrize("name", sizes.beside(["Qwen3VL"], ["Qwen3VL", "Llava", "Qwen2_5_VL", "InternVL"]))
def test_trains_on_packed_samples_cut_over_lanes_as_in_one_process(name: str) -> None:
    one = case(name)
    assert one.apart(cut(one.layers)) < 1e-12


@pytest.mark.parametrize(("name", "ratio"), [("Llava", 5 / 4), ("Qwen3VL", 4)])
def test_rows_of_an_image_are_those_that_blocks_work_on(name: str, ratio: float) -> None:
    """In measurements, in the record of the job and in the batches of steps, where the dataset says the rows
    that the encoder gives: LLaVA drops that of the class, and Qwen joins four in one."""
    one, plan = case(name), placed("one device")
    images = [one.data[index]["images"] for index in range(len(one.data))]
    data = copy.copy(one.data)
    data.rows = {"images": [[one.data.rows_of(image) for image in each] for each in images]}
    listed = [rows for each in data.rows["images"] for rows in each]
    recipe = one.recipe(dataset=data)
    (vision,) = (module for module in module_specs(recipe) if module.items)
    assert vision.rows_an_item == pytest.approx(ratio * sum(listed) / len(listed))
    alone = one.recipe(dataset=one.data)
    first = next(filter(None, data.rows["images"]))[0]
    assert next(module for module in module_specs(alone) if module.items).rows_an_item == ratio * first

    def measured(memory: Any) -> None:
        with DoubleThroughout():
            layouts = Layouts(recipe.model.specs, plan)
            engine = Engine(recipe, layouts, memory, unpaced)
            engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
            step = engine.step(0, lambda: 0, lambda: 0).measurement.modules["vision"]
            engine.settle()
        taken = [data.rows["images"][index] for index in recipe.sampler.samples(0)]
        assert step.tokens == ratio * sum(map(sum, taken))
        assert step.items == sum(map(len, taken))

    run_threads(plan.members, measured)
    assert recipe.row_ratio("vision") == round(ratio)


def written(described: Any, data: Any, folder: Path, *, frozen: bool) -> dict[str, torch.Tensor]:
    """Trains a step on two devices, one for each module, which write the folder. Returns weights by name."""
    plan = placed("disjoint", described.layers)
    modules = (replace(plan.modules[0], trainable=not frozen), plan.modules[1])
    plan = plan.replace(strategies=(replace(plan.strategies[0], modules=modules),))
    store = TorchStore(torch.distributed.HashStore())  # type: ignore[attr-defined]
    ended = threading.Barrier(len(plan.members))
    held: dict[str, torch.Tensor] = {}

    def train(memory: Any) -> None:
        recipe = Recipe(
            model=described,
            loss=described.loss,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            dataset=data,
            global_batch=BATCH,
            seed=SEED,
        )
        layouts = Layouts(recipe.model.specs, plan)
        plan_groups = PlanGroups("written", memory.me, "127.0.0.1", store)
        try:
            engine = Engine(recipe, layouts, plan_groups, unpaced)
            engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
            engine.step(0, lambda: 0, lambda: 0)
            engine.settle()
            for module in engine.modules.values():
                for name, (_, parameter) in module.local.parameters.items():
                    held[module.prefix + name] = parameter.detach().clone()
            asked = Folder(path=str(folder), base=None, max_shard_size="5GB")
            assert not pretrained_folder.save(engine, described.pretrained, "value", asked)
            ended.wait()  # no member shuts what another one still reads
        except BaseException:
            ended.abort()
            raise
        finally:
            plan_groups.shut()
            plan_groups.park().join()

    run_threads(plan.members, train)
    return held


def test_a_trained_model_is_a_folder_that_transformers_loads_and_from_hf_reads(tmp_path: Path) -> None:
    """Frozen encoder, too: its values are written. What a checkpoint describes writes the same folder."""
    model = vision_language.made("Llava", depth=3)
    data, own = pictured.Pictured(model), copy.deepcopy(model)
    described = elasticd.from_hf(own, frozen=["vision.*"])
    held = written(described, data, tmp_path, frozen=True)
    loaded = dict(type(model).from_pretrained(tmp_path).named_parameters())
    theirs = {their_name(described, name): value for name, value in held.items()}
    assert theirs.keys() == loaded.keys()
    assert all(torch.equal(theirs[name], loaded[name]) for name in theirs)
    before = dict(model.named_parameters())
    moved = {name for name in theirs if not torch.equal(theirs[name], before[name])}
    assert moved == {name for name in theirs if not name.startswith(("model.vision", "model.multi"))}

    again = elasticd.from_hf(tmp_path)
    assert again.graph is not None
    for name, value in held.items():
        part = Box(start=tuple(size // 2 for size in value.shape), stop=tuple(value.shape))
        assert torch.equal(again.first_value(name, part, SEED), value[part.slices(Box.whole(value.shape))]), (
            name
        )

    out, of_a_checkpoint = tmp_path / "out", from_description(described.pretrained.describe())
    assert not of_a_checkpoint.save(
        out,
        lambda names: {n: held[n] for n in names},
        dtypes=dict.fromkeys(held, torch.float64),
        writes=True,
        base=None,
        max_shard_size="5GB",
    )
    assert all(torch.equal(p, theirs[n]) for n, p in type(model).from_pretrained(out).named_parameters())


def test_adapters_of_the_language_model_are_trained_and_written_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = vision_language.made("Llava", depth=3)
    data = pictured.Pictured(model)
    config = peft.LoraConfig(r=2, target_modules=r".*language_model\.layers\.\d+\.self_attn\.[qv]_proj")
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    described = elasticd.from_hf(adapted.double())
    assert described.graph is not None
    specs = described.graph.specs
    assert not [p for kind in specs["vision"].kinds for p in kind if p.kind == "trained"]
    held = written(described, data, tmp_path, frozen=True)
    loaded = dict(peft.PeftModel.from_pretrained(model, tmp_path).get_base_model().named_parameters())
    trained = [name for name in held if "lora_" in name]
    assert len(trained) == 4 * 3
    assert all(torch.equal(held[name], loaded[their_name(described, name)]) for name in trained)
    assert all(float(held[name].abs().max()) > 0 for name in trained), "B began as zeros"


BAD = {
    "a tensor as an image": (
        lambda sample: sample | {"images": [torch.zeros(3, 8, 8) for _ in sample["images"]]},
        r"images\[0\] is a Tensor: an image of Qwen3VL\w+ is a mapping with pixel_values, .*sample_of",
    ),
    "an image without its grid": (
        lambda sample: sample | {"images": [{"pixel_values": x["pixel_values"]} for x in sample["images"]]},
        r"images\[0\] has no image_grid_thw, which the processor of Qwen3VL\w+ gives",
    ),
    "fewer tokens than rows": (
        lambda sample: {
            name: x if name in ("images", "image_grid_thw") else x[4:] for name, x in sample.items()
        },
        r"it has \d+ tokens of images \(91\), and image_grid_thw says \d+ rows",
    ),
    "pixels of the sample": (
        lambda sample: sample | {"pixel_values": torch.zeros(8, 96)},
        r"pixel_values is in the batch: a sample has its images in a list under 'images'; .*sample_of",
    ),
    "padding at the begin": (
        lambda sample: sample | {"attention_mask": (torch.arange(len(sample["input_ids"])) > 2).long()},
        r"attention_mask leaves out .*samples with images are padded at their end",
    ),
    "positions of text": (  # which this model would not count so
        lambda sample: sample | {"position_ids": torch.arange(len(sample["input_ids"]))},
        r"position_ids are in the batch, and .*counts the positions of tokens and images itself: leave them",
    ),
    "a video": (
        lambda sample: sample | {"input_ids": torch.where(sample["input_ids"] == 7, 92, sample["input_ids"])},
        r"it has tokens of videos \(92\), which would be trained as text",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_sample_is_refused_with_one_message(name: str) -> None:
    spoil, said = BAD[name]
    reads, data = of_qwen()
    index = data.counts["images"].index(2)
    with pytest.raises(ValueError, match=said):
        reads.batch(pad([reads.sample(spoil(data[index]))]))
    said = said.replace("in the batch", "in the sample").replace(
        ".*samples with images are padded at their end", ""
    )
    with pytest.raises(ValueError, match=said):
        reads.row(spoil(data[index]))


def test_a_row_has_the_positions_that_the_model_counts_of_the_sample_by_itself() -> None:
    reads, data = of_qwen()
    sample = data[data.counts["images"].index(2)]
    row = reads.row(sample)
    assert {name: len(x) for name, x in row.items()} == dict.fromkeys(row, len(sample["input_ids"]))
    assert row["rope_positions"].shape[1] == 3
    assert not torch.equal(row["rope_positions"][:, 1], row["rope_positions"][:, 2])
    places = reads.item_places(row)["images"]
    assert int(places.sum()) == int(sample["image_grid_thw"].prod(-1).sum()) // reads.merge**2


def test_positions_that_are_counted_as_the_model_counts_are_left_out() -> None:
    one = case("Llava")
    sample = one.data[0]
    positions = {"position_ids": torch.arange(len(sample["input_ids"]))}
    batch = one.model.reads.batch(pad([one.model.reads.sample(sample | positions)]))
    assert "position_ids" not in batch


@cache
def of_qwen() -> tuple[Any, Any]:
    one = case("Qwen3VL")
    return one.model.reads, one.data


def test_samples_of_unlike_numbers_of_images_are_one_batch() -> None:
    reads, data = of_qwen()
    two, none = data.counts["images"].index(2), data.counts["images"].index(0)
    batch = reads.batch(pad([reads.sample(data[two]), reads.sample(data[none])]))
    assert batch["image_grid_thw"].shape == (2, 2, 3)
    assert torch.equal(batch["image_grid_thw"][0], data[two]["image_grid_thw"])
    assert not batch["image_grid_thw"][1].any()
    assert "attention_mask" not in batch
    assert [int((row == IMAGE_TOKEN).sum()) > 0 for row in batch["input_ids"]] == [True, False]


def test_grids_that_a_collate_joined_are_those_of_the_samples_in_order() -> None:
    """Also where there are as many images as samples."""
    reads, data = of_qwen()
    counts = data.counts["images"]

    def joining(samples: list[Any]) -> Any:
        grids = torch.cat([each.pop("image_grid_thw") for each in samples if "image_grid_thw" in each])
        return pad([{n: x for n, x in e.items() if n != "images"} for e in samples]) | {"image_grid_thw": grids}

    for images in ((2, 0), (0, 2), (1, 1), (2, 1, 0), (3, 1, 2)):
        samples = [dict(data[counts.index(each)]) for each in images]
        grids = torch.cat([each["image_grid_thw"] for each in samples if "image_grid_thw" in each])
        batch = reads.batch(joining([dict(each) for each in samples]))
        read = batch["image_grid_thw"]
        assert torch.equal(read[read.any(-1)] if read.dim() == 3 else read, grids), images
    two, other = data[counts.index(2)], data[counts.index(3)]
    swapped = joining(
        [
            dict(two) | {"image_grid_thw": other["image_grid_thw"]},
            dict(other) | {"image_grid_thw": two["image_grid_thw"]},
        ]
    )
    with pytest.raises(ValueError, match=r"tokens of images \(91\), and image_grid_thw says"):
        reads.batch(swapped)


class Elsewhere(pictured.Pictured):  # type: ignore[misc]
    """A dataset of which two samples of a step have the text of each other, or one is without its images."""

    def __init__(self, model: Any, swapped: tuple[int, ...]) -> None:
        super().__init__(model)
        self.swapped = swapped
        if len(swapped) == 1:
            self.counts = {"images": [n * (i not in swapped) for i, n in enumerate(self.counts["images"])]}
            self.full = pictured.Pictured(model)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index not in self.swapped:
            return super().__getitem__(index)
        if len(self.swapped) == 1:
            return self.full[index] | {"images": []}
        (other,) = set(self.swapped) - {index}
        return super().__getitem__(other) | {"images": super().__getitem__(index)["images"]}


@pytest.mark.parametrize("placement", ["one device", "disjoint"])
@pytest.mark.parametrize("spoilt", [2, 1])
def test_a_text_with_other_images_than_its_own_is_named_on_all_ranks(placement: str, spoilt: int) -> None:
    """In one micro-batch, so that all its images have as many rows as all its texts have tokens for them."""
    one = case("Llava")
    counts, first = one.data.counts["images"], one.recipe().sampler.samples(0)
    swapped = [next(i for i in first if counts[i] == wanted) for wanted in (2, 1)][:spoilt]
    plan = of_one_micro_batch(placed(placement, one.layers))
    model = vision_language.made("Llava", depth=3)
    data = Elsewhere(model, tuple(swapped))

    def refused(memory: Any) -> str:
        recipe = one.recipe(micro_batch=plan.micro_batch, dataset=data)
        layouts = Layouts(recipe.model.specs, plan)
        engine = Engine(recipe, layouts, memory, unpaced)
        engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
        with pytest.raises(SampleError) as refusal:
            engine.step(0, lambda: 0, lambda: 0)
        assert refusal.value.index in swapped
        return str(refusal.value)

    said = run_threads(plan.members, refused)
    taker = plan.modules[1].pipelines[0].stages[0].devices[0]
    assert re.match(r".* its text has places for [48] rows of images, and its images have", said[taker])


def of_one_micro_batch(plan: Plan) -> Plan:
    """The plan, whose global batch is one micro-batch."""
    encoder, language = plan.modules
    language = replace(language, pipelines=tuple(replace(p, micro_batches=1) for p in language.pipelines))
    strategy = replace(plan.strategies[0], modules=(encoder, language))
    return plan.replace(micro_batch=BATCH, strategies=(strategy,))


def test_what_a_processor_gives_of_several_texts_is_refused() -> None:
    _, data = of_qwen()
    encoded = data.encoded(data.counts["images"].index(2))
    with pytest.raises(ValueError, match="input_ids has 2 rows: give the processor one text at a time"):
        sample_of({**encoded, "input_ids": encoded["input_ids"].expand(2, -1)})
    with pytest.raises(ValueError, match=r"input_ids is a list: call the processor with return_tensors='pt'"):
        sample_of({**encoded, "input_ids": [[1]]})
    with pytest.raises(ValueError, match=r"pixel_values has \d+ rows, and image_grid_thw says other images"):
        sample_of({**encoded, "pixel_values": encoded["pixel_values"][1:]})
