"""A DDP loop of a script's own that survives the loss of a device: the survivors repeat one step at most.

    elasticd run --job my-job --devices 4 examples/live_ddp.py

As `python examples/live_ddp.py` it trains in one process, with the same losses.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticd


def build(mesh):
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    return elasticd.State(model=model, optimizer=optimizer, scheduler=scheduler)


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.randn(64, generator=torch.Generator().manual_seed(index))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds beside each step, for trials")
    args = parser.parse_args()

    torch.set_num_threads(1)
    live = elasticd.live(build, batch=args.batch, steps=args.steps, data=Noise())
    for step in live:
        with step:
            state, batch = step.state, step.data
            step.loss = loss = (state.model(batch) - batch).square().mean()
            (loss * step.scale).backward()
            state.optimizer.step()
            state.scheduler.step()
            state.optimizer.zero_grad()
            time.sleep(args.pause)
        if step.made and live.rank == 0:
            print(f"step {step.index} on {live.plan.mesh_text} loss {step.total:.6f}", flush=True)


if __name__ == "__main__":
    main()
