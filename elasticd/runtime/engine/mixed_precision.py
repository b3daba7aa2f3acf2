"""Mixed precision: the type that modules compute in, master weights, gradients, and the scale of the loss.

With a `Precision` the parameters of modules and the activations are of one type, bfloat16 or float16. Gradients
of micro-batches add up in single precision and are reduced in it. The optimizer steps on master weights in
single precision; the modules get their rounded values. The device that keeps a box of the optimizer's state
keeps its master weights too: they move, are sharded and are saved with it (`MASTER` in
elasticd_migration.schema).

In float16 small gradients vanish, so the loss is multiplied by a scale before the backward pass. Whether the
gradients of a step are finite is part of the vote: all ranks skip the same update, and all change the scale
alike.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from elasticd_planner.cost.model_profile import Numbers
from torch import Tensor, nn

from elasticd.runtime.exits import script_options
from elasticd.runtime.model.model import Model

_Model = TypeVar("_Model", bound=Model)

#: The precisions that have a name.
Name = Literal["fp32", "bf16", "fp16"]

#: The largest scale.
_MOST = torch.finfo(torch.float32).max

_COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@script_options
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale of the loss in float16, by the rules of `torch.amp.GradScaler`.

    The sum of the losses over the targets is multiplied by the scale.

    Raises:
        ValueError: a field is out of its range.
    """

    first: float  #: the scale of the first step, above 0
    growth: float = 2.0  #: factor after `interval` steps in a row whose gradients were all finite, at least 1
    backoff: float = 0.5  #: factor after a step with a gradient that was not finite, between 0 and 1
    interval: int = 2000  #: steps, at least 1
    least: float = 0.0  #: the scale is not made smaller than this; 0: than 2**-32 times `first`

    def __post_init__(self) -> None:
        good = 0 < self.first < math.inf and self.growth >= 1 and 0 < self.backoff < 1 and self.interval >= 1
        if not (good and 0 <= self.least <= self.first):
            raise ValueError(
                f"LossScale: first must be positive, growth at least 1, backoff between 0 and 1, interval "
                f"at least 1 and least between 0 and first, not {self}"
            )

    @property
    def floor(self) -> float:
        """The smallest scale: gradients that overflow at it would at any."""
        return self.least or self.first * 2.0**-32

    @classmethod
    def for_steps_of(cls, targets: float) -> LossScale:
        """The rules for steps of about `targets` targets: 65536 / targets, rounded to a power of two.

        torch begins with 65536 for a mean over the batch. Scaling by a power of two rounds nothing.
        """
        return cls(first=2.0 ** (16 - round(math.log2(max(1.0, targets)))))


