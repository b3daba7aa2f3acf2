"""PEFT's LoRA adapters in a model of transformers: found, refused, cut, and put into a small copy.

An adapted module `q_proj` is a layer of PEFT's with the frozen module as `q_proj.base_layer` and the adapter as
`q_proj.lora_A.NAME` and `q_proj.lora_B.NAME`; a module of `modules_to_save` is a wrapper of the frozen original
and the trained copy. Here a module is called by its name without adapters, "self_attn.q_proj".

How an adapter is cut follows from its base: over a `Column` base A is whole and B cut as the base is, so that
each member adds to its own outputs; over a `Row` base A is cut and B whole, so that A's terms, of the adapter's
rank, are summed. Where the base's outputs are gathered or its inputs are whole, both are whole.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elasticd.runtime.model.tp_rules import Column, Row, Rule, Sharded
from elasticd.runtime.model.validation import ModelError

#: Fields of a LoraConfig that make it another method than LoRA, and what is said of them.
_OTHER_METHODS = {
    "target_parameters": "adapts parameters that are not those of a linear layer",
    "trainable_token_indices": "trains single rows of the embedding",
    "layer_replication": "has layers that share their weights",
    "alora_invocation_tokens": "adapts the tokens after an invocation alone",
    "arrow_config": "routes tokens to adapters",
    "use_bdlora": "has block-diagonal adapters",
    "velora_config": "compresses activations",
    "monteclora_config": "draws random numbers",
    "kasa_config": "is a method of its own",
    "use_qalora": "is a method of its own",
    "megatron_config": "is for Megatron's layers",
}
#: First values of adapters that are no function of the base's weights.
_PLAIN_INITS = (True, False, "gaussian")
#: Classes of PEFT, by module and name.
_LORA_LAYER, _SAVED = "peft.tuners.lora.layer.LoraLayer", "peft.utils.other.ModulesToSaveWrapper"
_LINEAR, _EMBEDDING = "peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.Embedding"
_DORA = "use_dora"
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The LoRA adapter of a model: its name, its LoraConfig, and the modules that it adapts or saves."""

    name: str
    config: Any
    adapted: frozenset[str]  # names of modules, layers' indices as "*": "model.layers.*.self_attn.q_proj"
    saves_embeddings: bool  # the adapter's file has the embedding and the head, because they are not the base's

    def put_into(self, model: nn.Module) -> Any:
        """Gives a small copy of the base model adapters where the model has them, of rank 2 and without
        dropout."""
        import peft

        targets = [path for path, _ in model.named_modules() if _starred(path) in self.adapted]
        own = self.config
        config = peft.LoraConfig(
            r=2,
            lora_alpha=3,
            target_modules=targets,
            modules_to_save=own.modules_to_save,
            bias=own.bias,
            lora_bias=own.lora_bias,
            use_rslora=own.use_rslora,
            use_dora=own.use_dora,
            fan_in_fan_out=own.fan_in_fan_out,
        )
        return peft.inject_adapter_in_model(config, model, adapter_name=self.name)


def base_model(model: Any) -> Any:
    """The model of transformers, with its adapters in it, of a PeftModel; any other model itself.

    Raises:
        ModelError: it is adapted by another method than LoRA.
    """
    if not _is(model, "peft.peft_model.PeftModel"):
        return model
    base = model.get_base_model()
    for config in model.peft_config.values():
        _refuse_method(type(base).__name__, config)
    return base


def adapters_of(model: Any) -> Adapters | None:
    """The adapter of a model of transformers; None: it has none.

    Raises:
        ModelError: it has adapters that elasticd does not train exactly; each by name, with the remedy.
    """
    layers = [(path, module) for path, module in model.named_modules() if _is(module, _TUNER)]
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    if not layers and not configs:
        return None
    kind = type(model).__name__
    if len(configs) != 1:
        names = ", ".join(configs)
        raise ModelError(f"{kind} has the adapters {names}: leave one of them (delete_adapter)")
    ((name, config),) = configs.items()
    _refuse_method(kind, config)
    for path, layer in layers:
        _refuse_layer(f"{path} of {kind}", name, layer)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"the adapter of {kind} is frozen: load it with PeftModel.from_pretrained(..., is_trainable=True)"
        )
    return Adapters(
        name=name,
        config=config,
        adapted=frozenset(_starred(path) for path, layer in layers if is_lora(layer)),
        saves_embeddings=_saves_embeddings(model, config),
    )


def _saves_embeddings(model: Any, config: Any) -> bool:
    """As PEFT does it: where they are adapted, or the vocabulary is not that of the base's folder."""
    if any(map(is_lora, (model.get_input_embeddings(), model.get_output_embeddings()))):
        return True
    described = Path(config.base_model_name_or_path or "") / "config.json"
    if not described.is_file():
        return False
    size = json.loads(described.read_text()).get("vocab_size")
    return size is not None and size != getattr(model.config, "vocab_size", size)


