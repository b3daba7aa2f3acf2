"""The cuts of layers of transformers in a TP group: their tensor-parallel plans as rules.

A plan says a word of each module. The modules of a layer form groups, its attention, its feed-forward, its
experts and those that all tokens share: what is cut in a group goes in whole and comes out whole. A group that
cannot be cut is whole on every member, which is the same function. Layers of one model may have other groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from elasticd.models.huggingface import fused_experts
from elasticd.models.huggingface.adapters import (
    Forms,
    is_dora,
    is_lora,
    plain_modules,
    plain_parameters,
    stand_in,
)
from elasticd.models.huggingface.anatomy import Anatomy, text_of
from elasticd.models.huggingface.cuts import Cuts, WholeGroup
from elasticd.models.huggingface.fused_experts import CutIn
from elasticd.models.huggingface.sections import Sections, name_in_sections
from elasticd.runtime.model.tp_rules import Column, PartialGrad, Row, Rule, Sharded, UnitsOf, listed, sides_of

_CUTS = ("colwise", "rowwise")
_LIKE_QWEN = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    ("self_attn.o_proj", "mlp.down_proj"),
)
#: Plans of models that carry none, by path in the layer: what is cut by columns, and what by rows.
_OWN: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gpt2": (("attn.c_attn", "mlp.c_fc"), ("attn.c_proj", "mlp.c_proj")),
    "opt": (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "fc1"),
        ("self_attn.out_proj", "fc2"),
    ),
    "stablelm": (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        ("self_attn.o_proj", "mlp.down_proj"),
    ),
    "bloom": (("mlp.dense_h_to_4h",), ("mlp.dense_4h_to_h",)),
    "falcon": (("mlp.dense_h_to_4h",), ("mlp.dense_4h_to_h",)),
    "gptj": (("mlp.fc_in",), ("mlp.fc_out",)),
    "codegen": (("mlp.fc_in",), ("mlp.fc_out",)),
    "gpt_neo": (("mlp.c_fc",), ("mlp.c_proj",)),
    "gpt_bigcode": (("mlp.c_fc",), ("mlp.c_proj",)),
    "qwen3_vl_text": _LIKE_QWEN,
    "qwen3_vl_moe_text": (_LIKE_QWEN[0][:3], _LIKE_QWEN[1][:1]),
    "gpt_oss": (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.sinks"),
        ("self_attn.o_proj",),
    ),
}
_CLIP = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1"),
    ("self_attn.out_proj", "mlp.fc2"),
)
_QWEN_VIT = (("attn.qkv", "mlp.linear_fc1"), ("attn.proj", "mlp.linear_fc2"))
#: The same of encoders of images, whose configurations have no plan, by their types.
_VISION: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "clip_vision_model": _CLIP,
    "siglip_vision_model": _CLIP,
    "internvl": (
        ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1"),
        ("attention.projection_layer", "mlp.fc2"),
    ),
    "pixtral": (
        (
            *("attention.q_proj", "attention.k_proj", "attention.v_proj"),
            *("feed_forward.gate_proj", "feed_forward.up_proj"),
        ),
        ("attention.o_proj", "feed_forward.down_proj"),
    ),
    "qwen2_vl": (("attn.qkv", "mlp.fc1"), ("attn.proj", "mlp.fc2")),
    **dict.fromkeys(
        ("qwen2_5_vl", "glm4v", "glm4v_moe", "glm_ocr", "exaone4_5"),
        (("attn.qkv", "mlp.gate_proj", "mlp.up_proj"), ("attn.proj", "mlp.down_proj")),
    ),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN_VIT),
}
#: Projections of queries, keys and values in one: three parts, or q, k and v of each head in turn.
_FUSED_PARTS = {("gpt2", "attn.c_attn")} | {(kind, "attn.qkv") for kind in _VISION}
_FUSED_HEADS = {("gpt_neox", "attention.query_key_value")}

_GATHERS = ("colwise_gather_output", "colwise_rep")
_SPLITS = ("rowwise_split_input", "rowwise_rep")
_NUMBERS_OF_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_NUMBERS_OF_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def cuts_of(model: Any, sections: Sections, anatomy: Anatomy, experts: CutIn = "columns") -> Cuts:
    """The rules of a model's layers, and of its vocabulary where layers are cut.

    Args:
        model: the whole model.
        sections: of it.
        anatomy: of it.
        experts: what its experts are cut in.
    """
    layers = [block.layer for block in sections.blocks]
    cuts = _cut(text_of(model.config), layers, _plan(model, anatomy), "blocks.*.layer.", experts)
    if cuts.rules:
        _vocabulary(model, list(sections), cuts)
    return _with_adapters(cuts, dict(sections))


def cuts_of_language(
    model: Any,
    language: Any,
    sections: Mapping[str, nn.Module],
    anatomy: Anatomy,
    experts: CutIn = "columns",
) -> Cuts:
    """The rules of the language model of a vision-language model.

    Args:
        model: the whole model.
        language: its language model.
        sections: of the module.
        anatomy: of the language model.
        experts: what a TP group cuts experts in.
    """
    layers = [part.layer for name, part in sections.items() if name.startswith("blocks.")]
    cuts = _cut(text_of(language.config), layers, _plan(language, anatomy), "blocks.*.layer.", experts)
    if cuts.rules:
        _vocabulary(model, list(sections.items()), cuts)
    return _with_adapters(cuts, sections)


def cuts_of_vision(config: Any, blocks: Sequence[nn.Module]) -> Cuts:
    """The rules of an encoder of images.

    Args:
        config: of the encoder.
        blocks: each has a layer, or the only one has all layers in a list.
    """
    columns, rows = _VISION.get(config.model_type.removesuffix("_vision"), ((), ()))
    plan = dict.fromkeys(columns, _CUTS[0]) | dict.fromkeys(rows, _CUTS[1])
    if any(is_lora(module) for block in blocks for module in block.modules()):
        return Cuts(whole={"vision": "it has adapters"})
    each = [layer for block in blocks if isinstance(layer := getattr(block, "layer", None), nn.Module)]
    if plan and each and plan.keys() <= dict(each[0].named_modules()).keys():
        return _cut(config, each, plan, "blocks.*.layer.")
    for path, layers in blocks[0].named_modules():
        if isinstance(layers, nn.ModuleList) and any(
            plan.keys() <= dict(m.named_modules()).keys() for m in layers
        ):
            return _cut(config, list(layers), plan, f"blocks.*.{path}.*.") if plan else Cuts()
    return Cuts(whole={"vision": f"there are no rules for {config.model_type}"})


def _cut(
    config: Any, every: list[Any], plan: Mapping[str, str], start: str, experts: CutIn = "columns"
) -> Cuts:
    """The rules of layers.

    Args:
        config: of the model that has them.
        every: the layers.
        plan: its words by path in a layer.
        start: what patterns of a layer's modules begin with.
        experts: what their experts are cut in.
    """
    cuts = Cuts()
    for group, said in _groups(_with_experts(plan, every)).items():
        holding = [layer for layer in every if group in dict(plain_modules(layer))]
        try:
            found = _merged([_Group(config, layer, group, said, start, experts) for layer in holding])
        except WholeGroup as why:
            cuts.whole[group or "the layer"] = str(why)
            continue
        cuts.rules |= found.rules
        cuts.units |= found.units
    return cuts


def _with_experts(plan: Mapping[str, str], every: list[Any]) -> dict[str, str]:
    """A plan with a word for each module of experts by transformers' contract, also where it has none."""
    paths = [
        path
        for layer in every
        for path, module in plain_modules(layer)
        if fused_experts.is_contract(module) and fused_experts.is_fused(module)
    ]
    return dict.fromkeys(paths, fused_experts.WORD) | dict(plan)


