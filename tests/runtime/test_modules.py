"""A model of two modules, each with a layout of its own, trains like plain torch in one process, in float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any, cast

import msgspec
import pytest
import torch
from elasticd_migration.local_state import LocalState
from elasticd_migration.migrate import migrate
from elasticd_migration.reshard import reshard
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.cost.item_messages import kept_messages
from elasticd_planner.layout.channels import Channel
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.item_batch import SampleItem
from elasticd_planner.spec.plan import Plan, StatePolicy
from torch import nn

from elasticd.models.decoder import next_token_loss
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.comm.communicators import Connect, GlooCommunicators
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads, unpaced
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.prefetch import SampleError
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.item_border import in_order_of, joined
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.tp_rules import UnitsOf
from elasticd.runtime.model.validation import ModelError
from tests import sizes
from tests.migration.ranks import together
from tests.runtime import gang
from tests.runtime.drawn_placements import drawn_placement
from tests.runtime.image_model import (
    BATCH,
    RULES,
    SEED,
    TEXT,
    VISION,
    Captions,
    Merge,
    Projector,
    in_one_process,
    language_sections,
    model_of,
    pipeline,
    plan_of,
    stage,
    vision_sections,
)

STEPS = 3
ADAM = {"lr": 1e-2, "weight_decay": 0.1}

PLACEMENTS = {
    "one device": plan_of([pipeline(1, stage(0, 2, ("a/0", 1)))], [pipeline(5, stage(0, 5, ("a/0", 1)))]),
    "disjoint": plan_of([pipeline(1, stage(0, 2, ("a/0", 1)))], [pipeline(5, stage(0, 5, ("a/1", 1)))]),
    "fan-in: dp 4 to tp 2, pp 2": plan_of(
        [pipeline(1, stage(0, 2, (f"a/{i}", 1))) for i in range(4)],
        [pipeline(5, stage(0, 2, ("a/0", 1), ("a/1", 1)), stage(2, 5, ("a/2", 1), ("a/3", 1)))],
        ahead=2,
    ),
    "fan-out: dp 1 to dp 4": plan_of(
        [pipeline(1, stage(0, 2, ("a/0", 1)))],
        [pipeline(2 if i == 0 else 1, stage(0, 5, (f"a/{i}", 1))) for i in range(4)],
        ahead=5,
        lead=1,
    ),
    "tp 2 to tp 2, pp 3": plan_of(
        [pipeline(1, stage(0, 2, ("a/0", 3), ("a/1", 1)))],
        [
            pipeline(
                5,
                stage(0, 1, ("a/0", 1), ("a/1", 1)),
                stage(1, 2, ("b/0", 1), ("b/1", 1)),
                stage(2, 5, ("c/0", 1), ("c/1", 1)),
            )
        ],
        ahead=3,
    ),
    "partly shared, unequal": plan_of(
        [
            pipeline(1, stage(0, 2, ("a/0", 3), ("a/1", 1))),
            *(pipeline(1, stage(0, 2, (name, 1))) for name in ("a/2", "b/1", "c/0")),
        ],
        [
            pipeline(3, stage(0, 2, ("a/0", 2), ("a/1", 1), ("a/2", 1)), stage(2, 5, ("b/0", 1))),
            pipeline(2, stage(0, 1, ("b/1", 1)), stage(1, 5, ("b/2", 1), ("a/3", 1))),
        ],
        ahead=2,
        lead=1,
    ),
    "encoder pp 2, language interleaved": plan_of(
        [pipeline(1, stage(0, 1, ("a/0", 1)), stage(1, 2, ("a/1", 1))), pipeline(1, stage(0, 2, ("b/0", 1)))],
        [
            pipeline(3, stage(0, 1, ("a/0", 1), later=((3, 4),)), stage(1, 3, ("b/0", 1), later=((4, 5),))),
            pipeline(2, stage(0, 5, ("b/1", 1))),
        ],
        ahead=2,
    ),
    "all samples in one micro-batch": plan_of(
        [pipeline(1, stage(0, 2, ("a/0", 1))), pipeline(1, stage(0, 2, ("a/1", 1)))],
        [pipeline(1, stage(0, 2, ("a/0", 1)), stage(2, 5, ("a/1", 1)))],
        micro_batch=BATCH,
    ),
    "both in stages on the same devices": plan_of(
        [pipeline(1, stage(0, 1, ("a/0", 1)), stage(1, 2, ("a/1", 1)))],
        [pipeline(5, stage(0, 2, ("a/0", 1)), stage(2, 5, ("a/1", 1)))],
        ahead=2,
    ),
    "lanes": plan_of(
        [pipeline((1, 1), stage(0, 2, ("a/0", 1), ("b/0", 1), lanes=(1, 1)))],
        [pipeline((3, 2), stage(0, 5, ("a/0", 1), ("a/1", 1), ("b/0", 1), lanes=(2, 1)))],
    ),
    "zero 1": plan_of(
        [pipeline(1, stage(0, 2, (f"a/{i}", 1))) for i in range(3)],
        [
            pipeline(3, stage(0, 2, ("a/0", 1)), stage(2, 5, ("a/1", 1))),
            pipeline(2, stage(0, 5, ("a/2", 1), ("b/0", 1))),
        ],
        zero=1,
        ahead=2,
    ),
    "zero 1, a carrier": plan_of(
        [pipeline(1, stage(0, 2, ("a/0", 1))), pipeline(1, stage(0, 2, ("b/0", 1)))],
        [pipeline(5, stage(0, 2, ("a/0", 1)), stage(2, 5, ("a/1", 1)))],
        zero=1,
    ).replace(state=StatePolicy(zero=1, replicas=2), carriers=("b/1",)),
    "zero 2": plan_of(
        [pipeline(1, stage(0, 2, ("a/0", 1))), pipeline(1, stage(0, 2, ("b/0", 1)))],
        [pipeline(3, stage(0, 5, ("a/0", 1))), pipeline(2, stage(0, 5, ("a/1", 1)))],
        zero=2,
        ahead=5,
    ),
    "each encoder serves one pipeline": plan_of(
        [
            msgspec.structs.replace(pipeline(1, stage(0, 2, ("a/0", 1))), serves=(0,)),
            msgspec.structs.replace(pipeline(1, stage(0, 1, ("b/0", 1)), stage(1, 2, ("b/1", 1))), serves=(1,)),
        ],
        [
            pipeline(3, stage(0, 2, ("a/0", 1)), stage(2, 5, ("a/1", 1))),
            pipeline(2, stage(0, 5, ("b/0", 1), ("b/1", 1))),
        ],
        zero=1,
        ahead=2,
    ),
    "recomputed, sequence parallel": plan_of(
        [pipeline(1, stage(0, 2, ("a/0", 1), ("a/1", 1), recompute=True, sequence_parallel=True))],
        [pipeline(5, stage(0, 5, ("a/0", 1), ("a/1", 1), recompute=True, sequence_parallel=True))],
    ),
}


#: Another layout of the encoder of "zero 1", on other devices.
VISION_MOVED = [
    pipeline(2, stage(0, 1, ("a/1", 1), ("b/0", 1)), stage(1, 2, ("c/0", 1))),
    pipeline(1, stage(0, 2, ("a/2", 1))),
]
DECODER = PLACEMENTS["zero 1"].modules[1].pipelines


@cache
def sections() -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    torch.manual_seed(0)
    return vision_sections(), language_sections()


@cache
def described(*, frozen: bool = False) -> Model:
    """Once for all ranks that are threads."""
    vision, language = copy.deepcopy(sections())
    return model_of(vision, language, frozen=frozen)


def make_recipe(*, frozen: bool = False, micro_batch: int = 1, connect: Connect = GlooCommunicators) -> Recipe:
    own = described(frozen=frozen)
    return Recipe(
        model=own,
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.AdamW(named, **ADAM),
        dataset=Captions(),
        global_batch=BATCH,
        micro_batch=micro_batch,
        seed=SEED,
        connect=connect,
    )


def worker(device: str, store: Any, plan: Plan) -> dict[str, Any]:
    """As one of several processes, over gloo."""
    return trained(device, plan, PlanGroups("plan/1", device, "127.0.0.1", store))


def trained(
    device: str,
    plan: Plan,
    plan_groups: PlanGroups,
    *,
    frozen: bool = False,
    accelerator: Accelerator = CPU,
    connect: Connect = GlooCommunicators,
    state: LocalState | None = None,
    steps: range = range(STEPS),
    recipe: Recipe | None = None,
) -> dict[str, Any]:
    """What one member has after training these steps under this plan."""
    made = recipe or make_recipe(frozen=frozen, micro_batch=plan.micro_batch, connect=connect)
    recipe = replace(made, accelerator=accelerator)
    layouts = Layouts(recipe.model.specs, plan)
    engine = Engine(recipe, layouts, plan_groups, unpaced)
    first = first_state(recipe.model, layouts, device, SEED, accelerator=accelerator)
    engine.adopt(state if state is not None else first)
    done, encoder = [], []
    for step in steps:
        done.append(engine.step(step, lambda: 0, lambda: 0))
        engine.settle()
        parts = [part for part in engine.owned if part.name.startswith("vision.")]
        encoder.append(
            {
                name: [part.parameter.detach().clone(), *map(torch.clone, moments_of(engine, part.parameter))]
                for name, part in ((f"{part.name} {part.box}", part) for part in parts)
            }
        )
    engine.communicators.received()
    return {
        "kept": len(getattr(engine.communicators, "_open", ())),  # messages, over a device's own communicators
        "state": engine.state(),
        "encoder": encoder,
        "losses": [each.outcome.vote.loss for each in done],
        "measured": [each.measurement for each in done],
        "weights": {
            module.prefix + name: (box, parameter.detach())
            for module in engine.modules.values()
            for name, ((box,), parameter) in module.local.parameters.items()
        },
    }


def moments_of(engine: Engine, parameter: torch.Tensor) -> list[torch.Tensor]:
    return [each for each in engine.optimizer.state[parameter].values() if isinstance(each, torch.Tensor)]


@cache
def reference(*, frozen: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    recipe, data = make_recipe(), Captions()
    batches = [[data[index] for index in recipe.sampler.samples(step)] for step in range(STEPS)]
    vision, language = sections()
    if frozen:
        for section in vision:
            section.requires_grad_(requires_grad=False)
    try:
        return in_one_process(vision, language, batches, **ADAM)
    finally:
        for section in vision:
            section.requires_grad_(requires_grad=True)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_two_modules_train_like_one_process(name: str) -> None:
    plan = PLACEMENTS[name]
    check(plan, run_threads(plan.members, lambda memory: trained(memory.me, plan, cast(PlanGroups, memory))))


@pytest.mark.parametrize("seed", sizes.beside(range(4), range(100)))
def test_two_modules_train_like_one_process_under_drawn_plans(seed: int) -> None:
    plan = drawn_placement(seed)
    check(plan, run_threads(plan.members, lambda memory: trained(memory.me, plan, cast(PlanGroups, memory))))


def check(plan: Plan, results: dict[str, dict[str, Any]], *, frozen: bool = False) -> None:
    losses, _ = reference(frozen=frozen)
    for result in results.values():
        assert result["losses"] == results[plan.members[0]]["losses"], "all ranks fold the same bits"
        assert result["losses"] == pytest.approx(losses, abs=1e-12)
    compared(results, frozen=frozen)


def apart(results: dict[str, dict[str, Any]]) -> float:
    """The largest difference of a loss or a weight from one process's."""
    losses, weights = reference()
    found = [
        abs(one - other) for one, other in zip(next(iter(results.values()))["losses"], losses, strict=True)
    ]
    for result in results.values():
        for name, (box, value) in result["weights"].items():
            expected = weights[name][box.slices(Box.whole(weights[name].shape))]
            found.append(float((value - expected).abs().max()))
    return max(found)


