"""Draws of one thread from torch's generators, seen without asking the generators for their states."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elasticd.runtime.accelerator import generators


class TorchDraws(TorchDispatchMode):
    """Sees whether this thread draws from a generator of torch that the process shares."""

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls an operation."""
        named = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _drops(func, args, named):
            own = next((each for each in named.values() if isinstance(each, torch.Generator)), None)
            self.drew |= own is None or _address(own) in map(_address, generators())
        return func(*args, **named)


def _drops(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """False for an operation that draws for its dropout alone, as attention does, and is called without one."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            rate = args[place] if place < len(args) else named.get("dropout_p", argument.default_value)
            return bool(rate)
    return True


def _address(generator: torch.Generator) -> object:
    """The address of the generator: an operation is called with another Python object of the same one."""
    return getattr(generator, "_cdata", None)
