"""`attention` and `positions`: what a module calls so that its sequences may be packed.

Outside of a job, and in one that pads samples, both are plain torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from elasticd.runtime.parallel.packed_row import PackedRow, current_row


def positions(x: Tensor) -> Tensor:
    """The position of each token in its own sequence.

    Args:
        x: any tensor of the pass, [samples, tokens, ...].

    Returns:
        [tokens], int64, on the device of `x`.

    Raises:
        ValueError: a packed row has another number of tokens.
    """
    row = current_row()
    if row is None:
        return torch.arange(x.shape[1], device=x.device)
    if x.shape[1] != row.tokens:
        raise ValueError(
            f"elasticd.positions got {x.shape[1]} tokens, and the row has {row.tokens}: give it a tensor "
            "[samples, tokens, ...] of all tokens"
        )
    return row.positions


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of the tokens of each sequence to one another: `F.scaled_dot_product_attention` where samples
    are not packed.

    Args:
        q: queries [samples, heads, tokens, head size].
        k: keys [samples, kv-heads, tokens, head size]; `heads` is a multiple of `kv-heads`.
        v: values, likewise.
        causal: a token attends to itself and to earlier ones alone.
        window: it attends to so many tokens at most, itself among them (needs `causal`). None: to all.
        scale: of the products of queries and keys. None: 1 / sqrt(head size).

    Returns:
        [samples, heads, tokens, head size].
    """
    row = current_row()
    if row is None:
        return _plain(q, k, v, causal=causal, window=window, scale=scale)
    return _packed(q, k, v, row, causal=causal, window=window, scale=scale)


def _plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, scale: float | None) -> Tensor:
    grouped, mask = q.shape[1] != k.shape[1], None
    if window is not None and window < q.shape[2]:
        ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        mask = ones.tril().triu(1 - window)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=grouped
    )


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row: PackedRow,
    *,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> Tensor:
    parts = [
        _plain(q[:, :, at.rows], k[:, :, at.rows], v[:, :, at.rows], causal=causal, window=window, scale=scale)
        for at in row.segments
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