def compared(results: dict[str, dict[str, Any]], *, frozen: bool = False) -> None:
    """Their weights are those of one process, and they have all of them."""
    weights, seen = reference(frozen=frozen)[1], set[str]()
    for result in results.values():
        for name, (box, value) in result["weights"].items():
            expected = weights[name][box.slices(Box.whole(weights[name].shape))]
            assert float((value - expected).abs().max()) < 1e-12, name
            seen.add(name)
    assert seen == set(weights)


def test_a_step_without_an_image_leaves_the_encoder_as_it_is() -> None:
    """To the bit, moments too: weight decay of AdamW would move it."""
    plan = PLACEMENTS["zero 1"]
    results = run_threads(plan.members, lambda memory: trained(memory.me, plan, cast(PlanGroups, memory)))
    moved = 0
    for result in results.values():
        first, second, third = result["encoder"]
        for name, before in first.items():
            assert len(before) == len(second[name]), name
            for one, other in zip(before, second[name], strict=True):
                assert torch.equal(one, other), name
            moved += not torch.equal(second[name][0], third[name][0])
    assert moved, "the third step has images"


class Leaving(Merge):
    """Leaves out the images of samples whose first token is even, and all the notes that come with images."""

    def forward(self, batch: Any) -> torch.Tensor:
        even = int(batch["inputs"][0, 0]) % 2 == 0
        images = None if batch["images"] is None or even else batch["images"]["rows"]
        return super().forward({**batch, "images": images})


