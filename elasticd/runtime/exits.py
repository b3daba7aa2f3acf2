"""How a rank's part in a job ends, other than by its last step."""

from __future__ import annotations


class JobStopped(SystemExit):
    """The job cannot go on; the message says why. As a SystemExit it ends a script with that one line."""


class JobOver(Exception):
    """The job ended while this rank stood by, or had lost the others."""


class Drained(SystemExit):
    """This process has drained: the job goes on without it. As a SystemExit with code 0 it ends a script
    in good order, before what follows the last step; and its torchrun starts no other in its place."""

    def __init__(self) -> None:
        super().__init__(0)
