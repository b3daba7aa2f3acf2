"""A real disk that ends its process after a set number of operations, and forgets what was not synced."""

from __future__ import annotations

import os
from pathlib import Path

from elasticd.checkpoints.disk import LocalDisk, WritableFile


class Crash(Exception):
    """Raised in place of an end where the process must go on, to count operations."""


class CrashingDisk:
    """After `operations` the process ends, in the middle of a write where the next one is a write.

    With `power` it takes with it what a power loss takes: of files that were not synced all but the first half
    of what was written last, and the names that were given in folders which were not synced since.
    """

    def __init__(self, operations: int, *, power: bool = False) -> None:
        self._disk = LocalDisk()
        self.left, self._power = operations, power
        self._unsynced: dict[Path, int] = {}  # files, and how much of them is surely on disk
        self._named: list[tuple[Path, Path | None]] = []  # new names, and what they were before

    def _next(self) -> bool:
        """Whether the operation that comes is the last that begins."""
        self.left -= 1
        return self.left < 0

    def _end(self) -> None:
        if self._power:
            for new, old in reversed(self._named):
                if old is not None:
                    os.rename(new, old)
                    self._unsynced = {
                        Path(str(path).replace(str(new), str(old))): size
                        for path, size in self._unsynced.items()
                    }
            for path, size in self._unsynced.items():
                if path.exists():
                    os.truncate(path, size)
            for new, old in self._named:
                if old is None and new.is_file():
                    new.unlink()
        os._exit(9)

    def make_folder(self, path: Path) -> None:
        if self._next():
            self._end()
        self._disk.make_folder(path)

    def create(self, path: Path) -> WritableFile:
        if self._next():
            self._end()
        self._named.append((path, None))
        self._unsynced[path] = 0
        return _CrashingFile(self, path, self._disk.create(path))

    def rename(self, old: Path, new: Path) -> None:
        if self._next():
            self._end()
        self._disk.rename(old, new)
        self._named.append((new, old))

    def sync_folder(self, path: Path) -> None:
        if self._next():
            self._end()
        self._disk.sync_folder(path)
        self._named = [(new, old) for new, old in self._named if new.parent != path]

    def remove(self, path: Path) -> None:
        if self._next():
            self._end()
        self._disk.remove(path)

    def remove_folder(self, path: Path) -> None:
        """One file after another, as the kernel does it."""
        for file in sorted(path.iterdir()):
            if self._next():
                self._end()
            file.unlink()
        path.rmdir()


class _CrashingFile:
    def __init__(self, disk: CrashingDisk, path: Path, stream: WritableFile) -> None:
        self._disk, self._path, self._stream = disk, path, stream

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._disk._next():
            self._stream.write(memoryview(data)[: len(data) // 2])
            self._disk._end()
        self._stream.write(data)

    def sync(self) -> None:
        if self._disk._next():
            self._disk._end()
        self._stream.sync()
        self._disk._unsynced[self._path] = self._path.stat().st_size

    def close(self) -> None:
        self._stream.close()
