"""The bytes of live tensors of one thread: a count of storages by a TorchDispatchMode.

A storage counts from the operation that makes it until it is freed, once, whatever views there are of it.
Memory that a kernel needs inside one operation does not count.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations of this thread make while it is entered."""

    now: int  #: [bytes] alive
    most: int  #: [bytes] alive at once at most

    def __init__(self, others: Iterable[Tensor] = ()) -> None:
        """
        Args:
            others: tensors that were there before, whose storages do not count.
        """
        super().__init__()
        self.now = self.most = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in others}
        self._freed = deque[int]()  # sizes; other threads free storages, too, and this one alone changes `now`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:
            return
        self._sizes[storage._cdata] = size = storage.nbytes()
        weakref.finalize(storage, self._free, storage._cdata)
        while self._freed:
            self.now -= self._freed.popleft()
        self.now += size
        self.most = max(self.most, self.now)

    def _free(self, address: int) -> None:
        self._freed.append(self._sizes.pop(address))

    def begin(self) -> None:
        """The most from now on."""
        while self._freed:
            self.now -= self._freed.popleft()
        self.most = self.now
