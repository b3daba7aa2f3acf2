"""A store of torch's own as the `BootstrapKeyValue` of groups, where there is no agent to ask."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]


class TorchStore:
    """A `BootstrapKeyValue` over a store of `torch.distributed`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        """Stores a value, in place of an earlier one."""
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes, whatever its stub says

    def get(self, key: str, seconds: float) -> bytes:
        """Waits for a key, for `seconds` at most. Raises TimeoutError after that."""
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:
            raise TimeoutError(key) from None
        return self._store.get(key)

    def get_all(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        """As `get`, for each of these keys."""
        deadline = time.monotonic() + seconds
        return [self.get(key, deadline - time.monotonic()) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Adds to a whole number, which begins at 0, and returns the sum."""
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns True if all keys are there. It does not wait."""
        return self._store.check(list(keys))
