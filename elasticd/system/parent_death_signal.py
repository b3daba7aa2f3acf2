"""Child processes that end with their parent, even where it is killed: the kernel is asked to see to it."""

from __future__ import annotations

import os
import signal
import sys

#: Seconds in which a second signal to end is the first one's echo: who signals a whole process group, or a
#: container, signals parents too, which then pass it on to their children.
ECHO_SECONDS = 5.0

# Run as `python -c` in between, since the wish to die with a parent must be stated by the child itself, and
# Python code between fork and exec is not safe in a process with threads. Asking for the parent afterwards
# closes the gap in which it may have died already. 1 is PR_SET_PDEATHSIG.
_LAUNCHER = """
import ctypes, os, sys
if ctypes.CDLL(None, use_errno=True).prctl(1, int(sys.argv[1]), 0, 0, 0) != 0:
    sys.exit("prctl: " + os.strerror(ctypes.get_errno()))
if os.getppid() != int(sys.argv[2]):
    sys.exit("the parent is gone")
os.execv(sys.argv[3], sys.argv[3:])
"""


def ending_with_us(command: list[str], how: signal.Signals = signal.SIGTERM) -> list[str]:
    """The command line that runs `command` (its program by path), so that the process gets the signal `how`
    when the thread that started it ends."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(int(how)), str(os.getpid()), *command]
