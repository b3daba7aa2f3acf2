"""The experts that routers chose on one device in a step: rows of each, and a digest that a TP group compares.

Each member of a TP group runs the routers itself. Devices that add numbers up in unlike orders may choose
otherwise where scores are almost equal, and a row would get parts of unlike experts. The vote compares the
members' digests, so that such a step is dropped by name.

Rows are those of passes that gradients come from: a block that makes its activations again counts once, and an
evaluation does not count.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from elasticd_planner.spec.model import block_of
from torch import Tensor, nn

from elasticd.runtime.model.model import Model
from elasticd.runtime.model.tp_rules import Experts, takes_rows

#: Odd factors below 2 ** 62: products of whole numbers on a device wrap around.
_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
#: A digest is read as a double.
_MASK = (1 << 52) - 1


def counts_of(model: Model) -> dict[int, int]:
    """The number of experts of each block that has rules for some."""
    found = {}
    for section in model.sections:
        counts = [count for _, count in _stacked(model, section)]
        if counts and (block := block_of(section)) is not None:
            found[block] = max(counts)
    return found


def _stacked(model: Model, section: str) -> Iterator[tuple[str, int]]:
    """The modules of a section with rules that are called with rows, their experts and weights, and the number
    of experts of each."""
    shapes = {parameter.name: parameter.shape for parameter in model.spec.section(section)}
    for path, rules in model.owners(section).items():
        if not takes_rows(model.sections[section].get_submodule(path)):
            continue
        for leaf, rule in rules.items():
            shape = shapes[f"{path}.{leaf}".lstrip(".")]
            if isinstance(rule, Experts) or len(shape) > 2:  # [experts, ...]
                yield path, shape[0]
                break


class RouterChoices:
    """Adds up what the routers of a module chose on this device since `begin`."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.int64, device=device)
        self._device, self._compares = device, False
        self._rows: dict[str, Tensor] = {}

    @property
    def rows(self) -> Mapping[str, Tensor]:
        """By section the rows that went to each expert [experts], perhaps still on the device. Several modules
        of experts in a section are placed alike, and counted together."""
        return self._rows

    def begin(self) -> None:
        """Begins a step."""
        if self._compares:
            self._sum.zero_()
        for rows in self._rows.values():
            rows.zero_()

    def attach(self, model: Model, section: str, module: nn.Module, *, compares: bool) -> None:
        """Notes the choices of the routers of a section. Call it before experts get another `forward`: that
        of the user names the arguments.

        Args:
            model: has the rules.
            section: its name.
            module: it, on this device.
            compares: other members run the same routers.
        """
        counts = dict(_stacked(model, section))
        if not counts:
            return
        rows = self._rows[section] = torch.zeros(max(counts.values()), dtype=torch.int64, device=self._device)
        self._compares |= compares
        for path in counts:
            self._watch(module.get_submodule(path), rows)

    @property
    def digest(self) -> Tensor | float:
        """A whole number below 2 ** 52, perhaps still on the device; 0 without a choice."""
        return self._sum & _MASK if self._compares else 0.0

    @torch.no_grad()
    def note(self, index: Tensor) -> None:
        """Adds the choices of a pass through a module with experts.

        Args:
            index: the experts of each row [rows, k], in any order.
        """
        mixed = (index.long() + 1) * _FACTORS[0]
        mixed = (mixed ^ (mixed >> 29)) * _FACTORS[1]
        places = torch.arange(1, 2 * len(index) + 1, 2, device=index.device)
        self._sum.mul_(_FACTORS[2]).add_((mixed.sum(-1) * places).sum())

    def _watch(self, owner: nn.Module, rows: Tensor) -> None:
        name = tuple(inspect.signature(owner.forward).parameters)[1]

        def noting(_: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            index = args[1] if len(args) > 1 else kwargs.get(name)
            if isinstance(index, Tensor) and index.dim() == 2 and not index.dtype.is_floating_point:
                if self._compares:
                    self.note(index)
                if torch.is_grad_enabled():
                    _count(rows, index)

        owner.register_forward_pre_hook(noting, with_kwargs=True)


@torch.no_grad()
def _count(rows: Tensor, index: Tensor) -> None:
    """Adds the rows of a pass to those of each expert [experts]; `index` may name none, as -1."""
    flat = index.flatten().long()
    known = (flat >= 0) & (flat < len(rows))
    rows.scatter_add_(0, flat.clamp(0, len(rows) - 1), known.long())
