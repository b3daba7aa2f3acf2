"""The worker of the integration tests: trains a small decoder in float64 and leaves ledger and weights."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from elasticd_migration.exchange import Exchange
from elasticd_migration.migrate import Corrupt
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan

import elasticd
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.data.collate import pad
from elasticd.runtime.engine import compiled_blocks
from elasticd.runtime.switch import move as moves
from elasticd.runtime.switch.switcher import Switcher
from tests.accelerators import shared_gpu, strict_process_group, vgpu

CONFIG = DecoderConfig(vocabulary=40, width=32, layers=3, heads=8, kv_heads=2, hidden=44, dtype=torch.float64)
#: Samples of a step and of a micro-batch.
BATCH, MICRO = 6, 2
SEED, CLIP = 3, 0.7


class Text:
    """Samples of unequal length, each a function of its index."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, CONFIG.vocabulary, (9 + index % 5,), generator=generator)
        return {"inputs": ids[:-1], "targets": ids[1:]}


class Known(Text):
    """The same samples, of which the lengths are known before they are read."""

    lengths = tuple(8 + index % 5 for index in range(1000))


def optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-3, weight_decay=0.1)


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)


def die_at(moment: str) -> None:
    """Lets this process be killed when it comes to a moment of its second plan's switch."""

    def deadly(method: Callable[..., Any], when: Callable[..., bool] = lambda *a: True) -> Callable[..., Any]:
        def dies(self: Switcher, *args: Any) -> Any:
            if self.engine is not None and when(self, *args):
                os.kill(os.getpid(), signal.SIGKILL)
            return method(self, *args)

        return dies

    if moment == "preparing":
        Switcher._make = deadly(Switcher._make)  # type: ignore[method-assign]
    elif moment == "voting":
        prepared = Switcher.prepared

        def votes(self: Switcher) -> int:
            number = prepared(self)
            if number:
                os.kill(os.getpid(), signal.SIGKILL)
            return number

        Switcher.prepared = votes  # type: ignore[method-assign]
    elif moment == "moving":
        Switcher._moved = deadly(Switcher._moved)  # type: ignore[method-assign]
    elif moment == "acking":
        Switcher._all_gather_ok = deadly(Switcher._all_gather_ok)  # type: ignore[method-assign]
    elif moment == "swapping":
        Switcher._swap = deadly(Switcher._swap)  # type: ignore[method-assign]
    elif moment == "in place":
        die_in_place()
    else:
        raise ValueError(moment)


def die_in_place() -> None:
    """In the midst of a move in place: a round has come and was acknowledged, so that the sender gave up what
    it had of it; the next one has come too."""
    place, turns = Exchange._place, [0]

    def dies(self: Exchange, posted: Any) -> None:
        if posted and self._side._in_place:
            turns[0] += 1
            if turns[0] == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        place(self, posted)

    Exchange._place = dies  # type: ignore[method-assign]


def failing(how: str, sample: int, where: str) -> Callable[..., Any]:
    """The loss, which fails for a sample, everywhere or on the nodes whose socket has this name: it raises,
    sleeps, or stays in C with the interpreter's lock."""
    first = Text()[sample]["inputs"]

    def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        held = any(torch.equal(row[: len(first)], first) for row in batch["inputs"])
        if held and where in os.environ["ELASTICD_SOCKET"]:
            fail(how, f"sample {sample} is bad, at {hex(id(batch))}")
        return next_token_loss(output, batch)

    return loss


def fail(how: str, why: str) -> None:
    if how == "raise":
        raise ValueError(why)
    if how == "sleep":
        time.sleep(3600)
    re.match("(a+)+$", "a" * 64 + "b")


def refuse(how: str) -> None:
    """Lets this process not take part in its second plan's switch: it cannot prepare it, or says not ok."""
    method = {"preparing": "_make", "moving": "_moved"}[how]
    original = getattr(Switcher, method)

    def refuses(self: Switcher, argument: Any) -> Any:
        result = original(self, argument) if how == "moving" else None
        if self.engine is not None:
            raise Corrupt("this rank was told to refuse")
        return result or original(self, argument)

    setattr(Switcher, method, refuses)


def note_graphs(out: Path, device: str, plan: int) -> None:
    """How many graphs torch.compile had made in this process after the last step under each plan."""
    from torch._dynamo.utils import counters

    path = out / f"graphs-{device.replace('/', ':')}"
    seen = json.loads(path.read_text()) if path.exists() else {}
    seen.setdefault(str(plan), []).append(counters["stats"]["unique_graphs"])
    path.write_text(json.dumps(seen))


