"""The two sides of the figures of one GPU: a step of elasticd and a step of plain torch, over the same model.

Both train the same decoder on the same batches, with a fused AdamW and clipped gradients, in turns in one
process, so that clocks and temperature are the same for both. A turn ends when the device has done all of it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, cast

import torch
from _trained import SEED, Text, described, plan_of, sampler, stage, untied
from elasticd_planner.layout.layouts import Layouts
from torch import Tensor

from elasticd.models import DecoderConfig, next_token_loss
from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, MemoryWorld, unpaced
from elasticd.runtime.data.collate import pad
from elasticd.runtime.engine import compiled_blocks
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.telemetry.step_times import Telemetry

BF16 = torch.bfloat16
#: About 1 B parameters, and a tenth of that; the large one under master weights in float32.
LARGE = DecoderConfig(vocabulary=32_000, width=2048, layers=16, heads=16, kv_heads=16, hidden=5632)
SMALL = DecoderConfig(vocabulary=32_000, width=768, layers=12, heads=12, kv_heads=12, hidden=2048, dtype=BF16)
TINY = DecoderConfig(vocabulary=64, width=32, layers=2, heads=4, kv_heads=4, hidden=88)
#: Dense bf16 operations a second that a GPU of this name has at most, by its maker's data sheet.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
#: Turns before those that count: kernels are loaded, and the clocks are up.
WARM_TURNS = 2


@dataclass(frozen=True)
class Size:
    """A model, and how much of it is trained in a turn."""

    config: DecoderConfig
    tokens: int  # of a sample
    micro_batches: int  # of a step
    steps: int = 5  # of a turn
    turns: int = 20  # at most
    seconds: float = math.inf  # of all turns; four are taken at least
    masters: bool = False  # modules compute in bf16, under master weights and gradients in float32

    @property
    def computing(self) -> DecoderConfig:
        """The model in the type that it computes in."""
        return replace(self.config, dtype=BF16) if self.masters else self.config

    def operations(self) -> float:
        """Floating-point operations of a step, by torchtitan's convention: six for each parameter but those of
        the embedding and each token, and attention over all pairs of tokens."""
        config, tokens = self.config, self.tokens * self.micro_batches
        multiplied = parameters(config) - config.vocabulary * config.width
        return float((6 * multiplied + 12 * config.layers * config.width * self.tokens) * tokens)


@cache
def parameters(config: DecoderConfig) -> int:
    """Number of parameters of the model, whose head has a weight of its own."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in untied(config).parameters())


@cache
def _pool() -> Tensor:
    return torch.randn(1 << 22, generator=torch.Generator().manual_seed(SEED))


