"""A plain script for torchrun: data parallel over gloo by all-reduces, a checkpoint on disk every EVERY steps,
and the last one loaded at the start. Arguments: FOLDER EVERY SECONDS (of compute a step)."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    folder, every, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo")
    rank, saved = dist.get_rank(), folder / "checkpoint"
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    update = torch.optim.AdamW(model.parameters())
    step = 0
    if saved.exists():
        found = torch.load(saved)
        model.load_state_dict(found["model"])
        update.load_state_dict(found["update"])
        step = found["step"]
    with (folder / f"ledger-{rank}-{os.getpid()}").open("w", buffering=1) as ledger:
        while True:
            model(torch.randn(8, 256)).square().mean().backward()
            time.sleep(seconds)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            update.step()
            update.zero_grad()
            step += 1
            ledger.write(json.dumps({"step": step, "time": time.monotonic()}) + "\n")
            if rank == 0 and step % every == 0:
                beside = saved.with_suffix(".new")
                torch.save({"model": model.state_dict(), "update": update.state_dict(), "step": step}, beside)
                beside.replace(saved)


if __name__ == "__main__":
    main()
