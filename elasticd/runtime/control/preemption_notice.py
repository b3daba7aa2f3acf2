"""Signals by which a spot node, a scheduler or a user says that this process will end: the worker drains.

A signal is heard at once, whatever the main thread waits in: the interpreter's signal handler, which runs on
no thread in particular, writes a byte that a thread of ours reads. What the job makes of it is
`elasticd.machines.job.lifecycle.drain`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from elasticd.system.end_signals import ENDING, NOTICES, caught
from elasticd.system.parent_death_signal import ECHO_SECONDS
from elasticd.system.torchrun_outcome import signal_name

log = logging.getLogger(__name__)

#: Seconds for the last log lines of a process: somebody may hold the lock of a stream that nobody reads.
_WORDS_SECONDS = 1.0

_present: PreemptionNotice | None = None


class PreemptionNotice:
    """Hears `NOTICES` from `install` to `restore`. `told` is called once, with the signal's name, on a thread
    of its own; `grace` seconds later the process ends, or at the next signal that is no echo.

    A handler that was there for SIGTERM, SIGINT or SIGHUP is called as well, on the main thread as ever; but
    not Python's own for SIGINT, which raises KeyboardInterrupt. SIGUSR1 and SIGUSR2 are notice only where the
    script has no use of its own for them. A signal that was ignored stays so.
    """

    def __init__(self, grace: float, told: Callable[[str], None]) -> None:
        self._grace, self._told = grace, told
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)  # as the interpreter wants it
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup = -1
        self._heard = self._over = False
        self._late: int | None = None  # a signal that came as the old handlers were put back
        self._lock = threading.Lock()  # of the two: who is over hears nothing

    def install(self) -> None:
        """Nothing where this is not the main thread, which alone may set handlers, or all are ignored."""
        global _present
        if threading.current_thread() is not threading.main_thread() or _present:
            return
        self._before = {number: signal.getsignal(number) for number in NOTICES if _is_free(number)}
        if not self._before:
            return
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in self._before:
            signal.signal(number, self._handle)
        _present = self
        threading.Thread(target=self._run, name="elasticd-notice", daemon=True).start()

    def restore(self) -> None:
        """Leaves the signals as they were; but not once one was heard: then the grace goes on, and echoes are
        none."""
        global _present
        if _present is not self or threading.current_thread() is not threading.main_thread():
            return
        with self._lock:
            if self._heard:
                return
            self._over = True
        _present = None
        self._undo()
        self._writer.close()  # which ends the thread
        if self._late is not None:
            signal.raise_signal(self._late)

    def _undo(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        ours = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        if ours not in (-1, self._writer.fileno()):  # somebody's after us
            signal.set_wakeup_fd(ours, warn_on_full_buffer=False)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            self._late = number
            return
        if not self._heard:  # somebody else took the interpreter's byte: an asyncio loop does
            with contextlib.suppress(OSError):
                self._writer.send(bytes([number]))
        self._heard = True
        before = self._before.get(signal.Signals(number))
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _run(self) -> None:
        name = self._await(None)
        with self._lock:
            if name is None or self._over:
                return
            self._heard = True
        began = time.monotonic()
        # Apart: whoever logs waits where nobody reads a full pipe, and the grace goes on.
        threading.Thread(target=self._told, args=(name,), name="elasticd-drain", daemon=True).start()
        while (left := began + self._grace - time.monotonic()) > 0:
            again = self._await(left)
            if again is not None and time.monotonic() - began > ECHO_SECONDS:
                why = f"a second signal ({again}): this process ends at once"
                break
        else:
            why = f"this process has drained for {self._grace:g} s, its grace: it ends now"
        words = threading.Thread(
            target=_write_last_output, args=(why,), name="elasticd-last-words", daemon=True
        )
        words.start()
        words.join(_WORDS_SECONDS)
        os._exit(0)  # the main thread may be stuck; and no code that torchrun takes for a failure

    def _await(self, seconds: float | None) -> str | None:
        """The name of the signal that came in time. Others are handed on to who had asked for them before
        us."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            self._reader.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
            try:
                numbers = self._reader.recv(1024)
            except TimeoutError:
                return None
            if not numbers:
                return None
            if self._wakeup >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._wakeup, numbers)
            for number in numbers:
                if number in self._before and self._is_notice(number):
                    return signal_name(number)

    def _is_notice(self, number: int) -> bool:
        """Not where the script has taken one of the user's own signals for itself since."""
        return number in ENDING or signal.getsignal(number) == self._handle


def _write_last_output(why: str) -> None:
    log.warning("%s", why)
    logging.shutdown()


def _is_free(number: signal.Signals) -> bool:
    """Returns True if a signal is not ignored, and, if it is one of the user's own, handled by nobody: neither
    by Python nor in C, as by `faulthandler.register`."""
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        return False
    return number in ENDING or (before is signal.SIG_DFL and not caught(os.getpid(), number))


# A child by fork is nobody's worker: the signals end it, and its parent does not hear of that. Until the child
# has the old handlers back it must not get them, for it shares the socket with its parent.

_masked = threading.local()


def _forking() -> None:
    if _present is not None:
        _masked.before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)


def _unmask() -> None:
    before = getattr(_masked, "before", None)
    if before is not None:
        _masked.before = None
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _forked() -> None:
    global _present
    if _present is not None:
        notice, _present = _present, None
        notice._undo()
    _unmask()


os.register_at_fork(before=_forking, after_in_parent=_unmask, after_in_child=_forked)
