"""Random draws of blocks, loss, `collate` and dataset are functions of seed, step and samples, in whichever
thread, process or order they are made, and leave the script's own generators alone."""

from __future__ import annotations

import copy
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.batch import SequencePiece
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elasticd
from elasticd.models import next_token_loss
from elasticd.runtime.api.evaluation import HeldOut, evaluate
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, MemoryWorld, unpaced
from elasticd.runtime.data.loader import Loader
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.prefetch import SamplePrefetcher
from elasticd.runtime.data.stream import _Source
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.exits import ScriptRefusal
from elasticd.runtime.model.rng import ModelRng, kept_states, states
from elasticd.runtime.model.validation import replace_dropouts
from tests import sizes
from tests.models.layouts import SEED, Run, Training, alone, furthest, plan_of, stage, under
from tests.models.texts import Text
from tests.runtime import gang

LAYERS, WIDTH, VOCABULARY = 2, 8, 23
ONE = plan_of((8, [stage(0, LAYERS, ("a/0", 1))]))
TWO = plan_of((8, [stage(0, 1, ("a/0", 1)), stage(1, LAYERS, ("b/0", 1))]))


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = self.tokens(batch["inputs"])
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.tanh(self.one(x)))


class Whole(nn.Module):
    """The sections in one module, as a script without elasticd has them."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = Embed(), nn.ModuleList(block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def training(whole: Whole, **changes: Any) -> Training:
    with pytest.warns(UserWarning, match="no tensor-parallel rules"):
        model = elasticd.Model(embed=whole.embed, blocks=whole.blocks, head=whole.head)
    return replace(Training(model=model, loss=next_token_loss, dataset=Text(VOCABULARY)), **changes)


def recomputing(again: bool) -> dict[str, Any]:
    return {"options": {"parallelism": ParallelismOptions(recompute=lambda _: again)}}


def assert_equal(one: Run, other: Run) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(other[1][name], weight) for name, weight in one[1].items())


def engine(of: Training, plan: Any = ONE) -> Engine:
    """An engine of one device, on this thread."""
    recipe, (me,) = of.recipe(), plan.members
    layouts = Layouts(recipe.model.spec, plan)
    groups: Any = MemoryPlanGroups(MemoryWorld(), me)
    made = Engine(recipe, layouts, groups, unpaced)
    made.adopt(first_state(recipe.model, layouts, me, SEED))
    return made


# -- torch.utils.checkpoint -----------------------------------------------------------------------------------


class Segments(Block):
    """Has one dropout, which it calls twice; torch recomputes the segments in reverse order."""

    kind, checkpointed, keyword = "both inside", True, {"use_reentrant": False}

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        def first(x: Tensor) -> Tensor:
            return self.drop(torch.tanh(self.one(x)))

        def second(x: Tensor) -> Tensor:
            return self.drop(torch.tanh(self.two(x)))

        def run(segment: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            return checkpoint(segment, x, **self.keyword) if self.checkpointed else segment(x)

        if self.kind == "looped":
            for _ in range(3):
                x = x + run(first, x)
        elif self.kind == "nested":
            return x + run(lambda x: run(second, run(first, x)), x)
        else:
            x = x + (first(x) if self.kind == "one outside" else run(first, x))
        return x + run(second, x)


RECOMPUTED = ("both inside", "one outside", "looped", "nested")


@pytest.mark.parametrize(
    ("again", "kind", "reentrant"),
    sizes.beside(
        [(True, "nested", True), *((False, kind, kind == "looped") for kind in RECOMPUTED)],
        list(itertools.product((False, True), RECOMPUTED, (False, True))),
    ),
)
def test_a_dropout_called_twice_drops_the_same_where_torch_recomputes_segments(
    kind: str, reentrant: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Segments, "kind", kind)
    monkeypatch.setattr(Segments, "keyword", {"use_reentrant": reentrant})
    runs = []
    for checkpointed in (False, True):
        monkeypatch.setattr(Segments, "checkpointed", checkpointed)
        runs.append(under(training(Whole(Segments), **recomputing(again)), ONE, threads=False))
    assert runs[0][0] == runs[1][0]
    whole = Whole(Segments)
    for section, module in [(f"blocks.{i}", block) for i, block in enumerate(whole.blocks)]:
        replace_dropouts(section, module)
    plain = alone(training(Whole(Segments)), whole)
    assert furthest(runs[0], plain, {name: name for name, _ in whole.named_parameters()}) < (1e-14, "")
    assert furthest(runs[1], runs[0], {name: name for name in runs[0][1]}) < (1e-15, "")


def test_a_repeated_call_that_nothing_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segments, "keyword", {"use_reentrant": False, "preserve_rng_state": False})
    with pytest.raises(ScriptRefusal, match=r"blocks.1.drop: .*several times .* nn.Dropout of its own"):
        under(training(Whole(Segments)), ONE, threads=False)


# -- Python's and NumPy's generators ---------------------------------------------------------------------------


class Layerdrop(Block):
    """Leaves itself out by the word of Python's generator, and adds noise of NumPy's."""

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.4:
            return x + 0.0 * super().forward(x)
        return super().forward(x) + torch.from_numpy(np.random.standard_normal(x.shape[-1]))


class Stirring(torch.autograd.Function):
    """Draws in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * (1 + torch.rand_like(grad)) * random.random() * np.random.random()


