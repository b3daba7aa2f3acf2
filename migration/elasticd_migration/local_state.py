"""The state of a rank as named local boxes: collected before a move, installed after it.

A parameter has its value, where it is computed with and where its state is kept, and its state: planes
(element-wise moments and master weights, of the shape of the boxes that are owned) and scalars (0-dim tensors
and plain numbers). Of a parameter without dimensions every tensor but the count of steps is a plane. Optimizers
that keep anything else for a parameter are refused by name: no box arithmetic can move it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

import torch
from elasticd_planner.layout.layouts import Item, Layouts, Role
from elasticd_planner.spec.box import Box

from elasticd_migration.schema import MASTER as MASTER
from elasticd_migration.schema import VALUE as VALUE
from elasticd_migration.schema import Group, Plane, Scalar, Schema, TensorSchema
from elasticd_migration.text_codec import NotPlain, from_text, plain, to_text

#: What a scalar can be.
Number = torch.Tensor | float | int | bool | None

#: The optimizers' count of steps in the state of a parameter, which is no moment where that has no dimensions.
STEPS = "step"

#: Keys of a parameter group that are no settings.
_MEMBERS = ("params", "param_names")


class NotElementWise(ValueError):
    """An optimizer whose state cannot be carried: neither of the parameter's shape nor a number, or settings
    that no text stands for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One box of an item: its planes by name, each of the box's shape. aside: they lie in host memory for a
    while, and are to be copied also where the box does not change."""

    box: Box
    planes: Mapping[str, torch.Tensor]
    aside: bool = False

    def __post_init__(self) -> None:
        for name, plane in self.planes.items():
            if tuple(plane.shape) != self.box.shape:
                raise ValueError(f"plane {name} of shape {tuple(plane.shape)} cannot be box {self.box.shape}")

    def part(self, plane: str, box: Box) -> torch.Tensor:
        """`box`, which lies in this one, of a plane: a view."""
        whole = self.planes[plane]
        return whole if box == self.box else whole[box.slices(self.box)]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTensor:
    """The state of one item on this rank: disjoint boxes, and `scalars`, which the item has once."""

    shards: tuple[Shard, ...]
    scalars: Mapping[str, Number] = field(default_factory=dict)

    def around(self, box: Box) -> Shard:
        """The shard that `box` lies in. Raises KeyError where there is none."""
        for shard in self.shards:
            if shard.box.contains(box):
                return shard
        raise KeyError(f"{box} lies in none of {[shard.box for shard in self.shards]}")

    @property
    def bytes(self) -> int:
        """Bytes of all planes of its shards, without the scalars."""
        return sum(p.numel() * p.element_size() for shard in self.shards for p in shard.planes.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalState:
    """The state of this rank. A joiner's is empty.

    groups: the optimizer's parameter groups. extras: what the job has once (its scheduler's state, a
    gradient scaler's), by name, as text.
    """

    tensors: Mapping[Item, LocalTensor] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    extras: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors that this rank holds."""
        return sum(tensor.bytes for tensor in self.tensors.values())

    def schema(self) -> Schema:
        """The description of the tensors, for ranks that hold other parts of them."""
        tensors: dict[Role, dict[str, TensorSchema]] = {}
        read = _read(value for tensor in self.tensors.values() for value in tensor.scalars.values())
        for item, tensor in self.tensors.items():
            tensors.setdefault(item.role, {})[item.name] = _describe(tensor, read)
        return Schema(tensors=tensors, groups=self.groups, extras=dict(self.extras))


def trimmed(state: LocalState, boxes: Mapping[Item, Sequence[Box]]) -> LocalState:
    """As much of a state as lies in these boxes, each in one box that is held: views, not copies."""
    tensors = {}
    for item, wanted in boxes.items():
        if item in state.tensors:
            tensor = state.tensors[item]
            shards = [(box, tensor.around(box)) for box in wanted]
            parts = tuple(
                Shard(
                    box=box,
                    planes={name: around.part(name, box) for name in around.planes},
                    aside=around.aside,
                )
                for box, around in shards
            )
            tensors[item] = LocalTensor(shards=parts, scalars=tensor.scalars)
    return LocalState(tensors=tensors, groups=state.groups, extras=state.extras)


