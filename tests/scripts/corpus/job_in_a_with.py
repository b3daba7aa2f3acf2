"""Early stopping by `break` in a `with`: behind it the checkpoint is there."""

from __future__ import annotations

import elasticd
from tests.scripts.corpus import ordinary as o
from tests.scripts.corpus.early_stopping import LAST, PHASE, optimizer_of, plain

__all__ = ["PHASE", "plain", "train"]


def train(folder):
    checkpoints = elasticd.CheckpointingOptions(folder=folder, every=100, snapshot_every=2)
    with elasticd.Job(**o.arguments(o.made(), checkpointing=checkpoints), optimizer=optimizer_of) as job:
        for step in job.steps(1000):
            if step.index == LAST:
                break
    if job.rank == 0:
        assert [path.name[:13] for path in folder.glob("step-*[!p]")] == [f"step-{LAST + 1:08d}"]
