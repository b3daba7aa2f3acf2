"""The worker of the integration tests of models of two modules: leaves a ledger and weights, as `train.py`.

`model` of its options: "by hand" or "vlm", which is examples/train_vlm.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

import elasticd
from elasticd.models.decoder import next_token_loss
from tests.integration.train import Steps, arguments, optimizer
from tests.runtime.image_model import BATCH, SEED, Captions, language_sections, model_of, vision_sections


def by_hand(options: dict[str, Any]) -> elasticd.Job:
    torch.manual_seed(0)
    return elasticd.Job(
        model=model_of(vision_sections(), language_sections()),
        loss=next_token_loss,
        optimizer=optimizer,
        dataset=Captions(),
        global_batch=BATCH,
        seed=SEED,
        **arguments(options.get("job", {})),
    )


def of_the_example() -> elasticd.Job:
    """Of examples/train_vlm.py, in double precision."""
    from examples import train_vlm

    return train_vlm.make_job(
        train_vlm.parser().parse_args(["--dtype=float64", f"--batch={BATCH}", "--snapshot-every=2"])
    )


def main() -> None:
    options = json.loads(os.environ["OPTIONS"])
    out = Path(options["out"])
    job = of_the_example() if options.get("model") == "vlm" else by_hand(options)
    with (out / f"ledger-{job.device.replace('/', ':')}").open("w") as ledger:
        for step in job.steps(Steps(options["steps"], out)):
            if job.rank == 0:
                ledger.write(json.dumps({"step": step.index, "loss": step.loss, "plan": step.plan}) + "\n")
                ledger.flush()
    weights = {name: (box.start, box.stop, value) for name, (box, value) in job.parameters().items()}
    if weights:
        torch.save(weights, out / f"weights-{job.device.replace('/', ':')}")


if __name__ == "__main__":
    main()
