"""Models of transformers that cannot be trained exactly, refused before a small copy is made."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from elasticd.models.huggingface.anatomy import REMEDY, text_of
from elasticd.runtime.model.validation import ModelError
from elasticd.system.logs import is_first_worker

#: Words by which transformers names what a forward takes beside tokens.
_MODALITIES = ("pixel_values", "image_patches", "input_features", "input_values")


def refuse_at_sight(model: Any, *, images: bool = False) -> None:
    """Raises ModelError for what no small copy would show. images: the model may take images, too."""
    if hasattr(model, "_orig_mod"):
        raise ModelError(
            "the model went through torch.compile: give the model itself, and "
            "Job(parallelism=elasticd.ParallelismOptions(compile=True)), which compiles each device's blocks"
        )
    kind, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings"):
        raise ModelError(f"{kind} is no model of transformers, a ...ForCausalLM say")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{kind} has an encoder and a decoder: from_hf takes causal language models, ...ForCausalLM; "
            f"{REMEDY}"
        )
    embedding = None
    with suppress(NotImplementedError):  # of a class that transformers cannot look into
        embedding = model.get_input_embeddings()
    if not isinstance(getattr(embedding, "weight", None), Tensor):
        raise ModelError(f"{kind} has no embedding that takes one stream of tokens: {REMEDY}")
    if not images and (beside := other_modalities(model)):
        raise ModelError(
            f"{kind} takes {', '.join(beside)} beside tokens, and would be trained as text alone: give its "
            f"text model by itself, a ...ForCausalLM, or {REMEDY}"
        )
    if getattr(text_of(config), "output_router_logits", False):
        raise ModelError(
            f"output_router_logits = True of {kind} adds a loss of all layers' routers together, which no "
            "stage has, and that depends on which samples are in a micro-batch: set "
            "model.config.output_router_logits = False, and give Job(balance=elasticd.Balance(loss=...)), "
            "which is of each sample"
        )
    if getattr(config, "_experts_implementation", None) == "grouped_mm" and _has_double_experts(model):
        raise ModelError(
            f"the experts of {kind} are in double precision, which torch's grouped_mm does not have: call "
            "model.set_experts_implementation('eager')"
        )
    if "dynamic" in _rope_types(model):
        raise ModelError(
            f"rope_type = 'dynamic' of {kind} keeps the longest sequence that it has seen, so that what a "
            "sample gives depends on those before it: take another, 'yarn' say"
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ModelError(
            f"{kind} checkpoints its gradients: turn that off and give ParallelismOptions(recompute=True), "
            "which repeats its dropouts"
        )


def other_modalities(model: Any) -> list[str]:
    """The arguments of a model's forward that take images, video or sound."""
    named = inspect.signature(type(model).forward).parameters
    return [name for name in named if any(word in name for word in _MODALITIES)]


def _has_double_experts(model: Any) -> bool:
    experts = (module for module in model.modules() if type(module).__name__.endswith("Experts"))
    return any(p.dtype == torch.float64 for module in experts for p in module.parameters())


def warn_of_lengths(model: Any) -> None:
    """Of frequencies that are others from some length on: that of the micro-batch, padding included."""
    if "longrope" in _rope_types(model) and is_first_worker():
        config = text_of(model.config)
        rope = dict(_flat(getattr(config, "rope_parameters", None)))
        length = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        warnings.warn(
            f"elasticd: {type(model).__name__} has other rotary frequencies where a micro-batch is padded to "
            f"more than {length} tokens, and a layout decides which samples are in a micro-batch: let all "
            "samples be shorter. Training refuses the first micro-batch that is longer",
            stacklevel=3,
        )


def _rope_types(model: Any) -> set[Any]:
    """Of the configuration, and of the rotary tables that the model has."""
    rope = _flat(getattr(text_of(model.config), "rope_parameters", None))
    types = {value for name, value in rope if name == "rope_type"}
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        types |= set(kind.values()) if isinstance(kind, dict) else {kind}
    return types


def _flat(rope: Any) -> Iterator[tuple[str, Any]]:
    for name, value in rope.items() if isinstance(rope, Mapping) else ():
        yield from _flat(value) if isinstance(value, Mapping) else [(name, value)]


def has_own_loss_function(model: Any) -> bool:
    """Returns True if the user set a loss function of the model."""
    return hasattr(model, "_loss_function")
