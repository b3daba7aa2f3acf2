"""`elasticd check`: good rules pass, and each wrong one is named with what would be right."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elasticd
from elasticd import Column, PartialGrad, Row, Rule, Sharded, UnitsOf
from elasticd.annotations import Annotation, devices, redistribute
from elasticd.models import next_token_loss
from elasticd.runtime.api.script import CannotRun, recipe_of
from elasticd.runtime.checking.__main__ import compared
from elasticd.runtime.data.collate import pad
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.engine.mixed_precision import LossScale, Precision
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.parameter_groups import MakeOptimizer
from examples.train_gpt2 import Embed, Head
from tests import forkserver
from tests.models.texts import Text
from tests.runtime import bundled

ROOT = Path(__file__).resolve().parents[2]
WIDTH, HEADS, KV = 24, 6, 2
RULES: dict[str, Rule] = {
    "blocks.*.q.*": Column("heads"),
    "blocks.*.[kv].*": Column("kv_heads"),
    "blocks.*.scale": PartialGrad(),
    "blocks.*.o.*": Row("heads"),
    "blocks.*.up.*": Column("columns"),
    "blocks.*.dropout": Sharded("columns", dim=-1),
    "blocks.*.down.*": Row("columns"),
}


class Block(nn.Module):
    """Grouped-query attention with one scale for every head's queries; a dropout inside the feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = HEADS, KV, WIDTH // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, KV * self.size) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(self.size))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q(y), self.k(y), self.v(y))
        )
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(self.dropout(F.gelu(self.up(self.norm2(x)))))


class Drawing(Block):
    """Its dropout is no module."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1)


class ByTokens(Block):
    """Each device of the TP group does some work for a part of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x, here = super().forward(x), devices()
        whole = Annotation(groups=[here], states=[{"same": len(here)}])
        rows = Annotation(groups=[here], states=[{1: len(here)}])
        mine = self.work(redistribute(x, whole, rows))
        return redistribute(mine, rows, whole, shape=tuple(x.shape)) * self.gain

    def work(self, x: Tensor) -> Tensor:
        return x.cumsum(-1).sin()


class GainByTokens(ByTokens):
    """It applies a parameter without a rule to its own tokens alone."""

    def work(self, x: Tensor) -> Tensor:
        return super().work(x) * self.gain


class Bilinear(Block):
    """Its cut module takes two tensors, both of which need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(WIDTH, WIDTH, 12, bias=False)
        self.out = nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.out(self.both(self.norm1(x), self.norm2(x).sin()))


class Pair(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def subject(rules: dict[str, Rule | None], block: type[Block] = Block) -> Recipe:
    """The model with these rules changed; None takes one away."""
    torch.manual_seed(0)
    changed = {pattern: rule for pattern, rule in {**RULES, **rules}.items() if rule is not None}
    given: dict[str, Any] = {
        "embed": Embed(41, WIDTH, 16, 0.1).double(),
        "blocks": [block().double() for _ in range(2)],
        "head": Head(41, WIDTH).double(),
        "width": WIDTH,
        "rules": changed,
        "units": {
            "heads": UnitsOf(attribute="blocks.?.heads"),
            "kv_heads": UnitsOf(follows="heads", attribute="blocks.?.kv_heads"),
        },
    }
    return Recipe(
        model=elasticd.Model(**given),
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
        dataset=Text(41),
        global_batch=1,
    )


def said(
    rules: dict[str, Rule | None],
    block: type[Block] = Block,
    *,
    optimizer: MakeOptimizer | None = None,
    precision: Precision | None = None,
) -> tuple[bool, str]:
    tried, lines = subject(rules, block), list[str]()
    tried = replace(tried, parallelism=ParallelismOptions(precision=precision))
    if optimizer is not None:
        tried = replace(tried, optimizer=optimizer)
    return compared(tried, lines.append), "\n".join(lines)


def test_good_rules_pass_on_every_layout() -> None:
    good, text = said({})
    assert good, text
    assert text.count("ok ") == 10
    for tried in (
        "TP 2 with shares 2:1",
        "wider than the units that follow",
        "recomputation in all blocks",
        "2 stages of 1 and 1 layers, over gloo",
        "data parallel 2, ZeRO 2",
    ):
        assert tried in text


class Packable(Block):
    """It asks elasticd for its attention."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q(y), self.k(y), self.v(y))
        )
        y = elasticd.attention(q * self.scale, k, v)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(self.dropout(F.gelu(self.up(self.norm2(x)))))


