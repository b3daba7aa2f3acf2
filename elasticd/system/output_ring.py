"""A ring of a worker's newest output in a memory file: its torchrun writes it, its agent reads it at any time.

The file begins with two numbers, both counts of all bytes that were ever written: `claimed`, which the writer
raises before it writes, and `written`, which it raises afterwards. A reader copies what it wants and looks at
`claimed` then: bytes that are a ring's length before that may be overwritten, and are dropped. Neither waits
for the other. The agent has a descriptor of its own, so the output outlives the torchrun. Standard library
only.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass

#: Bytes of output that are kept of a worker.
RING_BYTES = 256 << 10
_HEADER = struct.Struct("=QQ")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class OutputRing:
    """The writing end. `fd` is closed by `close`, which the reader's end outlives."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("elasticd-output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, _HEADER.size + RING_BYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._written = 0

    def write(self, data: bytes) -> None:
        """Adds output, in place of the oldest where the ring is full."""
        end = self._written + len(data)
        os.pwrite(self.fd, _HEADER.pack(end, self._written), 0)
        at, newest = max(self._written, end - RING_BYTES), data[-RING_BYTES:]
        first = RING_BYTES - at % RING_BYTES
        os.pwrite(self.fd, newest[:first], _HEADER.size + at % RING_BYTES)
        if len(newest) > first:
            os.pwrite(self.fd, newest[first:], _HEADER.size)
        self._written = end
        os.pwrite(self.fd, _HEADER.pack(end, end), 0)

    def close(self) -> None:
        """Gives the descriptor back."""
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class RingPart:
    """A part of the output: `data` are the bytes from `begin` to `end`, counted from the worker's first."""

    begin: int
    end: int
    data: bytes


def is_ring(fd: int) -> bool:
    """Returns True if this descriptor is of such a file: reading it never waits, whoever sent it."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False
    return sealed and os.fstat(fd).st_size == _HEADER.size + RING_BYTES


def read(fd: int, after: int, most: int) -> RingPart:
    """The oldest `most` bytes that are kept behind the first `after`; a negative `after` asks for the newest
    `-after` bytes."""
    _, written = _counts(fd)
    begin = max(written + after if after < 0 else min(after, written), written - RING_BYTES, 0)
    end = min(begin + most, written)
    data = b"".join(
        os.pread(fd, stop - start, _HEADER.size + start % RING_BYTES) for start, stop in _stretches(begin, end)
    )
    claimed, _ = _counts(fd)
    lost = min(max(0, claimed - RING_BYTES - begin), len(data))
    return RingPart(begin + lost, begin + len(data), data[lost:])


def _counts(fd: int) -> tuple[int, int]:
    """claimed and written; never more than a file's numbers can be."""
    claimed, written = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
    return min(claimed, 1 << 62), min(written, 1 << 62)


def _stretches(begin: int, end: int) -> list[tuple[int, int]]:
    """The stretch without its break at the ring's end."""
    turn = (begin // RING_BYTES + 1) * RING_BYTES
    return [(begin, end)] if end <= turn else [(begin, turn), (turn, end)]
