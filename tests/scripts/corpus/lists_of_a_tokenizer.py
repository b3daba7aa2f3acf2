"""Samples as a tokenizer gives them, lists of numbers, and a collate that pads them."""

from __future__ import annotations

import torch

import elasticd
from tests.scripts.corpus import ordinary as o

REFUSED = "set_format"


class Tokenized:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {name: ids.tolist() for name, ids in o.Text()[index].items()}


def collate(samples):
    return {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def train(folder):
    arguments = o.arguments(o.made(), dataset=Tokenized(), data=elasticd.DataOptions(collate=collate))
    o.trained(**arguments, optimizer=optimizer_of)


def plain(order):
    gpt = o.made()
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order, Tokenized(), collate=collate)