_TUNER = "peft.tuners.tuners_utils.BaseTunerLayer"


def _refuse_method(kind: str, config: Any) -> None:
    method = str(getattr(config.peft_type, "value", config.peft_type))
    if method != "LORA":
        raise ModelError(
            f"{kind} is adapted by {method}: of PEFT's methods elasticd trains LoRA, with or without DoRA"
        )
    for name, why in _OTHER_METHODS.items():
        if getattr(config, name, None):
            remedy = "leave it out"
            if name == "target_parameters":  # PEFT sets them itself for "all-linear" of stacked experts
                remedy += ", and name linear layers, target_modules=['q_proj', 'v_proj'] say"
            raise ModelError(f"{name} of the LoraConfig of {kind} {why}: {remedy}")
    init = getattr(config, "init_lora_weights", True)
    if init == "mica":
        raise ModelError(f"init_lora_weights = 'mica' of {kind} is a method of its own: take another")


def _refuse_layer(path: str, name: str, layer: Any) -> None:
    if not _is(layer, _LORA_LAYER):
        raise ModelError(f"{path} is a {type(layer).__name__} of PEFT, which elasticd does not train")
    if type(layer) not in (_class(layer, _LINEAR), _class(layer, _EMBEDDING)):
        raise ModelError(
            f"{path} is a {type(layer).__module__}.{type(layer).__name__}: elasticd trains adapters of linear "
            "layers and embeddings in floating point. Load the base model without quantization"
        )
    if layer.merged:
        raise ModelError(f"the adapter of {path} is merged into its base: call unmerge_adapter() first")
    if layer.disable_adapters or layer.active_adapters != [name]:
        raise ModelError(f"the adapter {name!r} of {path} is not active: call set_adapter({name!r}) first")


# -- names without adapters ----------------------------------------------------------------------------------


def stand_in(module: Any) -> tuple[nn.Module, str]:
    """The module that holds the weight in force of an adapted module, and its path in it: the base layer, or
    the trained copy of a module of `modules_to_save`. Any other module is its own, with the path ""."""
    if _is(module, _LORA_LAYER):
        return module.base_layer, "base_layer"
    if _is(module, _SAVED):
        (name,) = module.active_adapters
        return module.modules_to_save[name], f"modules_to_save.{name}"
    return module, ""