class Noting(Projector):
    """Gives with the rows of an image notes, which have parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = torch.nn.Linear(VISION.width, TEXT.width, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> Any:
        return {"rows": super().forward(x), "notes": self.notes(x)}


@pytest.mark.parametrize("first", ["some", "all"])
@pytest.mark.parametrize("name", ["one device", "disjoint", "zero 1", "encoder pp 2, language interleaved"])
def test_what_the_embedding_leaves_out_has_no_gradient(name: str, first: str) -> None:
    """As in one process: weight decay of AdamW would move it, and its moments. Of the third step's samples all
    are left out, or those with an even token."""
    plan, data = PLACEMENTS[name], Leavable(all_even=first == "all")
    torch.manual_seed(1)
    vision, language = [*vision_sections()[:-1], Noting()], [Leaving(), *language_sections()[1:]]
    recipe = replace(make_recipe(), model=model_of(*copy.deepcopy((vision, language))), dataset=data)
    batches = [[data[index] for index in recipe.sampler.samples(step)] for step in range(STEPS)]
    losses, weights = in_one_process(vision, language, batches, **ADAM)

    def trained_so(memory: Any) -> list[float]:
        layouts = Layouts(recipe.model.specs, plan)
        engine = Engine(recipe, layouts, memory, unpaced)
        engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
        found = [engine.step(step, lambda: 0, lambda: 0).outcome.vote.loss for step in range(STEPS)]
        engine.settle()
        for module in engine.modules.values():
            for own, ((box,), parameter) in module.local.parameters.items():
                whole = weights[module.prefix + own]
                expected = whole[box.slices(Box.whole(whole.shape))]
                assert float((parameter.detach() - expected).abs().max()) < 1e-12, own
        return found

    for found in run_threads(plan.members, trained_so).values():
        assert found == pytest.approx(losses, abs=1e-12)


class Leavable(Captions):
    """Samples whose first tokens are even in the third step, if all are to be."""

    def __init__(self, *, all_even: bool) -> None:
        super().__init__()
        self._even = set(make_recipe().sampler.samples(2)) if all_even else set[int]()

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        if index in self._even:
            sample["inputs"][0] = 4
        return sample


class ItemMessages(GlooCommunicators):
    """Notes what goes over borders between modules: from whom, to whom, how many rows."""

    def __init__(self, sent: list[tuple[str, str, int]], *made: Any) -> None:
        super().__init__(*made)
        self._sent, self._me = sent, made[2].me

    def mesh(self, channel: Channel) -> Any:
        """Of a border between modules one that notes its messages."""
        mesh = super().mesh(channel)
        if channel.use == "items":
            launch = mesh.begin_round

            def noted(sends: Any, receives: Any) -> Any:
                self._sent += [(self._me, to, x.numel() // TEXT.width) for to, x in sends]
                return launch(sends, receives)

            mesh.begin_round = noted  # type: ignore[method-assign]
        return mesh


def counted(plan: Plan, *, frozen: bool = False) -> list[tuple[str, str, int]]:
    """The messages between modules of a training that is checked against one process."""
    sent: list[tuple[str, str, int]] = []

    def train(memory: Any) -> dict[str, Any]:
        return trained(memory.me, plan, memory, frozen=frozen, connect=partial(ItemMessages, sent))

    check(plan, run_threads(plan.members, train), frozen=frozen)
    return sent


def images_of(step: int) -> list[int]:
    """The rows of each image of a step."""
    data = Captions()
    return [len(image) for index in make_recipe().sampler.samples(step) for image in data[index]["images"]]


ROWS = sum(sum(images_of(step)) for step in range(STEPS))


def test_each_row_that_is_lacking_goes_over_a_border_once_each_way() -> None:
    """A TP group of two makes all rows. Of the group of three that needs them two members make them, and the
    third gets them; the gradient is there on both that made them."""
    shared = plan_of(
        [pipeline(1, stage(0, 2, ("a/0", 1), ("a/1", 1)))],
        [pipeline(5, stage(0, 5, ("a/0", 1), ("a/1", 1), ("a/2", 1)))],
    )
    assert sorted({(source, to) for source, to, _ in counted(shared)}) == [("a/0", "a/2")]
    assert sum(rows for *_, rows in counted(shared)) == ROWS
    apart = counted(PLACEMENTS["disjoint"])
    assert sum(rows for source, _, rows in apart if source == "a/0") == ROWS
    assert sum(rows for source, _, rows in apart if source == "a/1") == ROWS
    assert not counted(PLACEMENTS["one device"])


class KeptMessages(GlooCommunicators):
    """Adds up the bytes of messages between modules that a device keeps, until they are proved to be there."""

    def __init__(self, most: dict[str, int], *made: Any) -> None:
        super().__init__(*made)
        self._most, self._me = most, made[2].me
        self._kept: dict[int, tuple[Any, int]] = {}  # by its work, which is alive so long

    def mesh(self, channel: Channel) -> Any:
        """Of a border between modules one that adds up its messages."""
        mesh = super().mesh(channel)
        launch, arrived = mesh.begin_round, mesh.arrived

        def noted(sends: Any, receives: Any) -> Any:
            work = launch(sends, receives)
            if sends:
                self._kept[id(work)] = work, sum(x.nbytes for x in {id(x): x for _, x in sends}.values())
            kept = sum(size for _, size in self._kept.values())
            self._most[self._me] = max(kept, self._most.get(self._me, 0))
            return work

        def dropped(work: Any) -> None:
            self._kept.pop(id(work), None)
            arrived(work)

        if channel.use == "items":
            mesh.begin_round, mesh.arrived = noted, dropped  # type: ignore[method-assign]
        return mesh


class Alike(Captions):
    """Each sample has two images of four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"images": [2] * len(self)}

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        images = [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
        ids = torch.randint(2, TEXT.vocabulary, (12,), generator=generator)
        ids[2:10] = 1
        return {"inputs": ids, "targets": ids.roll(1), "images": images}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["disjoint", "fan-out: dp 1 to dp 4", "to tp 2"])