class Noisy(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Stirring.apply(super().forward(x))
        return out


def noisy_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    total, count = next_token_loss(output, batch)
    return total * (random.random() + np.random.random() + float(torch.rand(()))), count


@pytest.mark.parametrize("block", [Layerdrop, Noisy])
def test_draws_of_all_generators_are_the_same_again_and_leave_the_scripts_own_alone(block: type[Block]) -> None:
    runs = []
    for seed, again in ((1, False), (2, True)):
        with kept_states():
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            np.random.standard_normal()  # the second of a pair waits in the generator
            of, before = training(Whole(block), loss=noisy_loss, **recomputing(again)), states()
            runs.append(under(of, ONE, threads=False))
            assert states() == before
    assert_equal(*runs)


def test_backward_passes_are_cut_into_sections_once_one_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is drawn is keyed by section from then on."""
    calls, backward = 0, torch.autograd.backward

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        backward(*args, **kwargs)

    class Late(Noisy):
        draws = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.draws else Block.forward(self, x)

    made, counts = engine(training(Whole(Late))), []
    monkeypatch.setattr(torch.autograd, "backward", counted)
    for step in range(4):
        monkeypatch.setattr(Late, "draws", step == 2)
        before = calls
        made.step(step, lambda: 0)
        counts.append(calls - before)
    sections = LAYERS + 2
    assert counts == [sections + 7, 8, 1 + 7 * sections, 8 * sections]


class Drawn(Block):
    """Draws by each kind of generator, and by a dropout that has a key."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.drop(super().forward(x)), 0.2, self.training) * torch.rand(())
        return x + random.random() * torch.from_numpy(np.random.standard_normal(x.shape[-1]))


#: Losses of two steps of a model of `Drawn`: a change of them changes the draws of every job.
DRAWN = [4.304146113769038, 4.077323771268171]


@pytest.mark.parametrize("again", [False, True])
def test_the_draws_of_a_step_stay_those_of_earlier_versions(again: bool) -> None:
    losses, _ = under(training(Whole(Drawn), **recomputing(again)), ONE, threads=False)
    assert losses == pytest.approx(DRAWN, rel=1e-12)


def drawn_rank(name: str, store: Any) -> list[float]:
    """One rank of two, between which the blocks are cut."""
    of = training(Whole(Drawn))
    recipe, layouts = of.recipe(), Layouts(of.model.spec, TWO)
    made = Engine(recipe, layouts, PlanGroups("drawn", name, "127.0.0.1", store), unpaced)
    made.adopt(first_state(recipe.model, layouts, name, SEED))
    losses = [made.step(step, lambda: 0).outcome.vote.loss for step in range(of.steps)]
    made.settle()
    return losses


@pytest.mark.slow
def test_a_cut_between_blocks_changes_no_draw() -> None:
    for losses in gang.run(__file__, "drawn_rank", TWO.members).values():
        assert losses == pytest.approx(DRAWN, rel=1e-12)


def test_another_generator_of_numpys_is_left_alone() -> None:
    with kept_states():
        ours = np.random.get_bit_generator()  # type: ignore[no-untyped-call]
        try:
            np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[no-untyped-call]
            made = training(Whole(Block))  # which seeds torch's generator, and draws first values from it
            before = states()
            under(made, ONE, threads=False)
            assert states() == before
        finally:
            np.random.set_bit_generator(ours)  # type: ignore[no-untyped-call]


# -- collate ---------------------------------------------------------------------------------------------------


def masked(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Masked language modelling: draws by torch, Python and NumPy, and changes its samples."""
    inputs, targets = [], []
    for sample in samples:
        ids = sample.pop("inputs")[:5]  # type: ignore[attr-defined]
        mask = (torch.rand(ids.shape) + random.random() + float(np.random.random())) < 1.5
        targets.append(ids.masked_fill(~mask, -100))
        inputs.append(ids.masked_fill_(mask, VOCABULARY - 1))
    return {"inputs": torch.stack(inputs), "targets": torch.stack(targets)}


def batches(of: int, collate: Callable[[Sequence[Any]], Any], step: int = 4) -> Any:
    """A batch by a rank whose own generators are at another place."""
    drawing = ModelRng()
    drawing.begin(SEED, step)
    with kept_states():
        random.seed(of)
        np.random.seed(of)
        torch.manual_seed(of)
        loader = Loader(SamplePrefetcher(Text(VOCABULARY), 0), collate, None, drawing)
        return loader.batch(tuple(SequencePiece.all_whole((3, 7, 5))))


def test_a_collate_that_draws_makes_the_same_batch_on_every_rank() -> None:
    one, other, later = batches(0, masked), batches(1, masked), batches(0, masked, step=5)
    assert torch.equal(one["inputs"], other["inputs"])
    assert torch.equal(one["targets"], other["targets"])
    assert not torch.equal(one["targets"], later["targets"])


class Seen(Whole):
    """Carries what the embedding saw on to the loss."""

    def __init__(self) -> None:
        super().__init__(Riding)
        self.embed, self.head = SeenEmbed().double(), SeenHead().double()


class SeenEmbed(Embed):
    def forward(self, batch: Mapping[str, Tensor]) -> Any:
        return {"hidden": super().forward(batch), "seen": batch["inputs"]}


class Riding(Block):
    def forward(self, x: Any) -> Any:
        return {**x, "hidden": super().forward(x["hidden"])}


class SeenHead(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, VOCABULARY)

    def forward(self, x: Any) -> Any:
        return {"logits": super().forward(x["hidden"]), "seen": x["seen"]}


def masked_rank(name: str, store: Any) -> int:
    """One rank of two, whose generators are at other places; how many tokens differ in the loss."""
    differ = [0]

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        here = batch["targets"] != -100
        differ[0] += int(((output["seen"] == VOCABULARY - 1) != here).sum())
        return next_token_loss(output["logits"], {"targets": batch["targets"]})

    of = training(Seen(), collate=masked, loss=loss, dataset=Text(VOCABULARY - 1))
    torch.manual_seed(ord(name[0]))
    random.seed(name)
    np.random.seed(ord(name[0]))
    recipe, layouts = of.recipe(), Layouts(of.model.spec, TWO)
    groups = PlanGroups("masks", name, "127.0.0.1", store)
    made = Engine(recipe, layouts, groups, unpaced)
    made.adopt(first_state(recipe.model, layouts, name, SEED))
    for step in range(3):
        made.step(step, lambda: 0)
    if name == "b/0":
        made.module.local.drawing.begin(SEED, 70)  # as of a rank that has another history
    held = HeldOut(dataset=Text(VOCABULARY - 1), collate=masked)
    evaluate(made, held, "held_out", 3, loss, recipe.data, "value")
    made.settle()
    return differ[0]


@pytest.mark.slow
def test_the_embedding_and_the_loss_see_the_same_mask_on_different_ranks() -> None:
    assert gang.run(__file__, "masked_rank", TWO.members) == {"a/0": 0, "b/0": 0}


def test_a_collate_that_changes_its_samples_gets_new_ones_at_each_use() -> None:
    samples = [{"inputs": torch.arange(5) + i, "kept": [torch.ones(1)]} for i in range(4)]
    same = copy.deepcopy(samples)

    def changes(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        for sample in samples:
            sample["kept"].append(sample["kept"].pop().add_(1))
            sample["inputs"].add_(1).remainder_(VOCABULARY)
        inputs = torch.stack([sample.pop("inputs") for sample in samples])
        return {"inputs": inputs, "targets": inputs}

    of = training(Whole(), collate=changes)
    made, held, data = engine(of), HeldOut(dataset=samples), DataOptions(collate=changes)
    losses = [evaluate(made, held, "held_out", 0, of.loss, data, "value").loss for _ in range(3)]
    assert losses[0] == losses[1] == losses[2]
    assert all(torch.equal(one["inputs"], other["inputs"]) for one, other in zip(samples, same, strict=True))
    assert all(len(sample["kept"]) == 1 and float(sample["kept"][0]) == 1 for sample in samples)


# -- the dataset -----------------------------------------------------------------------------------------------


class Augmented(Text):
    """Draws from the process's generators while other threads compute."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.drawn: list[tuple[float, float, float]] = []

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        for _ in range(3):
            time.sleep(1e-4)  # others get the interpreter
            self.drawn.append((float(torch.rand(())), random.random(), float(np.random.random())))
        sample["inputs"][0] = int(self.drawn[-1][0] * VOCABULARY)
        return sample


class Drops(Block):
    """Notes the masks that it draws."""

    masks: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(1e-3)
        mask = F.dropout(torch.ones_like(x), 0.5)
        self.masks.append(mask)
        return super().forward(x * mask)


@pytest.mark.parametrize("readers", [0, 1, 2])
def test_a_dataset_that_draws_disturbs_no_recomputation_and_draws_by_seed_step_and_index(
    readers: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "elasticd.runtime.data.prefetch")
    runs = []
    for seed in range(2):
        with kept_states():
            monkeypatch.setattr(Drops, "masks", [], raising=False)
            random.seed(seed)
            torch.manual_seed(seed)
            data = Augmented()
            of = training(Whole(Drops), dataset=data, **recomputing(True))
            of = replace(of, steps=4)
            recipe = replace(of.recipe(), data=DataOptions(readers=readers))
            monkeypatch.setattr(Training, "recipe", lambda _, recipe=recipe: recipe)
            recipe.tokens  # noqa: B018  it reads the first samples
            data.drawn.clear()
            runs.append(under(of, ONE, threads=False))
            assert len(set(data.drawn)) == len(data.drawn)
            assert ("its samples are not read ahead any more" in caplog.text) == (readers > 0)
            monkeypatch.undo()
            caplog.set_level(logging.INFO, "elasticd.runtime.data.prefetch")
    assert_equal(*runs)


class Held(Text):
    """Waits in its first read."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.entered, self.through = threading.Event(), threading.Event()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.entered.set()
        assert self.through.wait(60)
        return super().__getitem__(index)


def test_a_dataset_beside_others_that_draw_is_read_ahead() -> None:
    """Draws of the script meanwhile are not taken for the dataset's: it is read once more."""
    data = Held()
    reader = SamplePrefetcher(data)
    reader.want([1])
    assert data.entered.wait(60)
    random.random()
    data.through.set()
    reader.take(1)
    assert not reader.here


class Streaming(Augmented):
    """An iterable of samples that draws for each."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            self.at += 1
            yield self[self.at % 64]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class HeldStream:
    """Gives the numbers from 1 on, none before it is allowed; draws for one of them."""

    def __init__(self, draws_at: int) -> None:
        self.at, self.draws_at = 0, draws_at
        self.allowed, self.waits_for = 1, 0
        self.changed = threading.Condition()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            with self.changed:
                self.waits_for = self.at + 1
                self.changed.notify_all()
                assert self.changed.wait_for(lambda: self.at < self.allowed, 60)
            self.at += 1
            if self.at == self.draws_at:
                random.random()
            yield {"inputs": torch.tensor([self.at]), "targets": torch.tensor([self.at])}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("draws_at", [0, 4])
def test_a_stream_beside_a_loop_that_draws_is_read_ahead_unless_it_draws_itself(
    draws_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop's body draws while the next step is read."""
    caplog.set_level(logging.INFO, "elasticd.runtime.data.stream")
    data, position = HeldStream(draws_at), None
    source = _Source(data, 1, threaded=True)
    with kept_states():
        for number in range(1, 9):
            read = source.take(number - 1, position)
            assert [int(sample["inputs"]) for sample in read.samples] == [number]
            position = read.after
            with data.changed:
                if source._next is not None:
                    assert data.changed.wait_for(lambda number=number: data.waits_for == number + 1, 60)
                    random.random()
                data.allowed = number + 1
                data.changed.notify_all()
    assert ("is not read ahead any more" in caplog.text) == (draws_at > 0)


def test_a_stream_that_draws_disturbs_no_recomputation_and_goes_on_with_the_scripts_own_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "elasticd.runtime.data.stream")
    monkeypatch.setattr(Drops, "masks", [], raising=False)
    data = Streaming()
    of = training(Whole(Drops), dataset=elasticd.Stream(dataset=data, tokens=9.0), **recomputing(True))
    with kept_states():
        random.seed(5)
        under(replace(of, steps=5), ONE, threads=False)
    passes = Drops.masks
    assert len(passes) == 5 * 8 * LAYERS * 2  # forward, and once more
    assert len({tuple(mask.flatten().tolist()) for mask in passes}) == len(passes) / 2
    assert "is not read ahead any more" in caplog.text
    numbers = random.Random(5)
    assert [each for _, each, _ in data.drawn] == [numbers.random() for _ in data.drawn]
