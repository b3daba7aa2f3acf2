"""A replica group of one worker for torchft: the script of its README on gloo. Arguments: FOLDER NUMBER TIMEOUT
(seconds of its process group) SECONDS (of compute a step); the lighthouse is named by TORCHFT_LIGHTHOUSE."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main() -> None:
    folder, number, timeout = Path(sys.argv[1]), sys.argv[2], timedelta(seconds=float(sys.argv[3]))
    seconds = float(sys.argv[4])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    plain = torch.optim.AdamW(model.parameters())

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["update"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "update": plain.state_dict()},
        replica_id=f"replica{number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timeout,
        hostname="127.0.0.1",
    )
    wrapped, update = DistributedDataParallel(manager, model), Optimizer(manager, plain)
    with (folder / f"ledger-{number}-{os.getpid()}").open("w", buffering=1) as ledger:
        while True:
            update.zero_grad()
            loss = wrapped(torch.randn(8, 256)).square().mean()
            time.sleep(seconds)
            loss.backward()
            before = manager.current_step()
            update.step()
            line = {"step": before, "time": time.monotonic(), "replicas": manager.num_participants()}
            if manager.current_step() > before:
                ledger.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
