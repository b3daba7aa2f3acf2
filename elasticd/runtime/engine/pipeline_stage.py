"""The forward and backward passes of one device: the micro-batches of a step through its stage of a pipeline.

Sections (embedding, blocks, head) are separated in the autograd graph. So the backward pass of each is run,
timed and paced by itself, and its gradients can be reduced while those of the sections before it are still
being computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from elasticd_planner.cost.schedule import Pass
from elasticd_planner.spec.batch import MicroBatch
from elasticd_planner.spec.plan import Plan
from torch import Tensor, nn

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.groups import Group
from elasticd.runtime.data.loader import Loader
from elasticd.runtime.data.prefetch import SampleError
from elasticd.runtime.data.sample_ledger import hash_samples
from elasticd.runtime.engine.activation_checkpoint import recomputed_blocks
from elasticd.runtime.engine.mixed_precision import converted
from elasticd.runtime.engine.p2p import Channel, NextStage, PrevStage
from elasticd.runtime.engine.recipe import Loss, Recipe
from elasticd.runtime.model.local_model import LocalModel
from elasticd.runtime.model.model import Model
from elasticd.runtime.telemetry.step_times import Telemetry
from elasticd.wire.main_thread import BACKWARD, FORWARD, LOSS

#: (kind of pass, tokens, share of the TP group, time at its begin, seconds of communication in it) -> time at
#: its end. On an emulated device it sleeps.
Pace = Callable[[str, int, float, float, float], float]

_Stage = TypeVar("_Stage", PrevStage, NextStage)

#: Receives are posted this many passes before they are waited for.
AHEAD = 2


@dataclass
class _MicroBatchState:
    """What the backward pass of a micro-batch through a chunk needs of its forward pass."""

    tokens: int
    ids: Sequence[int]  #: of its samples, as they came with the activation
    segments: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  #: section, its input, its output
    loss: Tensor | None = None  #: sum over targets; None: not the last stage
    targets: float | Tensor = 0


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Consecutive sections that a micro-batch passes through at once; an interleaved stage has several."""

    modules: dict[str, nn.Module]  #: by section
    before: PrevStage | None  #: None: the chunk begins with the embedding
    after: NextStage | None  #: None: the chunk ends with the head

    @cached_property
    def blocks(self) -> dict[str, nn.Module]:
        """The blocks by section, without embedding and head."""
        return {name: module for name, module in self.modules.items() if name.startswith("blocks.")}


def _chunks(
    model: Model, plan: Plan, modules: Mapping[str, nn.Module], everyone: Group, accelerator: Accelerator
) -> list[_Chunk]:
    """The chunks of this device's stage in their order, each with its connections to the adjacent stages."""
    place = plan.places[everyone.me]
    pipeline, stage = plan.pipeline(place), plan.stage(place)

    def neighbour(kind: type[_Stage], other: int, chunk: int) -> _Stage:
        ranks = [plan.rank(device) for device in pipeline.stages[other % len(pipeline.stages)].devices]
        to = [rank for j, rank in enumerate(ranks) if j % len(stage.devices) == place.position]
        proven = model.spec.collectives > 0 or len(ranks) == 1  # else members do not communicate in every block
        source, channel = ranks[place.position % len(ranks)], Channel(chunk, pipeline.chunks)
        return kind(
            everyone, source, to, model.dtype, accelerator, implies_all_received=proven, channel=channel
        )

    chunks = []
    for number, (start, stop) in enumerate(stage.chunks):
        before = neighbour(PrevStage, place.stage - 1, number - (place.stage == 0)) if start > 0 else None
        after = neighbour(NextStage, place.stage + 1, number) if stop < pipeline.layers else None
        names = [f"blocks.{layer}" for layer in range(start, stop)]
        names = ["embed"] * (before is None) + names + ["head"] * (after is None)
        chunks.append(_Chunk(modules={name: modules[name] for name in names}, before=before, after=after))
    return chunks


def _total(values: Sequence[float | Tensor]) -> float | Tensor:
    """The sum in double precision; on the device, if the values lie there."""
    there = [each for each in values if isinstance(each, Tensor) and each.device.type != "cpu"]
    if there and len(there) == len(values):
        return torch.stack(there).double().sum()
    return float(sum(map(float, values)))


def _none(counted: float | Tensor) -> bool:
    """Whether a micro-batch has no target, as far as the host knows: it does not wait for a device's count."""
    return not isinstance(counted, Tensor) and not counted


def all_forward(stages: int, stage: int, micro_batches: int, chunks: int) -> Iterator[Pass]:
    """The passes of an evaluation: a `Schedule`."""
    for chunk in range(chunks):
        for index in range(micro_batches):
            yield Pass("forward", index, chunk)


