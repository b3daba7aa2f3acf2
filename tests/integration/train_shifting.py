"""The worker of an emulated job on the standard library's files, whose lengths are others in some steps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

import torch
from elasticd_planner.spec.batch import Sampler

import elasticd
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from examples.train_lm import StandardLibrary, optimizer

CONFIG = DecoderConfig(width=32, layers=2, heads=2, kv_heads=2, hidden=64)
BATCH, TOKENS = 4, 256
#: The order of a job's samples. More than any run trains on: no sample is drawn twice.
SAMPLER = Sampler(size=100_000, global_batch=BATCH, seed=0)


class ShiftingLibrary:
    """Windows of the standard library whose length is a function of the step that draws them.

    The samples of each step are known beforehand, and so is the length of each sample: no rank tells it to
    another one.
    """

    def __init__(self, shifts: Iterable[tuple[int, int, int]]) -> None:
        """
        Args:
            shifts: (first step, step after the last, tokens of their samples). Others have TOKENS.
        """
        self._text = StandardLibrary(TOKENS).text
        self._tokens = {
            index: tokens
            for start, stop, tokens in shifts
            for step in range(start, stop)
            for index in SAMPLER.samples(step)
        }

    def __len__(self) -> int:
        return SAMPLER.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens.get(index, TOKENS)
        start = index * TOKENS % (len(self._text) - tokens)
        window = self._text[start : start + tokens + 1].long()
        return {"inputs": window[:-1], "targets": window[1:]}


def main() -> None:
    options = json.loads(os.environ["OPTIONS"])
    with torch.device("meta"):
        model = Decoder(CONFIG).describe()
    job = elasticd.Job(
        model=model,
        loss=next_token_loss,
        optimizer=optimizer,
        dataset=ShiftingLibrary(options["shifts"]),
        global_batch=BATCH,
        seed=SAMPLER.seed,
    )
    for _ in job.steps(options["steps"]):
        pass


if __name__ == "__main__":
    main()
