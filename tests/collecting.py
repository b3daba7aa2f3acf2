"""Forks the processes of pytest-xdist, after torch and all test files were imported once.

Started as interpreters, each of them takes nine seconds of processor for that, all at the same moment, and its
fork server (`tests.forkserver`) three more.

Theory of operation. `main` imports `tests.preloaded` and forks a fork server for each process to come. Then it
collects with pytest's own arguments, but makes no test: pytest does not import a file again whose module is in
`sys.modules`. Then it forks whenever it is asked, and the child does what the interpreter would that execnet
starts. Nothing is forked where a thread would be lost or a file cannot be imported: the processes are then
started as ever, and say why.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from _pytest.config import _prepareconfig

from tests import forkserver

ROOT = Path(__file__).resolve().parent.parent


class Imported:
    """A plugin: collects files, and nothing in them."""

    def __init__(self) -> None:
        self.failed = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self) -> list[pytest.Item]:
        return []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file whose import came to no end is half a module."""
        self.failed |= report.failed
        if not report.passed:
            path = str(ROOT / report.nodeid)
            for name in [n for n, module in sys.modules.items() if getattr(module, "__file__", "") == path]:
                del sys.modules[name]


def collects(arguments: Sequence[str]) -> bool:
    """Imports the test files as a process of pytest with these arguments would; whether all could be."""
    plugin = Imported()
    config = _prepareconfig([*arguments], [plugin])
    from xdist.remote import setup_config  # pytest has imported its plugins by now, as it does

    setup_config(config, None)
    config.workerinput = {"workerid": "collected"}  # type: ignore[attr-defined]
    config.option.collectonly = True
    code = config.hook.pytest_cmdline_main(config=config)
    return code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and not plugin.failed


def serve(asked: socket.socket, servers: list[socket.socket]) -> Callable[[], None] | None:
    """Forks until nobody can ask any more; in a child, what it is to do."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child is waited for
    while True:
        data, files, _, _ = socket.recv_fds(asked, 64, 2)
        if not data:
            return None
        server = servers.pop() if servers else None
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asked.close()
            for other in servers:
                other.close()
            if server is not None:
                forkserver.adopt(server)
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            return as_execnets_interpreter
        asked.send(str(pid).encode())
        for file in (*files, *([server.detach()] if server is not None else [])):
            os.close(file)


def as_execnets_interpreter() -> None:
    """Does what `gateway_io.popen_bootstrapline` says, as the module `__main__`."""
    sys.stdin, sys.stdout = os.fdopen(os.dup(0), "r", 1), os.fdopen(os.dup(1), "w", 1)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(eval(sys.stdin.readline()), main.__dict__)


def main() -> None:
    """Usage: SOCKET PROCESSES ARGUMENT ... of pytest"""
    asked, processes, *arguments = sys.argv[1:]
    servers = forkserver.in_reserve(int(processes))
    if not collects(arguments) or len(os.listdir("/proc/self/task")) > 1:
        return
    if (work := serve(socket.socket(fileno=int(asked)), servers)) is not None:
        code = 1
        try:
            work()
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            code = 0
        finally:
            os._exit(code)