@dataclass(frozen=True, kw_only=True)
class Passed:
    """The forward and backward passes of a step on one rank."""

    loss: float | Tensor  #: sum over targets, perhaps still on the device; 0 on ranks that compute no loss
    count: float | Tensor  #: targets, likewise; 0 on ranks that compute no loss
    tokens: int  #: counted where the pipeline begins, else 0
    samples: int  #: hash of the sample ids that were seen
    failure: SampleError | None = None  #: a sample that could not be read here; another one stood in for it


class StageRunner:
    """Runs the micro-batches of a step through the sections of one device."""

    reads: bool  #: whether samples are read on this device
    most_alive: int  #: the largest number of micro-batches whose activations were held at once

    def __init__(
        self,
        *,
        recipe: Recipe,
        plan: Plan,
        local: LocalModel,
        everyone: Group,
        telemetry: Telemetry,
        pace: Pace,
        on_section_done: Callable[[str], None],
    ) -> None:
        """
        Args:
            recipe: of the job; its feed and `collate` make the batches.
            plan: the plan in force.
            local: this device's part of the model.
            everyone: the group of all members of the plan. Its stopwatch measures waits, and publishes where
                the main thread is.
            telemetry: measures passes.
            pace: called after every pass of a block; slows an emulated device down.
            on_section_done: called with a section when all gradients that this device adds to it are there.
        """
        self._drawing, self._loss, self._loader = (
            local.drawing,
            recipe.loss,
            Loader(recipe.feed, recipe.data.collate),
        )
        self._telemetry, self._stopwatch, self._pace = telemetry, everyone.plan_groups.stopwatch, pace
        self._on_section_done = on_section_done
        self._schedule, self._precision, self._scale = recipe.schedule, recipe.precision, 1.0
        self._accelerator = recipe.accelerator
        place = plan.places[everyone.me]
        stage = plan.stage(place)
        self._stage, self._position = place.stage, place.position
        self._stages = len(plan.pipeline(place).stages)
        self._share, self._layers = stage.fraction(place.position), stage.layers
        self._recomputed = recomputed_blocks(stage, recipe.recomputed, local.modules)
        self._chunks = _chunks(recipe.model, plan, local.modules, everyone, recipe.accelerator)
        self.reads = any(chunk.before is None or chunk.after is None for chunk in self._chunks)
        self.most_alive = 0

    def run(self, micro_batches: Sequence[MicroBatch], scale: float = 1.0) -> Passed:
        """All passes of one step. Gradients accumulate in the parameters.

        Args:
            micro_batches: sample ids of each micro-batch of this pipeline.
            scale: the gradients are those of the loss times this.
        """
        self._scale = scale
        count, chunks = len(micro_batches), len(self._chunks)
        order = list(self._schedule(self._stages, self._stage, count, chunks))
        last = {at.chunk: position for position, at in enumerate(order) if at.kind == "backward"}
        alive: dict[tuple[int, int], _MicroBatchState] = {}
        received: list[int] = []
        unexpected_ids: list[int] = []
        losses: list[Tensor] = []
        counts: list[float | Tensor] = []
        tokens = 0
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
                state, counted = self._forward(index, micro_batches[index], chunk)
                if torch.is_grad_enabled():  # else there is no backward pass
                    alive[number, index] = state
                    self.most_alive = max(self.most_alive, len(alive))
                if number == 0:
                    received.extend(state.ids)
                    tokens += state.tokens
                elif state.ids != micro_batches[index]:
                    unexpected_ids.extend(state.ids)  # so that the vote reports them
                if state.loss is not None and self._position == 0:
                    losses.append(state.loss.detach())
                    counts.append(counted)
            else:
                self._backward(index, alive.pop((number, index)), chunk, last=position == last[number])
        for chunk in self._chunks:
            for border in (chunk.before, chunk.after):
                if border is not None:
                    border.end_step()
        # Ids that came with activations; on the first stage, ids that the dataset was asked for.
        asked, failure = self._loader.take()
        seen = received if self._stage else asked
        counts_tokens = self._stage == 0 and self._position == 0
        return Passed(
            loss=_total(losses),
            count=_total(counts),
            tokens=tokens if counts_tokens else 0,
            samples=hash_samples((*seen, *unexpected_ids)),
            failure=failure,
        )

    def forward(self, micro_batches: Sequence[MicroBatch], loader: Loader, loss: Loss) -> Passed:
        """The forward passes alone, of samples of another dataset, without gradients.

        Args:
            micro_batches: sample ids of each micro-batch of this pipeline.
            loader: makes batches of that dataset.
            loss: called with each output instead of the loss of the training.
        """
        mine = self._loader, self._loss, self._schedule
        self._loader, self._loss, self._schedule = loader, loss, all_forward
        try:
            with torch.no_grad():
                return self.run(micro_batches)
        finally:
            self._loader, self._loss, self._schedule = mine

    def prepare(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Has the samples of these micro-batches read ahead, if this stage reads any."""
        if self.reads:
            self._loader.prepare([index for micro in micro_batches for index in micro])

    def _post(
        self, ahead: Pass, micro_batches: Sequence[MicroBatch], alive: dict[tuple[int, int], _MicroBatchState]
    ) -> None:
        kind, index, number = ahead
        chunk = self._chunks[number]
        if kind == "forward" and chunk.before is not None:
            chunk.before.post(index, len(micro_batches[index]))
        elif kind == "backward" and chunk.after is not None and (number, index) in alive:
            chunk.after.post(index, alive[number, index].segments[-1][2])

    def _forward(self, index: int, micro: MicroBatch, chunk: _Chunk) -> tuple[_MicroBatchState, float | Tensor]:
        telemetry = self._telemetry
        ids: Sequence[int] = micro
        batch = None
        if chunk.before is None or chunk.after is None:
            with self._stopwatch.measure("input"):
                batch = self._loader.batch(micro)
            if chunk.before is None:
                telemetry.named(batch)
            batch = converted(batch, self._accelerator.put)
        self._drawing.samples = ids
        if chunk.before is not None:
            x, ids = chunk.before.activation(index, len(micro))
            telemetry.mark()
        else:
            telemetry.mark()
            self._stopwatch.where.at(FORWARD)
            x = chunk.modules["embed"](self._precision.entering(batch) if self._precision else batch)
            telemetry.passed("embed")
        state = _MicroBatchState(tokens=x.shape[0] * x.shape[1], ids=ids)
        state.segments.append(("embed", x, x))
        if chunk is self._chunks[0]:
            telemetry.worked(state.tokens, self._layers, self._share, x.shape[1])
        start = time.perf_counter()
        for section, module in chunk.blocks.items():
            communicated = self._stopwatch.read("tensor")
            x = self._segment(state, section, module, x)
            start = self._end_pace("forward", state.tokens, start, communicated)
        telemetry.passed("forward")
        counted: float | Tensor = 0
        if chunk.after is None:
            logits = self._segment(state, "head", chunk.modules["head"], x)
            logits = self._precision.leaving(logits) if self._precision else logits
            self._stopwatch.where.at(LOSS)
            with self._drawing.keyed("loss"):  # every member of the last stage computes it
                state.loss, counted = self._loss(logits, batch)
            if isinstance(counted, Tensor) and counted.device.type == "cpu":
                counted = counted.item()
            state.targets = counted
            if _none(counted):  # a loss that was made of a mean is NaN here
                state.loss = torch.zeros_like(state.loss)
            telemetry.passed("head")
        else:
            chunk.after.send_activation(index, x.detach(), ids)
        return state, counted

    def _segment(self, state: _MicroBatchState, section: str, module: nn.Module, x: Tensor) -> Tensor:
        self._stopwatch.where.at(FORWARD)
        entered = x.detach().requires_grad_()
        run = self._recomputed[section].forward if section in self._recomputed else module
        out: Tensor = run(entered)
        state.segments.append((section, entered, out))
        return out

    def _backward(self, index: int, state: _MicroBatchState, chunk: _Chunk, *, last: bool) -> None:
        """One backward pass. `last`: no other one of the step goes through the chunk."""
        telemetry, where = self._telemetry, self._stopwatch.where
        where.at(BACKWARD)
        self._drawing.samples = state.ids
        first, *rest = state.segments
        grad: Tensor | None = None
        if state.loss is not None:
            section, entered, out = rest.pop()
            telemetry.mark()
            self._drawing.forget(section)  # torch.utils.checkpoint inside may pass forward again
            if _none(state.targets):  # no sample of it has a target: nothing is added to any gradient
                torch.autograd.backward(out, torch.zeros_like(out))
            else:
                torch.autograd.backward(state.loss, torch.full_like(state.loss, self._scale))
            telemetry.passed("head")
            grad = entered.grad
            if last:
                self._on_section_done(section)
                telemetry.mark()
        else:
            assert chunk.after is not None
            grad = chunk.after.gradient(index, rest[-1][2])
            telemetry.mark()
        start = time.perf_counter()
        while rest:
            section, entered, out = rest.pop()
            where.at(BACKWARD)
            if section in self._recomputed:
                communicated = self._stopwatch.read("tensor")
                out = self._recomputed[section].recompute(entered)
                start = self._end_pace("forward", state.tokens, start, communicated)
                telemetry.passed("recompute")
            communicated = self._stopwatch.read("tensor")
            self._drawing.forget(section)
            torch.autograd.backward(out, grad)
            start = self._end_pace("backward", state.tokens, start, communicated)
            grad = entered.grad
            if last or self._recomputed or not rest:
                telemetry.passed("backward")
            if last:
                self._on_section_done(section)
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
            self._on_section_done("embed")

    def _end_pace(self, kind: str, tokens: int, start: float, communicated: float) -> float:
        return self._pace(kind, tokens, self._share, start, self._stopwatch.read("tensor") - communicated)
