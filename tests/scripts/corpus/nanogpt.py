"""nanoGPT: fused q, k and v, decay for matrices alone, warmup and cosine, clipping."""

from __future__ import annotations

import math

import torch
from torch import nn

import elasticd
from elasticd import Column, Row, UnitsOf
from tests.scripts.corpus import ordinary as o

LAYOUT = "tp"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_head = o.HEADS
        self.c_attn, self.c_proj = nn.Linear(o.WIDTH, 3 * o.WIDTH), nn.Linear(o.WIDTH, o.WIDTH)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=2)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(o.WIDTH), nn.LayerNorm(o.WIDTH)
        self.attn = Attention()
        self.c_fc, self.c_down = nn.Linear(o.WIDTH, 4 * o.WIDTH), nn.Linear(4 * o.WIDTH, o.WIDTH)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_down(nn.functional.gelu(self.c_fc(self.ln_2(x))))


def optimizer_of(named):
    named = list(named)
    decay = [p for _, p in named if p.dim() >= 2]
    rest = [p for _, p in named if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def rate(step):
    if step < 3:
        return (step + 1) / 4
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 3) / (o.STEPS - 3)))


def train(folder):
    gpt = o.made(lambda: o.Network(Block))
    job = elasticd.Job(
        model=elasticd.Model(
            embed=gpt.embed,
            blocks=gpt.blocks,
            head=gpt.head,
            rules={
                "blocks.*.attn.c_attn.*": Column("heads", parts=3),
                "blocks.*.attn.c_proj.*": Row("heads"),
                "blocks.*.c_fc.*": Column("columns"),
                "blocks.*.c_down.*": Row("columns"),
            },
            units={"heads": UnitsOf(attribute="blocks.*.attn.n_head")},
        ),
        loss=o.token_loss,
        optimizer=optimizer_of,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        dataset=o.Text(),
        global_batch=o.BATCH,
        seed=o.SEED,
        clip=1.0,
        checkpointing=elasticd.CheckpointingOptions(folder=folder, every=2),
    )
    for _step in job.steps(o.STEPS):
        pass


def plain(order):
    gpt = o.made(lambda: o.Network(Block))
    optimizer = optimizer_of(gpt.named_parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    return o.loop(gpt, optimizer, order, scheduler=scheduler, clip=1.0)
