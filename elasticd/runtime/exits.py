"""How a rank's part in a job ends, other than by its last step."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from elasticd.system.torchrun_outcome import OUTCOME_VARIABLE, REFUSAL

#: Where torch's agent looks for why a worker failed.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class JobStopped(SystemExit):
    """The job cannot go on; the message says why. As a SystemExit it ends a script with that one line."""


def refused(reason: str) -> JobStopped:
    """The error for a script that would be refused again: its torchrun does not start it anew.

    `elasticd run` prints the reason once, in place of the workers.
    """
    error = JobStopped(f"elasticd: {reason}")
    if path := os.environ.get(_ERROR_FILE):
        said = {"message": str(error), "timestamp": int(time.time()), REFUSAL: reason}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(said))
            if os.environ.get(OUTCOME_VARIABLE):
                error.code = 1
    return error


class JobOver(Exception):
    """The job ended while this rank stood by, or had lost the others."""


class Drained(SystemExit):
    """This process has drained: the job goes on without it, or was stopped. As a SystemExit with code 0 it ends
    a script in good order, before what follows the last step; and its torchrun starts no other in its place.

    Attributes:
        reason: For the leader and people.
    """

    def __init__(self, reason: str = "it has drained, and the job goes on without it") -> None:
        super().__init__(0)
        self.reason = reason
