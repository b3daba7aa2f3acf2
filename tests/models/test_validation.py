"""Modules of other people train as in one process of plain torch, or are refused: parameters that a step does
not use, activations of another type than the parameters, buffers that forward changes, draws of a loss."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elasticd_planner.spec.plan import Plan, StatePolicy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elasticd
from elasticd.models import next_token_loss
from elasticd.runtime.model.buffer_check import BufferCheck
from elasticd.runtime.model.validation import ModelError
from tests.models import layouts
from tests.models.layouts import Training, alone, furthest, plan_of, stage, under
from tests.models.texts import Text

WIDTH, LAYERS, VOCABULARY = 8, 4, 23

PLANS: dict[str, Plan] = {
    "replicas": plan_of((5, [stage(0, LAYERS, ("a/0", 1))]), (3, [stage(0, LAYERS, ("b/0", 1))])),
    "a pipeline beside tp2": plan_of(
        (5, [stage(0, 1, ("a/0", 1)), stage(1, LAYERS, ("a/1", 1))]),
        (3, [stage(0, LAYERS, ("b/0", 1), ("b/1", 1))]),
    ),
    "tp1 to tp3": plan_of(
        (4, [stage(0, 2, ("a/0", 1)), stage(2, LAYERS, ("a/1", 2), ("a/2", 1), ("b/0", 1))]), micro_batch=2
    ),
}
SHARDED = {
    f"{name}, zero {zero}": plan.replace(state=StatePolicy(zero=zero, replicas=1))
    for name, plan in PLANS.items()
    for zero in (1, 2)
} | {
    "carried": plan_of((8, [stage(0, LAYERS, ("a/0", 1), ("a/1", 1))])).replace(
        state=StatePolicy(zero=1, replicas=2), carriers=("b/0",)
    )
}


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = self.tokens(batch["inputs"])
        return out


class Block(nn.Module):
    """norm is the first parameter; `unused` is used by nobody, `seldom` for some samples alone."""

    def __init__(self, stream: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.unused, self.seldom = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.stream = stream

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x.to(self.norm.weight.dtype)).to(self.up.weight.dtype)
        some = x[:, :1, :1] > 1.2
        if some.any():
            inner = inner + self.seldom(inner) * some
        return x.to(self.stream) + self.down(torch.tanh(self.up(inner)))


class Whole(nn.Module):
    def __init__(self, block: type[Block] = Block, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = Embed()
        self.blocks = nn.ModuleList(block(**options) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def training(whole: Whole, **options: Any) -> Training:
    rules = {
        "blocks.*.up.*": elasticd.Column("inner"),
        "blocks.*.down.weight": elasticd.Row("inner"),
    }
    parts = copy.deepcopy(whole)
    model = elasticd.Model(embed=parts.embed, blocks=list(parts.blocks), head=parts.head, rules=rules)
    given: dict[str, Any] = {"loss": next_token_loss, "dataset": Text(VOCABULARY), **options}
    return Training(model=model, **given)


def decaying(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Moves a parameter whose gradient is zero, and counts its steps."""
    return torch.optim.AdamW(named, lr=1e-2, weight_decay=0.3)


@pytest.mark.parametrize("name", [*PLANS, *SHARDED])
def test_a_parameter_that_a_step_does_not_use_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "optimizer", decaying)
    whole = Whole().double()
    given = training(whole, steps=3)
    first = {full: p.detach().clone() for full, p in whole.named_parameters()}
    found, expected = under(given, (PLANS | SHARDED)[name]), alone(given, whole)
    assert furthest(found, expected, {full: full for full in first}) < (1e-12, "")
    assert torch.equal(found[1]["blocks.0.unused.weight"], first["blocks.0.unused.weight"])
    assert not torch.equal(found[1]["blocks.0.seldom.weight"], first["blocks.0.seldom.weight"])


@pytest.mark.parametrize("name", PLANS)
def test_the_stream_may_be_of_another_type_than_the_first_parameter(name: str) -> None:
    whole = Whole(stream=torch.float64).double()
    for block in whole.blocks:
        assert isinstance(block, Block)
        block.norm.float()
    given = training(whole)
    assert given.model.dtype == torch.float32
    found, expected = under(given, PLANS[name]), alone(given, whole)
    assert found[0] == pytest.approx(expected[0], rel=1e-8)
    gap, at = furthest(found, expected, {full: full for full, _ in whole.named_parameters()})
    assert gap < 1e-7, at  # norms are in single precision


