"""`CapturedPasses`: the passes of a micro-batch as CUDA graphs, each of which the host launches by one call.

Where a device is faster than the host, the host's launches are what a step takes. With
`ParallelismOptions(compile="graphs")` the forward pass of a micro-batch through a chunk is a graph, with its
loss behind the head, and its backward pass is another one. They are replayed for later micro-batches of that
shape: what came in is copied into the tensors that were captured, and the device does what it does in an eager
pass, on the same parameters. Gradients add up in memory that stays, and that a step begins with zeros.

*Slots.* A pipeline holds the activations of several micro-batches at once. So each that is under way in a chunk
has a slot: two graphs with memory of their own, in which nothing of another slot lies. A schedule has as many
slots as micro-batches under way, one on the last stage. What a slot gave to another stage is copied out of it,
because the slot may be used again before that message has arrived.

*When.* Graphs are captured at the begin of a step, a few at a time. No message between stages is under way
then, for which a capture would wait, and no autograd graph is alive. A pass without a graph is eager.

*Sums.* In the backward graph an event is recorded as each section's gradients are there. Sums with other
devices wait for it on a stream of their own, so that they run beside the rest of a step's last backward pass.

Captured are passes without collectives whose shapes repeat. Eager are

- the first steps of a plan, which show whether a pass draws random numbers (a graph would draw the same ones
  again), which parameters have a gradient, and what seconds the kinds of computation take;
- each hundredth step, which shows whether a pass draws by now: a graph draws none that begin after its capture;
- packed rows, evaluations, blocks that recompute, devices with an emulated speed, TP groups, models of several
  modules;
- micro-batches of a new shape, of more shapes than `_SHAPES`, and beyond the slots;
- everything, from a capture on that failed: the log has the reason.

A replay runs no Python: what `forward` and the loss read from Python stays as it was at the capture. Modes
(`train`, `eval`) and frozen parameters are noticed, and captured anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elasticd.runtime.accelerator import Event, Graphs
from elasticd.runtime.engine.mixed_precision import Precision, converted
from elasticd.runtime.model.bundle import Bundle
from elasticd.runtime.model.model import Loss
from elasticd.runtime.model.section_passes import GraphSegment, PassPart, SectionWatch, back_through, forth
from elasticd.runtime.model.validation import sum_and_count
from elasticd.runtime.parallel.gradient_reduction import gradient_dtype

log = logging.getLogger(__name__)

#: Shapes of micro-batches whose passes are captured under a plan, of each chunk.
_SHAPES = 4
#: Eager passes of a shape before it is captured.
_EAGER = 2
#: Micro-batches at most whose passes are captured at the begin of a step: other devices wait for this one.
_AT_ONCE = 8


class CannotCapture(Exception):
    """A pass does what no graph can repeat."""


class Entered(NamedTuple):
    """The arguments of a forward pass of a chunk."""

    batch: Any  #: that the embedding and the loss take; (): neither is in the chunk
    activation: Any  #: from the stage before; (): the chunk begins with the embedding


@dataclass(frozen=True, kw_only=True)
class ChunkPasses:
    """The passes of a micro-batch through a chunk, as they are captured."""

    graphs: Sequence[Sequence[PassPart]]  #: each section by itself, without seeds of random draws
    loss: Loss | None  #: None: the output goes to another stage
    precision: Precision | None

    def forth(self, entered: Entered) -> tuple[list[GraphSegment], Tensor, float | Tensor]:
        """The forward pass.

        Returns:
            What `back_through` takes; the loss, summed over targets, else the output; and the count of targets.

        Raises:
            CannotCapture: a section gives more than one tensor, or the last one's has no gradient.
        """
        first = entered.activation
        if isinstance(first, Mapping):
            raise CannotCapture("what comes from the stage before is several tensors")
        if isinstance(first, tuple):
            first = self.precision.entering(entered.batch) if self.precision else entered.batch
        segments, output = forth(self.graphs, first, _CapturedSections())
        count: float | Tensor = 0
        if self.loss is not None:
            logits = self.precision.leaving(output) if self.precision else output
            output, count = sum_and_count(self.loss(logits, entered.batch))
            segments[-1] = segments[-1]._replace(out=output)
        if not isinstance(output, Tensor) or not output.requires_grad:
            raise CannotCapture(f"nothing up to {self.graphs[-1][-1].sections[-1]} has a gradient")
        return segments, output, count


class _CapturedSections(SectionWatch):
    """Refuses sections whose passes are no graph."""

    everywhere = True

    def after(self, section: str, output: Bundle) -> None:
        """Raises CannotCapture where a section gives more than one tensor."""
        if not isinstance(output, Tensor):
            raise CannotCapture(f"{section} gives several tensors")


class _Ends(SectionWatch):
    """Records an event as each section's backward pass ends."""

    def __init__(self, events: Mapping[str, Event]) -> None:
        self._events = events

    def went_back(self, segment: GraphSegment) -> None:
        """See `SectionWatch`."""
        self._events[segment.parts[-1].sections[-1]].record()


