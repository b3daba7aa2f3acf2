"""Tensor-parallel rules as a user writes them: how a parameter is sharded over a TP group.

The rule of a parameter is the first one whose pattern matches its full name ("blocks.3.attention.q.weight").
Every member holds a parameter without a rule completely, and all members compute the same gradient of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from elasticd.runtime.exits import ScriptRefusal
from elasticd.runtime.model.validation import ModelError


@dataclass(frozen=True)
class Column:
    """Shards the outputs of a module: each member computes some of them from the full input."""

    units: str = (
        ""  #: what outputs are cut in: a kind of the model's `units`. Empty in a `tp_plan`: is read off
    )
    #: The parameter's dimension that is cut. Needed unless the module is an nn.Linear, the Conv1D of
    #: transformers or an nn.Embedding.
    dim: int | None = None
    gather: bool = False  #: all-gather the outputs along the last dimension, as for logits
    #: Equal parts that the outputs are fused of, each of which is cut: 3 for q, k and v in one matrix.
    parts: int = 1


@dataclass(frozen=True)
class Row:
    """Shards the inputs of a module: each member computes a term of the output, and the terms are all-reduced.

    A bias is added once. Of an nn.Embedding the rows are sharded: each member looks up its own.
    """

    units: str = ""  #: what inputs are cut in, as in `Column`
    dim: int | None = None  #: as in `Column`
    split: bool = False  #: the input is full, as after `gather`, and each member takes its part of it


@dataclass(frozen=True)
class Sharded:
    """Shards a parameter that has a value for each unit, without communication.

    With the path of an nn.Dropout as pattern: the input of that module is sharded.
    """

    units: str = ""  #: a kind of the model's `units`; a `tp_plan` may leave it out
    dim: int = 0  #: the dimension of the parameter, or of the dropout's input, along which the units lie


@dataclass(frozen=True)
class PartialGrad:
    """Every member holds the full parameter, and computes a term of its gradient.

    So it is for a parameter that acts on sharded activations, as the norm of each head's queries. The gradient
    is the sum of the terms, like DTensor's `Partial`.
    """


@dataclass(frozen=True)
class Experts:
    """Spreads the experts of a module: each member holds some of them, and computes these for all rows.

    The module's parameters have the experts as their dimension 0. Its forward(rows [n, width], index [n, k],
    weights [n, k]) gives [n, width]: for each row the sum of the outputs of the k experts that `index` names,
    by `weights`. A member calls it with a row and k = 1 for each pair of a row and an expert that it holds,
    counted from its first one. The terms of the members are all-reduced.
    """

    units: str = ""  #: a kind of the model's `units`: the experts


Rule = Column | Row | Sharded | PartialGrad | Experts


@dataclass(frozen=True)
class UnitsOf:
    """A kind of units that parameters are cut in, such as heads.

    If a cut leaves a member with heads and kv-heads that do not divide, outputs of Column modules in kv-heads
    are repeated, one for each head, and the attribute of kv-heads is the number of heads.
    """

    #: Units in the full model. None: the value of the first attribute, else the length of the first cut
    #: dimension.
    count: int | None = None
    #: Another kind of which each of these units serves an equal number: kv-heads follow heads.
    follows: str | None = None
    #: Patterns of submodules' attributes ("blocks.*.attention.heads") that hold the number of units or a
    #: multiple of it. Local modules have their own number there.
    attribute: str | tuple[str, ...] = ()
    #: Patterns of attributes that hold the number of followed units for each of these, as
    #: "num_key_value_groups".
    ratio: str | tuple[str, ...] = ()


#: The linear layer of GPT-2 in transformers, whose weight is [inputs, outputs].
_TRANSPOSED = ("transformers.pytorch_utils", "Conv1D")


class RuleError(ScriptRefusal):
    """A rule that does not fit what it names."""


@dataclass(frozen=True)
class CutAt:
    """The place at which a rule cuts a parameter."""

    dim: int  #: the dimension of the parameter
    parts: int = 1  #: equal parts that this dimension is fused of


def cut_at(rule: Rule | None, owner: nn.Module, leaf: str, dims: int) -> CutAt | None:
    """The place at which a rule cuts a parameter; None: every member holds it completely.

    Args:
        rule: of the parameter.
        owner: the module that has it.
        leaf: its name in that module.
        dims: its number of dimensions.

    Raises:
        RuleError: the rule must say which dimension it cuts, and does not.
    """
    if rule is None or isinstance(rule, PartialGrad):
        return None
    if isinstance(rule, Experts):
        if not takes_rows(owner):
            raise RuleError(
                f"Experts of a {type(owner).__name__}, whose forward does not take (rows, index, weights): it "
                "is for the module that has all experts of a block, stacked in each of its parameters"
            )
        return CutAt(0)
    if isinstance(rule, Sharded):
        return CutAt(rule.dim % dims)
    if rule.dim is not None:
        return CutAt(rule.dim % dims, rule.parts if isinstance(rule, Column) else 1)
    sides = sides_of(owner)
    if sides is not None:
        if leaf == "bias":
            return CutAt(0, rule.parts) if isinstance(rule, Column) else None
        return CutAt(sides[0], rule.parts) if isinstance(rule, Column) else CutAt(sides[1])
    if (place := _known_owner(rule, owner)) is not None:
        return place
    raise RuleError(
        f"{type(rule).__name__} of a {type(owner).__name__} must say which dimension of the parameter it cuts: "
        f"{type(rule).__name__}({rule.units!r}, dim=...)"
    )


def _known_owner(rule: Column | Row, owner: nn.Module) -> CutAt | None:
    if isinstance(owner, nn.MultiheadAttention) and isinstance(rule, Column):
        return CutAt(0, _fused_projections(owner))
    if isinstance(owner, nn.Embedding):
        return CutAt(1, rule.parts) if isinstance(rule, Column) else CutAt(0)
    return None


def takes_rows(owner: nn.Module) -> bool:
    """Returns True if a module's forward can be called with rows, the experts of each, and their weights."""
    try:
        inspect.signature(owner.forward).bind(None, None, None)
    except TypeError:
        return False
    return True


