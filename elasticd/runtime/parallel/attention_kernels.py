"""Attention kernels: attention of some queries to some keys, with what merges it with that to other keys.

A kernel gives the log of the sum of exponentials ("lse") of each query beside the output. Two outputs over
disjoint keys, o1 and o2, are together exp(l1 - l) o1 + exp(l2 - l) o2 with l = log(exp(l1) + exp(l2)). Its
backward pass takes output and lse over *all* keys of the queries, and gives the term that these keys have of
the gradient of the queries, and the gradient of the keys and values themselves (Dao et al., 2022, appendix B).

torch's fused operators do this and have no public name for it: this is the one file that calls them. Whatever
they do not take (other masks, types, head sizes and devices) is computed by matrix products, a block of queries
at a time. `tests/runtime/test_attention_kernels.py` compares each with float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

#: Scores that the matrix products hold at a time, at least those of one query.
_SCORES = 1 << 22


class Visible(NamedTuple):
    """Which keys of a range of tokens the queries of another range attend to."""

    shift: int  #: position of the first query, less that of the first key
    causal: bool  #: a query attends to no later position
    window: int | None = None  #: to so many positions at most, its own among them; None: to all

    def keys(self, first: int, last: int, count: int) -> tuple[int, int]:
        """The keys [start, stop) of `count` that any of the queries first to `last` attends to."""
        stop = min(count, last + self.shift + 1) if self.causal else count
        start = 0 if self.window is None else max(0, first + self.shift - self.window + 1)
        return start, max(start, stop)

    def any(self, queries: int, keys: int) -> bool:
        """Returns True if any query attends to any key."""
        start, stop = self.keys(0, queries - 1, keys)
        return queries > 0 and start < stop

    def all(self, queries: int, keys: int) -> bool:
        """Returns True if all queries attend to all keys."""
        below = not self.causal or self.shift >= keys - 1
        return below and (self.window is None or queries - 1 + self.shift < self.window)

    def diagonal(self, queries: int, keys: int) -> bool:
        """Returns True if query i attends to the keys 0 to i."""
        narrow = self.window is not None and self.window < queries
        return self.causal and self.shift == 0 and not narrow

    def mask(self, first: int, last: int, start: int, stop: int, device: torch.device) -> Tensor | None:
        """Which of the keys [start, stop) the queries [first, last) do not attend to; None: there is none."""
        part = Visible(first + self.shift - start, self.causal, self.window)
        if part.all(last - first, stop - start):
            return None
        seen = torch.ones(last - first, stop - start, dtype=torch.bool, device=device)
        if self.causal:
            seen = seen.tril(part.shift)
        if self.window is not None:
            seen = seen.triu(part.shift - self.window + 1)
        return ~seen


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that parts of an output or of a gradient are added in: single precision at least."""
    return torch.promote_types(dtype, torch.float32)


