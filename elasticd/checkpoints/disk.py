"""The few ways in which a checkpoint's folder is written, so that a test can end the process after each."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class WritableFile(Protocol):
    """A file that is being written. It is safe from a power loss after `sync` and a `sync_folder`."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Appends all of `data`. Raises OSError."""

    def sync(self) -> None:
        """Returns when all that was written is on disk. Raises OSError."""

    def close(self) -> None:
        """Closes the file, without a sync."""


class Disk(Protocol):
    """The file system of checkpoints; every method raises OSError."""

    def make_folder(self, path: Path) -> None:
        """Makes it and its parents; no error where it is there."""

    def create(self, path: Path) -> WritableFile:
        """A new file, empty; FileExistsError where it is there."""

    def rename(self, old: Path, new: Path) -> None:
        """Of files and folders; at once or not at all."""

    def sync_folder(self, path: Path) -> None:
        """Makes files that were created, renamed or removed in a folder outlast a power loss."""

    def remove(self, path: Path) -> None:
        """A file."""

    def remove_folder(self, path: Path) -> None:
        """A folder with all that is in it; no error where others remove it at the same time."""


class LocalDisk:
    """Any file system that the kernel has mounted, and that renames and syncs as POSIX says."""

    def make_folder(self, path: Path) -> None:
        """Makes it and its parents; no error if it exists."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> WritableFile:
        """A new, empty file, which is written without a buffer."""
        return _File(path)

    def rename(self, old: Path, new: Path) -> None:
        """Atomic, as POSIX `rename` is. It is on disk after a `sync_folder`."""
        os.rename(old, new)

    def sync_folder(self, path: Path) -> None:
        """Syncs the folder's entries by fsync of its descriptor."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        """Removes a file."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Removes a folder and its content; several ranks may do it at the same time."""
        while path.exists():
            with suppress(FileNotFoundError):  # another one was faster here: there may be more
                shutil.rmtree(path)


class _File:
    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
