"""An FSDP2 loop of a script's own on a mesh of replicas and shards, or of shards alone, that survives a device.

    elasticd run --job my-job --devices 4 examples/live_fsdp2.py

Of four devices two replicas are made, of two shards each; if one dies, three go on with three shards.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import elasticd


def build(mesh):
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return elasticd.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def batch_of(indices):
    return torch.stack([torch.randn(64, generator=torch.Generator().manual_seed(index)) for index in indices])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds beside each step, for trials")
    args = parser.parse_args()

    torch.set_num_threads(1)
    live = elasticd.live(build, batch=args.batch, steps=args.steps, meshes=("replicate, shard", "shard"))
    for step in live:
        with step:
            model, optimizer = step.state.model, step.state.optimizer
            batch = batch_of(step.indices)
            step.loss = loss = (model(batch) - batch).square().mean()
            (loss * step.scale).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(args.pause)
        if step.made and live.rank == 0:
            print(f"step {step.index} on {live.plan.mesh_text} loss {step.total:.6f}", flush=True)


if __name__ == "__main__":
    main()
