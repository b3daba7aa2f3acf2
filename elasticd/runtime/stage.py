"""One device's part of a pipeline: forward and backward of the micro-batches that pass through its stage.

Sections are separated in the autograd graph, so that each one's backward pass is run, timed and paced by
itself, and its gradients can be reduced while those before it are still made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from elasticd_planner.batch import MicroBatch
from elasticd_planner.plan import Plan
from torch import Tensor, nn

from elasticd.runtime.boundary import After, Before
from elasticd.runtime.data import Loader
from elasticd.runtime.groups import Group
from elasticd.runtime.randomness import Drawing
from elasticd.runtime.reader import SampleError
from elasticd.runtime.schedule import Pass, Schedule, all_forward, one_forward_one_backward
from elasticd.runtime.stopwatch import Stopwatch
from elasticd.runtime.telemetry import Telemetry
from elasticd.runtime.vote import hash_samples

Loss = Callable[[Tensor, Any], tuple[Tensor, int]]
#: (kind of pass, tokens, share, when it began, seconds of communication in it): sleeps on emulated devices.
Pace = Callable[[str, int, float, float, float], None]

#: Receives are posted this many passes before they are waited for.
AHEAD = 2


@dataclass
class _Passage:
    """What one micro-batch leaves on a stage between its forward and its backward pass."""

    tokens: int
    ids: Sequence[int]
    segments: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    loss: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Passed:
    """A step's forward and backward passes on one rank. Loss sum and count are zero where none is computed.
    failure: a sample that could not be read here, for which another stood in."""

    loss: float
    count: float
    tokens: int
    samples: int
    failure: SampleError | None = None


class StageRunner:
    """Runs the micro-batches of one step through the sections of one device.

    talks: members of a TP group communicate in every block. ready: called with each section once the last
    micro-batch's backward pass has left it. most_alive: micro-batches whose activations were held at once."""

    def __init__(
        self,
        *,
        plan: Plan,
        device: str,
        modules: dict[str, nn.Module],
        drawing: Drawing,
        everyone: Group,
        dtype: torch.dtype,
        talks: bool,
        loss: Loss,
        loader: Loader,
        telemetry: Telemetry,
        stopwatch: Stopwatch,
        pace: Pace,
        ready: Callable[[str], None],
        schedule: Schedule = one_forward_one_backward,
    ) -> None:
        self._modules, self._drawing, self._loss, self._loader = modules, drawing, loss, loader
        self._telemetry, self._stopwatch, self._pace, self._ready = telemetry, stopwatch, pace, ready
        self._schedule = schedule
        place = plan.places[device]
        stages = plan.modules[place.module].pipelines[place.pipeline].stages
        self._stage, self._stages, self._position = place.stage, len(stages), place.position
        self._share = stages[place.stage].fraction(place.position)
        self._layers = stages[place.stage].layers
        self._before: Before | None = None
        self._after: After | None = None
        size = len(stages[place.stage].devices)

        def border(other: int) -> tuple[Group, int, list[int], bool]:
            ranks = [plan.rank(device) for device in stages[other].devices]
            mine = [rank for j, rank in enumerate(ranks) if j % size == place.position]
            return everyone, ranks[place.position % len(ranks)], mine, talks or len(ranks) == 1

        if place.stage > 0:
            group, source, mine, proves = border(place.stage - 1)
            self._before = Before(group, source, mine, dtype, proves=proves)
        if place.stage + 1 < len(stages):
            group, source, mine, proves = border(place.stage + 1)
            self._after = After(group, source, mine, proves=proves)
        self.most_alive = 0

    def run(self, micro_batches: Sequence[MicroBatch]) -> Passed:
        """All passes of one step; gradients accumulate in the parameters."""
        count = len(micro_batches)
        order = list(self._schedule(self._stages, self._stage, count))
        alive: dict[int, _Passage] = {}
        received: list[int] = []
        losses: list[Tensor] = []
        tokens = targets = 0
        self._loader.take()
        if self._before is not None:
            self._before.begin_step(self._schedule(self._stages, self._stage - 1, count))
        for position, (kind, index) in enumerate(order):
            for ahead in order[position : position + 1 + AHEAD]:
                self._post(ahead, micro_batches, alive)
            if kind == "forward":
                passage, counted = self._forward(index, micro_batches[index])
                if torch.is_grad_enabled():  # else there is no way back
                    alive[index] = passage
                    self.most_alive = max(self.most_alive, len(alive))
                received.extend(passage.ids)
                tokens += passage.tokens
                if passage.loss is not None and self._position == 0:
                    losses.append(passage.loss.detach())
                    targets += counted
            else:
                self._backward(index, alive.pop(index), last=position == len(order) - 1)
        for border in (self._before, self._after):
            if border is not None:
                border.end_step()
        # What came with the activations; where the pipeline begins, what the dataset was asked for.
        asked, failure = self._loader.take()
        seen = received if self._before else asked
        counts_tokens = self._stage == 0 and self._position == 0
        return Passed(
            loss=sum(map(float, losses)),
            count=float(targets),
            tokens=tokens if counts_tokens else 0,
            samples=hash_samples(seen),
            failure=failure,
        )

    def forward(self, micro_batches: Sequence[MicroBatch], loader: Loader, loss: Loss) -> Passed:
        """The forward passes alone, of samples of another set, without gradients. The losses and targets are
        `loss`'s own matter."""
        mine = self._loader, self._loss, self._schedule
        self._loader, self._loss, self._schedule = loader, loss, all_forward
        try:
            with torch.no_grad():
                return self.run(micro_batches)
        finally:
            self._loader, self._loss, self._schedule = mine

    def prepare(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Has the samples of these read ahead, where this stage reads any."""
        if self._before is None or self._after is None:
            self._loader.prepare([index for micro in micro_batches for index in micro])

    def _post(self, ahead: Pass, micro_batches: Sequence[MicroBatch], alive: dict[int, _Passage]) -> None:
        kind, index = ahead
        if kind == "forward" and self._before is not None:
            self._before.post(index, len(micro_batches[index]))
        elif kind == "backward" and self._after is not None and index in alive:
            self._after.post(index, alive[index].segments[-1][2])

    def _forward(self, index: int, micro: MicroBatch) -> tuple[_Passage, int]:
        ids: Sequence[int] = micro
        batch = None
        if self._before is None or self._after is None:
            with self._stopwatch.measure("input"):
                batch = self._loader.batch(micro)
        self._drawing.samples = ids
        if self._before is not None:
            x, ids = self._before.activation(index, len(micro))
        else:
            with self._telemetry.compute("embed"):
                x = self._modules["embed"](batch)
        passage = _Passage(tokens=x.shape[0] * x.shape[1], ids=ids)
        passage.segments.append(("embed", x, x))
        self._telemetry.worked(passage.tokens, self._layers, self._share, x.shape[1])
        for section, module in self._modules.items():
            if section.startswith("blocks."):
                start, communicated = time.perf_counter(), self._stopwatch.read("tensor")
                with self._telemetry.compute("forward"):
                    x = self._segment(passage, section, module, x)
                    self._end_pace("forward", passage.tokens, start, communicated)
        counted = 0
        if self._after is None:
            with self._telemetry.compute("head"):
                logits = self._segment(passage, "head", self._modules["head"], x)
                passage.loss, counted = self._loss(logits, batch)
        else:
            self._after.send_activation(index, x.detach(), ids)
        return passage, counted

    @staticmethod
    def _segment(passage: _Passage, section: str, module: nn.Module, x: Tensor) -> Tensor:
        entered = x.detach().requires_grad_()
        out: Tensor = module(entered)
        passage.segments.append((section, entered, out))
        return out

    def _backward(self, index: int, passage: _Passage, *, last: bool) -> None:
        """`last`: all gradients that this device adds to a section are there when the pass leaves it."""
        self._drawing.samples = passage.ids
        first, *rest = passage.segments
        grad: Tensor | None = None
        if passage.loss is not None:
            section, entered, _ = rest.pop()
            with self._telemetry.compute("head"):
                torch.autograd.backward(passage.loss)
            grad = entered.grad
            if last:
                self._ready(section)
        else:
            assert self._after is not None
            grad = self._after.gradient(index, rest[-1][2])
        while rest:
            section, entered, out = rest.pop()
            start, communicated = time.perf_counter(), self._stopwatch.read("tensor")
            with self._telemetry.compute("backward"):
                torch.autograd.backward(out, grad)
                self._end_pace("backward", passage.tokens, start, communicated)
            grad = entered.grad
            if last:
                self._ready(section)
        assert grad is not None
        if self._before is not None:
            self._before.send_gradient(index, grad)
            return
        with self._telemetry.compute("embed"):
            if first[2].requires_grad:  # it may be frozen
                torch.autograd.backward(first[2], grad)
        if last:
            self._ready("embed")

    def _end_pace(self, kind: str, tokens: int, start: float, communicated: float) -> None:
        self._pace(kind, tokens, self._share, start, self._stopwatch.read("tensor") - communicated)
