"""A snapshot as bytes in a memory file: the values of one member's share, then what they are.

    values, each from a multiple of 64 bytes on | contents as JSON | end: length of the contents, sum, magic

What says what lies where comes last: values keep their places from one snapshot to the next, whatever the text
beside them grows to. The sum is of all 64-bit words before the end. A file may be larger than its snapshot.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Mapping, Sequence

import msgspec
import torch
from elasticd_migration.exchange import checksum
from elasticd_migration.local_state import LocalState, LocalTensor, Shard, restore, torch_dtype
from elasticd_migration.schema import Disagreement, Group, Schema, merge
from elasticd_planner.layout.layouts import Item, Role
from elasticd_planner.spec.box import Box
from elasticd_planner.value import StoredValue, Value
from torch import Tensor

from elasticd.codec.decoding import decode_stored, tag_of
from elasticd.runtime.accelerator import CPU, Accelerator, Event
from elasticd.runtime.checkpoint.staging import Piece, padded, places

_END = struct.Struct("<Qq8s")
_MAGIC = b"elasnap1"
#: Version of the contents.
VERSION = 1
#: Bytes that what is said of one piece takes at most: its names, its box, where it lies.
_PIECE_HEADER_BYTES = 512
#: Bytes from one page to the next, or fewer.
_PAGE_BYTES = 4096


class BadSnapshot(RuntimeError):
    """A memory file is not the snapshot that was asked for, or not whole."""


class SnapshotChunk(Value, frozen=True, kw_only=True):
    """One box of one plane of an item; its elements lie in row-major order from byte `at` on."""

    name: str
    role: Role
    box: Box
    plane: str
    dtype: str
    at: int


class Contents(StoredValue, frozen=True, kw_only=True, tag="snapshot-contents"):
    """The owner of a state, and the places of its values. small: scalars of the share's items, groups and
    extras."""

    job: str
    device: str
    plan: int
    step: int
    chunks: tuple[SnapshotChunk, ...]
    small: Schema
    version: int = VERSION


class _Written(msgspec.Struct, frozen=True, kw_only=True, tag=tag_of(Contents)):
    """`Contents` as they are written: the chunks are the same text from one snapshot to the next."""

    job: str
    device: str
    plan: int
    step: int
    chunks: msgspec.Raw
    small: Schema
    version: int = VERSION


def size_of(held: Sequence[Piece], small: LocalState) -> int:
    """Bytes that a snapshot takes in a file, with room for small values that are written longer later."""
    *_, values = places(piece.values for piece in held)
    return padded(values + _PIECE_HEADER_BYTES * len(held) + 2 * len(small.schema().to_json()) + _PAGE_BYTES)


class MemoryFile:
    """Memory of `room` bytes that is there (no page of it is given at the first write), and its descriptor.

    One thread at a time copies and closes. The file lives as long as somebody has a descriptor of it."""

    def __init__(self, room: int, accelerator: Accelerator = CPU) -> None:
        """
        Args:
            room: bytes.
            accelerator: where values come from; the memory is pinned for it.

        Raises:
            OSError: the machine has not so much memory for files.
        """
        self.room, self._accelerator = room, accelerator
        self.fd = os.memfd_create("elasticd-snapshot", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        os.posix_fallocate(self.fd, 0, room)
        self._map = mmap.mmap(self.fd, room)
        self._raw = torch.frombuffer(self._map, dtype=torch.uint8)
        self._raw[::_PAGE_BYTES].zero_()  # maps its pages; torch lets other threads run, mmap would not
        if (unpin := accelerator.pin(self._raw)) is not None:
            # At the end of the process the driver may be gone already, and takes it back by itself.
            weakref.finalize(self, unpin).atexit = False
        self._cut: list[Tensor] = []
        self._shapes: tuple[tuple[torch.dtype, torch.Size], ...] = ()
        self._chunks: tuple[object, msgspec.Raw] = (None, msgspec.Raw())
        self._end = 0

    def prepare(self, held: Sequence[Piece]) -> None:
        """Gives each value its place for `copy`. Raises BadSnapshot where there is no room."""
        values = [piece.values for piece in held]
        shapes = tuple((tensor.dtype, tensor.shape) for tensor in values)
        if shapes == self._shapes:
            return
        *starts, end = places(values)
        if end > self.room:
            raise BadSnapshot(f"{end} bytes of values do not fit into a memory file of {self.room}")
        self._cut = [_view(self._raw, at, *shape) for at, shape in zip(starts, shapes, strict=True)]
        self._shapes, self._end = shapes, end

    def copy(self, held: Sequence[Piece], after: Event | None = None) -> None:
        """Copies the values once the device has passed `after` (None: what this thread has asked of it); it
        returns when all bytes are here. Raises BadSnapshot where there is no room."""
        self.prepare(held)
        self._accelerator.to_host(zip(self._cut, (piece.values for piece in held), strict=True), after)

    def close(
        self, job: str, device: str, plan: int, step: int, held: Sequence[Piece], small: LocalState
    ) -> int:
        """Writes what the values that were copied are, and their sum: the snapshot's size in bytes."""
        written = _Written(
            job=job, device=device, plan=plan, step=step, chunks=self._text(held), small=small.schema()
        )
        text = msgspec.json.encode(written)
        text += b" " * (-len(text) % 8)
        body = self._end + len(text)
        if body + _END.size > self.room:
            raise BadSnapshot(f"a snapshot of {body} bytes does not fit into a memory file of {self.room}")
        self._map[self._end : body] = text
        self._map[body : body + _END.size] = _END.pack(len(text), checksum(self._raw[:body]), _MAGIC)
        return body + _END.size

    def _text(self, held: Sequence[Piece]) -> msgspec.Raw:
        key = self._shapes, tuple((piece.item, piece.plane, piece.box) for piece in held)
        if key != self._chunks[0]:
            chunks = []
            *starts, _ = places(piece.values for piece in held)
            for at, (item, plane, box, values) in zip(starts, held, strict=True):
                dtype = str(values.dtype).removeprefix("torch.")
                chunk = SnapshotChunk(name=item.name, role=item.role, box=box, plane=plane, dtype=dtype, at=at)
                chunks.append(chunk)
            self._chunks = key, msgspec.Raw(msgspec.json.encode(chunks))
        return self._chunks[1]


