"""Causal language models of Hugging Face's transformers, as they are: cut by the plans that they carry.

Every section runs the model's own forward (`sections`), which is proved on a small copy (`proof`); the rules
come from the model's tensor-parallel plan (`tp_plans`). Padding belongs at the end of a sample: causal
attention then never sees it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from elasticd.models.huggingface.adapters import (
    Adapters,
    adapters_of,
    base_model,
    keyed_value,
    plain_name,
)
from elasticd.models.huggingface.anatomy import REMEDY, text_of
from elasticd.models.huggingface.batches import FOR_LAYERS, HfBatches
from elasticd.models.huggingface.export import HfPretrained
from elasticd.models.huggingface.folder import FolderWeights, folder_of, model_on_meta
from elasticd.models.huggingface.fused_experts import CutIn
from elasticd.models.huggingface.init_weights import on_meta, own_init, with_buffers
from elasticd.models.huggingface.loss import causal_lm_loss
from elasticd.models.huggingface.peft_export import PeftPretrained
from elasticd.models.huggingface.proof import prove
from elasticd.models.huggingface.sections import name_in_model, sections_of
from elasticd.models.huggingface.tp_plans import cuts_of
from elasticd.runtime.model.model import Init, Model
from elasticd.runtime.model.validation import ModelError
from elasticd.system.logs import is_first_worker

__all__ = ["from_hf", "refuse_at_sight", "their_name"]

#: Modules of layers that are called with samples and tokens in one dimension, by type of model.
_FLATTENED = {"opt": "blocks.0.layer.fc1"}


#: Words by which transformers names what a forward takes beside tokens.
_MODALITIES = ("pixel_values", "image_patches", "input_features", "input_values")


def from_hf(
    model: Any,
    *,
    weights: str | Path | None = None,
    dtype: torch.dtype | None = None,
    init: Init | Mapping[str, Tensor] | None = None,
    experts: CutIn = "columns",
) -> Model:
    """A `...ForCausalLM` as elasticd trains it: its own forward, cut by the `base_model_tp_plan` of its
    configuration and the class's own `_tp_plan`. It is not changed. Of a model with LoRA adapters, PEFT's
    get_peft_model gives one, the adapters are trained and the base stays as it is.

    A model with values, from_pretrained's say, starts from them (every rank must load the same); one that was
    made on the meta device from its own `_init_weights`, keyed by (seed, module), or from `weights`.

    Args:
        model: a model; or a folder of transformers (or its name on the hub), from which each device reads the
            parts that it holds, so that none holds the whole model; or a configuration.
        weights: the folder to read the first values from, for a configuration or a model on the meta device.
        dtype: of the parameters, for a folder or a configuration. None: as the configuration says.
        init: first values as `elasticd.Model` takes them.
        experts: what a TP group cuts the experts of a mixture in: "columns" of each, or "experts".

    Raises:
        ModelError: the layers of the model and what is around them cannot run on different stages, or not with
            the same result; or the folder does not have its weights.
    """
    if experts not in get_args(CutIn):
        raise ModelError(f"experts = {experts!r}: a TP group cuts experts in 'columns' or in 'experts'")
    if isinstance(model, str | Path):
        weights = weights or (model := folder_of(model))
    if not hasattr(model, "get_input_embeddings") and (isinstance(model, Path) or hasattr(model, "model_type")):
        model = model_on_meta(model, dtype)
    if weights is not None and not on_meta(model):
        raise ModelError("weights= is for a model without values: make it with torch.device('meta')")
    model = base_model(model)
    refuse_at_sight(model)
    adapters = adapters_of(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"all parameters of {type(model).__name__} are frozen: call requires_grad_(True) on those that are "
            "to be trained"
        )
    _warn_of_lengths(model)
    proof, width = prove(model, adapters), text_of(model.config).hidden_size
    blank = on_meta(model)
    made = with_buffers(model) if blank else model
    sections = sections_of(made, proof.anatomy)
    cuts = cuts_of(made, sections, proof.anatomy, experts)
    their = partial(name_in_model, list(sections))
    first = init if weights is None else _weights(folder_of(weights), model, their, adapters)
    name = f"{model.config.model_type}-{len(sections.blocks)}x{width}"
    if proof.anatomy.unused and is_first_worker():
        idle = ", ".join(proof.anatomy.unused)
        warnings.warn(f"elasticd: {name} does not train {idle}, which its forward does not call", stacklevel=2)
    described = Model(
        name=name,
        embed=sections.embed,
        blocks=sections.blocks,
        head=sections.head,
        width=width,
        rules=cuts.rules,
        units=cuts.units,
        init=own_init(made, their) if first is None and blank else first,
        proved=str(proof)
        + "".join(f"; whole in a TP group: {name} ({why})" for name, why in cuts.whole.items()),
    )
    if isinstance(first, FolderWeights):
        first.refuse_others(described)
    flat = _FLATTENED.get(model.config.model_type)
    described.unpackable = proof.unpackable
    described.reads = HfBatches(
        model=type(model).__name__,
        takes=frozenset(inspect.signature(type(model).forward).parameters),
        shifts=proof.shifts is not False,
        layers=frozenset(FOR_LAYERS) - proof.lacks.keys(),
        lacks=proof.lacks,
        counts_from_zero=proof.counts_from_zero,
        absolute=proof.absolute,
        tokens_known=model.get_input_embeddings().weight.shape[0],
        targets_known=_logits(model),
        longest=_longest(model),
    )
    if adapters is None:
        described.pretrained = HfPretrained.of(model, sections, described.ties)
    else:
        described.leaves_out_frozen = True
        described.pretrained = PeftPretrained.of(model, adapters, sections, described.ties)
    own_loss = proof.shifts is not None and not hasattr(model, "_loss_function")  # one that the user set
    described.loss = causal_lm_loss if own_loss else None
    described.mixing = (flat, "has samples and tokens in one dimension") if flat else _mixing(described)
    return described


def _weights(folder: Path, model: Any, their: Callable[[str], str], adapters: Adapters | None) -> FolderWeights:
    """The folder's values for a model on the meta device; those of an adapter are made as PEFT makes them."""
    if adapters is None:
        return FolderWeights(folder, model, their)
    with torch.device("meta"):
        base = type(model)(model.config)
    return FolderWeights(
        folder,
        base,
        lambda name: plain_name(model, their(name)) or their(name),
        lambda name: keyed_value(model, their(name)),
    )


