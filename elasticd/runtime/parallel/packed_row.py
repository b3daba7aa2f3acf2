"""`PackedRow`: the sequences that a forward and backward pass is of, one after the other without padding.

Activations of a packed row are [1, tokens, ...]. Attention must not look from one sequence into another, and
positions begin anew in each: modules ask for them here (`elasticd.attention`, `elasticd.positions`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

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
        """Its place in the packed row."""
        return slice(self.first, self.first + self.stop - self.start)


class KeyExchange(Protocol):
    """The exchange of this device with other lanes, because sequences of a row are cut over them."""

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        row: PackedRow,
        *,
        causal: bool,
        window: int | None,
        scale: float | None,
    ) -> Tensor:
        """`elasticd.attention` of the row."""

    def first_pass(self, section: str) -> AbstractContextManager[None]:
        """Around the first forward pass of a block that recomputes its activations."""

    def second_pass(self, section: str) -> AbstractContextManager[None]:
        """Around its second forward pass, which exchanges nothing."""


class PackedRow:
    """The pieces of one row on this device, in their order, and where their tokens are."""

    pieces: MicroBatch
    segments: tuple[Segment, ...]  #: of each piece the earlier tokens, then the later ones
    tokens: int  #: of all pieces
    positions: Tensor  #: of each token in its own sequence [tokens], int64
    sample_of_token: Tensor  #: of each token the place of its piece in `pieces` [tokens], int64
    whole: bool  #: no sequence is cut: each piece is all of its sequence
    exchange: KeyExchange | None  #: with the lanes that have the rest of sequences

    def __init__(
        self, pieces: Sequence[SequencePiece], device: torch.device, exchange: KeyExchange | None = None
    ) -> None:
        self.pieces, self.exchange = tuple(pieces), exchange
        segments, at = [], 0
        for piece in pieces:
            for start, stop in piece.spans:
                segments.append(Segment(piece, start, stop, at))
                at += stop - start
        self.segments, self.tokens = tuple(segments), at
        self.whole = all(piece.tokens == piece.length for piece in pieces)
        spans = [torch.arange(each.start, each.stop) for each in segments]
        of_piece = torch.tensor([piece.tokens for piece in pieces])
        both = torch.stack([torch.cat(spans), torch.arange(len(self.pieces)).repeat_interleave(of_piece)])
        self.positions, self.sample_of_token = put(both, device)  # in one copy


class _OfThread(threading.local):
    """The row of a thread's passes: there from the first, so that compiled graphs hold in every thread."""

    def __init__(self) -> None:
        self.row: PackedRow | None = None
        self.passed = False  # a pass has begun in this thread


_of_thread = _OfThread()
#: Of devices other than the CPU. Their backward passes run in a thread of autograd's, and so do forward passes
#: that a module makes again in these (torch.utils.checkpoint).
_on_device: dict[torch.device, PackedRow] = {}


@contextmanager
def passing(row: PackedRow | None) -> Iterator[None]:
    """Lets `current_row` be this row meanwhile. None: the pass is of padded samples."""
    before, _of_thread.row, _of_thread.passed = current_row(), row, True
    device = None if row is None else row.positions.device
    if row is not None and device is not None and device.type != "cpu":
        _on_device[device] = row
    try:
        yield
    finally:
        _of_thread.row = before
        if device is not None:
            _on_device.pop(device, None)


def current_row(device: torch.device | None = None) -> PackedRow | None:
    """The packed row that this thread's pass is of; None: there is none, samples are [samples, tokens, ...].

    Args:
        device: where the caller computes. In a thread in which no pass began that device's pass counts.
    """
    if _on_device and device is not None and not _of_thread.passed:
        return _on_device.get(device)
    return _of_thread.row


def first_pass(section: str) -> AbstractContextManager[None]:
    """Around the first forward pass of a block that recomputes its activations, under `passing`."""
    row = current_row()
    return nullcontext() if row is None or row.exchange is None else row.exchange.first_pass(section)


def second_pass(section: str) -> AbstractContextManager[None]:
    """Around its second forward pass."""
    row = current_row()
    return nullcontext() if row is None or row.exchange is None else row.exchange.second_pass(section)
