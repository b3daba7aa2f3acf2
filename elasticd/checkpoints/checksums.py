"""Checksums of a file's blocks: made while it is written, tested for every block that is read.

Blocks, and not whole files, so that a rank that reads only its own byte ranges still notices damage in them.
A sum is the first 64 bits of SHA-256, whose speed is above a disk's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from elasticd_planner.value import Value

from elasticd.checkpoints.disk import WritableFile

#: Bytes of a block.
BLOCK_BYTES = 1 << 20


class Damaged(Exception):
    """A file of a checkpoint is not as it was written; the message names it and what is wrong."""


class FileSums(Value, frozen=True, kw_only=True):
    """A file by its name in the checkpoint's folder: bytes, and the sum of each block as 16 hex digits."""

    name: str
    size: int
    sums: tuple[str, ...]


def block_sum(data: bytes | bytearray | memoryview) -> str:
    """The first 64 bits of SHA-256 as 16 hex digits."""
    return hashlib.sha256(data).hexdigest()[:16]


class ChecksumWriter:
    """Writes through to a stream in whole blocks, and sums them. `head` keeps the first bytes since `mark`.

    `check` is called before each block goes to disk; what it raises ends the writing.
    """

    #: Bytes that `head` keeps.
    HEAD = 1 << 13

    def __init__(self, stream: WritableFile, check: Callable[[], None] = lambda: None) -> None:
        self._stream, self._check = stream, check
        self._block = bytearray()
        self._sums: list[str] = []
        self.size = 0
        self.head = bytearray()

    def mark(self) -> int:
        """Returns the offset of the next byte; from here on `head` is kept."""
        self.head = bytearray()
        return self.size

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Takes bytes, and passes them on in whole blocks. Returns how many it took, as torch.save expects."""
        written = len(data)
        if len(self.head) < self.HEAD:
            self.head += data[: self.HEAD - len(self.head)]
        self.size += written
        if written < BLOCK_BYTES - len(self._block):  # most are a few bytes
            self._block += data
            return written
        view = memoryview(data).cast("B")
        while view:
            taken = min(BLOCK_BYTES - len(self._block), len(view))
            if taken == BLOCK_BYTES:
                self._emit(view[:BLOCK_BYTES])
            else:
                self._block += view[:taken]
                if len(self._block) == BLOCK_BYTES:
                    self._emit(self._block)
                    self._block = bytearray()
            view = view[taken:]
        return written

    def flush(self) -> None:
        """Nothing: blocks go to disk whole. (torch.save calls it.)"""

    def finish(self, name: str) -> FileSums:
        """Writes the rest and waits until all is on disk."""
        if self._block:
            self._emit(self._block)
            self._block = bytearray()
        self._stream.sync()
        return FileSums(name=name, size=self.size, sums=tuple(self._sums))

    def _emit(self, block: bytearray | memoryview) -> None:
        self._check()
        self._sums.append(block_sum(block))
        self._stream.write(block)


class ChecksumReader:
    """Reads ranges of a file, testing every block that it touches. `bytes_read` counts what came from disk.

    Raises `Damaged` when it is opened, where the file is not there or has another length, and when it is
    read, where a block's sum is wrong.
    """

    def __init__(self, folder: Path, sums: FileSums) -> None:
        self._path, self._sums = folder / sums.name, sums
        try:
            self._file = self._path.open("rb", buffering=0)
        except OSError as error:
            raise Damaged(f"{self._path}: {error.strerror}") from None
        size = os.fstat(self._file.fileno()).st_size
        if size != sums.size:
            self._file.close()
            raise Damaged(f"{self._path}: has {size} bytes, {sums.size} were written")
        self._start, self._kept = 0, memoryview(b"")
        self.bytes_read = 0

    def close(self) -> None:
        """Closes the file. What `read` returned stays valid."""
        self._file.close()

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes start <= i < stop, valid until the next read. The blocks of the last read are kept, so
        that neighbours cost nothing."""
        if not 0 <= start <= stop <= self._sums.size:
            raise Damaged(f"{self._path}: bytes {start} to {stop} were promised, it has {self._sums.size}")
        if start < self._start or stop > self._start + len(self._kept):
            self._fill(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
        return self._kept[start - self._start : stop - self._start]

    def test(self) -> None:
        """Reads all of it, a few blocks at a time."""
        for first in range(0, len(self._sums.sums), 16):
            self._fill(first, min(first + 16, len(self._sums.sums)))

    def _fill(self, first: int, last: int) -> None:
        """Reads the blocks first <= i < last."""
        self._start = first * BLOCK_BYTES
        wanted = min(last * BLOCK_BYTES, self._sums.size) - self._start
        data = bytearray(wanted)
        view, at = memoryview(data), 0
        while at < wanted:
            try:
                got = os.preadv(self._file.fileno(), [view[at:]], self._start + at)
            except OSError as error:
                raise Damaged(f"{self._path}: {error.strerror} at byte {self._start + at}") from None
            if not got:
                raise Damaged(f"{self._path}: ends at byte {self._start + at} of {self._sums.size}")
            at += got
        self.bytes_read += wanted
        for index in range(first, last):
            block = view[index * BLOCK_BYTES - self._start : (index + 1) * BLOCK_BYTES - self._start]
            if block_sum(block) != self._sums.sums[index]:
                begin = index * BLOCK_BYTES
                raise Damaged(f"{self._path}: bytes {begin} to {begin + len(block)} are not what was written")
        self._kept = view
