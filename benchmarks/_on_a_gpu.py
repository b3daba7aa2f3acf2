"""What a step costs on one GPU beside plain torch, and what it reaches: rows of `accelerators`.

    python benchmarks/_on_a_gpu.py            # on the GPU at hand
    python benchmarks/_on_a_gpu.py cpu        # tries this program, on a tiny model; says nothing of speed
    python benchmarks/_on_a_gpu.py cuda:0 mfu vote    # these figures alone

Both sides train the same decoder in bf16 on the same batches, with a fused AdamW, in turns in one process, so
that clocks and temperature are the same for both. A turn ends when the device has done all of it.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from _trained import SEED, Text, described, plan_of, sampler, stage, untied
from elasticd_planner.layout.layouts import Layouts

from elasticd.models import DecoderConfig, next_token_loss
from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.checkpoint.staging import pieces, shares, without_planes
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, MemoryWorld, unpaced
from elasticd.runtime.data.collate import pad
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.snapshot.memory_file import MemoryFile, size_of
from elasticd.runtime.telemetry.step_times import Telemetry

BF16 = torch.bfloat16
#: About 1 B parameters, and a tenth of that.
LARGE = DecoderConfig(vocabulary=32_000, width=2048, layers=16, heads=16, kv_heads=16, hidden=5632, dtype=BF16)
SMALL = DecoderConfig(vocabulary=32_000, width=768, layers=12, heads=12, kv_heads=12, hidden=2048, dtype=BF16)
TINY = DecoderConfig(vocabulary=64, width=32, layers=2, heads=4, kv_heads=4, hidden=88, dtype=BF16)
#: Dense bf16 operations a second that a GPU of this name has at most, by its maker's data sheet.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


@dataclass(frozen=True)
class Size:
    """A model, tokens of a sample, micro-batches of a step; steps of a turn, and turns."""

    config: DecoderConfig
    tokens: int
    micro_batches: int
    steps: int = 5
    turns: int = 20


@cache
def _pool() -> torch.Tensor:
    return torch.randn(1 << 22, generator=torch.Generator().manual_seed(SEED))


def quick(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """First values of the usual size, soon made: normal ones, again and again."""
    if len(shape) == 1:
        return torch.ones(shape)
    count = math.prod(shape)
    values = _pool().repeat(-(-count // len(_pool())))[:count].reshape(shape)
    return values * (0.02 if name.startswith("embed.") else 1 / math.sqrt(shape[1]))


class Ours:
    """One device of a plan."""

    def __init__(
        self, size: Size, accelerator: Accelerator, *, compiled: bool = False, fused: bool | None = None
    ) -> None:
        fused = not accelerator.immediate if fused is None else fused
        data = Text.of(size.config.vocabulary, size.tokens)
        plan = plan_of((size.micro_batches, [stage(0, size.config.layers, a0=1)]), micro_batch=1)
        recipe = Recipe(
            model=described(size.config, quick),
            loss=next_token_loss,
            optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4, fused=fused),
            dataset=data,
            global_batch=plan.global_batch,
            seed=SEED,
            clip=1.0,
            parallelism=ParallelismOptions(compile=compiled),
            accelerator=accelerator,
        )
        layouts = Layouts(recipe.model.spec, plan)
        groups = cast(PlanGroups, MemoryPlanGroups(MemoryWorld(), "a/0"))
        self.layouts, self.engine, self._next = layouts, Engine(recipe, layouts, groups, unpaced), 0
        self.engine.adopt(first_state(recipe.model, layouts, "a/0", SEED, accelerator=accelerator))

    def step(self) -> None:
        self.engine.step(self._next, lambda: 0)
        self._next += 1


class Plain:
    """A loop of plain torch."""

    def __init__(
        self, size: Size, accelerator: Accelerator, *, compiled: bool = False, fused: bool | None = None
    ) -> None:
        self._data = Text.of(size.config.vocabulary, size.tokens)
        plan = plan_of((size.micro_batches, [stage(0, size.config.layers, a0=1)]), micro_batch=1)
        self._sampler, self._next, self._device = sampler(plan, self._data), 0, accelerator.device
        with torch.device(accelerator.device):
            self.model = untied(size.config)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(quick(name, tuple(parameter.shape), torch.default_generator))
        if compiled:
            for block in self.model.blocks:
                block.compile()
        fused = not accelerator.immediate if fused is None else fused
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)

    def step(self) -> None:
        total, count = torch.zeros((), device=self._device), 0.0
        for index in self._sampler.samples(self._next):
            batch = {
                key: value.to(self._device, non_blocking=True)
                for key, value in pad([self._data[index]]).items()
            }
            loss, targets = next_token_loss(self.model(batch), batch)
            loss.backward()
            total += loss.detach()
            count = count + targets
        gradients = [parameter.grad for parameter in self.model.parameters()]
        torch._foreach_div_(gradients, count)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        float(total)  # a loop tells its loss
        self._next += 1


def in_turns(accelerator: Accelerator, size: Size, *sides: Callable[[], None]) -> list[list[float]]:
    """Seconds of a step of each side, by turn."""
    found: list[list[float]] = [[] for _ in sides]
    for turn in range(-2, size.turns):
        for side, seconds in zip(sides, found, strict=True):
            accelerator.wait()
            began = time.perf_counter()
            for _ in range(size.steps):
                side()
            accelerator.wait()
            if turn >= 0:  # kernels are loaded, and the clocks are up
                seconds.append((time.perf_counter() - began) / size.steps)
    return found


def ratio(mine: list[float], theirs: list[float]) -> tuple[float, float]:
    """The median ratio of turns beside each other, and half of what the middle half of them spans."""
    ratios = sorted(a / b for a, b in zip(mine, theirs, strict=True))
    low, high = int(len(ratios) * 0.25), max(0, int(len(ratios) * 0.75) - 1)
    return statistics.median(ratios), (ratios[high] - ratios[low]) / 2


@contextmanager
def silent() -> Iterator[None]:
    """Without telemetry's marks."""
    names = ("begin", "mark", "passed", "worked", "named")
    kept = {name: getattr(Telemetry, name) for name in names}
    for name in names:
        setattr(Telemetry, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(Telemetry, name, method)


def snapshots(ours: Ours, accelerator: Accelerator) -> Callable[[], None]:
    """A step, and the copy of all state into a memory file."""
    ours.step()
    share = shares(ours.layouts)["a/0"]
    state = ours.engine.state()
    file = MemoryFile(size_of(pieces(state, share), without_planes(state, share)), accelerator)

    def step() -> None:
        ours.step()
        file.copy(pieces(ours.engine.delivered_state(), share))

    return step


def dry(ours: Ours, accelerator: Accelerator) -> float:
    """Milliseconds that the device stands still around the vote: from the end of all that was asked of it
    before until the update's first kernel may begin; the median of some steps."""
    read, apply, gaps = accelerator.read, ours.engine.apply, []
    before, after = accelerator.event(timing=True), accelerator.event(timing=True)

    def reads(*numbers: Any, **given: Any) -> list[float]:
        before.record()
        return read(*numbers, **given)

    def applies(vote: Any) -> None:
        after.record()
        apply(vote)

    vars(accelerator)["read"], vars(ours.engine)["apply"] = reads, applies
    try:
        for _ in range(20):
            ours.step()
            accelerator.wait()
            gaps.append(before.elapsed_time(after))
    finally:
        del vars(accelerator)["read"], vars(ours.engine)["apply"]
    return statistics.median(gaps)


def to_host(accelerator: Accelerator, size: int) -> float:
    """Bytes a second into a snapshot's memory over those into memory that the driver gave."""
    values = torch.ones(size, dtype=torch.uint8, device=accelerator.device)
    file = MemoryFile(size, accelerator)
    given = torch.empty(size, dtype=torch.uint8, pin_memory=not accelerator.immediate)

    def seconds(memory: torch.Tensor) -> float:
        began = time.perf_counter()
        accelerator.to_host([(memory, values)])
        return time.perf_counter() - began

    pairs = [(seconds(given), seconds(file._raw)) for _ in range(10)][2:]
    return statistics.median(theirs / mine for theirs, mine in pairs)


def telemetry(size: Size, accelerator: Accelerator) -> tuple[float, float]:
    """A step beside one without telemetry."""
    ours, quiet = Ours(size, accelerator), Ours(size, accelerator)

    def unmeasured() -> None:
        with silent():
            quiet.step()

    return ratio(*in_turns(accelerator, size, ours.step, unmeasured))


def snapshot(size: Size, accelerator: Accelerator) -> tuple[float, float]:
    """A step with a snapshot beside one without."""
    ours, copied = Ours(size, accelerator), Ours(size, accelerator)
    return ratio(*in_turns(accelerator, size, snapshots(copied, accelerator), ours.step))


def beside_plain(size: Size, accelerator: Accelerator, compiled: bool) -> Iterator[tuple[str, Any]]:
    """A step beside plain torch's."""
    pair = Ours(size, accelerator, compiled=compiled), Plain(size, accelerator, compiled=compiled)
    mine, theirs = in_turns(accelerator, size, *(side.step for side in pair))
    if not compiled:
        yield "step", statistics.median(mine)
    yield "compiled" if compiled else "plain", ratio(mine, theirs)


def reached(size: Size, accelerator: Accelerator) -> Iterator[tuple[str, Any]]:
    """Operations a second, and how much of the device's that is."""
    ours, config = Ours(size, accelerator), size.config
    (seconds,) = in_turns(accelerator, size, ours.step)
    count = sum(parameter.numel() for _, parameter in ours.engine.local.parameters.values())
    attention = 6 * config.layers * config.width * size.tokens  # causal: half of all pairs
    flops = (6 * count + attention) * size.tokens * size.micro_batches / statistics.median(seconds)
    peak = next((value for name, value in PEAKS.items() if name in accelerator.name), None)
    yield "parameters", count
    yield "flops", flops
    yield "mfu", flops / peak if peak else None


def measured(device: str, only: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """All figures or those of these names, by their names in `accelerators`, as they come."""
    accelerator = Accelerator(device)
    accelerator.use()
    tiny = accelerator.immediate
    small = Size(TINY, 16, 2, steps=1, turns=4) if tiny else Size(SMALL, 1024, 4)
    large = Size(TINY, 16, 1, steps=1, turns=2) if tiny else Size(LARGE, 4096, 2, steps=2, turns=8)
    yield "device", accelerator.text
    yield "torch", torch.__version__
    figures: dict[str, Callable[[], Any]] = {
        "to_host": lambda: to_host(accelerator, (1 << 24) if tiny else (1 << 30)),
        "mfu": lambda: reached(large, accelerator),
        "plain": lambda: beside_plain(small, accelerator, compiled=False),
        "vote": lambda: dry(Ours(small, accelerator), accelerator),
        "compiled": lambda: beside_plain(small, accelerator, compiled=True),
        "telemetry": lambda: telemetry(small, accelerator),
        "snapshot": lambda: snapshot(small, accelerator),
    }
    for name, figure in figures.items():
        if not only or name in only:
            found = figure()
            yield from found if isinstance(found, Iterator) else ((name, found),)


if __name__ == "__main__":
    found: dict[str, Any] = {}
    began = time.perf_counter()
    for name, value in measured(sys.argv[1] if len(sys.argv) > 1 else "cuda:0", sys.argv[2:]):
        found[name] = value
        print(f"{time.perf_counter() - began:6.1f} s: {name} {value}", file=sys.stderr, flush=True)
    print(json.dumps(found))
