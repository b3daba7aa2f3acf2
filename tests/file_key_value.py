"""Bootstrap over a folder, for processes that form the runtime's groups with no agent beside them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path


class FileKeyValue:
    """A `BootstrapKeyValue` in a folder: each key a file, written whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / key.encode().hex()

    def set(self, key: str, value: bytes) -> None:
        """Writes a key."""
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False, prefix=".") as file:
            file.write(value)
        os.replace(file.name, self._path(key))

    def get(self, key: str, seconds: float) -> bytes:
        """Waits for a key. Raises TimeoutError after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise TimeoutError(key) from None
                time.sleep(0.002)

    def get_all(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        """Waits for each key. Raises as `get`."""
        return [self.get(key, seconds) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Not there: gloo's bootstrap does not add."""
        raise NotImplementedError("gloo's bootstrap does not add")

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys were written."""
        return all(self._path(key).exists() for key in keys)
