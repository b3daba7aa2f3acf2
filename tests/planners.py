"""Planners of a coordinator in a test's own process: forked, where each would import for half a second.

Theory of operation. The coordinator starts `Planners.command`, a program that imports next to nothing. Once it
is asked something it gives its three streams to a process that has imported the planner. That one forks, and
the child is the planner: it reads the problem, which nobody has read before. It ends when the program does, and
the program with its exit code.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path

from elasticd_planner.__main__ import main as planner

from tests import forkserver, nursery

#: Without `import socket`, which takes longer than the fork.
_PROGRAM = r"""
import _socket, os, select, sys, time
select.select([0], [], [])
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
asked = _socket.socket(_socket.AF_UNIX)
asked.connect(sys.argv[1])
streams = b"".join(stream.to_bytes(4, sys.byteorder) for stream in range(3))
asked.sendmsg([b"x"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
for stream in range(3):
    os.close(stream)
os._exit((asked.recv(1) or b"\1")[0])
"""


class Planners:
    """The process that forks them, until `close`. `folder` holds its socket; `script` and its arguments are a
    planner in place of the real one."""

    def __init__(self, folder: Path, *script: str) -> None:
        path = folder / "planners.sock"
        self.command = (sys.executable, "-I", "-S", "-c", _PROGRAM, str(path))
        environment = {**os.environ, "PYTHONPATH": str(forkserver.ROOT)}
        self._process = forkserver.start(
            Path(__file__), str(path), *script, environment=environment, output=folder / "planners.log"
        )

    def close(self) -> None:
        """Ends it; planners end with the programs that asked for them."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{sys.argv[1]}.new")
        listener.listen()
        os.rename(f"{sys.argv[1]}.new", sys.argv[1])
        while True:
            asked, _ = listener.accept()
            if os.fork() == 0:
                nursery.as_interpreter(lambda: plan(asked))  # noqa: B023
                os._exit(1)
            asked.close()


def plan(asked: socket.socket) -> None:
    """The planner, with the streams of whoever asked for it."""
    _, streams, _, _ = socket.recv_fds(asked, 1, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    script, sys.argv[1:] = sys.argv[2:], []
    threading.Thread(target=end_with, args=(asked,), daemon=True).start()
    code = nursery.as_interpreter(lambda: nursery.run_script(script[0], script[1:])) if script else planner()
    sys.stderr.flush()
    asked.send(bytes((code,)))
    os._exit(code)


def end_with(asked: socket.socket) -> None:
    """Ends this process when the program that asked for it has ended."""
    asked.recv(1)
    os._exit(0)


if __name__ == "__main__":
    main()
