"""A torchrun's connection to its agent for the output of its workers: the agent gets each one's ring.

It is a connection of its own, and a thread makes it again when the agent was started again: the rings live as
long as this process, whoever reads them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import msgspec

from elasticd.backoff import Backoff
from elasticd.codec.message import encode
from elasticd.system.output_ring import OutputRing
from elasticd.version import __version__
from elasticd.wire import unix_socket
from elasticd.wire.launch import KeepOutput, OutputKept
from elasticd.wire.worker import to_worker

#: Seconds for the agent's answer, without which a device is called by this machine's name.
ANSWER_SECONDS = 2.0
#: Seconds between attempts to reach an agent: doubled from the first to the second.
_AWAY = (0.2, 5.0)


class OutputLink:
    """Shows rings to the agent at `path`, as those of `job`."""

    def __init__(self, path: str, job: str) -> None:
        self._path, self._job = path, job
        self._rings: dict[int, OutputRing] = {}
        self._devices: dict[int, str] = {}
        self._told = threading.Condition()
        self._sock: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def share(self, index: int, ring: OutputRing) -> str:
        """Has the agent keep a worker's output; the name of the device, "node/index"."""
        with self._told:
            if index not in self._rings:
                self._rings[index] = ring
                self._send(index)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="elasticd-output-link", daemon=True)
                self._thread.start()
            self._told.wait_for(lambda: index in self._devices, ANSWER_SECONDS)
            return self._devices.get(index, f"{socket.gethostname().partition('.')[0]}/{index}")

    def _send(self, index: int) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                message = KeepOutput(job=self._job, index=index, release=__version__)
                unix_socket.send(self._sock, encode(message), self._rings[index].fd)

    def _run(self) -> None:
        pause = Backoff(*_AWAY)
        while True:
            with contextlib.suppress(OSError, msgspec.DecodeError):  # the agent is away, or of another release
                sock = unix_socket.connect(self._path)
                with self._told:
                    self._sock = sock
                    for index in self._rings:
                        self._send(index)
                self._listen(sock, pause)
            with self._told:
                if self._sock is not None:
                    self._sock.close()
                self._sock = None
            time.sleep(pause.next())

    def _listen(self, sock: socket.socket, pause: Backoff) -> None:
        """Until the agent hangs up."""
        while (data := unix_socket.receive(sock)) is not None:
            answer = to_worker(data)
            if isinstance(answer, OutputKept):
                pause.reset()
                with self._told:
                    self._devices[answer.index] = answer.device
                    self._told.notify_all()
