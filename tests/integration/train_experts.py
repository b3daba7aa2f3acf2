"""The worker of the integration tests of placed experts: leaves a ledger and weights, as `train_modules.py`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

import elasticd
from elasticd import Balance
from elasticd.models import next_token_loss
from tests.integration.train import Steps, arguments, optimizer
from tests.models.mixture import VOCABULARY, Biased
from tests.models.texts import Text

#: Samples of a step, and the seed of their order.
BATCH, SEED = 4, 3
#: Blocks of the job's model.
LAYERS = 2
BALANCE = Balance(loss=0.05, bias=0.01, router="blocks.*.router", parameter="blocks.*.shift")


def whole(layers: int = LAYERS) -> Biased:
    """The model, in double precision."""
    torch.manual_seed(0)
    model = Biased().double()
    model.blocks = model.blocks[:layers]
    return model


def main() -> None:
    options = json.loads(os.environ["OPTIONS"])
    out = Path(options["out"])
    job = elasticd.Job(
        model=whole().describe(),
        loss=next_token_loss,
        optimizer=optimizer,
        dataset=Text(VOCABULARY),
        global_batch=BATCH,
        seed=SEED,
        balance=BALANCE,
        **arguments(options.get("job", {})),
    )
    with (out / f"ledger-{job.device.replace('/', ':')}").open("w") as ledger:
        for step in job.steps(Steps(options["steps"], out)):
            if job.rank == 0:
                line = {"step": step.index, "loss": step.loss, "balance": step.balance, "plan": step.plan}
                ledger.write(json.dumps(line) + "\n")
                ledger.flush()
    weights = {name: (box.start, box.stop, value) for name, (box, value) in job.parameters().items()}
    if weights:
        torch.save(weights, out / f"weights-{job.device.replace('/', ':')}")


if __name__ == "__main__":
    main()
