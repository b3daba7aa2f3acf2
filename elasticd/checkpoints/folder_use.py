"""`FolderUse`: which jobs have a folder of checkpoints in use.

A job removes old checkpoints of its folder, and what starts before it left half written. Two jobs in one folder
would remove each other's. So each process that saves holds a lock on a file of its job there, which the system
frees when the process ends. A file system that knows no locks protects nobody.
"""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

_PREFIX, _SUFFIX = ".used-by-", ".lock"


class FolderUse:
    """A folder's use by one job, until `end`. Processes of one job use it together."""

    def __init__(self, folder: Path, user: str) -> None:
        """
        Args:
            folder: of checkpoints. It exists.
            user: for people: "job NAME", or "process PID" of one that is no job's.

        Raises:
            ValueError: another one has the folder in use, and nothing was changed.
        """
        mine = folder / f"{_PREFIX}{user.replace(' ', '-', 1)}{_SUFFIX}"
        self._file: IO[str] | None = None
        try:
            self._file = _held(mine)
        except OSError as error:
            log.info("%s: others cannot be kept from using it: %s", folder, error.strerror)
        for other in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")):
            if other != mine and _is_held(other):
                self.end()
                name = other.name.removeprefix(_PREFIX).removesuffix(_SUFFIX).replace("-", " ", 1)
                raise ValueError(
                    f"{name} saves to {folder}, and would remove the checkpoints of {user}, as this one "
                    "its own: name another folder, CheckpointingOptions(folder=...), or end it first"
                )

    def end(self) -> None:
        """Others may use the folder. The last process of a user leaves no file."""
        if self._file is None:
            return
        with self._file, suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(self._file.name).unlink()
        self._file = None


def _held(path: Path) -> IO[str]:
    """A file with a lock that is shared with other processes of one user."""
    while True:
        file = path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
        except OSError:
            file.close()
            raise
        file.close()  # it was removed before it was locked


def _is_held(path: Path) -> bool:
    """Returns True if a process holds a lock on this file. A file that nobody holds is removed."""
    with suppress(OSError), path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        path.unlink()
    return False
