"""`PackedRow`: the sequences that a forward and backward pass is of, one after the other without padding.

Activations of a packed row are [1, tokens, ...]. Attention must not look from one sequence into another, and
positions begin anew in each: modules ask for them here (`elasticd.attention`, `elasticd.positions`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from elasticd_planner.spec.batch import MicroBatch, SequencePiece
from torch import Tensor

from elasticd.runtime.accelerator import put


class Segment(NamedTuple):
    """Tokens [start, stop) of a sequence, which are rows [first, first + stop - start) of the packed row."""

    piece: SequencePiece
    start: int
    stop: int
    first: int

    @property
    def rows(self) -> slice:
        """Where it is in the packed row."""
        return slice(self.first, self.first + self.stop - self.start)


class PackedRow:
    """The pieces of one row on this device, in their order, and where their tokens are."""

    pieces: MicroBatch
    segments: tuple[Segment, ...]  #: of each piece the earlier tokens, then the later ones
    tokens: int  #: of all pieces
    positions: Tensor  #: of each token in its own sequence [tokens], int64
    whole: bool  #: no sequence is cut: each piece is all of its sequence

    def __init__(self, pieces: Sequence[SequencePiece], device: torch.device) -> None:
        self.pieces = tuple(pieces)
        segments, at = [], 0
        for piece in pieces:
            for start, stop in piece.spans:
                segments.append(Segment(piece, start, stop, at))
                at += stop - start
        self.segments, self.tokens = tuple(segments), at
        self.whole = all(piece.tokens == piece.length for piece in pieces)
        spans = [torch.arange(each.start, each.stop) for each in segments]
        self.positions = put(torch.cat(spans) if spans else torch.arange(0), device)


class _OfThread(threading.local):
    """A thread has the attribute from the first: torch.compile would make graphs anew where it comes later."""

    def __init__(self) -> None:
        self.row: PackedRow | None = None


_of_thread = _OfThread()


@contextmanager
def passing(row: PackedRow | None) -> Iterator[None]:
    """Lets `current_row` be this row meanwhile. None: the pass is of padded samples."""
    before = current_row()
    _of_thread.row = row
    try:
        yield
    finally:
        _of_thread.row = before


def current_row() -> PackedRow | None:
    """The packed row that this thread's pass is of; None: there is none, samples are [samples, tokens, ...]."""
    return _of_thread.row
