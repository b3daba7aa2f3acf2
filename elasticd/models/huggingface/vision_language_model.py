"""A vision-language model of transformers as an `elasticd.Model` of two modules, for `from_hf`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from elasticd.models.huggingface.adapters import adapters_of
from elasticd.models.huggingface.batches import FOR_LAYERS
from elasticd.models.huggingface.export import HfExporter
from elasticd.models.huggingface.folder import FolderWeights
from elasticd.models.huggingface.fused_experts import CutIn, routers_of
from elasticd.models.huggingface.image_batches import HfImageBatches
from elasticd.models.huggingface.loss import causal_lm_loss
from elasticd.models.huggingface.model_limits import ModelLimits
from elasticd.models.huggingface.peft_export import PeftPretrained
from elasticd.models.huggingface.split import VisionLanguage, split_model
from elasticd.models.huggingface.unsupported import has_own_loss_function
from elasticd.models.huggingface.vision_language import (
    LANGUAGE,
    RopePositions,
    beside_tokens,
    image_token,
    other_marks,
)
from elasticd.runtime.model.model import Init, Model, Module

#: Makes the reader of a folder's values, of a function that gives the name in the model of a parameter.
Weights = Callable[[Callable[[str], str]], FolderWeights]

_PADDED = "samples with images are padded at their end"
_LACKS = {
    "attention_mask": f"{_PADDED}: their tokens are counted from the first",
    "position_ids": f"{_PADDED}: the model counts the positions of tokens and images itself",
}


def vision_language_model(
    model: Any,
    *,
    frozen: Iterable[str],
    experts: CutIn,
    init: Init | Mapping[str, Tensor] | None,
    weights: Weights | None,
    limits: ModelLimits,
) -> Model:
    """The model of two modules, "vision" and "language".

    Args:
        model: of transformers, with or without LoRA adapters, with values or on the meta device.
        frozen: parameters that are not trained, by full names or patterns of these.
        experts: what a TP group cuts the language model's experts in.
        init: first values by full name; None: the model's own.
        weights: reads first values of a folder; None: there is none.
        limits: of its samples.

    Raises:
        ModelError: its modules are not the model, or the folder does not have its weights.
    """
    split = split_model(model, frozen=frozen, experts=experts)
    adapters = adapters_of(model)
    modules = {name: _module(split, name, _first(split, name, init, weights)) for name in split.modules}
    sections = [
        (f"{name}.{section}", part) for name, module in split.modules.items() for section, part in module
    ]
    ties = {
        f"{name}.{tied}": f"{name}.{of}" for name, module in modules.items() for tied, of in module.ties.items()
    }
    language = modules[LANGUAGE]  # what is said of the model as a whole is said of the one with the loss
    language.proved = split.proved
    language.reads = _reads(model, split, limits)
    language.routers = routers_of(model, language.sections)
    language.mixing = ("embed", "passes positions and masks beside the activation")
    own_loss = split.proof.shifts is not None and not has_own_loss_function(model)
    language.loss = causal_lm_loss if own_loss else None
    if adapters is None:
        language.pretrained = HfExporter.of(model, sections, ties)
    else:
        language.pretrained = PeftPretrained.of(model, adapters, sections, ties)
        for module in modules.values():
            module.leaves_out_frozen = True
    return Model(modules=modules, name=split.name)


def _module(split: VisionLanguage, name: str, first: Any) -> Module:
    part = split.modules[name]
    module = Module(
        name=name,
        embed=part.embed,
        blocks=part.blocks,
        head=part.head,
        width=part.width,
        rules=part.rules,
        units=part.units,
        items=part.items,
        takes=part.takes,
        init=first,
    )
    if isinstance(first, FolderWeights):
        first.refuse_others(module)
    module.unpackable = "" if part.items else split.proof.unpackable
    return module


def _first(
    split: VisionLanguage, name: str, init: Init | Mapping[str, Tensor] | None, weights: Weights | None
) -> Any:
    """The first values of a module, by its own names."""
    start = f"{name}."
    if weights is not None:
        return weights(lambda own: split.their_name(f"{start}{own}"))
    if isinstance(init, Mapping):
        return {full.removeprefix(start): value for full, value in init.items() if full.startswith(start)}
    if init is not None:
        return lambda own, shape, generator: init(f"{start}{own}", shape, generator)
    return split.init[name]


def _reads(model: Any, split: VisionLanguage, limits: ModelLimits) -> HfImageBatches:
    token_types, of_images = beside_tokens(model, split.proof.seam)
    vision = model.config.vision_config
    return HfImageBatches(
        model=type(model).__name__,
        takes=frozenset(inspect.signature(type(model).forward).parameters),
        shifts=split.proof.shifts is not False,
        layers=frozenset(),
        lacks=dict.fromkeys(FOR_LAYERS, _PADDED) | _LACKS,
        beside=frozenset((*token_types, *of_images)),
        of_images=of_images,
        image_token=image_token(model.config),
        other_marks=other_marks(model.config),
        counts_from_zero=split.proof.counts_from_zero,
        merge=getattr(vision, "spatial_merge_size", 0),
        rope_positions=RopePositions.of(model, split.proof.seam),
        tokens_known=limits.tokens,
        targets_known=limits.targets,
        longest=limits.positions,
    )
