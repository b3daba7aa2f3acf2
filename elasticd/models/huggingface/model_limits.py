"""The largest token, label and position that a model of transformers has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from elasticd.models.huggingface.anatomy import text_of
from elasticd.models.huggingface.vision_language import seam_of, takes_images


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """The number that a model has of each; None: it does not say."""

    tokens: int | None  #: rows of the embedding
    targets: int | None  #: logits of a token
    positions: int | None  #: tokens of a sample, at most


def limits_of(model: Any) -> ModelLimits:
    """The limits of a causal or a vision-language model."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return ModelLimits(
        tokens=model.get_input_embeddings().weight.shape[0],
        targets=weight.shape[0] if isinstance(weight, Tensor) else None,
        positions=_positions(model),
    )


def _positions(model: Any) -> int | None:
    """Tokens of a sample, at most, of a model with a table of positions; None: it has none."""
    limit = getattr(text_of(model.config), "max_position_embeddings", None)
    language = model.get_submodule(seam_of(model)[1]) if takes_images(model) else model
    for module in language.modules():
        if not isinstance(module, nn.Embedding) or module is model.get_input_embeddings():
            continue
        # OPT's table has two rows more; RoBERTa's positions begin behind its padding index.
        if limit and limit <= module.num_embeddings <= limit + 2:
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return min(limit, module.num_embeddings - first)
    return None
