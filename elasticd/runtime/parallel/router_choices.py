"""The experts that routers chose on one device in a step, as a digest that members of a TP group compare.

Each member of a TP group runs the routers itself. Devices that add numbers up in unlike orders may choose
otherwise where scores are almost equal, and a row would get parts of unlike experts. The vote compares the
members' digests, so that such a step is dropped by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

#: Odd factors below 2 ** 62: products of whole numbers on a device wrap around.
_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
#: A digest is read as a double.
_MASK = (1 << 52) - 1


class RouterChoices:
    """Adds up what the routers of a module chose on this device since `begin`."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.int64, device=device)
        self._watches = False  # any module

    def begin(self) -> None:
        """Begins a step."""
        if self._watches:
            self._sum.zero_()

    @property
    def digest(self) -> Tensor | float:
        """A whole number below 2 ** 52, perhaps still on the device; 0 without a choice."""
        return self._sum & _MASK if self._watches else 0.0

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

    def watch(self, owner: nn.Module) -> None:
        """Notes the choices of each call of a module that is called with rows, their experts and weights."""
        names = tuple(inspect.signature(owner.forward).parameters)
        if len(names) < 2:
            return
        self._watches, name = True, names[1]

        def noting(_: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            index = args[1] if len(args) > 1 else kwargs.get(name)
            if isinstance(index, Tensor) and index.dim() == 2 and not index.dtype.is_floating_point:
                self.note(index)

        owner.register_forward_pre_hook(noting, with_kwargs=True)
