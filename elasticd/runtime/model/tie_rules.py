"""Tensor-parallel rules of tied parameters: one without a rule takes that of the one that it is tied to.

Tied parameters are one tensor, so that a device holds the same box of it at both of its uses. One rule says
which dimension is cut. The communication of the other use follows from its module: a layer without a rule takes
the full activation and gives the full activation, and it still does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from elasticd.runtime.model.tp_rules import Column, Row, Rule, RuleError, Sharded, cut_at
from elasticd.runtime.model.validation import ModelError

#: The rule of a parameter by full name, and the pattern that names it; None: it has none.
RuleOf = Callable[[str], tuple[str, Rule] | None]


def rules_of_ties(
    ties: Mapping[str, str], sections: Mapping[str, nn.Module], rule_of: RuleOf
) -> dict[str, Rule]:
    """The rules that tied parameters take from each other, by full name.

    Args:
        ties: each later use to the first, by full names.
        sections: the full model's.
        rule_of: the rule that the user gave for a parameter.

    Returns:
        Rules for the parameters of the modules whose tied parameter has none.

    Raises:
        ModelError: a tied parameter cannot be cut as its partner is, or the two have unlike rules.
    """
    rules: dict[str, Rule] = {}
    for first in dict.fromkeys(ties.values()):
        names = [first, *(name for name, other in ties.items() if other == first)]
        ruled = [name for name in names if rule_of(name) is not None]
        _refuse_unlike(ruled, sections, rule_of)
        for name in names if ruled else ():
            if name not in ruled:
                rules |= _taken(name, ruled[0], sections, rule_of)
    return rules


def _taken(name: str, partner: str, sections: Mapping[str, nn.Module], rule_of: RuleOf) -> dict[str, Rule]:
    """The rules of the module of `name`, so that its parameter is cut as its partner is."""
    named = rule_of(partner)
    assert named is not None
    pattern, rule = named
    cut = _cut(partner, sections, rule)
    if cut is None or not isinstance(rule, Column | Row | Sharded):
        return {}  # each member holds all of it, at both of its uses
    owner, path, leaf = _owner(name, sections)
    of_full_activations: Sequence[Rule] = (
        Row(rule.units) if isinstance(owner, nn.Embedding) else Row(rule.units, split=True),
        Column(rule.units, gather=True, parts=cut[1]),
    )
    for candidate in of_full_activations:
        dims = owner.get_parameter(leaf).dim()
        try:
            same = cut_at(candidate, owner, leaf, dims)
        except RuleError:
            break
        if same is not None and (same.dim, same.parts) == cut:
            return {f"{path}.{other}": candidate for other, _ in owner.named_parameters(recurse=False)}
    raise ModelError(
        f"{name} has no rule, and {partner}, which it is tied to, is cut in dimension {cut[0]} by the rule "
        f"{pattern!r}: give {path} ({type(owner).__name__}) a rule that cuts that dimension in {rule.units!r}"
    )


def _refuse_unlike(names: Sequence[str], sections: Mapping[str, nn.Module], rule_of: RuleOf) -> None:
    """Refuses rules by which the uses of one tensor would be held in unlike parts."""
    cuts = {}
    for name in names:
        named = rule_of(name)
        assert named is not None
        pattern, rule = named
        try:
            cuts[name] = (_cut(name, sections, rule), getattr(rule, "units", ""))
        except RuleError as error:
            raise ModelError(f"rule {pattern!r} for {name}: {error}") from None
    for name in names[1:]:
        if cuts[name] != cuts[names[0]]:
            raise ModelError(
                f"{names[0]} and {name} are one parameter, and their rules cut it differently: "
                f"{_said(names[0], cuts, rule_of)}, and {_said(name, cuts, rule_of)}. Leave one of the rules "
                "out: a tied parameter takes the rule of the other"
            )


def _said(name: str, cuts: Mapping[str, tuple[tuple[int, int] | None, str]], rule_of: RuleOf) -> str:
    named, (cut, units) = rule_of(name), cuts[name]
    assert named is not None
    does = "does not cut it" if cut is None else f"cuts dimension {cut[0]} in {units!r}"
    return f"{named[0]!r} {does}"


def _cut(name: str, sections: Mapping[str, nn.Module], rule: Rule) -> tuple[int, int] | None:
    """The dimension that a rule cuts a parameter in, and the number of fused parts of it."""
    owner, _, leaf = _owner(name, sections)
    at = cut_at(rule, owner, leaf, owner.get_parameter(leaf).dim())
    return None if at is None else (at.dim, at.parts)


def _owner(name: str, sections: Mapping[str, nn.Module]) -> tuple[nn.Module, str, str]:
    """The module that has a parameter, the module's full name, and the parameter's name in it."""
    path, _, leaf = name.rpartition(".")
    section = next(each for each in sections if path == each or path.startswith(f"{each}."))
    return sections[section].get_submodule(path[len(section) + 1 :]), path, leaf