@dataclass(kw_only=True)
class PassSlot:
    """The graphs of a micro-batch that is under way, and the memory that they read and write."""

    place: tuple[int, int]  #: its chunk, and its number there: of a place one shape is under way at a time
    leaves: Sequence[Tensor]  #: the tensors that the forward graph reads
    forward: Callable[[], None]
    backward: Callable[[], None]
    output: Tensor  #: of the forward graph: the loss, else what goes to the next stage
    count: float | Tensor  #: of targets
    gradient: Tensor  #: of the output, which the backward graph reads
    factor: float | None  #: that the gradient of a loss has; None: the output is no loss
    received: Tensor | None  #: the gradient of what came from the stage before, which it writes
    ends: Mapping[str, Event]  #: by section, recorded as its gradients are there; empty: no sum waits for them
    reached: Sequence[nn.Parameter]  #: the parameters that the backward graph gives a gradient


@dataclass
class _Shape:
    """Micro-batches of one shape in one chunk."""

    entered: Entered  # what one of them came with
    worked: tuple[int, int]  # samples, and tokens of each
    eager: int = 0  # passes so far
    slots: list[PassSlot] = field(default_factory=list)


class CapturedPasses:
    """The captured passes of a plan on one device."""

    def __init__(self, graphs: Graphs, sections: Mapping[str, nn.Module], *, sums_begin: bool) -> None:
        """
        Args:
            graphs: captures on the device.
            sections: those of the device.
            sums_begin: sums of gradients begin before the last pass is over.
        """
        self._graphs, self._sums_begin = graphs, sums_begin
        self._sections = {section: tuple(module.parameters()) for section, module in sections.items()}
        self._parameters = tuple(dict.fromkeys(p for listed in self._sections.values() for p in listed))
        self._modules = [part for module in sections.values() for part in module.modules()]
        self._shapes: dict[tuple[int, object], _Shape] = {}
        self._reached: set[int] = set()  # the parameters that eager passes gave a gradient
        self._memory: dict[int, Tensor] = {}  # by parameter: in which its gradients add up
        self._busy: set[tuple[int, int]] = set()  # places whose backward pass has still to come
        self._ready: set[int] = set()  # slots, by `id`, whose gradients lie there in this step
        self._modes: tuple[list[bool], list[bool]] = [], []  # of modules and of parameters
        self.failed = False  #: a capture failed, and all passes are eager

    def begin_step(
        self,
        slots: Mapping[int, int],
        passes: Callable[[int], ChunkPasses | None],
    ) -> None:
        """Begins a step. What was captured is dropped where the mode of a module or a frozen parameter is
        another one; and micro-batches of a shape that has had eager passes are captured.

        Args:
            slots: by chunk the micro-batches that are under way at once in the step.
            passes: gives the passes of a chunk; None: they cannot be captured now.
        """
        self._ready.clear()
        now = [part.training for part in self._modules], [p.requires_grad for p in self._parameters]
        if now != self._modes:
            self.release()
            self._modes = now
        self._busy.clear()
        lacking = [
            (chunk, shape)
            for (chunk, _), shape in self._shapes.items()
            for _ in range(slots.get(chunk, 0) - len(shape.slots))
            if shape.eager >= _EAGER
        ]
        for chunk, shape in lacking[:_AT_ONCE]:
            captured = passes(chunk)
            if captured is not None and not self._capture(chunk, shape, captured):
                return

    def give_up(self, reason: str) -> None:
        """Drops all that was captured, for good."""
        if not self.failed:
            log.warning("passes are not captured as CUDA graphs, and run eagerly: %s", reason)
            self.release()
            self.failed = True

    def release(self) -> None:
        """Drops all that was captured: passes are eager again until they were captured anew."""
        self._shapes.clear()
        self._memory.clear()
        self._reached.clear()
        self._graphs.release()

    def reached(self, sections: Collection[str]) -> None:
        """The backward pass of these sections ended, and no sum has taken their gradients yet."""
        for section in sections:
            self._reached.update(id(p) for p in self._sections[section] if p.grad is not None)

    def passed(self, chunk: int, entered: Entered, worked: tuple[int, int]) -> None:
        """An eager pass ended.

        Args:
            chunk: that it went through.
            entered: what it came with.
            worked: its samples, and tokens of each.
        """
        if self.failed or (key := _shape_of(entered)) is None:
            return
        if (shape := self._shapes.get((chunk, key))) is None:
            if sum(other == chunk for other, _ in self._shapes) >= _SHAPES:
                return
            kept = Entered(*converted(tuple(entered), lambda x: x.detach().clone()))
            shape = self._shapes[chunk, key] = _Shape(kept, worked)
        shape.eager += 1

    def forward(self, chunk: int, entered: Entered) -> tuple[PassSlot, tuple[int, int]] | None:
        """A forward pass.

        Args:
            chunk: that it goes through.
            entered: what it is called with.

        Returns:
            The slot that the micro-batch has until `backward`, and what `passed` was told of such ones; None:
            the pass is to be eager.
        """
        shape = self._shapes.get((chunk, _shape_of(entered))) if not self.failed else None
        if shape is None:
            return None
        slot = next((each for each in shape.slots if each.place not in self._busy), None)
        if slot is None:
            return None
        self._begin_gradients(slot)
        for here, values in zip(slot.leaves, _leaves(entered), strict=True):
            here.copy_(values, non_blocking=True)
        self._busy.add(slot.place)
        slot.forward()
        return slot, shape.worked

    def backward(self, slot: PassSlot, given: Tensor | float) -> Tensor | None:
        """The backward pass of the micro-batch in a slot.

        Args:
            slot: as `forward` gave it.
            given: the gradient of what went to the next stage; of a loss, a number.

        Returns:
            The gradient of what came from the stage before; None: it has none.
        """
        if isinstance(given, Tensor):
            slot.gradient.copy_(given)
        elif slot.factor != given:
            slot.gradient.fill_(given)
            slot.factor = given
        slot.backward()
        self._busy.discard(slot.place)
        return None if slot.received is None else slot.received.clone()

    def _capture(self, chunk: int, shape: _Shape, passes: ChunkPasses) -> bool:
        """Returns True if micro-batches of a shape have a slot more."""
        before = [parameter.grad for parameter in self._parameters]
        sections = [section for parts in passes.graphs for part in parts for section in part.sections]
        used = dict.fromkeys(parameter for section in sections for parameter in self._sections[section])
        for parameter in used:
            if id(parameter) in self._reached and id(parameter) not in self._memory:
                zeros = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
                self._memory[id(parameter)] = zeros
        try:
            shape.slots.append(self._slot((chunk, len(shape.slots)), shape.entered, passes))
            log.info("passes of %s are CUDA graphs, %d under way", _text(shape.entered), len(shape.slots))
        except (CannotCapture, RuntimeError) as error:
            self.give_up(str(error).strip().partition("\n")[0])
        finally:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient
        return not self.failed

    def _slot(self, place: tuple[int, int], entered: Entered, passes: ChunkPasses) -> PassSlot:
        """Captures both passes of a micro-batch, in memory of their own."""
        for parameter in self._parameters:
            parameter.grad = self._memory.get(id(parameter))
        own = Entered(*converted(tuple(entered), torch.clone))
        leaves, segments = _leaves(own), list[list[GraphSegment]]()

        def forward() -> tuple[Tensor, float | Tensor]:
            # A section may put another tensor in the place of one of its batch's: it gets a mapping of its own.
            made, output, count = passes.forth(Entered(*converted(tuple(own), torch.detach)))
            segments[:] = [made]
            return output.detach(), count

        replay, (output, count) = self._graphs.capture(forward, place)
        if isinstance(count, Tensor) and count.device != output.device:
            raise CannotCapture("the loss counts its targets on the host")
        gradient = torch.ones_like(output, memory_format=torch.contiguous_format)
        ends: dict[str, Event] = {}
        if self._sums_begin:
            ends = {parts[-1].sections[-1]: self._graphs.event() for parts in passes.graphs}
        watch = _Ends(ends) if ends else SectionWatch()

        def backward() -> tuple[Any, ...]:
            (made,) = segments
            return (back_through(made, gradient, watch),)

        reached = set[Tensor]()
        looks = [p.register_post_accumulate_grad_hook(reached.add) for p in self._parameters if p.requires_grad]
        try:
            replay_backward, (received,) = self._graphs.capture(backward, place)
        finally:
            for look in looks:
                look.remove()
        for parameter in self._parameters:
            if parameter.grad is not self._memory.get(id(parameter)):
                raise CannotCapture("a parameter has a gradient that it had in no eager pass")
        return PassSlot(
            place=place,
            leaves=leaves,
            forward=replay,
            backward=replay_backward,
            output=output,
            count=count,
            gradient=gradient,
            factor=None if passes.loss is None else 1.0,
            received=received,
            ends=ends,
            reached=[parameter for parameter in self._parameters if parameter in reached],
        )

    def _begin_gradients(self, slot: PassSlot) -> None:
        """Has the gradients in this step of what a slot's passes reach lie in the memory that graphs add to.
        What they do not reach has a gradient by other passes alone."""
        if id(slot) in self._ready:
            return
        zeros = []
        for parameter in slot.reached:
            memory = self._memory[id(parameter)]
            if parameter.grad is memory:
                continue
            if parameter.grad is None:
                zeros.append(memory)
            else:
                memory.copy_(parameter.grad)  # an eager pass of the step went before
            parameter.grad = memory
        if zeros:
            torch._foreach_zero_(zeros)
        self._ready.add(id(slot))


def _leaves(entered: Any) -> list[Tensor]:
    """The tensors that a pass is called with, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    converted(tuple(entered), keep)
    return found


def _shape_of(entered: Any) -> object:
    """The key that passes differ by; None: it has values that are no tensors and may change."""
    if isinstance(entered, Tensor):
        return tuple(entered.shape), entered.stride(), entered.dtype
    if isinstance(entered, Mapping):
        parts = tuple((key, _shape_of(value)) for key, value in entered.items())
        return None if any(part is None for _, part in parts) else parts
    if isinstance(entered, tuple | list):
        listed = tuple(map(_shape_of, entered))
        return None if None in listed else listed
    return ("value", entered) if isinstance(entered, bool | int | float | str) else None


def _text(entered: Entered) -> str:
    shapes = [f"[{', '.join(map(str, tensor.shape))}]" for tensor in _leaves(entered)]
    return f"micro-batches {', '.join(shapes)}"