def _merged(groups: list[_Group]) -> Cuts:
    """The cuts of a group in all layers that have it: dense layers have other modules than sparse ones.

    Raises:
        WholeGroup: a layer cannot be cut, or a module is cut in one layer otherwise than in another.
    """
    cuts, every = Cuts(), [group.cuts() for group in groups]
    for each in every:
        for known, own in ((cuts.rules, each.rules), (cuts.units, each.units)):
            if any(known.get(name, value) != value for name, value in own.items()):
                raise WholeGroup("its layers differ")
        cuts.rules |= each.rules
        cuts.units |= each.units
    for group, each in zip(groups, every, strict=True):
        if any(group.has(pattern) for pattern in cuts.rules.keys() - each.rules.keys()):
            raise WholeGroup("its layers differ")
    return cuts


def _with_adapters(cuts: Cuts, sections: Mapping[str, nn.Module]) -> Cuts:
    """The cuts of a model by its names without adapters, as those of the model."""
    forms = Forms(sections)
    units = {
        kind: replace(
            each,
            attribute=forms.attributes(listed(each.attribute)),
            ratio=forms.attributes(listed(each.ratio)),
        )
        for kind, each in cuts.units.items()
    }
    return Cuts(rules=forms.rules(cuts.rules), units=units, whole=cuts.whole)


