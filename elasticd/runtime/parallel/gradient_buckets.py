"""The flat buffers of a gradient reduction: which pieces go together, and in which order they are sent.

Buckets are cut alike on every device of a holder set and sent in one order: that in which backward passes make
gradients, the model's last section first. So none waits long for the one before it, whatever part of the model
each device of the set runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from elasticd_planner.layout.gradient_reduction import Piece, Reduction
from elasticd_planner.spec.box import Box
from torch import nn

Parameters = Mapping[str, tuple[Box, nn.Parameter]]

#: Bytes of one flat buffer; a piece that is larger has one to itself. Small enough that several are under way
#: while a model of a few blocks runs backward.
BUCKET = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Pieces of one type of number that `devices` reduce together. `counter`: the one of them that adds their
    squares to the norm; devices take turns."""

    devices: tuple[str, ...]
    pieces: tuple[Piece, ...]
    counter: str

    @cached_property
    def firsts(self) -> torch.Tensor:
        """Where in the flat buffer each piece begins."""
        sizes = [piece.box.size for piece in self.pieces]
        return torch.tensor([0, *accumulate(sizes[:-1])])


def buckets(reduction: Reduction, parameters: Parameters) -> tuple[Bucket, ...]:
    """The buckets of one holder set, in the order in which all its devices send them."""
    found = list(_cut(reduction, parameters))
    devices = reduction.devices
    return tuple(
        Bucket(devices=devices, pieces=tuple(pieces), counter=devices[i % len(devices)])
        for i, pieces in enumerate(found)
    )


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The type that a parameter's gradients add up in: its own, unless `Precision.add_up` said otherwise."""
    found: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return found or parameter.dtype


def _cut(reduction: Reduction, parameters: Parameters) -> Iterator[list[Piece]]:
    bucket: list[Piece] = []
    size, last = 0, None
    for piece in reversed(reduction.pieces):
        dtype = gradient_dtype(parameters[piece.name][1])
        more = piece.box.size * dtype.itemsize
        if bucket and (size + more > BUCKET or dtype != last):
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size, last = size + more, dtype
    if bucket:
        yield bucket
