"""Draws of a job in plain torch, written from docs/training.md: what a seed, a step and samples give.

A script that draws can be compared with plain torch only where both draw the same. `seeded` begins all
generators as a job does before a section, the loss, `collate` and a dataset's read. `Dropout` has the masks
of a job's `nn.Dropout`, by SplitMix64 in NumPy.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.scripts.corpus import ordinary as o

GOLDEN, FIRST, SECOND = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def key(*parts: Any) -> int:
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def seeded(place: str, step: int, samples: Sequence[int]) -> None:
    """Begins torch's, Python's and NumPy's generators for a place, a step and the samples of a micro-batch."""
    seed = key(o.SEED, step, ",".join(map(str, samples)), place, 0) & (2**62 - 1)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))


def mask(place: str, call: int, step: int, samples: Sequence[int], shape: Sequence[int], p: float) -> Tensor:
    """Which elements of [samples, *shape] a dropout keeps."""
    state = np.array([key(o.SEED, step, sample, place, call) for sample in samples], dtype=np.uint64)
    for size in shape:
        state = mixed(state[..., None] + np.arange(1, size + 1, dtype=np.uint64) * GOLDEN)
    return torch.from_numpy((state >> np.uint64(40)).astype(np.int64) >= round(p * (1 << 24)))


class Dropout(nn.Module):
    """An `nn.Dropout` at a place of a model; `now` has the step, the samples and the calls of the pass."""

    def __init__(self, p: float, place: str, now: SimpleNamespace) -> None:
        super().__init__()
        self.p, self.place, self.now = p, place, now

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        call = self.now.calls[self.place] = self.now.calls.get(self.place, 0) + 1
        kept = mask(self.place, call, self.now.step, self.now.samples, x.shape[1:], self.p)
        return x * kept / (1 - self.p)


def loop(
    model: Any,
    optimizer: torch.optim.Optimizer,
    order: o.Order,
    dataset: Any,
    *,
    loss: Callable[..., Any] = o.token_loss,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> o.Outcome:
    """The loop of plain torch, with the draws of a job whose micro-batches have one sample."""
    now, losses = SimpleNamespace(), []
    for name, module in list(model.named_modules()):
        if type(module) is nn.Dropout:
            model.set_submodule(name, Dropout(module.p, name, now))
    sections = [("embed", model.embed), *((f"blocks.{i}", each) for i, each in enumerate(model.blocks))]
    for step, indices in enumerate(order):
        optimizer.zero_grad()
        totals, counts = [], []
        for index in indices:
            now.step, now.samples, now.calls = step, [index], {}
            seeded("dataset", step, [index])
            sample = dataset[index]
            seeded("collate", step, [index])
            batch = x = collate([sample])
            for place, section in (*sections, ("head", model.head)):
                seeded(place, step, [index])
                x = section(x)
            seeded("loss", step, [index])
            total, count = loss(x, batch)
            totals.append(total)
            counts.append(float(count))
        (sum(totals) / sum(counts)).backward()
        optimizer.step()
        losses.append(float(sum(totals).detach()) / sum(counts))
    return o.Outcome(losses, o.weights_of(model))
