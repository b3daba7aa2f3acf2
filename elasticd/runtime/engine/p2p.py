"""Point-to-point messages between two stages: receives are posted early, sends are not waited for.

Every member of a stage's TP group has the full activation, and its full gradient. So each receiver has one
sender when the groups differ in size: receiver j receives from member j mod (size of the other stage).

The receiver does not know the shape and type of an activation. A header goes ahead of it. The payload, bytes to
the transport, is received into a buffer as large as the largest payload that has crossed the boundary in
earlier steps of the plan, a size that both ends know; so it can be posted before the header is here. Bytes
beyond that size follow in a second message, which the receiver posts once it has the header.

In an interleaved pipeline two stages have a boundary for each chunk of layers (`Channel`), with messages of its
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from elasticd_planner.cost.schedule import Pass
from torch import Tensor

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.groups import Group
from elasticd.runtime.engine.activation_header import empty_header, pack_header, unpack_header

#: Messages of one micro-batch: header, activation, the part of it beyond the buffer, gradient.
_HEADER, _PAYLOAD, _REST, _GRADIENT, _KINDS = range(5)


class Channel(NamedTuple):
    """One of the boundaries between two stages."""

    chunk: int = 0  #: the chunk of layers that activations come from
    chunks: int = 1  #: chunks of a stage of this pipeline

    def tag(self, index: int, kind: int) -> int:
        """The number of a message of micro-batch `index`, different on every channel."""
        return (index * self.chunks + self.chunk) * _KINDS + kind


class _Neighbour:
    """This device's connection with an adjacent stage of its pipeline."""

    def __init__(
        self,
        group: Group,
        source: int,
        destinations: Sequence[int],
        dtype: torch.dtype,
        accelerator: Accelerator,
        *,
        implies_all_received: bool,
        channel: Channel,
    ) -> None:
        """
        Args:
            group: all members of the plan.
            source: the rank that sends to this device.
            destinations: the ranks that this device sends to.
            dtype: the type of the model, `Model.dtype`.
            accelerator: where activations and gradients lie. Headers stay on the host.
            implies_all_received: a message from `source` proves that every member of its stage has received
                what `source` must have received before it, because the members communicate in every block.
            channel: the boundary.
        """
        self._group, self._source, self._destinations = group, source, tuple(destinations)
        self._dtype, self._implies_all_received, self._channel = dtype, implies_all_received, channel
        self._accelerator = accelerator
        #: Bytes of the largest activation that crossed the boundary in earlier steps; and until now. The same
        #: on both ends.
        self._room = self._largest = 0
        self._posted: dict[int, Any] = {}
        self._sent: dict[int, list[int]] = {}

    def _payload(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._accelerator.device)

    def end_step(self) -> None:
        """All messages of the step have arrived."""
        self._room = self._largest
        self._sent.clear()


class PrevStage(_Neighbour):
    """The previous stage: sends activations to this device, and receives gradients from it."""

    _passed: dict[int, int]

    def begin_step(self, order: Iterable[Pass]) -> None:
        """Notes how many backward passes precede each forward pass of the previous stage.

        When the activation of that forward pass is here, the gradients of those backward passes have arrived.

        Args:
            order: the passes of the previous stage in this step.
        """
        self._passed = {}
        done = 0
        for kind, index, chunk in order:
            if chunk != self._channel.chunk:
                continue
            if kind == "backward":
                done += 1
            else:
                self._passed[index] = done

    def post(self, index: int, samples: int) -> None:
        """Starts to receive the activation of micro-batch `index`, unless it has started."""
        if index in self._posted:
            return
        header = empty_header(samples)
        works = [self._group.post(header, self._source, self._channel.tag(index, _HEADER))]
        payload = self._payload(self._room)
        if self._room:
            works.append(self._group.post(payload, self._source, self._channel.tag(index, _PAYLOAD)))
        self._posted[index] = header, works, payload

    def activation(self, index: int, samples: int) -> tuple[Tensor, tuple[int, ...]]:
        """Waits for the activation of a micro-batch. Returns it with its sample ids."""
        self.post(index, samples)
        header, works, raw = self._posted.pop(index)
        for work in works:
            self._group.take(work, source=self._source)
        if self._implies_all_received:
            for earlier in [i for i in self._sent if i < self._passed[index]]:
                self._group.arrived(self._sent.pop(earlier))
        dtype, shape, ids = unpack_header(header, self._dtype)
        size = torch.Size(shape).numel() * dtype.itemsize
        self._largest = max(self._largest, size)
        if size > raw.numel():
            full = self._payload(size)
            full[: raw.numel()] = raw
            self._group.receive(full[raw.numel() :], self._source, self._channel.tag(index, _REST))
            raw = full
        return raw[:size].view(dtype).view(shape), ids

    def send_gradient(self, index: int, grad: Tensor) -> None:
        """Sends the gradient of a micro-batch's activation; returns at once."""
        grad = grad.contiguous()
        tag = self._channel.tag(index, _GRADIENT)
        self._sent[index] = [self._group.send(grad, rank, tag) for rank in self._destinations]


class NextStage(_Neighbour):
    """The next stage: receives activations from this device, and sends gradients to it."""

    def send_activation(self, index: int, x: Tensor, ids: Sequence[int]) -> None:
        """Sends the activation of a micro-batch with its sample ids; returns at once.

        Raises:
            ValueError: an activation of this type or number of dimensions cannot pass between stages.
        """
        raw, size = x.contiguous().view(-1).view(torch.uint8), self._room
        self._largest = max(self._largest, raw.numel())
        parts = [(_HEADER, pack_header(x, ids, self._dtype))]
        if size:
            parts.append((_PAYLOAD, raw[:size]))
        if raw.numel() > size:
            parts.append((_REST, raw[size:]))
        self._sent[index] = [
            self._group.send(part, rank, self._channel.tag(index, kind))
            for rank in self._destinations
            for kind, part in parts
        ]

    def post(self, index: int, like: Tensor) -> None:
        """Starts to receive the gradient of the activation `like` of a micro-batch, unless it has started."""
        if index not in self._posted:
            grad = torch.empty_like(like, memory_format=torch.contiguous_format)
            tag = self._channel.tag(index, _GRADIENT)
            self._posted[index] = grad, self._group.post(grad, self._source, tag)

    def gradient(self, index: int, like: Tensor) -> Tensor:
        """Waits for the gradient of the activation `like` of a micro-batch."""
        self.post(index, like)
        grad, work = self._posted.pop(index)
        self._group.take(work, source=self._source)
        if self._implies_all_received:
            self._group.arrived(self._sent.pop(index, ()))
        return grad
