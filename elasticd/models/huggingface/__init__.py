"""Causal and vision-language models of Hugging Face's transformers, as they are, cut by their own plans.

Every section runs the model's own forward (`sections`), which is proved on a small copy (`proof`); the rules
come from the model's tensor-parallel plan (`tp_plans`). Padding belongs at the end of a sample: causal
attention then never sees it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
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
from elasticd.models.huggingface.anatomy import text_of
from elasticd.models.huggingface.batches import FOR_LAYERS, HfBatches
from elasticd.models.huggingface.export import HfExporter
from elasticd.models.huggingface.folder import FolderWeights, folder_of, model_on_meta
from elasticd.models.huggingface.fused_experts import CutIn, routers_of
from elasticd.models.huggingface.image_batches import sample_of
from elasticd.models.huggingface.init_weights import on_meta, own_init, with_buffers
from elasticd.models.huggingface.loss import causal_lm_loss
from elasticd.models.huggingface.model_limits import limits_of
from elasticd.models.huggingface.peft_export import PeftPretrained
from elasticd.models.huggingface.proof import prove
from elasticd.models.huggingface.sections import Sections, name_in_model, sections_of
from elasticd.models.huggingface.tp_plans import cuts_of
from elasticd.models.huggingface.unsupported import has_own_loss_function, refuse_at_sight, warn_of_lengths
from elasticd.models.huggingface.vision_language import freeze, takes_images
from elasticd.models.huggingface.vision_language_model import vision_language_model
from elasticd.runtime.model.model import Init, Model
from elasticd.runtime.model.validation import ModelError
from elasticd.system.logs import is_first_worker

__all__ = ["from_hf", "refuse_at_sight", "sample_of", "their_name"]

#: Modules of layers that are called with samples and tokens in one dimension, by type of model.
_FLATTENED = {"opt": "blocks.0.layer.fc1"}


def from_hf(
    model: Any,
    *,
    weights: str | Path | None = None,
    dtype: torch.dtype | None = None,
    init: Init | Mapping[str, Tensor] | None = None,
    experts: CutIn = "columns",
    frozen: Iterable[str] = (),
) -> Model:
    """A model of transformers as elasticd trains it: its own forward, cut by the `base_model_tp_plan` of its
    configuration and the class's own `_tp_plan`.

    A `...ForCausalLM` is a model of one module. A vision-language model, a `...ForConditionalGeneration` that
    takes images, is a model of the modules "vision" and "language". Of a model with LoRA adapters, PEFT's
    get_peft_model gives one, the adapters are trained and the base stays as it is.

    A model with values, from_pretrained's say, starts from them (every rank must load the same); one that was
    made on the meta device from its own `_init_weights`, keyed by (seed, module), or from `weights`. It is not
    changed, but for parameters that are frozen here: they need no gradients in it any more.

    Args:
        model: a model; or a folder of transformers (or its name on the hub), from which each device reads the
            parts that it holds, so that none holds the whole model; or a configuration.
        weights: the folder to read the first values from, for a configuration or a model on the meta device.
        dtype: of the parameters, for a folder or a configuration. None: as the configuration says.
        init: first values as `elasticd.Model` takes them.
        experts: what a TP group cuts the experts of a mixture in: "columns" of each, or "experts".
        frozen: parameters that are not trained, by their full names or patterns of these: "vision.*".

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
    images = takes_images(model)
    refuse_at_sight(model, images=images)
    adapters = adapters_of(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"all parameters of {type(model).__name__} are frozen: call requires_grad_(True) on those that are "
            "to be trained"
        )
    warn_of_lengths(model)
    if images:
        folder = None if weights is None else folder_of(weights)
        return vision_language_model(
            model,
            frozen=frozen,
            experts=experts,
            init=init,
            weights=None if folder is None else lambda their: _weights(folder, model, their, adapters),
            limits=limits_of(model),
        )
    proof, width = prove(model, adapters), text_of(model.config).hidden_size
    blank = on_meta(model)
    filled = with_buffers(model) if blank else model
    sections = sections_of(filled, proof.anatomy)
    freeze(_named(sections), frozen)
    if not any(parameter.requires_grad for _, parameter in _named(sections)):
        raise ModelError(f"all parameters of {type(model).__name__} are frozen: frozen leaves none to train")
    cuts = cuts_of(filled, sections, proof.anatomy, experts)
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
        init=own_init(filled, their) if first is None and blank else first,
        proved=str(proof)
        + "".join(f"; whole in a TP group: {name} ({why})" for name, why in cuts.whole.items()),
    )
    if isinstance(first, FolderWeights):
        first.refuse_others(described)
    described.routers = routers_of(model, described.sections)
    flat = _FLATTENED.get(model.config.model_type)
    described.unpackable = proof.unpackable
    limits = limits_of(model)
    described.reads = HfBatches(
        model=type(model).__name__,
        takes=frozenset(inspect.signature(type(model).forward).parameters),
        shifts=proof.shifts is not False,
        layers=frozenset(FOR_LAYERS) - proof.lacks.keys(),
        lacks=proof.lacks,
        counts_from_zero=proof.counts_from_zero,
        absolute=proof.absolute,
        tokens_known=limits.tokens,
        targets_known=limits.targets,
        longest=limits.positions,
    )
    if adapters is None:
        described.pretrained = HfExporter.of(model, sections, described.ties)
    else:
        described.leaves_out_frozen = True
        described.pretrained = PeftPretrained.of(model, adapters, sections, described.ties)
    own_loss = proof.shifts is not None and not has_own_loss_function(model)
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


def _named(sections: Sections) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a model by full name."""
    return [
        (f"{section}.{name}", parameter)
        for section, module in sections
        for name, parameter in module.named_parameters(remove_duplicate=False)
    ]


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
    """The name that a parameter of `from_hf`'s model has in the model itself.

    Raises:
        KeyError: no section has it.
    """
    module, rest = (model, name) if model.graph is None else model.graph.named(name)
    return name_in_model(module.sections.items(), rest)
