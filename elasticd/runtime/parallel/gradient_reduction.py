"""Gradient reduction by holder set, beside the backward pass: all-reduces of flat buffers for each set.

The sets, their pieces and who counts come from the layouts (elasticd_planner.layout.gradient_reduction), so
that replicas, unequal shards, tied copies and pipelines of any shape are one case. A bucket is sent as soon as
the last micro-batch has left the sections that its pieces are of, and waited for once all passes are done. A
gradient that is whole in its bucket is let go then: its sum stays in the bucket. Where gradients are kept by
the devices alone that keep the optimizer's state (ZeRO 2), what is kept is copied out, and the bucket goes.

A parameter that no backward pass of the step reached has no gradient afterwards either, so that the optimizer
leaves it alone, as in one process. A device on which that is so sends a term of -0.0; the others' terms begin
with anything but that. Since -0.0 + -0.0 is -0.0, and -0.0 + x is x, a sum that is -0.0 has no term.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from elasticd_migration.local_state import Owned
from elasticd_planner.layout.gradient_reduction import Piece, Reduction
from elasticd_planner.spec.box import Box
from torch import Tensor, nn

from elasticd.runtime.comm.groups import Group
from elasticd.runtime.parallel.gradient_buckets import Bucket, Parameters, buckets, gradient_dtype
from elasticd.runtime.telemetry.comm_timer import Stopwatch

#: Elements whose squares are added at once, so that rounding stays small: on a CPU, and beside it.
_CHUNK, _CHUNK_BESIDE = 1 << 15, 1 << 20


class GradientReducer:
    """Runs the reductions that one device takes part in.

    modules: the local ones by section. keep_all: every gradient stays where its parameter is (not so under ZeRO
    2). most_bytes: of local gradients, buffers and what is kept, at once, in the last step that kept some."""

    def __init__(
        self,
        device: str,
        reductions: tuple[Reduction, ...],
        groups: Mapping[tuple[str, ...], Group],
        parameters: Parameters,
        modules: Mapping[str, nn.Module],
        *,
        keep_all: bool = True,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._device, self._groups, self._parameters = device, groups, parameters
        self._keep_all, self._stopwatch = keep_all, stopwatch or Stopwatch()
        self._alone = [piece for r in reductions if len(r.devices) == 1 for piece in r.pieces]
        self._queues = [buckets(r, parameters) for r in reductions if len(r.devices) > 1]
        self._users = _users(parameters, modules)
        self._where: dict[str, list[tuple[int, int]]] = {}
        for queue, cut in enumerate(self._queues):
            for index, bucket in enumerate(cut):
                for name in {piece.name for piece in bucket.pieces}:
                    self._where.setdefault(name, []).append((queue, index))
        self._pieces = Counter(p.name for cut in self._queues for bucket in cut for p in bucket.pieces)
        self._pieces.update(piece.name for piece in self._alone)
        self._squares = 0.0
        self.most_bytes = 0
        self._begin()

    def _begin(self) -> None:
        """Nothing of the step is sent yet."""
        self._waits_for = {name: len(users) for name, users in self._users.items()}
        self._missing = [[len({p.name for p in bucket.pieces}) for bucket in cut] for cut in self._queues]
        self._sent = [0] * len(self._queues)
        self._left = Counter(self._pieces)
        self._flying: list[tuple[Bucket, Tensor, Any]] = []
        self._flat_bytes = 0

    def ready(self, section: str) -> None:
        """The last micro-batch's backward pass has left `section`: its gradients are all that this device
        adds. What is whole now is sent, in the set's order."""
        touched = set()
        for name, users in self._users.items():
            if section not in users:
                continue
            self._waits_for[name] -= 1
            if self._waits_for[name] == 0:
                for queue, index in self._where.get(name, ()):
                    self._missing[queue][index] -= 1
                    touched.add(queue)
        for queue in sorted(touched):
            cut = self._queues[queue]
            while self._sent[queue] < len(cut) and not self._missing[queue][self._sent[queue]]:
                self._send(queue)

    def _send(self, queue: int) -> None:
        with self._stopwatch.measure("reduce"):
            bucket = self._queues[queue][self._sent[queue]]
            self._sent[queue] += 1
            flat = torch.cat([self._term(piece).reshape(-1) for piece in bucket.pieces])
            made = [self._parameters[piece.name][1].grad is not None for piece in bucket.pieces]
            flat[bucket.firsts if all(made) else bucket.firsts[made]] += 0.0
            self._flat_bytes += _bytes(flat)
            self._note(0)
            for piece in bucket.pieces:
                self._left[piece.name] -= 1
                if not self._left[piece.name] and (self._whole(piece) or not self._keep_all):
                    self._parameters[piece.name][1].grad = None
            work = self._groups[bucket.devices].begin_all_reduce(flat)
            self._flying.append((bucket, flat, work))

    def _landed(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Every bucket with its sums, once all are sent."""
        for queue, cut in enumerate(self._queues):
            while self._sent[queue] < len(cut):
                self._send(queue)
        self._squares = sum_of_squares(
            self._gradient(piece.name, piece.box)
            for piece in self._alone
            if self._parameters[piece.name][1].grad is not None
        )
        for index, (bucket, flat, work) in enumerate(self._flying):
            self._groups[bucket.devices].finish(work)
            self._flying[index] = (bucket, flat.new_empty(0), None)
            yield bucket, flat

    def __call__(self) -> None:
        """Makes every local gradient the sum over all that hold a term of it."""
        for bucket, flat in self._landed():
            if bucket.counter == self._device:
                self._squares += sum_of_squares([flat])
            for piece, part in _sums(bucket, flat):
                if self._whole(piece):
                    self._parameters[piece.name][1].grad = part
                else:
                    self._gradient(piece.name, piece.box).copy_(part)
        self._begin()

    def into(self, owned: Sequence[Owned]) -> None:
        """Gives each box that is owned here the sum of its gradients, and keeps no other gradient."""
        boxes: dict[str, list[Owned]] = {}
        for each in owned:
            boxes.setdefault(each.name, []).append(each)
        kept = 0
        for bucket, flat in self._landed():
            for piece, part in _sums(bucket, flat):
                kept += _keep(piece, part, boxes.get(piece.name, ()))
                self._note(kept)
            self._flat_bytes -= _bytes(flat)
        for piece in self._alone:
            if self._parameters[piece.name][1].grad is not None:
                kept += _keep(piece, self._gradient(piece.name, piece.box), boxes.get(piece.name, ()))
                self._note(kept)
            self._left[piece.name] -= 1
            if not self._left[piece.name]:
                self._let_go(piece.name, boxes.get(piece.name, ()))
        self._begin()

    def _note(self, kept: int) -> None:
        """What is held at this moment, where that is to be bounded."""
        if self._keep_all:
            return
        if not self._flying and not kept:
            self.most_bytes = 0
        alive = sum(_bytes(parameter.grad) for _, parameter in self._parameters.values())
        self.most_bytes = max(self.most_bytes, alive + self._flat_bytes + kept)

    def _let_go(self, name: str, owned: Iterable[Owned]) -> None:
        """Drops a gradient unless the parameter itself is owned."""
        parameter = self._parameters[name][1]
        if not any(part.parameter is parameter for part in owned):
            parameter.grad = None

    def squares(self) -> float:
        """The sum of squares of the gradients that this device counts: each piece counts once in the job."""
        return self._squares

    def _whole(self, piece: Piece) -> bool:
        return piece.box == self._parameters[piece.name][0]

    def _term(self, piece: Piece) -> Tensor:
        """What this device adds to a piece."""
        parameter = self._parameters[piece.name][1]
        if parameter.grad is not None and self._device in piece.counting:
            return self._gradient(piece.name, piece.box)
        return parameter.new_full((piece.box.size,), -0.0, dtype=gradient_dtype(parameter))

    def _gradient(self, name: str, box: Box) -> Tensor:
        held, parameter = self._parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
        return parameter.grad[box.slices(held)]


def no_terms(sums: Tensor) -> Tensor:
    """Of first elements of sums whether each one's sum has no term."""
    return (sums == 0) & sums.signbit()


def _users(parameters: Parameters, modules: Mapping[str, nn.Module]) -> dict[str, frozenset[str]]:
    """The local sections that use each parameter."""
    inside = {section: {id(p) for p in module.parameters()} for section, module in modules.items()}
    return {
        name: frozenset(section for section, ids in inside.items() if id(parameter) in ids)
        for name, (_, parameter) in parameters.items()
    }


def _sums(bucket: Bucket, flat: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """The pieces that have terms, with their sums, each of its box's shape."""
    parts = flat.split([piece.box.size for piece in bucket.pieces])
    for piece, part, without in zip(bucket.pieces, parts, no_terms(flat[bucket.firsts]).tolist(), strict=True):
        if not without:
            yield piece, part.view(piece.box.shape)


def sum_of_squares(gradients: Iterable[Tensor]) -> float:
    """Of all elements. Squares of chunks are summed in the gradients' own precision (in single precision at
    least), chunks in double; where that overflows, all is in double."""
    listed = [gradient.reshape(-1) for gradient in gradients]
    total = sum(_squares(each, torch.promote_types(each.dtype, torch.float32)) for each in listed)
    return total if math.isfinite(total) else sum(_squares(each, torch.float64) for each in listed)


def _squares(flat: Tensor, dtype: torch.dtype) -> float:
    if not flat.numel():
        return 0.0
    wide = (part.to(dtype) for part in flat.split(_CHUNK if flat.device.type == "cpu" else _CHUNK_BESIDE))
    return float(torch.stack([torch.dot(part, part) for part in wide]).double().sum())


def _keep(piece: Piece, reduced: Tensor, owned: Iterable[Owned]) -> int:
    """Copies what is owned of a piece to where its optimizer reads it; the bytes that this took."""
    taken = 0
    for _, box, parameter in owned:
        common = box.overlap(piece.box)
        if common is None:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            taken += _bytes(parameter.grad)
        target = parameter.grad[common.slices(box)]
        source = reduced[common.slices(piece.box)]
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
    return taken


def _bytes(tensor: Tensor | None) -> int:
    return tensor.numel() * tensor.element_size() if tensor is not None else 0
