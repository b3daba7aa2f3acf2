"""Trains a vision transformer on the 1,797 images of handwritten digits that come with scikit-learn.

    pip install scikit-learn
    elasticd run --job digits --nnodes 2 --devices 2 examples/train_vit.py

Nothing here is about language: a sample is an image, the loss has one target for each, and the collate
function is the script's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elasticd
from elasticd import Column, Row, UnitsOf

SIDE, PATCH, CLASSES = 8, 2, 10
PATCHES = (SIDE // PATCH) ** 2


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embed(nn.Module):
    """Patches to vectors, behind one for the class: [samples, patches + 1, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, PATCHES + 1, width))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.patches(batch["image"]).flatten(2).transpose(1, 2)
        return torch.cat((self.first.expand(len(x), -1, -1), x), dim=1) + self.positions


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x[:, 0]))


class ViT(nn.Module):
    def __init__(self, width: int = 48, layers: int = 4, heads: int = 6) -> None:
        super().__init__()
        self.embed, self.head = Embed(width), Head(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def describe(vit: ViT) -> elasticd.Model:
    return elasticd.Model(
        name="vit",
        embed=vit.embed,
        blocks=vit.blocks,
        head=vit.head,
        width=vit.embed.patches.out_channels,
        units={"heads": UnitsOf(attribute="blocks.*.attention.heads")},
        rules={
            "blocks.*.attention.[qkv].*": Column("heads"),
            "blocks.*.attention.out.*": Row("heads"),
            "blocks.*.mlp.0.*": Column("columns"),
            "blocks.*.mlp.2.*": Row("columns"),
        },
    )


class Digits:
    """The images [1, 8, 8] with values from 0 to 1, and what they show. `held_out`: the last 297 of them."""

    def __init__(self, held_out: bool = False, dtype: torch.dtype = torch.float32) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        part = slice(1500, None) if held_out else slice(1500)
        self.images = torch.tensor(found.images[part], dtype=dtype).unsqueeze(1) / 16
        self.labels = torch.tensor(found.target[part])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}


def stack(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch["label"], reduction="sum"), len(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)  # every rank makes the same model
    job = elasticd.Job(
        model=describe(ViT()),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        dataset=Digits(),
        global_batch=64,
        micro_batch=8,
        data=elasticd.DataOptions(collate=stack),
    )
    for step in job.steps(options.steps):
        if job.rank == 0:
            print(f"step {step.index}: loss {step.loss:.4f}")


if __name__ == "__main__":
    main()