def test_the_planner_counts_the_messages_that_are_kept_until_the_end_of_the_step(
    name: str, frozen: bool
) -> None:
    """An output of a trained encoder until its gradient comes, of a frozen one until the vote; a gradient until
    the vote."""
    to_group = plan_of(
        [pipeline(1, stage(0, 2, ("a/0", 1)))], [pipeline(5, stage(0, 5, ("a/1", 1), ("a/2", 1)))]
    )
    plan, most = PLACEMENTS.get(name, to_group), dict[str, int]()
    (vision, _) = plan.modules
    vision = msgspec.structs.replace(vision, trainable=not frozen)
    plan = plan.replace(
        strategies=(msgspec.structs.replace(plan.strategies[0], modules=(vision, plan.modules[1])),)
    )

    def train(memory: Any) -> None:
        recipe = replace(make_recipe(frozen=frozen, connect=partial(KeptMessages, most)), dataset=Alike())
        layouts = Layouts(recipe.model.specs, plan)
        engine = Engine(recipe, layouts, memory, unpaced)
        engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
        engine.step(0, lambda: 0, lambda: 0)
        engine.settle()

    run_threads(plan.members, train)
    size = 4 * TEXT.width * 8
    items = [2.0 * lane.micro_batches * plan.micro_batch for lane in plan.loss_view.by_lane]
    counted = kept_messages(plan, vision, items, size)
    window = {} if frozen else {"a/0": size * 2 * (vision.ahead + 1)}  # counted with the activations
    for device, kept in most.items():
        assert kept <= counted.get(device, 0) + window.get(device, 0)
        assert kept >= counted.get(device, 0) or device == "a/2", "of a TP group one member sends"
    assert any(counted.values())


