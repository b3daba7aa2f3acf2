"""Programs whose Python children are forked: elasticd's commands and daemons, torchrun, and its workers.

A worker's interpreter spends four seconds of processor on importing torch, each time that torchrun starts one.

Theory of operation. A program that `run_module` runs first forks a nursery: a child that has imported torch,
and has no thread and no file of the program's. The program's `subprocess.Popen` then asks the nursery for each
Python child. The nursery forks twice, and the first of the two ends at once. So the kernel gives the second
to the program, which is a subreaper. From then on it is the program's own child: the program waits for it,
signals it and gets its exit code as ever, and the kernel tells it of the program's death. A command of another
kind, or with another `PYTHONPATH` than ours, is started as ever. The planner starts nobody, and has no nursery.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from elasticd.system import parent_death_signal

ROOT = Path(__file__).resolve().parent.parent
#: The nursery's name in the process table, by which tests tell it from a program's true children.
NAME = "nursery"
PLANNER = "elasticd_planner.__main__"
#: From <linux/prctl.h>.
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
#: What `python -m` runs of ours, besides the commands of `_COMMANDS`.
_MODULES = (
    *("torch.distributed.run", "elasticd.rendezvous.torchrun", "elasticd.runtime.checking"),
    *("elasticd.runtime.profiling", "elasticd.runtime.profiling.collectives"),
    *("elasticd.models.huggingface", "elasticd_agent", "elasticd_planner"),
)
_COMMANDS = (("elasticd", "coordinator"), ("elasticd", "dashboard"), ("elasticd", "run"))
#: How asyncio asks for pipes: without buffers.
_PIPED = {"shell": False, "universal_newlines": False, "bufsize": 0}
#: Seconds for the kernel to give a child to its new parent.
_PATIENCE = 30.0


class Child:
    """What a child is to run, as it goes to the nursery; its descriptors go beside it."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], death_signal: int, session: bool
    ) -> None:
        self.command, self.environment = tuple(command), dict(environment)
        self.death_signal, self.session = death_signal, session


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Runs `python -m module arguments` in this process, which must have no thread yet; forks its children."""
    if module != PLANNER:
        subprocess.Popen = _popen(_open())  # type: ignore[misc]
        subprocesses = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
        if (handler := sys.modules.get(subprocesses)) is not None:
            handler.Popen = subprocess.Popen  # type: ignore[attr-defined]
    sys.argv[:] = [module, *arguments]
    sys.modules.pop(module, None)  # it was imported before, and is to run now
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def as_interpreter(run: Callable[[], object]) -> int:
    """Does `run` as an interpreter does its script; the exit code, after all output is written."""
    try:
        run()
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return int(end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs `python script arguments` in this process."""
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def set_environment(environment: Mapping[str, str]) -> None:
    """The whole of it; and what an interpreter makes of it when it starts."""
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("PYTHONUNBUFFERED"):
        _unbuffer()


def _unbuffer() -> None:
    """As `python -u`: what is printed is written at once, and not when a buffer is full."""
    sys.stdout.flush()
    sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115


# -- in the program ------------------------------------------------------------------------------------------


def _open() -> socket.socket:
    """Forks the nursery; the socket by which it is asked, and with whose end it ends."""
    assert threading.active_count() == 1, "a fork would lose the other threads"
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, its):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # an environment may be large
    program = os.getpid()
    if os.fork() == 0:
        ours.close()
        code = 1
        try:
            _serve(its, program)
            code = 0
        finally:
            os._exit(code)
    its.close()
    return ours


