"""What takes the sequences of a packed row for one is found and named; what does not passes."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elasticd_planner.spec.box import Box
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elasticd
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.model.local_model import LocalModel, local_model
from elasticd.runtime.model.model import Model
from elasticd.runtime.parallel import sequence_mixing
from elasticd.runtime.parallel.sequence_mixing import packable

WIDTH, WORDS = 12, 19


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.tokens(batch["inputs"])


class Learned(Embed):
    """Learned positions, by `at`."""

    def __init__(self, at: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.places, self.at = nn.Embedding(64, WIDTH), at

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return super().forward(batch) + self.places(self.at(batch["inputs"]))


class Fixed(Embed):
    """Positions of a table that is no module."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = super().forward(batch)
        return x + torch.sin(torch.arange(x.shape[1]))[:, None]


class Attends(nn.Module):
    """A block whose attention is `attend(q, k, v)`."""

    def __init__(
        self, attend: Callable[..., Tensor], kv_heads: int = 2, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.norm, self.kv_heads, self.attend = nn.LayerNorm(WIDTH, dtype=dtype), kv_heads, attend
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * kv_heads * 3, dtype=dtype)
        self.out, self.drop = nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Dropout(0.2)
        self.gate = nn.Parameter(torch.zeros(1, dtype=dtype))  # begins at zero: the block at first does nothing

    def forward(self, x: Tensor) -> Tensor:
        wide = self.kv_heads * 3
        q, k, v = self.qkv(self.norm(x)).split((WIDTH, wide, wide), -1)
        q, k, v = (y.unflatten(-1, (-1, 3)).transpose(1, 2) for y in (q, k, v))
        y = self.attend(q, k, v).transpose(1, 2).flatten(2)
        return x + self.gate * self.drop(self.out(y))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Convolves(nn.Module):
    def __init__(self, kernel: int = 3) -> None:
        super().__init__()
        self.attention = Attends(elasticd.attention)
        self.conv = nn.Conv1d(WIDTH, WIDTH, kernel, padding=kernel - 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class BatchNormed(nn.Module):
    """Statistics over the tokens, of its own make: elasticd refuses torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True, correction=0) + 1e-3)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.up = norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.norm(x))


class Nested(nn.Module):
    """torch's attention, of a causal mask."""

    def __init__(self, dropout: float = 0.0, batch_first: bool = True) -> None:
        super().__init__()
        self.first = batch_first
        self.attention = nn.MultiheadAttention(WIDTH, 3, dropout, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = x if self.first else x.transpose(0, 1)
        y = self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + (y if self.first else y.transpose(0, 1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rnn(x)[0]


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Checkpoints(nn.Module):
    """It makes its activations again by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Attends(elasticd.attention)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Encoder(nn.Module):
    """torch's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 3, 24, 0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layer(x, src_mask=mask, is_causal=True)


class Rotates(Attends):
    """It knows of no positions but those in the row."""

    def __init__(self) -> None:
        super().__init__(self.turned)

    @staticmethod
    def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2], dtype=q.dtype)[:, None]
        return elasticd.attention(q * at.cos(), k * at.cos(), v)


class Shifts(nn.Module):
    """Each token takes a part of the one before it, as RWKV's do."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(F.pad(x, (0, 0, 1, -1)))


class Drops(nn.Module):
    """A function drops elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.up(x), 0.5, self.training)


class Feeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 30), nn.Linear(30, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Bundled(nn.Module):
    """Blocks that pass named tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Attends(elasticd.attention)

    def forward(self, x: Any) -> dict[str, Tensor]:
        hidden = x if isinstance(x, Tensor) else x["hidden"]
        return {"hidden": self.block(hidden), "places": elasticd.positions(hidden)[None].clone()}


class Tabled(Attends):
    """It passes a table that is the same for all samples."""

    def forward(self, x: Tensor) -> Any:
        return {"hidden": super().forward(x), "table": torch.ones(1, 3)}


class Masks(Attends):
    """It makes a mask for later blocks."""

    def forward(self, x: Tensor) -> Any:
        shape = 1, 1, x.shape[1], x.shape[1]
        return {"hidden": super().forward(x), "mask": torch.ones(shape, dtype=torch.bool).tril()}


class Takes(nn.Module):
    """A head for bundles."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Any) -> Tensor:
        return self.out(x["hidden"])


def model_of(*blocks: nn.Module, embed: nn.Module | None = None, head: nn.Module | None = None) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Model(embed=embed or Embed(), blocks=blocks, head=head or nn.Linear(WIDTH, WORDS))


def samples(*lengths: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, WORDS, (2, length), generator=generator) for length in lengths or (40, 9, 22)]
    return [{"inputs": inputs, "targets": targets} for inputs, targets in ids]


def attends(**more: Any) -> Attends:
    return Attends(elasticd.attention, **more)


