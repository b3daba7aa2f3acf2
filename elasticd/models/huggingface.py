"""Causal language models of Hugging Face's transformers, as they are: cut by the plans that they carry.

The blocks are the decoder layers. Each runs inside a shell of the model's own base class that has this one
layer and no final norm, so that positions, rotary tables and causal masks are made by the model's own forward
from the one activation tensor. Padding belongs at the end of a sample: causal attention then never sees it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from elasticd.runtime.accepted import ModelError
from elasticd.runtime.model import Init, Model
from elasticd.runtime.rules import Add, Column, Row, Rule, UnitsOf

#: What a plan of transformers may say of a module, and the rule that it is.
_SAID: dict[str, Callable[[str], Rule]] = {
    "colwise": Column,
    "colwise_gather_output": lambda units: Column(units, gather=True),
    "colwise_rep": lambda units: Column(units, gather=True),  # as older versions call it
    "rowwise": Row,
    "embedding_rowwise": Row,
    "replicated_with_grad_allreduce": lambda units: Add(),
}


class Embed(nn.Module):
    """batch["inputs"] [samples, tokens] to [samples, tokens, width]."""

    def __init__(self, tokens: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = tokens

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = self.embed_tokens(batch["inputs"])
        return out


class Block(nn.Module):
    """One decoder layer, in a shell of its model."""

    def __init__(self, base: Any, names: tuple[str, str, str], index: int) -> None:
        super().__init__()
        tokens, layers, norm = names
        self.layer = getattr(base, layers)[index]
        shell = _shallow(base)
        shell.config = copy.copy(base.config)
        shell.config.num_hidden_layers = 1
        if getattr(base.config, "layer_types", None):
            shell.config.layer_types = [base.config.layer_types[index]]
        shell._modules[layers] = nn.ModuleList([self.layer])
        shell._modules[norm] = nn.Identity()
        shell._modules[tokens] = None
        self._shell = (shell,)  # not a submodule: the layer's parameters are named once
        for name, child in base.named_children():
            if name not in names:
                self.add_module(name, _with_values(child, base.config))
                shell._modules[name] = getattr(self, name)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._shell[0](inputs_embeds=x, use_cache=False).last_hidden_state
        return out


class Head(nn.Module):
    """The final norm and the logits: [samples, tokens, vocabulary]."""

    def __init__(self, norm: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.norm, self.lm_head = norm, output

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.norm(x))
        return out


def from_hf(model: Any, *, init: Init | Mapping[str, Tensor] | None = None) -> Model:
    """A `...ForCausalLM` as elasticd trains it, by `base_model_pp_plan` and `base_model_tp_plan` of its
    configuration and the class's own `_tp_plan`. It is not changed.

    A model with values, from_pretrained's say, starts from them (every rank must load the same); one that was
    made on the meta device from its own `_init_weights`, keyed by (seed, module). Raises ModelError for a
    model without plans, or with more than one activation tensor between its layers.
    """
    base, config = model.base_model, model.config
    names = _names(model, base, config)
    tokens, layers, norm = names
    if getattr(config, "attention_dropout", 0.0):
        raise ModelError(
            f"attention_dropout = {config.attention_dropout} of {type(model).__name__} is drawn inside its "
            "attention function, where a layout changes what is dropped: set it to 0"
        )
    output = model.get_output_embeddings()
    rules, units = _rules(model, base, names)
    return Model(
        name=f"{config.model_type}-{config.num_hidden_layers}x{config.hidden_size}",
        embed=Embed(getattr(base, tokens)),
        blocks=[Block(base, names, index) for index in range(len(getattr(base, layers)))],
        head=Head(getattr(base, norm), output),
        width=config.hidden_size,
        rules=rules,
        units=units,
        init=init if init is not None or not _on_meta(model) else _own_init(model),
    )


def _names(model: Any, base: Any, config: Any) -> tuple[str, str, str]:
    """The names of the embedding, the layers and the final norm, in the order of the pipeline's plan."""
    plan = getattr(config, "base_model_pp_plan", None)
    if not plan or len(plan) != 3 or model.get_output_embeddings() is None:
        raise ModelError(
            f"{type(model).__name__} has no base_model_pp_plan of an embedding, layers and a norm, or no "
            "output embedding: describe it with elasticd.Model(embed=..., blocks=..., head=...)"
        )
    tokens, layers, norm = plan
    if plan[layers][1] != ["hidden_states"]:
        raise ModelError(f"the layers of {type(model).__name__} pass {plan[layers][1]} on, not one tensor")
    return tokens, layers, norm


