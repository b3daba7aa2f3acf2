"""The worker of integration tests that train an example: leaves a ledger and weights, as `train.py`.

`example` of its options is the name of a file of examples/ with `parser` and `make_job`, `arguments` its
command line. `double`: torch computes in double precision throughout; `vgpu`: on a device that is not the CPU.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import elasticd
from elasticd.system.torch_build import DEVICE_VARIABLE
from tests.accelerators import vgpu
from tests.integration.train import Steps
from tests.models.double import DoubleThroughout

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def main() -> None:
    options = json.loads(os.environ["OPTIONS"])
    if options.get("vgpu"):
        vgpu.load()
        os.environ[DEVICE_VARIABLE] = "vgpu"
    sys.path.insert(0, str(EXAMPLES))
    if options.get("double"):  # of this thread, and the step that is compared beforehand is another's
        elasticd.Job = partial(elasticd.Job, check=False)  # type: ignore[assignment, misc]
    with DoubleThroughout() if options.get("double") else nullcontext():
        train(importlib.import_module(options["example"]), options)


def train(example: ModuleType, options: dict[str, Any]) -> None:
    """Trains as long as the options say."""
    out, job = Path(options["out"]), example.make_job(example.parser().parse_args(options["arguments"]))
    with (out / f"ledger-{job.device.replace('/', ':')}").open("a") as ledger:
        for step in job.steps(Steps(options["steps"], out)):
            if job.rank == 0:
                line = {"step": step.index, "loss": step.loss, "balance": step.balance, "plan": step.plan}
                ledger.write(json.dumps(line) + "\n")
                ledger.flush()
    weights = {name: (box.start, box.stop, value.cpu()) for name, (box, value) in job.parameters().items()}
    if weights:
        torch.save(weights, out / f"weights-{job.device.replace('/', ':')}")


if __name__ == "__main__":
    main()