def _popen(nursery: socket.socket) -> type[subprocess.Popen[Any]]:
    """What stands in for `subprocess.Popen`."""
    lock = threading.Lock()
    earnest = subprocess.Popen

    class Popen(earnest):  # type: ignore[misc, valid-type]
        """Of a Python child like us it forks; `poll`, `wait` and the signals are `subprocess`'s own."""

        def __init__(
            self,
            args: Any,
            *,
            env: Mapping[str, str] | None = None,
            start_new_session: bool = False,
            stdin: Any = None,
            stdout: Any = None,
            stderr: Any = None,
            **others: Any,
        ) -> None:
            command, death_signal = _unwrapped(args)
            environment = dict(os.environ if env is None else env)
            if others not in ({}, _PIPED) or not _is_ours(command, environment):
                others |= {"env": env, "stdin": stdin, "stdout": stdout, "stderr": stderr}
                super().__init__(args, start_new_session=start_new_session, **others)
                return
            asked = Child(command[1:], environment, death_signal, start_new_session)
            ours: list[Any] = [None, None, None]
            with ExitStack() as its, lock:
                null = its.enter_context(open(os.devnull, "r+b"))
                given = [stdin, stdout, stdout if stderr == subprocess.STDOUT else stderr]
                files = [null if file == subprocess.DEVNULL else file for file in given]
                for at in (at for at, file in enumerate(files) if file == subprocess.PIPE):
                    ends = os.pipe()
                    modes = ("rb", "wb") if at == 0 else ("wb", "rb")
                    files[at] = its.enter_context(open(ends[at > 0], modes[0], 0))
                    ours[at] = open(ends[at == 0], modes[1], others.get("bufsize", -1))  # noqa: SIM115
                numbers = [at if file is None else file.fileno() for at, file in enumerate(files)]
                socket.send_fds(nursery, [pickle.dumps(asked)], numbers)
                self.pid = int(nursery.recv(64))
            self.args, self.returncode = args, None
            self.stdin, self.stdout, self.stderr = ours
            self._child_created, self._communication_started, self._input = True, False, None
            self._waitpid_lock = threading.Lock()

    return Popen


def _unwrapped(args: Any) -> tuple[tuple[str, ...], int]:
    """A command without `parent_death_signal.ending_with_us` around it, and its signal; or 0."""
    command = tuple(map(str, args)) if not isinstance(args, str | bytes | os.PathLike) else (str(args),)
    wrapped = tuple(parent_death_signal.ending_with_us([]))
    if command[: len(wrapped) - 2] == wrapped[:-2]:
        return command[len(wrapped) :], int(command[len(wrapped) - 2])
    return command, 0


def _is_ours(command: tuple[str, ...], environment: Mapping[str, str]) -> bool:
    """Whether it is one of ours, torchrun, or a script, which this interpreter imports from this checkout."""
    if command[:1] != (sys.executable,) or environment.get("PYTHONPATH") != str(ROOT):
        return False
    if command[1] == "-m":
        return command[2] in _MODULES or command[2:4] in _COMMANDS
    return command[2 if command[1] == "-u" else 1].endswith(".py")


# -- in the nursery and its children -------------------------------------------------------------------------


def _serve(asked: socket.socket, program: int) -> None:
    """Until the program ends. Signals that are for all of a group, or a tree, are not for us."""
    _prctl(_PR_SET_NAME, NAME.encode())
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    while True:
        data, files, _, _ = socket.recv_fds(asked, 1 << 20, 8)
        if not data:
            return
        reads, writes = os.pipe()
        if (between := os.fork()) == 0:
            if (pid := os.fork()) != 0:
                os.write(writes, str(pid).encode())
                os._exit(0)
            asked.close()
            os.close(reads)
            os.close(writes)
            for number, handler in before.items():
                signal.signal(number, handler)
            os._exit(as_interpreter(partial(_become, data, files, program)))
        os.close(writes)
        os.waitpid(between, 0)
        asked.send(os.read(reads, 64))
        os.close(reads)
        for file in files:
            os.close(file)


def _become(asked: bytes, files: Sequence[int], program: int) -> None:
    """What the program asked for, in its child."""
    child: Child = pickle.loads(asked)
    deadline = time.monotonic() + _PATIENCE
    while os.getppid() != program:
        if time.monotonic() > deadline:
            raise SystemExit("the parent is gone")
        time.sleep(0.001)
    if child.death_signal:
        _prctl(_PR_SET_PDEATHSIG, child.death_signal)
    if child.session:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    _prctl(_PR_SET_NAME, b"python")
    set_environment(child.environment)
    option, *command = child.command
    if option == "-m":
        run_module(command[0] if "." in command[0] else f"{command[0]}.__main__", command[1:])
    elif option == "-u":
        _unbuffer()
        run_script(command[0], command[1:])
    else:
        run_script(option, command)


def _prctl(option: int, value: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
