"""Trains a GPT-2-style model of one's own: LayerNorm, biases, learned positions, dropout, a tied head.

    elasticd run --job my-gpt --nnodes 2 --devices 2 examples/train_gpt2.py

`GPT` is plain PyTorch; `describe` is all that elasticd needs to know of it. `elasticd check
examples/train_gpt2.py` tries it on several layouts and compares with one process.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elasticd
from elasticd import Column, Row, Sharded, UnitsOf


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_size = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        shape = (samples, tokens, self.heads, self.head_size)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_size)
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        weights = self.dropout(scores.masked_fill(future, -math.inf).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).reshape(samples, tokens, -1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.down(F.gelu(self.up(self.norm2(x)))))


class Embed(nn.Module):
    def __init__(self, vocabulary: int, width: int, longest: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["inputs"]
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.dropout(self.tokens(ids) + self.positions(places))


class Head(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class GPT(nn.Module):
    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 64,
        layers: int = 4,
        heads: int = 8,
        longest: int = 256,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embed = Embed(vocabulary, width, longest, dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.head = Head(vocabulary, width)
        self.head.output.weight = self.embed.tokens.weight
        self.apply(self._start)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def describe(gpt: GPT) -> elasticd.Model:
    return elasticd.Model(
        name="gpt",
        embed=gpt.embed,
        blocks=gpt.blocks,
        head=gpt.head,
        width=gpt.embed.tokens.embedding_dim,
        units={"heads": UnitsOf(attribute="blocks.*.attention.heads")},
        rules={
            "blocks.*.attention.qkv.*": Column("heads", parts=3),
            "blocks.*.attention.out.*": Row("heads"),
            "blocks.*.attention.dropout": Sharded("heads", dim=1),
            "blocks.*.up.*": Column("columns"),
            "blocks.*.down.*": Row("columns"),
            "embed.tokens.weight": Row("vocabulary"),
            "head.output.weight": Column("vocabulary", gather=True),
        },
    )


class StandardLibrary:
    """Windows of `tokens` bytes of the standard library's own top-level modules."""

    def __init__(self, tokens: int) -> None:
        paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self.text = torch.frombuffer(
            bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8
        )
        self.tokens = tokens

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.tokens

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.text[index * self.tokens : (index + 1) * self.tokens + 1].long()
        return {"inputs": window[:-1], "targets": window[1:]}


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    targets = batch["targets"]
    total = F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, int((targets != -100).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    torch.manual_seed(0)  # every rank makes the same model
    job = elasticd.Job(
        model=describe(GPT(longest=options.tokens)),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        dataset=StandardLibrary(options.tokens),
        global_batch=16,
        seed=0,
        clip=1.0,
    )
    for step in job.steps(options.steps):
        if job.rank == 0:
            print(f"step {step.index}: loss {step.loss:.4f}")


if __name__ == "__main__":
    main()