def _longest(model: Any) -> int | None:
    """Tokens of a sample, at most, of a model with a table of positions; None: it has none."""
    limit = getattr(text_of(model.config), "max_position_embeddings", None)
    for module in model.modules():
        if not isinstance(module, nn.Embedding) or module is model.get_input_embeddings():
            continue
        # OPT's table has two rows more; RoBERTa's positions begin behind its padding index.
        if limit and limit <= module.num_embeddings <= limit + 2:
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return min(limit, module.num_embeddings - first)
    return None


def _logits(model: Any) -> int | None:
    """The number of logits of a token; None: the model does not say."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) else None


def _mixing(model: Model) -> tuple[str, str] | None:
    """A module beside the cut ones that is no norm: an attention that is not cut, which takes all tokens, looks
    like a feed-forward that is not."""
    for section in (f"blocks.{layer}" for layer in range(model.layers)):
        for path, module in model.sections[section].named_modules():
            whole = path not in model.owners(section) and any(True for _ in module.parameters(recurse=False))
            if whole and "norm" not in type(module).__name__.lower():
                return f"{section}.{path}", "is whole on every member, and may take several tokens"
    return None


def their_name(model: Model, name: str) -> str:
    """The name that a parameter of `from_hf`'s model has in the model itself."""
    return name_in_model(model.sections.items(), name)


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
    if not isinstance(getattr(model.get_input_embeddings(), "weight", None), Tensor):
        raise ModelError(f"{kind} has no embedding that takes one stream of tokens: {REMEDY}")
    if not images and (beside := _of_other_modalities(model)):
        raise ModelError(
            f"{kind} takes {', '.join(beside)} beside tokens, and would be trained as text alone: give its "
            f"text model by itself, a ...ForCausalLM, or {REMEDY}"
        )
    if getattr(text_of(config), "output_router_logits", False):
        raise ModelError(
            f"output_router_logits = True of {kind} adds a loss of all layers' routers together, which no "
            "stage has: set model.config.output_router_logits = False"
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


def _of_other_modalities(model: Any) -> list[str]:
    """The arguments of a model's forward that take images, video or sound."""
    named = inspect.signature(type(model).forward).parameters
    return [name for name in named if any(word in name for word in _MODALITIES)]


def _has_double_experts(model: Any) -> bool:
    experts = (module for module in model.modules() if type(module).__name__.endswith("Experts"))
    return any(p.dtype == torch.float64 for module in experts for p in module.parameters())


def _warn_of_lengths(model: Any) -> None:
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
        found = getattr(module, "rope_type", None)
        types |= set(found.values()) if isinstance(found, dict) else {found}
    return types


def _flat(rope: Any) -> Iterator[tuple[str, Any]]:
    for name, value in rope.items() if isinstance(rope, Mapping) else ():
        yield from _flat(value) if isinstance(value, Mapping) else [(name, value)]
