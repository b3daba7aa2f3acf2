"""Copies of values into memory on the host that is there already, such as a memory file's mapping.

From an accelerator they go on a stream of their own, behind what the current one has yet to do, and into memory
that is pinned: else the driver copies through a small buffer of its own, at a fraction of the speed. Never run
with a GPU so far: its test waits for a machine that has one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

log = logging.getLogger(__name__)

#: cudaHostRegisterPortable: pinned for all devices of this process.
_PORTABLE = 1


class HostMemory:
    """Memory that others own, pinned when the first values come from an accelerator, for as long as this
    object lives: the memory must live longer."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._pinned: bool | None = None

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Values to where they belong in this memory; it returns when all bytes are there."""
        streams: dict[torch.device, torch.cuda.Stream] = {}
        here = []
        for to, values in pairs:
            if not values.is_cuda:
                here.append((to, values))
                continue
            stream = streams.get(values.device)
            if stream is None:
                self._pin()
                stream = streams[values.device] = torch.cuda.Stream(values.device)
                stream.wait_stream(torch.cuda.current_stream(values.device))
            with torch.cuda.stream(stream):
                to.copy_(values, non_blocking=True)
        for to, values in here:
            to.copy_(values)
        for stream in streams.values():
            stream.synchronize()  # the values may change from here on

    def _pin(self) -> None:
        if self._pinned is not None:
            return
        start, size = self._memory.data_ptr(), self._memory.numel()
        error = int(torch.cuda.cudart().cudaHostRegister(start, size, _PORTABLE))
        self._pinned = not error
        if error:
            log.warning("%d MiB could not be pinned (CUDA error %d): copies are slower", size >> 20, error)
            return
        # At the end of the process the driver may be gone already, and takes it back by itself.
        weakref.finalize(self, _unpin, start).atexit = False


def _unpin(start: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(start)
