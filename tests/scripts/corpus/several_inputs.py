"""Rows of unequal length with token types and a mask of the padding; the loss ignores it."""

from __future__ import annotations

import torch
from torch import nn

import elasticd
from tests.scripts.corpus import ordinary as o


class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = 4 + index % 5
        ids = torch.randint(1, o.VOCABULARY, (length + 1,), generator=generator)
        return {"input_ids": ids[:-1], "labels": ids[1:], "token_type_ids": torch.arange(length) % 2}


def collate(samples):
    def padded(name, value):
        rows = [sample[name] for sample in samples]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    ids, labels, types = padded("input_ids", 0), padded("labels", -100), padded("token_type_ids", 0)
    return {"input_ids": ids, "attention_mask": ids != 0, "token_type_ids": types, "labels": labels}


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.types = nn.Embedding(o.VOCABULARY, o.WIDTH), nn.Embedding(2, o.WIDTH)

    def forward(self, batch):
        hidden = self.tokens(batch["input_ids"]) + self.types(batch["token_type_ids"])
        return {"hidden": hidden, "mask": batch["attention_mask"]}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(o.WIDTH), nn.Linear(o.WIDTH, 3 * o.WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x["hidden"])).chunk(3, -1)
        mask = x["mask"][:, None, :]
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return {**x, "hidden": x["hidden"] + y}


class Head(o.Head):
    def forward(self, x):
        return super().forward(x["hidden"])


def network():
    return o.Network(Block, Embed, Head)


def loss(output, batch):
    labels = batch["labels"].flatten()
    total = nn.functional.cross_entropy(
        output.flatten(0, 1), labels, ignore_index=-100, reduction="sum", label_smoothing=0.1
    )
    return total, (labels != -100).sum()


def optimizer_of(named):
    return torch.optim.NAdam(o.parameters(named), lr=1e-2)


def train(folder):
    arguments = o.arguments(o.made(network), loss=loss, dataset=Rows())
    o.trained(**arguments, data=elasticd.DataOptions(collate=collate), optimizer=optimizer_of, clip=0.5)


def plain(order):
    model = o.made(network)
    optimizer = optimizer_of(model.named_parameters())
    return o.loop(model, optimizer, order, Rows(), loss=loss, collate=collate, clip=0.5)
