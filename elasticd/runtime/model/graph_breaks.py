"""Functions that torch.compile is to call, not to trace: collectives, and what is keyed by the step.

Where a compiled module calls one, its graph is broken: what is before and what is after are graphs of their
own. `torch.compiler.disable` does it. It imports the compiler, which takes seconds, so here it is called once
there is something to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_functions: dict[str, Callable[..., Any]] = {}
_disabled: dict[str, Callable[..., Any]] = {}


def breaks_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator: a compiled module calls the function as it is."""
    name = f"{function.__module__}.{function.__qualname__}"
    _functions[name] = function

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            disabled: Callable[P, T] = _disabled[name] if name in _disabled else _made(name)
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def before_compiling() -> None:
    """Call it before anything is compiled, so that no graph is made anew once these functions are known."""
    for name in _functions:
        _made(name)


def _made(name: str) -> Callable[..., Any]:
    if name not in _disabled:
        _disabled[name] = torch.compiler.disable(_functions[name])
    return _disabled[name]