def quick(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """First values of the usual size, soon made: normal ones, again and again."""
    if len(shape) == 1:
        return torch.ones(shape)
    count = math.prod(shape)
    values = _pool().repeat(-(-count // len(_pool())))[:count].reshape(shape)
    return values * (0.02 if name.startswith("embed.") else 1 / math.sqrt(shape[1]))


class Ours:
    """One device of a plan."""

    def __init__(
        self,
        size: Size,
        accelerator: Accelerator,
        *,
        compiled: bool | Literal["chunks", "graphs"] = False,
        fused: bool | None = None,
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
            parallelism=ParallelismOptions(compile=compiled, precision="bf16" if size.masters else None),
            accelerator=accelerator,
        )
        layouts = Layouts(recipe.model.spec, plan)
        groups = cast(PlanGroups, MemoryPlanGroups(MemoryWorld(), "a/0"))
        self.layouts, self.engine, self._next = layouts, Engine(recipe, layouts, groups, unpaced), 0
        self.engine.adopt(
            first_state(recipe.model, layouts, "a/0", SEED, accelerator=accelerator, master=recipe.master)
        )

    def step(self) -> float:
        """Trains one step. Returns its loss, the mean over targets."""
        loss = self.engine.step(self._next, lambda: 0).outcome.vote.loss
        self._next += 1
        return loss


class Plain:
    """A loop of plain torch."""

    def __init__(
        self,
        size: Size,
        accelerator: Accelerator,
        *,
        compiled: bool = False,
        fused: bool | None = None,
    ) -> None:
        self.data = Text.of(size.config.vocabulary, size.tokens)
        plan = plan_of((size.micro_batches, [stage(0, size.config.layers, a0=1)]), micro_batch=1)
        self._sampler, self._next, self._device = sampler(plan, self.data), 0, accelerator.device
        with torch.device(accelerator.device):
            self.model = untied(size.computing)
        self.parameters = list(self.model.parameters())
        self._separate = size.masters
        self._masters = [p.detach().float() for p in self.parameters] if size.masters else self.parameters
        with torch.no_grad():
            for (name, parameter), master in zip(self.model.named_parameters(), self._masters, strict=True):
                values = quick(name, tuple(parameter.shape), torch.default_generator)
                master.copy_(values)
                parameter.copy_(values)
                if size.masters:
                    parameter.grad_dtype = torch.float32
        if compiled:
            for block in self.model.blocks:
                block.compile(backend=compiled_blocks.BACKEND)
        fused = not accelerator.immediate if fused is None else fused
        self.optimizer = torch.optim.AdamW(self._masters, lr=1e-4, fused=fused)

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """The micro-batches of the next step, on the host."""
        for index in self._sampler.samples(self._next):
            yield pad([self.data[index]])
        self._next += 1

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, float | Tensor]:
        """The loss of a micro-batch, summed over its targets, and their count."""
        logits = self.model(batch)
        return next_token_loss(logits.float() if self._separate else logits, batch)

    def step(self) -> float:
        """Trains one step. Returns its loss, the mean over targets."""
        total, count = torch.zeros((), device=self._device), 0.0
        for index in self._sampler.samples(self._next):
            batch = {
                key: value.to(self._device, non_blocking=True) for key, value in pad([self.data[index]]).items()
            }
            loss, targets = self.loss(batch)
            loss.backward()
            total += loss.detach()
            count = count + targets
        self.update(count)
        self.optimizer.zero_grad()
        if self._separate:
            for parameter in self.parameters:
                parameter.grad = None
        self._next += 1
        return float(total) / float(count)  # a loop tells its loss

    def update(self, count: float | Tensor) -> None:
        """Divides and clips the gradients, and updates the weights."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        torch._foreach_div_(gradients, count)
        if self._separate:
            for master, gradient in zip(self._masters, gradients, strict=True):
                master.grad = gradient
        weights = self._masters if self._separate else self.model.parameters()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        self.optimizer.step()
        if self._separate:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self._masters)


def in_turns(accelerator: Accelerator, size: Size, *steps: Callable[[], object]) -> list[list[float]]:
    """Seconds of a step of each side, by turn: as many turns as the size's seconds allow."""
    seconds: list[list[float]] = [[] for _ in steps]
    turn, ends = -WARM_TURNS, time.perf_counter() + size.seconds
    while turn < min(size.turns, 4) or (turn < size.turns and time.perf_counter() < ends):
        order = list(zip(steps, seconds, strict=True))
        for step, spent in order if turn % 2 else order[::-1]:
            accelerator.wait()
            began = time.perf_counter()
            for _ in range(size.steps):
                step()
            accelerator.wait()
            if turn >= 0:
                spent.append((time.perf_counter() - began) / size.steps)
        turn += 1
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """The median ratio of turns beside each other, and half of what the middle half of them spans."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    low, high = int(len(ratios) * 0.25), max(0, int(len(ratios) * 0.75) - 1)
    return statistics.median(ratios), (ratios[high] - ratios[low]) / 2


@contextmanager
def silent() -> Iterator[None]:
    """Without telemetry's marks."""
    names = ("begin", "mark", "passed", "worked", "named")
    methods = {name: getattr(Telemetry, name) for name in names}
    for name in names:
        setattr(Telemetry, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(Telemetry, name, method)
