"""Trains the GPT in one process of plain PyTorch, with all that such a script has around it.

python plain.py
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from gpt import GPT, GPTConfig
from torch import Tensor
from torch.nn import functional as F

block_size, batch_size, accumulation = 64, 4, 4
learning_rate, min_lr, warmup, decay_steps = 3e-3, 3e-4, 20, 400
weight_decay, grad_clip = 0.1, 1.0
eval_interval, checkpoint_interval = 50, 50

text = (Path(__file__).resolve().parents[2] / "LICENSE").read_bytes()
data = torch.tensor(list(text)).long()
train_data, val_data = data[: 9 * len(data) // 10], data[9 * len(data) // 10 :]


def get_batch(data: Tensor, ix: list[int]) -> tuple[Tensor, Tensor]:
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def random_ix(step: int) -> list[int]:
    generator = torch.Generator().manual_seed(1337 + step)
    shape = (accumulation * batch_size,)
    return torch.randint(len(train_data) - block_size, shape, generator=generator).tolist()


def get_lr(step: int) -> float:
    if step < warmup:
        return learning_rate * (step + 1) / warmup
    ratio = min(1.0, (step - warmup) / (decay_steps - warmup))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def configure_optimizer(model: GPT) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("out-plain"))
    options = parser.parse_args()

    torch.manual_seed(1337)
    model = GPT(GPTConfig(block_size=block_size))
    optimizer = configure_optimizer(model)

    first, checkpoint = 0, options.out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()
        losses = []
        for start in range(0, len(val_data) - block_size, block_size):
            x, y = get_batch(val_data, [start])
            losses.append(F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item())
        model.train()
        return sum(losses) / len(losses)

    for step in range(first, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        ix, total = random_ix(step), 0.0
        for micro_step in range(accumulation):
            x, y = get_batch(train_data, ix[micro_step * batch_size : (micro_step + 1) * batch_size])
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / accumulation
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {total:.4f}", flush=True)
        if (step + 1) % eval_interval == 0:
            print(f"step {step}: validation loss {estimate_loss():.4f}", flush=True)
        if (step + 1) % checkpoint_interval == 0:
            options.out.mkdir(exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, checkpoint)


if __name__ == "__main__":
    main()
