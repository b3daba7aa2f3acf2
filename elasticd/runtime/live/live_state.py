"""`State`: what a script trains under one mesh, and its tensors as boxes.

A switch moves values and optimizer state box by box. FSDP keeps a parameter's shard as a view of a padded
buffer that its all-gather reads, so state is copied into the tensors that `build` made; they never adopt
others. After a backward pass that broke off, an FSDP module shows parameters that are not sharded:
`LiveTensors` keeps the sharded ones from `build` on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
from elasticd_migration.local_state import LocalState, Owned, collect, restore_optimizer
from elasticd_migration.text_codec import from_text
from elasticd_planner.layout.holdings import Holdings
from elasticd_planner.layout.layouts import Item, Role
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.mesh import AllowedMesh, MeshModel, MeshTensor, Placement
from elasticd_planner.spec.model import Kind
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elasticd.runtime.exits import ScriptRefusal
from elasticd.runtime.live.world import in_world, is_strided, local_shape_and_offset

#: What wrappers put into the names of parameters.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
#: Keys of a parameter group that are no settings.
_MEMBERS = frozenset({"params", "param_names"})
#: Names of tensors of the average begin so.
AVERAGE = "ema."
#: Bytes of a buffer up to which each step copies it: torch counts no writes to the statistics of F.batch_norm,
#: and those are smaller.
_ALWAYS = 1 << 16


class LiveRefusal(ScriptRefusal):
    """The script's loop, or what its `build` returned, cannot be kept alive so: the text says what can."""


@dataclass(frozen=True)
class State:
    """The return value of `build(mesh)`: all that a script trains with on that mesh.

    Attributes:
        model: the model, as DDP, `fully_shard` or `parallelize_module` left it.
        optimizer: of its parameters, with element-wise state; or several.
        scheduler: of the learning rate; or several; None: it stays.
        ema: a module with averages of the parameters, such as torch.optim.swa_utils.AveragedModel.
        scaler: a torch.amp.GradScaler.
        extra: further objects with `state_dict` and `load_state_dict`, whose state is the same on all ranks.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    scheduler: Any = None
    ema: nn.Module | None = None
    scaler: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Its optimizers."""
        return tuple(self.optimizer) if isinstance(self.optimizer, list | tuple) else (self.optimizer,)  # type: ignore[return-value]

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """Its schedulers."""
        if self.scheduler is None:
            return ()
        return tuple(self.scheduler) if isinstance(self.scheduler, list | tuple) else (self.scheduler,)

    @property
    def others(self) -> dict[str, Any]:
        """Schedulers, scaler and further objects, by the names that they move under."""
        found = {f"scheduler {index}": each for index, each in enumerate(self.schedulers)}
        if self.scaler is not None:
            found["scaler"] = self.scaler
        return found | {f"extra {name}": each for name, each in self.extra.items()}


class _Kept(NamedTuple):
    """A tensor of the model as `build` left it; of a buffer, as its module has it now."""

    built: Tensor
    kind: Kind
    module: nn.Module | None = None  # of a buffer
    own_name: str = ""  # of a buffer within its module

    @property
    def tensor(self) -> Tensor:
        """The tensor. A script may bind another one to the name of a buffer."""
        now = None if self.module is None else self.module._buffers[self.own_name]
        return self.built if now is None else now

    def bind(self, buffer: Tensor) -> None:
        """Gives a buffer its name back."""
        assert self.module is not None
        self.module._buffers[self.own_name] = buffer


class _BufferCopy(NamedTuple):
    """A copy of a buffer. It is never written to."""

    buffer: Tensor
    version: int | None  # torch's count of writes to the buffer; None: it has none
    copy: Tensor

    def is_of(self, buffer: Tensor) -> bool:
        """Returns True if the buffer is as it was."""
        same = buffer is self.buffer and self.version is not None
        return same and buffer.nbytes > _ALWAYS and buffer._version == self.version


