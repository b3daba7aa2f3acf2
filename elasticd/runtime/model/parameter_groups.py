"""Parameter groups: which group the user's function puts each parameter of the model in, with which settings.

A device steps on slices of parameters: of other shapes than the modules' own, several of one parameter, or
none. A function that groups by what it sees (`p.dim() >= 2`, `p.numel()`, a rate divided by the width) would
form other groups of those than of the modules' parameters. So it is called twice: first with all parameters in
the shapes that the modules give them, without memory, which says the groups; then with the slices, which makes
the optimizer. Each slice then goes to the group of its parameter.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from elasticd_migration.local_state import KERNEL_SETTINGS
from torch import Tensor, nn

log = logging.getLogger(__name__)

#: Makes an optimizer of (name, parameter) pairs.
MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

#: What such a function is called with.
Named = list[tuple[str, nn.Parameter]]

#: Keys of a parameter group that are its members, no settings.
_MEMBERS = frozenset({"params", "param_names"})


class OptimizerError(ValueError):
    """The user's function returned no optimizer of the parameters that it was called with."""


@dataclass(frozen=True)
class ParameterGroups:
    """The groups that the user's function forms of the parameters that the modules have."""

    names: tuple[tuple[str, ...], ...]  #: of the parameters in each group
    settings: tuple[Mapping[str, Any], ...]  #: of each group, as the function gave them
    parameters: Mapping[str, Tensor]  #: all that the function was called with, by full name, without memory

    @classmethod
    def of(cls, make: MakeOptimizer, parameters: Mapping[str, Tensor]) -> ParameterGroups:
        """Calls the user's function with parameters that take no memory.

        Args:
            make: the user's function.
            parameters: tensors of the shapes and types of the model's trained parameters, by full name.

        Raises:
            OptimizerError: the function returned no optimizer, or one of a tensor that it was not called with.
        """
        parameters = {name: tensor.detach().to("meta") for name, tensor in parameters.items()}
        optimizer, named = _called(make, parameters, {})
        if not hasattr(optimizer, "param_groups"):
            raise OptimizerError(
                f"optimizer: its function returned a value of type {type(optimizer).__name__}: return the "
                "optimizer, as optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3) does"
            )
        name_of = {id(parameter): name for name, parameter in named}
        _refuse_foreign(optimizer, name_of)
        names = tuple(tuple(name_of[id(p)] for p in group["params"]) for group in optimizer.param_groups)
        return cls(names, tuple(_settings(group) for group in optimizer.param_groups), parameters)

    @cached_property
    def left_out(self) -> tuple[str, ...]:
        """The parameters in no group: nothing updates them."""
        grouped = {name for group in self.names for name in group}
        return tuple(name for name in self.parameters if name not in grouped)

    def optimizer(self, make: MakeOptimizer, slices: Named) -> torch.optim.Optimizer:
        """Makes the optimizer of the slices that a device steps on.

        Args:
            make: the user's function.
            slices: by full name of their parameters: all parameters, some by several slices, and those that
                others step on by one without elements.

        Returns:
            The function's optimizer, in these groups.
        """
        by_name: dict[str, list[nn.Parameter]] = {name: [] for name in self.parameters}
        for name, parameter in slices:
            by_name[name].append(parameter)
        optimizer, named = _called(make, self.parameters, by_name)
        groups, with_names = optimizer.param_groups, "param_names" in optimizer.param_groups[0]
        groups += [{} for _ in range(len(self.names) - len(groups))]
        del groups[len(self.names) :]
        for group, names, settings in zip(groups, self.names, self.settings, strict=True):
            members = [(name, parameter) for name in names for parameter in by_name[name]]
            group["params"] = [parameter for _, parameter in members]
            if with_names:
                group["param_names"] = [name for name, _ in members]
            for key, value in settings.items():
                # A tensor may lie where the slices do, and a kernel is chosen for them.
                if key not in group or not (key in KERNEL_SETTINGS or isinstance(group[key], Tensor)):
                    group[key] = copy.deepcopy(value)
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        for _, parameter in named:
            if id(parameter) not in stepped:
                optimizer.state.pop(parameter, None)
        return optimizer


def _called(
    make: MakeOptimizer, parameters: Mapping[str, Tensor], slices: Mapping[str, Sequence[nn.Parameter]]
) -> tuple[torch.optim.Optimizer, Named]:
    """Calls the user's function with slices, and with stand-ins for the parameters that have no slice of any
    element: of their shape, and without memory.

    Returns:
        What it returned, and what it was called with.
    """
    held = {name: parts for name, parts in slices.items() if any(part.numel() for part in parts)}
    place = next((part.device for parts in held.values() for part in parts), torch.device("cpu"))

    def call(stand_in: Callable[[Tensor], Tensor]) -> tuple[torch.optim.Optimizer, Named]:
        named = [
            (name, part)
            for name, tensor in parameters.items()
            for part in held.get(name) or [nn.Parameter(stand_in(tensor))]
        ]
        return make(list(named)), named

    try:
        return call(lambda tensor: tensor)
    except Exception:
        log.debug("the optimizer's function raised for parameters on the meta device", exc_info=True)
    # It looks at values, or at where they lie: these have both, in the memory of one element.
    return call(lambda tensor: torch.zeros((), dtype=tensor.dtype, device=place).expand(tensor.shape))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _MEMBERS}


def _refuse_foreign(optimizer: torch.optim.Optimizer, name_of: Mapping[int, str]) -> None:
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in name_of]
    if not foreign:
        return
    kind, shape = type(optimizer).__name__, tuple(foreign[0].shape)
    count = f"{len(foreign)} tensors" if len(foreign) > 1 else "a tensor"
    such = "one of shape" if len(foreign) > 1 else "of shape"
    raise OptimizerError(
        f"optimizer: its {kind} holds {count} that its function was not called with, {such} {shape}: nothing "
        "reduces, saves or moves them. Make it of the function's argument alone, optimizer=lambda named: "
        f"torch.optim.{kind}(named, ...), and put parameters of the loss into the model's head"
    )
