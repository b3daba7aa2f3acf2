"""Translation: encoder layers, then decoder layers that read their output, in one list of blocks."""

from __future__ import annotations

import torch
from torch import nn

import elasticd
from tests.scripts.corpus import ordinary as o


class Pairs:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        source = torch.randint(0, o.VOCABULARY, (5,), generator=generator)
        target = torch.randint(0, o.VOCABULARY, (7,), generator=generator)
        return {"source": source, "inputs": target[:-1], "targets": target[1:]}


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = (nn.Embedding(o.VOCABULARY, o.WIDTH) for _ in range(2))

    def forward(self, batch):
        return {"memory": self.source(batch["source"]), "hidden": self.target(batch["inputs"])}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(o.WIDTH, o.HEADS, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return {**x, "memory": self.layer(x["memory"])}


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.cross = nn.LayerNorm(o.WIDTH), nn.LayerNorm(o.WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(o.WIDTH, o.WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(o.WIDTH, 16), nn.Linear(16, o.WIDTH)

    def forward(self, x):
        hidden, memory = x["hidden"], x["memory"]
        q, k, v = self.query(self.cross(hidden)), self.key(memory), self.value(memory)
        hidden = hidden + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return {**x, "hidden": hidden + self.down(torch.relu(self.up(self.norm(hidden))))}


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(o.WIDTH, o.VOCABULARY)

    def forward(self, x):
        return self.out(x["hidden"])


def network():
    model = o.Network(Encoder, Embed, Head, layers=1)
    model.blocks.extend([Decoder(), Decoder()])
    return model


def optimizer_of(named):
    return torch.optim.Adam(o.parameters(named), lr=5e-3, betas=(0.9, 0.98), eps=1e-9)


def noam(step):
    return min((step + 1) ** -0.5, (step + 1) * 4**-1.5)


def train(folder):
    model = o.made(network)
    job = elasticd.Job(
        model=elasticd.Model(embed=model.embed, blocks=model.blocks, head=model.head),
        loss=o.token_loss,
        optimizer=optimizer_of,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, noam),
        dataset=Pairs(),
        global_batch=o.BATCH,
        seed=o.SEED,
    )
    for _step in job.steps(o.STEPS):
        pass


def plain(order):
    model = o.made(network)
    optimizer = optimizer_of(model.named_parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, noam)
    return o.loop(model, optimizer, order, Pairs(), scheduler=scheduler)
