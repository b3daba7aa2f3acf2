"""Starts a script as a process in tens of milliseconds, where a fresh interpreter spends two seconds of
processor on importing torch.

Theory of operation. `multiprocessing`'s fork server is one process for each process of pytest; it imports
`tests.preloaded` and then waits. Each `start` forks it, and the child runs the script as `python SCRIPT` would:
its own arguments, environment, output and exit code. The child is a real process: it can be killed, frozen, and
watched by a pidfd. What differs from a fresh interpreter: /proc/PID/environ and /proc/PID/cmdline are the fork
server's, all children have the same hash seed, and `atexit` is not part of the end. Tests of those start an
interpreter of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import connection, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from tests import nursery

PRELOADED = "tests.preloaded"
ROOT = Path(__file__).resolve().parent.parent
#: From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1

_running: set[Forked] = set()
_begin: Callable[[], None] | None = None


class Forked:
    """A process that runs a script. Its methods are those of `subprocess.Popen`, which it stands in for."""

    def __init__(self, process: ForkServerProcess, what: str) -> None:
        assert process.pid is not None
        self.pid, self._process, self._what = process.pid, process, what
        _running.add(self)

    @property
    def returncode(self) -> int | None:
        """As `poll` last saw it: the exit code, -N where signal N ended the process, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        if (code := self.returncode) is None:
            raise subprocess.TimeoutExpired(self._what, timeout or 0.0)
        _running.discard(self)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing where the process has ended: its id may be another's by now."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def start(
    script: Path | str,
    *arguments: str,
    environment: Mapping[str, str],
    output: Path,
    errors: Path | None = None,
) -> Forked:
    """Runs a script, or the module of a name, with these arguments and this whole environment. What it prints
    goes to the file `output`; what it says on standard error to `errors`, or to `output` too. The workers that
    a module starts are forked as well (`tests.nursery`)."""
    for path in {output, errors or output}:
        path.touch(mode=0o600)  # whoever reads it need not wait for it
    work = (str(script), arguments, dict(environment), str(output), str(errors or output))
    process = _context().Process(target=_run, args=work)
    process.start()
    return Forked(process, str(script))


def outputs(script: Path, ranks: Sequence[Sequence[str]], folder: Path, seconds: float = 240.0) -> list[str]:
    """Runs `script` once for each list of arguments, all at the same time, and gives what each printed.

    All must end with code 0 within `seconds`, and none is left behind. `folder` holds their output meanwhile.
    """
    printed = [folder / f"output-{rank}" for rank in range(len(ranks))]
    said = [folder / f"errors-{rank}" for rank in range(len(ranks))]
    started = [
        start(script, *arguments, environment=os.environ, output=printed[rank], errors=said[rank])
        for rank, arguments in enumerate(ranks)
    ]
    deadline = time.monotonic() + seconds
    try:
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0] * len(ranks), "\n".join(f"{path.read_text()[-2000:]}" for path in said)
    return [path.read_text() for path in printed]


def end_all() -> list[str]:
    """Kills what still runs; the scripts of those processes."""
    left = [forked for forked in _running if forked.poll() is None]
    for forked in left:
        forked.kill()
        forked.wait(60)
    _running.clear()
    return [forked._what for forked in left]


def in_reserve(number: int) -> list[socket.socket]:
    """Forks fork servers, after all that they need was imported once. Each belongs to the process that adopts
    it by this end of its socket. Called in a process without threads."""
    if number:
        import_module(PRELOADED)
    ends: list[socket.socket] = []
    for _ in range(number):
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            for end in (*ends, ours):
                end.close()
            try:
                data, files, _, _ = socket.recv_fds(its, 64, 2)
                its.close()
                if data:
                    multiprocessing.forkserver.main(*files, [])
            finally:
                os._exit(0)
        its.close()
        ends.append(ours)
    return ends


def adopt(reserve: socket.socket) -> None:
    """`start` uses this fork server, and starts none. It ends with us."""
    global _begin

    def begin() -> None:
        global _begin
        server: Any = multiprocessing.forkserver._forkserver
        resource_tracker.ensure_running()
        reads, server._forkserver_alive_fd = os.pipe()
        server._forkserver_address = connection.arbitrary_address("AF_UNIX")
        with socket.socket(socket.AF_UNIX) as listener, reserve:
            listener.bind(server._forkserver_address)
            listener.listen()
            socket.send_fds(reserve, [b"serve"], [listener.fileno(), reads])
        os.close(reads)
        server.ensure_running = lambda: None  # it waits for a child of ours, and this is none
        _begin = lambda: None  # noqa: E731

    _begin = begin


def _context() -> ForkServerContext:
    """The fork server inherits our environment when it is started, and keeps it."""
    context = multiprocessing.get_context("forkserver")
    if _begin is not None:
        _begin()
        return context
    context.set_forkserver_preload([PRELOADED])
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PYTHONPATH")}
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _run(
    script: str, arguments: tuple[str, ...], environment: dict[str, str], output: str, errors: str
) -> None:
    """In the child."""
    # We end with the fork server, and it ends when nobody holds this descriptor: pytest alone is to hold it.
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if PRELOADED not in sys.modules:
        raise ImportError(f"the fork server could not import {PRELOADED}")
    sys.modules[PRELOADED].prepare_worker()
    for number, path in ((1, output), (2, errors)):
        sink = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(sink, number)
        os.close(sink)
    nursery.set_environment(environment)
    run = nursery.run_script if script.endswith(".py") else nursery.run_module
    raise SystemExit(nursery.as_interpreter(lambda: run(script, arguments)))
