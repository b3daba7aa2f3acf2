"""A loop with everything around it: decay by name, a running mean, evaluation, TensorBoard, the weights at the
end.

    elasticd run --job gpt --devices 4 examples/own_loop.py --logs runs/gpt
    tensorboard --logdir runs

The model and its data are those of train_gpt2.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Subset
from torch.utils.tensorboard import SummaryWriter
from train_gpt2 import GPT, StandardLibrary, describe, loss

import elasticd


def optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Groups are made by name: what one rank holds of a parameter, or whether it does, says nothing."""
    decayed, rest = [], []
    for name, parameter in named:
        (rest if name.endswith("bias") or "norm" in name else decayed).append((name, parameter))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return elasticd.average(torch.optim.AdamW(groups, lr=1e-3), decay=0.99)


def right(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """How often the next byte is the likeliest one."""
    targets = batch["targets"]
    return (output.argmax(-1) == targets).sum(), targets.numel()


class TensorBoard(elasticd.Metrics):
    """Writes from the plan's first rank. When that moves to another process, its file lies beside the first
    one's in the same folder, and TensorBoard shows both as one run."""

    def __init__(self, folder: Path, *, every: int = 1) -> None:
        super().__init__(self._scalars, every=every)
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def on_end(self, job: elasticd.Job) -> None:
        if self._writer is not None:
            self._writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--held-out", type=int, default=64, help="samples to evaluate on")
    parser.add_argument("--logs", type=Path, default=Path("runs/gpt"))
    options = parser.parse_args()
    torch.manual_seed(0)  # every rank makes the same model
    whole = StandardLibrary(options.tokens)
    split = len(whole) - options.held_out
    job = elasticd.Job(
        model=describe(GPT(longest=options.tokens)),
        loss=loss,
        optimizer=optimizer,
        scheduler=lambda made: CosineAnnealingLR(made, T_max=options.steps),
        dataset=Subset(whole, range(split)),
        global_batch=16,
        clip=1.0,
        evaluation=elasticd.EvaluationOptions(
            held_out=elasticd.HeldOut(
                dataset=Subset(whole, range(split, len(whole))), measures={"right": right}
            )
        ),
        callbacks=[TensorBoard(options.logs)],
    )
    best = float("inf")
    for step in job.steps(options.steps):
        if (step.index + 1) % options.every and step.index + 1 < options.steps:
            continue
        found = job.evaluate(weights="average")  # every member of the plan asks, and gets the same
        if found is not None and found.loss < best:
            best = found.loss
            if job.rank == 0:
                print(f"step {step.index}: held-out loss {found.loss:.4f}, {found.means['right']:.1%} right")
        if step.index + 1 == options.steps:
            weights = job.state_dict("average")  # whole on the first rank, empty on the others
            if weights:
                torch.save(weights, options.logs / "weights.pt")


if __name__ == "__main__":
    main()