def test_each_module_is_measured_by_itself() -> None:
    """A device that only encodes, one that only decodes, and two in a TP group of both."""
    plan = plan_of(
        [pipeline(1, stage(0, 2, ("a/0", 3), ("a/1", 1))), pipeline(1, stage(0, 2, ("b/0", 1)))],
        [pipeline(5, stage(0, 2, ("a/0", 1), ("a/1", 1)), stage(2, 5, ("b/1", 1)))],
    )
    results = run_threads(plan.members, lambda memory: trained(memory.me, plan, cast(PlanGroups, memory)))
    for step in range(STEPS):
        measured = {device: result["measured"][step] for device, result in results.items()}
        images = images_of(step)
        assert {device for device in measured if measured[device].modules} == {"a/0", "a/1", "b/0"}
        vision = {device: each.modules["vision"] for device, each in measured.items() if each.modules}
        assert vision["a/0"].items == vision["a/1"].items
        assert vision["a/0"].items + vision["b/0"].items == len(images)
        assert vision["a/0"].tokens + vision["b/0"].tokens == sum(images)
        assert [vision[name].block_work for name in ("a/0", "a/1")] == [
            2 * vision["a/0"].tokens * part for part in (0.75, 0.25)
        ]
        assert (vision["b/0"].block_seconds > 0) == (vision["b/0"].items > 0)
        assert not vision["b/0"].tensor_seconds
        assert (vision["a/0"].tensor_seconds > 0) == (vision["a/0"].items > 0)
        assert (vision["a/0"].head_seconds > 0) == (vision["a/0"].items > 0)
        alone = measured["b/0"]  # in the module with the loss it has no place
        assert alone.block_work == alone.block_seconds == alone.tensor_seconds == alone.reduce_seconds == 0
        assert alone.micro_batches == 0
        assert vision["b/0"].reduce_seconds > 0
        assert measured["b/1"].block_work == 3 * measured["b/1"].tokens > 0


