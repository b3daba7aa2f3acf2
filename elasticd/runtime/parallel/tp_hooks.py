"""Where a TP group talks: hooks on the local modules whose parameters are cut, as the model's rules say.

A Column module takes the whole input, whose gradient the members sum: once for all modules that take the same
tensor. A Row module gives a term of its output, which they sum; its bias is added after that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from elasticd_planner.spec.model import member_box, unit_range
from torch import Tensor, nn

from elasticd.runtime.comm.groups import Group
from elasticd.runtime.model.local_model import repeats
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.tp_rules import Column, Row, sides_of
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel.tensor_parallel import (
    gather_out,
    look_up_own,
    split_in,
    sum_out,
    summing_gradient,
)


class _Entering:
    """Tensors that went into cut modules of a section in this forward pass, and what they became: one
    all-reduce of the gradient for each, however many modules take it."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._entered: dict[int, tuple[Tensor, Tensor]] = {}

    def clear(self, *_: object) -> None:
        self._entered.clear()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Tensor):
            return (self._enter(args[0]), *args[1:]), kwargs
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                return args, kwargs | {name: self._enter(value)}
        raise ModelError(f"a cut {type(module).__name__} was called without a tensor")

    def _enter(self, x: Tensor) -> Tensor:
        found = self._entered.get(id(x))
        if found is None:
            found = self._entered[id(x)] = (x, summing_gradient(x, self._group))
        return found[1]


def attach(model: Model, section: str, module: nn.Module, shares: tuple[int, ...], group: Group) -> None:
    """Hooks `group` around what is cut of `module`, a local `section` of the model; its members have these
    shares."""
    entering = _Entering(group)
    for path, rules in model.owners(section).items():
        owner = module.get_submodule(path)
        where = f"{section}.{path}" if path else section
        for rule in rules.values():
            if isinstance(rule, Column):
                _column(model, section, path, owner, rule, shares, group, entering)
                break
        row = next((rule for rule in rules.values() if isinstance(rule, Row)), None)
        if row is not None:
            _row(model, section, path, owner, row, where, shares, group)
    module.register_forward_pre_hook(entering.clear)
    module.register_forward_hook(entering.clear, always_call=True)


def _column(
    model: Model,
    section: str,
    path: str,
    owner: nn.Module,
    rule: Column,
    shares: tuple[int, ...],
    group: Group,
    entering: _Entering,
) -> None:
    if not isinstance(owner, nn.Embedding):  # whose input has no gradient
        owner.register_forward_pre_hook(entering, with_kwargs=True)
    repeated = repeats(model, rule.units, shares, group.rank)
    if repeated is not None:
        if rule.parts > 1:
            raise ModelError(f"{section}.{path}: {rule.units} follow other units and cannot be fused parts")
        count = len(unit_range(model.spec, rule.units, shares, group.rank))
        owner.register_forward_hook(partial(_repeat, count, repeated))
    if rule.gather:
        kind = model.spec.units_of(rule.units)
        widths = _widths(model, rule.units, shares, _cut_of(model, section, path) // kind.count)
        owner.register_forward_hook(lambda _, args, output: gather_out(output, group, widths))


def _repeat(count: int, repeated: list[int], module: nn.Module, args: object, output: Tensor) -> Tensor:
    """Gives each head its kv-head, where a cut left heads and kv-heads that do not divide."""
    units = output.unflatten(-1, (count, -1))
    return units[..., repeated, :].flatten(-2)


def _row(
    model: Model,
    section: str,
    path: str,
    owner: nn.Module,
    rule: Row,
    where: str,
    shares: tuple[int, ...],
    group: Group,
) -> None:
    if isinstance(owner, nn.Embedding):
        cut = next(p for p in model.spec.section(section) if p.name == f"{path}.weight".lstrip("."))
        box = member_box(model.spec, cut, shares, group.rank)
        look_up_own(owner, group, box.start[0], box.stop[0])
        return
    if rule.split:
        kind = model.spec.units_of(rule.units)
        widths = _widths(model, rule.units, shares, _cut_of(model, section, path) // kind.count)
        owner.register_forward_pre_hook(lambda _, args: (split_in(args[0], group, widths), *args[1:]))
    if getattr(owner, "bias", None) is None:
        owner.register_forward_hook(lambda _, args, output: sum_out(output, group))
    elif type(owner) is nn.Linear:
        owner.forward = partial(_row_with_bias, owner, group)  # type: ignore[method-assign]
    elif sides_of(owner) == (1, 0):
        owner.forward = partial(_transposed_row_with_bias, owner, group)
    else:
        raise ModelError(
            f"{where}: a bias of a {type(owner).__name__} cut in rows would be added by every member: use an "
            "nn.Linear, or no bias"
        )


def _row_with_bias(owner: nn.Linear, group: Group, x: Tensor) -> Tensor:
    return sum_out(F.linear(x, owner.weight), group) + owner.bias


def _transposed_row_with_bias(owner: Any, group: Group, x: Tensor) -> Tensor:
    return sum_out(x @ owner.weight, group) + owner.bias


def _cut_of(model: Model, section: str, path: str) -> int:
    """How long the cut dimension of a module's parameter is in the whole model."""
    whole = next(
        p for p in model.spec.section(section) if p.cut is not None and p.name.rpartition(".")[0] == path
    )
    assert whole.cut is not None
    return whole.shape[whole.cut.dim]


def _widths(model: Model, units: str, shares: tuple[int, ...], size: int) -> list[int]:
    """What each member has of a cut dimension whose units are of this size."""
    return [len(unit_range(model.spec, units, shares, i)) * size for i in range(len(shares))]
