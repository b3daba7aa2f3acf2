"""A script of accelerate, which goes on from the state that it saved last."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    saved = sorted(options.folder.glob("step-*[0-9]"), key=lambda path: int(path.name.removeprefix("step-")))
    start = int(saved[-1].name.removeprefix("step-")) if saved else 0
    if saved:
        accelerator.load_state(str(saved[-1]))
    for step in range(start, options.steps):
        whole = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
        batch = whole.tensor_split(accelerator.num_processes)[accelerator.process_index].to(accelerator.device)
        loss = (model(batch) - batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total = accelerator.reduce(loss.detach(), "mean")
        if accelerator.is_main_process:
            print(f"step {step} world {accelerator.num_processes} loss {total.item():.6f}", flush=True)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            folder = options.folder / f"step-{step + 1}"
            accelerator.save_state(str(folder) + ".new")
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                Path(str(folder) + ".new").rename(folder)
            accelerator.wait_for_everyone()
        time.sleep(options.pause)
    accelerator.wait_for_everyone()
    del model, optimizer
    accelerator.end_training()


if __name__ == "__main__":
    main()
