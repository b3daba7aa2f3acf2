"""Attention of transformers' models to packed rows: by `elasticd.attention`, registered as an implementation.

A model asks its configuration for the name of an implementation, and calls that with queries, keys and values,
and by keyword with what else its layers say. While a row is packed the name is `NAME`. No mask is made then:
transformers has no function for masks of that name. The function here takes what `elasticd.attention` can say,
and refuses everything else by name. Padded samples keep the implementation that the model came with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel.attention import attention

#: The implementation's name.
NAME = "elasticd"
#: Keywords that say nothing about what a token attends to once a row is packed.
_IDLE = frozenset(
    (
        *("position_ids", "cache_position", "position_embeddings", "use_cache", "output_attentions"),
        *("return_dict", "logits_to_keep"),
    )
)
#: Where a configuration keeps the name: its property sets those of nested configurations, too.
_FIELD = "_attn_implementation_internal"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer to a packed row, as transformers calls an implementation.

    Args:
        module: the layer's attention.
        query: [1, heads, tokens, head size].
        key: [1, kv-heads, tokens, head size].
        value: likewise.
        attention_mask: must be None.
        dropout: must be 0.
        scaling: of the products. None: 1 / sqrt(head size).
        sliding_window: a token attends to so many at most, itself among them.
        is_causal: None: as the module says.
        others: what no implementation here has must be None.

    Returns:
        [1, tokens, heads, head size], and no weights.

    Raises:
        ModelError: the layer asks for what `elasticd.attention` does not have.
    """
    asked = [name for name, given in others.items() if name not in _IDLE and not _nothing(given)]
    asked += ["attention_mask"] * (attention_mask is not None) + [f"dropout = {dropout}"] * bool(dropout)
    if asked:
        words = " and ".join(asked)
        raise ModelError(
            f"{type(module).__name__} attends with {words}, which elasticd.attention does not have"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    y = attention(query, key, value, causal=bool(causal), window=sliding_window, scale=scaling)
    return y.transpose(1, 2).contiguous(), None


def _nothing(given: Any) -> bool:
    return given is None or given is False


def configurations(modules: Iterable[nn.Module]) -> list[Any]:
    """The configurations that modules ask for the name of their attention, each once."""
    asked = [getattr(module, "config", None) for module in modules]
    return list({id(config): config for config in asked if hasattr(config, _FIELD)}.values())


@contextmanager
def packed(configurations: Iterable[Any]) -> Iterator[None]:
    """Inside, models of these configurations attend by `packed_attention`."""
    _register()
    before = [(config, getattr(config, _FIELD)) for config in configurations]
    for config, _ in before:
        setattr(config, _FIELD, NAME)
    try:
        yield
    finally:
        for config, name in before:
            setattr(config, _FIELD, name)


def _register() -> None:
    """Once: whoever made a model has imported the table of implementations."""
    table: Any = sys.modules["transformers.modeling_utils"]
    if NAME not in table.ALL_ATTENTION_FUNCTIONS:
        table.AttentionInterface.register(NAME, packed_attention)
