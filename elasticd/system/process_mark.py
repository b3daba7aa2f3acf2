"""Which torchrun a process descends from: a mark in the environment that all inherit whom it starts.

The mark is the torchrun's process id and the time of its start, so that a later process with the same number
is not taken for it. Both sides can tell it: the torchrun of itself, the agent of the process at the other end.
Standard library only: a torchrun imports this.
"""

from __future__ import annotations

from pathlib import Path

#: Names the torchrun that a process descends from, in either mode.
VARIABLE = "ELASTICD_STARTER"


def mark(pid: int) -> str | None:
    """The mark of a running process; None for one that has ended, or only waits for its parent to look."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else f"{pid}-{fields[19]}"


def alive(marked: str) -> bool:
    """Returns True if the process of this mark runs."""
    pid = marked.partition("-")[0]
    return pid.isdigit() and mark(int(pid)) == marked
