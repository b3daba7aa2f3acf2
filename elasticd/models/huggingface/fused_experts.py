"""The cuts of experts in fused parameters over a TP group: in columns of every expert, or expert by expert.

transformers keeps the experts of a layer in one module, whose parameters have the expert as dimension 0:

    gate_up_proj [experts, 2 x columns, width]      down_proj [experts, width, columns]

"columns": every member takes all rows to the experts that the router chose, and computes its columns of each,
so that it has as much work whatever the router chooses. "experts": a member has some experts, whole, and
computes those rows that the router sends there. Either way the terms of the output are added up.

What a fused parameter is says the module itself where it follows the contract of transformers'
`use_experts_implementation` (transposed, gate beside up or in turn, with biases, with a norm), and the words of
the model's plan where it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from elasticd.models.huggingface.cuts import Cuts, WholeGroup
from elasticd.runtime.model.tp_rules import Column, Experts, Row, UnitsOf

#: What a TP group cuts experts in.
CutIn = Literal["columns", "experts"]
#: The word of plans for a module of experts; the other one says of a module that its output is added up.
WORD, _ADDED = "moe_tp_experts", "all_reduce"
#: What a module says of its fused parameters, by the contract of transformers' `use_experts_implementation`.
_CONTRACT = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
#: Attributes in which a module keeps the columns of an expert.
_COLUMNS = ("intermediate_dim", "intermediate_size", "moe_intermediate_size", "expert_dim", "ffn_dim")
#: Columns are cut in units of so many where there are enough: grouped_mm wants rows of 16 bytes.
_ALIGNED, _ENOUGH = 8, 256
_OUT, _DOWN = ("gate_up_proj", "up_proj", "gate_proj"), "down_proj"


def is_contract(module: nn.Module) -> bool:
    """Returns True if a module has experts by the contract of transformers: forward(rows, index, weights)."""
    return all(isinstance(getattr(module, name, None), bool) for name in _CONTRACT)


def is_fused(module: nn.Module) -> bool:
    """Returns True if a module has its projections as parameters of its own with three dimensions."""
    own = dict(module.named_parameters(recurse=False))
    return _DOWN in own and own[_DOWN].dim() == 3 and any(name in own for name in _OUT)


def expert_cuts(module: nn.Module, words: Mapping[str, str], pattern: str, cut_in: CutIn) -> Cuts:
    """The rules of a module with fused experts. One whose columns cannot be cut is cut in experts.

    Args:
        module: has the experts.
        words: of the model's plan by name in the module, "" is the module itself. Empty: it has none.
        pattern: matches the module in all layers.
        cut_in: what it is to be cut in.

    Raises:
        WholeGroup: it can be cut in neither.
    """
    if cut_in == "experts" and is_contract(module):
        return _in_experts(module, pattern)
    try:
        return _in_columns(module, words, pattern)
    except WholeGroup:
        if not is_contract(module):
            raise
        return _in_experts(module, pattern)


def _in_experts(module: Any, pattern: str) -> Cuts:
    """The rules of experts each of which is whole on one member."""
    count = module.num_experts
    for name, parameter in module.named_parameters():
        if "." in name or parameter.shape[0] != count:
            raise WholeGroup(f"{name} is not stacked by the {count} experts")
    rule = Experts("experts")
    return Cuts(
        rules={f"{pattern}.{name}": rule for name, _ in module.named_parameters()},
        units={"experts": UnitsOf(count, attribute=f"{pattern}.num_experts")},
    )


def _in_columns(module: nn.Module, words: Mapping[str, str], pattern: str) -> Cuts:
    """The rules of experts of each of which every member has some columns."""
    own = dict(module.named_parameters())
    if not is_contract(module) and (missing := sorted(own.keys() - words.keys())):
        raise WholeGroup(f"the plan says nothing of {missing[0]}")
    known = own.keys() | ({""} if words.get("") in (WORD, _ADDED) else set())
    if others := sorted(words.keys() - known):
        raise WholeGroup(f"there is no rule for {words[others[0]]!r}")
    if getattr(module, "has_post_expert_norm", False):
        raise WholeGroup("a norm follows each expert, which takes the sum of all columns")
    outputs, inputs = _dims(module, words)
    columns = own[_DOWN].shape[inputs]
    aligned = columns >= _ENOUGH and columns % _ALIGNED == 0
    kind, cuts = f"expert_columns_{columns}", Cuts()
    for name, parameter in own.items():
        if name == _DOWN:
            cuts.rules[f"{pattern}.{name}"] = Row(kind, dim=inputs)
        elif name in _OUT or name in (f"{each}_bias" for each in _OUT):
            dim = outputs if parameter.dim() == 3 else 1
            cuts.rules[f"{pattern}.{name}"] = Column(
                kind, dim=dim, parts=_parts(module, name, parameter, words, dim)
            )
        elif name == f"{_DOWN}_bias":
            raise WholeGroup("its down_proj has a bias, which every member would add")
        else:
            raise WholeGroup(f"{name} is none of an expert's projections")
    sizes = tuple(f"{pattern}.{name}" for name in _COLUMNS if module.__dict__.get(name) == columns)
    cuts.units[kind] = UnitsOf(columns // _ALIGNED if aligned else columns, attribute=sizes)
    return cuts


def _dims(module: Any, words: Mapping[str, str]) -> tuple[int, int]:
    """The dimensions of outputs and of inputs in a projection: 1 and 2, or 2 and 1 where it is transposed."""
    if is_contract(module):
        transposed = module.is_transposed
    else:
        transposed = any(word.endswith("rowwise") for name, word in words.items() if name in _OUT)
    return (2, 1) if transposed else (1, 2)


def _parts(module: Any, name: str, parameter: Tensor, words: Mapping[str, str], dim: int) -> int:
    """The parts that the outputs of a projection are fused of, one after the other."""
    columns = module.down_proj.shape[_dims(module, words)[1]]
    if parameter.shape[dim] == columns:
        return 1
    if parameter.shape[dim] != 2 * columns:
        raise WholeGroup(f"{name} has {parameter.shape[dim]} outputs, and down_proj takes {columns}")
    concatenated = module.is_concatenated if is_contract(module) else words[name].startswith("packed_")
    return 2 if concatenated else 1


def routers_of(model: Any, sections: Mapping[str, nn.Module]) -> dict[str, int]:
    """The routers of a model, by full name, and the place of the logits of all experts in their outputs: those
    that transformers records as "router_logits".

    Args:
        model: of transformers.
        sections: made of its modules.
    """
    classes: dict[type, int] = {}
    for part in model.modules():  # a language model may be one of several parts
        recorded = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")
        listed: list[Any] = recorded if isinstance(recorded, list) else [recorded] if recorded else []
        classes |= {each.target_class: each.index for each in listed if hasattr(each, "target_class")}
    return {
        name: classes[type(module)]
        for section, whole in sections.items()
        for name, module in whole.named_modules(prefix=section)
        if type(module) in classes
    }
