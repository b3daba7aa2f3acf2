"""Tensors of a TP group from one layout to another, and their gradients back, as one autograd function.

The collectives follow from the layouts (`elasticd_planner.layout.resolve`). With Megatron's names (Shoeybi et
al., Megatron-LM, 2019), of tensors that are cut along one dimension or not at all:

| from | to | forward | backward | Megatron |
|---|---|---|---|---|
| whole | whole, each member uses it in its own way | – | all-reduce | `copy_to_tensor_model_parallel_region` |
| terms of a sum | whole | all-reduce | – | `reduce_from_tensor_model_parallel_region` |
| slices | whole | all-gather | slice | `gather_from_tensor_model_parallel_region` |
| whole | slices | slice | all-gather | `scatter_to_tensor_model_parallel_region` |
| slices | whole, each member uses it in its own way | all-gather | reduce-scatter | sequence parallelism |
| terms of a sum | slices | reduce-scatter | all-gather | sequence parallelism |

Members may have unequal slices, and empty ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from elasticd_planner.layout import activations
from elasticd_planner.layout.resolve import Cell, Communication, dual, resolve
from elasticd_planner.spec.box import Box, TensorLayout
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from elasticd.runtime.comm.communicators import Team
from elasticd.runtime.model.graph_breaks import breaks_graphs


def whole(group: Team, length: int = 1) -> TensorLayout:
    """All members have all of it; `length` matters where it becomes slices, or has been some."""
    return activations.whole(group.members, length)


def terms(group: Team, length: int = 1) -> TensorLayout:
    """Each member has a term of the sum, of the full length."""
    return activations.terms(group.members, length)


def slices(group: Team, widths: Sequence[int]) -> TensorLayout:
    """Members have consecutive slices, of these widths by rank."""
    return activations.slices(group.members, widths)


class Redistribution:
    """Takes a member's part of a tensor in one layout, and gives its part in another."""

    def __init__(
        self, group: Team, source: TensorLayout, target: TensorLayout, *, dim: int = -1, add: bool = False
    ) -> None:
        """
        Args:
            group: its members have the tensor.
            source: how they have it.
            target: how they are to have it.
            dim: the dimension that the layouts are of; they leave the others whole.
            add: members with one value of the target use it in ways of their own, so that its gradient is the
                sum of theirs; else they compute the same with it.
        """
        self.forward = _Program(group, source, target, dim)
        self.backward = _Program(group, dual(target, add=add), dual(source), dim)
        self.dim, self.number = dim, next(_numbers)
        self.token = torch.tensor(self.number, device="cpu")
        _by_number[self.number] = self

    def __call__(self, x: Tensor) -> Tensor:
        """
        Args:
            x: this member's part in the source's layout.

        Returns:
            Its part in the target's, differentiable.
        """
        return passed(x, self)


class Way(Protocol):
    """The operations of a member in the forward pass and in the backward pass."""

    @property
    def forward(self) -> Callable[[Tensor], Tensor]:
        """From the source's layout to the target's."""

    @property
    def backward(self) -> Callable[[Tensor], Tensor]:
        """The adjoint."""


def passed(x: Tensor, way: Way) -> Tensor:
    """A member's part of a tensor taken along a way, differentiable."""
    moved: Tensor
    if torch.compiler.is_dynamo_compiling() and _in_graphs and isinstance(way, Redistribution):
        there, back = way.forward, way.backward
        moved = _InGraph.apply(x, way.token, way.dim, there.nothing, there.length, back.nothing)
        return moved
    return _passed(x, way)


@breaks_graphs
def _passed(x: Tensor, way: Way) -> Tensor:
    moved: Tensor = _Redistribute.apply(x, way)
    return moved


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return way.forward(x)

    @staticmethod
    @once_differentiable  # autograd does not see what the backward pass communicates
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.way.backward(grad), None


# -- as an operator in a graph of torch.compile --------------------------------------------------------------

_numbers = count()
_by_number: WeakValueDictionary[int, Redistribution] = WeakValueDictionary()
#: Whether torch keeps the order of operators that communicate. Else they break a graph.
_in_graphs = False


def into_graphs() -> None:
    """Makes the operator that stands for a redistribution in a graph of torch.compile, if this torch can keep
    the order of such operators: all members of a group are to communicate in one order."""
    global _in_graphs
    library: Any = torch.library
    if _in_graphs or not hasattr(getattr(library, "CustomOpDef", None), "register_effect"):
        return
    # `way` is the number of a redistribution, in a tensor: a number of Python's would be a constant of the
    # graph, and each layer, and each plan, would have a graph of its own.
    schema = "(Tensor x, Tensor way, int dim, SymInt length, bool back) -> Tensor"
    made = library.custom_op("elasticd::redistribute", _operator, mutates_args=(), schema=schema)
    made.register_fake(_operators_shape)
    made.register_effect(library.EffectType.ORDERED)
    _in_graphs = True


def _operator(x: Tensor, way: Tensor, dim: int, length: int, back: bool) -> Tensor:
    found = _by_number[int(way)]
    moved = (found.backward if back else found.forward)(x)
    return moved.clone() if moved.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else moved


def _operators_shape(x: Tensor, way: Tensor, dim: int, length: int, back: bool) -> Tensor:
    shape = list(x.shape)
    if length >= 0:
        shape[dim] = length
    return x.new_empty(shape)


