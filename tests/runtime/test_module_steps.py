"""Steps of several modules: reading of samples, sums in their order, the next step made in another thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.item_batch import ItemBatch, SampleItem, item_batch
from elasticd_planner.spec.plan import Plan

from elasticd.runtime.api.evaluation import HeldOut, evaluate
from elasticd.runtime.comm.in_memory import run_threads, unpaced
from elasticd.runtime.data.loader import ItemSizes, sample_tokens
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.prefetch import SampleError
from elasticd.runtime.data.sample_ledger import LedgerError
from elasticd.runtime.engine import module_step
from elasticd.runtime.engine.compiled_blocks import compile_ahead
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.parallelism import ParallelismOptions
from tests.compiling import graphs
from tests.planner.test_item_batch import batch_of, planned
from tests.runtime.image_model import SEED, Captions
from tests.runtime.test_modules import PLACEMENTS, STEPS, make_recipe, reference
from tests.sizes import beside


def train(
    plan: Plan, data: Captions, look: Callable[[Engine], None] = lambda _: None, *, readers: int = 0
) -> dict[str, list[float]]:
    """The losses on each rank."""

    def losses(memory: Any) -> list[float]:
        recipe = replace(
            make_recipe(micro_batch=plan.micro_batch), dataset=data, data=DataOptions(readers=readers)
        )
        layouts = Layouts(recipe.model.specs, plan)
        engine = Engine(recipe, layouts, memory, unpaced)
        engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
        look(engine)
        found = [engine.step(step, lambda: 0, lambda: 0).outcome.vote.loss for step in range(STEPS)]
        engine.settle()
        return found

    return run_threads(plan.members, losses)


class Counted(Captions):
    """Notes which samples are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = Counter[int]()

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read[index] += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("name", "devices"), [("one device", 1), ("disjoint", 2)])
def test_a_device_reads_a_sample_once_whatever_it_takes_of_it(name: str, devices: int) -> None:
    """Its text and its images."""
    data = Counted()
    train(PLACEMENTS[name], data)
    images = data.counts["images"]
    assert data.read == {index: devices if count else 1 for index, count in enumerate(images)}


class Parts(Captions):
    """Gives parts of samples, of which some draw, and notes which were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Counter[tuple[str, ...]]()

    def part(self, index: int, kinds: Sequence[str]) -> dict[str, Any]:
        """A sample with these items alone."""
        self.asked[tuple(kinds)] += 1
        sample = super().__getitem__(index)
        return sample if "images" in kinds else {key: sample[key] for key in sample if key != "images"}

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("parts are asked for")


@pytest.mark.parametrize("readers", [0, 1])
@pytest.mark.parametrize("name", ["disjoint", "one device"])
def test_a_module_asks_for_the_items_that_it_computes_with(name: str, readers: int) -> None:
    data = Parts()
    for losses in train(PLACEMENTS[name], data, readers=readers).values():
        assert losses == pytest.approx(reference()[0], abs=1e-12)
    having = sum(map(bool, data.counts["images"]))
    if not readers:  # else the first ones are read again, alone
        assert data.asked == {(): len(data), ("images",): having}
    assert set(data.asked) == {(), ("images",)}


class Drawn(Parts):
    """Crops each image at random, and draws the first word after that."""

    def part(self, index: int, kinds: Sequence[str]) -> dict[str, Any]:
        """A sample with these items alone, as it is drawn."""
        sample = super().part(index, kinds)
        for image in sample.get("images", ()):
            image += torch.rand(1)
        sample["inputs"][0] = torch.randint(2, 30, ())
        return sample


def test_draws_in_a_part_are_alike_whoever_asks_for_it() -> None:
    seen = [
        train(PLACEMENTS[name], Drawn())["a/0"]
        for name in ("one device", "disjoint", "tp 2 to tp 2, pp 3", "partly shared, unequal")
    ]
    for losses in seen[1:]:
        assert losses == pytest.approx(seen[0], abs=1e-12)


class Sized(Captions):
    """Says how many rows each image has."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [[len(image) for image in self[index]["images"]] for index in range(len(self))]
        self.rows = {"images": sizes}


