"""The output of workers, which passes through their torchrun: to the terminal, to files, and to a ring that the
agent reads.

A worker's stdout and stderr are the write ends of two pipes, or of one terminal of their own where ours is one
and lines get no label, so that progress bars and a debugger find what they expect. One thread reads the other
ends, and passes on what comes as it comes. torch opens them by their paths: `LogsSpecs` is torch's own place
for where output goes. A stream that the user has torchrun write to a file itself (`--redirects`, `--tee`) stays
there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest

from elasticd.rendezvous.output_link import OutputLink
from elasticd.system.output_options import STDERR, STDOUT, OutputOptions
from elasticd.system.output_ring import OutputRing

#: Bytes of the end of a worker's stderr that are kept for why it failed.
KEPT_BYTES = 64 << 10
#: Bytes of a line that wait for its end, and seconds: a prompt has none.
MOST_OF_A_LINE, LINE_SECONDS = 16 << 10, 0.5
#: Seconds for the rest of what a worker that has ended wrote.
_REST_SECONDS = 1.0
_POLL_SECONDS = 0.01


class WorkerOutput(DefaultLogsSpecs):
    """The destination to which torch sends the output of the workers of one attempt after the other.

    Args:
        link: to the agent, which is shown the rings, and says what the devices are called.
        job: its name, for files.
        slots: index of each worker's device on the node, by its local rank.
        options: where output goes.
        args, kwargs: those of `DefaultLogsSpecs`.
    """

    def __init__(
        self,
        link: OutputLink,
        job: str,
        slots: tuple[int, ...],
        options: OutputOptions,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._link, self._job, self._slots, self._options = link, job, slots, options
        self._relays: dict[int, _Relay] = {}
        self._rings: dict[int, OutputRing] = {}
        self._files: dict[int, str] = {}
        self._devices: dict[int, str] = {}

    def device(self, local_rank: int) -> str:
        """The name of a worker's device, "node/index"."""
        return self._devices[local_rank]

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """As `DefaultLogsSpecs.reify`, with pipes in place of our own streams. Called before each attempt."""
        self.finish()
        destinations = super().reify(envs)
        streams = ((STDOUT, destinations.stdouts), (STDERR, destinations.stderrs))
        self._files = {rank: path for rank, path in destinations.stderrs.items() if path}
        for rank in envs:
            relay = self._relays[rank] = self._relay(rank, envs[rank].get("TORCHELASTIC_RESTART_COUNT", "0"))
            for stream, paths in streams:
                if not paths.get(rank):
                    paths[rank] = relay.open(stream)
            relay.start()
        return destinations

    def finish(self) -> None:
        """Returns once all that workers which have ended wrote has been passed on."""
        for relay in self._relays.values():
            relay.finish()

    def last_words(self, local_rank: int) -> str:
        """The end of what a worker of this attempt, which has ended, wrote to stderr."""
        if path := self._files.get(local_rank):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - KEPT_BYTES))
                return file.read().decode(errors="replace")
            return ""
        return self._relays[local_rank].last_words()

    def _relay(self, rank: int, attempt: str) -> _Relay:
        index = self._slots[rank] if rank < len(self._slots) else rank
        again = rank in self._rings
        ring = self._rings.setdefault(rank, OutputRing())
        device = self._devices[rank] = self._link.share(index, ring)
        if again:
            ring.write(f"elasticd: the worker is started again ({attempt})\n".encode())
        file = self._file(device) if self._options.filed else None
        return _Relay(f"[{device}] ".encode() if self._options.label else b"", self._options, ring, file)

    def _file(self, device: str) -> int | None:
        """A file for one worker's attempt, that no other has; None where there can be none, which is said."""
        folder = Path(self._options.folder) / self._job
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(1 << 20):
                path = folder / f"{device.replace('/', '-')}.{number}.log"
                with contextlib.suppress(FileExistsError):
                    return os.open(
                        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644
                    )
        except OSError as error:
            text = f"elasticd: the output of {device} goes to no file: {error}; name another --log-dir"
            print(text, file=sys.stderr, flush=True)
        return None


