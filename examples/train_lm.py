"""Trains a byte-level Llama-style decoder on the source files of Python's standard library.

    elasticd run --job my-job --nnodes 2 --devices 2 examples/train_lm.py

With --plain it trains the same model on the same batches in one process of plain torch, without elasticd's
runtime: what every layout is compared with.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import torch
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.box import Box

import elasticd
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.data.collate import pad


class StandardLibrary:
    """Windows of `tokens` bytes of the standard library's own top-level modules, in order of their names, one
    after the other."""

    def __init__(self, tokens: int) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        self.tokens = tokens
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.tokens

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * self.tokens
        window = self.text[start : start + self.tokens + 1].long()
        return {"inputs": window[:-1], "targets": window[1:]}


def optimizer(named: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    fused = torch.accelerator.is_available() or None
    return torch.optim.AdamW(named, lr=3e-3, weight_decay=0.01, fused=fused)


def model(layers: int = 4, width: int = 64) -> elasticd.Model:
    """The decoder that is trained; `elasticd profile examples/train_lm.py:model` measures it."""
    with torch.device("meta"):
        return Decoder(DecoderConfig(layers=layers, width=width)).describe()


def batch(samples: int, tokens: int) -> dict[str, torch.Tensor]:
    """The first samples of the data, for `elasticd profile --batch batch`."""
    data = StandardLibrary(tokens)
    return pad([data[i] for i in range(samples)])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="updates to make (default %(default)s)")
    parser.add_argument("--global-batch", type=int, default=16, help="samples a step (default %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples a pass (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="bytes in a sample (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--profile", type=Path, help="a file that `elasticd profile` wrote for this model")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="default: float32, as it is made")
    parser.add_argument("--recompute", action="store_true", help="blocks make their activations again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ledger", type=Path, help="append one JSON line a step to this file")
    parser.add_argument("--plain", action="store_true", help="one process, plain torch, the same batches")
    return parser.parse_args()


def write(ledger: TextIO | None, **line: object) -> None:
    if ledger is not None:
        ledger.write(json.dumps(line) + "\n")
        ledger.flush()


def train(options: argparse.Namespace, ledger: TextIO | None) -> None:
    job = elasticd.Job(
        model=model(options.layers, options.width),
        loss=next_token_loss,
        optimizer=optimizer,
        dataset=StandardLibrary(options.tokens),
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        seed=options.seed,
        clip=1.0,
        parallelism=elasticd.ParallelismOptions(
            profile=options.profile, precision=options.precision, recompute=options.recompute
        ),
    )
    for step in job.steps(options.steps):
        if job.rank == 0:  # whoever has rank 0 under the plan of this step
            write(
                ledger,
                step=step.index,
                loss=step.loss,
                plan=step.plan,
                tokens=step.tokens,
                samples=step.samples,
                device=job.device,
            )


def train_plainly(options: argparse.Namespace, ledger: TextIO | None) -> None:
    data = StandardLibrary(options.tokens)
    sampler = Sampler(size=len(data), global_batch=options.global_batch, seed=options.seed)
    decoder = Decoder(DecoderConfig(layers=options.layers, width=options.width))
    first = decoder.describe().first_value
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(first(name, Box.whole(parameter.shape), options.seed))
    update = optimizer(decoder.named_parameters())
    for index in range(options.steps):
        given = pad([data[i] for i in sampler.samples(index)])
        total, count = next_token_loss(decoder(given), given)
        update.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        update.step()
        write(ledger, step=index, loss=float(total.detach()) / count, samples=sampler.samples(index))


def main() -> None:
    options = arguments()
    ledger = options.ledger.open("a") if options.ledger else None
    (train_plainly if options.plain else train)(options, ledger)


if __name__ == "__main__":
    main()