def read(fd: int, size: int, place: torch.device = CPU.device) -> tuple[Contents, LocalState]:
    """The snapshot of `size` bytes in a memory file, in memory of its own: the file is not needed any more.

    Args:
        fd: of the file.
        size: of the snapshot in it.
        place: the device that its values are to lie on.

    Raises:
        BadSnapshot: it is none, or not whole.
    """
    if not _END.size <= size <= os.fstat(fd).st_size:
        raise BadSnapshot(f"a memory file of {os.fstat(fd).st_size} bytes came where {size} were announced")
    memory = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return _read(torch.frombuffer(memory, dtype=torch.uint8), size - _END.size, place)


def _read(raw: Tensor, body: int, place: torch.device) -> tuple[Contents, LocalState]:
    length, total, magic = _END.unpack(bytes(raw[body:].tolist()))
    if magic != _MAGIC or length > body:
        raise BadSnapshot("a memory file came that is no snapshot")
    if checksum(raw[:body]) != total:
        raise BadSnapshot("a snapshot is not what was copied (its sum is another)")
    try:
        contents = decode_stored(raw[body - length : body].numpy().tobytes(), Contents)
        return contents, _state(raw, contents, place)
    except ValueError as error:  # msgspec's errors are
        raise BadSnapshot(f"a snapshot cannot be read: {error}") from None


def _state(raw: Tensor, contents: Contents, place: torch.device) -> LocalState:
    boxes: dict[Item, dict[Box, dict[str, Tensor]]] = {}
    for chunk in contents.chunks:
        values = _view(raw, chunk.at, torch_dtype(chunk.dtype), torch.Size(chunk.box.shape))
        values = values.to(place, copy=True)
        boxes.setdefault(Item(chunk.name, chunk.role), {}).setdefault(chunk.box, {})[chunk.plane] = values
    small = contents.small
    items = {Item(name, role): told for role, named in small.tensors.items() for name, told in named.items()}
    tensors = {
        item: LocalTensor(
            shards=tuple(Shard(box=box, planes=planes) for box, planes in boxes.get(item, {}).items()),
            scalars={scalar.name: restore(scalar, place) for scalar in told.scalars},
        )
        for item, told in items.items()
    }
    return LocalState(tensors=tensors, groups=small.groups, extras=small.extras)


def joined(states: Mapping[str, LocalState]) -> LocalState:
    """The shares of several members, by name, as one rank's state. Raises BadSnapshot where they are of two."""
    try:
        merge([state.schema() for state in states.values()], list(states))
    except Disagreement as error:
        raise BadSnapshot(f"snapshots of one set do not fit: {error}") from None
    tensors: dict[Item, LocalTensor] = {}
    groups: tuple[Group, ...] = ()
    extras: dict[str, str] = {}
    for state in states.values():
        groups, extras = groups or state.groups, {**extras, **state.extras}
        for item, tensor in state.tensors.items():
            known = tensors.get(item)
            shards = (*known.shards, *tensor.shards) if known is not None else tensor.shards
            tensors[item] = LocalTensor(shards=shards, scalars=tensor.scalars)
    return LocalState(tensors=tensors, groups=groups, extras=extras)


def _view(raw: Tensor, at: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    size = shape.numel() * dtype.itemsize
    if not 0 <= at <= raw.numel() - size:
        raise ValueError(f"values at {at} lie beyond the end")
    return raw[at : at + size].view(dtype).reshape(shape)