class _Relay:
    """One worker's output on its way."""

    def __init__(self, label: bytes, options: OutputOptions, ring: OutputRing, file: int | None) -> None:
        self._options, self._ring, self._file = options, ring, file
        self._label = label
        self._writers: list[int] = []
        self._readers: dict[int, int] = {}
        self._lines = {STDOUT: _Lines(1, label), STDERR: _Lines(2, label)}
        self._kept: deque[bytes] = deque()
        self._size = 0
        self._lock = threading.Lock()
        self._terminal: int | None = None
        self._thread: threading.Thread | None = None
        self._passing = False  # what was read is being written

    def open(self, stream: int) -> str:
        """The path by which this process opens a worker's stream."""
        if not self._label and os.isatty(stream) and self._options.shown & stream:
            if self._terminal is None:
                self._terminal = self._add(stream, *_terminal_as(stream))
            return os.ttyname(self._terminal)
        return f"/proc/self/fd/{self._add(stream, *os.pipe())}"

    def _add(self, stream: int, reader: int, writer: int) -> int:
        self._readers[reader] = stream
        self._writers.append(writer)
        return writer

    def start(self) -> None:
        """Passes on what comes from now on."""
        self._thread = threading.Thread(target=self._pass_on, name="elasticd-output", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """No other worker gets these streams: the thread ends with the last process that has one. What ended
        workers wrote has been passed on when this returns, a last line without an end as well."""
        for writer in self._writers:
            os.close(writer)
        self._writers = []
        self._wait(self._unpassed)

    def _unpassed(self) -> bool:
        """Returns True while anything waits to be read or written, the end of a line as well."""
        waiting = any(lines.waiting for lines in self._lines.values())
        return not self._readers or waiting or self._unread()

    def last_words(self) -> str:
        """The end of what came on stderr; what a process has written before it ended is in it."""
        self._wait(self._unread)
        with self._lock:
            return b"".join(self._kept).decode(errors="replace")

    def _wait(self, more: Callable[[], bool]) -> None:
        """Waits until there is no more, or the thread has ended; `_REST_SECONDS` at most."""
        deadline = time.monotonic() + _REST_SECONDS
        while self._thread is not None and self._thread.is_alive() and more() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _unread(self) -> bool:
        with self._lock:
            readers = list(self._readers)
            return self._passing or (bool(readers) and bool(select.select(readers, [], [], 0)[0]))

    def _pass_on(self) -> None:
        while self._readers:
            waits = any(lines.waiting for lines in self._lines.values())
            ready = select.select(list(self._readers), [], [], LINE_SECONDS if waits else None)[0]
            if not ready:
                for lines in self._lines.values():
                    lines.flush()
            for reader in ready:
                stream = self._readers[reader]
                with self._lock:
                    data = self._read(reader)
                    if not data:
                        os.close(reader)
                        del self._readers[reader]
                        continue
                    self._passing = True
                    self._keep(stream, data)
                if self._options.shown & stream:
                    self._lines[stream].write(data)
                self._passing = False
        for lines in self._lines.values():
            lines.flush()
        if self._file is not None:
            os.close(self._file)

    @staticmethod
    def _read(reader: int) -> bytes:
        try:
            return os.read(reader, 1 << 16)
        except OSError:  # EIO: nobody has the terminal any more
            return b""

    def _keep(self, stream: int, data: bytes) -> None:
        self._ring.write(data)
        if self._file is not None and self._options.filed & stream:
            with contextlib.suppress(OSError):  # a disk that is full costs the file alone
                _write(self._file, data)
        if stream == STDOUT and self._terminal is None:
            return
        self._kept.append(data)
        self._size += len(data)
        while self._size - len(self._kept[0]) >= KEPT_BYTES:
            self._size -= len(self._kept.popleft())


class _Lines:
    """A stream to the terminal: each line at once and with a label, or without one all that comes as it
    comes."""

    def __init__(self, fd: int, label: bytes) -> None:
        self._fd, self._label = fd, label
        self._waits = b""

    @property
    def waiting(self) -> bool:
        """True if a line has begun, and not ended."""
        return bool(self._waits)

    def write(self, data: bytes) -> None:
        if not self._label:
            self._out(data)
            return
        whole, end, rest = (self._waits + data).rpartition(b"\n")
        if end:
            self._out(b"".join(self._label + line + b"\n" for line in whole.split(b"\n")))
        self._waits = rest
        # A progress bar: each of its states takes the place of the one before it.
        shown, turn, rest = self._waits.rpartition(b"\r")
        if turn and shown:
            self._out(b"\r" + self._label + shown.rpartition(b"\r")[2])
            self._waits = turn + rest if os.isatty(self._fd) else rest
        if len(self._waits) > MOST_OF_A_LINE:
            self.flush()

    def flush(self) -> None:
        """Writes what waits for the end of its line."""
        if waits := self._waits:
            self._waits = b""
            self._out(self._label + waits + (b"" if waits.isspace() else b"\n"))

    def _out(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody reads our own stream any more: the worker goes on
            _write(self._fd, data)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _terminal_as(fd: int) -> tuple[int, int]:
    """The two ends of a terminal as large as ours; it passes bytes on as they are, for ours to obey."""
    ours, theirs = os.openpty()
    tty.setraw(theirs, termios.TCSANOW)

    def resize(*_: object) -> None:
        with contextlib.suppress(OSError):
            fcntl.ioctl(ours, termios.TIOCSWINSZ, fcntl.ioctl(fd, termios.TIOCGWINSZ, b"\0" * 8))

    resize()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGWINCH, resize)
    return ours, theirs
