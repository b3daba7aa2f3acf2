"""A worker that trains as the tests' one does, and in whose own code faults can be planted by file: its loss,
its dataset, the measure of its evaluations and the body of its loop look for them
(`tests.soak.script_faults`).

`_train_planted.py FOLDER STEPS OPTIONS`; `evaluate` among the options: steps between two evaluations.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import elasticd
from elasticd.models import Decoder, next_token_loss
from tests.integration import train
from tests.soak.script_faults import Finder


class Text(train.Text):
    def __init__(self, finder: Finder) -> None:
        self._finder = finder

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self._finder.at("loader")
        return super().__getitem__(index)


class Held(train.Text):
    def __len__(self) -> int:
        return train.BATCH


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    options: dict[str, Any] = json.loads(sys.argv[3])
    every = options.pop("evaluate", 0)
    finder = Finder(folder)

    def loss(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        finder.at("loss")
        return next_token_loss(output, batch)

    def measure(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        finder.at("evaluation")
        return next_token_loss(output, batch)

    with torch.device("meta"):
        model = Decoder(train.CONFIG).describe()
    job = elasticd.Job(
        model=model,
        loss=loss,
        optimizer=train.optimizer,
        dataset=Text(finder),
        evaluation=elasticd.EvaluationOptions(
            held_out=elasticd.HeldOut(dataset=Held(), loss=next_token_loss, measures={"again": measure})
        ),
        global_batch=train.BATCH,
        micro_batch=1,
        seed=train.SEED,
        clip=train.CLIP,
        scheduler=train.scheduler,
        **train.arguments(options),
    )
    finder.know(job.device)
    with (folder / f"ledger-{job.device.replace('/', ':')}-{os.getpid()}").open("w", buffering=1) as ledger:
        for step in job.steps(steps):
            line = {"step": step.index, "plan": step.plan, "loss": step.loss, "samples": step.samples}
            ledger.write(json.dumps({**line, "time": time.monotonic()}) + "\n")
            finder.at("script")
            if every and step.index % every == every - 1:
                job.evaluate()


if __name__ == "__main__":
    main()