@pytest.mark.parametrize(
    "model",
    [
        lambda: model_of(attends(), attends()),
        lambda: model_of(attends(kv_heads=1), Feeds(), embed=Learned(elasticd.positions)),
        lambda: model_of(Attends(lambda q, k, v: elasticd.attention(q, k, v, window=2)), attends()),
        lambda: model_of(Attends(lambda q, k, v: elasticd.attention(q, k, v, causal=False))),
        lambda: model_of(Normed(nn.LayerNorm(WIDTH)), Normed(nn.RMSNorm(WIDTH)), Normed(nn.Identity())),
        lambda: model_of(Drops(), attends()),
        lambda: model_of(Checkpoints()),
        lambda: model_of(Bundled(), Bundled(), head=Takes()),
        lambda: model_of(Tabled(elasticd.attention), head=Takes()),
        lambda: model_of(attends().to(torch.bfloat16), embed=Embed().to(torch.bfloat16)),
        lambda: Decoder(DecoderConfig(vocabulary=WORDS, width=16, layers=3, kv_heads=1, heads=2)).describe(),
        lambda: Decoder(DecoderConfig(vocabulary=WORDS, heads=4, width=24, kv_heads=4)).describe(),
    ],
)
@pytest.mark.parametrize("lengths", [(40, 9, 22), (1, 1, 1), (1, 5), (3,)])
def test_models_whose_tokens_act_by_themselves_have_no_finding(
    model: Callable[[], Model], lengths: tuple[int, ...]
) -> None:
    assert packable(model(), next_token_loss, samples(*lengths)) == []


ONE = (
    "takes the sequences of a packed row for one: what it gives for a token depends on the others. To be "
    "packed, modules must call elasticd.attention"
)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            lambda: model_of(attends(), Convolves()),
            rf"blocks\.1\.conv \(Conv1d\) {ONE}",
        ),
        (lambda: model_of(attends(), Attends(plain)), rf"blocks\.1 \(Attends\) {ONE}"),
        (lambda: model_of(Attends(plain).double()), rf"blocks\.0 \(Attends\) {ONE}"),
        (lambda: model_of(Attends(plain).to(torch.bfloat16)), rf"blocks\.0 \(Attends\) {ONE}"),
        (lambda: model_of(Nested()), rf"blocks\.0\.attention \(MultiheadAttention\) {ONE}"),
        (lambda: model_of(Nested(dropout=0.3)), rf"blocks\.0\.attention \(MultiheadAttention\) {ONE}"),
        (lambda: model_of(Nested(batch_first=False)), rf"blocks\.0\.attention \(MultiheadAttention\) {ONE}"),
        (lambda: model_of(Feeds(), Normed(BatchNormed())), rf"blocks\.1\.norm \(BatchNormed\) {ONE}"),
        (lambda: model_of(Recurrent()), rf"blocks\.0\.rnn \(GRU\) {ONE}"),
        (lambda: model_of(Grouped()), rf"blocks\.0\.norm \(GroupNorm\) {ONE}"),
        (lambda: model_of(Encoder()), rf"blocks\.0\.layer\.self_attn \(MultiheadAttention\) {ONE}"),
        (lambda: model_of(Rotates()), rf"blocks\.0 \(Rotates\) {ONE}"),
        (lambda: model_of(Shifts()), rf"blocks\.0 \(Shifts\) {ONE}"),
        (lambda: model_of(Drops(), Shifts()), rf"blocks\.1 \(Shifts\) {ONE}"),
        (
            lambda: model_of(attends(), embed=Learned(lambda ids: torch.arange(ids.shape[1]))),
            r"embed\.places takes the places of tokens in the packed row for their positions\. To be packed, .*"
            r"elasticd\.positions\(x\) in place of torch\.arange",
        ),
        (lambda: model_of(attends(), embed=Fixed()), rf"embed \(Fixed\) {ONE}"),
        (
            lambda: model_of(attends(), head=nn.Sequential(Recurrent(), nn.Linear(WIDTH, 19))),
            r"head\.0\.rnn \(GRU\)",
        ),
        (
            lambda: model_of(attends(), nn.Sequential(nn.Linear(WIDTH, WIDTH), Pools())),
            r"blocks\.1 gives \[\(1, 1, 12\)\] of a packed row, not an entry for each token \[1, tokens, ",
        ),
        (
            lambda: model_of(Attends(fixed)),
            r"blocks\.0 fails with a packed row: RuntimeError: at most 9 ",
        ),
    ],
)
def test_the_innermost_module_that_mixes_sequences_is_named(model: Callable[[], Model], said: str) -> None:
    (finding,) = packable(model(), next_token_loss, samples())
    assert re.match(said, finding), finding


class Pools(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)


def fixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.shape[2] > 9:
        raise RuntimeError("at most 9 tokens")
    return elasticd.attention(q, k, v)


