"""Hooks that add a TP group's collectives to the local modules whose parameters are cut by the model's rules.

A Column module takes the full input. The members all-reduce its gradient, once for all modules that take the
same tensor. A Row module gives a term of its output, which they all-reduce; its bias is added after that. Where
blocks are on slices of the tokens, see `sequence_parallel`, these are all-gathers and reduce-scatters. Of an
Experts module each member computes its own experts' part of the output (`held_experts`), which is a term, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from elasticd_planner.spec.model import block_of, held_units, member_box, unit_range
from elasticd_planner.spec.plan import Stage
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear  # out_proj of nn.MultiheadAttention

from elasticd.runtime.accelerator import put
from elasticd.runtime.comm.communicators import Team
from elasticd.runtime.model.local_model import repeats
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.tp_rules import Column, Experts, Row, sides_of
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel import sequence_parallel
from elasticd.runtime.parallel.expert_holders import ExpertHolders
from elasticd.runtime.parallel.expert_pairs import ExpertPairs
from elasticd.runtime.parallel.held_experts import held_experts
from elasticd.runtime.parallel.redistribute import (
    Redistribution,
    slices,
    terms,
    vocab_parallel_embedding,
    whole,
)
from elasticd.runtime.parallel.self_attention import self_attention
from elasticd.runtime.parallel.sequence_parallel import Entrance, SequenceSlices, single


class _Entering:
    """A hook through which the inputs of Column modules pass: whole, and used by each member in its own way.
    They are the first tensor of a call, and all others that need a gradient.

    Each tensor passes once in a forward pass of the section, so that its gradient is all-reduced once, however
    many modules take it.
    """

    def __init__(self, group: Team) -> None:
        self._enters = Redistribution(group, whole(group), whole(group), add=True)
        self._entered: list[tuple[Tensor, Tensor]] = []

    def clear(self, *_: object) -> None:
        self._entered.clear()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if first is None:
            raise ModelError(f"a cut {type(module).__name__} was called without a tensor")

        def entered(value: Any) -> Any:
            enters = value is first or (isinstance(value, Tensor) and value.requires_grad)
            return self._enter(value) if enters else value

        return tuple(map(entered, args)), {name: entered(value) for name, value in kwargs.items()}

    def _enter(self, x: Tensor) -> Tensor:
        for before, entered in self._entered:
            if before is x:
                return entered
        self._entered.append((x, self._enters(x)))
        return self._entered[-1][1]


def attach(
    model: Model,
    section: str,
    module: nn.Module,
    stage: Stage,
    group: Team,
    tokens: SequenceSlices | None = None,
    shared: Collection[str] = (),
    pairs: ExpertPairs | None = None,
) -> None:
    """Hooks the collectives of a TP group around the modules of a section whose parameters are cut.

    Args:
        model: has the rules.
        section: its name: "embed", "blocks.N" or "head".
        module: the section with the parameters of this member.
        stage: of the group alone; units are apportioned by its shares, experts as it places them.
        group: the TP group.
        tokens: the slices of tokens that blocks are on; None: they are on all tokens.
        shared: blocks whose experts lanes share, see `ExpertExchange`.
        pairs: notes the pairs of rows and experts of each pass; None: nothing does.

    Raises:
        ModelError: a rule that cannot be carried out on this stage, or on this kind of module.
    """
    hooks: _Hooks = _Hooks(model, section, stage, group)
    if tokens is not None and section.startswith("blocks."):
        hooks = _SlicedHooks(model, section, stage, group, tokens, module)
    for path, rules in model.owners(section).items():
        owner = module.get_submodule(path)
        column = next((rule for rule in rules.values() if isinstance(rule, Column)), None)
        if column is not None:
            hooks.column(path, owner, column)
        row = next((rule for rule in rules.values() if isinstance(rule, Row)), None)
        if row is not None:
            hooks.row(path, owner, row)
        experts = next((rule for rule in rules.values() if isinstance(rule, Experts)), None)
        if experts is not None and section not in shared:
            hooks.experts(path, owner, experts, pairs)
    hooks.watch(module)
    if tokens is not None and section == "embed":
        module.register_forward_hook(lambda _, args, output: tokens.leaving_embed(single(output)))
    if tokens is not None and section == "head":
        module.register_forward_pre_hook(lambda _, args: (tokens.entering_head(single(args[0])), *args[1:]))


class _Hooks:
    """Registers the hooks of one section on one member of a TP group."""

    def __init__(self, model: Model, section: str, stage: Stage, group: Team) -> None:
        self._model, self._section, self._stage, self._group = model, section, stage, group
        self._shares = stage.shares
        self._leaves = Redistribution(group, terms(group), whole(group))
        self._entering = _Entering(group)

    def watch(self, module: nn.Module) -> None:
        """Of the section itself."""
        module.__dict__["entering"] = self._entering  # for `compiled_blocks`
        module.register_forward_pre_hook(self._entering.clear)
        # Not by always_call: torch.compile would make a graph of several sections for their hooks' ids alone.
        module.register_forward_hook(self._entering.clear)

    def enter(self, path: str, owner: nn.Module) -> None:
        """Of a module, `path` in the section, that takes the full input."""
        owner.register_forward_pre_hook(self._entering, with_kwargs=True)

    def leave(self, path: str) -> Callable[[Tensor], Tensor]:
        """Returns the function that makes an output of the terms of a module, `path` in the section."""
        return self._leaves

    def column(self, path: str, owner: nn.Module, rule: Column) -> None:
        """Of a module, `path` in the section, whose outputs are cut."""
        group = self._group
        if isinstance(owner, nn.MultiheadAttention):
            self_attention(f"{self._section}.{path}", owner)
        if not isinstance(owner, nn.Embedding):  # whose input has no gradient
            self.enter(path, owner)
        repeated = repeats(self._model, rule.units, self._shares, group.rank)
        if repeated is not None:
            if rule.parts > 1:
                raise ModelError(
                    f"{self._section}.{path}: {rule.units} follow other units and cannot be fused parts"
                )
            count = len(unit_range(self._model.spec, rule.units, self._shares, group.rank))
            index = put(torch.tensor(repeated), next(owner.parameters()).device)
            owner.register_forward_hook(partial(_repeat, count, index))
        if rule.gather:
            cut = slices(group, self._widths(path, rule.units))
            gathers = Redistribution(group, cut, whole(group, cut.shape[0]))
            owner.register_forward_hook(lambda _, args, output: gathers(output))

    def row(self, path: str, owner: nn.Module, rule: Row) -> None:
        """Of a module, `path` in the section, whose inputs are cut."""
        spec, group, leaves = self._model.spec, self._group, self.leave(path)
        if isinstance(owner, nn.Embedding):
            cut = next(p for p in spec.section(self._section) if p.name == f"{path}.weight".lstrip("."))
            box = member_box(spec, cut, self._shares, group.rank)
            vocab_parallel_embedding(owner, leaves, box.start[0], box.stop[0])
            return
        if rule.split:
            cut_input = slices(group, self._widths(path, rule.units))
            scatters = Redistribution(group, whole(group, cut_input.shape[0]), cut_input)
            owner.register_forward_pre_hook(lambda _, args: (scatters(args[0]), *args[1:]))
        if getattr(owner, "bias", None) is None:
            owner.register_forward_hook(lambda _, args, output: leaves(output))
        elif type(owner) in (nn.Linear, NonDynamicallyQuantizableLinear) or sides_of(owner) == (1, 0):
            # A method and no partial: torch.compile takes a graph for the next block that has one, too.
            owner.__dict__["leaves"] = leaves
            owner.forward = MethodType(_row_with_bias, owner)
        else:
            where = f"{self._section}.{path}".rstrip(".")
            raise ModelError(
                f"{where}: a bias of a {type(owner).__name__} cut in rows would be added by every member: use "
                "an nn.Linear, or no bias"
            )

    def experts(self, path: str, owner: nn.Module, rule: Experts, pairs: ExpertPairs | None) -> None:
        """Of a module, `path` in the section, of whose experts each member has some."""
        spec, block = self._model.spec, block_of(self._section)
        held = tuple(held_units(spec, rule.units, self._stage, i, block) for i in range(len(self._shares)))
        splits = self._stage.splits_of(block) if block is not None else ()
        slowdowns = self._stage.slowdowns if block is not None and self._stage.experts_of(block) else ()
        holders = ExpertHolders(held, splits, spec.units_of(rule.units).count, slowdowns)
        self.enter(path, owner)
        note = partial((pairs or ExpertPairs(spec)).note, self._section)
        owner.forward = held_experts(owner.forward, holders, self._group.rank, note)
        leaves = self.leave(path)
        owner.register_forward_hook(lambda _, args, output: leaves(output))

    def _widths(self, path: str, units: str) -> list[int]:
        """The length that each member has of the cut dimension of a module's parameter."""
        spec = self._model.spec
        cut, full = next(
            (p.cut, p.shape)
            for p in spec.section(self._section)
            if p.cut is not None and p.name.rpartition(".")[0] == path
        )
        size = full[cut.dim] // spec.units_of(units).count
        return [len(unit_range(spec, units, self._shares, i)) * size for i in range(len(self._shares))]