class Owned(NamedTuple):
    """A box of a parameter that this rank's optimizer steps on: the local parameter itself, a view of a part
    of it, the value of a box that is kept for others, or the master weight of one of these."""

    name: str
    box: Box
    parameter: torch.nn.Parameter


Values = Mapping[str, Sequence[tuple[Box, torch.Tensor]]]


def own(
    layouts: Layouts,
    device: str,
    values: Values,
    state: LocalState | None = None,
    master: torch.dtype | None = None,
) -> list[Owned]:
    """The values that the optimizer of `device` is to step on, given its `values`: every trained parameter of
    the model.

    A box that is a whole value is that value itself, if it is a parameter; any other is a parameter of its own
    on the same memory. Of a parameter whose state others keep there is an empty one, of as many dimensions: so
    that parameter groups are the same on every rank. master: there are master weights of this type: those of
    `state`, which are adopted, or as the values are.
    """
    place = next((value.device for parts in values.values() for _, value in parts), None)
    owned: list[Owned] = []
    for name in layouts.trained:
        for box in layouts.boxes(Item(name, "state"), device):
            around, value = next((held, v) for held, v in values[name] if held.contains(box))
            if master is not None:
                weight = _master(state, name, box, value.detach()[box.slices(around)], master)
                owned.append(Owned(name, box, torch.nn.Parameter(weight)))
                continue
            if around != box or not isinstance(value, torch.nn.Parameter):
                value = torch.nn.Parameter(value.detach()[box.slices(around)])
            owned.append(Owned(name, box, value))
        if not owned or owned[-1].name != name:
            layout = layouts.state(name)
            none = (0,) * max(1, len(layout.shape))
            empty = torch.empty(none, dtype=master or torch_dtype(layout.dtype), device=place)
            owned.append(Owned(name, Box.whole(none), torch.nn.Parameter(empty)))
    return owned


