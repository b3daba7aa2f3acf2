"""A bundle: what a section gives to the next one, a tensor or named tensors, and which of them have gradients.

A section gives one tensor or a mapping of named tensors. The next section is called with just that. So a block
returns all that later sections need: `{**bundle, "hidden": x}`. A name that it leaves out is gone after it.

Where sections are separated in the autograd graph, what one made enters the next as new leaves, and the
backward pass of the one begins with the gradients of those leaves. A single tensor always has a gradient. Of
named tensors those have one that require it where they were made. The others (integers, masks, floats of no
parameter) only ride along. A gradient that nobody gave is zero.

Between two stages at least one gradient goes back for each activation, as with a single tensor: it tells the
stage before that its activation has arrived. Where none is needed (all parameters up to here are frozen), that
of the first floating-point tensor goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

#: What a section gives to the next one.
Bundle = Tensor | Mapping[str, Tensor]
#: The gradients of a bundle: of a tensor, or by name. None: nobody gave one, or the tensor needs none.
Gradients = Tensor | None | Mapping[str, Tensor | None]

#: The most tensors of a bundle.
TENSORS = 16
#: The most bytes of a tensor's name, in UTF-8.
NAME = 40
#: The most dimensions of a tensor.
DIMS = 4
#: The types of tensors that can have a gradient, and those of the others. Every backend sends them.
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)


def tensors(bundle: Bundle) -> tuple[Tensor, ...]:
    """The tensors of a bundle in order."""
    return (bundle,) if isinstance(bundle, Tensor) else tuple(bundle.values())


def entering(bundle: Bundle) -> Bundle:
    """The bundle as new leaves of the autograd graph, for the next section: a tensor or a dict."""
    if isinstance(bundle, Tensor):
        return bundle.detach().requires_grad_()
    return {name: x.detach().requires_grad_(x.requires_grad) for name, x in bundle.items()}


def gradients(entered: Bundle) -> Gradients:
    """The gradients that the backward pass of a section left at the leaves that it entered with."""
    if isinstance(entered, Tensor):
        return entered.grad
    return {name: x.grad for name, x in entered.items()}


def backward(bundle: Bundle, given: Gradients) -> None:
    """The backward pass of the section that made a bundle, from the gradients that the next section gave. A
    tensor without one was left out there: what made it alone is not reached, as in one graph of both."""
    if isinstance(bundle, Tensor):
        assert given is None or isinstance(given, Tensor)
        if given is not None:
            torch.autograd.backward(bundle, given)
        return
    assert isinstance(given, Mapping)
    roots = {name: x for name, x in bundle.items() if x.requires_grad and given[name] is not None}
    if roots:
        torch.autograd.backward(tuple(roots.values()), tuple(given[name] for name in roots))


def zeros(bundle: Bundle) -> Gradients:
    """Gradients of a bundle that change none."""
    if isinstance(bundle, Tensor):
        return torch.zeros_like(bundle)
    return {name: torch.zeros_like(x) if x.requires_grad else None for name, x in bundle.items()}


def going_back(bundle: Bundle) -> dict[str, Tensor]:
    """The tensors of a bundle whose gradients go back to the stage before, by name; a single one has none."""
    if isinstance(bundle, Tensor):
        return {"": bundle}
    needing = {name: x for name, x in bundle.items() if x.requires_grad}
    if needing:
        return needing
    return {(name := _first(bundle)): bundle[name]}


def sizes(bundle: Bundle, *, of_item: bool = False) -> tuple[int, int]:
    """Samples and tokens of each, from the first floating-point tensor: [samples, tokens, ...].

    Args:
        bundle: an activation.
        of_item: it is one of an item, [1, ..., rows, width]: as an image in tiles has, and many encoders have
            for one image. Its sequences (tiles) and the rows of each are given then.
    """
    first = bundle if isinstance(bundle, Tensor) else bundle[_first(bundle)]
    if of_item and first.dim() > 2:
        return first.shape[:-2].numel(), first.shape[-2]
    return first.shape[0], first.shape[1]


def _first(bundle: Mapping[str, Tensor]) -> str:
    """The name of the first floating-point tensor."""
    return next(name for name, x in bundle.items() if x.is_floating_point())


def unfit(bundle: Mapping[str, object], *, passes: bool = True) -> str | None:
    """Why a mapping is no bundle, and the remedy; None: it is one.

    Args:
        bundle: what a section gave.
        passes: whether it passes to another section, which may be on another device. The head's does not.
    """
    for name, x in bundle.items():
        if not isinstance(name, str) or not isinstance(x, Tensor):
            return f"{name!r}, a {type(x).__name__}: a bundle has tensors by their names, nothing else"
    if not bundle:
        return "no tensor at all"
    return _unfit_to_pass({name: x for name, x in bundle.items() if isinstance(x, Tensor)}) if passes else None


def _unfit_to_pass(bundle: Mapping[str, Tensor]) -> str | None:
    if len(bundle) > TENSORS:
        return f"{len(bundle)} tensors: at most {TENSORS} pass between sections; join some"
    if next((x.dim() for x in bundle.values() if x.is_floating_point()), 0) < 2:
        return "no hidden states: its first floating-point tensor must be [samples, tokens, ...]"
    for name, x in bundle.items():
        if not name:
            return "a tensor whose name is empty: give it one"
        if len(name.encode()) > NAME:
            return f"a tensor named {name!r}: a name has at most {NAME} bytes"
        if reason := unfit_tensor(x, (*FLOATING, *OTHERS)):
            return f"{name!r}, {reason}"
    return None


def unfit_tensor(x: Tensor, types: Iterable[torch.dtype]) -> str | None:
    """Why a tensor cannot pass between stages; None: it can."""
    if x.dim() > DIMS:
        return f"a tensor of {x.dim()} dimensions: at most {DIMS} pass between sections"
    if x.dtype not in types:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in types)
        return f"a tensor of {x.dtype}: types that pass between sections are {known}"
    return None
