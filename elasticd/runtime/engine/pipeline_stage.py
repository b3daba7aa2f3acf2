"""The forward and backward passes of one device: the micro-batches of a step through its stage of a pipeline.

A pass of a chunk is one autograd graph, so that a micro-batch costs the host one backward call. Where somebody
waits for a part of it, sections (embedding, blocks, head) are separated in the graph, and the backward pass of
each is run by itself: in the last micro-batch of a step on a device that reduces gradients with others, whose
sums begin as sections end; where blocks recompute their activations; where an emulated device paces them; and
where backward passes draw random numbers, which are keyed by section. The first pass of a plan is separated,
too: it shows whether one draws, and fails where a section detaches its output.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from elasticd_planner.cost.schedule import Pass
from elasticd_planner.layout.channels import Channel
from elasticd_planner.layout.pass_order import AHEAD, Act, acts_of_rows, stage_order
from elasticd_planner.spec.batch import (
    BatchRow,
    MicroBatch,
    SequencePiece,
    ids_of,
    passes_of_rows,
    sums_wait,
)
from elasticd_planner.spec.item_batch import GroupId, SampleItem
from elasticd_planner.spec.plan import Plan
from torch import Tensor
from torch.autograd.grad_mode import set_multithreading_enabled

from elasticd.runtime.accelerator import DeviceLost, put
from elasticd.runtime.comm.communicators import Peers
from elasticd.runtime.comm.groups import Cancelled, PeerLost
from elasticd.runtime.comm.running_group import OneDevice, running
from elasticd.runtime.data.loader import Loader
from elasticd.runtime.data.prefetch import NothingRead, SampleKey
from elasticd.runtime.data.sample_ledger import (
    draws_of,
    entries,
    hash_items,
    hash_samples,
    stand_in,
    without_marks,
)
from elasticd.runtime.engine.activation_checkpoint import recomputed_blocks
from elasticd.runtime.engine.captured_passes import CapturedPasses, ChunkPasses, Entered, PassSlot
from elasticd.runtime.engine.compiled_blocks import (
    BlockCalls,
    CompiledRun,
    compile_blocks,
    settle_compiler,
    warn_of_slices,
)
from elasticd.runtime.engine.item_border import (
    ItemBorder,
    ItemSource,
    in_order_of,
    joined,
    row_count,
    row_of,
    rows_in,
)
from elasticd.runtime.engine.mixed_precision import converted
from elasticd.runtime.engine.p2p import HEADERS, NextStage, PrevStage, gradient_messages
from elasticd.runtime.engine.pass_watch import PassPacer, PassWatch
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.engine.stage_chunks import StageChunk, stage_chunks
from elasticd.runtime.engine.step_state import MicroBatchState, Passed, StepState
from elasticd.runtime.model.bundle import Bundle, Gradients, gradients, tensors, zeros
from elasticd.runtime.model.local_model import LocalModel
from elasticd.runtime.model.model import Loss, Model
from elasticd.runtime.model.rng import EVALUATION, Draws, UnseededPasses, watching
from elasticd.runtime.model.section_passes import PassPart, back_through, forth
from elasticd.runtime.model.validation import ModelError, sum_and_count
from elasticd.runtime.parallel.context_parallel import ContextParallel
from elasticd.runtime.parallel.expert_exchange import ExpertExchange
from elasticd.runtime.parallel.expert_pairs import ExpertPairs
from elasticd.runtime.parallel.packed_row import PackedRow, current_row, passing
from elasticd.runtime.parallel.router_balance import RouterBalance, sample_of
from elasticd.runtime.parallel.sequence_parallel import SequenceSlices, single
from elasticd.runtime.telemetry.step_times import CAPTURED, Telemetry
from elasticd.system.user_line import described
from elasticd.wire.main_thread import BACKWARD, FORWARD, LOSS

log = logging.getLogger(__name__)


def _context(model: Model, plan: Plan, peers: Peers) -> ContextParallel | None:
    """The exchange of this device with the other lanes of its stage; None: no sequence is cut over lanes."""
    place, me = plan.places[peers.me], peers.me
    stage = plan.pipelines[place.pipeline].stages[place.stage]
    channel = Channel("context", stage.devices)
    if channel not in peers.channels:
        return None
    return ContextParallel(model.spec, stage, me, peers.communicators.mesh(channel))


def _total(values: Sequence[float | Tensor]) -> float | Tensor:
    """The sum in double precision; on the device, if the values lie there."""
    there = [each for each in values if isinstance(each, Tensor) and each.device.type != "cpu"]
    if there and len(there) == len(values):
        return torch.stack(there).double().sum()
    return float(sum(map(float, values)))


def _none(counted: float | Tensor) -> bool:
    """Returns True if a micro-batch has no target, as far as the host knows: it does not wait for a device's
    count."""
    return not isinstance(counted, Tensor) and not counted


def under_way(acts: Iterable[Act]) -> dict[int, int]:
    """By chunk the micro-batches at most whose backward pass has still to come, as a step's acts have it."""
    now, most = Counter[int](), dict[int, int]()
    for act in acts:
        if act.what == "pass":
            now[act.chunk] += 1 if act.kind == "forward" else -1
            most[act.chunk] = max(most.get(act.chunk, 0), now[act.chunk])
    return most