@script_options
@dataclass(frozen=True, kw_only=True)
class Precision:
    """The types that a job trains in.

    Raises:
        ValueError: a type is no floating point, or master weights are no finer than parameters.
    """

    compute: torch.dtype  #: of parameters and activations
    #: Of master weights, moments and gradients. The same as `compute`: there are no master weights.
    master: torch.dtype = torch.float32
    scale: LossScale | None = None  #: of the loss; None: it is not scaled

    def __post_init__(self) -> None:
        for dtype in (self.compute, self.master):
            if not dtype.is_floating_point:
                raise ValueError(f"precision: {dtype} is no type to train in")
        if self.separate and self.master.itemsize <= self.compute.itemsize:
            raise ValueError(f"precision: master weights of {self.master} are no finer than {self.compute}")
        if self.separate and not hasattr(Tensor, "grad_dtype"):
            raise ValueError(
                f"precision: torch {torch.__version__} cannot add up gradients in another type than their "
                "parameters'; use torch 2.10 or newer"
            )

    @property
    def separate(self) -> bool:
        """True if there are master weights beside the parameters."""
        return self.compute != self.master

    @property
    def numbers(self) -> Numbers | None:
        """The types as the planner's cost model takes them; None: everything is of the parameters' type."""
        if not self.separate:
            return None
        compute, master = (str(dtype).removeprefix("torch.") for dtype in (self.compute, self.master))
        return Numbers(compute=compute, master=master, gradients=master)

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Makes the gradients of `parameters` accumulate over micro-batches in the type of master weights."""
        for parameter in parameters:
            if parameter.requires_grad and self.separate:
                parameter.grad_dtype = self.master

    def entering(self, batch: Any) -> Any:
        """A batch for the embedding: floating-point tensors in it are converted to `compute`."""
        return converted(batch, lambda x: x.to(self.compute) if x.is_floating_point() else x)

    def leaving(self, output: Any) -> Any:
        """The output of the head for the loss: floating-point tensors in it are converted to `master`."""
        return converted(output, lambda x: x.to(self.master) if x.is_floating_point() else x)


def converted(batch: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """A batch with each tensor in it converted: in mappings, lists, tuples and dataclasses, which keep their
    classes. If none is changed it is the same object."""
    if isinstance(batch, Tensor):
        return convert(batch)
    if isinstance(batch, Mapping):
        return _converted_mapping(batch, convert)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {each.name: getattr(batch, each.name) for each in dataclasses.fields(batch)}
        changed = {name: converted(value, convert) for name, value in fields.items()}
        if all(changed[name] is fields[name] for name in fields):
            return batch
        like = copy.copy(batch)
        for name, value in changed.items():
            object.__setattr__(like, name, value)  # it may be frozen
        return like
    if isinstance(batch, tuple | list):
        parts = [converted(value, convert) for value in batch]
        if all(one is other for one, other in zip(parts, batch, strict=True)):
            return batch
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _converted_mapping(batch: Mapping[Any, Any], convert: Callable[[Tensor], Tensor]) -> Any:
    values = {key: converted(value, convert) for key, value in batch.items()}
    if all(values[key] is batch[key] for key in values):
        return batch
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values
    mapping = copy.copy(batch)
    mapping.update(values)
    return mapping


def precision_of(given: Name | Precision | None, targets: float) -> Precision | None:
    """The precision of a name, or the one that is given; None: modules compute in their own types.

    Args:
        given: the argument of the user.
        targets: of one step, about.

    Raises:
        ValueError: no precision has this name.
    """
    if given is None or isinstance(given, Precision):
        return given
    if given not in _COMPUTE:
        known = ", ".join(map(repr, _COMPUTE))
        raise ValueError(f"precision must be one of {known}, or a Precision, not {given!r}")
    scale = LossScale.for_steps_of(targets) if given == "fp16" else None
    return Precision(compute=_COMPUTE[given], scale=scale)


def lowered(model: Model, precision: Precision | None) -> Model:
    """The model with its parameters in the type to compute in; the same object where they are of it already."""
    if precision is None:
        return model
    if model.graph is not None:
        modules = {name: _lowered(module, precision) for name, module in model.graph.modules.items()}
        return Model(modules=modules, name=model.name)
    return _lowered(model, precision)


def _lowered(model: _Model, precision: Precision) -> _Model:
    types = {parameter.dtype for section in model.sections.values() for parameter in section.parameters()}
    return model if types == {precision.compute} else model.computing_in(precision.compute)


class LossScaler:
    """The current scale of the loss; the same on every rank, since it follows from the votes."""

    def __init__(self, rules: LossScale) -> None:
        self._rules = rules
        self.scale, self.good = rules.first, 0

    def after(self, *, applied: bool) -> None:
        """Changes the scale after a step. `applied`: its gradients were finite."""
        if not applied:
            self.scale, self.good = max(self._rules.floor, self.scale * self._rules.backoff), 0
            return
        self.good += 1
        if self.good >= self._rules.interval:
            grown = self.scale * self._rules.growth
            self.scale, self.good = (grown if grown <= _MOST else self.scale), 0

    def state_dict(self) -> dict[str, float | int]:
        """The scale, and the finite steps since it changed."""
        return {"scale": self.scale, "good": self.good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` gave."""
        self.scale, self.good = float(state["scale"]), int(state["good"])
