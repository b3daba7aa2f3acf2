"""Activations and gradients between two stages of a pipeline: headers go ahead, payloads have exact sizes.

Who sends to whom follows from the layouts of both stages (`elasticd_planner.layout.flows`). An
activation is a tensor or named tensors (`elasticd.runtime.model.bundle`). The receiver does not know their
names, shapes and types. A header goes ahead of them, as a word of the host; its receipt is posted some passes
early. The payload is received when its pass has come, a message for each tensor, into a tensor of its size.
Gradients need no header: each is as its tensor was, and its receipt is posted early. Not all named tensors have
one, and of those that have, the next stage may leave one out: a message of -0.0 alone says so
(`AbsentGradients`). When messages are launched, at both ends, is said by `elasticd_planner.layout.pass_order`.

In an interleaved pipeline two stages have a boundary for each chunk of layers. Their messages follow each
other in the order of passes, which is the same on both ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from elasticd_planner.cost.schedule import Pass
from elasticd_planner.layout.channels import Channel, Use
from elasticd_planner.layout.flows import Border
from torch import Tensor

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.communicators import Communicators
from elasticd.runtime.comm.groups import Group
from elasticd.runtime.engine.activation_header import TensorHeader, empty_header, pack_header, unpack_header
from elasticd.runtime.model.bundle import Bundle, Gradients, going_back, tensors

#: Tags of headers of each module, and of each border between modules, in the group of all members.
HEADERS = 1 << 18


class _Neighbour:
    """This device's connection with an adjacent stage of its pipeline, for one chunk of layers."""

    def __init__(
        self,
        everyone: Group,
        communicators: Communicators,
        border: Border,
        dtype: torch.dtype,
        accelerator: Accelerator,
        *,
        implies_all_received: bool,
        chunk: int,
        chunks: int,
        first_tag: int = 0,
    ) -> None:
        """
        Args:
            everyone: all members of the plan, among whom headers go.
            communicators: over which activations and gradients go.
            border: with whom.
            dtype: the type of the model, `Model.dtype`.
            accelerator: where activations and gradients lie. Headers stay on the host.
            implies_all_received: a message from the other stage proves that every member of it has received
                what the sender must have received before it, because they wait for each other in a block.
            chunk: the chunk of layers that activations come from.
            chunks: chunks of a stage of this pipeline.
            first_tag: of headers of this module, the first of `HEADERS`.
        """
        self._first_tag = first_tag
        self._everyone, self._dtype, self._accelerator = everyone, dtype, accelerator
        self._implies_all_received, self.chunk, self._chunks = implies_all_received, chunk, chunks
        receives, sends = self._uses
        assert border.source is not None  # stages share no device
        self._source = everyone.members.index(border.source)
        self._destinations = [everyone.members.index(device) for device in border.destinations]
        self._receives = communicators.pair(Channel(receives, (border.source, everyone.me)))
        self._sends = [communicators.pair(Channel(sends, (everyone.me, to))) for to in border.destinations]
        self._sent: dict[int, list[tuple[Any, int]]] = {}

    #: What comes from the other stage, and what goes there.
    _uses: tuple[Use, Use]

    def end_step(self) -> None:
        """All messages of the step have arrived."""
        self._sent.clear()

    def send(self, index: int, messages: Iterable[Tensor]) -> None:
        """Sends the activation of a micro-batch, or its gradients; returns at once.

        Args:
            index: of the micro-batch.
            messages: a tensor each.
        """
        together = [tensor.contiguous() for tensor in messages]
        self._sent.setdefault(index, []).extend(
            (pair, pair.send(tensor)) for pair in self._sends for tensor in together
        )

    def _arrived(self, index: int) -> None:
        """Marks the tensors that were sent of a micro-batch as arrived, so that they are no longer kept."""
        for pair, number in self._sent.pop(index, ()):
            pair.arrived([number])

    def _tag(self, index: int) -> int:
        """The tag of a header in the group of all members."""
        return self._first_tag + index * self._chunks + self.chunk