class _SlicedHooks(_Hooks):
    """The same of a block that is on slices of the tokens."""

    def __init__(
        self,
        model: Model,
        section: str,
        stage: Stage,
        group: Team,
        tokens: SequenceSlices,
        module: nn.Module,
    ) -> None:
        super().__init__(model, section, stage, group)
        self._tokens, self._entrance = tokens, Entrance(tokens, section)
        self._regions = sequence_parallel.regions(model, section, module)
        for path in dict.fromkeys(self._regions.values()):
            if path not in self._regions:  # around Column modules; else it is one
                self._entrance.around(path, module.get_submodule(path))

    def watch(self, module: nn.Module) -> None:
        self._entrance.watch(module)
        sequence_parallel.tell_dropouts(module, self._tokens)

    def enter(self, path: str, owner: nn.Module) -> None:
        self._entrance.at(path, owner, self._regions[path])

    def leave(self, path: str) -> Callable[[Tensor], Tensor]:
        return partial(self._tokens.leaving, f"{self._section}.{path}".rstrip("."))


def _repeat(count: int, repeated: Tensor, module: nn.Module, args: object, output: Tensor) -> Tensor:
    """Gives each head its kv-head, where a cut left heads and kv-heads that do not divide."""
    return output.unflatten(-1, (count, -1)).index_select(-2, repeated).flatten(-2)


def _row_with_bias(owner: Any, x: Tensor) -> Tensor:
    term = F.linear(x, owner.weight) if isinstance(owner, nn.Linear) else x @ owner.weight
    return owner.leaves(term) + owner.bias
