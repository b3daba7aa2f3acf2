"""torch's nn.MultiheadAttention with some of its heads: how a member of a TP group computes it.

torch's own forward takes its number of features from its input, which is full where the heads are not. So a cut
module gets a forward of its own, for self-attention: the fused projections of this member's heads, torch's
`scaled_dot_product_attention`, and `out_proj`, whose terms the group sums.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elasticd.runtime.model.validation import ModelError


def self_attention(where: str, attention: nn.MultiheadAttention) -> None:
    """Lets a module compute with the heads that its parameters have. Call it before other hooks are registered:
    these see one argument, the input.

    Args:
        where: its full name, for messages.
        attention: the local module; `num_heads` is the local number.
    """
    # No partials: torch.compile takes a graph for the next block that has such a module, too.
    attention.__dict__["where"] = where
    attention.register_forward_pre_hook(_one_input, with_kwargs=True)
    attention.forward = MethodType(_forward, attention)  # type: ignore[method-assign]


def _one_input(
    attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    names = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
    named |= dict(zip(names, args[3:], strict=False))
    query, key, value = (named.pop(name) for name in ("query", "key", "value"))
    if key is not query or value is not query:
        raise ModelError(
            f"{attention.where} is called with another key or value: a rule cuts self-attention alone"
        )
    if named.pop("need_weights", True):
        raise ModelError(
            f"{attention.where} is asked for its attention weights, of which a member has some: say "
            "need_weights=False"
        )
    named.pop("average_attn_weights", None)
    return (query,), named


def _forward(
    attention: Any,
    x: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """[samples, tokens, width] to the same; [tokens, samples, width] if not `batch_first`. Masks as torch's."""
    if attn_mask is not None and attn_mask.dim() != 2:
        raise ModelError(
            f"{attention.where} takes a mask for each head, which no rule cuts: give one of [tokens, tokens]"
        )
    x = x if attention.batch_first else x.transpose(0, 1)
    projected = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = (
        part.unflatten(-1, (attention.num_heads, attention.head_dim)).transpose(1, 2)
        for part in projected.chunk(3, dim=-1)
    )
    mask = _mask(attn_mask, key_padding_mask, x.dtype)
    dropped = attention.dropout if attention.training else 0.0
    y = F.scaled_dot_product_attention(q, k, v, mask, dropped, is_causal=is_causal and mask is None)
    y = attention.out_proj(y.transpose(1, 2).flatten(2))
    return (y if attention.batch_first else y.transpose(0, 1)), None


def _mask(between: Tensor | None, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The tensor that is added to the scores [samples, heads, tokens, tokens], of masks whose True leaves
    out."""

    def added(mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)

    found = None if between is None else added(between)
    if padding is not None:
        keys = added(padding)[:, None, None, :]
        found = keys if found is None else found + keys
    return found
