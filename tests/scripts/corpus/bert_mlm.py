"""BERT: masked language modelling with a collate that draws the mask, as transformers' collator does."""

from __future__ import annotations

import torch
from torch import nn

import elasticd
from tests.scripts.corpus import keyed
from tests.scripts.corpus import ordinary as o

MASK = o.VOCABULARY - 1


class Sentences:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"ids": o.Text()[index]["inputs"] % MASK}


def collate(samples):
    ids = torch.stack([sample["ids"] for sample in samples])
    masked = torch.rand(ids.shape) < 0.4
    masked[:, 0] = True
    return {"inputs": ids.masked_fill(masked, MASK), "targets": ids.masked_fill(~masked, -100)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(o.WIDTH, o.HEADS, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x)


def network():
    return o.Network(Block)


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=5e-3)


def train(folder):
    model = o.made(network)
    torch.manual_seed(torch.seed())  # as a script does that seeds by its rank
    arguments = o.arguments(model, dataset=Sentences(), data=elasticd.DataOptions(collate=collate))
    o.trained(**arguments, optimizer=optimizer_of)


def plain(order):
    model = o.made(network)
    optimizer = optimizer_of(model.named_parameters())
    return keyed.loop(model, optimizer, order, Sentences(), collate=collate)