def mean_loss(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    total, count = next_token_loss(output, batch)
    return total / count, int(count)


def by_sequence(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    losses = F.cross_entropy(output.transpose(1, 2), batch["targets"], reduction="none")
    return losses.mean(1).sum(), len(losses)


def shifted(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    cut = {"targets": batch["inputs"][:, 1:]}
    total, count = next_token_loss(output[:, :-1], cut)
    return total, int(count)


def of_rows(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    if output.shape[1] > 9:
        raise ValueError("too long")
    total, count = next_token_loss(output, batch)
    return total, int(count)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            mean_loss,
            r"the loss mean_loss is no sum over tokens: of a packed row it is [\d.]+, and [\d.]+ \+ .* of",
        ),
        (
            by_sequence,
            r"the loss by_sequence counts 1 targets in a packed row, and 1 \+ 1 \+ 1 in its sequences",
        ),
        (
            shifted,
            r"the loss shifted counts 13 targets in a packed row, and 5 \+ 2 \+ 4 .*If it shifts targets",
        ),
        (of_rows, r"the loss of_rows fails with a packed row: ValueError: too long"),
    ],
)
def test_a_loss_that_is_no_sum_over_tokens_is_named(loss: Any, said: str) -> None:
    (finding,) = packable(model_of(attends()), loss, samples())
    assert re.match(said, finding), finding


def test_samples_whose_targets_are_at_their_end_are_tried_there() -> None:
    """Prompts have none."""
    given = samples()
    for sample in given:
        sample["targets"][:-2] = -100
    assert packable(model_of(attends()), next_token_loss, given) == []
    (finding,) = packable(model_of(attends()), mean_loss, given)
    assert "is no sum over tokens" in finding


def test_a_loss_of_samples_without_targets_is_said_not_to_be_tried(caplog: pytest.LogCaptureFixture) -> None:
    given = samples()
    for sample in given:
        sample["targets"][:] = -100
    with caplog.at_level(logging.WARNING):
        assert packable(model_of(attends()), next_token_loss, given) == []
    assert "whether the loss next_token_loss is a sum over tokens was not tried" in caplog.text


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (
            {"inputs": torch.arange(5), "label": torch.tensor(3)},
            r"^label has no entry for each of its sample's 5 tok",
        ),
        (
            {"inputs": torch.arange(5), "name": "a"},
            r"^name has no entry for .* 5 tokens \(str\)",
        ),
        ({"inputs": torch.arange(5), "targets": torch.arange(4)}, r"^targets has no entry .* \(shape \(4,\)\)"),
        ({"inputs": {"ids": torch.arange(3), "mask": (torch.arange(3), 1.0)}}, r"^mask.1 has no entry"),
        ({"name": "a"}, "^samples have no tensor with an entry for each token"),
    ],
)
def test_samples_that_make_no_row_are_named(sample: Any, said: str) -> None:
    (finding,) = packable(model_of(attends()), next_token_loss, [sample, sample])
    assert re.search(said, finding), finding


def test_samples_that_differ_are_named() -> None:
    ids = torch.arange(5)
    for other in ({"ids": ids}, {"inputs": torch.zeros(5, 2)}, (ids,)):
        (finding,) = packable(model_of(attends()), next_token_loss, [{"inputs": ids}, other])
        assert finding.startswith("samples make no packed row: ")


def test_what_cannot_be_tried_here_is_said_and_is_no_finding(caplog: pytest.LogCaptureFixture) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("a kernel of CUDA")

    with caplog.at_level(logging.WARNING):
        assert packable(model_of(Attends(kernel)), next_token_loss, samples()) == []
    assert "was not tried: blocks.0: RuntimeError: a kernel of CUDA" in caplog.text


def test_a_model_that_computes_in_its_own_type_alone_is_tried_in_it() -> None:
    def half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.dtype != torch.bfloat16:
            raise RuntimeError("bfloat16 alone")
        return plain(q, k, v)

    (finding,) = packable(
        model_of(Attends(half, dtype=torch.bfloat16), embed=Embed().to(torch.bfloat16)),
        next_token_loss,
        samples(),
    )
    assert finding.startswith("blocks.0 (Attends) takes")


def test_neither_the_model_nor_the_generators_are_changed() -> None:
    model = model_of(attends(), Drops())
    before = {
        name: model.first_value(name, _whole(model, name), 0) for name in ("blocks.0.gate", "blocks.1.up.bias")
    }
    state = torch.default_generator.get_state()
    assert packable(model, next_token_loss, samples()) == []
    assert torch.equal(torch.default_generator.get_state(), state)
    for name, value in before.items():
        assert torch.equal(model.first_value(name, _whole(model, name), 0), value)


def _whole(model: Model, name: str) -> Box:
    return Box.whole(model.parameter(name).shape)


def test_of_a_large_model_a_block_of_each_kind_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that differ in a setting alone are of two kinds; what counts the layers is none."""
    config = DecoderConfig(vocabulary=50_000, width=1024, layers=40, heads=16, kv_heads=4, hidden=5000)
    with torch.device("meta"):
        decoder = Decoder(config)
    for layer, block in enumerate(decoder.blocks):
        block.layer_idx = layer
    decoder.blocks[7].attention.rope_base = 99.0
    made: list[str] = []

    def noted(*given: Any, only: tuple[str, ...]) -> LocalModel:
        made.extend(only)
        return local_model(*given, only=only)

    monkeypatch.setattr(sequence_mixing, "local_model", noted)
    assert packable(decoder.describe(), next_token_loss, samples()) == []
    assert made == ["embed", "blocks.0", "blocks.7", "head"]
