"""The worker of an emulated job on the standard library's files, whose lengths chaos changes."""

from __future__ import annotations

import json
import os

import torch

import elasticd
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from examples.train_lm import StandardLibrary, optimizer

CONFIG = DecoderConfig(width=32, layers=2, heads=2, kv_heads=2, hidden=64)
BATCH, TOKENS = 4, 256


def main() -> None:
    with torch.device("meta"):
        model = Decoder(CONFIG).describe()
    job = elasticd.Job(
        model=model,
        loss=next_token_loss,
        optimizer=optimizer,
        dataset=StandardLibrary(TOKENS),
        global_batch=BATCH,
    )
    for _ in job.steps(json.loads(os.environ["OPTIONS"])["steps"]):
        pass


if __name__ == "__main__":
    main()