class Kernel(Protocol):
    """An implementation for one type of device."""

    def takes(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> bool:
        """Returns True if it can do this."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
        """See `forward`."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        visible: Visible,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `backward`."""


def forward(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of queries to some of their keys.

    Args:
        q: queries [heads, queries, head size].
        k: keys [kv-heads, keys, head size]; `heads` is a multiple of `kv-heads`.
        v: values [kv-heads, keys, value size].
        visible: which keys a query attends to.
        scale: of the products of queries and keys.

    Returns:
        The output [heads, queries, value size], zero for a query that attends to none of the keys; and the lse
        [heads, queries], -inf for such a query, in single precision at least.
    """
    return _kernel(q, k, v, visible).forward(q, k, v, visible, scale)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: Visible,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The terms that some keys have of the gradients.

    Args:
        grad: gradient of the output over all keys [heads, queries, value size].
        q, k, v, visible, scale: as those of `forward`.
        out: the output over all keys of the queries, [heads, queries, value size].
        lse: likewise, [heads, queries]; no query is without a key.

    Returns:
        A term of the gradient of `q`, and the terms that these queries have of the gradients of `k` and `v`; of
        their shapes, in the type of `q` or a wider one.
    """
    return _kernel(q, k, v, visible).backward(grad, q, k, v, out, lse, visible, scale)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds the attention to further keys to that to others, in place.

    Args:
        out: the output so far [heads, queries, value size], in a type of `wide`; zero before the first.
        lse: of it [heads, queries]; -inf before the first.
        part: the output over further keys.
        part_lse: of it.
    """
    total = torch.logaddexp(lse, part_lse)
    out.mul_(_weights(lse.unsqueeze(-1), total)).add_(part * _weights(part_lse.unsqueeze(-1), total))
    lse.copy_(total)


def _kernel(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Kernel:
    fused = FUSED.get(q.device.type)
    return fused if fused is not None and fused.takes(q, k, v, visible) else PRODUCTS


class MatrixProducts:
    """Plain matrix products, of a block of queries and the keys that any of them attends to."""

    def takes(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> bool:
        """Anything."""
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
        """See `forward`."""
        heads, queries = q.shape[:2]
        dtype = wide(q.dtype)
        out = q.new_zeros(heads, queries, v.shape[2])
        lse = q.new_full((heads, queries), -torch.inf, dtype=dtype)
        for rows, keys, scores in _blocks(q, k, visible, scale):
            total = scores.logsumexp(-1)
            weights = _weights(scores, total)
            lse[:, rows] = total.flatten(0, 1)
            out[:, rows] = (weights @ v[:, keys].to(dtype).unsqueeze(1)).flatten(0, 1).to(q.dtype)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        visible: Visible,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `backward`."""
        dtype, groups = wide(q.dtype), (k.shape[0], -1)
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
        both = (grad.to(dtype) * out).sum(-1)
        for rows, keys, scores in _blocks(q, k, visible, scale):
            given = grad[:, rows].to(dtype).unflatten(0, groups)
            weights = _weights(scores, lse[:, rows].unflatten(0, groups))
            products = given @ v[:, keys].to(dtype).unsqueeze(1).transpose(-1, -2)
            terms = weights * (products - both[:, rows].unflatten(0, groups).unsqueeze(-1)) * scale
            dq[:, rows] = (terms @ k[:, keys].to(dtype).unsqueeze(1)).flatten(0, 1)
            dk[:, keys] += (terms.transpose(-1, -2) @ q[:, rows].to(dtype).unflatten(0, groups)).sum(1)
            dv[:, keys] += (weights.transpose(-1, -2) @ given).sum(1)
        return dq, dk, dv


def _blocks(q: Tensor, k: Tensor, visible: Visible, scale: float) -> Iterator[tuple[slice, slice, Tensor]]:
    """Blocks of queries, the keys that any query of each attends to, and their scores
    [kv-heads, heads for each, queries, keys], -inf where a query does not attend to a key."""
    (heads, queries, _), (groups, count, _) = q.shape, k.shape
    dtype, rows = wide(q.dtype), max(1, _SCORES // max(1, heads * count))
    for first in range(0, queries, rows):
        last = min(queries, first + rows)
        start, stop = visible.keys(first, last - 1, count)
        if start < stop:
            block = q[:, first:last].to(dtype).unflatten(0, (groups, -1))
            scores = block @ k[:, start:stop].to(dtype).unsqueeze(1).transpose(-1, -2) * scale
            hidden = visible.mask(first, last, start, stop, q.device)
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            yield slice(first, last), slice(start, stop), scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), zero where a query attends to no key."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()


class CpuFlashAttention:
    """torch's fused operator on the CPU. It does not check that queries and keys have as many heads, so that it
    is called with kv-heads as samples, and the heads of each as heads: their keys are one memory."""

    _types = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})

    def takes(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> bool:
        """Masks that are none or begin in the corner; values of the size of keys."""
        shape = q.shape[1], k.shape[1]
        known = q.dtype in self._types and k.shape == v.shape and 0 not in (*shape, *q.shape)
        return known and (visible.all(*shape) or visible.diagonal(*shape))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
        """See `forward`."""
        corner = not visible.all(q.shape[1], k.shape[1])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *self._grouped(q, k, v), 0.0, corner, scale=scale
        )
        return out.flatten(0, 1), lse.flatten(0, 1)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        visible: Visible,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `backward`."""
        corner = not visible.all(q.shape[1], k.shape[1])
        given, whole, total = (x.unflatten(0, (k.shape[0], -1)) for x in (grad, out, lse))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            given, *self._grouped(q, k, v), whole, total, 0.0, corner, scale=scale
        )
        return dq.flatten(0, 1), _added(dk), _added(dv)

    def _grouped(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as [kv-heads, heads for each, tokens, size]."""
        groups, each = k.shape[0], q.shape[0] // k.shape[0]
        keys, values = (x.unsqueeze(1).expand(groups, each, -1, -1) for x in (k, v))
        return q.unflatten(0, (groups, each)), keys, values


