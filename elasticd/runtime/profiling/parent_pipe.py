"""A process that ends when whoever started it does: its standard input is a pipe that only the parent holds.

A worker's is not, so `runtime.control.parent_death` asks the kernel; here this is better, for it lets what is
open be closed, and holds also for a parent that ended while this process still started."""

from __future__ import annotations

import _thread
import os
import threading
import time

#: Seconds from the interrupt, which lets what is open be closed, to the end without more ado.
INTERRUPT_SECONDS = 5.0


def end_at_eof(stdin: int) -> None:
    """Interrupts the main thread when `stdin` is closed, however the parent ended, and ends the process if that
    does not. Nothing else may read `stdin` from now on."""

    def wait() -> None:
        while os.read(stdin, 4096):
            pass
        _thread.interrupt_main()
        time.sleep(INTERRUPT_SECONDS)
        os._exit(1)

    threading.Thread(target=wait, name="end-at-eof", daemon=True).start()
