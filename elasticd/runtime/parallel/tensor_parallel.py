"""The collectives of a TP group as autograd functions, by Megatron's names (Shoeybi et al., Megatron-LM, 2019).

| function | forward | backward | stands before or after |
|---|---|---|---|
| `copy_to_tp_region` | identity | all-reduce | a column-parallel module |
| `reduce_from_tp_region` | all-reduce | identity | a row-parallel module |
| `gather_from_tp_region` | all-gather | slice | a column-parallel module whose full output is wanted |
| `scatter_to_tp_region` | slice | all-gather | a row-parallel module whose full input is there |

Members of a group may have unequal shares, so all-gathers pad slices to the widest one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from elasticd.runtime.comm.groups import Group


class _CopyToTpRegion(torch.autograd.Function):
    """All members use the full input, so that each holds a term of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grad.contiguous().clone()), None


class _ReduceFromTpRegion(torch.autograd.Function):
    """Each member holds a term of the output; the gradient of the sum is that of each term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.all_reduce(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFromTpRegion(torch.autograd.Function):
    """Each member holds a slice of the last dimension. All continue with the same full output, so the gradient
    of a slice is the slice of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, widths: list[int]) -> Tensor:
        ctx.slice = (sum(widths[: group.rank]), x.shape[-1])
        return _all_gather_slices(x, group, widths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(-1, *ctx.slice).contiguous(), None, None


class _ScatterToTpRegion(torch.autograd.Function):
    """All members have the full input, and each takes a slice of its last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, widths: list[int]) -> Tensor:
        ctx.group, ctx.widths = group, widths
        return x.narrow(-1, sum(widths[: group.rank]), widths[group.rank]).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather_slices(grad, ctx.group, ctx.widths), None, None


def _all_gather_slices(part: Tensor, group: Group, widths: list[int]) -> Tensor:
    """The full tensor of the members' slices of the last dimension.

    Args:
        part: this member's slice [..., widths[rank]].
        group: the TP group.
        widths: of each member's slice, by rank.
    """
    padded = nn.functional.pad(part, (0, max(widths) - part.shape[-1])).contiguous()
    parts = group.all_gather(padded)
    return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)


def copy_to_tp_region(x: Tensor, group: Group) -> Tensor:
    """Enters a column-parallel region.

    Args:
        x: the input [...], the same on all members.
        group: the TP group.

    Returns:
        `x`. Its gradient is the sum of the members' gradients.
    """
    return _CopyToTpRegion.apply(x, group)


def reduce_from_tp_region(x: Tensor, group: Group) -> Tensor:
    """Leaves a row-parallel region.

    Args:
        x: this member's term [...] of the output.
        group: the TP group.

    Returns:
        The sum of the members' terms [...], the same to the bit on all of them.
    """
    return _ReduceFromTpRegion.apply(x, group)


def gather_from_tp_region(x: Tensor, group: Group, widths: list[int]) -> Tensor:
    """Leaves a column-parallel region with the full output.

    Args:
        x: this member's slice [..., widths[rank]].
        group: the TP group.
        widths: of each member's slice, by rank.

    Returns:
        The full tensor [..., sum(widths)].
    """
    return _GatherFromTpRegion.apply(x, group, widths)


def scatter_to_tp_region(x: Tensor, group: Group, widths: list[int]) -> Tensor:
    """Enters a row-parallel region from a full input.

    Args:
        x: the full input [..., sum(widths)], the same on all members.
        group: the TP group.
        widths: of each member's slice, by rank.

    Returns:
        This member's slice [..., widths[rank]]. The gradient of `x` is all-gathered.
    """
    return _ScatterToTpRegion.apply(x, group, widths)


def vocab_parallel_embedding(module: nn.Embedding, group: Group, start: int, stop: int) -> None:
    """Makes an embedding look up the rows that this member holds; the members' outputs are all-reduced.

    Ids of other members' rows give zeros here.

    Args:
        module: the embedding, with the local rows [stop - start, width]. Hooks are registered on it, and its
            `padding_idx` is counted from `start`.
        group: the TP group.
        start: the first row of the full embedding that is here.
        stop: the row after the last one.
    """
    here: list[Tensor] = []
    if module.padding_idx is not None:
        held = start <= module.padding_idx < stop
        module.padding_idx = module.padding_idx - start if held else None

    def shift(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids = args[0]
        here[:] = [(ids >= start) & (ids < stop)]
        return ((ids - start).clamp(0, stop - start - 1), *args[1:])

    def add(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return reduce_from_tp_region(output * here[0].unsqueeze(-1), group)

    module.register_forward_pre_hook(shift)
    module.register_forward_hook(add)
