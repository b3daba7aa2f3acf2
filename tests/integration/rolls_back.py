"""A worker whose job goes back to its newest snapshot when a sample's loss is not finite."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import elasticd
from elasticd.runtime.api.job import Job
from elasticd.runtime.api.step import Step
from tests.integration import train
from tests.scripts.corpus import ordinary as o

STEPS, SNAPSHOT_EVERY = 16, 4


def loss_of(bad: int) -> Any:
    """The loss of tokens; NaN for the sample whose first tokens are those of this index."""
    marked = o.Text()[bad]["inputs"]

    def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
        total, count = o.token_loss(output, batch)
        hit = (batch["inputs"] == marked).all(1).any()
        return total * torch.where(hit, torch.nan, 1.0), count

    return loss


def optimizer_of(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


class Notes(elasticd.Callback):
    """Writes each step down, and the last weights."""

    def __init__(self, out: Path, node: str) -> None:
        self.out, self.node = out, node

    def on_step(self, job: Job, step: Step) -> None:
        with (self.out / f"steps-{self.node}").open("a") as file:
            file.write(json.dumps([step.index, step.loss, step.applied, step.plan]) + "\n")
        if step.index == STEPS - 1 and (weights := job.state_dict()):
            torch.save(weights, self.out / "weights")


def main() -> None:
    options = json.loads(os.environ["OPTIONS"])
    notes = Notes(Path(options["out"]), Path(os.environ["ELASTICD_SOCKET"]).stem)
    job = elasticd.Job(
        **o.arguments(
            o.made(),
            loss=loss_of(options["bad"]),
            stability=elasticd.StabilityOptions(action="roll back"),
            checkpointing=elasticd.CheckpointingOptions(
                snapshot_every=SNAPSHOT_EVERY if options["snapshots"] else None,
                folder=None if options["snapshots"] else Path(options["out"]) / "checkpoints",
                every=50,
            ),
            callbacks=[notes],
            global_batch=train.BATCH,
            micro_batch=train.MICRO,
            check=False,
        ),
        optimizer=optimizer_of,
    )
    for _ in job.steps(STEPS):
        pass


if __name__ == "__main__":
    main()
