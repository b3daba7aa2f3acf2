"""A plain DDP script, as PyTorch's tutorials write them: it knows nothing of elasticd.

    elasticd run --job my-job --nnodes 1:4 --devices 8 examples/ddp.py --folder /shared/my-job

It saves itself every few steps and goes on from there, as a script under torchrun has to.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def batch_of(step: int, rank: int, size: int, world: int) -> torch.Tensor:
    """This rank's part of the step's batch: the same batch, however many ranks there are."""
    whole = torch.randn(size, 64, generator=torch.Generator().manual_seed(step))
    return whole.tensor_split(world)[rank]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds beside each step, for trials")
    parser.add_argument("--folder", type=Path, required=True, help="shared by all nodes")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    saved, start = args.folder / "state.pt", 0
    if saved.exists():
        state = torch.load(saved, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    dist.barrier()

    for step in range(start, args.steps):
        batch = batch_of(step, rank, args.batch, world).to(device)
        optimizer.zero_grad()
        # The ranks' parts may differ in size: DDP takes the mean over ranks, so each weighs its own.
        loss = (model(batch) - batch).square().mean(-1).sum() / args.batch * world
        loss.backward()
        optimizer.step()
        time.sleep(args.pause)
        total = loss.detach() / world
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} world {world} loss {total.item():.6f}", flush=True)
            if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, saved.with_suffix(".new"))
                os.replace(saved.with_suffix(".new"), saved)
    dist.barrier()
    # Under gloo a DDP model that outlives its process group can hang as it is freed (pytorch issue 56297).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
