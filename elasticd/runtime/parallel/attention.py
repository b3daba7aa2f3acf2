"""`attention` and `positions`: what a module calls so that its sequences may be packed.

Outside of a job, and in one that pads samples, both are plain torch. Where a row is packed, each sequence in it
is attended to by itself. What a compiled block asks of a packed row is outside of its graph, as rows differ.
The graph of padded samples has all of it.
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from elasticd.runtime.model.graph_breaks import breaks_graphs
from elasticd.runtime.parallel.packed_row import PackedRow, current_row


def positions(x: Tensor) -> Tensor:
    """The position of each token in its own sequence: 0, 1, ... where samples are padded; in a packed row the
    same again for each sequence.

    Args:
        x: any tensor of the pass, [samples, tokens, ...]; token ids, say.

    Returns:
        [tokens], int64, on the device of `x`.

    Raises:
        ValueError: `x` has no dimension of tokens, or the packed row has another number of them.
    """
    if x.dim() < 2:
        raise ValueError(f"elasticd.positions takes a tensor [samples, tokens, ...], not {tuple(x.shape)}")
    if current_row(x.device) is None:
        return torch.arange(x.shape[1], device=x.device)
    return _positions_of_row(x)


@breaks_graphs
def _positions_of_row(x: Tensor) -> Tensor:
    row = _row(x.device)
    if x.shape[0] != 1 or x.shape[1] != row.tokens:
        raise ValueError(
            f"elasticd.positions got {tuple(x.shape)}, and the packed row is [1, {row.tokens}, ...]: give it a "
            "tensor [samples, tokens, ...] of all tokens"
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
    """Attention of the tokens of each sequence to one another: `F.scaled_dot_product_attention`, where samples
    are not packed.

    Args:
        q: queries [samples, heads, tokens, head size].
        k: keys [samples, kv-heads, tokens, head size]; `heads` is a multiple of `kv-heads`, and each kv-head
            serves `heads / kv-heads` heads that follow each other.
        v: values [samples, kv-heads, tokens, size of values].
        causal: a token attends to itself and to earlier ones alone.
        window: it attends to so many tokens at most, itself among them (needs `causal`). None: to all.
        scale: of the products of queries and keys. None: 1 / sqrt(head size).

    Returns:
        [samples, heads, tokens, size of values].

    Raises:
        ValueError: shapes that do not fit each other or the packed row, or a window without `causal`.
    """
    _refuse_shapes(q, k, v)
    if window is not None and not causal:
        raise ValueError("elasticd.attention takes a window of a causal attention alone: say causal=True")
    if window is not None and window < 1:
        raise ValueError(
            f"elasticd.attention got a window of {window} tokens: a token attends to itself at least"
        )
    if current_row(q.device) is None:
        return _plain(q, k, v, causal=causal, window=window, scale=scale)
    return _of_row(q, k, v, causal, window, scale)


def _refuse_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            "elasticd.attention takes queries, keys and values [samples, heads, tokens, head size], not "
            f"{_shapes(q, k, v)}"
        )
    if not (q.shape[0] == k.shape[0] == v.shape[0] and q.shape[2] == k.shape[2] == v.shape[2]):
        raise ValueError(
            "elasticd.attention is of each sequence to itself: queries, keys and values must have the same "
            f"samples and tokens [samples, heads, tokens, head size], not {_shapes(q, k, v)}. (Do heads come "
            "after tokens in them? Then transpose(1, 2).)"
        )
    if k.shape[1] != v.shape[1] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "elasticd.attention takes as many keys as values in each token, and queries as wide as keys, not "
            f"{_shapes(q, k, v)}"
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"elasticd.attention got {q.shape[1]} heads and {k.shape[1]} kv-heads: heads must be a multiple of "
            "kv-heads"
        )


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors)


def _plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, scale: float | None) -> Tensor:
    """Attention of padded samples, or of one sequence."""
    mask = None
    if window is not None and window < q.shape[2]:
        ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        mask = ones.tril().triu(1 - window)
    grouped = k.shape[1] != q.shape[1]
    # Kernels for one kv-head of several heads are CUDA's, of half precision and without a mask. Others repeat
    # kv-heads themselves, or take the memory of all products.
    if grouped and not (mask is None and q.device.type == "cuda" and q.dtype in _HALF):
        grouped, heads = False, q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(heads, dim=1), v.repeat_interleave(heads, dim=1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=grouped
    )


_HALF = (torch.bfloat16, torch.float16)


@breaks_graphs
def _of_row(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None) -> Tensor:
    row = _row(q.device)
    if q.shape[0] != 1 or q.shape[2] != row.tokens:
        raise ValueError(
            f"elasticd.attention got queries {tuple(q.shape)}, and the packed row is [1, heads, {row.tokens}, "
            "head size]: give it all tokens of the row"
        )
    return _packed(q, k, v, row, causal=causal, window=window, scale=scale)


def _row(device: torch.device) -> PackedRow:
    row = current_row(device)
    assert row is not None
    return row


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
    """Attention of each sequence by itself. The sequences are views of the row, whose gradients are joined in
    one copy. One kernel runs for each run of sequences of one length; a row of one run is not copied. Of
    sequences that are cut the rest is fetched."""
    if not row.whole:
        if row.exchange is None:
            raise RuntimeError("a row has a part of a sequence, and no other lane to fetch the rest from")
        return row.exchange.attention(q, k, v, row, causal=causal, window=window, scale=scale)
    runs = [(length, len(list(run))) for length, run in groupby(at.stop - at.start for at in row.segments)]
    if len(runs) == 1:
        return _run(q, k, v, runs[0][1], causal=causal, window=window, scale=scale)
    sizes = [length * count for length, count in runs]
    parts = zip(*(x.split(sizes, dim=2) for x in (q, k, v)), strict=True)
    made = [
        _run(q_run, k_run, v_run, count, causal=causal, window=window, scale=scale)
        for (q_run, k_run, v_run), (_, count) in zip(parts, runs, strict=True)
    ]
    return torch.cat(made, dim=2)


def _run(
    q: Tensor, k: Tensor, v: Tensor, count: int, *, causal: bool, window: int | None, scale: float | None
) -> Tensor:
    """Attention of so many sequences of one length: a batch of them, which is a view."""
    if count == 1:
        return _plain(q, k, v, causal=causal, window=window, scale=scale)
    batch = (x[0].unflatten(1, (count, -1)).transpose(0, 1) for x in (q, k, v))
    return _plain(*batch, causal=causal, window=window, scale=scale).transpose(0, 1).flatten(1, 2)[None]
