"""A plain FSDP2 script with torch's distributed checkpoints: it knows nothing of elasticd.

elasticd run --job my-job --nnodes 1:4 --devices 8 examples/fsdp2.py --folder /shared/my-job
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def newest(folder: Path) -> Path | None:
    """The last checkpoint that is whole: torch writes its metadata last."""
    found = [path for path in folder.glob("step-*") if (path / ".metadata").exists()]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds beside each step, for trials")
    parser.add_argument("--folder", type=Path, required=True, help="shared by all nodes")
    args = parser.parse_args()

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(kind, (world,))
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks).to(kind)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    start, found = 0, [newest(args.folder)]
    dist.broadcast_object_list(found)  # all go on from the same one
    if found[0] is not None:
        parameters, moments = get_state_dict(model, optimizer)
        state = {"model": parameters, "optimizer": moments}
        dcp.load(state, checkpoint_id=found[0])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        start = int(found[0].name.removeprefix("step-"))

    for step in range(start, args.steps):
        whole = torch.randn(args.batch, 64, generator=torch.Generator().manual_seed(step))
        batch = whole.tensor_split(world)[rank].to(kind)
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean(-1).sum() / args.batch * world
        loss.backward()
        optimizer.step()
        time.sleep(args.pause)
        total = loss.detach() / world
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} world {world} loss {total.item():.6f}", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            parameters, moments = get_state_dict(model, optimizer)
            target = args.folder / f"step-{step + 1}"
            dcp.save({"model": parameters, "optimizer": moments}, checkpoint_id=target)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
