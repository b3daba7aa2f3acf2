"""Rules in torch's words: a plan such as {"attn.qkv": "colwise", "attn.out": "rowwise"}, made into rules.

The words are those of torch's `parallelize_module` and of transformers' tensor-parallel plans. They do not say
what a rule must: the units that a dimension is cut in. These are read off the model. The modules of one parent
are a group, or those of the nearest ancestor in which columns and rows meet. What leaves the "colwise" modules
of a group cut enters its "rowwise" modules cut:

- in heads, if the group is an attention: a module of it has their number (`num_heads`) or size (`head_dim`);
- in single columns else.

What cannot be read off is refused, and the message has the rule to write in its place.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from elasticd.runtime.model.tp_rules import (
    Column,
    PartialGrad,
    Row,
    Rule,
    Sharded,
    UnitsOf,
    attribute_holders,
    listed,
    sides_of,
)
from elasticd.runtime.model.validation import ModelError

#: The rules of the words, without units; None: every member of a TP group has the full parameters.
WORDS: Mapping[str, Rule | None] = {
    "colwise": Column(),
    "colwise_gather_output": Column(gather=True),
    "colwise_rep": Column(gather=True),
    "rowwise": Row(),
    "embedding_rowwise": Row(),
    "rowwise_split_input": Row(split=True),
    "rowwise_rep": Row(split=True),
    "replicate": None,
    "replicated_with_grad_allreduce": PartialGrad(),
}
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_HEAD_SIZES = ("head_dim", "head_size")
_RATIOS = ("num_key_value_groups", "n_rep")
_OF_HEADS = ("heads", "kv_heads")
_IN_BLOCK = re.compile(r"blocks\.\d+\.(.+)")


def rules_of_plan(
    plan: Mapping[str, Any],
    sections: Mapping[str, nn.Module],
    rules: Mapping[str, Rule],
    units: Mapping[str, UnitsOf],
) -> tuple[dict[str, Rule], dict[str, UnitsOf]]:
    """The rules of a tensor-parallel plan, and the units that they cut in.

    Args:
        plan: words, styles of torch or rules, by name of the module: relative to a block ("attn.qkv"), full
            ("head.output"), or with the layers' name before it ("layers.*.attn.qkv"). Names may be patterns.
        sections: the full model's.
        rules: the user's own, which count before those of the plan.
        units: the user's own.

    Raises:
        ModelError: a word or a name is unknown, or the units cannot be read off.
    """
    reading = _Reading(sections, rules, units)
    for name, word in plan.items():
        reading.add(name, rule_of(name, word))
    reading.settle()
    return reading.rules(), reading.units()


def rule_of(name: str, word: Any) -> Rule | None:
    """The rule of a word, as yet without units.

    Args:
        name: of the module, for the message.
        word: one of `WORDS`, a rule, or a ColwiseParallel or RowwiseParallel of torch.

    Raises:
        ModelError: it is none of these.
    """
    if isinstance(word, Column | Row | Sharded | PartialGrad):
        return word
    if isinstance(word, str) and word in WORDS:
        return WORDS[word]
    style = type(word)
    if style.__module__.startswith("torch.distributed.tensor"):
        return _of_style(name, word, style.__name__)
    raise ModelError(
        f"tp_plan: {name!r} is {word!r}; the words are {', '.join(WORDS)}, or a rule such as Column(parts=3)"
    )


def _of_style(name: str, style: Any, kind: str) -> Rule:
    """The rule of a parallel style of torch with the layouts of activations that a rule stands for."""
    takes, gives = (getattr(style, f"{side}_layouts", (None,)) for side in ("input", "output"))
    placements = [str(placement[0]) if placement else "" for placement in (takes, gives)]
    known: Mapping[tuple[str, ...], Rule] = {
        ("ColwiseParallel", "R", "S(-1)"): Column(),
        ("ColwiseParallel", "R", "R"): Column(gather=True),
        ("RowwiseParallel", "S(-1)", "R"): Row(),
        ("RowwiseParallel", "R", "R"): Row(split=True),
    }
    found = known.get((kind, *placements))
    if found is None:
        raise ModelError(
            f"tp_plan: {name!r}: there is no rule for {kind} with these layouts of activations. Say 'colwise', "
            "'colwise_gather_output', 'rowwise' or 'rowwise_split_input'. "
            "Sequence parallelism needs no word here, but ParallelismOptions(sequence_parallel=...)"
        )
    return found


@dataclass(frozen=True)
class _Cut:
    """A module that the plan cuts."""

    path: str  #: its full name
    module: nn.Module
    rule: Column | Row  #: `units` is empty until they are read off

    @property
    def parent(self) -> str:
        """The module whose forward passes tensors between this one and others."""
        return self.path if isinstance(self.module, nn.MultiheadAttention) else self.path.rpartition(".")[0]

    @property
    def parts(self) -> int:
        fused = 3 if isinstance(self.module, nn.MultiheadAttention) else 1
        return max(self.rule.parts, fused) if isinstance(self.rule, Column) else 1

    @property
    def width(self) -> int:
        """The length of the cut dimension: of one part."""
        return self.size // self.parts

    def check(self) -> None:
        """Raises ModelError where a rule of this module must say which dimension it cuts."""
        if sides_of(self.module) is None and not isinstance(self.module, nn.Embedding):
            if isinstance(self.module, nn.MultiheadAttention) and isinstance(self.rule, Column):
                return
            kind = type(self.rule).__name__
            raise ModelError(
                f"tp_plan: {self.path} is a {type(self.module).__name__}, for which there is no {kind} without "
                f"its dimension: say {kind}(units, dim=...), or name the nn.Linear in it"
            )

    @property
    def size(self) -> int:
        """The length of all parts."""
        module: Any = self.module
        if isinstance(module, nn.MultiheadAttention) and isinstance(self.rule, Column):
            return 3 * module.embed_dim
        if isinstance(module, nn.Embedding):
            return module.embedding_dim if isinstance(self.rule, Column) else module.num_embeddings
        sides = sides_of(module)
        assert sides is not None, "checked"
        return int(module.weight.shape[sides[0] if isinstance(self.rule, Column) else sides[1]])

    @property
    def alone(self) -> bool:
        """True if its inputs and outputs are full, so that it stands in no group."""
        if isinstance(self.rule, Column):
            return self.rule.gather
        return self.rule.split or isinstance(self.module, nn.Embedding)


class _Reading:
    """The plan's modules with their rules, as far as they are read."""

    def __init__(
        self, sections: Mapping[str, nn.Module], rules: Mapping[str, Rule], units: Mapping[str, UnitsOf]
    ) -> None:
        self._given, self._rules = dict(units), rules
        self._modules = {
            path: module
            for name, section in sections.items()
            for path, module in section.named_modules(prefix=name)
        }
        self._found: dict[str, Rule | None] = {}  # by full name of the module
        self._units: dict[str, UnitsOf] = dict(units)
        # By kind of units: the modules and their attributes that have the number, or the ratio.
        self._attributes: dict[str, set[tuple[str, str]]] = {}
        self._ratios: dict[str, set[tuple[str, str]]] = {}

    def add(self, name: str, rule: Rule | None) -> None:
        """One line of the plan. Of several that name a module the first counts."""
        for path in self._named(name):
            self._found.setdefault(path, rule)

    def _named(self, name: str) -> list[str]:
        """The full names of the modules that a line is of."""
        inner = {path: match[1] for path in self._modules if (match := _IN_BLOCK.fullmatch(path))}
        without_layers = name.partition(".*.")[2] or name
        for found in (
            [path for path in self._modules if fnmatchcase(path, name)],
            [path for path, inside in inner.items() if fnmatchcase(inside, name)],
            [path for path, inside in inner.items() if fnmatchcase(inside, without_layers)],
        ):
            if found:
                return found
        known = [inside for path, inside in inner.items() if path.startswith("blocks.0.")]
        known += [path for path in self._modules if not path.startswith("blocks.")]
        close = difflib.get_close_matches(name, known, 3, 0.5) or known[:3]
        raise ModelError(
            f"tp_plan: {name!r} is no module of a block or of the model; there are {', '.join(close)}"
        )

    def settle(self) -> None:
        """Reads off the units of all modules that are cut."""
        cuts = []
        for path, rule in self._found.items():
            if not isinstance(rule, Column | Row):
                continue
            if rule.dim is None:
                cuts.append(_Cut(path, self._modules[path], rule))
                cuts[-1].check()
            elif not rule.units:
                kind = type(rule).__name__
                raise ModelError(f"tp_plan: {path}: a rule with dim= says its units, as {kind}('heads')")
        for cut in cuts:
            if cut.alone:
                self._cut_in(cut, cut.rule.units or f"columns_{cut.width}")
        for parent, group in _groups([cut for cut in cuts if not cut.alone]).items():
            self._group(parent, group)
        for path, rule in self._found.items():
            if isinstance(rule, Sharded) and not rule.units:
                self._found[path] = replace(rule, units=self._units_beside(path))

    def _units_beside(self, path: str) -> str:
        """The units of the module by rows that has the same parent: what a dropout before it is sharded in."""
        parent = path.rpartition(".")[0]
        beside = (rule for other, rule in self._found.items() if other.rpartition(".")[0] == parent)
        units = {rule.units for rule in beside if isinstance(rule, Row)}
        if len(units) != 1:
            raise ModelError(f"tp_plan: {path}: say the units, as Sharded('heads', dim=1)")
        return units.pop()

    def _cut_in(self, cut: _Cut, units: str) -> None:
        if isinstance(cut.rule, Column):
            self._found[cut.path] = replace(cut.rule, units=units, parts=cut.parts)
        else:
            self._found[cut.path] = replace(cut.rule, units=units)

    def _group(self, parent: str, group: Sequence[_Cut]) -> None:
        """Reads off the units of modules between which tensors are cut."""
        columns = [cut for cut in group if isinstance(cut.rule, Column)]
        rows = [cut for cut in group if isinstance(cut.rule, Row)]
        around = dict.fromkeys([*(cut.parent for cut in group), parent])
        heads = _Heads({path: self._modules[path] for path in around}, self._given)
        attention = heads.known or _like_attention(parent, columns)
        _check_widths(columns, rows, fewer=attention)
        said = {cut.width: cut.rule.units for cut in group if cut.rule.units}
        widths = {row.width for row in rows}
        for cut in group:
            units = said.get(cut.width, "")
            if attention and (not units or (units in _OF_HEADS and units not in self._given)):
                lead = min((width for width in widths if width % cut.width == 0), default=max(widths))
                fewer = cut.width < lead
                units = self._kv_heads(parent, heads, cut, lead) if fewer else self._heads(parent, heads, lead)
            self._cut_in(cut, units or f"columns_{cut.width}")
        if attention:
            self._refuse_norms(parent, heads.count(max(widths)), max(widths))

    def _heads(self, parent: str, heads: _Heads, width: int) -> str:
        """The kind of units of a dimension that is all heads."""
        if "heads" in self._given:
            return "heads"
        count = heads.count(width)
        if not count:
            raise ModelError(
                f"tp_plan: how many heads {parent} has is in no attribute {', '.join(_HEADS)}. Name the "
                f"attribute: units={{'heads': UnitsOf(attribute='blocks.*.{_inner(parent)}.NAME')}}"
            )
        if width % count:
            raise ModelError(
                f"tp_plan: {parent}: {width} features do not divide into its {count} heads. Say "
                "Column('columns') and Row('columns') if they may be cut elsewhere"
            )
        return self._kind("heads", UnitsOf(count), heads.named((*_HEADS, *_KV_HEADS), count))

    def _kv_heads(self, parent: str, heads: _Heads, cut: _Cut, lead: int) -> str:
        """The kind of units of keys or values, of which there are fewer than queries."""
        followed = self._heads(parent, heads, lead)
        if "kv_heads" in self._given:
            return "kv_heads"
        all_heads = heads.count(lead)
        if not all_heads or all_heads * cut.width % lead:
            raise ModelError(
                f"tp_plan: {cut.path} gives {cut.width} features, which are no heads of {parent}. Say their "
                "number: units={'kv_heads': UnitsOf(2, follows='heads', attribute=...)}"
            )
        count = all_heads * cut.width // lead
        kind = self._kind("kv_heads", UnitsOf(count, follows=followed), heads.named(_KV_HEADS, count))
        self._ratios.setdefault(kind, set()).update(heads.named(_RATIOS, all_heads // count))
        return kind

    def _kind(self, name: str, units: UnitsOf, attributes: set[tuple[str, str]]) -> str:
        """The kind of these units. Where blocks differ its name has the number."""
        follows = f"_of_{units.follows}" if units.follows else ""
        kind = name if self._units.setdefault(name, units) == units else f"{name}_{units.count}{follows}"
        self._units.setdefault(kind, units)
        self._attributes.setdefault(kind, set()).update(attributes)
        return kind

    def _refuse_norms(self, parent: str, count: int, width: int) -> None:
        """A norm of each head has terms of its gradient on the members, which no word of the plan sums."""
        if count < 2 or _IN_BLOCK.fullmatch(parent) is None:
            return
        for name, parameter in self._modules[parent].named_parameters(prefix=parent):
            owner = name.rpartition(".")[0]
            ruled = self._found.get(owner) or any(fnmatchcase(name, pattern) for pattern in self._rules)
            if not ruled and tuple(parameter.shape) == (width // count,):
                raise ModelError(
                    f"tp_plan: {name} acts on each head, so that its gradient has terms on all members: add "
                    f"{_inner(owner)!r}: 'replicated_with_grad_allreduce'"
                )

    def rules(self) -> dict[str, Rule]:
        """By patterns of full names of parameters."""
        alike: dict[tuple[Rule, str], list[str]] = {}
        for path, rule in self._found.items():
            if rule is not None:
                alike.setdefault((rule, self._leaves(path, rule)), []).append(path)
        return {
            pattern.removesuffix("."): rule
            for (rule, leaves), paths in alike.items()
            for pattern in self._patterns((path, leaves) for path in paths)
        }

    def units(self) -> dict[str, UnitsOf]:
        """The kinds of units, the user's own and those that were read off."""
        return {
            kind: units
            if kind in self._given
            else replace(
                units,
                attribute=tuple(self._patterns(self._attributes[kind])),
                ratio=tuple(self._patterns(self._ratios.get(kind, ()))),
            )
            for kind, units in self._units.items()
        }

    def _leaves(self, path: str, rule: Rule) -> str:
        """The part of a module that a rule is for: its parameters, or the module itself if it is a dropout."""
        if isinstance(self._modules[path], nn.MultiheadAttention) and isinstance(rule, Column):
            return "in_proj_*"
        return "" if isinstance(self._modules[path], nn.Dropout) else "*"

    def _patterns(self, names: Iterable[tuple[str, str]]) -> Iterator[str]:
        """Patterns of modules' leaves: one for the blocks where it matches no other module, else full names."""
        alike: dict[tuple[str, str], list[str]] = {}
        for path, leaf in sorted(set(names)):
            alike.setdefault((_inner(path), leaf), []).append(path)
        for (inner, leaf), paths in alike.items():
            pattern = f"blocks.*.{inner}"
            if {path for path in self._modules if fnmatchcase(path, pattern)} == set(paths):
                yield f"{pattern}.{leaf}"
            else:
                yield from (f"{path}.{leaf}" for path in paths)


def _groups(cuts: Sequence[_Cut]) -> dict[str, list[_Cut]]:
    """Modules between which tensors are cut, by the module that has them all: a parent that has only columns or
    only rows of them is joined with its own parent's.

    Raises:
        ModelError: columns and rows do not meet in a section.
    """
    groups: dict[str, list[_Cut]] = {}
    for cut in cuts:
        groups.setdefault(cut.parent, []).append(cut)
    while lone := [path for path, group in groups.items() if len({type(cut.rule) for cut in group}) == 1]:
        path = max(lone, key=lambda path: path.count("."))
        group = groups.pop(path)
        if path in {"embed", "head"} or re.fullmatch(r"blocks\.\d+", path) or not path:
            raise _lone(group[0])
        groups.setdefault(path.rpartition(".")[0], []).extend(group)
    return groups


def _lone(cut: _Cut) -> ModelError:
    if isinstance(cut.rule, Column):
        return ModelError(
            f"tp_plan: {cut.path} is cut by columns, and no module by rows takes what it gives. Name that one "
            "'rowwise', or say 'colwise_gather_output' if the output is to be full, as for logits"
        )
    return ModelError(
        f"tp_plan: {cut.path} is cut by rows, and no module by columns gives what it takes. Name that one "
        "'colwise', or say 'rowwise_split_input' if the input is full"
    )


def _check_widths(columns: Sequence[_Cut], rows: Sequence[_Cut], fewer: bool) -> None:
    """Refuses columns and rows of unlike widths. `fewer`: keys and values may be fewer than queries."""
    for column in columns:
        if column.size % column.parts:
            raise ModelError(
                f"tp_plan: {column.path} gives {column.size} features, not {column.parts} equal parts"
            )
        if column.rule.units:
            continue
        if any(row.width == column.width or (fewer and row.width % column.width == 0) for row in rows):
            continue
        said = f"tp_plan: {column.path} gives {column.width} features, and {rows[0].path} takes {rows[0].width}"
        times, rest = divmod(column.width, rows[0].width)
        if rest or column.parts > 1 or times < 2:
            raise ModelError(f"{said}, so that they cannot be cut alike. Say which units: Column('columns')")
        raise ModelError(
            f"{said}: it is {times} projections in one. Say Column(parts={times}) in place of the word if "
            "they lie one after another, as torch.chunk takes them; Column('heads') if they lie head by head"
        )
    for row in rows:
        if all(column.width != row.width and not column.rule.units for column in columns):
            raise ModelError(
                f"tp_plan: {row.path} takes {row.width} features, and no module by columns gives as many. "
                "Say 'rowwise_split_input' if the input is full"
            )


def _like_attention(parent: str, columns: Sequence[_Cut]) -> bool:
    """Returns True if a group must be cut in heads, if only it is known in which."""
    named = re.search("attn|attention", _inner(parent).lower()) is not None
    return named or len(columns) > 2 or any(column.parts == 3 for column in columns)


def _inner(path: str) -> str:
    """A module's name relative to its block."""
    match = _IN_BLOCK.fullmatch(path)
    return match[1] if match else path


class _Heads:
    """The number of heads of a group, by the attributes of its modules."""

    def __init__(self, modules: Mapping[str, nn.Module], given: Mapping[str, UnitsOf]) -> None:
        """
        Args:
            modules: those in which the number may be, by full name.
            given: the user's own units, which may name the attribute.
        """
        self._modules = modules
        patterns = listed(given["heads"].attribute) if "heads" in given else ()
        self._given = any(
            True for path, module in modules.items() for _ in attribute_holders(path, module, patterns)
        )

    @property
    def known(self) -> bool:
        """True if an attribute has their number or size."""
        return self._given or bool(self._first(_HEADS) or self._first(_HEAD_SIZES))

    def count(self, width: int) -> int:
        """The number of heads in so many features; 0: no attribute says."""
        size = self._first(_HEAD_SIZES)
        return self._first(_HEADS) or (width // size if size and width % size == 0 else 0)

    def named(self, names: Sequence[str], value: int) -> set[tuple[str, str]]:
        """The modules and attributes that have this value."""
        return {
            (path, name)
            for path, module in self._modules.items()
            for name in names
            if _number(module, name) == value
        }

    def _first(self, names: Sequence[str]) -> int:
        found = (_number(module, name) for module in self._modules.values() for name in names)
        return next((number for number in found if number), 0)


def _number(module: nn.Module, name: str) -> int:
    value = module.__dict__.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
