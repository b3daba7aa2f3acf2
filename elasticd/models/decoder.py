"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied head.

`Decoder` is a plain nn.Module that trains in one process as it is. `describe` gives elasticd what it needs to
train it under any layout: the sections, the units that its dimensions are cut in, and the rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elasticd.runtime.model.graph_breaks import breaks_graphs
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.tp_rules import Column, Row, UnitsOf
from elasticd.runtime.parallel.attention import attention, positions
from elasticd.runtime.parallel.packed_row import current_row

#: The target that the loss leaves out (padding).
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder. Defaults make a byte-level model that trains on a laptop."""

    vocabulary: int = 256
    width: int = 64
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 176
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must divide into {self.heads} heads of an even size")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads must divide into groups for {self.kv_heads} kv-heads")

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.width // self.heads


def linear(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Linear:
    """A projection without bias."""
    return nn.Linear(inputs, outputs, bias=False, dtype=dtype)


class RMSNorm(nn.Module):
    """Root mean square normalisation with a weight (Zhang and Sennrich, 2019), in single precision at least: of
    small activations the derivative is more than float16 holds."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x) x weight over the last dimension, [..., width], in the type of `x`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normal.to(x.dtype) * self.weight


#: Cosine and sine of the angles of each token and pair of elements, both [tokens, head size / 2].
Angles = tuple[Tensor, Tensor]


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotary position embedding (Su et al., 2021) of x [batch, heads, tokens, head size] by `rotary_angles`."""
    cos, sin = angles
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rotary_angles(x: Tensor, base: float) -> Angles:
    """The angles that the tokens of x [batch, heads, tokens, head size] are rotated by: each by its position in
    its own sequence."""
    if current_row(x.device) is not None:
        return _angles_in_row(x, base)
    tokens, size = x.shape[-2:]
    # No tensor is kept that stands for others (torch.export's, FakeTensorMode's). torch.compile takes a kept
    # table as an input of its graph.
    traced = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
    kept = type(x) is Tensor and not traced
    cos, sin = (_kept_tables if kept else _tables)(_room(tokens), size, base, x.dtype, x.device)
    return cos[:tokens], sin[:tokens]


@breaks_graphs
def _angles_in_row(x: Tensor, base: float) -> Angles:
    row, at = current_row(x.device), positions(x.transpose(1, 2))
    assert row is not None
    longest = max(piece.length for piece in row.pieces)  # the tokens of a cut sequence lie anywhere in it
    tables = _kept_tables if type(x) is Tensor else _tables
    cos, sin = tables(_room(longest), x.shape[-1], base, x.dtype, x.device)
    return cos[at], sin[at]


def _room(tokens: int) -> int:
    """Positions of the table for so many: there are few tables, and few graphs of torch.compile, whatever the
    lengths."""
    room = _SHORTEST
    while room < tokens:
        room *= 2
    return room


#: Positions of the smallest table.
_SHORTEST = 1024
#: Tables that are kept.
_MOST = 64
_Key = tuple[int, int, float, torch.dtype, torch.device]
_kept: dict[_Key, Angles] = {}


def _kept_tables(*key: Any) -> Angles:
    tables = _kept.get(key)
    return _keep(key) if tables is None else tables


@breaks_graphs
def _keep(key: _Key) -> Angles:
    while len(_kept) >= _MOST:
        _kept.pop(next(iter(_kept)), None)
    tables = _kept[key] = _tables(*key)
    return tables


def _tables(tokens: int, size: int, base: float, dtype: torch.dtype, device: torch.device) -> Angles:
    """Cosine and sine of the angle of each position and pair of elements: [tokens, size / 2], made on the host
    in double precision."""
    with torch.inference_mode(False), torch.no_grad():
        inverse = base ** (-torch.arange(0, size, 2, dtype=torch.float64, device="cpu") / size)
        angles = torch.outer(torch.arange(tokens, dtype=torch.float64, device="cpu"), inverse)
        return angles.cos().to(device=device, dtype=dtype), angles.sin().to(device=device, dtype=dtype)


class Attention(nn.Module):
    """Causal grouped-query attention. `heads` and `kv_heads` are as many as its projections have: a
    tensor-parallel member's are its own."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_size, self.rope_base = config.head_size, config.rope_base
        self.heads, self.kv_heads = config.heads, config.kv_heads
        kv_width = config.kv_heads * config.head_size
        self.q = linear(config.width, config.width, config.dtype)
        self.k = linear(config.width, kv_width, config.dtype)
        self.v = linear(config.width, kv_width, config.dtype)
        self.o = linear(config.width, config.width, config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same shape; a token attends to itself and to earlier ones of its
        sequence."""

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(*y.shape[:2], heads, self.head_size).transpose(1, 2)

        q, k, v = split(self.q(x), self.heads), split(self.k(x), self.kv_heads), split(self.v(x), self.kv_heads)
        angles = rotary_angles(q, self.rope_base)
        y = attention(rotate(q, angles), rotate(k, angles), v)
        return self.o(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """Gated feed-forward (Shazeer, 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = linear(config.width, config.hidden, config.dtype)
        self.up = linear(config.width, config.hidden, config.dtype)
        self.down = linear(config.hidden, config.width, config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) x up(x)), [batch, tokens, width] to the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and a residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps, config.dtype)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.width, config.norm_eps, config.dtype)
        self.feed_forward = SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Embed(nn.Module):
    """Tokens to vectors: batch["inputs"] [batch, tokens] to [batch, tokens, width]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width, dtype=config.dtype)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Looks up batch["inputs"] [batch, tokens]; gives [batch, tokens, width]."""
        return self.tokens(batch["inputs"])