class _InGraph(torch.autograd.Function):
    """`_Redistribute` as torch.compile traces it. Where nothing happens on the way there is no operator."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, way: Tensor, dim: int, nothing: bool, length: int, nothing_back: bool
    ) -> Tensor:
        ctx.save_for_backward(way)
        ctx.dim, ctx.nothing, ctx.length = dim, nothing_back, -1 if length < 0 else x.shape[dim]
        if nothing:
            # No view: where a graph ends here, torch makes such an output anew of `x`, past this function.
            return x.clone()
        moved: Tensor = torch.ops.elasticd.redistribute(x, way, dim, length, False)
        return moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (way,) = ctx.saved_tensors
        if not ctx.nothing:
            grad = torch.ops.elasticd.redistribute(grad, way, ctx.dim, ctx.length, True)
        return grad, None, None, None, None, None


class _Program:
    """The operations by which one member gets from one layout to another.

    `nothing`: that is nothing at all. `length`: of the dimension then; -1: as before.
    """

    def __init__(self, group: Team, source: TensorLayout, target: TensorLayout, dim: int) -> None:
        self._group, self._dim = group, dim
        (self._from,), (self._to,) = source.of(group.me), target.of(group.me)
        self._steps = resolve(source, target, group.members, of=group.me)
        self.length = -1 if self._from == self._to else self._to.size
        self.nothing = self.length < 0 and all(step.operation == "keep" for step in self._steps)
        for step in self._steps:
            replicas = step.operation == "all_reduce" and any(
                cell.sources != step.devices for cell in step.cells
            )
            some = step.operation in ("send", "sum") and len(step.devices) < group.size
            if replicas or some or not hasattr(self, f"_{step.operation}"):
                raise ValueError(f"{step.operation} over {', '.join(step.devices)} is not carried out here")

    def __call__(self, x: Tensor) -> Tensor:
        parts: dict[int, Tensor] = {}
        for step in self._steps:
            parts |= getattr(self, f"_{step.operation}")(step, x)
        if not parts:  # a member without units
            return _copied(x.narrow(self._dim, 0, 0))
        found = [parts[start] for start in sorted(parts)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=self._dim)

    def _keep(self, step: Communication, x: Tensor) -> dict[int, Tensor]:
        if self._from == self._to:
            return {self._to.start[0]: x.view_as(x)}
        return {cell.box.start[0]: _copied(self._part(x, cell.box)) for cell in step.cells}

    def _all_reduce(self, step: Communication, x: Tensor) -> dict[int, Tensor]:
        return self._placed(step.cells, self._group.all_reduce(self._joined(step.cells, x)))

    def _reduce_scatter(self, step: Communication, x: Tensor) -> dict[int, Tensor]:
        """Gloo cannot scatter sums unevenly: all get them all, and each takes its own."""
        sums = self._placed(step.cells, self._group.all_reduce(self._joined(step.cells, x)))
        mine = [cell for cell in step.cells if self._group.me in cell.needers]
        return {cell.box.start[0]: _copied(sums[cell.box.start[0]]) for cell in mine}

    _sum = _reduce_scatter  # where one member alone needs something

    def _all_gather(self, step: Communication, x: Tensor) -> dict[int, Tensor]:
        """Padded to the widest, since all members send as much."""
        by_member = {
            device: [cell for cell in step.cells if cell.sources == (device,)] for device in self._group.members
        }
        widths = {device: sum(cell.box.size for cell in cells) for device, cells in by_member.items()}
        mine = [self._part(x, cell.box) for cell in by_member[self._group.me]]
        shape = list(x.shape)
        shape[self._dim] = max(widths.values()) - widths[self._group.me]
        if shape[self._dim]:
            mine.append(x.new_zeros(shape))
        padded = mine[0].contiguous() if len(mine) == 1 else torch.cat(mine, self._dim)
        parts: dict[int, Tensor] = {}
        for device, came in zip(self._group.members, self._group.all_gather(padded), strict=True):
            if widths[device]:
                parts |= self._placed(by_member[device], came.narrow(self._dim, 0, widths[device]))
        return parts

    _send = _all_gather  # where one member alone has something

    def _part(self, x: Tensor, box: Box) -> Tensor:
        return x.narrow(self._dim, box.start[0] - self._from.start[0], box.size)

    def _joined(self, cells: Sequence[Cell], x: Tensor) -> Tensor:
        """The part of some cells that this member has, in memory of its own."""
        if len(cells) == 1 and cells[0].box == self._from:
            return x.contiguous().clone()
        return torch.cat([self._part(x, cell.box) for cell in cells], self._dim)

    def _placed(self, cells: Sequence[Cell], joined: Tensor) -> dict[int, Tensor]:
        parts = joined.split([cell.box.size for cell in cells], self._dim) if len(cells) > 1 else [joined]
        return {cell.box.start[0]: part for cell, part in zip(cells, parts, strict=True)}


def _copied(part: Tensor) -> Tensor:
    """In memory of its own, so that it keeps nothing else alive."""
    return part.clone(memory_format=torch.contiguous_format)


def vocab_parallel_embedding(
    module: nn.Embedding, leave: Callable[[Tensor], Tensor], start: int, stop: int
) -> None:
    """Makes an embedding look up the rows that this member holds. Ids of other members' rows give zeros here.

    Args:
        module: the embedding, with the local rows [stop - start, width]. Hooks are registered on it, and its
            `padding_idx` is counted from `start`.
        leave: makes the members' terms of the output whole.
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
        return leave(output * here[0].unsqueeze(-1))

    module.register_forward_pre_hook(shift)
    module.register_forward_hook(add)
