"""Double precision throughout: transformers computes norms, rotary tables and softmaxes in single precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class DoubleThroughout(TorchFunctionMode):
    """On this thread, every call of torch that asks for single precision gets double precision.

    A comparison of two ways to the same result is then exact to about 1e-15, where it is 1e-6 otherwise.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(_double, args), **{name: _double(each) for name, each in (kwargs or {}).items()})


def _double(given: Any) -> Any:
    return torch.float64 if given is torch.float32 else given
