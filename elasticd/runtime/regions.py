"""The regions of a section around which a TP group talks: hooks on the submodules that the model names."""

from __future__ import annotations

from elasticd_planner.rules import member_box
from torch import nn

from elasticd.runtime import tensor_parallel
from elasticd.runtime.groups import Group
from elasticd.runtime.model import Model


def attach(model: Model, section: str, module: nn.Module, shares: tuple[int, ...], group: Group) -> None:
    """Hooks `group` around `module`, a local `section` of the model; its members have these shares."""
    rules = {rule.name: rule for rule in model.spec.section(section)}
    names = {id(sub): path for path, sub in module.named_modules()}
    for submodule, kind in model.communicating(section, module):
        rule = rules.get(f"{names[id(submodule)]}.weight")
        boxes = [member_box(model.spec, rule, shares, i) for i in range(len(shares))] if rule else []
        tensor_parallel.attach(submodule, kind, group, boxes)
