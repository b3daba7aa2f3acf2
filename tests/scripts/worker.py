"""Runs a script of the corpus as one worker of a job, stops at two gates, and leaves what it computed.

It adds to the script's Job a callback, and snapshots where the script keeps no checkpoints. At a gate every
rank waits in the callback until its test opens it: so a fault or a switch comes at the same step in every run.
A process that trains alone, without an agent, passes no gates.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch

import elasticd
from elasticd.runtime.api.job import Job
from elasticd.runtime.api.step import Step
from elasticd.testing.waiting import CONDITION_TIMEOUT_SECONDS, until

#: The steps after which ranks wait at a gate. Before the second one the profile must be fitted to the lengths
#: that were measured, since no plan is replaced before, and no step is made at a gate.
GATES = {"fault": 4, "switch": 40}
#: Steps from one snapshot to the next.
SNAPSHOT_EVERY = 2


class Watched(elasticd.Callback):
    """Writes losses and last weights down, and waits at gates."""

    def __init__(self, out: Path, node: str) -> None:
        self.out, self.node = out, node
        self.gates = {step: out / gate for gate, step in GATES.items()} if node else {}

    def on_step(self, job: Job, step: Step) -> None:
        line = {"step": step.index, "loss": step.loss, "plan": step.plan}
        with (self.out / f"losses-{self.node}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        gate = self.gates.get(step.index)
        if gate is not None:
            gate.with_name(f"{gate.name}-{self.node}").touch()
            until(gate.exists, seconds=CONDITION_TIMEOUT_SECONDS, pause=0.005)
        if step.index == job._total - 1 and (weights := job.state_dict()):
            torch.save(weights, self.out / "weights")


def main() -> None:
    options = json.loads(os.environ["OPTIONS"])
    out, node = Path(options["out"]), Path(os.environ["ELASTICD_SOCKET"]).stem
    watched, original = Watched(out, node if options["gates"] else ""), elasticd.Job

    class WatchedJob(original):  # type: ignore[misc,valid-type]
        def __init__(self, **arguments: Any) -> None:
            arguments.setdefault("checkpointing", elasticd.CheckpointingOptions(snapshot_every=SNAPSHOT_EVERY))
            callbacks = (*arguments.pop("callbacks", ()), watched)
            super().__init__(callbacks=callbacks, **arguments)

    elasticd.Job = WatchedJob  # type: ignore[misc]
    script = importlib.import_module(f"tests.scripts.corpus.{options['name']}")
    notes = script.train(out / "checkpoints")
    if notes is not None:
        (out / f"notes-{watched.node}").write_text(json.dumps(notes))


if __name__ == "__main__":
    main()
