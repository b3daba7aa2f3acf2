"""What workers write to stderr passes through their torchrun, which keeps the end of it.

A worker's stderr is the write end of a pipe. A thread reads the other end and writes to torchrun's own stderr
what comes, as it comes. torch opens the pipe by its path under /proc: `LogsSpecs` is torch's own place for
where output goes. A stream that the user has torchrun write to a file (`--redirects`, `--tee`) stays there.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest

#: Bytes of the end of a worker's stderr that are kept.
MOST_KEPT = 64 << 10
#: Seconds for the rest of what a worker that has ended wrote.
_REST_SECONDS = 1.0
_POLL_SECONDS = 0.01


class WorkerOutput(DefaultLogsSpecs):
    """Where torch sends the output of the workers of one attempt after the other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._relays: dict[int, _Relay] = {}
        self._files: dict[int, str] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """As `DefaultLogsSpecs.reify`, with a pipe in place of our own stderr. Called before each attempt."""
        for relay in self._relays.values():
            relay.finish()
        destinations = super().reify(envs)
        self._relays = {rank: _Relay() for rank, path in destinations.stderrs.items() if not path}
        self._files = {rank: path for rank, path in destinations.stderrs.items() if path}
        for rank, relay in self._relays.items():
            destinations.stderrs[rank] = relay.path
        return destinations

    def last_words(self, local_rank: int) -> str:
        """The end of what a worker of this attempt, which has ended, wrote to stderr."""
        if (relay := self._relays.get(local_rank)) is not None:
            return relay.last_words()
        with contextlib.suppress(OSError), open(self._files.get(local_rank, os.devnull), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_KEPT))
            return file.read().decode(errors="replace")
        return ""


class _Relay:
    """One worker's stderr on its way to ours."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._kept: deque[bytes] = deque()
        self._size = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._pass_on, name="elasticd-stderr", daemon=True).start()

    @property
    def path(self) -> str:
        """By which this process opens the pipe for a worker."""
        return f"/proc/self/fd/{self._write}"

    def finish(self) -> None:
        """No other worker gets the pipe: the thread ends with the last process that has it."""
        if self._write >= 0:
            os.close(self._write)
            self._write = -1

    def last_words(self) -> str:
        """The end of what came; what a process has written before it ended is in it."""
        deadline = time.monotonic() + _REST_SECONDS
        while self._unread() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        with self._lock:
            return b"".join(self._kept).decode(errors="replace")

    def _unread(self) -> bool:
        with self._lock:
            return self._read >= 0 and bool(select.select([self._read], [], [], 0)[0])

    def _pass_on(self) -> None:
        while True:
            select.select([self._read], [], [])
            with self._lock:
                data = os.read(self._read, 1 << 16)
                if not data:
                    os.close(self._read)
                    self._read = -1
                    return
                self._kept.append(data)
                self._size += len(data)
                while self._size - len(self._kept[0]) >= MOST_KEPT:
                    self._size -= len(self._kept.popleft())
            view = memoryview(data)
            with contextlib.suppress(OSError):  # nobody reads our own stderr any more: the worker goes on
                while view:
                    view = view[os.write(2, view) :]