class Head(nn.Module):
    """Vectors to logits: [batch, tokens, width] to [batch, tokens, vocabulary]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.width, config.norm_eps, config.dtype)
        self.output = linear(config.width, config.vocabulary, config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to logits [batch, tokens, vocabulary]."""
        return self.output(self.norm(x))


class Decoder(nn.Module):
    """The whole model; its head shares the embedding's weight."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)
        self.head.output.weight = self.embed.tokens.weight

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits [batch, tokens, vocabulary] of batch["inputs"] [batch, tokens]."""
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def describe(self) -> Model:
        """This decoder as elasticd trains it."""
        config = self.config
        return Model(
            name=f"decoder-{config.layers}x{config.width}",
            embed=self.embed,
            blocks=list(self.blocks),
            head=self.head,
            init=initial,
            units={
                "heads": UnitsOf(attribute="blocks.*.attention.heads"),
                "kv_heads": UnitsOf(follows="heads", attribute="blocks.*.attention.kv_heads"),
            },
            rules={
                "blocks.*.attention.q.weight": Column("heads"),
                "blocks.*.attention.[kv].weight": Column("kv_heads"),
                "blocks.*.attention.o.weight": Row("heads"),
                "blocks.*.feed_forward.gate.weight": Column("columns"),
                "blocks.*.feed_forward.up.weight": Column("columns"),
                "blocks.*.feed_forward.down.weight": Row("columns"),
                "embed.tokens.weight": Row("vocabulary"),
                "head.output.weight": Column("vocabulary", gather=True),
            },
        )


def initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """The first value of a parameter: ones for norms, else normal with 1 / sqrt(fan in), embeddings 0.02."""
    if len(shape) == 1:
        return torch.ones(shape)
    scale = 0.02 if name.startswith("embed.") else 1 / math.sqrt(shape[1])
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") * scale


def next_token_loss(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int | Tensor]:
    """Cross entropy of logits [batch, tokens, vocabulary] against batch["targets"], summed over the targets
    that are not `IGNORED`, and how many those are: a tensor on an accelerator, which nobody waits for."""
    targets = batch["targets"]
    total = F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    count = (targets != IGNORED).sum()
    return total, int(count) if count.device.type == "cpu" else count