class LiveTensors:
    """The tensors of a `State` by name, as boxes of global ones.

    Args:
        state: what `build` returned.
        names: of the dimensions of its mesh.
    """

    def __init__(self, state: State, names: Sequence[str]) -> None:
        self.state, self._names = state, tuple(names)
        self.timed = False  # the loop's clock hears its gradients
        self._kept = dict(_tensors_of(state.model))
        if state.ema is not None:
            for name, kept in _tensors_of(state.ema):
                self._kept[AVERAGE + name] = kept if kept.kind == "buffer" else kept._replace(kind="frozen")
        self._copies: dict[str, _BufferCopy] = {}
        self._places = {name: self._placements(name, kept.tensor) for name, kept in self._kept.items()}

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that have a gradient."""
        return {name: kept.tensor for name, kept in self._kept.items() if kept.kind == "trained"}

    def buffers(self) -> list[tuple[_Kept, _BufferCopy]]:
        """Those of the model and the average, with a copy of each as it is now."""
        return [(kept, self._copy(name)) for name, kept in self._kept.items() if kept.kind == "buffer"]

    def _copy(self, name: str) -> _BufferCopy:
        """A buffer and its copy: the last one, where torch counted no write to the buffer since.

        Raises:
            LiveRefusal: another tensor is bound to the name, of another shape or dtype.
        """
        kept, last = self._kept[name], self._copies.get(name)
        buffer = kept.tensor
        if last is not None and last.is_of(buffer):
            return last
        if buffer is not kept.built and (buffer.shape, buffer.dtype) != (kept.built.shape, kept.built.dtype):
            raise LiveRefusal(
                f"the buffer {name} is {buffer.dtype} {list(buffer.shape)} now, and `build` made it "
                f"{kept.built.dtype} {list(kept.built.shape)}: let it keep its shape and dtype, or register it "
                "with persistent=False if it can be computed again"
            )
        cut = isinstance(buffer, DTensor)
        version = None if cut or buffer.is_inference() else buffer._version
        copy = (_local(buffer) if cut else buffer.detach()).clone()
        new = self._copies[name] = _BufferCopy(buffer, version, copy)
        return new

    @property
    def devices(self) -> frozenset[torch.device]:
        """The devices on which they lie."""
        return frozenset(kept.tensor.device for kept in self._kept.values())

    def described(self) -> tuple[MeshTensor, ...]:
        """The tensors, with their placements on this mesh alone."""
        return tuple(
            MeshTensor(
                name=name,
                shape=tuple(kept.tensor.shape),
                dtype=str(kept.tensor.dtype).removeprefix("torch."),
                kind=kept.kind,
                placements=(self._places[name],),
            )
            for name, kept in self._kept.items()
        )

    def _placements(self, name: str, tensor: Tensor) -> tuple[Placement, ...]:
        """The placements of a tensor in the dimensions of the mesh; a plain tensor is replicated."""
        if not isinstance(tensor, DTensor):
            return (Placement(),) * len(self._names)
        own = tensor.device_mesh.mesh_dim_names or ()
        if not own or not set(own) <= set(self._names):
            raise LiveRefusal(
                f"{name} is on a mesh of {own or 'dimensions without names'}: let `build` shard it over the "
                f"mesh that it is called with, {self._names}, or over parts of it as mesh['{self._names[-1]}']"
            )
        placed: dict[str, Placement] = {}
        cut: set[int] = set()
        for dimension, placement in reversed([*zip(own, tensor.placements, strict=True)]):
            if placement.is_replicate():
                placed[dimension] = Placement()
                continue
            if placement.is_partial():
                raise LiveRefusal(f"{name} is a partial sum on the mesh: parameters are sharded or replicated")
            dim: int = placement.dim  # type: ignore[attr-defined]
            # A mesh of one device has no stride to tell: FSDP over tensor parallelism always has one.
            placed[dimension] = Placement(dim=dim, strided=is_strided(placement) or dim in cut)
            cut.add(dim)
        return tuple(placed.get(dimension, Placement()) for dimension in self._names)

    def refuse_other_groups(self, mesh: DeviceMesh) -> None:
        """Refuses tensors and wrappers on groups that were made outside this call of `build`.

        Args:
            mesh: that `build` was called with.

        Raises:
            LiveRefusal: with the name of the tensor or wrapper.
        """
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        remedy = "make all groups and meshes within `build`, anew at each call, or take those of its mesh"
        for name, kept in self._kept.items():
            if isinstance(kept.tensor, DTensor):
                own = kept.tensor.device_mesh
                other = dict(zip(own.mesh_dim_names or (), own.shape, strict=True))
                if any(sizes[dimension] != size for dimension, size in other.items()):
                    raise LiveRefusal(
                        f"{name} is on a mesh of {other}, and `build` was called with {sizes}: {remedy}"
                    )
        for name, module in self.state.model.named_modules():
            if isinstance(module, DistributedDataParallel) and not in_world(module.process_group):
                raise LiveRefusal(f"{name or 'the model'} (DDP) has a process group of another world: {remedy}")

    def refuse_other_boxes(self, layouts: Holdings, device: str) -> None:
        """Compares the boxes of the layouts with torch's own arithmetic on the real mesh: a trial on one device
        cannot tell a dimension that is cut twice from a strided cut.

        Raises:
            LiveRefusal: a tensor lies otherwise.
        """
        for name, kept in self._kept.items():
            if not isinstance(kept.tensor, DTensor):
                continue
            boxes = layouts.boxes(Item(name, "buffer" if kept.kind == "buffer" else "value"), device)
            shape, offset = local_shape_and_offset(kept.tensor)
            if 0 in shape or not boxes:
                same = (0 in shape) == (not boxes)
            else:
                runs = [{(box.start[d], box.stop[d]) for box in boxes} for d in range(len(shape))]
                same = shape == tuple(sum(stop - start for start, stop in each) for each in runs)
                same = same and offset == boxes[0].start
            if not same:
                mesh = tuple(kept.tensor.device_mesh.shape)
                raise LiveRefusal(
                    f"{name} is cut as {kept.tensor.placements} on a mesh of {mesh}, and its local part is not "
                    "the one that elasticd counts with: cut each dimension of a tensor in one dimension of the "
                    "mesh, or by fully_shard over parallelize_module"
                )

    # -- state out, and in -----------------------------------------------------------------------------------

    def collected(self, layouts: Holdings, device: str) -> LocalState:
        """The state of this device, by reference.

        Raises:
            NotElementWise: an optimizer keeps something that cannot be cut into boxes.
        """
        values: dict[str, list[tuple[Box, Tensor]]] = {}
        buffers: dict[str, list[tuple[Box, Tensor]]] = {}
        for name, kept in self._kept.items():
            role: Role = "buffer" if kept.kind == "buffer" else "value"
            boxes = layouts.boxes(Item(name, role), device)
            if boxes:
                into = buffers if role == "buffer" else values
                # The next forward pass may write to a buffer while a snapshot is copied.
                local = self._copy(name).copy if role == "buffer" else _local(kept.tensor)
                into[name] = list(zip(boxes, _parts(local, boxes), strict=True))
        optimizer = _LocalOptimizer(self, layouts, device)
        extras: dict[str, object] = {name: each.state_dict() for name, each in self.state.others.items()}
        return collect(values, optimizer.owned, optimizer.view, buffers=buffers, extras=extras)

    def install(self, state: LocalState, layouts: Holdings, device: str) -> None:
        """Copies a state into these tensors, and gives it to the optimizers and schedulers.

        Raises:
            ValueError: something of it is missing, or parameters of one group had different settings.
        """
        with torch.no_grad():
            for name, kept in self._kept.items():
                item = Item(name, "buffer" if kept.kind == "buffer" else "value")
                if boxes := layouts.boxes(item, device):
                    moved = {shard.box: shard.planes["value"] for shard in state.tensors[item].shards}
                    for box, part in zip(boxes, _parts(_local(kept.tensor), boxes), strict=True):
                        part.copy_(moved[box])
        optimizer = _LocalOptimizer(self, layouts, device)
        restore_optimizer(state, optimizer.owned, optimizer.view)
        optimizer.give_back()
        extras = {name: from_text(text) for name, text in state.extras.items()}
        for name, each in self.state.others.items():
            if name in extras:
                each.load_state_dict(extras[name])


class SmallState:
    """The state beside parameters and their moments, as it is now: the body of a step may change it before the
    vote, as a forward pass does buffers, or `scaler.update()` after an update that was left out. A step that
    comes again begins with it."""

    def __init__(self, tensors: LiveTensors) -> None:
        state = tensors.state
        self._trained = [*tensors.trained.values()]
        self._buffers = tensors.buffers()
        self._settings = [
            (group, {key: _as_now(value) for key, value in group.items() if key not in _MEMBERS})
            for each in state.optimizers
            for group in each.param_groups
        ]
        self._others = [(each, _as_now(each.state_dict())) for each in state.others.values()]

    def is_as_before(self, other: Any) -> bool:
        """Returns True if an object with state, as the scaler, did not change."""
        return any(each is other and other.state_dict() == kept for each, kept in self._others)

    def restore(self) -> None:
        """Puts it back, and drops the gradients of the try that was lost."""
        for parameter in self._trained:
            parameter.grad = None
        for kept, before in self._buffers:
            _local(before.buffer).copy_(before.copy)
            kept.bind(before.buffer)
        for each, kept in self._others:
            each.load_state_dict(kept)
        for group, settings in self._settings:
            group.update(settings)


def _as_now(value: Any) -> Any:
    """A value of settings or of a state, which later changes leave as it is."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is dict:
        return {key: _as_now(each) for key, each in value.items()}
    if type(value) is tuple:
        return tuple(map(_as_now, value))
    return deepcopy(value)


