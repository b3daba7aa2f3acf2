"""`PassWatch`: what a job does around the sections of its passes, beside computing them.

It times them for telemetry, says where the main thread is, counts the tokens that go through, slows blocks
down to the speed of an emulated device, notes with what compiled blocks are called, recomputes blocks, keys the
draws of backward passes, and says which sections have all their gradients. It is called around each section
where one of these asks for it, and else at the borders of embedding, blocks and head alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Protocol

from elasticd_planner.spec.batch import MicroBatch
from torch import Tensor, nn

from elasticd.runtime.engine.activation_checkpoint import CheckpointedBlock
from elasticd.runtime.engine.compiled_blocks import BlockCalls
from elasticd.runtime.engine.step_state import MicroBatchState
from elasticd.runtime.model.bundle import Bundle, Gradients, sizes, tensors
from elasticd.runtime.model.host_generators import host_seeds
from elasticd.runtime.model.rng import Draws, ModelRng, watching
from elasticd.runtime.model.section_passes import GraphSegment, SectionWatch, back
from elasticd.runtime.parallel.expert_pairs import ExpertPairs
from elasticd.runtime.parallel.sequence_parallel import SequenceSlices
from elasticd.runtime.telemetry.comm_timer import Stopwatch
from elasticd.runtime.telemetry.step_times import SequenceHere, Telemetry
from elasticd.wire.main_thread import BACKWARD, FORWARD

#: Steps of a plan whose backward passes are all watched for draws, and how often later ones are.
FIRST, _SELDOM = 3, 100


class PassPacer(Protocol):
    """Slows passes of blocks down to the speed of an emulated device."""

    @property
    def emulates(self) -> bool:
        """False on a device with its own speed: passes are not paced, and blocks need no graph of their own."""

    def __call__(
        self, kind: str, tokens: int, share: float, start: float, communicated: float, squares: float, /
    ) -> float:
        """Sleeps at the end of a pass of a block.

        Args:
            kind: "forward" or "backward".
            tokens: of the micro-batch.
            share: of the block's computation, by the experts that rows went to.
            start: when the pass began, by perf_counter.
            communicated: seconds of communication in it.
            squares: the sum over tokens of the length of their sequence.

        Returns:
            When it ended, by perf_counter.
        """


class PassWatch(SectionWatch):
    """Called around the sections of the passes of one device. Before a pass the runner says which it is."""

    everywhere: bool
    steps: int  #: of the plan with backward passes, this one included
    draws: bool  #: a backward pass draws random numbers
    paced: bool  #: an emulated device paces the blocks of this step
    state: MicroBatchState  #: of the pass
    micro: MicroBatch  #: of the pass
    first: bool  #: it is a pass of the first chunk
    training: bool  #: the sections of its chunk train
    last: bool  #: no other backward pass of the step goes through its chunk, and sums may begin
    packed: bool  #: micro-batches are packed rows
    of_items: bool  #: micro-batches are items of samples
    #: Called with the sections of a backward pass as their gradients are there; None: nobody asks.
    reached: Callable[[Collection[str]], None] | None

    def __init__(
        self,
        *,
        telemetry: Telemetry,
        stopwatch: Stopwatch,
        pace: PassPacer,
        drawing: ModelRng,
        modules: Mapping[str, nn.Module],
        recomputed: Mapping[str, CheckpointedBlock],
        share: float,
        layers: int,
        slices: SequenceSlices | None,
        pairs: ExpertPairs,
        calls: BlockCalls | None,
        on_section_done: Callable[[str], None],
        of_items: bool = False,
    ) -> None:
        """
        Args:
            telemetry: measures passes.
            stopwatch: measures waits, and publishes where the main thread is.
            pace: called after every pass of a block.
            drawing: keys draws.
            modules: by section.
            recomputed: the blocks that recompute, by section.
            share: of its TP group that this device has.
            layers: of its stage.
            slices: of the tokens that blocks are on; None: they are on all.
            pairs: the pairs of rows and experts of passes here.
            calls: with what compiled blocks were called; None: none is compiled.
            on_section_done: called with a section when all gradients that this device adds to it are there.
            of_items: its module runs on items of samples.
        """
        self.of_items = of_items
        self._telemetry, self._stopwatch, self._pace = telemetry, stopwatch, pace
        self._drawing, self._modules, self._recomputed = drawing, modules, recomputed
        self._share, self._layers, self._slices, self._calls = share, layers, slices, calls
        self._pairs = pairs
        self._on_section_done = on_section_done
        self.steps, self.draws, self.paced, self.packed, self.last = 0, False, True, False, False
        self._notes, self._communicated, self.reached = False, 0.0, None
        self._draws_from_host = False  # a backward pass draws from Python's generator or NumPy's
        self.everywhere = True

    @property
    def looks(self) -> bool:
        """True in steps that show whether passes draw random numbers: none of them is a graph of the device."""
        return self.steps <= FIRST or self.steps % _SELDOM == 0

    def begin_step(self, *, trains: bool) -> None:
        """Begins a step.

        Args:
            trains: it has backward passes.
        """
        self.steps += trains
        self.paced = self._pace.emulates
        self.everywhere = self.paced or self._notes

    def entered(self, x: Bundle) -> None:
        """The activation that blocks begin with is here."""
        self._notes = self._calls is not None and self._calls.wants(self.training, x)
        self.everywhere = self.paced or self._notes
        self.count(*sizes(x, of_item=self.of_items))

    def count(self, samples: int, length: int) -> None:
        """Counts the tokens of a micro-batch for telemetry and for a pace."""
        state = self.state
        state.samples, state.length = samples, length
        if self._slices is not None:
            state.length = self._slices.length
        sequences = self._sequences(samples, state.length)
        state.tokens = samples * state.length
        state.squares = sum(here.tokens * here.length for here in sequences)
        if self.first and not state.start:  # else the pass is repeated
            self._telemetry.worked(state.tokens, self._layers, self._share, sequences)
        state.start = time.perf_counter()

    def _sequences(self, samples: int, length: int) -> list[SequenceHere]:
        """The sequences of a micro-batch for telemetry: its pieces, or its samples padded to a length."""
        if self.packed:
            return [SequenceHere(piece.tokens, piece.length, not piece.start) for piece in self.micro]
        return [SequenceHere(length, length, True)] * samples if length else []

    def border(self, entered: Bundle, section: str) -> bool:
        """Has a backward pass tell at an activation, which enters a section, what it computed until there.

        Returns:
            Whether the graph may go on: by one tensor that needs a gradient. Of several each has a gradient, if
            only zeros, and where there is none (all is frozen up to here) torch's reentrant checkpoints would
            lose the gradients of their parameters: the section gets leaves then.
        """
        if isinstance(entered, Tensor):
            needing = entered if entered.requires_grad else None
        else:
            several = [tensor for tensor in tensors(entered) if tensor.requires_grad]
            needing = several[0] if len(several) == 1 else None
        if needing is not None and section in ("blocks.0", "head"):
            kind = "head" if section == "head" else "backward"
            needing.register_hook(lambda _: self._telemetry.passed(kind))
        return needing is not None

    def before(self, section: str, entered: Bundle) -> None:
        """See `SectionWatch`."""
        if section == "head":
            self._telemetry.passed("forward")
        if self.everywhere:
            self._stopwatch.where.at(FORWARD)
            self._communicated = self._stopwatch.inside
            if self._notes and self._calls is not None and section.startswith("blocks."):
                self._calls.note(self._modules[section].training, entered)

    def after(self, section: str, output: Bundle) -> None:
        """See `SectionWatch`."""
        if section == "embed":
            self._telemetry.passed("embed")
            self.entered(output)
        elif self.paced and section != "head":
            self.state.pairs[section] = self._pairs.newest(section)
            self._end_pace("forward", section)

    def goes_back(self, segment: GraphSegment) -> GraphSegment:
        """See `SectionWatch`. A block that recomputes its activations gets its autograd graph."""
        if self.last or self.everywhere:
            self._stopwatch.where.at(BACKWARD)
        recomputed = self._recomputed.get(segment.parts[0].sections[0])
        if recomputed is not None:
            assert segment.entered is not None
            self._communicated = self._stopwatch.inside
            segment = segment._replace(out=recomputed.recompute(segment.entered))
            if self.paced:
                self._end_pace("forward", segment.parts[0].sections[0])
            self._telemetry.passed("recompute")
        if self.paced:
            self._communicated = self._stopwatch.inside
        return segment

    def backward(self, segment: GraphSegment, given: Gradients) -> None:
        """See `SectionWatch`."""
        drawing, place = self._drawing, f"{segment.parts[-1].sections[-1]}, backward"
        seldom = self.looks or self.draws or self._draws_from_host
        if drawing.may_leave_seeds_out and not seldom and host_seeds.undrawn():
            drawing.seed_torch(f"{place}/0".encode())
            back(segment, given)
            self._draws_from_host = not host_seeds.undrawn()
            return
        with drawing.keyed(place), watching() if self.looks else nullcontext(Draws()) as drawn:
            back(segment, given)
        self.draws = self.draws or drawn.drew

    def went_back(self, segment: GraphSegment) -> None:
        """See `SectionWatch`."""
        section = segment.parts[0].sections[0]
        if self.paced and section.startswith("blocks."):
            self._end_pace("backward", section)
        self._telemetry.passed(section if section in ("embed", "head") else "backward")
        if self.reached is not None:
            self.reached([section for part in segment.parts for section in part.sections])
        if self.last:
            for part in reversed(segment.parts):
                for left in reversed(part.sections):
                    self._on_section_done(left)
            self.state.start = time.perf_counter()
            self._telemetry.mark()

    def _end_pace(self, kind: str, section: str) -> None:
        """Slows a pass of a block, which began at `state.start`, down to an emulated speed."""
        state, spent = self.state, self._stopwatch.inside - self._communicated
        share = self._pairs.share(self._share, state.pairs.get(section), state.length)
        state.start = self._pace(kind, state.tokens, share, state.start, spent, state.squares)
