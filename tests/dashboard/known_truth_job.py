"""The worker of a job whose figures are known: sequences of one length, a loop whose body takes some time, and
a ledger by the script's own clock."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch

import elasticd
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from tests.integration.train import Steps, optimizer

CONFIG = DecoderConfig(vocabulary=40, width=16, layers=4, heads=4, kv_heads=2, hidden=24, dtype=torch.float64)
#: Samples of a step and of a micro-batch, tokens of each sample, seconds of the loop's body.
BATCH, MICRO, LENGTH, BODY = 4, 1, 64, 0.3


class Even:
    """Samples of one length, each a function of its index."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, CONFIG.vocabulary, (LENGTH + 1,), generator=generator)
        return {"inputs": ids[:-1], "targets": ids[1:]}


def main() -> None:
    options = json.loads(os.environ["OPTIONS"])
    out = Path(options["out"])
    with torch.device("meta"):
        model = Decoder(CONFIG).describe()
    job = elasticd.Job(
        model=model,
        loss=next_token_loss,
        optimizer=optimizer,
        dataset=Even(),
        global_batch=BATCH,
        micro_batch=MICRO,
        seed=7,
    )
    with (out / f"truth-{job.device.replace('/', ':')}").open("w") as ledger:
        began = time.time()
        for step in job.steps(Steps(options["steps"], out)):
            ended = time.time()
            line = {"step": step.index, "plan": step.plan, "loss": step.loss, "tokens": step.tokens}
            ledger.write(json.dumps({**line, "began": began, "ended": ended, "rank": job.rank}) + "\n")
            ledger.flush()
            time.sleep(BODY)
            began = time.time()


if __name__ == "__main__":
    main()
