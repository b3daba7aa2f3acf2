"""Communication inside a TP group, as functions that autograd knows.

Column-parallel input: identity forward, all-reduce backward. Row-parallel output: all-reduce forward,
identity backward (Shoeybi et al., Megatron-LM, 2019). Any cut is legal, so a gather is of unequal widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from elasticd.runtime.comm.groups import Group


class _CopyIn(torch.autograd.Function):
    """A whole input used by all members: each holds a term of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grad.contiguous().clone()), None


class _SumOut(torch.autograd.Function):
    """Each member holds a term of the output; the gradient of the sum is that of each term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.all_reduce(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherOut(torch.autograd.Function):
    """Each member holds a slice of the last dimension. All go on with the same whole output, so the gradient
    of a slice is the slice of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, widths: list[int]) -> Tensor:
        ctx.slice = (sum(widths[: group.rank]), x.shape[-1])
        return _together(x, group, widths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(-1, *ctx.slice).contiguous(), None, None


class _SplitIn(torch.autograd.Function):
    """Each member takes a slice of the last dimension of what all have; they put its gradient together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, widths: list[int]) -> Tensor:
        ctx.group, ctx.widths = group, widths
        return x.narrow(-1, sum(widths[: group.rank]), widths[group.rank]).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _together(grad, ctx.group, ctx.widths), None, None


def _together(part: Tensor, group: Group, widths: list[int]) -> Tensor:
    """The members' slices of the last dimension, of these widths, as one."""
    padded = nn.functional.pad(part, (0, max(widths) - part.shape[-1])).contiguous()
    parts = group.all_gather(padded)
    return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)


def summing_gradient(x: Tensor, group: Group) -> Tensor:
    """x as it is; the members' gradients of it are summed."""
    return _CopyIn.apply(x, group)


def sum_out(x: Tensor, group: Group) -> Tensor:
    """The sum of the members' terms."""
    return _SumOut.apply(x, group)


def gather_out(x: Tensor, group: Group, widths: list[int]) -> Tensor:
    """The members' slices of the last dimension, put together."""
    return _GatherOut.apply(x, group, widths)


def split_in(x: Tensor, group: Group, widths: list[int]) -> Tensor:
    """The member's slice of the last dimension of what all members have whole."""
    return _SplitIn.apply(x, group, widths)


def look_up_own(module: nn.Embedding, group: Group, start: int, stop: int) -> None:
    """Looks up the rows [start, stop) that are here; others give zero, and the members' outputs add up."""
    here: list[Tensor] = []
    if module.padding_idx is not None:
        held = start <= module.padding_idx < stop
        module.padding_idx = module.padding_idx - start if held else None

    def shift(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids = args[0]
        here[:] = [(ids >= start) & (ids < stop)]
        return ((ids - start).clamp(0, stop - start - 1), *args[1:])

    def add(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return sum_out(output * here[0].unsqueeze(-1), group)

    module.register_forward_pre_hook(shift)
    module.register_forward_hook(add)
