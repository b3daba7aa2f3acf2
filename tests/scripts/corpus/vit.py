"""A vision transformer: patches by a convolution, a class token, labels of the images in uint8."""

from __future__ import annotations

import torch
from torch import nn

import elasticd
from tests.scripts.corpus import ordinary as o

CLASSES = 5


class Images:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        pixels = torch.rand(3, 8, 8, generator=generator, dtype=torch.float64)
        return pixels, torch.tensor(index % CLASSES, dtype=torch.uint8)


class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Conv2d(3, o.WIDTH, kernel_size=4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, o.WIDTH) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 5, o.WIDTH) * 0.02)

    def forward(self, batch):
        x = self.projection(batch[0]).flatten(2).transpose(1, 2)
        return torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(o.WIDTH), nn.Linear(o.WIDTH, CLASSES)

    def forward(self, x):
        return self.out(self.norm(x[:, 0]))


def layer():
    return nn.TransformerEncoderLayer(o.WIDTH, o.HEADS, 16, dropout=0.0, activation="gelu", batch_first=True)


def network():
    return o.Network(layer, Patches, Classifier)


def image_loss(output, batch):
    labels = batch[1].long()
    return nn.functional.cross_entropy(output, labels, reduction="sum"), labels.numel()


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=3e-3, weight_decay=0.05)


def train(folder):
    vit = o.made(network)
    job = elasticd.Job(
        model=elasticd.Model(embed=vit.embed, blocks=vit.blocks, head=vit.head, width=o.WIDTH),
        loss=image_loss,
        optimizer=optimizer_of,
        dataset=Images(),
        global_batch=o.BATCH,
        seed=o.SEED,
    )
    for _step in job.steps(o.STEPS):
        pass


def plain(order):
    vit = o.made(network)
    return o.loop(vit, optimizer_of(vit.named_parameters()), order, Images(), loss=image_loss)