def _rules(model: Any, base: Any, names: tuple[str, str, str]) -> tuple[dict[str, Rule], dict[str, UnitsOf]]:
    """The tensor-parallel plan as rules. Heads are cut as units, any other dimension column by column."""
    tokens, layers, _ = names
    config = model.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    units = {"heads": UnitsOf(heads)}
    if kv_heads != heads:
        ratio = tuple(
            f"blocks.*.layer.{path}.num_key_value_groups"
            for path, module in getattr(base, layers)[0].named_modules()
            if hasattr(module, "num_key_value_groups")
        )
        units["kv_heads"] = UnitsOf(kv_heads, follows="heads", ratio=ratio)
    rules: dict[str, Rule] = {}
    for pattern, said in (config.base_model_tp_plan or {}).items():
        where, _, path = pattern.partition(".*.")
        if where != layers or not path:
            continue
        if said not in _SAID:
            raise ModelError(f"{type(model).__name__}: the plan's {said!r} for {pattern} has no rule here")
        module = getattr(base, layers)[0].get_submodule(path)
        rules[f"blocks.*.layer.{path}.*"] = _SAID[said](_units(path, module, said, heads, kv_heads, config))
    if not rules:
        return {}, {}
    output = model.get_output_embeddings()
    said = next((s for name, s in (model._tp_plan or {}).items() if name.endswith("lm_head")), None)
    if said in ("colwise_gather_output", "colwise_rep"):
        rules["head.lm_head.*"] = Column("vocabulary", gather=True)
        if output.weight is getattr(base, tokens).weight:  # tied: cut alike
            rules["embed.embed_tokens.weight"] = Row("vocabulary")
    return rules, units


def _units(path: str, module: nn.Module, said: str, heads: int, kv_heads: int, config: Any) -> str:
    """What a cut projection is cut in: heads where it is of an attention, by how many of them it has."""
    if not isinstance(module, nn.Linear):
        return "heads"  # a norm of each head: whole
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    side = module.in_features if said == "rowwise" else module.out_features
    if "attn" in path or "attention" in path:
        if side == heads * size and not path.endswith(("k_proj", "v_proj")):
            return "heads"
        if side == kv_heads * size:
            return "kv_heads" if kv_heads != heads else "heads"
        raise ModelError(f"{path}: {side} features are neither {heads} nor {kv_heads} heads of {size}")
    return f"columns_{side}"


def _on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _own_init(model: Any) -> Init:
    """The model's own `_init_weights`, module by module, with the generator of each."""

    def init(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        path, _, leaf = _theirs(model, name).rpartition(".")
        owner = copy.deepcopy(model.get_submodule(path)).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(generator.initial_seed())
            model._init_weights(owner)
        value: Tensor = getattr(owner, leaf).detach()
        return value

    return init


def _theirs(model: Any, name: str) -> str:
    """The name that a parameter has in the model itself."""
    base = model.base_model_prefix
    section, _, rest = name.partition(".")
    if section == "embed" or rest.startswith("norm."):
        return f"{base}.{rest}"
    if section == "blocks":
        index, _, inner = rest.partition(".")
        layers = list(model.config.base_model_pp_plan)[1]
        return f"{base}.{layers}.{index}.{inner.removeprefix('layer.')}"
    return rest


def _with_values(module: nn.Module, config: Any) -> nn.Module:
    """A copy of what the layers share, rotary tables say; made anew where it has no values."""
    if any(buffer.is_meta for buffer in module.buffers()):
        with torch.device("cpu"):
            return type(module)(config)
    return copy.deepcopy(module)


def _shallow(module: Any) -> Any:
    """A copy of a module that shares its children, whose set of them is its own."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made
