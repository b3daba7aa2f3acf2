"""Rules in torch's words: they train like one process, and what they leave open is read off or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import elasticd
from elasticd import Column, PartialGrad, Row, Sharded, UnitsOf
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.model.model import Model, ModelError
from elasticd.runtime.model.validation import replace_dropouts
from examples import train_gpt2, train_vit
from tests import sizes
from tests.models.layouts import SEED, Training, alone, furthest, layouts_of, under
from tests.models.test_sequence_parallel import sliced
from tests.models.texts import Text

LAYERS = 4
PLANS = layouts_of(LAYERS)
UNEVEN = "tp3 uneven beside a pipeline"
GPT_PLAN = {
    "attention.qkv": Column(parts=3),
    "attention.out": "rowwise",
    "attention.dropout": Sharded(dim=1),
    "up": "colwise",
    "down": "rowwise",
    "embed.tokens": "rowwise",
    "head.output": "colwise_gather_output",
}
DECODER_PLAN = {
    "layers.*.attention.[qkv]": "colwise",  # as in a plan of transformers
    "layers.*.attention.o": "rowwise",
    "layers.*.feed_forward.gate": "colwise",
    "layers.*.feed_forward.up": "colwise",
    "layers.*.feed_forward.down": "rowwise",
    "layers.*.attention_norm": "replicate",
    "embed.tokens": "embedding_rowwise",
    "head.output": "colwise_gather_output",
}
CONFIG = DecoderConfig(
    vocabulary=41, width=32, layers=LAYERS, heads=8, kv_heads=2, hidden=44, dtype=torch.float64
)


def gpt() -> train_gpt2.GPT:
    torch.manual_seed(0)
    return train_gpt2.GPT(vocabulary=41, width=32, layers=LAYERS, heads=8, longest=16, dropout=0.2).double()


def in_words(whole: Any, plan: Mapping[str, Any], **said: Any) -> Model:
    return Model(embed=whole.embed, blocks=whole.blocks, head=whole.head, width=32, tp_plan=plan, **said)


@pytest.mark.full  # `test_words_cut_as_rules_do` says that these are the rules of test_foreign_models.py
@pytest.mark.parametrize("name", [name for name in PLANS if "tp" in name])
def test_a_gpt_in_words_trains_like_one_process(name: str) -> None:
    made = gpt()
    whole = copy.deepcopy(made)
    training = Training(model=in_words(made, GPT_PLAN), loss=next_token_loss, dataset=Text(41))
    for section, module in (("embed", whole.embed), *((f"blocks.{i}", b) for i, b in enumerate(whole.blocks))):
        replace_dropouts(section, module)
    expected, found = alone(training, whole), under(training, PLANS[name])
    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    assert furthest(found, expected, {full: full for full, _ in made.named_parameters()}) < (1e-12, "")


def cuts(model: Model) -> dict[str, tuple[int, int, bool] | None]:
    """By parameter: the dimension that is cut, in how many units, and whether these follow others."""
    found: dict[str, tuple[int, int, bool] | None] = {}
    for section in model.sections:
        for parameter in model.spec.section(section):
            cut = parameter.cut
            units = model.spec.units_of(cut.units) if cut else None
            said = (cut.dim, units.count, units.follows is not None) if cut and units else None
            found[f"{section}.{parameter.name}"] = said
    return found


def test_words_cut_as_rules_do() -> None:
    made = gpt()
    assert cuts(in_words(made, GPT_PLAN)) == cuts(train_gpt2.describe(made))
    decoder = Decoder(CONFIG)
    ours = Model(embed=decoder.embed, blocks=decoder.blocks, head=decoder.head, tp_plan=DECODER_PLAN)
    assert cuts(ours) == cuts(decoder.describe())
    assert ours.units["kv_heads"] == UnitsOf(2, follows="heads", attribute=("blocks.*.attention.kv_heads",))


def test_grouped_queries_in_words_train_like_one_process() -> None:
    torch.manual_seed(SEED)
    made = Decoder(CONFIG)
    whole = copy.deepcopy(made)
    model = Model(embed=made.embed, blocks=made.blocks, head=made.head, tp_plan=DECODER_PLAN)
    training = Training(model=model, loss=next_token_loss, dataset=Text(41))
    expected, found = alone(training, whole), under(training, PLANS["tp1 to tp4 and back"])
    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    assert furthest(found, expected, {full: full for full, _ in made.named_parameters()}) < (1e-12, "")


def test_a_style_of_torch_is_the_word_for_it() -> None:
    gathered = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    styles = {
        "attention.[qkv]": ColwiseParallel(),
        "attention.o": RowwiseParallel(),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(),
        "embed.tokens": RowwiseParallel(input_layouts=Replicate()),
        "head.output": ColwiseParallel(**gathered),
    }
    decoder = Decoder(CONFIG)
    ours = Model(embed=decoder.embed, blocks=decoder.blocks, head=decoder.head, tp_plan=styles)
    assert cuts(ours) == cuts(decoder.describe())


class Layer(nn.TransformerEncoderLayer):
    """torch's own layer, causal, on samples padded at their ends."""

    def forward(self, bundle: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        x = bundle["hidden"]
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return {**bundle, "hidden": super().forward(x, src_mask=future, src_key_padding_mask=bundle["padding"])}


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(41, 32)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"hidden": self.tokens(batch["inputs"]), "padding": batch["targets"] == -100}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(32, 41)

    def forward(self, bundle: dict[str, Tensor]) -> Tensor:
        return self.output(bundle["hidden"])