def test_items_are_dealt_by_the_rows_that_the_dataset_says() -> None:
    data, dealt = Sized(), list[int]()

    def look(engine: Engine) -> None:
        several = engine._several
        assert several is not None
        run = several.run

        def noted(*arguments: Any) -> Any:
            passed = run(*arguments)
            assert several._now is not None
            items = several._now[1].batches["vision"]
            assert isinstance(items, ItemBatch)
            dealt.extend(group.rows for _, group in items.walk())
            return passed

        several.run = noted  # type: ignore[method-assign]

    plan = PLACEMENTS["one device"]
    for losses in train(plan, data, look).values():
        assert losses == pytest.approx(reference()[0], abs=1e-12)
    assert sorted(dealt) == sorted(size for sizes in data.rows["images"] for size in sizes)


def test_rows_that_do_not_fit_a_sample_end_its_own_step_on_all_ranks() -> None:
    data, plan = Sized(), PLACEMENTS["disjoint"]
    third = make_recipe().sampler.samples(2)
    wrong = next(index for index in third if data.counts["images"][index] == 2)
    data.rows["images"][wrong].pop()

    def refused(memory: Any) -> None:
        recipe = replace(make_recipe(), dataset=data)
        layouts = Layouts(recipe.model.specs, plan)
        engine = Engine(recipe, layouts, memory, unpaced)
        engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
        for step in range(2):
            engine.step(step, lambda: 0, lambda: 0)
        with pytest.raises(SampleError, match="say that it has 2 images, and its rows have 1 numbers"):
            engine.step(2, lambda: 0, lambda: 0)

    run_threads(plan.members, refused)


def test_rows_of_one_ranks_held_out_set_that_do_not_fit_end_the_evaluation_on_all_ranks() -> None:
    plan = PLACEMENTS["disjoint"]

    def refused(memory: Any) -> None:
        recipe = make_recipe()
        engine = Engine(recipe, Layouts(recipe.model.specs, plan), memory, unpaced)
        engine.adopt(first_state(recipe.model, engine.layouts, memory.me, SEED))
        engine.step(0, lambda: 0, lambda: 0)
        data = Sized()
        if memory.me == "a/1":
            data.rows["images"][next(i for i, count in enumerate(data.counts["images"]) if count)].pop()
        with pytest.raises(LedgerError, match="an evaluation: a/1 deal the samples otherwise"):
            evaluate(engine, HeldOut(dataset=data), "held", 1, recipe.loss, recipe.data, "value")

    run_threads(plan.members, refused)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_rank_whose_dataset_has_other_rows_is_named(steps: int) -> None:
    """Before any rank waits for another one: by its first step, or by the vote of the step before."""
    plan = PLACEMENTS["zero 1"]

    def refused(memory: Any) -> str:
        data = Sized()
        if memory.me == "b/0":
            images = make_recipe().sampler.samples(0 if steps == 1 else 2)
            for index in images:
                data.rows["images"][index] = [size + 1 for size in data.rows["images"][index]]
        recipe = replace(make_recipe(), dataset=data)
        layouts = Layouts(recipe.model.specs, plan)
        engine = Engine(recipe, layouts, memory, unpaced)
        engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
        for step in range(steps - 1):
            engine.step(step, lambda: 0, lambda: 0)
        with pytest.raises(LedgerError) as refusal:
            engine.step(steps - 1, lambda: 0, lambda: 0)
        return str(refusal.value)

    for said in run_threads(plan.members, refused).values():
        assert (
            "b/0 deal the samples otherwise" in said
            if steps == 1
            else "have another batch plan for step 2" in said
        )
        assert "other lengths, counts or rows" in said


def test_tokens_of_a_sample_are_those_of_its_text() -> None:
    class ImagesFirst(Captions):
        def __getitem__(self, index: int) -> dict[str, Any]:
            sample = super().__getitem__(index)
            return {key: sample[key] for key in ("images", "inputs", "targets")}

    assert sample_tokens(ImagesFirst(), kinds=["images"]) == sample_tokens(Captions())