class Counting(Block):
    """Changes a buffer: persistent or not, in place or by another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(1), persistent=how != "not persistent")

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.seen += x.shape[0]
        else:
            self.seen = self.seen + x.shape[0]
        return super().forward(x)


@pytest.mark.parametrize("how", ["in place", "by another", "not persistent"])
def test_a_buffer_that_forward_changes_is_refused(how: str) -> None:
    given = training(Whole(Counting, how=how).double())
    with pytest.raises(ModelError, match=r"blocks\.0\.seen: forward changes this buffer"):
        under(given, PLANS["replicas"])


class Growing(Block):
    """Its table of positions grows with the longest sequence that it has met."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", self.positions(2), persistent=False)

    @staticmethod
    def positions(count: int) -> Tensor:
        return torch.arange(float(count), dtype=torch.float64)[:, None].expand(count, WIDTH).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > len(self.table):
            self.table = self.positions(x.shape[1])
        return super().forward(x + 0.01 * self.table[: x.shape[1]])


def test_a_table_that_grows_is_none() -> None:
    whole = Whole(Growing).double()
    given = training(whole)
    found, expected = under(given, PLANS["a pipeline beside tp2"]), alone(given, whole)
    assert furthest(found, expected, {full: full for full, _ in whole.named_parameters()}) < (1e-12, "")


def test_a_table_that_grows_or_shrinks_must_keep_what_it_held() -> None:
    module = nn.Module()
    module.register_buffer("table", torch.ones(2, 3), persistent=False)
    constants = BufferCheck({"embed": module})
    constants.note()
    for size in (4, 2, 3):
        module.table = torch.ones(size, 3)
        constants.check()
    for other in (torch.zeros(5, 3), torch.zeros(2, 3), torch.ones(4, 3, 1)):
        module.table = other
        with pytest.raises(ModelError, match=r"embed\.table"):
            constants.check()


def test_a_buffer_that_is_written_through_its_data_is_seen() -> None:
    module = nn.Module()
    module.register_buffer("average", torch.ones(3))
    constants = BufferCheck({"embed": module})
    constants.note()
    constants.check()
    module.average.data.mul_(0.9)  # which leaves the version as it is
    with pytest.raises(ModelError, match=r"embed\.average"):
        constants.check()


def test_what_an_evaluation_keeps_is_its_own_affair() -> None:
    module = nn.Module()
    module.register_buffer("cache", torch.ones(3), persistent=False)
    module.register_buffer("count", torch.ones(3))
    constants = BufferCheck({"embed": module})
    constants.note()
    module.cache = torch.zeros(7)
    module.cache += 1
    constants.check(training=False)
    constants.check()
    module.count += 1
    with pytest.raises(ModelError, match=r"embed\.count"):
        constants.check(training=False)


class Again(Block):
    """A block of which torch.utils.checkpoint runs the inside again."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.drop, self.checkpointed = nn.Dropout(0.4), checkpointed

    def inside(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(super().forward(x))
        return out

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.inside, x, use_reentrant=False) if self.checkpointed else self.inside(x)
        return x + made


ALONE = plan_of((8, [stage(0, LAYERS, ("a/0", 1))]))


@pytest.mark.parametrize("name", PLANS)
def test_dropout_inside_a_checkpoint_of_the_models_own_draws_what_it_drew(name: str) -> None:
    plain, again = (Whole(Again, checkpointed=each).double() for each in (False, True))
    expected, found = under(training(plain), ALONE), under(training(again), PLANS[name])
    assert furthest(found, expected, {full: full for full, _ in plain.named_parameters()}) < (1e-12, "")


def test_a_block_that_is_a_dropout_draws_alike_under_every_layout() -> None:
    whole = Whole().double()
    for at in (1, 2):
        whole.blocks[at] = nn.Dropout(0.4)
    given = training(whole)
    expected, found = under(given, ALONE), under(given, PLANS["replicas"])
    assert furthest(found, expected, {full: full for full, _ in whole.named_parameters()}) < (1e-12, "")


def noisy(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """A loss that draws: of its targets some are left out."""
    flat = F.cross_entropy(
        output.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100, reduction="none"
    )
    return (flat * torch.empty_like(flat).bernoulli_(0.5)).sum(), int((batch["targets"] != -100).sum())


def test_a_loss_that_draws_is_a_function_of_the_step_and_the_samples() -> None:
    given = replace(training(Whole().double()), loss=noisy)
    plan = plan_of((8, [stage(0, LAYERS, ("a/0", 1))]))
    before = torch.get_rng_state()
    first = under(given, plan, threads=False)
    assert torch.equal(before, torch.get_rng_state())
    torch.seed()
    assert under(given, plan, threads=False)[0] == first[0]


class Masked(Text):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "targets": torch.full_like(sample["targets"], -100)}


def test_a_batch_without_a_target_changes_nothing_and_training_goes_on() -> None:
    whole = Whole().double()
    given = replace(training(whole), dataset=Masked(VOCABULARY))
    losses, weights = under(given, PLANS["a pipeline beside tp2"])
    assert all(loss is None for loss in losses)
    assert len(losses) == given.steps
    assert all(torch.equal(weights[full], parameter) for full, parameter in whole.named_parameters())
