"""`CapturedPasses`: the passes of a micro-batch as one CUDA graph, which the host launches by one call.

Where a device is faster than the host, the host's launches are what a step takes. With
`ParallelismOptions(compile="graphs")` the forward pass of a micro-batch, its loss and its backward pass are
captured once for each shape of a batch. Later micro-batches of that shape are replays: their tensors are copied
into those that were captured, and the device does what it does in an eager pass, on the same parameters.
Gradients add up in memory that stays, and that a step begins with zeros.

Captured are passes through all of the model on one device, without collectives: alone, or in data parallelism
but for the last micro-batch of a step, whose sums begin as sections end. All else is eager:

- the first steps of a plan, which show whether a pass draws random numbers (a graph would draw the same ones
  again), which parameters have a gradient, and what seconds the kinds of computation take;
- packed rows, evaluations, blocks that recompute, devices with an emulated speed, stages, TP groups, models
  of several modules;
- batches of a new shape, and of more shapes than `_SHAPES`;
- everything, from a capture on that failed: the log has the reason.

A replay runs no Python: what `forward` and the loss read from Python stays as it was at the capture. Modes
(`train`, `eval`) and frozen parameters are noticed, and captured anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elasticd.runtime.accelerator import Graphs
from elasticd.runtime.engine.mixed_precision import Precision, converted
from elasticd.runtime.model.bundle import Bundle
from elasticd.runtime.model.model import Loss
from elasticd.runtime.model.section_passes import PassPart, SectionWatch, back_through, forth
from elasticd.runtime.model.validation import sum_and_count
from elasticd.runtime.parallel.gradient_reduction import gradient_dtype

log = logging.getLogger(__name__)

#: Shapes of batches whose passes are captured under a plan.
_SHAPES = 4
#: Eager passes of a shape before it is captured.
_EAGER = 2


class CannotCapture(Exception):
    """A pass does what no graph can repeat."""


class _CapturedSections(SectionWatch):
    """Refuses sections whose passes are no graph."""

    everywhere = True

    def after(self, section: str, output: Bundle) -> None:
        """Raises CannotCapture where a section gives more than one tensor, or one without a gradient."""
        if not isinstance(output, Tensor):
            raise CannotCapture(f"{section} gives several tensors")
        if not output.requires_grad:
            raise CannotCapture(f"nothing up to {section} is trained")


@dataclass(frozen=True, kw_only=True)
class WholePass:
    """The forward pass of a micro-batch through all sections, its loss and its backward pass."""

    graphs: Sequence[Sequence[PassPart]]  #: as in `StageChunk.graphs`, of passes without seeds
    loss: Loss
    precision: Precision | None

    def __call__(self, batch: Any, scale: Tensor) -> tuple[Tensor, float | Tensor]:
        """Adds to the gradients of parameters.

        Args:
            batch: of the micro-batch.
            scale: the gradients are those of the loss times this.

        Returns:
            The loss, summed over targets, and their count.

        Raises:
            CannotCapture: a section gives more than one tensor, or one without a gradient.
        """
        x: Any = self.precision.entering(batch) if self.precision else batch
        segments, output = forth(self.graphs, x, _CapturedSections())
        logits = self.precision.leaving(output) if self.precision else output
        loss, count = sum_and_count(self.loss(logits, batch))
        segments[-1] = segments[-1]._replace(out=loss)
        back_through(segments, scale, SectionWatch())
        return loss.detach(), count


@dataclass
class _Shape:
    """Batches of one shape."""

    eager: int = 0  # passes so far
    scale: Tensor | None = None  # of the loss, in its type
    factor: float = 0.0  # that it has
    worked: tuple[int, int] = (0, 0)  # samples, and tokens of each
    leaves: Sequence[Tensor] = ()  # the tensors of a batch that the graph reads
    replay: Callable[[], None] | None = None
    loss: Tensor | None = None  # what it writes
    count: float | Tensor = 0.0


class CapturedPasses:
    """The captured passes of a plan on one device."""

    def __init__(self, graphs: Graphs, parameters: Sequence[nn.Parameter]) -> None:
        """
        Args:
            graphs: captures on the device.
            parameters: those of its sections.
        """
        self._graphs, self._parameters = graphs, parameters
        self._shapes: dict[object, _Shape] = {}
        self._reached: set[int] = set()  # the parameters that eager passes gave a gradient
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []  # the memory in which gradients add up
        self._ready = False  # they are those of this step
        self._modes: tuple[object, ...] = ()
        self.failed = False  #: a capture failed, and all passes are eager

    def begin_step(self, modes: tuple[bool, ...]) -> None:
        """Begins a step. What was captured is dropped where a mode or a frozen parameter is another one.

        Args:
            modes: whether each section trains.
        """
        self._ready = False
        now = modes, tuple(parameter.requires_grad for parameter in self._parameters)
        if now != self._modes:
            self.release()
            self._modes = now

    def release(self) -> None:
        """Drops all that was captured: passes are eager again until they were captured anew."""
        self._shapes.clear()
        self._gradients.clear()
        self._reached.clear()

    def passed(self, batch: Any, loss: Tensor, worked: tuple[int, int]) -> None:
        """An eager pass ended, and no sum has taken its gradients yet.

        Args:
            batch: of the micro-batch.
            loss: of it.
            worked: its samples, and tokens of each.
        """
        if self.failed or (key := _shape_of(batch)) is None:
            return
        if key not in self._shapes and len(self._shapes) >= _SHAPES:
            return
        shape = self._shapes.setdefault(key, _Shape())
        if shape.eager < _EAGER:
            shape.eager, shape.worked = shape.eager + 1, worked
            shape.scale = torch.empty_like(loss)
            self._reached.update(id(p) for p in self._parameters if p.grad is not None)

    def replay(
        self, batch: Any, scale: float, whole: Callable[[], WholePass | None]
    ) -> tuple[Tensor, float | Tensor, tuple[int, int]] | None:
        """A pass of a micro-batch. It is captured first, where it can be and was not yet.

        Args:
            batch: of the micro-batch.
            scale: the gradients are those of the loss times this.
            whole: gives the passes that are captured; None: they draw random numbers.

        Returns:
            The loss, the count of targets, and what `passed` was told of such batches; None: the pass is to be
            eager.
        """
        shape = None if self.failed else self._shapes.get(_shape_of(batch))
        if shape is None or shape.eager < _EAGER:
            return None
        if shape.replay is None and not self._capture(shape, batch, whole()):
            return None
        assert shape.replay is not None
        assert shape.scale is not None
        assert shape.loss is not None
        self._begin_gradients()
        for here, values in zip(shape.leaves, _leaves(batch), strict=True):
            here.copy_(values, non_blocking=True)
        self._scale(shape, scale)
        shape.replay()
        count = shape.count
        return shape.loss.clone(), count.clone() if isinstance(count, Tensor) else count, shape.worked

    def _capture(self, shape: _Shape, batch: Any, whole: WholePass | None) -> bool:
        """Returns True if passes of such batches are a graph now."""
        if whole is None:
            return False
        assert shape.scale is not None
        known = {id(parameter) for parameter, _ in self._gradients}
        self._gradients += [
            (parameter, torch.zeros_like(parameter, dtype=gradient_dtype(parameter)))
            for parameter in self._parameters
            if id(parameter) in self._reached and id(parameter) not in known
        ]
        self._ready = False
        self._begin_gradients()
        before = [parameter.grad for parameter in self._parameters]
        own, scale = converted(batch, torch.clone), shape.scale
        shape.leaves = tuple(_leaves(own))
        self._scale(shape, 1.0)
        try:
            # A section may put another tensor in the place of one of its batch's: it gets a mapping of its own.
            replay, (loss, count) = self._graphs.capture(lambda: whole(converted(own, lambda x: x), scale))
            if isinstance(count, Tensor) and count.device != loss.device:
                raise CannotCapture("the loss counts its targets on the host")
            if any(p.grad is not gradient for p, gradient in zip(self._parameters, before, strict=True)):
                raise CannotCapture("a parameter has a gradient that it had in no eager pass")
        except (CannotCapture, RuntimeError) as error:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient
            self.release()
            self.failed = True
            reason = str(error).strip().partition("\n")[0]
            log.warning("passes are not captured as CUDA graphs, and run eagerly: %s", reason)
            return False
        shape.replay, shape.loss, shape.count = replay, loss, count
        log.info("passes of %s are a CUDA graph", _text(batch))
        return True

    def _scale(self, shape: _Shape, factor: float) -> None:
        assert shape.scale is not None
        if shape.factor != factor:
            shape.scale.fill_(factor)
            shape.factor = factor

    def _begin_gradients(self) -> None:
        """Has the gradients of this step lie in the memory that graphs add to."""
        if self._ready:
            return
        zeros = []
        for parameter, memory in self._gradients:
            if parameter.grad is memory:
                continue
            if parameter.grad is None:
                zeros.append(memory)
            else:
                memory.copy_(parameter.grad)  # an eager pass of the step went before
            parameter.grad = memory
        if zeros:
            torch._foreach_zero_(zeros)
        self._ready = True


def _leaves(batch: Any) -> list[Tensor]:
    """The tensors of a batch in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    converted(batch, keep)
    return found


def _shape_of(batch: Any) -> object:
    """The key that passes differ by; None: it has values that are no tensors and may change."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.stride(), batch.dtype
    if isinstance(batch, Mapping):
        parts = tuple((key, _shape_of(value)) for key, value in batch.items())
        return None if any(part is None for _, part in parts) else parts
    if isinstance(batch, tuple | list):
        listed = tuple(map(_shape_of, batch))
        return None if None in listed else listed
    return ("value", batch) if isinstance(batch, bool | int | float | str) else None


def _text(batch: Any) -> str:
    shapes = [f"[{', '.join(map(str, tensor.shape))}]" for tensor in _leaves(batch)]
    return f"batches {', '.join(shapes)}"