def test_of_samples_with_many_images_few_are_read_before_a_job() -> None:
    """Whole samples, of a dataset that gives no parts: as many as have 64 images. Of parts 64 are read."""

    class Albums:
        """Samples of 16 images, which counts what is read."""

        def __init__(self) -> None:
            self.counts, self.read = {"images": [16] * 100}, list[int]()

        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> Any:
            self.read.append(index)
            return {"images": [torch.zeros(1, 2)] * 16, "inputs": torch.arange(5)}

    class InParts(Albums):
        """The same in parts."""

        def part(self, index: int, kinds: Any) -> Any:
            assert not kinds
            self.read.append(index)
            return {"inputs": torch.arange(5)}

    albums, parts = Albums(), InParts()
    kinds = ["images"]
    assert sample_tokens(albums, kinds=kinds) == sample_tokens(parts, kinds=kinds) == 5
    assert (len(albums.read), len(parts.read)) == (4, 64)


def test_a_sample_counted_below_zero_is_named() -> None:
    data = Captions()
    wrong = make_recipe().sampler.samples(0)[1]
    data.counts["images"][wrong] = -1
    with pytest.raises(SampleError, match=f"sample {wrong} .*say that it has -1 images"):
        train(PLACEMENTS["one device"], data)


class Unreadable(Captions):
    """One sample of the first step raises, as a whole or where its images are asked for."""

    def __init__(self, images: int) -> None:
        super().__init__()
        step = make_recipe().sampler.samples(0)
        self.wrong = next(index for index in step if self.counts["images"][index] == images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.wrong:
            raise OSError("bad sector")
        return super().__getitem__(index)


class NoImage(Unreadable):
    """Its text can be read."""

    def part(self, index: int, kinds: Sequence[str]) -> dict[str, Any]:
        """A sample with these items alone."""
        if kinds:
            return self[index]
        sample = Captions.__getitem__(self, index)
        return {key: sample[key] for key in sample if key != "images"}


@pytest.mark.parametrize(
    "name",
    [
        "one device",
        "disjoint",
        "all samples in one micro-batch",
        "tp 2 to tp 2, pp 3",
        "both in stages on the same devices",
    ],
)
@pytest.mark.parametrize(("kind", "images"), [(Unreadable, 0), (Unreadable, 3), (NoImage, 3)])
def test_a_sample_that_cannot_be_read_is_named_on_all_ranks(
    name: str, kind: type[Unreadable], images: int
) -> None:
    """What stands in for its text, or for an image, does not fit the rest: no other sample has three images."""
    data, plan = kind(images), PLACEMENTS[name]

    def refused(memory: Any) -> None:
        recipe = replace(make_recipe(micro_batch=plan.micro_batch), dataset=data)
        layouts = Layouts(recipe.model.specs, plan)
        engine = Engine(recipe, layouts, memory, unpaced)
        engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
        with pytest.raises(SampleError, match=f"sample {data.wrong} of the dataset") as refusal:
            engine.step(0, lambda: 0, lambda: 0)
        assert refusal.value.index == data.wrong

    run_threads(plan.members, refused)


def test_the_next_step_is_made_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    order = module_step.module_order

    def noted(*arguments: Any, **named: Any) -> Any:
        made.append(threading.current_thread().name)
        return order(*arguments, **named)

    monkeypatch.setattr(module_step, "module_order", noted)
    train(PLACEMENTS["one device"], Captions())
    beside = [name.startswith("elasticd-batches") for name in made]
    assert beside[:STEPS] == [False, True, True], "the one after the last may be under way"


@pytest.mark.parametrize(
    "name", ["fan-out: dp 1 to dp 4", "zero 2", "partly shared, unequal", "each encoder serves one pipeline"]
)
def test_a_sum_is_launched_at_its_place_in_the_order(name: str) -> None:
    """Behind all acts of this device that come first, and before all others."""
    early = []

    def look(engine: Engine) -> None:
        several, log = engine._several, list[tuple[str, Any]]()
        assert several is not None
        for module_name, module in engine.modules.items():
            launch = module.launch_sum

            def launched(bucket: int, name: str = module_name, launch: Callable[[int], None] = launch) -> None:
                log.append(("sum", (name, bucket)))
                launch(bucket)

            module.launch_sum = launched  # type: ignore[method-assign]
            if module.runner is not None:
                carry_out = module.runner.carry_out

                def carried(act: Any, group: Any = None, own: Any = carry_out) -> None:
                    log.append(("act", act))
                    own(act, group)

                module.runner.carry_out = carried  # type: ignore[method-assign]
        run = several.run

        def checked(*arguments: Any) -> Any:
            log.clear()
            passed = run(*arguments)
            assert several._now is not None
            step = several._now[1]
            expected: list[tuple[int, int, tuple[str, Any]]] = [
                (place, 0, ("act", each.act)) for place, each in step.acts
            ]
            expected += [(each.after, 1, ("sum", (each.module, each.bucket))) for each in step.sums]
            assert log == [each for *_, each in sorted(expected, key=lambda each: each[:2])]
            early.append(any(step.sums) and log[-len(step.sums)][0] != "sum")
            return passed

        several.run = checked  # type: ignore[method-assign]

    train(PLACEMENTS[name], Captions(), look)
    assert any(early), "sums go beside passes"


APART = ("disjoint", True)


@pytest.mark.parametrize(
    ("name", "compile"), beside([APART], [APART, ("disjoint", "chunks"), ("partly shared, unequal", True)])
)
def test_blocks_of_all_modules_are_compiled_beforehand(traced: None, name: str, compile: bool | str) -> None:
    """With numbers of rows that differ from image to image."""
    plan = PLACEMENTS[name]
    recipe = replace(make_recipe(), parallelism=ParallelismOptions(compile=compile))
    layouts = Layouts(recipe.model.specs, plan)
    before = graphs()
    for device in plan.members:
        for view in layouts.views.values():
            compile_ahead(recipe, view.plan, device)()
    ahead = graphs()
    assert ahead - before >= 2, "of each module"

    def losses(memory: Any) -> list[float]:
        own = replace(make_recipe(), parallelism=ParallelismOptions(compile=compile))
        engine = Engine(own, layouts, memory, unpaced)
        engine.adopt(first_state(own.model, layouts, memory.me, SEED))
        found = [engine.step(step, lambda: 0, lambda: 0).outcome.vote.loss for step in range(STEPS)]
        engine.settle()
        return found

    for found in run_threads(plan.members, losses).values():
        assert found == pytest.approx(reference()[0], abs=1e-12)
    assert graphs() == ahead, "training has made none"


def test_items_are_dealt_by_what_they_take_and_not_by_their_rows_alone() -> None:
    """Each row of an image attends to all of its rows."""
    plan, rise = planned((1, 1), (2,), ahead=2), 1 / 1024
    rows = {SampleItem(0, 0): 4096} | {SampleItem(1, n): 256 for n in range(64)}
    sizes = ItemSizes({0: 1, 1: 64}, rows)

    def seconds(by: ItemSizes) -> list[float]:
        batch = item_batch(plan, "vision", batch_of(plan), *by)
        return [
            sum(rows[item] * (1 + rise * rows[item]) for lane in lanes for each in lane for item in each.items)
            for lanes in batch.pipelines
        ]

    by_rows, by_costs = seconds(sizes), seconds(sizes.costs(rise))
    assert max(by_rows) > 1.5 * min(by_rows)
    assert max(by_costs) < 1.1 * min(by_costs)
    assert sizes.costs(0.0) == sizes
    alike = ItemSizes({0: 2}, {SampleItem(0, n): 64 for n in range(2)})
    assert alike.costs(rise) == alike
    assert ItemSizes({0: 2}, None).costs(rise) == ItemSizes({0: 2}, None)
