"""`FolderUse`: which jobs have a folder of checkpoints in use.

A job removes old checkpoints of its folder, and what starts before it left half written. Two jobs in one folder
would remove each other's. So each process that saves holds a lock on a file of its job there, which the system
frees when the process ends. A file system that knows no locks protects nobody.
"""

from __future__ import annotations

import fcntl
import logging
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

_PREFIX, _SUFFIX = ".used-by-", ".lock"
#: How often another's lock is looked at before it counts as held, and the seconds between two looks on average.
_LOOKS, _PAUSE_SECONDS = 20, 0.15


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
        marker = folder / f"{_PREFIX}{user.replace(' ', '-', 1)}{_SUFFIX}"
        self._file: IO[str] | None = None
        try:
            self._file = _held(marker)
        except OSError as error:
            log.warning("%s: another job that saves to it would not be noticed: %s", folder, error.strerror)
        for other in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")):
            if other != marker and _is_held(other):
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
        file = path.open("a+")  # NFS wants a file that is open for reading
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
    """Returns True if a process holds a lock on this file. A file that nobody holds is removed. Others may look
    at it at the same moment, so that it is looked at several times; and a job may be about to end."""
    for _ in range(_LOOKS):
        with suppress(OSError), _opened(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(random.uniform(0.5, 1.5) * _PAUSE_SECONDS)
                continue
            path.unlink()
        return False
    return True


def _opened(path: Path) -> IO[str]:
    try:
        return path.open("r+")
    except PermissionError:  # another user's
        return path.open()