class PrevStage(_Neighbour):
    """The previous stage: sends activations to this device, and receives gradients from it."""

    _uses = ("activation", "gradient")
    _backward: list[int]
    _passed: dict[int, int]
    _proven: int
    _headers: dict[int, tuple[Tensor, Any]]
    _posted: set[int]  #: in this step
    _begun: dict[int, tuple[TensorHeader | dict[str, TensorHeader], tuple[int, ...], list[tuple[Tensor, Any]]]]

    def begin_step(self, order: Iterable[Pass]) -> None:
        """Notes how many backward passes precede each forward pass of the previous stage.

        When the activation of that forward pass is here, the gradients of those backward passes have arrived.

        Args:
            order: the passes of the previous stage in this step.
        """
        self._backward, self._passed, self._proven = [], {}, 0
        self._headers, self._begun, self._posted = {}, {}, set()
        for kind, index, chunk in order:
            if chunk != self.chunk:
                continue
            if kind == "backward":
                self._backward.append(index)
            else:
                self._passed[index] = len(self._backward)

    def post(self, index: int, samples: int) -> None:
        """Starts to receive the header of micro-batch `index`, unless that has been started in this step."""
        if index not in self._posted:
            self._posted.add(index)
            header = empty_header(samples)
            self._headers[index] = header, self._everyone.post(header, self._source, self._tag(index))

    def receive(self, index: int, samples: int) -> None:
        """Waits for the header of a micro-batch, and starts to receive its activation."""
        self.post(index, samples)
        header, work = self._headers.pop(index)
        self._everyone.take(work, source=self._source)
        parts, ids = unpack_header(header, samples, self._dtype)
        listed = [parts] if isinstance(parts, TensorHeader) else parts.values()
        device = self._accelerator.device
        came = [torch.empty(part.shape, dtype=part.dtype, device=device) for part in listed]
        self._begun[index] = parts, ids, [(x, self._receives.begin_receive(x)) for x in came]

    def activation(self, index: int) -> tuple[Bundle, tuple[int, ...]]:
        """Waits for the activation of a micro-batch that `receive` started to receive. Returns it with its
        sample ids.

        Those tensors that need a gradient require it.
        """
        parts, ids, begun = self._begun.pop(index)
        for _, work in begun:
            self._receives.finish(work)
        listed = [parts] if isinstance(parts, TensorHeader) else parts.values()
        came = [tensor.requires_grad_(part.needs) for (tensor, _), part in zip(begun, listed, strict=True)]
        x: Bundle = came[0] if isinstance(parts, TensorHeader) else dict(zip(parts, came, strict=True))
        if self._implies_all_received:
            for earlier in self._backward[self._proven : self._passed[index]]:
                self._arrived(earlier)
            self._proven = self._passed[index]
        return x, ids


def gradient_messages(x: Bundle, given: Gradients) -> list[Tensor]:
    """The messages of the gradients of an activation: where there is none, -0.0. The first number of another
    gradient is never -0.0.

    Args:
        x: the activation, as it came.
        given: its gradients.
    """
    of = given if isinstance(given, Mapping) else {"": given}
    grads = ((part, of[name]) for name, part in going_back(x).items())
    return [torch.full_like(part, -0.0) if grad is None else _marked(grad) for part, grad in grads]


def _marked(gradient: Tensor) -> Tensor:
    """A gradient whose first number is 0.0 where it was -0.0; no other number is changed by the sum."""
    gradient = gradient.detach().contiguous()
    gradient.view(-1)[:1].add_(0.0)
    return gradient


class AbsentGradients:
    """Tells the gradients of tensors that the receiver of an activation left out from others.

    On an accelerator the host would wait for each gradient: there a tensor that was used once counts as used.
    """

    def __init__(self) -> None:
        self._used: set[str] = set()

    def without(self, grads: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Gradients by name as they came, and None where the other stage had none."""
        return {
            name: None if grad is None or self._is_none(name, grad) else grad for name, grad in grads.items()
        }

    def _is_none(self, name: str, grad: Tensor) -> bool:
        if name in self._used or not grad.numel():
            return False
        first = grad.view(-1)[0]
        if bool((first == 0) & torch.signbit(first)):
            return True
        if grad.device.type != "cpu":
            self._used.add(name)
        return False


class NextStage(_Neighbour):
    """The next stage: receives activations from this device, and sends gradients to it."""

    _uses = ("gradient", "activation")
    _gradients: dict[int, tuple[dict[str, Tensor | None], list[tuple[Any, bool]]]]
    targets: dict[int, Tensor]  #: by micro-batch those of each sample, once its gradients are here

    def __init__(self, *connection: Any, **about: Any) -> None:
        super().__init__(*connection, **about)
        self._left_out = AbsentGradients()

    def announce(self, index: int, x: Bundle, ids: Sequence[int]) -> None:
        """Sends the header of the activation of a micro-batch, with its sample ids; returns at once.

        Raises:
            ValueError: this activation cannot pass between stages.
        """
        header = pack_header(x, ids, self._dtype)
        numbers = [self._everyone.send(header, rank, self._tag(index)) for rank in self._destinations]
        self._sent.setdefault(index, []).extend((self._everyone, number) for number in numbers)

    def begin_step(self) -> None:
        """No gradient of the step is asked for yet."""
        self._gradients, self.targets = {}, {}

    def post(self, index: int, x: Bundle, samples: int = 0) -> None:
        """Starts to receive the gradients of the activation `x` of a micro-batch, as it was sent, and the
        targets of each of its `samples`; 0: nobody asks for these."""
        grads: dict[str, Tensor | None] = {} if isinstance(x, Tensor) else dict.fromkeys(x)
        works = []
        for name, part in going_back(x).items():
            grad = grads[name] = torch.empty_like(part, memory_format=torch.contiguous_format)
            works.append((self._receives.begin_receive(grad), grad.numel() > 0))
        if samples:
            targets = self.targets[index] = torch.empty(
                samples, dtype=torch.float64, device=tensors(x)[0].device
            )
            works.append((self._receives.begin_receive(targets), True))
        self._gradients[index] = grads, works

    def gradient(self, index: int) -> Gradients:
        """Waits for the gradients of a micro-batch's activation that `post` started to receive."""
        grads, works = self._gradients.pop(index)
        for work, _ in works:
            self._receives.finish(work)
        if self._implies_all_received and any(came for _, came in works):  # of an empty one nothing came
            self._arrived(index)
        grads = self._left_out.without(grads)
        return grads[""] if list(grads) == [""] else grads
