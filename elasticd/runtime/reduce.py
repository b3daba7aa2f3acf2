"""Gradient reduction by holder set: all-reduces of flat buffers for each set of devices.

The sets, their pieces and who counts come from the layouts (elasticd_planner.reduction), so that replicas,
unequal shards, tied copies and pipelines of any shape are one case. Buffers are bounded. Where gradients are
kept by the devices alone that keep the optimizer's state (ZeRO 2), each is let go as soon as all of it is
reduced, and what is kept of it is copied out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from elasticd_migration.state import Owned
from elasticd_planner.boxes import Box
from elasticd_planner.reduction import Piece, Reduction
from torch import Tensor, nn

from elasticd.runtime.groups import Group

Parameters = Mapping[str, tuple[Box, nn.Parameter]]

#: Bytes of one flat buffer; a piece that is larger has one to itself.
BUCKET = 32 * 1024 * 1024


class GradientReducer:
    """Runs the reductions that one device takes part in.

    most_bytes: of local gradients, buffers and what is kept, at once, in the last step."""

    def __init__(
        self,
        device: str,
        reductions: tuple[Reduction, ...],
        groups: Mapping[tuple[str, ...], Group],
        parameters: Parameters,
    ) -> None:
        self._device, self._groups, self._parameters = device, groups, parameters
        self._mine = reductions
        self._pieces = Counter(piece.name for reduction in reductions for piece in reduction.pieces)
        self.most_bytes = 0

    def __call__(self) -> None:
        """Makes every local gradient the sum over all that hold a term of it."""
        for reduction in self._mine:
            for bucket in self._buckets(reduction):
                for piece, part in self._reduced(reduction, bucket):
                    view = self._gradient(piece.name, piece.box)
                    if view.data_ptr() != part.data_ptr():
                        view.copy_(part)

    def into(self, owned: Sequence[Owned]) -> None:
        """Gives each box that is owned here the sum of its gradients, and keeps no other gradient."""
        self._all_there()
        alive = sum(_bytes(parameter.grad) for _, parameter in self._parameters.values())
        self.most_bytes = alive
        left = Counter(self._pieces)
        boxes: dict[str, list[Owned]] = {}
        for part in owned:
            boxes.setdefault(part.name, []).append(part)
        for reduction in self._mine:
            for bucket in self._buckets(reduction):
                flat = sum(piece.box.size for piece in bucket) if len(reduction.devices) > 1 else 0
                width = max(self._parameters[piece.name][1].element_size() for piece in bucket)
                self.most_bytes = max(self.most_bytes, alive + flat * width)
                for piece, reduced in self._reduced(reduction, bucket):
                    alive += _keep(piece, reduced, boxes.get(piece.name, ()))
                    left[piece.name] -= 1
                    if not left[piece.name]:
                        alive -= self._let_go(piece.name, boxes.get(piece.name, ()))
                self.most_bytes = max(self.most_bytes, alive)

    def _reduced(self, reduction: Reduction, bucket: Sequence[Piece]) -> Iterator[tuple[Piece, Tensor]]:
        """The pieces with their sums, each of its box's shape."""
        views = [(piece, self._gradient(piece.name, piece.box)) for piece in bucket]
        if len(reduction.devices) == 1:
            yield from views
            return
        for dtype in dict.fromkeys(view.dtype for _, view in views):
            alike = [(piece, view) for piece, view in views if view.dtype == dtype]
            flat = torch.cat(
                [
                    view.reshape(-1) if self._device in piece.counting else view.new_zeros(view.numel())
                    for piece, view in alike
                ]
            )
            self._groups[reduction.devices].all_reduce(flat)
            parts = flat.split([view.numel() for _, view in alike])
            for (piece, view), part in zip(alike, parts, strict=True):
                yield piece, part.view(view.shape)

    def _buckets(self, reduction: Reduction) -> Iterator[list[Piece]]:
        """The pieces of a reduction in buffers of bounded size, the same on all its devices."""
        bucket: list[Piece] = []
        size = 0
        for piece in reduction.pieces:
            more = piece.box.size * self._parameters[piece.name][1].element_size()
            if bucket and size + more > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(piece)
            size += more
        if bucket:
            yield bucket

    def _let_go(self, name: str, owned: Iterable[Owned]) -> int:
        """Drops a gradient unless the parameter itself is owned; the bytes that are free then."""
        parameter = self._parameters[name][1]
        if any(part.parameter is parameter for part in owned):
            return 0
        freed = _bytes(parameter.grad)
        parameter.grad = None
        return freed

    def _all_there(self) -> None:
        for name in self._pieces:
            self._gradient(name, self._parameters[name][0])

    def squares(self) -> float:
        """The sum of squares of the gradients that this device counts: each piece counts once in the job."""
        return sum_of_squares(
            self._gradient(piece.name, piece.box)
            for reduction in self._mine
            if reduction.owner == self._device
            for piece in reduction.pieces
        )

    def _gradient(self, name: str, box: Box) -> Tensor:
        held, parameter = self._parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad[box.slices(held)]


def sum_of_squares(gradients: Iterable[Tensor]) -> float:
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        total += gradient.double().square().sum().cpu()
    return float(total)


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