def test_a_frozen_encoder_gets_no_gradient_and_keeps_no_state() -> None:
    encoder, decoder = PLACEMENTS["partly shared, unequal"].modules
    plan = plan_of(list(encoder.pipelines), list(decoder.pipelines), ahead=2, lead=1, trainable=False, zero=1)
    apart = plan_of(
        [pipeline(1, stage(0, 2, ("a/0", 1)))], [pipeline(5, stage(0, 5, ("a/1", 1)))], trainable=False
    )
    assert {(source, to) for source, to, _ in counted(apart, frozen=True)} == {("a/0", "a/1")}
    assert counted(plan, frozen=True)
    layouts = Layouts(make_recipe(frozen=True).model.specs, plan)
    assert {item.role for item in layouts.items if item.name.startswith("vision.")} == {"value"}


@pytest.mark.parametrize("name", ["one device", "both in stages on the same devices", "zero 1"])
def test_an_encoder_is_trained_before_a_frozen_decoder(name: str) -> None:
    """The first stage of LLaVA: gradients go through what does not train."""
    vision, language = copy.deepcopy(sections())
    for section in language:
        section.requires_grad_(requires_grad=False)
    recipe, data, plan = make_recipe(), Captions(), PLACEMENTS[name]
    batches = [[data[index] for index in recipe.sampler.samples(step)] for step in range(STEPS)]
    losses, _ = in_one_process(vision, language, batches, **ADAM)
    model = model_of(vision, language)

    def trained_so(memory: Any) -> list[float]:
        own = replace(recipe, model=model)
        layouts = Layouts(own.model.specs, frozen_decoder(plan))
        engine = Engine(own, layouts, memory, unpaced)
        engine.adopt(first_state(own.model, layouts, memory.me, SEED))
        found = [engine.step(step, lambda: 0, lambda: 0).outcome.vote.loss for step in range(STEPS)]
        engine.settle()
        return found

    for found in run_threads(plan.members, trained_so).values():
        assert found == pytest.approx(losses, abs=1e-12)


def frozen_decoder(plan: Plan) -> Plan:
    encoder, decoder = plan.modules
    frozen = msgspec.structs.replace(decoder, trainable=False)
    strategy = msgspec.structs.replace(plan.strategies[0], modules=(encoder, frozen))
    return plan.replace(strategies=(strategy,))


class Tiled(nn.Module):
    """A head that gives the halves of an image as two items."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        return torch.cat([out, out])


def test_an_output_that_has_other_items_than_came_is_refused() -> None:
    vision, language = copy.deepcopy(sections())
    vision[-1] = Tiled(vision[-1])
    model, plan = model_of(vision, language), PLACEMENTS["one device"]

    def refused(memory: Any) -> None:
        recipe = replace(make_recipe(), model=model)
        layouts = Layouts(recipe.model.specs, plan)
        engine = Engine(recipe, layouts, memory, unpaced)
        engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
        with pytest.raises(ModelError, match=r"head of vision gave a tensor of shape \(2, \d, 24\) for 1 item"):
            engine.step(0, lambda: 0, lambda: 0)

    run_threads(plan.members, refused)


class Hidden(Captions):
    """A dataset that says of a sample with images that it has none."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong = next(i for i in make_recipe().sampler.samples(0) if self.counts["images"][i] == 2)
        self.known, self.counts = self.counts, copy.deepcopy(self.counts)
        self.counts["images"][self.wrong] = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        said, self.counts = self.counts, self.known
        try:
            return super().__getitem__(index)
        finally:
            self.counts = said