class Encoder(nn.Module):
    def __init__(self, **said: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = Embed(), Head()
        given = {"d_model": 32, "nhead": 8, "dim_feedforward": 44, "dropout": 0.0, "batch_first": True, **said}
        self.blocks = nn.ModuleList(Layer(**given) for _ in range(LAYERS))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TORCH_PLAN: dict[str, Any] = {
    "self_attn": "colwise",
    "self_attn.out_proj": "rowwise",
    "linear1": "colwise",
    "linear2": "rowwise",
}


@pytest.mark.parametrize("name", sizes.beside([UNEVEN], [name for name in PLANS if "tp" in name]))
def test_torchs_own_encoder_layers_train_like_one_process(name: str) -> None:
    made = Encoder().double()
    training = Training(model=in_words(made, TORCH_PLAN), loss=next_token_loss, dataset=Text(41))
    expected, found = alone(training, copy.deepcopy(made)), under(training, PLANS[name])
    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    assert furthest(found, expected, {full: full for full, _ in made.named_parameters()}) < (1e-12, "")


class Wrapped(nn.Module):
    """torch's attention in a block of one's own, whose activation is one tensor."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), nn.MultiheadAttention(32, 8, batch_first=batch_first)
        self.batch_first = batch_first
        self.sequence_tokens = 0  # of all slices, under sequence parallelism

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) if self.batch_first else self.norm(x).transpose(0, 1)
        tokens = self.sequence_tokens or x.shape[1]
        future = torch.full((tokens, tokens), -torch.inf, dtype=x.dtype).triu(1)
        y, _ = self.attention(y, y, value=y, attn_mask=future, is_causal=True, need_weights=False)
        return x + (y if self.batch_first else y.transpose(0, 1))


class Plain(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = train_gpt2.Embed(41, 32, 16, 0.0)
        self.blocks, self.head = nn.ModuleList(block() for _ in range(LAYERS)), train_gpt2.Head(41, 32)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("way", sizes.beside(["transposed"], ["plain", "transposed", "sequence parallel"]))
def test_torchs_attention_in_a_block_of_ones_own_trains_like_one_process(way: str) -> None:
    made = Plain(lambda: Wrapped(way != "transposed")).double()
    words = {"attention": "colwise", "attention.out_proj": "rowwise"}
    training = Training(model=in_words(made, words), loss=next_token_loss, dataset=Text(41))
    plan = sliced(PLANS[UNEVEN]) if way == "sequence parallel" else PLANS[UNEVEN]
    expected, found = alone(training, copy.deepcopy(made)), under(training, plan)
    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    assert furthest(found, expected, {full: full for full, _ in made.named_parameters()}) < (1e-12, "")


class Asks(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Crosses(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x + 0, x, need_weights=False)[0]


@pytest.mark.parametrize(
    ("block", "message"),
    [(Asks, "blocks.0.attention is asked for its attention weights"), (Crosses, "cuts self-attention alone")],
)
def test_torchs_attention_says_what_is_not_cut(block: type[Wrapped], message: str) -> None:
    words = {"attention": "colwise", "attention.out_proj": "rowwise"}
    model = in_words(Plain(lambda: block(True)), words)
    with pytest.raises(ModelError, match=message):
        under(Training(model=model, loss=next_token_loss, dataset=Text(41)), PLANS[UNEVEN])


class Normed(train_vit.Attention):
    """With a norm of each head's queries."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.query_norm = nn.LayerNorm(width // heads)


class Hidden(nn.Module):
    """An attention whose number of heads is nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))


def block_of(attention: nn.Module) -> Plain:
    return Plain(lambda: nn.ModuleDict({"attention": copy.deepcopy(attention), "up": nn.Linear(32, 30)}))


LINEAR = {"up": "colwise", "attention": "rowwise"}
FUSED = {"attention.qkv": "colwise", "attention.out": "rowwise"}
SEPARATE = {"attention.[qkv]": "colwise", "attention.o": "rowwise"}
VIT = {"attention.[qkv]": "colwise", "attention.out": "rowwise"}


@pytest.mark.parametrize(
    ("whole", "plan", "message"),
    [
        (gpt, {"up": "columnwise"}, "'up' is 'columnwise'; the words are colwise, "),
        (gpt, {"up": SequenceParallel()}, "no rule for SequenceParallel with these layouts"),
        (gpt, {"up": ColwiseParallel(output_layouts=Shard(1))}, "no rule for ColwiseParallel"),
        (gpt, {"attention.qvk": "colwise"}, r"'attention.qvk' is no module .*; there are attention.qkv"),
        (gpt, {"attention": "colwise"}, "blocks.0.attention is a Attention, for which there is no Column"),
        (gpt, {"up": "colwise"}, "blocks.0.up is cut by columns, and no module by rows takes"),
        (gpt, {"down": "rowwise"}, "blocks.0.down is cut by rows, and no module by columns gives"),
        (gpt, {"head.output": "colwise"}, "say 'colwise_gather_output'"),
        (
            gpt,
            {"attention.qkv": "colwise", "attention.out": "rowwise"},
            r"3 projections in one. Say Column\(parts=3",
        ),
        (gpt, {"attention.dropout": Sharded(dim=1)}, "attention.dropout: say the units, as Sharded"),
        (gpt, {"up": Column(dim=0), "down": "rowwise"}, r"a rule with dim= says its units"),
        (lambda: block_of(nn.Linear(32, 32)), LINEAR, "cannot be cut alike"),
        (
            lambda: block_of(Hidden()),
            {"attention.[qkv]": "colwise", "attention.o": "rowwise"},
            "how many heads",
        ),
        (
            lambda: block_of(Normed(32, 8)),
            VIT,
            r"query_norm.weight acts on each head.*'attention.query_norm'",
        ),
        (lambda: block_of(train_vit.Attention(32, 5)), VIT, "32 features do not divide into its 5 heads"),
        (lambda: block_of(nn.MultiheadAttention(32, 8)), {"attention": "colwise"}, "no module by rows"),
        (
            lambda: block_of(nn.MultiheadAttention(32, 8, add_bias_kv=True)),
            {"attention": "colwise", "attention.out_proj": "rowwise"},
            "add_bias_kv or add_zero_attn cannot be cut",
        ),
    ],
)
def test_what_words_do_not_say_is_refused_by_name(
    whole: Callable[[], Any], plan: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        in_words(whole(), plan)


def test_what_the_user_says_of_units_counts() -> None:
    model = in_words(block_of(Hidden()), SEPARATE, units={"heads": UnitsOf(4)})
    assert cuts(model)["blocks.0.attention.q.weight"] == (0, 4, False)
    made = in_words(block_of(Normed(32, 8)), {**VIT, "attention.query_norm": PartialGrad()})
    assert made.rule("blocks.3.attention.query_norm.weight") == PartialGrad()
    assert made.rule("blocks.3.attention.q.bias") == Column("heads")
    coarse = {"attention.[qkv]": Column("columns"), "attention.out": Row("columns")}
    assert cuts(in_words(block_of(train_vit.Attention(32, 5)), coarse))["blocks.0.attention.q.weight"] == (
        0,
        32,
        False,
    )


def test_blocks_with_unlike_heads_have_units_of_their_own() -> None:
    heads = iter([8, 4, 4, 8])
    model = in_words(Plain(lambda: train_vit.Block(32, next(heads))), VIT)
    found = cuts(model)
    assert [found[f"blocks.{i}.attention.q.weight"] for i in range(4)] == [(0, n, False) for n in (8, 4, 4, 8)]
    assert model.units["heads"].attribute == ("blocks.0.attention.heads", "blocks.3.attention.heads")
    made = Plain(lambda: train_vit.Block(32, 4))
    assert in_words(made, VIT).units["heads"] == UnitsOf(4, attribute=("blocks.*.attention.heads",))


def test_rules_count_before_words_and_need_units() -> None:
    with pytest.raises(ModelError, match=r"rule 'blocks.\*.up.\*': Column must say its units"):
        elasticd.Model(**sections(gpt()), rules={"blocks.*.up.*": Column()})
    rules = {"blocks.1.up.*": Column("few"), "blocks.1.down.*": Row("few")}
    model = in_words(gpt(), {"up": "colwise", "down": "rowwise"}, rules=rules, units={"few": UnitsOf(16)})
    found = cuts(model)
    assert found["blocks.1.up.weight"] == (0, 16, False)
    assert found["blocks.2.up.weight"] == (0, 128, False)


def sections(whole: Any) -> dict[str, Any]:
    return {"embed": whole.embed, "blocks": whole.blocks, "head": whole.head, "width": 32}