class Positioned(Embed):
    def forward(self, batch: Any) -> Tensor:
        ids = batch["inputs"]
        return self.dropout(self.tokens(ids) + self.positions(elasticd.positions(ids)))


def test_whether_sequences_can_be_packed_is_said_with_what_keeps_them_from_it() -> None:
    good, text = said({})
    assert good, text
    assert "note  not for this model: packed rows" in text
    assert "embed.positions takes the places of tokens in the packed row for their positions" in text
    lines: list[str] = []
    assert compared(packs(), lines.append), lines
    assert "ok    packed rows: each sequence by itself" in lines


def packs(**more: Any) -> Recipe:
    """A job whose model asks elasticd for attention and positions."""
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="no tensor-parallel rules"):
        model = elasticd.Model(
            embed=Positioned(41, WIDTH, 16, 0.1).double(),
            blocks=[Packable().double() for _ in range(2)],
            head=Head(41, WIDTH).double(),
            width=WIDTH,
        )
    return replace(subject({}), model=model, data=DataOptions(length=lambda index: 5 + index % 9), **more)


def test_a_job_that_packs_is_tried_on_a_packed_row() -> None:
    """Its dropouts are those of padded samples."""
    asked = DataOptions(length=lambda index: 5 + index % 9, packing=elasticd.Packing(), global_tokens=64)
    lines = list[str]()
    assert compared(replace(packs(), data=asked), lines.append), lines
    assert "ok    packed rows: each sequence by itself" in lines


def test_a_job_that_packs_what_takes_a_row_for_one_sequence_is_wrong() -> None:
    asked, lines = DataOptions(length=lambda index: 5 + index % 9, packing=elasticd.Packing()), list[str]()
    assert not compared(replace(subject({}, Packable), data=asked), lines.append)
    wrong = lines.index("WRONG packed rows: each sequence by itself")
    assert "embed.positions takes the places of tokens" in lines[wrong + 1]


class Norming(torch.optim.SGD):
    """Steps by each gradient over its norm, as LARS does: a part of a parameter moves further."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        super().step(closure)


def test_an_optimizer_whose_step_depends_on_the_layout_is_found() -> None:
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # after it torch calls Norming's hooks twice
    good, text = said({}, optimizer=lambda named: Norming(named, lr=0.1))
    assert not good
    assert "WRONG TP 2 with shares 2:1" in text
    assert ": its gradient is right, the optimizer's update is off by " in text
    good, text = said({}, optimizer=lambda named: torch.optim.AdamW(named, lr=0.1))
    assert good, text


PRECISIONS = {
    "bf16": Precision(compute=torch.bfloat16),
    "fp16": Precision(compute=torch.float16, scale=LossScale(first=2.0**6)),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_layouts_are_compared_in_the_jobs_precision(name: str) -> None:
    good, text = said({}, precision=PRECISIONS[name])
    assert good, text
    assert text.count("ok ") == 10
    good, text = said({"blocks.*.norm2.*": PartialGrad()}, precision=PRECISIONS[name])
    assert not good, "rounding is not taken for the reason"
    assert "blocks.1.norm2.weight: the rule 'blocks.*.norm2.*': PartialGrad() adds what is the same" in text


def test_a_scale_of_the_loss_that_leaves_no_finite_gradient_is_named() -> None:
    much = Precision(compute=torch.float16, scale=LossScale(first=2.0**60))
    with pytest.raises(CannotRun, match=r"no finite gradients.* and at precision's scale"):
        said({}, precision=much)


def beyond(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    total, count = next_token_loss(output, batch)
    return total + torch.inf, count


def test_a_loss_that_is_infinite_on_every_layout_alike_is_no_difference() -> None:
    """As a sum in half precision is beyond 65504; its gradient is finite."""
    lines: list[str] = []
    assert compared(replace(subject({}), loss=beyond), lines.append), lines
    assert lines[0].endswith("one process has a loss of inf")


class Counting(Block):
    """Computes something else each time that it runs."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(x) / self.runs