class _View:
    """An optimizer of local boxes, as `collect` and `restore_optimizer` read it."""

    def __init__(self) -> None:
        self.state: dict[Tensor, dict[str, Any]] = {}
        self.param_groups: list[dict[str, Any]] = []


class _LocalOptimizer:
    """All optimizers of a state as one, of the boxes that this device has of their parameters."""

    def __init__(self, tensors: LiveTensors, layouts: Holdings, device: str) -> None:
        self.owned: list[Owned] = []
        self.view: Any = _View()
        self._tensors, self._boxes = tensors, {}
        parts: dict[int, list[Tensor]] = {}
        stepping = {
            id(parameter): each
            for each in tensors.state.optimizers
            for group in each.param_groups
            for parameter in group["params"]
        }
        for name, parameter in tensors.trained.items():
            local, boxes = _local(parameter), layouts.boxes(Item(name, "state"), device)
            cut = _parts(local, boxes) if boxes else [local]
            if not boxes:
                boxes = (Box.whole((0,) * max(1, local.dim())),)
            parts[id(parameter)] = cut
            self.owned += [Owned(name, box, part) for box, part in zip(boxes, cut, strict=True)]  # type: ignore[arg-type]
            self._boxes[name] = boxes
            if id(parameter) not in stepping:
                continue
            optimizer = stepping[id(parameter)]
            planes = {key: _local(value) for key, value in optimizer.state.get(parameter, {}).items()}
            if not planes:
                continue
            for index, part in enumerate(cut):
                self.view.state[part] = {
                    key: _parts(value, boxes)[index] if _wide(value, local) else value
                    for key, value in planes.items()
                }
        self._parts = parts
        for optimizer in tensors.state.optimizers:
            for group in optimizer.param_groups:
                held = [part for p in group["params"] for part in parts.get(id(p), ())]
                self.view.param_groups.append({**group, "params": held})

    def give_back(self) -> None:
        """Puts the state and the settings of the view into the real optimizers."""
        groups = [(each, group) for each in self._tensors.state.optimizers for group in each.param_groups]
        for (optimizer, group), view in zip(groups, self.view.param_groups, strict=True):
            group.update({key: value for key, value in view.items() if key not in _MEMBERS})
            for parameter in group["params"]:
                cut = self._parts.get(id(parameter), ())
                kept = [self.view.state[part] for part in cut if part in self.view.state]
                if kept:
                    optimizer.state[parameter] = _joined(parameter, cut, kept)


