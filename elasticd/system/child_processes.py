"""Programs that a command runs for a while: each is started to die with us, all are ended, whatever happens.

1. Every child asks the kernel for SIGTERM when we end (PR_SET_PDEATHSIG), so that even our SIGKILL ends the
   tree: torchrun passes it on to its workers.
2. We are the subreaper of our tree (PR_SET_CHILD_SUBREAPER): whoever loses its parent becomes our child, so
   that the last sweep finds it.
3. `close` ends the children in reverse order by SIGTERM, then by SIGKILL, and sweeps what is left.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from elasticd.system.end_signals import noted
from elasticd.system.parent_death_signal import ending_with_us

_SET_CHILD_SUBREAPER = 36
#: Seconds from SIGTERM to SIGKILL.
TERMINATE_SECONDS = 5.0
_POLL_SECONDS = 0.05
T = TypeVar("T")


class ProcessError(Exception):
    """A process ended, or did not do what was waited for; the message has the end of its output."""


class Interrupted(Exception):
    """The user asked to end, by Ctrl-C, SIGTERM or a closed terminal."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """A process of ours, its name for people, and where its output goes."""

    name: str
    command: tuple[str, ...]
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        return self.process.poll()

    def said(self, lines: int = 8) -> str:
        """The end of its output."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class Processes:
    """Starts and ends such programs. Used as a context manager, from the main thread: a death signal
    comes when the thread that started a child ends."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []
        self._ours = set(_descendants())
        self._told: list[int] = []

    def __enter__(self) -> Processes:
        if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise ProcessError(f"prctl: {os.strerror(ctypes.get_errno())}")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        idle: bool = False,
    ) -> Child:
        """Starts a program (argv[0] an absolute path). `idle`: only when nobody else wants the cores."""
        self.check()
        log = self._logs / f"{name}.log"
        ended = next((known for known in self._children if known.name == name), None)
        with log.open("wb" if ended is None else "ab") as output:
            process = subprocess.Popen(
                ending_with_us([*command]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # The terminal's Ctrl-C is for us, who end them in order.
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        child = Child(name=name, command=tuple(command), process=process, log=log)
        self._children.append(child)
        if idle:
            # Not everywhere allowed, and not needed where there are cores to spare.
            with suppress(OSError):
                os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        return child

    @staticmethod
    def hurry(child: Child) -> None:
        """Lets a child that was started `idle` compete for the cores from now on, where this is allowed."""
        with suppress(OSError):
            os.sched_setscheduler(child.process.pid, os.SCHED_OTHER, os.sched_param(0))

    def check(self) -> None:
        """Raises Interrupted once the user asked to end."""
        if self._told:
            raise Interrupted

    def pause(self, seconds: float = _POLL_SECONDS) -> None:
        """Waits a moment between two looks. Raises Interrupted where the user asked to end."""
        self.check()
        time.sleep(seconds)
        self.check()

    def until(
        self, condition: Callable[[], T | None], what: str, seconds: float, *, needs: Sequence[Child]
    ) -> T:
        """The first value of `condition` that is neither None nor False; `needs` must go on meanwhile. Raises
        ProcessError after `seconds`, or when one of them ends."""
        deadline = time.monotonic() + seconds
        while True:
            value = condition()
            if value is not None and value is not False:
                return value
            for child in needs:
                self.alive(child)
            if time.monotonic() > deadline:
                outputs = "".join(f"\n{child.name}: {child.said()}" for child in needs)
                raise ProcessError(f"{what} did not happen within {seconds:g} s{outputs}")
            self.pause()

    def alive(self, child: Child) -> None:
        """Raises ProcessError where it has ended."""
        if child.code is not None:
            raise ProcessError(f"{child.name} ended with {child.code}:\n{child.said()}")

    def wait(self, child: Child, seconds: float) -> int:
        """Its exit code. Raises ProcessError when it takes too long."""
        return self.until(lambda: child.code, f"the end of {child.name}", seconds, needs=())

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and a closed terminal are noted, and raised where we look (`check`, `pause`): never
        between the start of a process and our knowing of it, nor while we clean up."""
        with noted() as self._told:
            yield

    def end(self) -> None:
        """Ends all that we started, the last first."""
        for child in reversed(self._children):
            _end(child.process)
        self._children.clear()

    def close(self) -> None:
        """Ends all that we started, and what is left of our tree: workers that lost their torchrun, for one."""
        self.end()
        for signaller, seconds in (
            (psutil.Process.terminate, TERMINATE_SECONDS / 2),
            (psutil.Process.kill, TERMINATE_SECONDS),
        ):
            left = [process for process in _descendants() if process not in self._ours]
            for process in left:
                _quietly(signaller, process)
            psutil.wait_procs(left, timeout=seconds)


def _descendants() -> list[psutil.Process]:
    descendants: list[psutil.Process] = psutil.Process().children(recursive=True)
    return descendants


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, SIGKILL after a while, to it and to what it started."""
    if process.poll() is not None:
        return
    try:
        tree = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        tree = []
    process.terminate()
    try:
        process.wait(TERMINATE_SECONDS)
    except subprocess.TimeoutExpired:
        # Its children first: without their parent they would only be found by the sweep.
        for orphan in tree:
            _quietly(psutil.Process.kill, orphan)
        process.kill()
        process.wait()


def _quietly(signaller: Callable[[psutil.Process], None], process: psutil.Process) -> None:
    try:
        signaller(process)
    except psutil.NoSuchProcess:
        return
