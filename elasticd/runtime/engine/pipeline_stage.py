"""One device's part of a pipeline: forward and backward of the micro-batches that pass through its stage.

Sections are separated in the autograd graph, so that each one's backward pass is run, timed and paced by
itself, and its gradients can be reduced while those before it are still made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from elasticd_planner.cost.schedule import Pass
from elasticd_planner.spec.batch import MicroBatch
from elasticd_planner.spec.plan import Plan
from torch import Tensor, nn

from elasticd.runtime.comm.groups import Group
from elasticd.runtime.data.loader import Loader
from elasticd.runtime.data.prefetch import SampleError
from elasticd.runtime.data.sample_ledger import hash_samples
from elasticd.runtime.engine.activation_checkpoint import again_in
from elasticd.runtime.engine.mixed_precision import Precision
from elasticd.runtime.engine.p2p import After, Before, Lane
from elasticd.runtime.engine.pipeline_schedule import Schedule, all_forward, one_forward_one_backward
from elasticd.runtime.model.rng import Drawing
from elasticd.runtime.telemetry.comm_timer import Stopwatch
from elasticd.runtime.telemetry.step_times import Telemetry
from elasticd.wire.main_thread import BACKWARD, FORWARD, LOSS

Loss = Callable[[Tensor, Any], tuple[Tensor, int]]
#: (kind of pass, tokens, share, when it began, seconds of communication in it): sleeps on emulated devices, and
#: says when the pass ended.
Pace = Callable[[str, int, float, float, float], float]

#: Receives are posted this many passes before they are waited for.
AHEAD = 2


@dataclass
class _Passage:
    """What one micro-batch leaves on a chunk of a stage between its forward and its backward pass."""

    tokens: int
    ids: Sequence[int]
    segments: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    loss: Tensor | None = None
    targets: int = 0


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Consecutive sections that a micro-batch passes through in one turn, and what is before and after them: a
    stage has one, in an interleaved pipeline several."""

    modules: dict[str, nn.Module]
    before: Before | None
    after: After | None

    @cached_property
    def blocks(self) -> dict[str, nn.Module]:
        return {name: module for name, module in self.modules.items() if name.startswith("blocks.")}


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

    talks: members of a TP group communicate in every block. again: blocks that make their activations again
    whatever the plan says. precision: what the modules compute in, if it is said. ready: called with each
    section once the last micro-batch's backward pass has left it. most_alive: micro-batches whose activations
    were held at once. reads: samples are read here."""

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
        again: Collection[int] = (),
        precision: Precision | None = None,
    ) -> None:
        self._drawing, self._loss, self._loader = drawing, loss, loader
        self._telemetry, self._stopwatch, self._pace, self._ready = telemetry, stopwatch, pace, ready
        self._schedule, self._precision, self._scale = schedule, precision, 1.0
        place = plan.places[device]
        pipeline = plan.pipeline(place)
        mine = pipeline.stages[place.stage]
        self._stage, self._stages, self._position = place.stage, len(pipeline.stages), place.position
        self._share, self._layers = mine.fraction(place.position), mine.layers
        self._again = again_in(mine, again, modules)

        def border(other: int) -> tuple[Group, int, list[int], bool]:
            ranks = [plan.rank(device) for device in pipeline.stages[other % self._stages].devices]
            to = [rank for j, rank in enumerate(ranks) if j % len(mine.devices) == place.position]
            return everyone, ranks[place.position % len(ranks)], to, talks or len(ranks) == 1

        def chunk(number: int) -> _Chunk:
            start, stop = mine.chunks[number]
            before: Before | None = None
            after: After | None = None
            if start > 0:
                group, source, to, proves = border(place.stage - 1)
                lane = Lane(number - (place.stage == 0), pipeline.chunks)
                before = Before(group, source, to, dtype, proves=proves, lane=lane)
            if stop < pipeline.layers:
                group, source, to, proves = border(place.stage + 1)
                lane = Lane(number, pipeline.chunks)
                after = After(group, source, to, dtype, proves=proves, lane=lane)
            names = [f"blocks.{layer}" for layer in range(start, stop)]
            names = ["embed"] * (before is None) + names + ["head"] * (after is None)
            return _Chunk(modules={name: modules[name] for name in names}, before=before, after=after)

        self._chunks = [chunk(number) for number in range(pipeline.chunks)]
        self.reads = any(chunk.before is None or chunk.after is None for chunk in self._chunks)
        self.most_alive = 0

    def run(self, micro_batches: Sequence[MicroBatch], scale: float = 1.0) -> Passed:
        """All passes of one step; gradients, those of the loss times `scale`, accumulate in the parameters."""
        self._scale = scale
        count, chunks = len(micro_batches), len(self._chunks)
        order = list(self._schedule(self._stages, self._stage, count, chunks))
        last = {at.chunk: position for position, at in enumerate(order) if at.kind == "backward"}
        alive: dict[tuple[int, int], _Passage] = {}
        received: list[int] = []
        strayed: list[int] = []
        losses: list[Tensor] = []
        tokens = targets = 0
        self._loader.take()
        for chunk in self._chunks:
            if chunk.before is not None:
                stage_before = (self._stage - 1) % self._stages
                chunk.before.begin_step(self._schedule(self._stages, stage_before, count, chunks))
        for position, (kind, index, number) in enumerate(order):
            for ahead in order[position : position + 1 + AHEAD]:
                self._post(ahead, micro_batches, alive)
            chunk = self._chunks[number]
            if kind == "forward":
                passage, counted = self._forward(index, micro_batches[index], chunk)
                if torch.is_grad_enabled():  # else there is no way back
                    alive[number, index] = passage
                    self.most_alive = max(self.most_alive, len(alive))
                if number == 0:
                    received.extend(passage.ids)
                    tokens += passage.tokens
                elif passage.ids != micro_batches[index]:
                    strayed.extend(passage.ids)  # so that the vote tells
                if passage.loss is not None and self._position == 0:
                    losses.append(passage.loss.detach())
                    targets += counted
            else:
                self._backward(index, alive.pop((number, index)), chunk, last=position == last[number])
        for chunk in self._chunks:
            for border in (chunk.before, chunk.after):
                if border is not None:
                    border.end_step()
        # What came with the activations; where the pipeline begins, what the dataset was asked for.
        asked, failure = self._loader.take()
        seen = received if self._stage else asked
        counts_tokens = self._stage == 0 and self._position == 0
        return Passed(
            loss=sum(map(float, losses)),
            count=float(targets),
            tokens=tokens if counts_tokens else 0,
            samples=hash_samples((*seen, *strayed)),
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
        if self.reads:
            self._loader.prepare([index for micro in micro_batches for index in micro])

    def _post(
        self, ahead: Pass, micro_batches: Sequence[MicroBatch], alive: dict[tuple[int, int], _Passage]
    ) -> None:
        kind, index, number = ahead
        chunk = self._chunks[number]
        if kind == "forward" and chunk.before is not None:
            chunk.before.post(index, len(micro_batches[index]))
        elif kind == "backward" and chunk.after is not None and (number, index) in alive:
            chunk.after.post(index, alive[number, index].segments[-1][2])

    def _forward(self, index: int, micro: MicroBatch, chunk: _Chunk) -> tuple[_Passage, int]:
        telemetry = self._telemetry
        ids: Sequence[int] = micro
        batch = None
        if chunk.before is None or chunk.after is None:
            with self._stopwatch.measure("input"):
                batch = self._loader.batch(micro)
        if chunk.before is None:
            telemetry.named(batch)
        self._drawing.samples = ids
        if chunk.before is not None:
            x, ids = chunk.before.activation(index, len(micro))
            telemetry.mark()
        else:
            telemetry.mark()
            self._stopwatch.where.at(FORWARD)
            x = chunk.modules["embed"](self._precision.entering(batch) if self._precision else batch)
            telemetry.passed("embed")
        passage = _Passage(tokens=x.shape[0] * x.shape[1], ids=ids)
        passage.segments.append(("embed", x, x))
        if chunk is self._chunks[0]:
            telemetry.worked(passage.tokens, self._layers, self._share, x.shape[1])
        start = time.perf_counter()
        for section, module in chunk.blocks.items():
            communicated = self._stopwatch.read("tensor")
            x = self._segment(passage, section, module, x)
            start = self._end_pace("forward", passage.tokens, start, communicated)
        telemetry.passed("forward")
        counted = 0
        if chunk.after is None:
            logits = self._segment(passage, "head", chunk.modules["head"], x)
            logits = self._precision.leaving(logits) if self._precision else logits
            self._stopwatch.where.at(LOSS)
            with self._drawing.keyed("loss"):  # every member of the last stage computes it
                passage.loss, counted = self._loss(logits, batch)
            passage.targets = counted
            if not counted:  # a loss that was made of a mean is NaN here
                passage.loss = torch.zeros_like(passage.loss)
            telemetry.passed("head")
        else:
            chunk.after.send_activation(index, x.detach(), ids)
        return passage, counted

    def _segment(self, passage: _Passage, section: str, module: nn.Module, x: Tensor) -> Tensor:
        self._stopwatch.where.at(FORWARD)
        entered = x.detach().requires_grad_()
        out: Tensor = self._again[section].forward(entered) if section in self._again else module(entered)
        passage.segments.append((section, entered, out))
        return out

    def _backward(self, index: int, passage: _Passage, chunk: _Chunk, *, last: bool) -> None:
        """`last`: all gradients that this device adds to a section are there when the pass leaves it."""
        telemetry, where = self._telemetry, self._stopwatch.where
        where.at(BACKWARD)
        self._drawing.samples = passage.ids
        first, *rest = passage.segments
        grad: Tensor | None = None
        if passage.loss is not None:
            section, entered, out = rest.pop()
            telemetry.mark()
            self._drawing.forget(section)  # torch.utils.checkpoint inside may pass forward again
            if passage.targets:
                torch.autograd.backward(passage.loss, torch.full_like(passage.loss, self._scale))
            else:  # no sample of it has a target: nothing is added to any gradient
                torch.autograd.backward(out, torch.zeros_like(out))
            telemetry.passed("head")
            grad = entered.grad
            if last:
                self._ready(section)
                telemetry.mark()
        else:
            assert chunk.after is not None
            grad = chunk.after.gradient(index, rest[-1][2])
            telemetry.mark()
        start = time.perf_counter()
        while rest:
            section, entered, out = rest.pop()
            where.at(BACKWARD)
            if section in self._again:
                communicated = self._stopwatch.read("tensor")
                out = self._again[section].again(entered)
                start = self._end_pace("forward", passage.tokens, start, communicated)
                telemetry.passed("again")
            communicated = self._stopwatch.read("tensor")
            self._drawing.forget(section)
            torch.autograd.backward(out, grad)
            start = self._end_pace("backward", passage.tokens, start, communicated)
            grad = entered.grad
            if last or self._again or not rest:
                telemetry.passed("backward")
            if last:
                self._ready(section)
                start = time.perf_counter()
                telemetry.mark()
        assert grad is not None
        if chunk.before is not None:
            chunk.before.send_gradient(index, grad)
            return
        if first[2].requires_grad:  # it may be frozen
            self._drawing.forget(first[0])
            torch.autograd.backward(first[2], grad)
            telemetry.passed("embed")
        if last:
            self._ready("embed")

    def _end_pace(self, kind: str, tokens: int, start: float, communicated: float) -> float:
        return self._pace(kind, tokens, self._share, start, self._stopwatch.read("tensor") - communicated)
