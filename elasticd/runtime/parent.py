"""A worker ends with its torchrun: killed, that leaves its workers behind, and nobody would ever end them."""

from __future__ import annotations

import ctypes
import os
import signal

#: From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Lets the kernel kill this process when `parent`, who started it, ends; at once if it ends during
    this call. Nothing where the kernel is not Linux."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return
    if done and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
