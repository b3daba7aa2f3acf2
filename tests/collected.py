"""The side of pytest that deals tests of `tests.collecting`: asks for processes, and talks to them by pipes."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from execnet import gateway_io
from execnet.gateway_base import Popen2IO

ROOT = Path(__file__).resolve().parent.parent


class Collected:
    """For the process that deals tests: forks those that run them, until it is closed."""

    def __init__(self, arguments: Sequence[str], processes: int) -> None:
        self._asked, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = (sys.executable, "-c", "from tests import collecting; collecting.main()")
        command = (*program, str(its.fileno()), str(processes), *arguments)
        with its:
            self._process = subprocess.Popen(
                command,
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        self._create_io, gateway_io.create_io = gateway_io.create_io, self._io

    def close(self) -> None:
        gateway_io.create_io = self._create_io
        self._asked.close()
        self._process.wait()

    def _io(self, spec: Any, execmodel: Any) -> Any:
        """Stands in for execnet's own."""
        if spec.popen and not spec.python:
            with suppress(OSError):
                return ForkedIO(self._asked, execmodel)
        return self._create_io(spec, execmodel)


class ForkedIO(Popen2IO):  # type: ignore[misc]
    """A forked process and the pipes to it. Raises OSError where none is forked."""

    def __init__(self, asked: socket.socket, execmodel: Any) -> None:
        reads, stdin = os.pipe()
        stdout, writes = os.pipe()
        try:
            socket.send_fds(asked, [b"fork"], [reads, writes])
            pid = int(asked.recv(64) or 0)
            if not pid:
                raise ChildProcessError("the tests were not collected")
            self._pidfd = os.pidfd_open(pid)
        except BaseException:
            os.close(stdin)
            os.close(stdout)
            raise
        finally:
            os.close(reads)
            os.close(writes)
        super().__init__(os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb", 0), execmodel)

    def wait(self) -> None:
        """Until the process has ended: it is no child of ours, and its exit code is not known."""
        select.select([self._pidfd], [], [])

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
