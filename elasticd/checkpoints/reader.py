"""Boxes of a checkpoint's tensors, read from whatever boxes they were written in: any layout to any other.

Only the blocks that hold wanted bytes are read, each of them is tested, and at most `SPAN` bytes are in
memory beside what is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box

from elasticd.checkpoints.checksums import BLOCK_BYTES, ChecksumReader, Damaged
from elasticd.checkpoints.manifest import MANIFEST, Chunk, Manifest, TensorEntry

#: Bytes that are read at once, at most.
SPAN = 32 * BLOCK_BYTES
Bytes = npt.NDArray[np.uint8]
#: What elements of so many bytes are copied as.
_ELEMENTS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class Wanted(NamedTuple):
    """One box of one plane, and where it goes: `into` is flat, and has exactly the box's bytes."""

    item: Item
    plane: str
    box: Box
    into: Bytes


class _Piece(NamedTuple):
    """The part of a wanted box that one chunk has, and the view of the destination that it goes to."""

    file: str
    first: int
    chunk: Chunk
    box: Box
    into: npt.NDArray[Any]


class CheckpointReader:
    """Reads one checkpoint. `bytes_read` counts what came from disk."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self.manifest = path, manifest
        self._sums = {file.name: file for file in manifest.files}
        self.bytes_read = 0

    def entry(self, item: Item) -> TensorEntry:
        """Raises `Damaged` where the checkpoint has no such item."""
        entry = self.manifest.tensors.get(item.role, {}).get(item.name)
        if entry is None:
            raise Damaged(f"{self._path / MANIFEST}: has no {item}")
        return entry

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Fills all destinations. Raises `Damaged`, and then some of them are filled and some are not."""
        pieces = [piece for want in wanted for piece in self._pieces(want)]
        pieces.sort(key=lambda piece: (piece.file, piece.first))
        for name, group in groupby(pieces, key=lambda piece: piece.file):
            if name not in self._sums:
                raise Damaged(f"{self._path / MANIFEST}: names the file {name} without its checksums")
            with closing(ChecksumReader(self._path, self._sums[name])) as file:
                for piece in group:
                    _copy(file, piece.chunk, piece.box, piece.into)
                self.bytes_read += file.bytes_read

    def _pieces(self, want: Wanted) -> list[_Piece]:
        plane = self.entry(want.item).plane(want.plane)
        if plane is None:
            raise Damaged(f"{self._path / MANIFEST}: has no {want.plane} of {want.item}")
        into = want.into.view(_ELEMENTS[plane.itemsize]).reshape(want.box.shape)
        pieces = []
        for chunk in plane.chunks:
            part = want.box.overlap(chunk.box)
            if part is not None:
                first, _ = _span(chunk.box, part)
                pieces.append(
                    _Piece(
                        file=chunk.record.file,
                        first=chunk.data + first * plane.itemsize,
                        chunk=chunk,
                        box=part,
                        into=_part(into, part, want.box),
                    )
                )
        if sum(piece.box.size for piece in pieces) != want.box.size:
            raise Damaged(f"{self._path / MANIFEST}: has not all of {want.box} of {want.item}")
        return pieces


def _part(array: npt.NDArray[Any], box: Box, within: Box) -> npt.NDArray[Any]:
    """The view of `box` in an array that holds `within`; also of one without dimensions."""
    index: Any = (*box.slices(within), ...)
    part: npt.NDArray[Any] = array[index]
    return part


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements from one index to the next, in row-major order."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _span(held: Box, box: Box) -> tuple[int, int]:
    """The first element of `box` in an array of `held`, and the one after its last."""
    strides = _strides(held.shape)
    first = sum((a - o) * s for a, o, s in zip(box.start, held.start, strides, strict=True))
    last = sum((b - 1 - o) * s for b, o, s in zip(box.stop, held.start, strides, strict=True))
    return first, last + 1


def _copy(file: ChecksumReader, chunk: Chunk, box: Box, into: npt.NDArray[Any]) -> None:
    """A box whose rows lie far apart is halved until what lies between them is not worth skipping."""
    item = into.dtype.itemsize
    first, last = _span(chunk.box, box)
    size, useful = (last - first) * item, box.size * item
    if size > SPAN or (size > 2 * BLOCK_BYTES and size > 2 * useful):
        dim = next(d for d, extent in enumerate(box.shape) if extent > 1)
        middle = (box.start[dim] + box.stop[dim]) // 2
        for start, stop in ((box.start[dim], middle), (middle, box.stop[dim])):
            half = Box(
                start=(*box.start[:dim], start, *box.start[dim + 1 :]),
                stop=(*box.stop[:dim], stop, *box.stop[dim + 1 :]),
            )
            _copy(file, chunk, half, _part(into, half, box))
        return
    data = file.read(chunk.data + first * item, chunk.data + last * item)
    if size == useful and into.flags.c_contiguous:
        into.reshape(-1).view(np.uint8)[:] = data
        return
    strides = tuple(stride * item for stride in _strides(chunk.box.shape))
    np.copyto(into, np.ndarray(box.shape, dtype=into.dtype, buffer=data, strides=strides))