def test_a_sample_with_images_that_is_counted_as_without_is_named() -> None:
    plan, data = PLACEMENTS["one device"], Hidden()

    def refused(memory: Any) -> None:
        recipe = replace(make_recipe(), dataset=data, data=DataOptions(readers=0))
        layouts = Layouts(recipe.model.specs, plan)
        engine = Engine(recipe, layouts, memory, unpaced)
        engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
        with pytest.raises(SampleError, match="it has 2 images, and the dataset's counts say 0"):
            engine.step(0, lambda: 0, lambda: 0)

    run_threads(plan.members, refused)


class Miscounted(Captions):
    """A dataset that says of one sample of the first step that it has an image less than it has."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = copy.deepcopy(self.counts)
        self.wrong = next(i for i in make_recipe().sampler.samples(0) if self.counts["images"][i] == 2)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return sample if index != self.wrong else sample | {"images": sample["images"][:1]}


def test_a_sample_with_another_number_of_images_than_counted_is_named_on_all_ranks() -> None:
    plan, data = PLACEMENTS["disjoint"], Miscounted()

    def refused(memory: Any) -> tuple[str, list[float]]:
        recipe = replace(make_recipe(), dataset=data)
        layouts = Layouts(recipe.model.specs, plan)
        engine = Engine(recipe, layouts, memory, unpaced)
        engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
        before = [part.parameter.detach().sum().item() for part in engine.owned]
        with pytest.raises(SampleError) as refusal:
            engine.step(0, lambda: 0, lambda: 0)
        assert before == [part.parameter.detach().sum().item() for part in engine.owned]
        assert refusal.value.index == data.wrong
        return str(refusal.value), before

    found = run_threads(plan.members, refused)
    assert "it has 1 images, and the dataset's counts say 2" in found["a/0"][0]


def test_parts_of_a_sample_that_is_there_twice_keep_their_order() -> None:
    def part(number: int) -> torch.Tensor:
        return torch.tensor([float(number)])

    a, b = SampleItem(7, 0), SampleItem(7, 1)
    parts = [(b, part(1)), (a, part(0)), (SampleItem(2, 0), part(9)), (a, part(0)), (b, part(1))]
    for listed in (parts, parts[:3]):  # twice, or once for both
        joined_parts = joined([*chain.from_iterable(in_order_of([7, 2, 7], listed))])
        assert isinstance(joined_parts, torch.Tensor)
        assert joined_parts.tolist() == [0, 1, 9, 0, 1]
    assert joined([]) is None


def moved(old: Layouts, new: Layouts, states: dict[str, LocalState]) -> dict[str, tuple[LocalState, int]]:
    """By device its state under the new layouts, and the bytes that it sent, by a migration among threads."""
    names = tuple(dict.fromkeys((*old.plan.members, *new.plan.members)))

    def attempt(end: MemoryTransport) -> tuple[LocalState, int]:
        return migrate(old, new, states.get(names[end.rank], LocalState()), end).state, end.bytes_sent

    return dict(zip(names, together(MemoryTransport.connect(names), attempt), strict=True))  # type: ignore[arg-type]


def test_modules_switch_one_by_one_and_together() -> None:
    """Vision alone, then both, with ZeRO, over devices that come and go; the optimizer's state goes along."""
    way = [
        PLACEMENTS["zero 1"],
        plan_of(VISION_MOVED, list(DECODER), zero=1),
        PLACEMENTS["partly shared, unequal"],
    ]
    specs = make_recipe().model.specs
    losses: list[float] = []
    states: dict[str, LocalState] = {}
    for at, plan in enumerate(way):
        if at:
            states = {
                name: state
                for name, (state, _) in moved(Layouts(specs, way[at - 1]), Layouts(specs, plan), states).items()
            }
        results = run_threads(
            plan.members,
            lambda memory, plan=plan, states=states, at=at: trained(  # type: ignore[misc]
                memory.me, plan, memory, state=states.get(memory.me), steps=range(at, at + 1)
            ),
        )
        losses += results[plan.members[0]]["losses"]
        states = {name: result["state"] for name, result in results.items()}
    assert losses == pytest.approx(reference()[0], abs=1e-12)
    compared(results)


