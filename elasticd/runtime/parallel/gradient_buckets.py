"""Buckets of a gradient reduction: which pieces share a flat buffer, and the order of the all-reduces.

All devices of a holder set cut the same buckets and send them in the same order, that in which backward passes
compute gradients: the model's last section first. So no bucket waits long for the one before it, whatever part
of the model each device of the set runs.
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
    """Pieces of gradients, all of one dtype, that are reduced in one flat buffer."""

    devices: tuple[str, ...]  #: that reduce it
    pieces: tuple[Piece, ...]  #: in the order in which they lie in the buffer
    counter: str  #: the device that adds the squares of this bucket to the norm; devices take turns
    place: torch.device  #: that its buffer lies on

    @cached_property
    def firsts(self) -> torch.Tensor:
        """The index of each piece's first element in the flat buffer: [pieces], int64, beside it."""
        sizes = [piece.box.size for piece in self.pieces]
        return torch.tensor([0, *accumulate(sizes[:-1])], device=self.place)


def buckets(reduction: Reduction, parameters: Parameters) -> tuple[Bucket, ...]:
    """The buckets of one holder set, in the order in which all its devices send them.

    Args:
        reduction: of the holder set.
        parameters: the local ones by name, each with the box that it holds.
    """
    devices = reduction.devices
    return tuple(
        Bucket(
            devices=devices,
            pieces=tuple(pieces),
            counter=devices[i % len(devices)],
            place=parameters[pieces[0].name][1].device,
        )
        for i, pieces in enumerate(_cut(reduction, parameters))
    )


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype that a parameter's gradients are summed in: its own, unless `Precision.add_up` set another."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


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
