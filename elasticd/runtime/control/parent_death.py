"""A worker and its torchrun: it ends with it, and says where that would not start it again.

Killed, a torchrun leaves its workers behind, and nobody would ever end them.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

from elasticd.wire.unix_socket import SLOT_VARIABLE

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


def without_restarts(environment: Mapping[str, str]) -> str:
    """The warning, once for each torchrun that starts no worker again, and ends all of its node's when one
    dies; nothing where `elasticd run` started one for this device alone, for it was told how often."""
    off = environment.get("TORCHELASTIC_MAX_RESTARTS") == "0"
    if not off or environment.get(SLOT_VARIABLE) or environment.get("LOCAL_RANK", "0") != "0":
        return ""
    return (
        "torchrun's restarts are off: when one worker of this node dies, torchrun ends the others, and the "
        "node is lost to the job. Start with 'elasticd run', where one death costs one device, or give "
        "torchrun --max-restarts=N"
    )
