"""An FSDP2 loop of a script's own on a mesh of replicas and shards, or of shards alone, that survives a device.

    elasticd run --job my-job --devices 4 examples/live_fsdp2.py --checkpoints /shared/run-7

Of four devices two replicas are made, of two shards each; if one dies, three go on with three shards. With
--checkpoints the state is saved by torch.distributed.checkpoint, and a later start goes on from there, on any
number of devices.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import elasticd


def build(mesh):
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return elasticd.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def parts_of(state, step):
    """What a checkpoint has."""
    model, optimizer = get_state_dict(state.model, state.optimizer)
    return {"model": model, "optimizer": optimizer, "step": step}


def resume_from(folder):
    """Loads the newest whole checkpoint: torch writes its file `.metadata` last."""

    def resume(state):
        steps = [int(path.parent.name) for path in folder.glob("*/.metadata")]
        if not steps:
            return 0
        parts = parts_of(state, max(steps))
        checkpoint.load(parts, checkpoint_id=folder / str(max(steps)))
        set_state_dict(
            state.model,
            state.optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
        )
        return parts["step"]

    return resume


def batch_of(indices):
    return torch.stack([torch.randn(64, generator=torch.Generator().manual_seed(index)) for index in indices])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds beside each step, for trials")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="that all nodes share")
    parser.add_argument("--every", type=int, default=50, help="steps from one checkpoint to the next")
    args = parser.parse_args()

    torch.set_num_threads(1)
    folder, meshes = args.checkpoints, ("replicate, shard", "shard")
    resume = resume_from(folder) if folder else None
    live = elasticd.live(build, batch=args.batch, steps=args.steps, meshes=meshes, resume=resume)
    for step in live:
        with step:
            if folder and step.index and step.index % args.every == 0:
                checkpoint.save(parts_of(step.state, step.index), checkpoint_id=folder / str(step.index))
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
