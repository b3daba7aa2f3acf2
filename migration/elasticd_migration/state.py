"""A rank's model and optimizer state as named local boxes: collected before a move, installed after it.

A parameter's state is its planes (value and element-wise moments, all of the local box's shape) and its
scalars (0-dim tensors and plain numbers). Optimizers that keep anything else for a parameter are refused by
name: no box arithmetic can move it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from elasticd_planner.boxes import Box

from elasticd_migration.schema import Plane, Scalar, Schema, TensorSchema

#: The plane that holds the parameter itself.
VALUE = "value"

#: What a scalar can be.
Number = torch.Tensor | float | int | bool | None


class NotElementWise(ValueError):
    """An optimizer whose state is neither of the parameter's shape nor a single number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTensor:
    """What this rank holds of one parameter: `planes` by name, each of the box's shape, and `scalars`."""

    box: Box
    planes: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Number] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, plane in self.planes.items():
            if tuple(plane.shape) != self.box.shape:
                raise ValueError(f"plane {name} of shape {tuple(plane.shape)} cannot be box {self.box.shape}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalState:
    """What this rank holds, by full parameter name. A joiner's is empty."""

    tensors: Mapping[str, LocalTensor] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(
            plane.numel() * plane.element_size()
            for tensor in self.tensors.values()
            for plane in tensor.planes.values()
        )

    def schema(self) -> Schema:
        return Schema(tensors={name: _describe(tensor) for name, tensor in self.tensors.items()})


def collect(
    parameters: Mapping[str, tuple[Box, torch.nn.Parameter]], optimizer: torch.optim.Optimizer | None
) -> LocalState:
    """This rank's state, by reference: nothing is copied, and the tensors change as training goes on.

    Before the optimizer's first step it has no state, and only values are collected.
    Raises `NotElementWise` where the optimizer keeps what cannot be cut into boxes.
    """
    tensors: dict[str, LocalTensor] = {}
    for name, (box, parameter) in parameters.items():
        planes = {VALUE: parameter.detach()}
        scalars: dict[str, Number] = {}
        kept = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for key, value in kept.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape:
                planes[key] = value
            elif _single(value):
                scalars[key] = value
            else:
                raise NotElementWise(
                    f"{type(optimizer).__name__} keeps {key!r} ({_words(value)}) for {name} of shape "
                    f"{tuple(parameter.shape)}: only element-wise state and single numbers can be moved; "
                    f"use an element-wise optimizer such as AdamW"
                )
        tensors[name] = LocalTensor(box=box, planes=planes, scalars=scalars)
    return LocalState(tensors=tensors)


def install(
    state: LocalState,
    parameters: Mapping[str, tuple[Box, torch.nn.Parameter]],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Make `state` that of new local parameters and of the optimizer built on them.

    The parameters adopt the state's tensors, so that nothing is held twice; what they were initialised with
    is dropped. `state` must not be installed a second time.
    Raises ValueError, before anything is changed, where a parameter is missing or does not fit.
    """
    for name, (box, parameter) in parameters.items():
        _check_fits(name, box, parameter, state)
    for name, (_, parameter) in parameters.items():
        tensor = state.tensors[name]
        parameter.data = tensor.planes[VALUE]
        parameter.grad = None
        kept = {key: plane for key, plane in tensor.planes.items() if key != VALUE}
        if optimizer is not None and (kept or tensor.scalars):
            optimizer.state[parameter] = {**tensor.scalars, **kept}


def _check_fits(name: str, box: Box, parameter: torch.nn.Parameter, state: LocalState) -> None:
    tensor = state.tensors.get(name)
    if tensor is None:
        raise ValueError(f"{name}: is not in the state that is to be installed")
    value = tensor.planes[VALUE]
    if tensor.box != box or tuple(parameter.shape) != box.shape:
        raise ValueError(f"{name}: a parameter for {box} of shape {tuple(parameter.shape)} got {tensor.box}")
    if (value.dtype, value.device) != (parameter.dtype, parameter.device):
        raise ValueError(
            f"{name}: parameter is {parameter.dtype} on {parameter.device}, its state {value.dtype} on "
            f"{value.device}; make the new parameters with the dtype and device of the old"
        )


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype by the name that a `Plane` carries. Raises ValueError for an unknown name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


def restore(scalar: Scalar, device: torch.device) -> Number:
    """The value that `Scalar` describes, bit by bit and always new; `device` is its parameter's."""
    if scalar.kind == "none":
        return None
    if scalar.kind == "bool":
        return scalar.text == "True"
    if scalar.kind == "int":
        return int(scalar.text)
    if scalar.kind == "float":
        return float.fromhex(scalar.text)
    raw = torch.frombuffer(bytearray.fromhex(scalar.text), dtype=torch.uint8)
    place = device if scalar.device == device.type else torch.device(scalar.device)
    return raw.view(torch_dtype(scalar.dtype)).reshape(()).to(place)


def _single(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return value is None or isinstance(value, bool | int | float)


def _words(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _describe(tensor: LocalTensor) -> TensorSchema:
    planes = sorted(tensor.planes.items(), key=lambda item: (item[0] != VALUE, item[0]))
    return TensorSchema(
        planes=tuple(
            Plane(name=name, dtype=str(plane.dtype).removeprefix("torch."), itemsize=plane.element_size())
            for name, plane in planes
        ),
        scalars=tuple(_scalar(name, value) for name, value in sorted(tensor.scalars.items())),
    )


def _scalar(name: str, value: Number) -> Scalar:
    if isinstance(value, torch.Tensor):
        raw = bytes(value.detach().reshape(1).view(torch.uint8).tolist())
        return Scalar(
            name=name,
            kind="tensor",
            text=raw.hex(),
            dtype=str(value.dtype).removeprefix("torch."),
            device=value.device.type,
        )
    if value is None:
        return Scalar(name=name, kind="none")
    if isinstance(value, bool):
        return Scalar(name=name, kind="bool", text=str(value))
    if isinstance(value, int):
        return Scalar(name=name, kind="int", text=str(value))
    return Scalar(name=name, kind="float", text=value.hex())
