"""Splits a vision-language model of transformers in two modules, with what `elasticd.Module` takes of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from elasticd.models.huggingface.adapters import adapters_of, base_model
from elasticd.models.huggingface.anatomy import REMEDY
from elasticd.models.huggingface.fused_experts import CutIn
from elasticd.models.huggingface.init_weights import on_meta, own_init, with_buffers
from elasticd.models.huggingface.sections import name_in_model, refuse_outer, refuse_two_names
from elasticd.models.huggingface.tp_plans import cuts_of_language, cuts_of_vision
from elasticd.models.huggingface.unsupported import refuse_at_sight
from elasticd.models.huggingface.vision_language import (
    LANGUAGE,
    VISION,
    HfModule,
    freeze,
    language_anatomy,
    modules_of,
    parameters_of,
)
from elasticd.models.huggingface.vision_language_proof import VisionLanguageProof, prove_modules
from elasticd.runtime.model.model import Init
from elasticd.runtime.model.validation import ModelError


@dataclass(frozen=True, kw_only=True)
class VisionLanguage:
    """A vision-language model as two modules."""

    name: str
    modules: Mapping[str, HfModule]  #: "vision", which runs on images; "language", which takes what it gives
    frozen: tuple[str, ...]  #: full names of the parameters that are not trained
    proved: str  #: how the modules were compared with the model, for `elasticd check` to print
    apart: float  #: the furthest logit or gradient of the small copies, in units of the largest
    #: First values of a model that was made on the meta device, by the full name without its module; else None.
    init: Mapping[str, Init | None]
    proof: VisionLanguageProof

    def their_name(self, name: str) -> str:
        """The name in the model of a parameter, "vision.blocks.0.visual.merger.mlp.0.weight" say.

        Raises:
            KeyError: no section has it.
        """
        module, _, rest = name.partition(".")
        return name_in_model(list(self.modules[module]), rest)


def split_model(model: Any, *, frozen: Iterable[str] = (), experts: CutIn = "columns") -> VisionLanguage:
    """Splits a vision-language model in two: each section runs the model's own code, which is proved on small
    copies.

    The modules share the model's. Parameters of the encoder that no image reaches are frozen, as `frozen` says
    of others: they need no gradients any more in the model itself.

    Args:
        model: a `...ForConditionalGeneration` of transformers that takes `mm_encoder_outputs`, with or without
            LoRA adapters, with values or on the meta device.
        frozen: parameters that are not trained, by their full names or patterns of these: "vision.*".
        experts: what a TP group cuts the experts of a mixture in: "columns" of each, or "experts".

    Raises:
        ModelError: its modules are not the model, or it has other encoders than one for images.
    """
    model = base_model(model)
    refuse_at_sight(model, images=True)
    adapters = adapters_of(model)
    kind = type(model).__name__
    proof = prove_modules(model, adapters)
    blank = on_meta(model)
    filled = with_buffers(model) if blank else model
    modules, whole = _with_rules(filled, modules_of(filled, proof.anatomy, proof.seam), proof, experts)
    refuse_outer(filled, proof.anatomy)
    if (encoder := proof.seam.encoder) is not None:
        refuse_outer(filled.get_submodule(proof.seam.base), encoder, f"{proof.seam.base}.")
    for module in modules.values():
        refuse_two_names(kind, list(module))
    _refuse_lost(filled, modules)
    _refuse_shared(modules, kind)
    named = [name for name, _ in parameters_of(modules)]
    described = VisionLanguage(
        name=f"{model.config.model_type}-{len(modules['language'].blocks)}x{modules['language'].width}",
        modules=modules,
        frozen=(),
        proved=str(proof) + "".join(f"; whole in a TP group: {name} ({why})" for name, why in whole.items()),
        apart=proof.apart,
        init={name: own_init(filled, _their(module)) if blank else None for name, module in modules.items()},
        proof=proof,
    )
    unused = [name for name in named if described.their_name(name) in proof.unused]
    patterns = (frozen,) if isinstance(frozen, str) else tuple(frozen)
    freeze(list(parameters_of(modules)), [*unused, *patterns])
    left = tuple(name for name, parameter in parameters_of(modules) if not parameter.requires_grad)
    if len(left) == len(named):
        raise ModelError(f"all parameters of {kind} are frozen: frozen = {list(patterns)} leaves none to train")
    return replace(described, frozen=left)


def _with_rules(
    model: Any, modules: Mapping[str, HfModule], proof: VisionLanguageProof, experts: CutIn
) -> tuple[dict[str, HfModule], dict[str, str]]:
    """The modules with tensor-parallel rules, and why groups of layers' modules are whole."""
    language = model.get_submodule(proof.seam.language)
    cuts = {
        VISION: cuts_of_vision(model.config.vision_config, modules[VISION].blocks),
        LANGUAGE: cuts_of_language(
            model, language, dict(modules[LANGUAGE]), language_anatomy(proof.anatomy, proof.seam), experts
        ),
    }
    with_rules = {
        name: replace(module, rules=cuts[name].rules, units=cuts[name].units)
        for name, module in modules.items()
    }
    return with_rules, {
        f"{name}'s {group}": why for name, cut in cuts.items() for group, why in cut.whole.items()
    }


def _their(module: HfModule) -> Any:
    return lambda name: name_in_model(list(module), name)


def _refuse_lost(model: Any, modules: Mapping[str, HfModule]) -> None:
    """Raises ModelError for a parameter that neither module has."""
    held = {id(parameter) for _, parameter in parameters_of(modules)}
    for name, parameter in model.named_parameters():
        if id(parameter) not in held:
            raise ModelError(f"{name} of {type(model).__name__} is in neither of its modules: {REMEDY}")


def _refuse_shared(modules: Mapping[str, HfModule], kind: str) -> None:
    """Raises ModelError for a parameter that both modules have, because each has a layout of its own."""
    owners: dict[int, str] = {}
    for name, parameter in parameters_of(modules):
        other = owners.setdefault(id(parameter), name)
        if other.partition(".")[0] != name.partition(".")[0]:
            raise ModelError(f"{other} and {name} of {kind} are one parameter of two modules: {REMEDY}")
