"""When a job was started on this node: by it the coordinator tells a start after the job's end from a late one.

Clocks of nodes differ, but an age does not depend on them. `elasticd run` puts the moment of its own start into
the environment of its torchruns; a torchrun of somebody else takes that of its own process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from elasticd.system import process_mark

#: The start of `elasticd run`, in seconds since the machine's.
LAUNCHED_VARIABLE = "ELASTICD_LAUNCHED"
#: Set where the job is to begin anew, whatever checkpoints there are.
FRESH_VARIABLE = "ELASTICD_FRESH"


def launched_now() -> str:
    """The value of LAUNCHED_VARIABLE for a start now."""
    return str(time.clock_gettime(time.CLOCK_BOOTTIME))


def age_seconds(environment: Mapping[str, str]) -> float:
    """Seconds since the job was started on this node."""
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    try:
        return max(0.0, now - float(environment[LAUNCHED_VARIABLE]))
    except (KeyError, ValueError):
        marked = process_mark.mark(os.getpid()) or ""
        ticks = marked.rpartition("-")[2]
        return max(0.0, now - int(ticks) / os.sysconf("SC_CLK_TCK")) if ticks.isdigit() else 0.0