def test_a_switch_of_one_module_moves_nothing_of_the_other() -> None:
    before, after = PLACEMENTS["zero 1"], plan_of(VISION_MOVED, list(DECODER), zero=1)
    specs = make_recipe().model.specs
    assert isinstance(specs, dict)
    old, new = Layouts(specs, before), Layouts(specs, after)
    transfers = reshard(old, new, dict.fromkeys(new.items, 8))
    assert transfers
    assert not [each for each in transfers if each.name.startswith("language.")]


class Dropping(nn.Module):
    """A block behind a dropout, whose input has an image as its first dimension."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.drop, self.block = nn.Dropout(0.3), block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(self.drop(x))
        return out


def test_draws_are_those_of_the_image_under_every_layout() -> None:
    """An image draws as under any other layout, whoever makes it."""
    vision, language = copy.deepcopy(sections())
    vision[1:-1] = [Dropping(block) for block in vision[1:-1]]
    language[1] = Dropping(language[1])
    renamed = {
        pattern.replace("blocks.*.", "blocks.*.block.", 1) if pattern.startswith("blocks") else pattern: rule
        for pattern, rule in RULES.items()
    }
    units = {
        "heads": UnitsOf(attribute="blocks.*.attention.heads"),
        "kv_heads": UnitsOf(follows="heads", attribute="blocks.*.attention.kv_heads"),
    }
    model = model_of(vision, language, rules=RULES | renamed, units=units)
    seen: dict[str, list[float]] = {}
    for name in ("one device", "disjoint", "fan-out: dp 1 to dp 4", "zero 2"):
        plan = PLACEMENTS[name]

        def losses(memory: Any, plan: Plan = plan) -> list[float]:
            recipe = replace(make_recipe(), model=model)
            layouts = Layouts(recipe.model.specs, plan)
            engine = Engine(recipe, layouts, memory, unpaced)
            engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
            found = [engine.step(step, lambda: 0, lambda: 0).outcome.vote.loss for step in range(STEPS)]
            engine.settle()
            return found

        seen[name] = run_threads(plan.members, losses)[plan.members[0]]
    first, *others = seen.values()
    assert first != pytest.approx(reference()[0], abs=1e-6)
    for other in others:
        assert other == pytest.approx(first, abs=1e-12)


class NoisyBack(torch.autograd.Function):
    """The same values, and gradients with noise."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (1 + torch.rand_like(grad))


class Noisy(Dropping):
    """A block whose backward pass draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(NoisyBack.apply(x))
        return out


class Late(Captions):
    """Samples of which those of the first three steps have no image, and later ones two each."""

    def __init__(self) -> None:
        size = 5 * BATCH
        sampler = Sampler(size=size, global_batch=BATCH, seed=SEED)
        early = {index for step in range(3) for index in sampler.samples(step)}
        self.counts = {"images": [0 if index in early else 2 for index in range(size)]}


def test_draws_of_backward_passes_that_first_come_after_steps_without_items_are_seen() -> None:
    """Else later passes key them by the blocks that happen to be in one autograd graph."""
    vision, language = copy.deepcopy(sections())
    vision[1:-1] = [Noisy(block) for block in vision[1:-1]]
    recipe = replace(make_recipe(), model=model_of(vision, language, rules={}), dataset=Late())
    layouts = Layouts(recipe.model.specs, PLACEMENTS["one device"])

    def train(memory: Any) -> None:
        engine = Engine(recipe, layouts, memory, unpaced)
        engine.adopt(first_state(recipe.model, layouts, memory.me, SEED))
        runner = engine.modules["vision"].runner
        assert runner is not None
        for step in range(4):
            assert not runner._watch.draws
            engine.step(step, lambda: 0, lambda: 0)
        engine.settle()
        assert runner._watch.draws

    run_threads(["a/0"], train)


@pytest.mark.slow
def test_processes_train_two_modules_like_one() -> None:
    plan = PLACEMENTS["partly shared, unequal"]
    check(plan, gang.run(__file__, "worker", plan.members, plan))