def test_a_block_that_is_not_the_same_when_it_runs_again_is_found() -> None:
    good, text = said({}, Counting)
    assert not good
    assert "WRONG recomputation in all blocks" in text


class Mixing(Block):
    """A sample's output depends on the samples beside it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * x.mean(dim=0, keepdim=True)


def test_samples_that_are_not_independent_are_noted_and_layouts_compared_all_the_same() -> None:
    good, text = said({}, Mixing)
    assert good, text
    assert "note  one process gives something else where each sample is a micro-batch of its own" in text
    assert "Do padded tokens or other samples reach what a sample gives?" in text


class Single(nn.LayerNorm):
    """In single precision, whatever comes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class Streaming(Block):
    """Norms in single precision are the first of the parameters; the stream is in double."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Single(WIDTH), Single(WIDTH)

    def double(self) -> Streaming:
        super().double()
        self.norm1.float()
        self.norm2.float()
        return self


def test_activations_may_be_of_another_type_than_the_first_parameter() -> None:
    good, text = said({"blocks.*.norm*": None}, Streaming)
    assert good, text


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"blocks.*.o.*": Column("heads")}, "blocks.0.o failed with RuntimeError"),
        ({"blocks.*.o.*": Column("heads")}, "the rule 'blocks.*.o.*': Column('heads')"),
        ({"blocks.*.scale": None}, "blocks.1.scale: has no rule, but members hold terms"),
        (
            {"blocks.*.norm2.*": PartialGrad()},
            "blocks.1.norm2.weight: the rule 'blocks.*.norm2.*': PartialGrad() adds what is",
        ),
        ({"blocks.*.dropout": None}, "Where the input of blocks.0.dropout is cut, it needs Sharded"),
    ],
)
def test_a_wrong_rule_is_named(rules: dict[str, Rule | None], expected: str) -> None:
    good, text = said(rules)
    assert not good
    assert expected in text


def test_a_cut_module_may_take_several_tensors_that_need_a_gradient() -> None:
    good, text = said(
        {"blocks.?.both.weight": Column("middle", dim=0), "blocks.?.out.weight": Row("middle")}, Bilinear
    )
    assert good, text


def test_draws_that_are_no_module_are_named() -> None:
    good, text = said({}, Drawing)
    assert not good
    assert "blocks.0: draws random numbers that no other layout repeats" in text


class Masked(Text):
    """Draws in the dataset."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return sample | {"inputs": sample["inputs"].masked_fill(torch.rand(len(sample["inputs"])) < 0.3, 0)}


def test_draws_of_collate_are_named_and_those_of_the_dataset_are_the_same_everywhere() -> None:
    def masked(samples: Sequence[Any]) -> Any:
        batch = pad(samples)
        return batch | {"inputs": batch["inputs"].masked_fill(torch.rand(batch["inputs"].shape) < 0.3, 0)}

    lines: list[str] = []
    assert not compared(replace(subject({}), data=DataOptions(collate=masked)), lines.append)
    assert "collate: draws random numbers that no other layout repeats" in "\n".join(lines)
    assert "draw in __getitem__ of the dataset" in "\n".join(lines)
    lines.clear()
    assert compared(replace(subject({}), dataset=Masked(41)), lines.append), "\n".join(lines)


