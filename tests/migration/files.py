"""Bootstrap over one file, for processes that form the runtime's groups with no agent beside them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from torch._C._distributed_c10d import FileStore


class Files:
    """A torch FileStore as the runtime's `BootstrapKeyValue`."""

    def __init__(self, path: Path) -> None:
        self._store = FileStore(str(path))

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, seconds: float) -> bytes:
        """Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(key)
            time.sleep(0.002)
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))
