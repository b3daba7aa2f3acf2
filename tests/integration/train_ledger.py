"""A worker that trains the tests' decoder and writes, with its time, each step that it is given: one file for
each incarnation, `ledger-DEVICE-PID`, so that a worker that is started again hides nothing."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import elasticd
from elasticd.models import Decoder, next_token_loss
from tests.integration import train


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    options: dict[str, Any] = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    with torch.device("meta"):
        model = Decoder(train.CONFIG).describe()
    job = elasticd.Job(
        model=model,
        loss=next_token_loss,
        optimizer=train.optimizer,
        dataset=train.Text(),
        global_batch=train.BATCH,
        seed=train.SEED,
        clip=train.CLIP,
        scheduler=train.scheduler,
        **{"micro_batch": 1, **train.arguments(options)},
    )
    with (folder / f"ledger-{job.device.replace('/', ':')}-{os.getpid()}").open("w", buffering=1) as ledger:
        for step in job.steps(steps):
            line = {"step": step.index, "plan": step.plan, "loss": step.loss, "samples": step.samples}
            ledger.write(json.dumps({**line, "time": time.monotonic()}) + "\n")


if __name__ == "__main__":
    main()
