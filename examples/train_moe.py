"""Trains a small mixture of experts of one's own, byte by byte, on the source files of Python's standard
library.

    elasticd run --job moe --nnodes 2 --devices 2 examples/train_moe.py

Each block has attention and eight experts, of which a router chooses two for each byte. The router learns, so
that the load of the experts drifts: `--show-load` prints the busiest of each block. Where devices form TP
groups, the planner places the experts by that load and by the devices' speed, anew while the job trains.
`--micro-batch` as large as `--batch` leaves nothing to divide but the blocks. As `python examples/train_moe.py`
it trains in one process, to the same losses.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_gpt2 import Attention, Embed, Head, StandardLibrary, loss

import elasticd
from elasticd import Balance, Column, Experts, Row, UnitsOf


class StackedExperts(nn.Module):
    """Experts of two matrices each, stacked: elasticd's contract, and that of transformers."""

    def __init__(self, count: int, width: int, columns: int) -> None:
        super().__init__()
        self.count = count
        self.up = nn.Parameter(torch.randn(count, width, columns) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, columns, width) / columns**0.5)

    def forward(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(rows)
        for expert in range(self.count):
            row, slot = (index == expert).nonzero(as_tuple=True)
            if len(row):
                hidden = F.silu(rows[row] @ self.up[expert]) @ self.down[expert]
                output = output.index_add(0, row, hidden * weights[row, slot][:, None])
        return output


class Block(nn.Module):
    def __init__(self, width: int, heads: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout=0.0)
        self.router, self.chosen = nn.Linear(width, experts, bias=False), chosen
        self.experts = StackedExperts(experts, width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        rows = self.norm2(x).flatten(0, 1)
        weights, index = self.router(rows).softmax(-1).topk(self.chosen, dim=-1)
        return x + self.experts(rows, index, weights).view_as(x)


class Mixture(nn.Module):
    def __init__(self, *, width: int, layers: int, experts: int, tokens: int) -> None:
        super().__init__()
        self.embed = Embed(256, width, tokens, dropout=0.0)
        self.blocks = nn.ModuleList(Block(width, heads=4, experts=experts, chosen=2) for _ in range(layers))
        self.head = Head(256, width)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def describe(mixture: Mixture) -> elasticd.Model:
    return elasticd.Model(
        name="mixture",
        embed=mixture.embed,
        blocks=mixture.blocks,
        head=mixture.head,
        width=mixture.embed.tokens.embedding_dim,
        units={
            "heads": UnitsOf(attribute="blocks.*.attention.heads"),
            "experts": UnitsOf(attribute="blocks.*.experts.count"),
        },
        rules={
            "blocks.*.attention.qkv.*": Column("heads", parts=3),
            "blocks.*.attention.out.*": Row("heads"),
            "blocks.*.experts.*": Experts("experts"),
        },
    )


def make_model(options: argparse.Namespace) -> Mixture:
    """The model in plain torch; every rank makes the same one."""
    torch.manual_seed(0)
    sizes = {"width": options.width, "layers": options.layers, "experts": options.experts}
    return Mixture(**sizes, tokens=options.tokens).to(getattr(torch, options.dtype))


class Windows(StandardLibrary):
    """Bytes of which nothing pads: a balance loss counts none that does."""

    @property
    def lengths(self) -> list[int]:
        return [self.tokens] * len(self)


def optimizer(named: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=3e-3)  # type: ignore[arg-type]


def balance(options: argparse.Namespace) -> Balance | None:
    return Balance(loss=options.balance, router="blocks.*.router") if options.balance else None


def make_job(options: argparse.Namespace) -> elasticd.Job:
    return elasticd.Job(
        model=describe(make_model(options)),
        loss=loss,
        optimizer=optimizer,
        dataset=Windows(options.tokens),
        global_batch=options.batch,
        micro_batch=options.micro_batch,
        seed=options.seed,
        balance=balance(options),
        checkpointing=elasticd.CheckpointingOptions(snapshot_every=options.snapshot_every),
    )


def heaviest(load: Mapping[str, list[int]]) -> str:
    """The heaviest expert of each block, with its part of the rows."""
    return ", ".join(
        f"{block}: expert {rows.index(max(rows))} has {max(rows) / sum(rows):.0%}"
        for block, rows in load.items()
        if sum(rows)
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--steps", type=int, default=200)
    made.add_argument("--batch", type=int, default=16, help="samples of a step")
    made.add_argument("--micro-batch", type=int, default=8, help="samples of a pass")
    made.add_argument("--tokens", type=int, default=64, help="bytes of a sample")
    made.add_argument("--width", type=int, default=32)
    made.add_argument("--layers", type=int, default=2)
    made.add_argument("--experts", type=int, default=8, help="of a block")
    made.add_argument("--balance", type=float, default=0.01, help="factor of the balance loss; 0: none")
    made.add_argument("--seed", type=int, default=0, help="of the order of the samples")
    made.add_argument("--snapshot-every", type=int, default=20, help="steps, for a device that dies alone")
    made.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    made.add_argument("--show-load", type=int, metavar="STEPS", help="print the heaviest experts so often")
    return made


def main() -> None:
    options = parser().parse_args()
    job = make_job(options)
    for step in job.steps(options.steps):
        load = job.expert_load() if options.show_load and step.index % options.show_load == 0 else None
        if job.rank == 0:
            even = "" if step.balance is None else f", balance {step.balance:.3f}"
            print(f"step {step.index}: loss {step.loss:.4f}{even}")
            if load:
                print(heaviest(load))


if __name__ == "__main__":
    main()
