"""The ends of a torchrun's workers: in good order when torchrun is told to end, with all that a dead one left.

torchrun's own handler for SIGTERM raises an exception: its traceback is printed, the whole process group of
each worker gets the signal, a data loader's processes too, and a worker that is not gone 30 s later is killed,
whatever its `grace`. In live mode a signal goes on to the workers alone. They drain, and torchrun ends as it
does after their last step. Its exit code is then 128 + the signal's number, for the job is not finished.

A worker that dies leaves the processes that it started. They would keep its device's memory, and its ports,
from the next worker: they are ended before that one starts. The agent ends them too, but knows only workers
that have made a `Job`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

from elasticd.system import process_sessions
from elasticd.system.end_signals import NOTICES, caught
from elasticd.system.parent_death_signal import ECHO_SECONDS
from elasticd.system.torchrun_outcome import signal_name

#: Seconds until a worker is killed that does not hear SIGTERM: torchrun's own.
_DEAF_SECONDS = 30.0
#: Names the signals that torchrun listens to, in the words of torch.
_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def listen_to_notices() -> None:
    """Has torchrun listen to all signals that are notice to workers: else SIGUSR1 would end it alone. Called
    before it starts workers."""
    there = os.environ.get(_VARIABLE, "").split(",")
    more = [number.name for number in NOTICES if number.name not in there]
    os.environ[_VARIABLE] = ",".join([name for name in there if name] + more)


class WorkersEnd:
    """The workers of this torchrun, from `watch`, which is called again and again while they run, to
    `end_left`, after they have ended."""

    def __init__(self) -> None:
        self._workers: set[int] = set()
        self._number = 0
        self._heard_at = 0.0

    def watch(self, *, leave: bool) -> None:
        """Notes the workers. leave: a signal is passed on to them, in place of torchrun's own handler, which
        torchrun sets anew whenever it starts them."""
        if not self._workers:
            self._workers = process_sessions.led_by_children(os.getpid())
        if self._number and time.monotonic() - self._heard_at > _DEAF_SECONDS:
            process_sessions.end({worker for worker in self._workers if _deaf(worker)}, 0.0)
        if leave and threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in NOTICES:
                before = signal.getsignal(number)
                if callable(before) and before not in (self._on_signal, signal.default_int_handler):
                    signal.signal(number, self._on_signal)

    @property
    def count(self) -> int:
        """The number of workers that `watch` has noted."""
        return len(self._workers)

    def end_left(self) -> None:
        """Ends the processes that workers left which have ended."""
        dead = {worker for worker in self._workers if not process_sessions.is_led(worker)}
        self._workers = set()
        if ended := process_sessions.end(dead):
            numbers = ", ".join(map(str, sorted(ended)))
            text = f"elasticd: processes that a dead worker left are ended: {numbers}"
            print(text, file=sys.stderr, flush=True)

    @property
    def signal(self) -> str:
        """The name of the signal that told this torchrun to end; empty where none did."""
        return signal_name(self._number) if self._number else ""

    def leave_if_told(self) -> None:
        """Raises SystemExit once a signal told this torchrun to end."""
        if self._number:
            raise SystemExit(128 + self._number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._number:
            if now - self._heard_at > ECHO_SECONDS:
                self._at_once(number)
            return
        self._number, self._heard_at = number, now
        # torch would complain of a worker that has no job yet, and so dies by the signal.
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
        workers = process_sessions.led_by_children(os.getpid())
        for worker in workers:  # which torchrun waits for in this very thread: the number is the worker's
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGTERM)
        if not workers:  # torchrun waits for its agent
            raise SystemExit(128 + number)

    def _at_once(self, number: int) -> NoReturn:
        process_sessions.end(self._workers, 0.0)
        raise SystemExit(128 + number)


def _deaf(worker: int) -> bool:
    return process_sessions.is_led(worker) and not caught(worker, signal.SIGTERM)
