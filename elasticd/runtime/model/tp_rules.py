"""Tensor-parallel rules as a user writes them: what members of a TP group hold, and what they sum.

A rule is found by the parameter's full name ("blocks.3.attention.q.weight"); the first pattern that matches
holds. A parameter without a rule is whole on every member, and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from elasticd.runtime.model.validation import ModelError


@dataclass(frozen=True)
class Column:
    """The outputs of a module are cut: each member computes some of them from the whole input.

    `units`: what they are cut in, a kind of the model's `units`. With `gather` the members' outputs are put
    together again (last dimension), as for logits. parts: how many parts of equal size the outputs are fused
    of (3 for q, k and v in one matrix); each is cut. dim: the parameter's dimension, where the module is
    neither an nn.Linear (nor the Conv1D of transformers) nor an nn.Embedding.
    """

    units: str
    dim: int | None = None
    gather: bool = False
    parts: int = 1


@dataclass(frozen=True)
class Row:
    """The inputs of a module are cut: each member computes a term of the output from its part of the input,
    and the terms are summed. A bias is added once. Of an nn.Embedding the rows are cut: each looks up its own.

    split: the input is whole, as after outputs that were gathered, and each member takes its part of it.
    """

    units: str
    dim: int | None = None
    split: bool = False


@dataclass(frozen=True)
class Slice:
    """Goes along with what is cut, without communication: a parameter that has a value for each unit along
    `dim`, or (pattern: the module's path) an nn.Dropout whose input is cut along its dimension `dim`."""

    units: str
    dim: int = 0


@dataclass(frozen=True)
class Add:
    """Whole on every member, which sees only its part of what the parameter acts on: gradients are terms of a
    sum, as of a norm of each head's queries."""


Rule = Column | Row | Slice | Add


@dataclass(frozen=True)
class UnitsOf:
    """Units of a kind. count: how many; else read from the first attribute, else from the first parameter cut.

    attribute: attributes of submodules, by pattern ("blocks.*.attention.heads"), that hold the number of units
    or a multiple of it: a local module has its own part there. follows: each unit serves count / count of these
    of that other kind (kv-heads follow heads). Where a cut would leave a member heads and kv-heads that do not
    divide, outputs of Column modules in these units are repeated, one for each head, and the attribute is the
    number of heads. ratio: attributes that hold count / count, "num_key_value_groups" say.
    """

    count: int | None = None
    follows: str | None = None
    attribute: str | tuple[str, ...] = ()
    ratio: str | tuple[str, ...] = ()


#: The linear layer of GPT-2 in transformers, whose weight is [inputs, outputs].
_TRANSPOSED = ("transformers.pytorch_utils", "Conv1D")


class RuleError(ValueError):
    """A rule that does not fit what it names."""


@dataclass(frozen=True)
class CutAt:
    """The dimension of a parameter that a rule cuts, and of how many parts it is fused."""

    dim: int
    parts: int = 1


def cut_at(rule: Rule | None, owner: nn.Module, leaf: str, dims: int) -> CutAt | None:
    """Where `rule` cuts the parameter `leaf`, of `dims` dimensions, of `owner`; None: it is whole.

    Raises RuleError where that cannot be known."""
    if rule is None or isinstance(rule, Add):
        return None
    if isinstance(rule, Slice):
        return CutAt(rule.dim % dims)
    if rule.dim is not None:
        return CutAt(rule.dim % dims, rule.parts if isinstance(rule, Column) else 1)
    sides = sides_of(owner)
    if sides is not None:
        if leaf == "bias":
            return CutAt(0, rule.parts) if isinstance(rule, Column) else None
        return CutAt(sides[0], rule.parts) if isinstance(rule, Column) else CutAt(sides[1])
    if isinstance(owner, nn.Embedding):
        return CutAt(1, rule.parts) if isinstance(rule, Column) else CutAt(0)
    raise RuleError(
        f"{type(rule).__name__} of a {type(owner).__name__} must say which dimension of the parameter it cuts: "
        f"{type(rule).__name__}({rule.units!r}, dim=...)"
    )


def sides_of(owner: nn.Module) -> tuple[int, int] | None:
    """The dimensions of outputs and of inputs in the weight of a module that multiplies by a matrix and then
    adds its bias; None for other modules."""
    if isinstance(owner, nn.Linear):
        return 0, 1
    if any((kind.__module__, kind.__name__) == _TRANSPOSED for kind in type(owner).__mro__):
        return 1, 0
    return None


def listed(attributes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (attributes,) if isinstance(attributes, str) else attributes


def attribute_holders(
    section: str, module: nn.Module, attributes: tuple[str, ...]
) -> Iterator[tuple[str, nn.Module, str]]:
    """The submodules that have an attribute of such a full name: that name, the module, the attribute."""
    for attribute in attributes:
        name = attribute.rpartition(".")[2]
        for path, submodule in module.named_modules(prefix=section):
            if hasattr(submodule, name) and fnmatchcase(f"{path}.{name}", attribute):
                yield f"{path}.{name}", submodule, name


def whole_units(units: UnitsOf, kind: str, sections: Mapping[str, nn.Module], sizes: list[int]) -> int:
    """The count of a kind of units: as given, as its attribute says, or as many as a cut dimension is long.

    Raises ModelError where nothing says, and for attributes that are not there or are no multiple of it."""
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
