"""The modules that a script gave to its `Model`: the reference for the copies that train.

A job trains copies of these modules. What the script still reaches through the originals (a hook, a patched
forward, the loss, the loop's body) would keep the first values for ever, so that whatever can be seen of it is
refused by name:

1. `without_storage`, when the model is described: parameters in places that torch does not register, and hooks
   on parameters.
2. `elasticd.runtime.reference`, before the first step: one step of these modules beside one of the copies.
3. `HandedOver.retire`, once the copies have the first state: each use of a parameter raises from then on.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elasticd.runtime.model.validation import ModelError

log = logging.getLogger(__name__)

#: What `vars` of a module has beside the attributes that its own code sets.
REGISTERED = frozenset(vars(nn.Module()))

_INSTEAD = (
    "job.state_dict() has the trained weights; docs/training.md, 'What your script still holds', says how to "
    "freeze, schedule and regularise"
)


def _described_by() -> frozenset[Any]:
    """The functions that read of a parameter what retiring it does not change: its shape and its type."""
    attributes = (
        "shape dtype device ndim requires_grad is_leaf is_meta is_sparse is_cuda layout nbytes itemsize"
    )
    methods = "size numel dim nelement ndimension is_floating_point is_complex element_size stride __len__"
    return frozenset(
        [getattr(Tensor, name).__get__ for name in attributes.split()]
        + [getattr(Tensor, name) for name in methods.split()]
    )


_DESCRIBE = _described_by()


class RetiredParameter(nn.Parameter):
    """A parameter of a module that was given to a job which has begun: it has a shape and no values."""

    retired_name: str  #: its full name in the model

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Reads a shape or a type; raises ModelError for everything else."""
        if function in _DESCRIBE:
            return super().__torch_function__(function, types, args, kwargs or {})
        name = next((each.retired_name for each in _retired([*args, *(kwargs or {}).values()])), "a parameter")
        raise ModelError(_taken(name))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RetiredParameter({self.retired_name}, {tuple(self.shape)})"


def _taken(name: object) -> str:
    return (
        f"{name} is of the module that you gave to the job: the job has trained copies of it, and this one "
        "has no values any more. Nothing that reaches it (a hook, a patched forward, the loss, the loop's "
        f"body) would train. {_INSTEAD}"
    )


