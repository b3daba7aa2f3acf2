"""One device's part of a pipeline: forward and backward of the micro-batches that pass through its stage.

Blocks are separated in the autograd graph, so that each one's backward pass is run, timed and paced by
itself. Between unequal TP groups each receiver has one sender: activations and their gradients are whole on
every member of a stage, so receiver j takes them from member j mod (size of the other stage).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from elasticd_planner.batch import MicroBatch
from elasticd_planner.plan import Plan
from torch import Tensor, nn

from elasticd.runtime.data import Header, Loader
from elasticd.runtime.groups import Group
from elasticd.runtime.schedule import one_forward_one_backward
from elasticd.runtime.stopwatch import Stopwatch
from elasticd.runtime.telemetry import Telemetry
from elasticd.runtime.vote import hash_samples

Loss = Callable[[Tensor, Any], tuple[Tensor, int]]
#: (kind of pass, tokens, share, when it began, seconds of communication in it): sleeps on emulated devices.
Pace = Callable[[str, int, float, float, float], None]


@dataclass
class _Passage:
    """What one micro-batch leaves on a stage between its forward and its backward pass."""

    tokens: int
    segments: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    entered: Tensor | None = None
    loss: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Passed:
    """A step's forward and backward passes on one rank. Loss sum and count are zero where none is computed."""

    loss: float
    count: float
    tokens: int
    samples: int


class StageRunner:
    """Runs the micro-batches of one step through the sections of one device."""

    def __init__(
        self,
        *,
        plan: Plan,
        device: str,
        modules: dict[str, nn.Module],
        everyone: Group,
        dtype: torch.dtype,
        loss: Loss,
        loader: Loader,
        telemetry: Telemetry,
        stopwatch: Stopwatch,
        pace: Pace,
    ) -> None:
        self._modules, self._everyone, self._dtype = modules, everyone, dtype
        self._loss, self._loader = loss, loader
        self._telemetry, self._stopwatch, self._pace = telemetry, stopwatch, pace
        place = plan.places[device]
        stages = plan.modules[place.module].pipelines[place.pipeline].stages
        self._stage, self._stages, self._position = place.stage, len(stages), place.position
        self._share = stages[place.stage].fraction(place.position)
        self._layers = stages[place.stage].layers
        self._before = [plan.rank(d) for d in stages[place.stage - 1].devices] if place.stage else []
        after = stages[place.stage + 1].devices if place.stage + 1 < len(stages) else ()
        self._after = [plan.rank(d) for d in after]
        self._size = len(stages[place.stage].devices)
        self._header = Header(plan.micro_batch)
        self.most_alive = 0

    def run(self, micro_batches: Sequence[MicroBatch]) -> Passed:
        """All passes of one step in 1F1B order; gradients accumulate in the parameters."""
        alive: dict[int, _Passage] = {}
        received: list[int] = []
        self._loader.take()
        loss = count = 0.0
        tokens = 0
        for kind, index in one_forward_one_backward(self._stages, self._stage, len(micro_batches)):
            if kind == "forward":
                alive[index], ids, counted = self._forward(index, micro_batches[index])
                self.most_alive = max(self.most_alive, len(alive))
                received.extend(ids)
                tokens += alive[index].tokens
                ended = alive[index].loss
                if ended is not None and self._position == 0:
                    loss, count = loss + float(ended.detach()), count + counted
            else:
                self._backward(index, alive.pop(index))
        # What came with the activations; where the pipeline begins, what the dataset was asked for.
        seen = received if self._before else self._loader.take()
        counts_tokens = self._stage == 0 and self._position == 0
        return Passed(loss=loss, count=count, tokens=tokens if counts_tokens else 0, samples=hash_samples(seen))

    def _forward(self, index: int, micro: MicroBatch) -> tuple[_Passage, Sequence[int], int]:
        ids: Sequence[int] = micro
        ends = not self._after
        batch = self._loader.batch(micro) if ends or not self._before else None
        if self._before:
            x, ids = self._receive_activation(index)
        else:
            with self._telemetry.compute("embed"):
                x = self._modules["embed"](batch)
        passage = _Passage(tokens=x.shape[0] * x.shape[1])
        passage.segments.append(("embed", x, x))
        self._telemetry.worked(passage.tokens, self._layers, self._share)
        for section, module in self._modules.items():
            if section.startswith("blocks."):
                with self._paced("forward", passage.tokens):
                    x = self._segment(passage, "blocks", module, x)
        counted = 0
        if ends:
            with self._telemetry.compute("head"):
                logits = self._segment(passage, "head", self._modules["head"], x)
                passage.loss, counted = self._loss(logits, batch)
        else:
            self._send_activation(index, x.detach(), ids)
        return passage, ids, counted

    @staticmethod
    def _segment(passage: _Passage, kind: str, module: nn.Module, x: Tensor) -> Tensor:
        entered = x.detach().requires_grad_()
        out: Tensor = module(entered)
        passage.segments.append((kind, entered, out))
        return out

    def _backward(self, index: int, passage: _Passage) -> None:
        first, *rest = passage.segments
        grad: Tensor | None = None
        if passage.loss is not None:
            _, entered, _ = rest.pop()
            with self._telemetry.compute("head"):
                torch.autograd.backward(passage.loss)
            grad = entered.grad
        else:
            grad = self._receive_gradient(index, rest[-1][2])
        while rest:
            _, entered, out = rest.pop()
            with self._paced("backward", passage.tokens):
                torch.autograd.backward(out, grad)
            grad = entered.grad
        assert grad is not None
        if self._before:
            self._send_gradient(index, grad)
        else:
            with self._telemetry.compute("embed"):
                if first[2].requires_grad:  # it may be frozen
                    torch.autograd.backward(first[2], grad)

    @contextmanager
    def _paced(self, kind: str, tokens: int) -> Iterator[None]:
        with self._telemetry.compute("blocks"):
            start, communicated = time.perf_counter(), self._stopwatch.read("tensor")
            yield
            self._pace(kind, tokens, self._share, start, self._stopwatch.read("tensor") - communicated)

    # -- boundaries: micro-batch m has the tags 3m (header), 3m + 1 (activation), 3m + 2 (gradient) ----------

    def _mine(self, others: Sequence[int]) -> Iterator[int]:
        """The ranks of a neighbour stage that this member sends to."""
        return (rank for j, rank in enumerate(others) if j % self._size == self._position)

    def _send_activation(self, index: int, x: Tensor, ids: Sequence[int]) -> None:
        for rank in self._mine(self._after):
            self._everyone.send(self._header.pack(x.shape, ids), rank, 3 * index)
            self._everyone.send(x.contiguous(), rank, 3 * index + 1)

    def _receive_activation(self, index: int) -> tuple[Tensor, tuple[int, ...]]:
        source = self._before[self._position % len(self._before)]
        header = self._everyone.receive(self._header.empty(), source, 3 * index)
        shape, ids = self._header.unpack(header)
        return self._everyone.receive(torch.empty(shape, dtype=self._dtype), source, 3 * index + 1), ids

    def _send_gradient(self, index: int, grad: Tensor) -> None:
        for rank in self._mine(self._before):
            self._everyone.send(grad.contiguous(), rank, 3 * index + 2)

    def _receive_gradient(self, index: int, like: Tensor) -> Tensor:
        source = self._after[self._position % len(self._after)]
        return self._everyone.receive(torch.empty_like(like), source, 3 * index + 2)