def _joined(parameter: Tensor, cut: Sequence[Tensor], kept: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The optimizer's state of a parameter from that of its boxes here, planes as DTensors where it is one."""
    local, found = _local(parameter), dict(kept[0])
    for key, value in kept[0].items():
        if not (isinstance(value, Tensor) and value.shape == cut[0].shape and (value.dim() or key != "step")):
            continue
        plane = value
        if len(kept) > 1:
            plane = torch.empty_like(local, dtype=value.dtype)
            at = {id(part): each[key] for part, each in zip(cut, kept, strict=True)}
            for part, into in zip(cut, _like(cut, local, plane), strict=True):
                into.copy_(at[id(part)])
        if isinstance(parameter, DTensor):
            plane = DTensor.from_local(
                plane,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        found[key] = plane
    return found


def _like(cut: Sequence[Tensor], local: Tensor, plane: Tensor) -> Iterator[Tensor]:
    """The parts of a plane that lie as `cut` lies in `local`."""
    base = local.storage_offset()
    for part in cut:
        yield plane.as_strided(part.shape, part.stride(), part.storage_offset() - base)


def _wide(value: object, local: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == local.shape and value.dim() > 0


def _local(tensor: Any) -> Any:
    """The part of a tensor that lies here, in its own memory."""
    if not isinstance(tensor, Tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _parts(local: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
    """The views of a local tensor that are its boxes: runs of indices in each dimension, one after another."""
    if len(boxes) == 1:
        return [local]
    runs = [
        sorted({(box.start[d], box.stop[d]) for box in boxes}, key=lambda run: run[0])
        for d in range(local.dim())
    ]
    starts = [[0, *accumulate(stop - start for start, stop in each)] for each in runs]
    at = {
        tuple(runs[d][i] for d, i in enumerate(index)): tuple(
            slice(starts[d][i], starts[d][i + 1]) for d, i in enumerate(index)
        )
        for index in product(*(range(len(each)) for each in runs))
    }
    return [local[at[tuple(zip(box.start, box.stop, strict=True))]] for box in boxes]


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, _Kept]]:
    """The parameters and the saved buffers of a model, by the names that its own modules give them."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    for name, parameter in model.named_parameters():
        yield clean(name), _Kept(parameter, "trained" if parameter.requires_grad else "frozen")
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield clean(f"{prefix}.{name}" if prefix else name), _Kept(buffer, "buffer", module, name)


def clean(name: str) -> str:
    """A name without what wrappers of compilation and recomputation put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def mesh_model(meshes: Sequence[AllowedMesh], built: Sequence[tuple[MeshTensor, ...]]) -> MeshModel:
    """The tensors of a model under each allowed mesh.

    Args:
        meshes: the allowed ones.
        built: of each of them what `build` made.

    Raises:
        LiveRefusal: names, shapes, dtypes or kinds differ from mesh to mesh.
    """
    first = built[0]
    for mesh, tensors in zip(meshes[1:], built[1:], strict=True):
        if why := difference(first, tensors):
            raise LiveRefusal(
                f"build makes another model on the mesh {mesh.text!r} than on {meshes[0].text!r}: {why}. Let "
                "names, shapes and dtypes of all tensors be the same on every mesh"
            )
    return MeshModel(
        meshes=tuple(meshes),
        tensors=tuple(
            MeshTensor(
                name=each[0].name,
                shape=each[0].shape,
                dtype=each[0].dtype,
                kind=each[0].kind,
                placements=tuple(tensor.placements[0] for tensor in each),
            )
            for each in zip(*(_by_name(first, tensors) for tensors in built), strict=True)
        ),
    )


def on_mesh(model: MeshModel, index: int) -> tuple[MeshTensor, ...]:
    """The tensors of a model with their placements on one of its meshes alone."""
    return tuple(
        MeshTensor(
            name=tensor.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            kind=tensor.kind,
            placements=(tensor.placements[index],),
        )
        for tensor in model.tensors
    )


def difference(one: Sequence[MeshTensor], other: Sequence[MeshTensor]) -> str:
    """Why the tensors of two builds are not those of one model; empty where they are."""
    named = {tensor.name: tensor for tensor in other}
    for tensor in one:
        found = named.pop(tensor.name, None)
        if found is None:
            return f"{tensor.name} is missing"
        mine, theirs = ((each.shape, each.dtype, each.kind) for each in (tensor, found))
        if mine != theirs:
            return f"{tensor.name} is {_words(found)} instead of {_words(tensor)}"
    return f"{next(iter(named))} is new" if named else ""


def _words(tensor: MeshTensor) -> str:
    return f"{tensor.kind} {tensor.dtype} {list(tensor.shape)}"


def _by_name(first: Sequence[MeshTensor], tensors: Sequence[MeshTensor]) -> list[MeshTensor]:
    named = {tensor.name: tensor for tensor in tensors}
    return [named[tensor.name] for tensor in first]