def plain_modules(
    module: nn.Module, path: str = "", *, adapted: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a module, by their names without adapters; those of the adapters are left out.

    Args:
        module: the module.
        path: its name.
        adapted: give what adapts a module in the place of the module.
    """
    within, _ = stand_in(module)
    yield path, module if adapted else within
    for name, child in within.named_children():
        yield from plain_modules(child, f"{path}.{name}" if path else name, adapted=adapted)


def plain_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters in force of a module's own modules, by their names without adapters."""
    for path, submodule in plain_modules(module):
        for leaf, parameter in submodule.named_parameters(recurse=False):
            yield f"{path}.{leaf}" if path else leaf, parameter


def named_forms(module: nn.Module, path: str = "", actual: str = "") -> Iterator[tuple[str, str, nn.Module]]:
    """The modules in a module by their names without adapters and with them, "q_proj" and "q_proj.base_layer":
    of an adapted module what adapts it is given."""
    within, form = stand_in(module)
    actual = ".".join(filter(None, (actual, form)))
    yield path, actual, module
    for name, child in within.named_children():
        yield from named_forms(child, *(f"{at}.{name}" if at else name for at in (path, actual)))


def is_lora(module: object) -> bool:
    """Returns True if a module is a base with its adapter."""
    return _is(module, _LORA_LAYER)


def is_dora(module: Any) -> bool:
    """Returns True if a module's adapter also trains the length of each output's weights (DoRA)."""
    return is_lora(module) and any(module.use_dora.values())


# -- rules -----------------------------------------------------------------------------------------------------


class Forms:
    """The names with adapters of a model's modules: a module may be plain in one layer and adapted in another.

    Layers' modules are named alike, "blocks.*.layer.self_attn.q_proj".
    """

    def __init__(self, sections: Mapping[str, nn.Module]) -> None:
        """Args:
        sections: of the model, by name.
        """
        #: By a module's name without adapters: by its name with them, the module or what adapts it.
        self._forms: dict[str, dict[str, nn.Module]] = {}
        for section, module in sections.items():
            start = re.sub(r"^blocks\.\d+", "blocks.*", section)
            for path, actual, layer in named_forms(module, start, start):
                self._forms.setdefault(path, {}).setdefault(actual, layer)

    def rules(self, rules: Mapping[str, Rule]) -> dict[str, Rule]:
        """Rules by names without adapters as rules by names with them, and those of the adapters."""
        by_path: dict[str, Rule] = {}
        for pattern, rule in rules.items():
            path, _, leaf = pattern.rpartition(".")
            forms = self._forms.get(path, {path: nn.Identity()})
            for actual, layer in forms.items():
                names = [leaf]
                if leaf == "*" and actual == path and len(forms) > 1:  # "*" would match the other forms' names
                    names = [name for name, _ in layer.named_parameters(recurse=False)]
                by_path |= {f"{actual}.{name}": rule for name in names}
                if _is(layer, _LINEAR):
                    by_path |= _of_adapter(actual.removesuffix(".base_layer"), rule, layer)
        return by_path

    def attributes(self, patterns: tuple[str, ...]) -> tuple[str, ...]:
        """Patterns of modules' attributes, likewise."""
        split = [pattern.rpartition(".") for pattern in patterns]
        return tuple(f"{actual}.{name}" for path, _, name in split for actual in self._forms.get(path, (path,)))


def _of_adapter(path: str, rule: Rule, layer: Any) -> dict[str, Rule]:
    """The rules of an adapter whose base has a rule."""
    if isinstance(rule, Column) and not rule.gather:
        return {f"{path}.lora_B.*": replace(rule, dim=None)}
    if isinstance(rule, Row) and not rule.split:
        rules: dict[str, Rule] = {f"{path}.lora_A.*": Row(rule.units)}
        if any(getattr(dropout, "p", 0) for dropout in layer.lora_dropout.values()):
            rules[f"{path}.lora_dropout.*"] = Sharded(rule.units, dim=-1)
        return rules
    return {}


def plain_name(model: Any, name: str) -> str | None:
    """The name without adapters of a parameter of a model with them; None: it is an adapter's own."""
    path, _, leaf = name.rpartition(".")
    for outer in _outer(path):
        layer: Any = model.get_submodule(outer)
        inside = path.removeprefix(outer)
        if is_lora(layer) and not f"{inside}.".startswith(".base_layer."):
            return None
        if is_lora(layer) or _is(layer, _SAVED):
            inside = re.sub(r"^\.(base_layer|original_module|modules_to_save\.[^.]+)", "", inside)
            path = f"{outer}{inside}"
    return f"{path}.{leaf}"


# -- first values ----------------------------------------------------------------------------------------------


def first_value(model: Any, path: str, leaf: str) -> Tensor | None:
    """The first value of an adapter's parameter of a model on the meta device, as PEFT makes it, by the default
    generator; None: the parameter is no adapter's.

    Raises:
        ModelError: PEFT computes it of the base's weights.
    """
    for outer in _outer(path):
        layer: Any = model.get_submodule(outer)
        if _is(layer, _SAVED):
            raise ModelError(f"{path}.{leaf} begins as a copy of the base's: {_STORAGE}")
        if not _is(layer, _LORA_LAYER) or f"{path}.".startswith(f"{outer}.base_layer."):
            continue
        inside = path.removeprefix(f"{outer}.") if path != outer else ""
        return _fresh(layer, model.peft_config, inside, leaf)
    return None


_STORAGE = "make the model with storage, by from_pretrained say"


def keyed_value(model: Any, name: str) -> Tensor | None:
    """The same by a generator that is keyed by the name; None: the parameter is no adapter's."""
    if plain_name(model, name) is not None:
        return None
    path, _, leaf = name.rpartition(".")
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        key = hashlib.sha256(name.encode()).digest()
        torch.default_generator.manual_seed(int.from_bytes(key[:7], "big"))
        return first_value(model, path, leaf)


def _fresh(layer: Any, configs: Mapping[str, Any], inside: str, leaf: str) -> Tensor:
    ((name, config),) = configs.items()
    if is_dora(layer) or config.init_lora_weights not in _PLAIN_INITS:
        raise ModelError(f"{inside}.{leaf} of an adapter begins by the weights of its base: {_STORAGE}")
    copied = copy.copy(layer)
    copied._modules = {key: module for key, module in layer._modules.items() if key != "base_layer"}
    copied = copy.deepcopy(copied).to_empty(device="cpu")
    for part in (copied.lora_A, copied.lora_B):
        for module in part.values():
            module.reset_parameters()
    for values in (copied.lora_embedding_A, copied.lora_embedding_B):
        for value in values.values():
            nn.init.normal_(value)
    copied._modules["base_layer"] = torch.nn.Identity()
    copied.reset_lora_parameters(name, config.init_lora_weights)
    owner = copied.get_submodule(inside) if inside else copied
    return getattr(owner, leaf).detach()


# -- PEFT's classes, without importing it ----------------------------------------------------------------------


def _class(thing: object, name: str) -> type | None:
    """The class of that full name among those of an object and their bases."""
    kinds = type(thing).__mro__
    return next((kind for kind in kinds if f"{kind.__module__}.{kind.__qualname__}" == name), None)


def _is(thing: object, name: str) -> bool:
    return _class(thing, name) is not None


def _starred(path: str) -> str:
    return _DIGITS.sub("*", path)


def _outer(path: str) -> Iterator[str]:
    """The paths of the modules that a module is in, itself included, from the inside out."""
    while path:
        yield path
        path = path.rpartition(".")[0]