def _plan(model: Any, anatomy: Anatomy) -> dict[str, str]:
    """Words by path in a layer."""
    base = model.base_model_prefix
    layers = anatomy.layers.removeprefix(f"{base}.") if model.base_model is not model else anatomy.layers
    found = {
        path: said
        for pattern, said in (getattr(text_of(model.config), "base_model_tp_plan", None) or {}).items()
        for where, dot, path in [pattern.partition(".*.")]
        if dot and f".{layers}".endswith(f".{where}") and said != "local_params"  # of DTensors: says no cut
    }
    own = _OWN.get(model.config.model_type, ((), ()))
    return found or {path: said for said, paths in zip(_CUTS, own, strict=True) for path in paths}


def _groups(plan: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The plan's words by the module of the layer whose group they are: an attention, and the nearest module of
    anything else, such as shared experts beside others. "" is the layer itself."""
    parents = {path.rpartition(".")[0] for path in plan}
    groups: dict[str, dict[str, str]] = {}
    for path, said in plan.items():
        nearest = path if path in parents or said == fused_experts.WORD else path.rpartition(".")[0]
        outer = path.partition(".")[0] if "." in path else ""
        groups.setdefault(outer if _is_attention(outer) else nearest, {})[path] = said
    return groups


def _is_attention(group: str) -> bool:
    return "attn" in group or "attention" in group


class _Group:
    """The modules of one group in one layer, and the plan's words for them."""

    def __init__(
        self, config: Any, layer: nn.Module, group: str, said: Mapping[str, str], start: str, experts: CutIn
    ) -> None:
        self._start = start
        self._modules = dict(plain_modules(layer))
        self._parameters = dict(plain_parameters(layer))
        self._dora = {path for path, module in plain_modules(layer, adapted=True) if is_dora(module)}
        self._experts, self._name, self._kind = experts, group, config.model_type.removesuffix("_vision")
        self._said = {p: word for p, word in said.items() if p in self._modules or p in self._parameters}
        self._attention = _is_attention(group)
        self._heads = _number(config, "num_attention_heads") or _number(config, "num_heads") or 1
        self._kv_heads = _number(config, "num_key_value_heads") or self._heads
        sizes = [getattr(self._modules[group], name, None) for name in ("head_dim", "head_size")]
        self._size = next((size for size in sizes if isinstance(size, int)), 0)
        self._size = self._size or _number(config, "head_dim") or config.hidden_size // self._heads
        self._cut = Cuts()

    def has(self, pattern: str) -> bool:
        """Returns True if the layer has what a pattern of a rule names."""
        path = pattern.removeprefix(self._start)
        return path in self._parameters or path.removesuffix(".*") in self._modules

    def cuts(self) -> Cuts:
        """Raises WholeGroup where not every parameter of the group has its rule."""
        module, pattern = self._modules[self._name], f"{self._start}{self._name}"
        if fused_experts.is_fused(module):
            words = {p.removeprefix(self._name).removeprefix("."): word for p, word in self._said.items()}
            return fused_experts.expert_cuts(module, words, pattern, self._experts)
        for path, said in self._said.items():
            self._one(path, said)
        self._others()
        columns = {r.units for r in self._cut.rules.values() if isinstance(r, Column) and not r.gather}
        rows = {r.units for r in self._cut.rules.values() if isinstance(r, Row) and not r.split}
        if not rows <= columns or (columns and not rows):
            raise WholeGroup(
                f"it is cut in {', '.join(sorted(columns))} and joined in {', '.join(sorted(rows))}"
            )
        if columns & {"heads", "kv_heads"}:
            self._numbers_of_heads()
        if not columns:  # what is between gathered outputs is the same on all members
            rules = self._cut.rules.items()
            self._cut.rules = {pattern: rule for pattern, rule in rules if not isinstance(rule, PartialGrad)}
        return self._cut

    def _one(self, path: str, said: str) -> None:
        if path in self._parameters:
            self._by_itself(path, said)
            return
        module: Any = self._modules[path]
        if not any(True for _ in module.parameters()):
            return
        if path in self._dora:
            raise WholeGroup(f"{path} has DoRA, which measures rows of the whole weight")
        pattern = f"{self._start}{path}.*"
        if said == "replicated_with_grad_allreduce":
            self._cut.rules[pattern] = PartialGrad()
            return
        if said not in (*_CUTS, *_GATHERS, *_SPLITS):
            raise WholeGroup(f"there is no rule for {said!r}")
        sides = sides_of(module)
        if sides is None:
            raise WholeGroup(f"{path} is a {type(module).__name__}")
        outputs, inputs = (int(module.weight.shape[dim]) for dim in sides)
        joined = self._joined(path, said, outputs)
        if joined:
            self._cut.rules[pattern] = Column(f"columns_{joined}", parts=2)
        elif said in _GATHERS:
            self._cut.rules[pattern] = Column(f"columns_{outputs}", gather=True)
        elif said in _SPLITS:
            fused = any(isinstance(r, Column) and r.parts == 2 for r in self._cut.rules.values())
            self._cut.rules[pattern] = Row(f"columns_{inputs}", split=not fused)
        elif not self._attention:
            side = outputs if said == "colwise" else inputs
            rule = Column if said == "colwise" else Row
            self._cut.rules[pattern] = rule(f"columns_{side}")
        else:
            self._cut.rules[pattern] = self._of_heads(path, said, outputs if said == "colwise" else inputs)

    def _by_itself(self, path: str, said: str) -> None:
        """The rule of a parameter of a module that is no projection: attention's sinks, one for each head."""
        if not (self._attention and said == "colwise" and self._parameters[path].shape == (self._heads,)):
            raise WholeGroup(f"{path} is a parameter by itself")
        self._cut.rules[f"{self._start}{path}"] = Sharded("heads")

    def _joined(self, path: str, said: str, outputs: int) -> int:
        """Of a projection that is gate and up in one, half its outputs: what the one after it takes."""
        down = path.replace("gate_up_proj", "down_proj")
        if self._attention or down == path or down not in self._said or said not in ("colwise", *_GATHERS):
            return 0
        module = self._modules[down]
        return outputs // 2 if isinstance(module, nn.Linear) and module.in_features * 2 == outputs else 0

    def _of_heads(self, path: str, said: str, side: int) -> Rule:
        """The rule of a projection of an attention: cut in heads, by how many of them it has."""
        heads, kv_heads, size = self._heads, self._kv_heads, self._size
        if said == "colwise" and side == 3 * heads * size:
            if (self._kind, path) in _FUSED_PARTS:
                return Column("heads", parts=3)
            if (self._kind, path) in _FUSED_HEADS:
                return Column("heads")
        key = path.endswith(("k_proj", "v_proj"))
        kind = "heads" if side == heads * size and not (key and kv_heads != heads) else "kv_heads"
        if kind == "kv_heads" and side != kv_heads * size:
            raise WholeGroup(f"{path} has {side} features, neither {heads} nor {kv_heads} heads of {size}")
        self._cut.units["heads"] = UnitsOf(heads)
        if kind == "kv_heads":
            self._cut.units["kv_heads"] = UnitsOf(kv_heads, follows="heads")
        return Column(kind) if said == "colwise" else Row(kind)

    def _others(self) -> None:
        """Parameters of the group of which the plan says nothing."""
        if not any(isinstance(r, Column) and not r.gather for r in self._cut.rules.values()):
            return
        known = tuple(f"{path}." for path in self._said)
        for name, parameter in self._parameters.items():
            if not self._name or not name.startswith(f"{self._name}.") or f"{name}.".startswith(known):
                continue
            norm = self._attention and "norm" in name
            if norm and tuple(parameter.shape) == (self._size,):
                self._cut.rules[f"{self._start}{name}"] = PartialGrad()
            elif norm and parameter.shape[0] == self._heads == self._kv_heads:
                self._cut.rules[f"{self._start}{name}"] = Sharded("heads")
            else:
                raise WholeGroup(f"the plan says nothing of {name}")

    def _numbers_of_heads(self) -> None:
        """Attributes in which the attention keeps how many heads it has."""
        modules = {p: m for p, m in self._modules.items() if f"{p}.".startswith(f"{self._name}.")}
        alike = self._heads == self._kv_heads

        def patterns(names: tuple[str, ...], count: int, times: int = 1) -> tuple[str, ...]:
            return tuple(
                f"{self._start}{path}.{name}"
                for path, module in modules.items()
                for name in names
                if module.__dict__.get(name) == count * times
            )

        lead = patterns(_NUMBERS_OF_HEADS, self._heads)
        kv = patterns(_NUMBERS_OF_KV_HEADS, self._kv_heads)
        widths = ("embed_dim",) if self._kind in _VISION else ("split_size",)
        parts = patterns(widths, self._heads, self._size)
        self._cut.units["heads"] = UnitsOf(self._heads, attribute=(*lead, *parts, *(kv if alike else ())))
        if not alike:
            ratio = patterns(("num_key_value_groups",), self._heads // self._kv_heads)
            self._cut.units["kv_heads"] = UnitsOf(self._kv_heads, follows="heads", attribute=kv, ratio=ratio)


def _number(config: Any, name: str) -> int:
    """A number of a configuration, 0 where it has none. Raises WholeGroup for one by layer."""
    try:
        return getattr(config, name, None) or 0
    except Exception as error:
        raise WholeGroup(f"layers differ in {name}") from error


def _vocabulary(model: Any, sections: Sequence[tuple[str, Any]], cuts: Cuts) -> None:
    """The projection to logits, and the embedding where they are tied."""
    given, tokens = model.get_output_embeddings(), model.get_input_embeddings()
    plan = getattr(type(model), "_tp_plan", None) or {}
    path = next((name for name, module in model.named_modules() if module is given), "")
    said = plan.get(path, "" if plan else "colwise_gather_output")
    name, (output, _) = name_in_sections(sections, path), stand_in(given)
    if type(output) is not nn.Linear or said not in _GATHERS or not name.startswith("head."):
        return
    table, _ = stand_in(tokens)
    tied = isinstance(table, nn.Embedding) and output.weight is table.weight
    if is_dora(given) or (tied and is_dora(tokens)):
        return
    cuts.rules[f"{name}.*"] = Column("vocabulary", gather=True)
    if tied:  # cut alike
        path = next(name for name, module in model.named_modules() if module is tokens)
        cuts.rules[f"{name_in_sections(sections, path)}.weight"] = Row("vocabulary")
