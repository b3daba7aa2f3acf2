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


def storage_of(tensor: Tensor) -> int:
    """A number that tensors on one storage share while it lives, also on the meta device, where no storage has
    an address."""
    return tensor.untyped_storage()._cdata


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
        self._sizes = {storage_of(tensor): 0 for tensor in others}
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


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Attention as a fused kernel makes it: the CPU's, of which torch knows shapes on the meta device, too.

    Args:
        query: [samples, heads, tokens, width], as the others are those of F.scaled_dot_product_attention.

    Returns:
        [samples, heads, tokens, width]; None: there is no such kernel for these arguments.
    """
    if not query.is_meta or query.dim() != 4 or query.shape[-1] != value.shape[-1]:
        return None
    if attn_mask is not None and (attn_mask.requires_grad or attn_mask.dim() not in (2, 4)):
        return None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
