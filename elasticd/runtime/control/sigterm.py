"""SIGTERM, by which a spot node, a scheduler or torchrun says that it will end this process: the worker drains.

The signal is heard at once, whatever the main thread waits in: the interpreter's signal handler, which runs on
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

from elasticd.system.parent_death_signal import ECHO_SECONDS

log = logging.getLogger(__name__)

#: What the leader is told of the notice.
NOTICE = "SIGTERM"

_present: PreemptionNotice | None = None


class PreemptionNotice:
    """Hears SIGTERM from `install` to `restore`. `told` is called once, on a thread of its own; `grace` seconds
    later the process ends, or at the next SIGTERM that is no echo.

    A handler that was there is called as well, on the main thread as ever; a signal that was ignored stays so.
    """

    def __init__(self, grace: float, told: Callable[[], None]) -> None:
        self._grace, self._told = grace, told
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)  # as the interpreter wants it
        self._before: Any = None
        self._wakeup = -1
        self._heard = False

    def install(self) -> None:
        """Nothing where this is not the main thread, which alone may set handlers."""
        global _present
        before = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN or _present:
            return
        self._before = before
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handle)
        _present = self
        threading.Thread(target=self._run, name="elasticd-notice", daemon=True).start()

    def restore(self) -> None:
        """Leaves SIGTERM as it was; but not once it was heard: then the grace goes on, and echoes are none."""
        global _present
        if _present is not self or self._heard or threading.current_thread() is not threading.main_thread():
            return
        _present = None
        self._undo()
        self._writer.close()  # which ends the thread

    def _undo(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
        ours = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        if ours not in (-1, self._writer.fileno()):  # somebody's after us
            signal.set_wakeup_fd(ours, warn_on_full_buffer=False)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._heard:  # somebody else took the interpreter's byte: an asyncio loop does
            with contextlib.suppress(OSError):
                self._writer.send(bytes([number]))
        if callable(self._before):
            self._before(number, frame)

    def _run(self) -> None:
        if not self._await(None):
            return
        self._heard = True
        began = time.monotonic()
        self._told()
        while (left := began + self._grace - time.monotonic()) > 0:
            if self._await(left) and time.monotonic() - began > ECHO_SECONDS:
                log.warning("a second SIGTERM: this process ends at once")
                break
        else:
            log.warning("this process has drained for %g s, its grace: it ends now", self._grace)
        logging.shutdown()
        os._exit(0)  # the main thread may be stuck; and no code that torchrun takes for a failure

    def _await(self, seconds: float | None) -> bool:
        """Whether SIGTERM came in time. Other signals are handed on to who had asked for them before us."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            self._reader.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
            try:
                numbers = self._reader.recv(1024)
            except TimeoutError:
                return False
            if not numbers:
                return False
            if self._wakeup >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._wakeup, numbers)
            if signal.SIGTERM in numbers:
                return True


# A child by fork is nobody's worker: SIGTERM ends it, and its parent does not hear of that. Until the child has
# the old handler back it must not get the signal, for it shares the socket with its parent.

_masked = threading.local()


def _forking() -> None:
    if _present is not None:
        _masked.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


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