def _fused_projections(attention: nn.MultiheadAttention) -> int:
    """The number of projections in each parameter of torch's attention: those of queries, keys and values.

    Raises:
        RuleError: the attention has more parameters than these.
    """
    if not attention._qkv_same_embed_dim or attention.bias_k is not None or attention.add_zero_attn:
        raise RuleError(
            "an nn.MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn cannot be cut; write it "
            "with an nn.Linear for each projection"
        )
    return 3


def sides_of(owner: nn.Module) -> tuple[int, int] | None:
    """The dimensions of outputs and of inputs in the weight of a linear module; None for other modules."""
    if isinstance(owner, nn.Linear):
        return 0, 1
    if any((kind.__module__, kind.__name__) == _TRANSPOSED for kind in type(owner).__mro__):
        return 1, 0
    return None


def listed(attributes: str | tuple[str, ...]) -> tuple[str, ...]:
    """The attributes of a `UnitsOf` field, which may be one pattern or several."""
    return (attributes,) if isinstance(attributes, str) else attributes


def attribute_holders(
    section: str, module: nn.Module, attributes: tuple[str, ...]
) -> Iterator[tuple[str, nn.Module, str]]:
    """The submodules of a section with an attribute that a pattern matches.

    Yields:
        The attribute's full name, the submodule, and the attribute's name in it.
    """
    for attribute in attributes:
        name = attribute.rpartition(".")[2]
        for path, submodule in module.named_modules(prefix=section):
            if hasattr(submodule, name) and fnmatchcase(f"{path}.{name}", attribute):
                yield f"{path}.{name}", submodule, name


def whole_units(units: UnitsOf, kind: str, sections: Mapping[str, nn.Module], sizes: list[int]) -> int:
    """The number of units of a kind in the full model: as given, of an attribute, or a cut dimension's length.

    Args:
        units: of the kind.
        kind: its name.
        sections: the full model's.
        sizes: lengths of the dimensions that rules cut in these units.

    Raises:
        ModelError: none of the three is there, or an attribute is missing or no multiple of the number.
    """
    attributes: list[tuple[str, int]] = []
    for attribute in listed(units.attribute):
        found = [
            (full, getattr(submodule, name))
            for section, module in sections.items()
            for full, submodule, name in attribute_holders(section, module, (attribute,))
        ]
        if not found or any(not isinstance(value, int) for _, value in found):
            raise ModelError(f"units {kind!r}: {attribute!r} is no attribute with a number of a submodule")
        attributes += found
    counts = [units.count] if units.count is not None else [value for _, value in attributes] or sizes
    if not counts:
        raise ModelError(f"units {kind!r}: no rule uses them, and no count is given")
    count = counts[0]
    for name, value in attributes:
        if count < 1 or value % count:
            raise ModelError(f"units {kind!r}: {name} = {value} is no multiple of {count}")
    return count
