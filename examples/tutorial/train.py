"""Trains the GPT as a job of elasticd: on any number of devices, as one process would.

elasticd run --devices 2 train.py
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from gpt import GPT, GPTConfig
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import elasticd

block_size, batch_size, accumulation = 64, 4, 4
learning_rate, min_lr, warmup, decay_steps = 3e-3, 3e-4, 20, 400
weight_decay, grad_clip = 0.1, 1.0
eval_interval, checkpoint_interval = 50, 50

text = (Path(__file__).resolve().parents[2] / "LICENSE").read_bytes()
data = torch.tensor(list(text)).long()
train_data, val_data = data[: 9 * len(data) // 10], data[9 * len(data) // 10 :]


def windows(data: Tensor, stride: int) -> list[dict[str, Tensor]]:
    starts = range(0, len(data) - block_size, stride)
    return [{"idx": data[i : i + block_size], "targets": data[i + 1 : i + 1 + block_size]} for i in starts]


def random_ix(step: int) -> list[int]:
    generator = torch.Generator().manual_seed(1337 + step)
    shape = (accumulation * batch_size,)
    return torch.randint(len(train_data) - block_size, shape, generator=generator).tolist()


def get_lr(step: int) -> float:
    if step < warmup:
        return learning_rate * (step + 1) / warmup
    ratio = min(1.0, (step - warmup) / (decay_steps - warmup))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def configure_optimizer(named: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    named = list(named)
    decayed = [(name, p) for name, p in named if p.dim() >= 2]
    others = [(name, p) for name, p in named if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    targets = batch["targets"].flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), len(targets)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("out-job"))
    options = parser.parse_args()

    torch.manual_seed(1337)
    model = GPT(GPTConfig(block_size=block_size))
    job = elasticd.Job(
        model=elasticd.from_module(model, blocks="h", example={"idx": data[None, :block_size]}),
        loss=loss,
        optimizer=configure_optimizer,
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: get_lr(step) / learning_rate),
        dataset=windows(train_data, stride=1),
        global_batch=accumulation * batch_size,
        clip=grad_clip,
        checkpointing=elasticd.CheckpointingOptions(folder=options.out, every=checkpoint_interval),
        evaluation=elasticd.EvaluationOptions(held_out=windows(val_data, stride=block_size)),
    )
    while (index := job.next(options.steps)) is not None:
        if (step := job.step(random_ix(index))) is None:
            continue
        if job.rank == 0 and (step.index % 10 == 0 or step.index == options.steps - 1):
            print(f"step {step.index}: loss {step.loss:.4f}", flush=True)
        if (step.index + 1) % eval_interval == 0:
            evaluation = job.evaluate()
            if job.rank == 0 and evaluation is not None:
                print(f"step {step.index}: validation loss {evaluation.loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
