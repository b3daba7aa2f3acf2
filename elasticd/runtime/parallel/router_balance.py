"""Balance of routers: gradients of balance losses, and counts by which biases move, the same in any layout.

A balance loss is of each sample alone, or of a step, so that it depends on no micro-batch, stage or lane. It is

    E sum_i f_i P_i,   f_i: part of the sample's choices that are expert i, P_i: mean probability of expert i,

of each block, and its weight in the step's loss is the number of the sample's targets. That number is known
where the loss is, in the last stage; it goes back through the stages with the gradients. So the gradient of the
balance loss is added in the backward pass of the experts' weights, and a block that recomputes adds it once.

Of a step f is of the step before, whose counts are known on all devices, and P the mean over all rows of
this one. The step's loss is divided by its targets, so that a row has the weight T / N: targets over rows, of
the step before, too. All rows count alike, on whatever lanes a sample's are. The counts, and T / N behind them,
are a parameter of the block, whose gradient is the counts of this step. In the first step all experts count as
chosen alike, and the loss has no gradient.

Counts of a step for a bias are its gradient: experts x (choices of the expert) - (all choices), a whole number
whose sum over devices has the sign of what the expert has too many. Reduction, ZeRO and migration carry it as
they do any gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from elasticd.runtime.accelerator import put
from elasticd.runtime.model.balance import LENGTHS_UNKNOWN, Balance, BalancedBlock
from elasticd.runtime.model.graph_breaks import breaks_graphs
from elasticd.runtime.model.rng import ModelRng
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel.packed_row import PackedRow, current_row


class RouterBalance:
    """The balance of the routers on one device."""

    #: Of the samples whose backward pass runs, how many targets each has [samples]. None: it is no step's.
    targets: Tensor | None
    scale: float  #: the gradients are those of the loss times this

    def __init__(
        self,
        balance: Balance,
        blocks: Mapping[str, BalancedBlock],
        drawing: ModelRng,
        length: Callable[[int], int] | None,
    ) -> None:
        """
        Args:
            balance: of the job.
            blocks: of the model that it concerns, by section.
            drawing: knows the samples of a pass.
            length: tokens of a sample, where that is known before it is read.
        """
        self._balance, self._blocks, self._drawing, self._length = balance, blocks, drawing, length
        self._sum: Tensor | None = None
        self.targets, self.scale = None, 1.0

    @property
    def asks_targets(self) -> bool:
        """Returns True if samples' targets have to be known in backward passes."""
        return self._balance.loss is not None and self._balance.over == "sample"

    def begin(self, scale: float) -> None:
        """Begins a step."""
        self._sum, self.targets, self.scale = None, None, scale

    @property
    def value(self) -> float | Tensor:
        """The balance losses of the step's samples here, times their targets: of a mean block, without the
        factor. Perhaps still on the device."""
        routers = sum(block.router is not None for block in self._blocks.values())
        return 0.0 if self._sum is None else self._sum / routers

    def attach(self, section: str, module: nn.Module) -> None:
        """Has a section's experts note and balance the choices of their router. Call it before other hooks are
        registered."""
        block = self._blocks.get(section)
        if block is None:
            return
        counted = [
            module.get_parameter(name.removeprefix(section)[1:]) if name is not None else None
            for name in (block.bias, block.counts)
        ]
        experts = module.get_submodule(block.experts)
        choices = _Choices(self, experts, block.logits, *counted)
        if block.router is not None:
            module.get_submodule(block.router).register_forward_hook(choices.note)
        experts.register_forward_pre_hook(choices.balanced, with_kwargs=True)

    def samples_of(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The samples of the rows of a pass.

        Args:
            count: of the rows.
            device: where they lie.

        Returns:
            The place of each row's sample among those of the pass, -1 of a row that pads one; and the rows of
            each sample.

        Raises:
            ModelError: it is not known which rows pad a sample.
        """
        row = current_row(device)
        if row is not None:
            return row.sample_of_token, put(torch.tensor([piece.length for piece in row.pieces]), device)
        samples: Sequence[int] = self._drawing.samples or (0,)
        tokens = count // len(samples)
        if len(samples) == 1:
            return torch.zeros(count, dtype=torch.long, device=device), torch.full((1,), count, device=device)
        if self._length is None:
            raise ModelError(LENGTHS_UNKNOWN)
        sizes = torch.tensor([min(tokens, self._length(index)) for index in samples])
        place = torch.arange(len(samples))[:, None].expand(-1, tokens)
        place = place.where(torch.arange(tokens) < sizes[:, None], -1).reshape(-1)
        return put(place, device), put(sizes, device)

    def gradient(
        self, logits: Tensor, index: Tensor, place: Tensor, sizes: Tensor, before: Tensor | None
    ) -> Tensor:
        """The gradient of the balance losses of a block's samples, whose backward pass runs. Adds the losses
        to `value`.

        Args:
            logits: of all experts [rows, experts].
            index: the experts of each row [rows, k].
            place: the place of each row's sample; -1: of none.
            sizes: the rows of each sample.
            before: the counts of the step before; None: losses are of samples.

        Raises:
            ModelError: the router has other experts than were counted.
        """
        assert self._balance.loss is not None
        wide = torch.promote_types(logits.dtype, torch.float32)
        if before is not None:
            weights = _weights(before.to(wide), logits.shape[-1])
            of_row = weights * (place >= 0)[:, None]
        elif self.targets is None:
            return torch.zeros_like(logits)
        else:
            of_row = self._of_samples(self.targets.to(wide), index, place, sizes, logits.shape[-1])
        probabilities = logits.to(wide).softmax(-1)
        weighted = probabilities * of_row
        total = weighted.sum(-1, keepdim=True)
        added = total.double().sum()
        self._sum = added if self._sum is None else self._sum + added
        factor = self._balance.loss * self.scale
        return ((weighted - probabilities * total) * factor).to(logits.dtype)

    def _of_samples(self, targets: Tensor, index: Tensor, place: Tensor, sizes: Tensor, experts: int) -> Tensor:
        """The weight of each probability [rows, experts] in the losses of samples, see `gradient`."""
        inside = place >= 0
        choices = torch.zeros(len(sizes), experts, dtype=targets.dtype, device=index.device)
        flat = (place.clamp(0)[:, None] * experts + index.clamp(0, experts - 1)).reshape(-1)
        ones = (inside[:, None] & (index >= 0) & (index < experts)).to(targets.dtype).reshape(-1)
        choices = choices.view(-1).index_add(0, flat, ones).view_as(choices)
        weight = experts * targets / sizes.clamp(1)
        of_sample = choices / choices.sum(-1, keepdim=True).clamp(1) * weight[:, None]
        return of_sample[place.clamp(0)] * inside[:, None]


def first_counts(experts: int, dtype: torch.dtype) -> Tensor:
    """The counts before the first step: each expert was chosen as often, and each row had a target."""
    return torch.ones(experts + 1, dtype=dtype)


def counts_of_step(gradient: Tensor, targets: float, *, ends: bool) -> Tensor:
    """A part of the counts of a step: the choices of each expert, then targets over rows.

    Args:
        gradient: of this part [elements]: choices of experts, then rows.
        targets: of the step.
        ends: the part has the last element, rows.
    """
    if not ends:
        return gradient
    return torch.cat((gradient[:-1], targets / gradient[-1:].clamp(1)))


def _weights(before: Tensor, experts: int) -> Tensor:
    """The weight of each expert's probability in a row, by the counts of the step before."""
    if len(before) != experts + 1:
        raise ModelError(
            f'Balance(over="step") counts the choices of {len(before) - 1} experts, and a router gives logits '
            f"of {experts}: give a Balance(loss=) of each sample"
        )
    chosen, ratio = before[:-1], before[-1]
    return experts * ratio * chosen / chosen.sum().clamp(1)


class _Choices:
    """The choices of one block's router, between the call of the router and that of the experts."""

    def __init__(
        self,
        balance: RouterBalance,
        experts: nn.Module,
        logits: int,
        bias: nn.Parameter | None,
        counts: nn.Parameter | None,
    ) -> None:
        """
        Args:
            balance: of the device.
            experts: of the block.
            logits: the place of the logits in a router's output of several tensors.
            bias: moves by the choices; None: there is none.
            counts: of the step before; None: no loss is of them.
        """
        self._balance, self._place, self._bias, self._counts = balance, logits, bias, counts
        self._names = tuple(inspect.signature(experts.forward).parameters)[:3]
        self._logits: Tensor | None = None

    @breaks_graphs
    def note(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A hook of the router."""
        logits = output if isinstance(output, Tensor) else output[self._place]
        self._logits = logits.reshape(-1, logits.shape[-1])

    @breaks_graphs
    def balanced(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A hook of the experts: their weights bring the gradients of the balance back."""
        logits, self._logits = self._logits, None
        given = dict(zip(self._names, args, strict=False)) | kwargs
        _, index, weights = (given[name] for name in self._names)
        if not torch.is_grad_enabled() or not weights.requires_grad:
            return None
        samples = self._balance.samples_of(len(index), index.device)
        counted = self._bias, self._counts
        weights = _Balanced.apply(weights, logits, index, *samples, self._balance, *counted)
        if len(args) > 2:
            return (*args[:2], weights, *args[3:]), kwargs
        return args, {**kwargs, self._names[2]: weights}


class _Balanced(torch.autograd.Function):
    """The weights as they are; their backward pass adds the gradients of the balance."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        logits: Tensor | None,
        index: Tensor,
        place: Tensor,
        sizes: Tensor,
        balance: RouterBalance,
        bias: nn.Parameter | None,
        counts: nn.Parameter | None,
    ) -> Tensor:
        ctx.balance, ctx.bias, ctx.counts = balance, bias, counts
        ctx.save_for_backward(logits, index, place, sizes)
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, index, place, sizes = ctx.saved_tensors
        if ctx.bias is not None:
            of_each = choices_of(index, place, ctx.bias.numel(), ctx.bias.dtype)
            _add(ctx.bias, of_each * ctx.bias.numel() - (place >= 0).sum() * index.shape[1])
        if ctx.counts is not None:
            of_each = choices_of(index, place, ctx.counts.numel() - 1, ctx.counts.dtype)
            _add(ctx.counts, torch.cat((of_each, (place >= 0).sum()[None].to(of_each.dtype))))
        added = None
        if logits is not None:
            before = None if ctx.counts is None else ctx.counts.detach()
            added = ctx.balance.gradient(logits, index, place, sizes, before)
        return grad, added, None, None, None, None, None, None


def choices_of(index: Tensor, place: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """The choices of each expert in a pass [experts], whole numbers.

    Args:
        index: the experts of each row [rows, k].
        place: of each row its sample; -1: the row pads one, and is not counted.
        experts: how many there are.
        dtype: of a parameter that they are the gradient of.
    """
    inside = (place >= 0)[:, None].expand_as(index).reshape(-1)
    wide = inside.to(torch.promote_types(dtype, torch.float32))
    return wide.new_zeros(experts).index_add(0, index.reshape(-1).long().clamp(0, experts - 1), wide)


def _add(parameter: nn.Parameter, counts: Tensor) -> None:
    """Adds counts to the gradient of a parameter."""
    counts = counts.view_as(parameter)
    parameter.grad = counts if parameter.grad is None else parameter.grad + counts


def sample_of(output: Any, batch: Any, at: int, row: PackedRow | None) -> tuple[Any, Any]:
    """The part of an output and of its batch that is of one sample, for a loss.

    Args:
        output: of the head, [samples, tokens, ...] or named tensors of that shape.
        batch: what the loss is called with beside it.
        at: the place of the sample.
        row: the packed row, [1, tokens, ...], that the samples are in; None: they are padded.
    """
    first = output if isinstance(output, Tensor) else next(iter(output.values()))
    if row is None:
        samples = first.shape[0]
        return tuple(_cut(each, samples, 0, slice(at, at + 1)) for each in (output, batch))
    start = sum(piece.tokens for piece in row.pieces[:at])
    part = slice(start, start + row.pieces[at].tokens)
    return tuple(_cut(each, row.tokens, 1, part) for each in (output, batch))


def _cut(value: Any, size: int, dim: int, part: slice) -> Any:
    """A part of each tensor that is so long in a dimension; everything else as it is."""
    if isinstance(value, Tensor):
        return (
            value[(slice(None),) * dim + (part,)] if value.dim() > dim and value.shape[dim] == size else value
        )
    if isinstance(value, Mapping):
        return {key: _cut(each, size, dim, part) for key, each in value.items()}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_cut(each, size, dim, part) for each in value)
    if isinstance(value, list) and len(value) == size and dim == 0:
        return value[part]
    return value
