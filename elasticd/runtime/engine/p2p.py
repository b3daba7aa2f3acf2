"""What passes between two stages: receives are posted before their pass comes up, sends are never waited for.

Between unequal TP groups each receiver has one sender: activations and their gradients are whole on every
member of a stage, so receiver j takes them from member j mod (size of the other stage).

An activation's shape and type are known only when it comes. So a header goes first, and the payload, which is
bytes to the wire, has its receive posted with room for the largest that has crossed this boundary in earlier
steps of the plan, which both ends know. What is larger follows in a second message, once the header said so.

In an interleaved pipeline two stages have a border for each chunk (`Lane`), each with messages of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from elasticd_planner.cost.schedule import Pass
from torch import Tensor

from elasticd.runtime.comm.groups import Group
from elasticd.runtime.engine.activation_header import empty_header, pack_header, unpack_header

#: Messages of one micro-batch: header, activation, what did not fit, gradient.
_HEADER, _PAYLOAD, _REST, _GRADIENT, _KINDS = range(5)


class Lane(NamedTuple):
    """Which border of two stages: the chunk that activations come from, of so many."""

    chunk: int = 0
    chunks: int = 1

    def tag(self, index: int, kind: int) -> int:
        return (index * self.chunks + self.chunk) * _KINDS + kind


#: The one border of two stages that are not interleaved.
ONLY = Lane()


class Room:
    """The largest activation that crossed a boundary before this step, in bytes; the same on both ends."""

    def __init__(self) -> None:
        self.bytes = self._largest = 0

    def crossed(self, size: int) -> None:
        self._largest = max(self._largest, size)

    def end_step(self) -> None:
        self.bytes = self._largest


@dataclass
class _Posted:
    header: Tensor
    works: list[Any]
    payload: Tensor | None


class Before:
    """A stage's border with the one before it: activations come, gradients go. dtype: `Model.dtype`. proves:
    what one member of that stage did proves what all did, for they talk in each block."""

    def __init__(
        self,
        group: Group,
        source: int,
        destinations: Sequence[int],
        dtype: torch.dtype,
        *,
        proves: bool,
        lane: Lane = ONLY,
    ) -> None:
        self._group, self._source, self._destinations = group, source, tuple(destinations)
        self._dtype, self._proves, self._lane = dtype, proves, lane
        self._room = Room()
        self._posted: dict[int, _Posted] = {}
        self._sent: dict[int, list[int]] = {}
        self._passed: dict[int, int] = {}

    def begin_step(self, order: Iterable[Pass]) -> None:
        """`order`: the passes of the stage before. When one of its activations comes, the gradients of the
        backward passes that it ran before are there."""
        done = 0
        for kind, index, chunk in order:
            if chunk != self._lane.chunk:
                continue
            if kind == "backward":
                done += 1
            else:
                self._passed[index] = done

    def post(self, index: int, samples: int) -> None:
        """Starts to receive the activation of a micro-batch of so many samples, if that was not done."""
        if index in self._posted:
            return
        header = empty_header(samples)
        works = [self._group.post(header, self._source, self._lane.tag(index, _HEADER))]
        payload = None
        if self._room.bytes:
            payload = torch.empty(self._room.bytes, dtype=torch.uint8)
            works.append(self._group.post(payload, self._source, self._lane.tag(index, _PAYLOAD)))
        self._posted[index] = _Posted(header, works, payload)

    def activation(self, index: int, samples: int) -> tuple[Tensor, tuple[int, ...]]:
        """The activation of a micro-batch and its sample ids; waits until it is here."""
        self.post(index, samples)
        posted = self._posted.pop(index)
        for work in posted.works:
            self._group.take(work, source=self._source)
        if self._proves:
            for earlier in [i for i in self._sent if i < self._passed[index]]:
                self._group.arrived(self._sent.pop(earlier))
        dtype, shape, ids = unpack_header(posted.header, self._dtype)
        size = torch.Size(shape).numel() * dtype.itemsize
        self._room.crossed(size)
        raw = posted.payload if posted.payload is not None else torch.empty(0, dtype=torch.uint8)
        if size > raw.numel():
            whole = torch.empty(size, dtype=torch.uint8)
            whole[: raw.numel()] = raw
            self._group.receive(whole[raw.numel() :], self._source, self._lane.tag(index, _REST))
            raw = whole
        return raw[:size].view(dtype).view(shape), ids

    def send_gradient(self, index: int, grad: Tensor) -> None:
        grad = grad.contiguous()
        tag = self._lane.tag(index, _GRADIENT)
        self._sent[index] = [self._group.send(grad, rank, tag) for rank in self._destinations]

    def end_step(self) -> None:
        self._room.end_step()
        self._sent.clear()


class After:
    """A stage's border with the one after it: activations go, gradients come. dtype: `Model.dtype`. proves: a
    gradient that came proves that all members of that stage have its activation."""

    def __init__(
        self,
        group: Group,
        source: int,
        destinations: Sequence[int],
        dtype: torch.dtype,
        *,
        proves: bool,
        lane: Lane = ONLY,
    ) -> None:
        self._group, self._source, self._destinations = group, source, tuple(destinations)
        self._dtype, self._proves, self._lane = dtype, proves, lane
        self._room = Room()
        self._posted: dict[int, tuple[Tensor, Any]] = {}
        self._sent: dict[int, list[int]] = {}

    def send_activation(self, index: int, x: Tensor, ids: Sequence[int]) -> None:
        raw, room = x.contiguous().view(-1).view(torch.uint8), self._room.bytes
        self._room.crossed(raw.numel())
        parts = [(_HEADER, pack_header(x, ids, self._dtype))]
        if room:
            parts.append((_PAYLOAD, raw[:room]))
        if raw.numel() > room:
            parts.append((_REST, raw[room:]))
        self._sent[index] = [
            self._group.send(part, rank, self._lane.tag(index, kind))
            for rank in self._destinations
            for kind, part in parts
        ]

    def post(self, index: int, like: Tensor) -> None:
        """Starts to receive the gradient of a micro-batch, of the shape of its activation."""
        if index not in self._posted:
            grad = torch.empty_like(like, memory_format=torch.contiguous_format)
            self._posted[index] = grad, self._group.post(grad, self._source, self._lane.tag(index, _GRADIENT))

    def gradient(self, index: int, like: Tensor) -> Tensor:
        """Waits until it is here."""
        self.post(index, like)
        grad, work = self._posted.pop(index)
        self._group.take(work, source=self._source)
        if self._proves:
            self._group.arrived(self._sent.pop(index, ()))
        return grad

    def end_step(self) -> None:
        self._room.end_step()
        self._sent.clear()