def _added(terms: Tensor) -> Tensor:
    """The sum of the heads of each kv-head, [kv-heads, heads for each, ...] to [kv-heads, ...]."""
    return terms.squeeze(1) if terms.shape[1] == 1 else terms.sum(1, dtype=wide(terms.dtype))


class CudaFlashAttention:
    """FlashAttention as torch has it for NVIDIA's and AMD's devices, in half precision: the operators that
    `torch.nn.attention.varlen.varlen_attn` calls, of one sequence. The last query of its causal mask attends to
    all keys."""

    _types = frozenset({torch.bfloat16, torch.float16})
    _largest = 256  #: head size

    @cached_property
    def _one_split(self) -> dict[str, int]:
        """The argument that makes sums independent of what else the device does, where torch has it: 2.11 has
        not, and divides the keys of a single query alone."""
        schema = torch.ops.aten._flash_attention_forward.default._schema
        return {"num_splits": 1} if "num_splits" in {argument.name for argument in schema.arguments} else {}

    def takes(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> bool:
        """Masks that are none or end in the corner; values of the size of keys."""
        queries, keys, size = q.shape[1], k.shape[1], q.shape[2]
        known = q.dtype in self._types and k.shape == v.shape and 0 not in (keys, *q.shape)
        known = known and size % 8 == 0 and size <= self._largest
        ends = visible.causal and visible.shift == keys - queries >= 0
        return known and (visible.all(queries, keys) or ends)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
        """See `forward`."""
        tokens = [x.transpose(0, 1).contiguous() for x in (q, k, v)]
        borders, counts, causal, window = self._shape(q, k, visible)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *tokens, *borders, *counts, 0.0, causal, False, scale=scale, **self._one_split, **window
        )
        return out.transpose(0, 1), lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        visible: Visible,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `backward`."""
        given, *tokens, whole = (x.transpose(0, 1).contiguous() for x in (grad, q, k, v, out))
        borders, counts, causal, window = self._shape(q, k, visible)
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that is none
        unused = torch.empty(0, device=q.device)
        found = torch.ops.aten._flash_attention_backward(
            given,
            *tokens,
            whole,
            lse.contiguous(),
            *borders,
            *counts,
            0.0,
            causal,
            seed,
            unused,
            scale=scale,
            **window,
        )
        dq, dk, dv = (x.transpose(0, 1) for x in found)
        return dq, dk, dv

    def _shape(
        self, q: Tensor, k: Tensor, visible: Visible
    ) -> tuple[list[Tensor], list[int], bool, dict[str, int]]:
        """The beginnings and ends of the sequences of queries and of keys, their tokens, and the mask."""
        counts = [q.shape[1], k.shape[1]]
        borders = [_borders(count, q.device) for count in counts]
        causal = not visible.all(*counts)
        before = visible.window - 1 if causal and visible.window is not None else -1
        after = 0 if causal else -1
        window = {"window_size_left": before, "window_size_right": after}
        return borders, counts, causal and before < 0, window


@lru_cache(maxsize=4096)
def _borders(count: int, device: torch.device) -> Tensor:
    """The beginning and end of one sequence, on a device: kept, because each is a copy there."""
    return torch.tensor([0, count], dtype=torch.int32, device=device)


PRODUCTS = MatrixProducts()
#: Fused kernels by type of device.
FUSED: dict[str, Kernel] = {"cpu": CpuFlashAttention(), "cuda": CudaFlashAttention()}