def _master(
    state: LocalState | None, name: str, box: Box, value: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    tensor = state.tensors.get(Item(name, "state")) if state is not None else None
    shard = next((s for s in tensor.shards if s.box == box), None) if tensor is not None else None
    kept = None if tensor is None or shard is None else shard.planes.get(MASTER, tensor.scalars.get(MASTER))
    if not isinstance(kept, torch.Tensor):  # of a parameter without dimensions elasticd 0.1 kept it as a scalar
        return value.to(dtype, copy=True)
    if kept.dtype != dtype:
        raise ValueError(f"state of {name}: its master weights are {kept.dtype}, and this job's are {dtype}")
    return kept


def collect(
    values: Values,
    owned: Sequence[Owned],
    optimizer: torch.optim.Optimizer | None,
    *,
    buffers: Values | None = None,
    extras: Mapping[str, object] | None = None,
    masters: bool = False,
) -> LocalState:
    """This rank's state, by reference: nothing is copied, and the tensors change as training goes on.

    values, buffers: every box that is held of each. owned: what the optimizer was made with; with `masters`
    those are master weights, which are kept with its state. extras: plain values, as `settings` can write.
    Before the optimizer's first step its state has no planes of its own.
    Raises `NotElementWise` where something is kept that cannot be carried.
    """
    tensors = {Item(name, "value"): _value(held) for name, held in values.items()}
    tensors |= {Item(name, "buffer"): _value(held) for name, held in (buffers or {}).items()}
    parts: dict[str, list[tuple[Box, Mapping[str, object]]]] = {}
    for name, box, parameter in owned:
        if box.empty:
            continue
        # As it is now: the optimizer may step meanwhile, and put other tensors there.
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        kept = {key: plain(value) for key, value in dict(state).items()}
        if masters:
            if MASTER in kept:
                raise NotElementWise(f"{type(optimizer).__name__} keeps {MASTER!r}, the name of master weights")
            kept = {**kept, MASTER: parameter.detach()}
        parts.setdefault(name, []).append((box, kept))
    kept_values = (value for held in parts.values() for _, kept in held for value in kept.values())
    read = _read(value for value in kept_values if _single(value))
    for name, held in parts.items():
        tensors[Item(name, "state")] = _state(name, held, type(optimizer).__name__, read)
    try:
        return LocalState(
            tensors=tensors,
            groups=_groups(owned, optimizer),
            extras={name: to_text(value, name) for name, value in (extras or {}).items()},
        )
    except NotPlain as error:
        raise NotElementWise(str(error)) from error


def install(state: LocalState, values: Values, *, buffers: Values | None = None) -> None:
    """Make `state` that of new local parameters and buffers.

    They adopt the state's tensors, so that nothing is held twice; what they were initialised with is dropped.
    Raises ValueError, before anything is changed, where one is missing or does not fit.
    """
    targets = [(Item(name, "value"), box, held) for name, parts in values.items() for box, held in parts]
    targets += [
        (Item(name, "buffer"), box, held) for name, parts in (buffers or {}).items() for box, held in parts
    ]
    planes = [_fitting(item, box, held, state) for item, box, held in targets]
    for (_, _, held), plane in zip(targets, planes, strict=True):
        held.data = plane
        held.grad = None


#: Settings of torch's optimizers that choose a kernel for the device at hand.
KERNEL_SETTINGS = frozenset({"foreach", "fused", "capturable", "differentiable"})


def restore_optimizer(
    state: LocalState, owned: Sequence[Owned], optimizer: torch.optim.Optimizer, *, masters: bool = False
) -> None:
    """Give an optimizer that was made anew for `owned` the state and the settings that are carried. With
    `masters`, as in `collect`, its parameters are the master weights, which are none of its state.

    `state` must not be restored a second time: its planes are adopted. A group takes the settings that its
    parameters had, but for those that say how a step is computed, not what (`KERNEL_SETTINGS`).
    Raises ValueError where the parameters of one group had different settings, or state is missing.
    """
    _take_settings(state, owned, optimizer)
    # As torch's own optimizers: these count their steps on the device, others on the host.
    counted = {
        id(parameter): parameter.device
        if group.get("fused") or group.get("capturable")
        else torch.device("cpu")
        for group in optimizer.param_groups
        if "capturable" in group
        for parameter in group["params"]
    }
    for name, box, parameter in owned:
        tensor = state.tensors.get(Item(name, "state"))
        if tensor is None or box.empty:
            continue
        shard = next((shard for shard in tensor.shards if shard.box == box), None)
        if shard is None:
            raise ValueError(f"state of {name}: {box} is not in what is to be installed")
        planes = {key: plane for key, plane in shard.planes.items() if not (masters and key == MASTER)}
        if planes or tensor.scalars:
            place = counted.get(id(parameter))
            scalars = {
                key: value.to((place if key == STEPS else None) or value.device, copy=True)
                if isinstance(value, torch.Tensor)
                else value
                for key, value in tensor.scalars.items()
                if not (masters and key == MASTER)
            }
            optimizer.state[parameter] = {**scalars, **planes}


def _take_settings(state: LocalState, owned: Sequence[Owned], optimizer: torch.optim.Optimizer) -> None:
    names = {id(part.parameter): part.name for part in owned}
    settings = {name: group.settings for group in state.groups for name in group.names}
    for index, group in enumerate(optimizer.param_groups):
        held = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        values = {settings[name] for name in held if name in settings}
        if len(values) > 1:
            raise ValueError(
                f"parameter group {index}: the parameters {held[:3]} were in groups with different settings; "
                "let the optimizer's function group parameters by name alone"
            )
        for text in values:
            carried = from_text(text, group["params"][0].device if group["params"] else None)
            group.update(
                {key: value for key, value in carried.items() if key not in KERNEL_SETTINGS or key not in group}
            )


def _value(parts: Sequence[tuple[Box, torch.Tensor]]) -> LocalTensor:
    return LocalTensor(shards=tuple(Shard(box=box, planes={VALUE: held.detach()}) for box, held in parts))


def _state(
    name: str, parts: Sequence[tuple[Box, Mapping[str, object]]], optimizer: str, read: Mapping[int, bytes]
) -> LocalTensor:
    """The state of one parameter's owned boxes; all have the same scalars, since they took the same steps."""
    shards: list[Shard] = []
    scalars: list[dict[str, Number]] = []
    for box, kept in parts:
        planes: dict[str, torch.Tensor] = {}
        single: dict[str, Number] = {}
        for key, value in kept.items():
            if isinstance(value, torch.Tensor) and _is_plane(key, value, box):
                planes[key] = value
            elif _single(value):
                single[key] = value
            else:
                raise NotElementWise(
                    f"{optimizer} keeps {key!r} ({_words(value)}) for {name} of shape {box.shape}: only "
                    f"element-wise state and single numbers can be moved; use an element-wise optimizer such "
                    f"as AdamW"
                )
        shards.append(Shard(box=box, planes=planes))
        scalars.append(single)
    described = {tuple(_scalar(key, value, read) for key, value in sorted(each.items())) for each in scalars}
    if len(described) > 1:
        raise NotElementWise(f"{optimizer} keeps different numbers for parts of {name}: {scalars[0]}")
    return LocalTensor(shards=tuple(shards), scalars=scalars[0])


def _is_plane(key: str, value: torch.Tensor, box: Box) -> bool:
    return tuple(value.shape) == box.shape and (value.dim() > 0 or key != STEPS)


def _groups(owned: Sequence[Owned], optimizer: torch.optim.Optimizer | None) -> tuple[Group, ...]:
    names = {id(part.parameter): part.name for part in owned}
    groups = []
    for index, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        held = dict.fromkeys(names[id(p)] for p in group["params"] if id(p) in names)
        settings = {key: value for key, value in sorted(group.items()) if key not in _MEMBERS}
        text = to_text(settings, f"parameter group {index}")
        groups.append(Group(settings=text, names=tuple(held)))
    return tuple(groups)


def _fitting(item: Item, box: Box, held: torch.Tensor, state: LocalState) -> torch.Tensor:
    tensor = state.tensors.get(item)
    if tensor is None:
        raise ValueError(f"{item}: is not in the state that is to be installed")
    shard = next((shard for shard in tensor.shards if shard.box == box), None)
    if shard is None or tuple(held.shape) != box.shape:
        boxes = [shard.box for shard in tensor.shards]
        raise ValueError(f"{item}: a tensor for {box} of shape {tuple(held.shape)} got {boxes}")
    value = shard.planes[VALUE]
    if (value.dtype, value.device) != (held.dtype, held.device):
        raise ValueError(
            f"{item}: is {held.dtype} on {held.device}, its state {value.dtype} on {value.device}; make the "
            "new parameters with the dtype and device of the old"
        )
    return value


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype by the name that a `Plane` carries. Raises ValueError for an unknown name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


def restore(scalar: Scalar, device: torch.device) -> Number:
    """The value that `Scalar` describes, bit by bit and always new; `device` is its parameter's. One that lay
    beside its parameter does so again, whatever type of device that is now."""
    if scalar.kind == "none":
        return None
    if scalar.kind == "bool":
        return scalar.text == "True"
    if scalar.kind == "int":
        return int(scalar.text)
    if scalar.kind == "float":
        return float.fromhex(scalar.text)
    raw = torch.frombuffer(bytearray.fromhex(scalar.text), dtype=torch.uint8)
    place = torch.device("cpu") if scalar.device == "cpu" else device
    return raw.view(torch_dtype(scalar.dtype)).reshape(()).to(place)


def _single(value: object) -> TypeGuard[Number]:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return value is None or isinstance(value, bool | int | float)


def _words(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _read(values: Iterable[Number]) -> dict[int, bytes]:
    """The bytes of single tensors, by `id`: all of one type on one device are read in one copy."""
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            alike.setdefault((value.dtype, value.device), []).append(value)
    values_read: dict[int, bytes] = {}
    for kept in alike.values():
        rows = torch.stack([value.detach().reshape(1) for value in kept]).cpu().view(torch.uint8)
        values_read |= {id(value): bytes(row) for value, row in zip(kept, rows.tolist(), strict=True)}
    return values_read


def _describe(tensor: LocalTensor, read: Mapping[int, bytes]) -> TensorSchema:
    first = tensor.shards[0].planes if tensor.shards else {}
    return TensorSchema(
        planes=tuple(
            Plane(name=name, dtype=str(plane.dtype).removeprefix("torch."), itemsize=plane.element_size())
            for name, plane in sorted(first.items())
        ),
        scalars=tuple(_scalar(name, value, read) for name, value in sorted(tensor.scalars.items())),
    )


def _scalar(name: str, value: Number, read: Mapping[int, bytes]) -> Scalar:
    if isinstance(value, torch.Tensor):
        return Scalar(
            name=name,
            kind="tensor",
            text=read[id(value)].hex(),
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