class Steps(int):
    """How many steps a job makes, where its test says only while it trains that it is enough.

    The job's loop compares it with the steps that were made. The first rank that sees the file `end` writes the
    last step down, a few steps on, before it goes on itself: no other rank can have come as far.
    """

    FOLLOW = 6

    def __new__(cls, most: int, folder: Path) -> Steps:
        made = super().__new__(cls, most)
        made.folder = folder
        return made

    folder: Path

    def __gt__(self, made: int) -> bool:
        return self._total(made) > made

    def __le__(self, made: int) -> bool:
        return self._total(made) <= made

    def _total(self, made: int) -> int:
        last = self.folder / "last"
        if not last.exists() and (self.folder / "end").exists():
            mine = self.folder / f"last-{os.getpid()}"
            mine.write_text(str(made + self.FOLLOW))
            with contextlib.suppress(FileExistsError):  # another rank's counts
                os.link(mine, last)
        return min(int(self), int(last.read_text())) if last.exists() else int(self)


GROUPS = {
    "data": elasticd.DataOptions,
    "parallelism": elasticd.ParallelismOptions,
    "checkpointing": elasticd.CheckpointingOptions,
}


def arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a Job, of JSON: a group of options is an object of its fields."""
    made = dict(given)
    for name in made.keys() & GROUPS.keys():
        fields = dict(made[name])
        if "packing" in fields:
            fields["packing"] = elasticd.Packing(**fields["packing"])
        if "plan" in fields:
            fields["plan"] = msgspec.convert(fields["plan"], Plan)
        made[name] = GROUPS[name](**fields)
    return made


def main() -> None:
    options = json.loads(os.environ["OPTIONS"])
    if "vgpu" in options:
        vgpu.load()
        if options["vgpu"] == "strict":
            strict_process_group.take_place(options.get("drill"))
    if options.get("gpu") == "nccl":
        where = f"{os.environ['ELASTICD_SOCKET']} {os.environ['LOCAL_RANK']}"
        shared_gpu.take_place(where, options.get("drill"))
    out = Path(options["out"])
    body = options["fail"] if options.get("fail", ("", 0, ""))[0] == "body" else None
    if "die_at" in options:
        die_at(options["die_at"])
    if "refuse" in options:
        refuse(options["refuse"])
    if "graphs" in options:  # what makes code of graphs
        compiled_blocks.BACKEND = options["graphs"]
    if "round" in options:  # bytes of one: a tiny model, too, moves in several
        moves.migrate = partial(moves.migrate, limit=options["round"])
    with torch.device("meta"):
        model = Decoder(replace(CONFIG, layers=options.get("layers", CONFIG.layers))).describe()
    job = elasticd.Job(
        model=model,
        loss=failing(*options["fail"]) if "fail" in options and not body else next_token_loss,
        optimizer=optimizer,
        dataset=Known() if "packing" in options.get("job", {}).get("data", {}) else Text(),
        global_batch=options.get("global_batch", BATCH),
        micro_batch=options.get("micro_batch", MICRO),
        seed=SEED,
        clip=CLIP,
        scheduler=scheduler,
        **arguments(options.get("job", {})),
    )
    with (out / f"ledger-{job.device.replace('/', ':')}").open("w") as ledger:
        for step in job.steps(Steps(options["steps"], out)):
            if "graphs" in options:
                note_graphs(out, job.device, step.plan)
            if job.rank == 0:
                line = {"step": step.index, "loss": step.loss, "samples": step.samples, "plan": step.plan}
                ledger.write(json.dumps(line) + "\n")
                ledger.flush()
            if step.index == options.get("fail_after") and job.device == "b/0":
                raise ValueError("the body of the loop is bad")
            if body is not None and body[1] in step.samples:
                raise ValueError(f"sample {body[1]} is bad, at {hex(id(step))}")
    weights = {name: (box.start, box.stop, value.cpu()) for name, (box, value) in job.parameters().items()}
    if weights:
        torch.save(weights, out / f"weights-{job.device.replace('/', ':')}")
    if "vgpu" in options:
        assert not (noted := vgpu.settled_errors()), noted
        assert not strict_process_group.wrong, strict_process_group.wrong


class Plain:
    """The same in one process of plain torch, on whatever samples."""

    def __init__(self, config: DecoderConfig = CONFIG) -> None:
        self.model = Decoder(config)
        first = self.model.describe().first_value
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(first(name, Box.whole(parameter.shape), SEED))
        self._update = optimizer(self.model.named_parameters())
        self._rates = scheduler(self._update)

    def step(self, samples: Iterable[int]) -> float:
        """Trains one step on these; its loss."""
        batch = pad([Text()[i] for i in samples])
        total, count = next_token_loss(self.model(batch), batch)
        self._update.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._update.step()
        self._rates.step()
        return float(total.detach()) / count


def reference(steps: int, config: DecoderConfig = CONFIG) -> tuple[list[float], dict[str, torch.Tensor]]:
    """By plain torch: the loss of every step, and the final weights."""
    plain, sampler = Plain(config), Sampler(size=len(Text()), global_batch=BATCH, seed=SEED)
    losses = [plain.step(sampler.samples(step)) for step in range(steps)]
    return losses, {name: parameter.detach() for name, parameter in plain.model.named_parameters()}


if __name__ == "__main__":
    main()