def all_forward(stages: int, stage: int, micro_batches: int, chunks: int) -> Iterator[Pass]:
    """The passes of an evaluation: a `Schedule`."""
    for chunk in range(chunks):
        for index in range(micro_batches):
            yield Pass("forward", index, chunk)


class StageRunner:
    """Runs the micro-batches of a step through the sections of one device."""

    reads: bool  #: whether samples are read on this device
    calls: BlockCalls  #: with what compiled blocks were called
    loss: Loss  #: called with each output of the head, and its batch
    before_first_pass: Callable[[], None] | None  #: what is to be called before any
    most_alive: int  #: the largest number of micro-batches whose activations were held at once

    def __init__(
        self,
        *,
        recipe: Recipe,
        model: Model,
        plan: Plan,
        local: LocalModel,
        peers: Peers,
        loader: Loader,
        telemetry: Telemetry,
        pace: PassPacer,
        on_section_done: Callable[[str], None],
        sums_begin: bool = True,
        slices: SequenceSlices | None = None,
        exchange: ExpertExchange | None = None,
        pairs: ExpertPairs | None = None,
        balance: RouterBalance | None = None,
        takes: Mapping[str, ItemBorder] | None = None,
        gives: ItemSource | None = None,
    ) -> None:
        """
        Args:
            recipe: of the job.
            model: the module whose sections these are.
            plan: the plan in force, of this module.
            local: this device's part of the module.
            peers: the other members of the plan. Their stopwatch measures waits, and publishes where the
                main thread is.
            loader: makes the batches.
            telemetry: measures passes.
            pace: called after every pass of a block; slows an emulated device down.
            on_section_done: called with a section when all gradients that this device adds to it are there.
            sums_begin: it begins sums of gradients with other devices.
            slices: of the tokens that blocks are on; None: they are on all. All tokens pass between stages.
            exchange: of rows for experts that lanes share; None: each lane has all.
            pairs: the pairs of rows and experts of passes here; None: no experts are shared.
            balance: of the routers; None: nothing balances them.
            takes: of a module that takes items: by their key in the batch the border with the module that
                makes them.
            gives: of a module of items: where the outputs of its last stage go. None: it computes a loss.
        """
        self._slices, self._takes, self._of_items = slices, takes or {}, gives is not None
        self._exchange, self._balance = exchange, balance
        self._asks_targets = balance is not None and balance.asks_targets
        self._serving: dict[tuple[int, int], dict[str, Tensor]] = {}  # by chunk and row, outputs by block
        self._rows: list[PackedRow] = []  # of the micro-batches of the step; empty: they are padded
        self._at: Sequence[int] = ()  # of each micro-batch the row of the pipeline
        self._flights: tuple[object, dict[int, int]] = (None, {})  # the acts of a step, and what they hold
        #: `_orders`, and what they follow from.
        self._ordered: tuple[object, tuple[tuple[Act, ...], Sequence[Pass]]] = (None, ((), ()))
        self._made: dict[Act, list[Tensor]] = {}  # by pass what it has made for an adjacent stage
        self._own: tuple[Sequence[int], int] = ((), 0)  # which of how many rows of the pipeline they are
        self._drawing, self.loss, self._loader = local.drawing, recipe.loss, loader
        self._telemetry, self._stopwatch = telemetry, peers.everyone.plan_groups.stopwatch
        self._on_section_done, self._seed, self._sums_begin = on_section_done, recipe.seed, sums_begin
        self._loss_draws = False  # the loss draws random numbers
        self._begun: set[int] = set()  # the chunks that a backward pass has gone through
        self._schedule, self._precision, self._scale = recipe.schedule, recipe.precision, 1.0
        self._accelerator = recipe.accelerator
        place = plan.places[peers.everyone.me]
        stage = plan.stage(place)
        self._stage, self._position, self._lane = place.stage, place.position, place.lane
        self._pipeline = place.pipeline
        #: Where a stage serves other lanes' rows, all stages have the order of all lanes' rows.
        self._all_rows = plan.pipelines[place.pipeline].shares_experts
        self._trains = any(parameter.kind == "trained" for parameter in model.spec.parameters.values())
        self._stages = len(plan.pipeline(place).stages)
        self.calls, self.before_first_pass = BlockCalls(), None
        self._modules, self._compiles = local.modules, bool(recipe.parallelism.compile) and slices is None
        if self._compiles:
            compile_blocks(local.modules)
        elif recipe.parallelism.compile:
            warn_of_slices()
        self._recomputed = recomputed_blocks(stage, recipe.recomputed_in(plan.module.module), local)
        passes = local.passes | {name: block.forward for name, block in self._recomputed.items()}
        self._watch = PassWatch(
            telemetry=telemetry,
            stopwatch=self._stopwatch,
            pace=pace,
            drawing=local.drawing,
            modules=local.modules,
            recomputed=self._recomputed,
            share=stage.fraction(place.position),
            layers=stage.layers,
            slices=slices,
            pairs=pairs or ExpertPairs(model.spec),
            calls=self.calls if self._compiles else None,
            on_section_done=on_section_done,
            of_items=self._of_items,
        )
        whole = self._compiles and recipe.parallelism.compile == "chunks"
        run_of = partial(CompiledRun, local) if whole else None
        graph = recipe.model.graph
        number = 0 if graph is None else [*graph.modules].index(plan.module.module)
        tags = number * HEADERS
        self._chunks = stage_chunks(recipe, model, plan, peers, passes, self._recomputed, run_of, gives, tags)
        self._context = _context(model, plan, peers)
        alone = len(stage.devices) == 1
        lone = alone and self._context is None and exchange is None
        self._captured = self._captured_passes(recipe, local, alone=lone)
        if self._captured is not None:
            self._watch.reached = self._captured.reached
        channel = Channel("tensor", stage.devices)
        self._group = OneDevice(*stage.devices) if alone else peers.communicators.team(channel)
        self._drawing.repeats = lone
        self.reads = any(chunk.before is None or chunk.after is None for chunk in self._chunks)
        self.most_alive = 0
        for chunk in self._chunks if exchange is not None else ():
            chunk.drew()  # a pass that is made once more, with seeds, would exchange rows once more

    def _captured_passes(self, recipe: Recipe, local: LocalModel, *, alone: bool) -> CapturedPasses | None:
        """Captures the passes of a micro-batch; None: they are eager under this plan."""
        if recipe.parallelism.compile != "graphs":
            return None
        reason = ""
        if recipe.model.graph is not None:
            reason = "the model has several modules"
        elif not alone:
            reason = "members of its TP group or lanes communicate in them"
        elif self._recomputed:
            reason = "its blocks recompute"
        elif self._balance is not None:
            reason = "its routers are balanced"
        if reason:
            log.info("passes of this device are no CUDA graphs: %s", reason)
            return None
        return CapturedPasses(self._accelerator.graphs(), local.modules, sums_begin=self._sums_begin)

    def _begin_captured(self, captured: CapturedPasses, acts: Sequence[Act]) -> None:
        """Begins a step whose passes may be graphs."""
        if acts is not self._flights[0]:
            self._flights = acts, under_way(acts)
        if self._watch.draws or self._loss_draws or any(chunk.draws for chunk in self._chunks):
            captured.give_up("a pass draws random numbers, which a graph would draw once for all")
        captured.begin_step(self._flights[1], self._to_capture)

    def _to_capture(self, number: int) -> ChunkPasses | None:
        """The passes of a chunk as they are captured; None: they cannot be, now or ever."""
        chunk = self._chunks[number]
        if not self._may_replay():
            return None
        graphs = chunk.unseeded(chunk.separate)
        if graphs is None or (chunk.after is None and self._loss_draws):
            return None
        return ChunkPasses(
            graphs=graphs, loss=self.loss if chunk.after is None else None, precision=self._precision
        )

    def _may_replay(self) -> bool:
        """Returns True if passes of this step may be graphs of the device."""
        if self._watch.looks or self._rows or not self._drawing.may_leave_seeds_out:
            return False
        return torch.is_grad_enabled() and not (self._watch.paced or self._watch.draws)

    def release(self) -> None:
        """Drops the graphs that were captured, and their memory. Passes are captured anew later."""
        if self._captured is not None:
            self._captured.release()

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        scale: float = 1.0,
        rows: Sequence[BatchRow] = (),
        of_lanes: Sequence[BatchRow] = (),
    ) -> Passed:
        """All passes of one step. Gradients accumulate in the parameters.

        Args:
            micro_batches: of this lane.
            scale: the gradients are those of the loss times this.
            rows: of all lanes of the pipeline, where each micro-batch is one row of its sequences, without
                padding. Empty: samples are padded.
            of_lanes: the rows of all lanes, padded or not.
        """
        count = len(micro_batches)
        waits = sums_wait(rows, self._lane, len(self._chunks))
        together = of_lanes if self._all_rows else rows
        if self._exchange is not None:
            waits = waits or any(not all(row.lanes) for row in together)
        self._own = (self._numbers(together), len(together)) if together else (range(count), count)
        acts, before = self._orders()
        with self.running():
            self.begin(micro_batches, acts, before, scale, rows=rows, sums_wait=waits)
            for act in acts:
                self.carry_out(act)
            if (
                not self._step.order and torch.is_grad_enabled()
            ):  # a lane without a sequence in this step adds nothing
                for section in [name for chunk in reversed(self._chunks) for name in reversed(chunk.passes)]:
                    self._on_section_done(section)
            return self.end()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around passes: modules ask for the TP group, and draws are keyed."""
        # torch hands a backward pass on an accelerator to another thread, which takes longer than the pass.
        calling = nullcontext() if self._accelerator.immediate else set_multithreading_enabled(False)
        with running(self._group), self._drawing.kept(), calling:
            yield

    def begin(
        self,
        micro_batches: Sequence[MicroBatch] | Sequence[Sequence[SampleItem]],
        acts: Sequence[Act],
        before: Sequence[Pass],
        scale: float = 1.0,
        *,
        rows: Sequence[BatchRow] = (),
        sums_wait: bool = False,
    ) -> None:
        """Begins a step.

        Args:
            micro_batches: of this lane.
            acts: that will be carried out.
            before: the passes of the stage before.
            scale: the gradients are those of the loss times this.
            rows: of all lanes of the pipeline, as in `run`.
            sums_wait: sums of gradients begin after all passes.
        """
        if self.before_first_pass is not None:
            self.before_first_pass()
            self.before_first_pass = None
        if self._compiles:
            settle_compiler()
        if self._context is not None:
            self._context.begin_step()
        if self._exchange is not None:
            self._exchange.begin_step()
        self._scale = scale
        self._at = self._numbers(rows) if rows else range(len(micro_batches))
        self._rows = [self._row(rows[number].lanes) for number in self._at] if rows else []
        self._watch.packed = bool(self._rows)
        if self._balance is not None and torch.is_grad_enabled():
            self._balance.begin(scale)
        self._watch.begin_step(trains=any(act.what == "pass" and act.kind == "backward" for act in acts))
        if self._captured is not None and torch.is_grad_enabled():
            self._begin_captured(self._captured, acts)
        self._made.clear()
        self._loader.take()
        for chunk in self._chunks:
            if chunk.before is not None:
                chunk.before.begin_step(before)
            if chunk.after is not None:
                chunk.after.begin_step()
        expected = [entries(micro, packed=bool(self._rows)) for micro in micro_batches]
        step = self._step = StepState(micro_batches, expected, [act for act in acts if act.what == "pass"])
        if not sums_wait:
            step.last = {act.chunk: act for act in step.order if act.kind == "backward"}
        self._post_headers(step.order[: 1 + AHEAD], expected)

    def carry_out(self, act: Act, group: GroupId | None = None) -> None:
        """A pass, one end of a message, or a part in the pass of other lanes.

        Args:
            act: the next one of the step.
            group: of a message over a border of modules, at the module that takes items: which they are.
        """
        if act.what == "serve":
            self._serve(act)
            return
        step, index, number = self._step, act.micro_batch, act.chunk
        micro, expected, chunk = step.micro_batches[index], step.expected[index], self._chunks[number]
        if group is not None:
            self._item_message(act, group)
            return
        if act.what != "pass":
            self._message(act, micro, expected, step.alive)
            return
        with self._passing(index, micro):
            if act.kind == "backward":
                ends = act is step.last.get(number)
                self._backward(act, step.alive.pop((number, index)), chunk, last=ends)
            else:
                ends = number in step.last and step.last[number].micro_batch == index
                graphs = chunk.separate if self._separate(number, last=ends) else chunk.graphs
                try:
                    state, counted = self._forward(act, micro, expected, chunk, graphs)
                except Exception as error:
                    self._refuse_stand_in(error, index)
                    raise
        step.passed += 1
        self._post_headers(step.order[step.passed + AHEAD : step.passed + 1 + AHEAD], step.expected)
        if act.kind == "backward":
            return
        if torch.is_grad_enabled():  # else there is no backward pass
            step.alive[number, index] = state
            self.most_alive = max(self.most_alive, len(step.alive))
        if self._of_items:
            state.ids = without_marks(state.ids)
        if number == 0:
            step.received.extend(state.ids)
            step.tokens += state.tokens
        elif tuple(state.ids) != tuple(expected):
            step.unexpected.extend(state.ids)  # so that the vote reports them
        if state.loss is not None and self._position == 0:
            step.losses.append(state.loss.detach())
            step.counts.append(counted)

    def _serve(self, act: Act) -> None:
        """This device's part in the pass of a row in which its lane has no micro-batch."""
        assert self._exchange is not None
        blocks = [section for section in self._chunks[act.chunk].passes if section in self._exchange.sections]
        key = act.chunk, act.micro_batch
        if act.kind == "forward":
            self._stopwatch.where.at(FORWARD)
            outputs = self._serving[key] = {}
            for section in blocks:
                again = section in self._recomputed
                with torch.no_grad() if again else nullcontext():
                    outputs[section] = self._exchange.serve(section)
            if not torch.is_grad_enabled():
                del self._serving[key]
            return
        self._stopwatch.where.at(BACKWARD)
        outputs = self._serving.pop(key)
        for section in reversed(blocks):
            out = self._exchange.serve(section) if section in self._recomputed else outputs.pop(section)
            if out.requires_grad:
                out.backward(torch.zeros_like(out))

    def end(self) -> Passed:
        """Ends a step all of whose acts were carried out."""
        step = self._step
        for chunk in self._chunks:
            for border in (chunk.before, chunk.after):
                if border is not None:
                    border.end_step()
        # Ids that came with activations; on the first stage, ids that the dataset was asked for.
        asked, failure = self._loader.take()
        seen = step.received if self._stage else asked
        counts_tokens = self._stage == 0 and self._position == 0
        return Passed(
            loss=_total(step.losses),
            count=_total(step.counts),
            tokens=step.tokens if counts_tokens else 0,
            samples=(hash_items if self._of_items else hash_samples)((*seen, *step.unexpected)),
            balance=self._balance.value if self._balance is not None and self._position == 0 else 0.0,
            failure=failure,
        )

    def _numbers(self, rows: Sequence[BatchRow]) -> Sequence[int]:
        """The rows of which this lane has a part."""
        return [number for number, row in enumerate(rows) if row.lanes[self._lane]]

    def _row(self, lanes: Sequence[MicroBatch]) -> PackedRow:
        """This lane's part of a row. What it lacks of sequences that are cut comes from the other lanes."""
        mine = lanes[self._lane]
        cut = self._context is not None and any(piece.tokens < piece.length for piece in mine)
        exchange = self._context.row(lanes) if self._context is not None and cut else None
        return PackedRow(mine, self._accelerator.device, exchange)

    def _order(self, stage: int) -> list[Pass]:
        """The passes of a stage of this lane. Lanes pass the rows that they share in one order, that of all."""
        mine, rows = self._own
        order = self._schedule(self._stages, stage, rows, len(self._chunks))
        return [Pass(*each) for each in passes_of_rows(order, mine)]

    def _orders(self) -> tuple[tuple[Act, ...], Sequence[Pass]]:
        """The acts of this stage in a step, in its order, and the passes of the stage before in its own."""
        mine, rows = self._own
        key = self._schedule, tuple(mine), rows
        if self._ordered[0] != key:  # most steps are like the one before
            acts = acts_of_rows(
                stage_order(self._schedule, self._stages, self._stage, rows, len(self._chunks)),
                mine,
                serves=self._exchange is not None,
            )
            self._ordered = key, (tuple(acts), self._order((self._stage - 1) % self._stages))
        return self._ordered[1]

    def forward(
        self,
        micro_batches: Sequence[MicroBatch],
        loader: Loader,
        loss: Loss,
        rows: Sequence[BatchRow] = (),
        of_lanes: Sequence[BatchRow] = (),
    ) -> Passed:
        """The forward passes alone, of samples of another dataset, without gradients.

        Args:
            micro_batches: of this lane.
            loader: makes batches of that dataset.
            loss: called with each output instead of the loss of the training.
            rows, of_lanes: as in `run`.
        """
        with self.evaluating(loader, loss):
            return self.run(micro_batches, rows=rows, of_lanes=of_lanes)

    @contextmanager
    def evaluating(self, loader: Loader, loss: Loss) -> Iterator[None]:
        """Inside, passes are forward ones alone, of samples of another dataset. Arguments of `forward`."""
        self._drawing.begin(self._seed, EVALUATION)  # a rank that has just joined has made no step
        mine = self._loader, self.loss, self._schedule
        self._loader, self.loss, self._schedule = loader, loss, all_forward
        try:
            with torch.no_grad():
                yield
        finally:
            self._loader, self.loss, self._schedule = mine
            self._telemetry.forget()

    def prepare(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Has the samples of these micro-batches read ahead, if this stage reads any."""
        if self.reads:
            self._loader.prepare([piece.sample for micro in micro_batches for piece in micro])

    def keys_of(self, pieces: Iterable[SequencePiece | SampleItem]) -> list[SampleKey]:
        """The samples, or parts of samples, that are read for them."""
        return [self._loader.key(piece.sample) for piece in pieces]

    def reads_in(self, act: Act) -> bool:
        """Returns True if a forward pass reads samples here."""
        chunk = self._chunks[act.chunk]
        return chunk.before is None or chunk.after is None

    def _passing(self, index: int, micro: MicroBatch) -> AbstractContextManager[None]:
        """A pass of a micro-batch: modules ask for its row, and dropouts for its samples."""
        row = self._rows[index] if self._rows else None
        self._drawing.samples = draws_of(micro)
        self._drawing.tokens = None if row is None else (row.sample_of_token, row.positions)
        return passing(row)

    def _post_headers(self, passes: Iterable[Act], expected: Sequence[Sequence[int]]) -> None:
        for ahead in passes:
            before = self._chunks[ahead.chunk].before
            if ahead.kind == "forward" and before is not None:
                before.post(ahead.micro_batch, len(expected[ahead.micro_batch]))

    def _message(
        self, act: Act, micro: MicroBatch, ids: Sequence[int], alive: Mapping[tuple[int, int], MicroBatchState]
    ) -> None:
        """Launches one end of a message."""
        index, chunk = act.micro_batch, self._chunks[act.chunk]
        forth = act.kind == "forward"
        neighbour = chunk.after if forth == (act.what == "send") else chunk.before
        assert neighbour is not None
        if act.what == "send":
            neighbour.send(index, self._made.pop(act._replace(what="pass")))
        elif not forth:
            assert not isinstance(neighbour, PrevStage)
            waiting = alive[act.chunk, index]
            out = waiting.output
            sent = out if chunk.ends_with_head else self._like(out, waiting)
            if self._asks_targets and isinstance(neighbour, NextStage):
                neighbour.post(index, sent, len(draws_of(micro)))
            else:
                neighbour.post(index, sent)
        else:
            assert isinstance(neighbour, PrevStage)
            if chunk.after is None:
                self._read(act, micro, chunk)  # while the activation is on its way
            neighbour.receive(index, len(ids))

    def _item_message(self, act: Act, group: GroupId) -> None:
        """Launches one end of a message, at the module that takes items."""
        border = next(each for each in self._takes.values() if group in each.groups)
        if act.what == "receive":
            border.receive(group)
        else:
            leaf = self._step.taken.pop(group)
            border.send_back(group, leaf, gradients(leaf))

    def _with_items(self, state: MicroBatchState, index: int, micro: MicroBatch, batch: Any) -> Any:
        """The batch with what other modules made of the items of its samples, in the order of the samples and
        of the items of each: [rows, ...], or named tensors of that shape; of parts of samples the rows at their
        tokens. None: there are none."""
        outputs: dict[str, Bundle | None] = {}
        for name, border in self._takes.items():
            parts: list[tuple[SampleItem, Bundle]] = []
            for key in border.needed(self._pipeline, self._lane, self._at[index]):
                leaf, ids = border.activation(key)
                if ids != (expected := border.expected(key)):
                    if ids == stand_in(expected):
                        self._step.stood_in.add(index)
                    else:
                        self._step.unexpected.extend(ids)  # so that the vote reports them
                if border.trained:
                    state.items[key] = leaf
                for place, item in enumerate(border.groups[key].items):
                    parts.append((item, row_of(leaf, place)))
            by_sample = in_order_of(ids_of(micro), parts)
            if index in self._step.stood_in:
                continue
            if self._loader.refuse_rows(name, list(map(row_count, by_sample)), micro):
                self._step.stood_in.add(index)
                continue
            if self._rows and (rows := self._loader.item_rows.get(name)):
                by_sample = [rows_in(own, places.spans) for own, places in zip(by_sample, rows, strict=True)]
            outputs[name] = joined([*chain.from_iterable(by_sample)])
        if index in self._step.stood_in:
            # What stands in for the text, or for an item, does not fit the rest. The vote drops the step.
            outputs = dict.fromkeys(self._takes)
        return {**batch, **outputs}

    def _read(self, act: Act, micro: MicroBatch, chunk: StageChunk) -> None:
        """Reads the batch of a pass."""
        with self._stopwatch.measure("input"):
            batch = self._loader.batch(micro, packed=bool(self._rows))
        if self._loader.stood_in:
            self._step.stood_in.add(act.micro_batch)
        if chunk.before is None:
            self._telemetry.named(batch)
        self._step.batches[act.chunk, act.micro_batch] = converted(batch, self._accelerator.put)

    def _separate(self, number: int, *, last: bool) -> bool:
        """Returns True if each section of a pass is to be an autograd graph by itself.

        Args:
            number: the chunk's.
            last: no other backward pass of the step goes through it.
        """
        if not torch.is_grad_enabled() or number not in self._begun:
            return True
        watch = self._watch
        return watch.paced or watch.draws or self._drawing.drew is not None or (last and self._sums_begin)

    def _forward(
        self,
        act: Act,
        micro: MicroBatch,
        expected: Sequence[int],
        chunk: StageChunk,
        graphs: list[list[PassPart]],
    ) -> tuple[MicroBatchState, float | Tensor]:
        telemetry, index = self._telemetry, act.micro_batch
        state = MicroBatchState(ids=expected)
        self._watched(state, micro, chunk)
        if chunk.before is None:
            self._read(act, micro, chunk)
        batch: Any = self._step.batches.pop((act.chunk, index), None)
        x: Any = batch
        if chunk.before is not None:
            x, state.ids = chunk.before.activation(index)
            telemetry.mark()
            state.received = x = self._cut(x)
            self._watch.entered(x)
        else:
            if self._takes:
                x = self._with_items(state, index, micro, batch)
            if self._of_items and index in self._step.stood_in:
                state.ids = stand_in(expected)
            telemetry.mark()
        if self._captured is not None:
            state.entered = Entered(
                () if batch is None else batch, () if state.received is None else state.received
            )
            if self._replay(state, act, chunk):
                return state, state.targets
        if chunk.before is None:
            x = self._precision.entering(x) if self._precision else x
        x = self._computed(state, chunk, graphs, x, batch)
        if chunk.after is None:
            telemetry.passed("head")
        else:
            telemetry.passed("head" if chunk.ends_with_head else "forward")
            x = x if chunk.ends_with_head else self._joined(x)
            self._leaves(act, chunk, x, state.ids)
        return state, state.targets

    def _refuse_stand_in(self, error: Exception, index: int) -> None:
        """Raises NothingRead where a forward pass failed after a sample of the step could not be read, here or
        where its items are encoded: what stands in for it may not go through the model."""
        failure = self._loader.failure
        failed = failure is not None or index in self._step.stood_in
        if failed and not isinstance(error, Cancelled | PeerLost | DeviceLost | NothingRead):
            what = failure or "items of this micro-batch could not be read: see the output of other devices"
            raise NothingRead(
                f"{what}; what stands in for it does not go through the model: {described(error)}"
            ) from (failure or error)

    def _replay(self, state: MicroBatchState, act: Act, chunk: StageChunk) -> bool:
        """A forward pass as one graph of the device. Returns False where it is to be eager."""
        assert self._captured is not None
        if not self._may_replay():
            return False
        self._stopwatch.where.at(FORWARD)
        replayed = self._captured.forward(act.chunk, state.entered)
        if replayed is None:
            return False
        slot, worked = replayed
        state.slot = slot
        self._telemetry.passed(CAPTURED)
        if state.received is None:
            self._watch.count(*worked)
        if chunk.after is None:
            state.loss = slot.output.clone()
            state.targets = slot.count.clone() if isinstance(slot.count, Tensor) else slot.count
        else:
            self._leaves(act, chunk, slot.output.clone(), state.ids)
        return True

    def _leaves(self, act: Act, chunk: StageChunk, x: Bundle, ids: Sequence[int]) -> None:
        """The output of a chunk goes to the next stage."""
        assert chunk.after is not None
        chunk.after.announce(act.micro_batch, x, ids)
        self._made[act] = [tensor.detach() for tensor in tensors(x)]

    def _watched(self, state: MicroBatchState, micro: MicroBatch, chunk: StageChunk) -> None:
        """Says whose the passes from here on are."""
        watch = self._watch
        watch.state, watch.micro, watch.first = state, micro, chunk is self._chunks[0]
        watch.training = self._modules[next(iter(chunk.passes))].training

    def _computed(
        self, state: MicroBatchState, chunk: StageChunk, graphs: list[list[PassPart]], x: Any, batch: Any
    ) -> Bundle:
        """The sections of a forward pass, and the loss behind a head. Where none of them draws random numbers,
        none has a seed. Whether the loss draws, the first steps of a training show.

        Returns:
            The output of the last section.
        """
        self._stopwatch.where.at(FORWARD)
        ends, unseeded = chunk.after is None, None
        if self._drawing.may_leave_seeds_out:
            unseeded = chunk.unseeded(graphs)
        if unseeded is not None:
            passes = UnseededPasses(self._drawing, chunk.name, x)
            state.segments, out = forth(unseeded, x, self._watch)
            keys_loss = self._loss_draws or self._watch.looks or not torch.is_grad_enabled()
            if ends and not keys_loss:
                self._loss_of(state, out, batch)
            if not passes.drew:
                if ends and keys_loss:
                    self._keyed_loss(state, out, batch)
                return out
            chunk.drew()
            x = passes.entered()
        state.segments, out = forth(graphs, x, self._watch)
        if ends:
            self._keyed_loss(state, out, batch)
        return out

    def _keyed_loss(self, state: MicroBatchState, output: Bundle, batch: Any) -> None:
        """The loss of a micro-batch, its draws keyed."""
        watches = self._watch.looks and torch.is_grad_enabled()
        with self._drawing.keyed("loss"), watching() if watches else nullcontext(Draws()) as draws:
            self._loss_of(state, output, batch)
        self._loss_draws = self._loss_draws or draws.drew

    def _loss_of(self, state: MicroBatchState, output: Bundle, batch: Any) -> None:
        """Computes the loss of a micro-batch, and the count of its targets."""
        logits = self._precision.leaving(output) if self._precision else output
        self._stopwatch.where.at(LOSS)
        state.loss, counted = sum_and_count(self.loss(logits, batch))  # on every member of the last stage
        if self._asks_targets and torch.is_grad_enabled():
            state.of_samples = self._targets_of(logits, batch, counted)
        if isinstance(counted, Tensor) and counted.device.type == "cpu":
            counted = counted.item()
        state.targets = counted
        if _none(counted):  # a loss that was made of a mean is NaN here
            state.loss = torch.zeros_like(state.loss)

    def _targets_of(self, output: Bundle, batch: Any, count: float | Tensor) -> Tensor:
        """The targets of each sample of a micro-batch: of several the loss says those of each alone."""
        row = current_row()
        pieces = len(row.pieces if row is not None else self._drawing.samples or (0,))
        counts = [count]
        if pieces > 1:
            shape = tensors(output)[0].shape
            if row is None and shape[:1] != (pieces,):
                raise ModelError(
                    f"Balance(loss=) asks the loss for the targets of each sample, and the head gives a tensor "
                    f"of {list(shape)} for {pieces} samples: have it begin with the samples, or give "
                    "micro_batch=1"
                )
            with torch.no_grad():
                parts = (sample_of(output, batch, at, row) for at in range(pieces))
                counts = [sum_and_count(self.loss(*part))[1] for part in parts]
        device = tensors(output)[0].device
        return torch.stack([put(torch.as_tensor(each, dtype=torch.float64), device) for each in counts])

    def _cut(self, x: Bundle) -> Bundle:
        """This device's part of what came from another stage."""
        return x if self._slices is None else self._slices.cut(single(x))

    def _joined(self, x: Bundle) -> Bundle:
        """The activation for another stage, of which `x` is this device's part."""
        return x if self._slices is None else self._slices.join(single(x).detach())

    def _like(self, x: Bundle, state: MicroBatchState) -> Bundle:
        """A tensor shaped as what came of `x` at the other stage."""
        return x if self._slices is None else self._slices.blank(single(x), state.length)

    def _backward(self, act: Act, state: MicroBatchState, chunk: StageChunk, *, last: bool) -> None:
        """One backward pass. `last`: no other one of the step goes through the chunk, and sums may begin."""
        telemetry = self._telemetry
        self._stopwatch.where.at(BACKWARD)
        if self._slices is not None:
            self._slices.length = state.length
        grads: Gradients
        if state.loss is None:
            assert chunk.after is not None
            grads = chunk.after.gradient(act.micro_batch)
        elif state.slot is None:
            grads = self._gradient_of_loss(state)
        else:
            grads = None
        if self._asks_targets and self._balance is not None:
            if isinstance(chunk.after, NextStage):
                state.of_samples = chunk.after.targets.pop(act.micro_batch)
            self._balance.targets = state.of_samples
        telemetry.mark()
        if self._slices is not None and not chunk.ends_with_head and grads is not None:
            grads = self._slices.cut(single(grads))
        if state.slot is not None:
            grads = self._replay_backward(state.slot, grads, chunk, last=last)
        else:
            state.start = time.perf_counter()
            self._watch.state, self._watch.last = state, last
            grads = back_through(state.segments, grads, self._watch)
            if self._captured is not None:
                self._captured.passed(act.chunk, state.entered, (state.samples, state.length))
        self._begun.add(act.chunk)
        self._step.taken.update(state.items)
        if state.received is not None:
            out = state.received
            if self._slices is not None:
                joined_grads = None if grads is None else self._slices.join(single(grads))
                out, grads = self._like(out, state), joined_grads
            self._made[act] = gradient_messages(out, grads)
            if state.of_samples is not None:
                self._made[act].append(state.of_samples)

    def _replay_backward(self, slot: PassSlot, grads: Gradients, chunk: StageChunk, *, last: bool) -> Gradients:
        """The backward pass of a micro-batch whose forward pass was a graph. Sums wait for their sections
        alone, beside the rest of it."""
        assert self._captured is not None
        assert not isinstance(grads, Mapping)
        if slot.factor is None and grads is None:  # the next stage left it out
            grads = torch.zeros_like(slot.output)
        received = self._captured.backward(slot, self._scale if grads is None else grads)
        self._telemetry.passed(CAPTURED)
        for section in reversed(chunk.passes) if last else ():
            with self._accelerator.beside(slot.ends[section]) if slot.ends else nullcontext():
                self._on_section_done(section)
        return received

    def _gradient_of_loss(self, state: MicroBatchState) -> Gradients:
        """Has a backward pass begin at the loss, with the gradient that is returned."""
        assert state.loss is not None
        segment = state.segments[-1]
        if _none(state.targets):  # no sample of it has a target: nothing is added to any gradient
            return zeros(segment.out)
        if self._trains and not state.loss.requires_grad:
            raise ModelError(
                "the loss has no gradient, and parameters are trained: compute it from the model's output "
                "without detach(), .item() and no_grad()"
            )
        state.segments[-1] = segment._replace(out=state.loss)
        return torch.full_like(state.loss, self._scale)