def _retired(values: Sequence[Any]) -> Iterator[RetiredParameter]:
    for value in values:
        if isinstance(value, RetiredParameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from _retired(value)


class HandedOver:
    """The user's own modules of a model, by section."""

    sections: dict[str, nn.Module]  #: empty once they are retired
    retired: bool  #: whether the script can use them no longer

    def __init__(self, sections: Mapping[str, nn.Module]) -> None:
        self.sections, self.retired = dict(sections), False

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by the name of their first use."""
        named: dict[str, nn.Parameter] = {}
        for section, module in self.sections.items():
            for name, parameter in module.named_parameters(prefix=section):
                if not any(parameter is other for other in named.values()):
                    named[name] = parameter
        return named

    def retire(self) -> None:
        """Takes the values of the parameters away, so that each later use raises ModelError, and their memory
        is free. Setting an attribute of a module raises it, too."""
        for name, parameter in self.parameters().items():
            shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
            parameter.grad = None
            if not parameter.is_meta:
                parameter.data = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
            try:
                parameter.__class__ = RetiredParameter
            except TypeError:  # a class of the user's own, of another layout
                log.debug("%s stays a %s", name, type(parameter).__name__)
                continue
            parameter.retired_name = name  # type: ignore[attr-defined]
        kinds: dict[type, type] = {}
        for section, module in self.sections.items():
            for path, each in module.named_modules(prefix=section):
                _retire_module(path, each, kinds)
        self.sections, self.retired = {}, True


def _retire_module(path: str, module: nn.Module, kinds: dict[type, type]) -> None:
    """kinds: the retired class of each class, made here where it lacks."""
    kind = type(module)
    if "retired_name" in vars(module) or not any(True for _ in module.parameters()):
        return  # several sections have it, or another model may: an activation, a dropout
    module.__dict__["retired_name"] = path
    if kind not in kinds:

        def refuse(self: nn.Module, name: str, value: object) -> None:
            if name != "training":  # which `eval` sets
                raise ModelError(
                    f"{self.retired_name}.{name} is set on the module that you gave to the job: the job has "
                    f"trained copies of it, which do not see that. {_INSTEAD}"
                )
            super(type(self), self).__setattr__(name, value)

        def unsaved(self: nn.Module, protocol: object) -> None:
            raise ModelError(_taken(self.retired_name))

        names: dict[str, Any] = {"__setattr__": refuse, "__reduce_ex__": unsaved}
        names |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        make: Any = type(kind)
        kinds[kind] = make(kind.__name__, (kind,), names)
    try:
        object.__setattr__(module, "__class__", kinds[kind])
    except TypeError:  # a class with slots, or one of TorchScript
        log.debug("%s stays a %s", path, kind.__name__)


def without_storage(sections: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Copies of the sections on the meta device: shapes without memory. Buffers keep theirs.

    Raises:
        ModelError: a section holds a parameter where torch does not register it, or a hook is on a parameter:
            a copy would lack it.
    """
    names: dict[int, str] = {}
    for section, module in sections.items():
        for name, parameter in module.named_parameters(prefix=section):
            if isinstance(parameter, RetiredParameter):
                raise ModelError(
                    f"{name} was given to a job that has begun, as {parameter.retired_name}, and has no values "
                    "any more: make the modules anew for another job"
                )
            names.setdefault(id(parameter), name)
            _refuse_hooks(name, parameter)
    return {section: _copied(section, module, names) for section, module in sections.items()}


def _refuse_hooks(name: str, parameter: nn.Parameter) -> None:
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ModelError(
            f"{name} has a hook (register_hook or register_post_accumulate_grad_hook), which the copies that "
            "train would not have: mask or scale in forward, as weight * mask + weight.detach() * (1 - mask), "
            "or give the parameter a group of its own in the optimizer"
        )


def _copied(section: str, module: nn.Module, names: Mapping[int, str]) -> nn.Module:
    """names: of the parameters of all sections, by identity."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    for inner in module.modules():
        for value in vars(inner).values():  # what a forward pass left there
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    known = set(memo)
    copied = copy.deepcopy(module, memo)
    for original in memo.get(id(memo), ()):
        if isinstance(original, Tensor) and original.requires_grad and id(original) not in known:
            raise ModelError(_hidden(section, module, original, names))
    return copied


def _hidden(section: str, module: nn.Module, tensor: Tensor, names: Mapping[int, str]) -> str:
    place = next(
        (
            f"{path}.{attribute}"
            for path, inner in module.named_modules(prefix=section)
            for attribute, value in vars(inner).items()
            if attribute not in REGISTERED and _reaches(value, tensor)
        ),
        section,
    )
    name = names.get(id(tensor), f"a parameter of shape {tuple(tensor.shape)}")
    remedy = (
        "register it there (self.tied = module, self.weight = parameter): parameters that sections share stay "
        "shared"
        if id(tensor) in names
        else "use nn.Parameter, nn.ParameterList or nn.ModuleList"
    )
    return (
        f"{place} holds {name} where torch does not register it, in a list say, so that the copies that train "
        f"would not share it: {remedy}"
    )


def _reaches(value: Any, tensor: Tensor, depth: int = 4) -> bool:
    """Returns whether a value is or holds the tensor."""
    if value is tensor or depth == 0:
        return value is tensor
    if isinstance(value, nn.Module):
        return any(each is tensor for each in value.parameters())
    if isinstance(value, Mapping):
        value = list(value.values())
    elif not isinstance(value, list | tuple | set):
        value = list(getattr(value, "__dict__", {}).values())
    return any(_reaches(each, tensor, depth - 1) for each in value)
