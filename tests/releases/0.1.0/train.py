"""A training script as users of release 0.1.0 write it; it stays as it is, and later releases run it too.

    train.py FOLDER STEPS

Writes each step that it is given into FOLDER/ledger-DEVICE-PID, a JSON object a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import elasticd
from elasticd.models import Decoder, DecoderConfig, next_token_loss

CONFIG = DecoderConfig(vocabulary=40, width=32, layers=5, heads=8, kv_heads=2, hidden=44, dtype=torch.float64)


class Text:
    """Samples of unequal length, each a function of its index."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, CONFIG.vocabulary, (9 + index % 5,), generator=generator)
        return {"inputs": ids[:-1], "targets": ids[1:]}


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    with torch.device("meta"):
        model = Decoder(CONFIG).describe()
    job = elasticd.Job(
        model=model,
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3, weight_decay=0.1),
        dataset=Text(),
        global_batch=6,
        micro_batch=1,
        seed=3,
        clip=0.7,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100),
    )
    with (folder / f"ledger-{job.device.replace('/', ':')}-{os.getpid()}").open("w", buffering=1) as ledger:
        for step in job.steps(steps):
            line = {"step": step.index, "plan": step.plan, "loss": step.loss, "samples": step.samples}
            ledger.write(json.dumps({**line, "time": time.monotonic()}) + "\n")


if __name__ == "__main__":
    main()