def test_a_block_that_redistributes_is_checked_and_a_gradient_of_some_tokens_alone_is_found() -> None:
    good, text = said({}, ByTokens)
    assert good, text
    good, text = said({}, GainByTokens)
    assert not good
    assert "blocks.0.gain" in text or "blocks.1.gain" in text, text


def test_a_block_with_two_outputs_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"blocks.0 gave a tuple of 2: a section gives one tensor"):
        said({}, Pair)


def checked(blocks: dict[int, type[bundled.Block]], **options: Any) -> tuple[bool, str]:
    lines: list[str] = []
    return compared(bundled.make_recipe(blocks=blocks, **options), lines.append), "\n".join(lines)


@pytest.mark.parametrize("precision", [None, PRECISIONS["bf16"]])
def test_sections_that_give_named_tensors_are_checked(precision: Precision | None) -> None:
    good, text = checked({}, precision=precision)
    assert good, text
    assert text.count("ok ") == 9
    for tried in ("2 stages of 5 and 1 layers, over gloo", "recomputation in all", "interleaved: 2 stages"):
        assert f"ok    {tried}" in text


class Lonely(bundled.Block):
    """Gives what this device alone has: its own heads' part of the queries."""

    def forward(self, bundle: bundled.Named) -> bundled.Named:
        norm = self.q(bundle["hidden"]).square().sum(-1, keepdim=True)
        return {**super().forward(bundle), "norm": norm}


def test_a_wrong_named_tensor_is_named() -> None:
    good, text = checked({4: Lonely})
    assert not good
    assert "blocks.4: its output 'norm' differs from one process's by " in text


class Counted(bundled.Block):
    """Changes what rides along, where it is."""

    def forward(self, bundle: bundled.Named) -> bundled.Named:
        bundle["positions"] += 1
        return super().forward(bundle)


def test_a_block_that_changes_what_rides_along_in_place_is_found_by_recomputation() -> None:
    good, text = checked({1: Counted})
    assert not good
    assert "WRONG recomputation in all blocks" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code", "expected"),
    [
        ("examples/train_vit.py", 0, "ok    TP 2 with shares 2:1"),
        ("examples/train_ddp_that_is_not_there.py", 2, "is not there: name the training script"),
        ("examples/ddp.py", 2, "before it made a Job"),
    ],
)
def test_the_command_runs_a_script_up_to_its_job(script: str, code: int, expected: str, tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    command = ("check", str(ROOT / script))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = forkserver.start("elasticd", *command, environment=environment, output=printed)
    try:
        ended = done.wait(300)
    finally:
        done.kill()
    said = printed.read_text()
    assert ended == code, said
    assert expected in said


STREAMED = """
import torch, elasticd
from elasticd.models import Decoder, DecoderConfig, next_token_loss

class Line:
    def __iter__(self):
        while True:
            yield {"inputs": torch.arange(5), "targets": torch.arange(5)}
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

config = DecoderConfig(vocabulary=8, width=8, layers=2, heads=2, kv_heads=2, hidden=8)
elasticd.Job(model=Decoder(config).describe(), loss=next_token_loss, optimizer=torch.optim.AdamW,
             dataset=elasticd.Stream(dataset=Line(), tokens=5), global_batch=4,
             parallelism=elasticd.ParallelismOptions(precision="bf16"))
"""


def test_of_a_stream_the_first_samples_are_tried_with_the_jobs_optimizer_and_precision(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STREAMED)
    found = recipe_of(str(script), [])
    assert [sample["inputs"].tolist() for sample in found.dataset] == [[0, 1, 2, 3, 4]] * 8  # type: ignore[attr-defined]
    assert found.optimizer is torch.optim.AdamW
    assert found.precision == Precision(compute=torch.bfloat16)
    assert found.model.dtype is torch.bfloat16
