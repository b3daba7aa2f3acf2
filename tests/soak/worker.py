"""What the soak trains: a tiny decoder in float64, every process with a ledger of its own.

    torchrun --rdzv-backend=elasticd --rdzv-id=soak .../soaking.py FOLDER --steps 2000
    python -m tests.soak.worker FOLDER --steps 2000 --plain

Every rank writes every step that it was given, to FOLDER/ledger-DEVICE-PID.jsonl: `elasticd.chaos` reads them
together. With --plain one process of plain torch makes the same updates: what all layouts are compared with.
It looks for faults of the user's code in FOLDER (`tests.soak.script_faults`): in its loss, its dataset
and the body of its loop. With --modules the model has two modules, an encoder of images beside a decoder: the
planner places both. With --experts it is a mixture of experts, in micro-batches so large that devices form TP
groups, in which the planner places the experts by their load. In float64 sums taken in another order stay far
below what a lost or repeated sample would change.
With --live the loop is the script's own, over the decoder sharded by FSDP2 (`elasticd.live`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.box import Box
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from elasticd import State, live
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.api.job import Job
from elasticd.runtime.data.collate import pad
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.model.model import Model
from tests.models import mixture
from tests.runtime.image_model import Captions, OneProcess, language_sections, model_of, vision_sections
from tests.soak.script_faults import Finder

CONFIG = DecoderConfig(vocabulary=32, width=16, layers=4, heads=4, kv_heads=2, hidden=24, dtype=torch.float64)
BATCH, SEED, CLIP = 8, 5, 1.0


class Ladders:
    """Sequences that climb by a fixed amount, of unequal length: something that so small a model can learn."""

    def __init__(self, finder: Finder | None = None) -> None:
        self._finder = finder

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self._finder is not None:
            self._finder.at("loader")
        ids = (index + torch.arange(9 + index % 5) * (1 + index % 7)) % CONFIG.vocabulary
        return {"inputs": ids[:-1], "targets": ids[1:]}


class KnownLadders(Ladders):
    """The same, of which the lengths are known before they are read."""

    lengths = tuple(8 + index % 5 for index in range(1000))


class Pictures(Captions):
    """Texts of which half have images, one to three."""

    def __init__(self, finder: Finder | None = None) -> None:
        self.counts = {"images": [(0, 2, 0, 1, 0, 3, 1, 0)[index % 8] for index in range(1000)]}
        self._finder = finder

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._finder is not None:
            self._finder.at("loader")
        return super().__getitem__(index)


#: Of AdamW.
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1}


def optimizer(named: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, **SETTINGS)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the ledgers go")
    parser.add_argument("--steps", type=int, required=True, help="updates to make")
    parser.add_argument("--zero", type=int, default=0, help="ZeRO's stage, with two replicas (default 0: none)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--packed", action="store_true", help="pack sequences, and cut them over lanes")
    form.add_argument("--modules", action="store_true", help="a model of two modules")
    form.add_argument("--experts", action="store_true", help="a mixture of experts")
    form.add_argument("--live", action="store_true", help="a loop of its own over FSDP2")
    parser.add_argument("--plain", action="store_true", help="one process of plain torch, the same batches")
    return parser.parse_args()


def write(ledger: TextIO, **line: object) -> None:
    ledger.write(json.dumps(line) + "\n")
    ledger.flush()


def two_modules() -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """Sections of an encoder and of a decoder, with the same first values in every process."""
    torch.manual_seed(SEED)
    return vision_sections(), language_sections()


def mixture_of_experts() -> mixture.Mixture:
    """With the same first values in every process."""
    torch.manual_seed(SEED)
    return mixture.Mixture().double()


def train(options: argparse.Namespace) -> None:
    finder = Finder(options.folder)
    model: Model
    if options.modules:
        model, dataset = model_of(*two_modules()), Pictures(finder)
    elif options.experts:
        model, dataset = mixture_of_experts().describe(), Ladders(finder)
    else:
        with torch.device("meta"):
            model = Decoder(CONFIG).describe()
        dataset = (KnownLadders if options.packed else Ladders)(finder)

    def loss(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        finder.at("loss")
        return next_token_loss(output, batch)

    job = Job(
        model=model,
        loss=loss,
        optimizer=optimizer,
        dataset=dataset,
        global_batch=BATCH,
        micro_batch=BATCH // 2 if options.experts else 1,
        seed=SEED,
        clip=CLIP,
        data=DataOptions(packing=Packing(least=1) if options.packed else None),
        parallelism=ParallelismOptions(zero=options.zero, replicas=2 if options.zero else None),
    )
    finder.know(job.device)
    name = f"ledger-{job.device.replace('/', ':')}-{os.getpid()}.jsonl"
    with (options.folder / name).open("w") as ledger:
        for step in job.steps(options.steps):
            write(ledger, step=step.index, loss=step.loss, samples=step.samples, plan=step.plan)
            finder.at("script")
        write(ledger, end=options.steps)


def train_live(options: argparse.Namespace) -> None:
    finder = Finder(options.folder)

    def build(mesh: DeviceMesh) -> State:
        model = decoder()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return State(model=model, optimizer=optimizer(model.named_parameters()))

    loop = live(
        build,
        batch=BATCH,
        steps=options.steps,
        meshes=("shard",),
        data=Ladders(finder),
        collate=pad,
        seed=SEED,
    )
    finder.know(loop.device)
    name = f"ledger-{loop.device.replace('/', ':')}-{os.getpid()}.jsonl"
    with (options.folder / name).open("w") as ledger:
        for step in loop:
            with step:
                finder.at("loss")
                state = step.state
                total, count = next_token_loss(state.model(step.data), step.data)
                step.loss = loss = total / count
                (loss * step.scale_of(count)).backward()
                torch.nn.utils.clip_grad_norm_(state.model.parameters(), CLIP)
                state.optimizer.step()
                state.optimizer.zero_grad()
            if step.made:
                heard = None if math.isnan(step.total) else step.total
                write(ledger, step=step.index, loss=heard, samples=step.everything, plan=loop.plan.number)
                finder.at("script")
        write(ledger, end=options.steps)


def train_plainly(options: argparse.Namespace) -> None:
    data = Pictures() if options.modules else Ladders()
    sampler = Sampler(size=len(data), global_batch=BATCH, seed=SEED)
    step: Callable[[list[Any]], float]
    if options.modules:
        step = OneProcess(*two_modules(), clip=CLIP, **SETTINGS).step
    else:
        step = step_of(mixture_of_experts() if options.experts else decoder())
    with (options.folder / "plain.jsonl").open("w") as ledger:
        for index in range(options.steps):
            taken = sampler.samples(index)
            write(ledger, step=index, loss=step([data[i] for i in taken]), samples=taken)


def decoder() -> Decoder:
    """The decoder with the first values of a job."""
    made = Decoder(CONFIG)
    first = made.describe().first_value
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(first(name, Box.whole(parameter.shape), SEED))
    return made


def step_of(model: torch.nn.Module) -> Callable[[list[dict[str, torch.Tensor]]], float]:
    """Returns a function that updates the model with some samples, and returns the loss."""
    update = optimizer(model.named_parameters())

    def step(samples: list[dict[str, torch.Tensor]]) -> float:
        batch = pad(samples)
        total, count = next_token_loss(model(batch), batch)
        update.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        update.step()
        return float(total.detach()) / count

    return step


def main() -> None:
    options = arguments()
    kept_alive = train_live if options.live else train
    (train_plainly if options.plain else kept_alive)(options)


if __name__ == "__main__":
    main()
