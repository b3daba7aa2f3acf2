"""A section as one member of a TP group holds it, and its passes. Nobody else is there to talk to.

The member's modules are those of a job, with the group's hooks around them; only the wire is left out: an
all-reduce gives back what it was given, a gather repeats it. So what is timed is computation, with the copies
that communication makes here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Stage
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.groups import Group
from elasticd.runtime.comm.running_group import Alone
from elasticd.runtime.model.bundle import Bundle, Gradients, backward, entering, tensors
from elasticd.runtime.model.local_model import LocalModel, local_model
from elasticd.runtime.model.model import Loss, Model
from elasticd.runtime.model.section_passes import SectionWatch, back_through, forth, separate
from elasticd.runtime.parallel import tp_hooks
from elasticd.runtime.reference.live_bytes import LiveBytes, storage_of

T = TypeVar("T")


def timed(accelerator: Accelerator, work: Callable[[], T]) -> tuple[T, float]:
    """Returns the result of `work`, and the seconds that the device took for it; it has done all else before
    and after."""
    start, end = (accelerator.event(timing=True) for _ in range(2))
    accelerator.wait()
    start.record()
    made = work()
    end.record()
    accelerator.wait()
    return made, start.elapsed_time(end) / 1e3


class Values:
    """The first values of parameters; with `keep` each is drawn once, whatever is cut from it."""

    def __init__(self, model: Model, accelerator: Accelerator, *, keep: bool = True) -> None:
        self._model, self.accelerator, self._keep = model, accelerator, keep
        self._whole: dict[str, Tensor] = {}

    def fill(self, local: LocalModel, modules: Mapping[str, nn.Module]) -> None:
        """Gives the parameters of `modules` their values, on the device; those without storage have none."""
        wanted = {id(parameter) for module in modules.values() for parameter in module.parameters()}
        for name, ((box,), parameter) in local.parameters.items():
            if id(parameter) not in wanted or parameter.is_meta:
                continue
            value = self._whole.get(name)
            if value is None:
                value = self._model.first_value(name, Box.whole(self._model.parameter(name).shape), seed=0)
                if self._keep:
                    self._whole[name] = value
            part = value[box.slices(Box.whole(tuple(value.shape)))].contiguous()
            parameter.data = part.to(self.accelerator.device, copy=True)


@dataclass(frozen=True)
class Passes:
    """Seconds of a forward and a backward pass."""

    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class ProfiledPart:
    """A section on the first member of a TP group of `width`, whose shares are equal as far as the
    `units` go; it holds `share` of it. `label` is what timings call it."""

    label: str
    width: int
    share: float
    module: nn.Module
    passed: Callable[..., Any]  #: the module's call, with its draws keyed
    loss: Loss | None = None

    def passes(self, given: Any, batch: Any, accelerator: Accelerator, *, recompute: bool = False) -> Passes:
        """Times both passes over an activation [samples, tokens, width] or a bundle, or over a batch in the
        embedding. A head's loss is part of it where there is one; else some gradient is given, its making not
        timed."""
        entered = self._enter(given)
        out, forward = timed(accelerator, lambda: self._forward(entered, batch, recompute=recompute))
        grads = _some(out, torch.randn_like) if self.loss is None else None
        _, back = timed(accelerator, lambda: _back(out, grads))
        return Passes(forward, back)

    def kept(self, given: Any, batch: Any, *, recompute: bool = False) -> int:
        """Bytes of the distinct storages that stay until backward, parameters left out. A section's input is
        counted here, so that its output counts in the next; a head without a loss counts its output, too."""
        parameters = {storage_of(parameter) for parameter in self.module.parameters()}
        sizes: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            if (storage := storage_of(tensor)) not in parameters:
                sizes[storage] = tensor.untyped_storage().nbytes()
            return tensor

        entered = self._enter(given)
        with saved_tensors_hooks(count, lambda tensor: tensor):
            out = self._forward(entered, batch, recompute=recompute)
        if self.label != "embed":
            for tensor in tensors(entered):
                count(tensor)
        if self.label == "head" and self.loss is None:
            for tensor in tensors(out):
                count(tensor)
        return sum(sizes.values())

    def working(self, given: Any, batch: Any, kept: int) -> int:
        """Bytes that both passes have alive at most beside the `kept` ones; gradients of parameters are there
        before. What a section gives counts as the input of the next one, but for the logits of a head."""
        entered = self._enter(given)
        parameters = list(self.module.parameters())
        for parameter in parameters:
            if parameter.requires_grad:
                dtype = getattr(parameter, "grad_dtype", None)  # of master weights, see `Precision.add_up`
                parameter.grad = torch.zeros_like(parameter, dtype=dtype or parameter.dtype)
        held = [*parameters, *self.module.buffers(), *(p.grad for p in parameters if p.grad is not None)]
        # Operations give views of these (a transposed weight) and write into them (a gradient that adds up).
        with LiveBytes([*held, *tensors(entered)] if self.label != "embed" else held) as live:
            out = self.forward(entered)
            if self.loss is None:
                _back(out, _some(out, torch.ones_like))
            else:
                _back(self.loss(out, batch)[0], None)
        for parameter in parameters:
            parameter.grad = None
        before = 0 if self.label == "embed" else sum(tensor.nbytes for tensor in tensors(entered))
        after = 0 if self.label == "head" else sum(tensor.nbytes for tensor in tensors(out))
        return max(0, live.most + before - after - kept)

    def _enter(self, given: Any) -> Any:
        return given if self.label == "embed" else entering(given)

    def _forward(self, entered: Any, batch: Any, *, recompute: bool) -> Bundle:
        if recompute:
            out: Bundle = checkpoint(self.forward, entered, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self.forward(entered)
        return out if self.loss is None else self.loss(out, batch)[0]

    def forward(self, entered: Any) -> Bundle:
        """The output of the section, with its draws keyed."""
        out: Bundle = self.passed(entered)
        return out


def _some(out: Bundle, like: Callable[[Tensor], Tensor]) -> Gradients:
    """Some gradients, of those that need one."""
    if isinstance(out, Tensor):
        return like(out)
    return {name: like(x) if x.requires_grad else None for name, x in out.items()}


def _back(out: Bundle, grads: Gradients) -> None:
    """The backward pass of a loss (without gradients), or of what a section gave."""
    if grads is None and isinstance(out, Tensor):
        torch.autograd.backward(out)
    else:
        backward(out, grads)


def both_passes(
    sections: Mapping[str, Callable[..., Any]], entered: Any, batch: Any, loss: Loss | None
) -> None:
    """Forward and backward of one micro-batch through all sections, block by block as a stage runs it.

    Args:
        sections: in their order.
        entered: the batch as the embedding takes it.
        batch: as the loss takes it.
        loss: of the head's output; None: some gradient is given.
    """
    segments, x = forth(separate(sections), entered, SectionWatch())
    if loss is None:
        grads = _some(x, torch.ones_like)
    else:
        total = loss(x, batch)[0]
        segments[-1], grads = segments[-1]._replace(out=total), torch.ones_like(total)
    back_through(segments, grads, SectionWatch())


def part_of(
    model: Model,
    section: str,
    label: str,
    shares: tuple[int, ...],
    values: Values,
    loss: Loss | None = None,
) -> ProfiledPart:
    """`section` ("embed", "head" or "blocks.N") on the first member of a group with these shares, on the
    device of `values`."""
    last = model.layers - 1
    layer = {"embed": 0, "head": last}.get(section)
    layer = int(section.removeprefix("blocks.")) if layer is None else layer
    devices = tuple(f"n/{i}" for i in range(len(shares)))
    stage = Stage(start=layer, stop=layer + 1, devices=devices, shares=shares)
    local = local_model(model, stage, 0, values.accelerator)
    module = local.modules[section]
    values.fill(local, {section: module})
    if len(shares) > 1:
        # The hooks that a job's engine makes, around nobody.
        tp_hooks.attach(model, section, module, stage, cast(Group, Alone(len(shares))))
    return ProfiledPart(
        label=label,
        width=len(shares),
        share=shares[0] / sum(shares),
        module=module,
        loss=loss,
        passed=local.passes[section],
    )


def whole_model(model: Model, values: Values) -> LocalModel:
    """All sections of the model, on the device of `values`."""
    stage = Stage(start=0, stop=model.layers, devices=("n/0",), shares=(1,))
    local = local_model(model, stage, 0, values.accelerator)
    values.fill(local, local.modules)
    return local
