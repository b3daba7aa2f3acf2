"""Jobs that train on a device mesh: the tensors of their model, and the plan that says which mesh they have.

A mesh has named dimensions, each of a number of devices. A tensor is replicated or cut in each of them, as
torch's DTensor places it. Devices that differ in a dimension of tensor parallelism alone take the same samples:
they are one lane.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import product
from typing import Any

import msgspec

from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.model import Kind
from elasticd_planner.spec.plan import Plan, Prediction
from elasticd_planner.value import StoredValue, Value, refuse

#: Names of mesh dimensions whose devices take the same samples.
SAME_SAMPLES = frozenset({"tp", "cp", "sp"})


class Placement(Value, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor in one dimension of a mesh: replicated, or cut in one of its own dimensions."""

    dim: int | None = None  # of the tensor, which is cut (None: each device of the mesh dimension has all)
    # Cut inside each of the parts that later dimensions of the mesh cut this dimension of the tensor into, and
    # not before them: FSDP over tensor parallelism, DTensor's `_StridedShard`.
    strided: bool = False

    def __post_init__(self) -> None:
        if self.dim is None and self.strided:
            refuse("placement: strided goes with the dimension of the tensor that is cut")
        if self.dim is not None and self.dim < 0:
            refuse(f"placement: dim must count from 0, not {self.dim}")


#: Of a tensor that each device of a mesh dimension has all of.
REPLICATED = Placement()


class AllowedMesh(Value, frozen=True, kw_only=True, omit_defaults=True):
    """The dimensions of a mesh that the job may have, in order. With `sizes` some have a fixed number of
    devices."""

    names: tuple[str, ...]
    sizes: tuple[int, ...] = ()  # by dimension, 0: any number (empty: any number in all)

    def __post_init__(self) -> None:
        if not self.names or "" in self.names:
            refuse("mesh: name its dimensions, as in 'replicate, shard=8'")
        twice = next((name for name, count in Counter(self.names).items() if count > 1), None)
        if twice is not None:
            refuse(f"mesh {self.text!r}: dimension {twice!r} is there twice")
        if self.sizes and (len(self.sizes) != len(self.names) or min(self.sizes) < 0):
            refuse(f"mesh {', '.join(self.names)}: sizes {self.sizes} must be one a dimension, 0 for any")
        if self.sizes and not any(self.sizes):
            msgspec.structs.force_setattr(self, "sizes", ())  # one way to write it

    @classmethod
    def from_text(cls, text: str) -> AllowedMesh:
        """The mesh of a text: "replicate, shard", or with sizes "replicate=*, shard=8". Raises Invalid."""
        names, sizes = [], []
        for part in text.split(","):
            name, given, size = (each.strip() for each in part.partition("="))
            if given and size != "*" and not (size.isdecimal() and int(size) > 0):
                refuse(f"mesh {text!r}: the size of {name} is {size!r}: give a number of devices, or *")
            if not name.isidentifier():
                refuse(f"mesh {text!r}: {name!r} is no name of a dimension, as in 'replicate, shard=8'")
            names.append(name)
            sizes.append(int(size) if size.isdecimal() else 0)
        return cls(names=tuple(names), sizes=tuple(sizes))

    @property
    def text(self) -> str:
        """The mesh as a user writes it."""
        sizes = self.sizes or (0,) * len(self.names)
        return ", ".join(
            f"{name}={size}" if size else name for name, size in zip(self.names, sizes, strict=True)
        )


class MeshTensor(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One parameter or buffer of a model that trains on a mesh."""

    name: str  # in the model, in full
    shape: tuple[int, ...]  # [elements] of all of it
    dtype: str
    kind: Kind = "trained"  # a trained one has an optimizer's state, cut as it is itself
    placements: tuple[tuple[Placement, ...], ...] = ()  # by allowed mesh, by dimension of that

    def __post_init__(self) -> None:
        for placement in (each for placed in self.placements for each in placed):
            if placement.dim is not None and placement.dim >= len(self.shape):
                refuse(f"{self.name} of shape {self.shape}: it has no dimension {placement.dim} to be cut in")


class MeshModel(Value, frozen=True, kw_only=True):
    """The tensors of a model that trains on a mesh, under each mesh that it may have."""

    meshes: tuple[AllowedMesh, ...]  # preferred first
    tensors: tuple[MeshTensor, ...]  # in the model's order

    def __post_init__(self) -> None:
        if not self.meshes:
            refuse("meshes: name at least one mesh that the job may have, as in meshes=('shard',)")
        names = Counter(mesh.names for mesh in self.meshes)
        for mesh in self.meshes:
            if names[mesh.names] > 1:
                refuse(f"meshes: {', '.join(mesh.names)} is there twice")
        for tensor in self.tensors:
            counts = tuple(len(placed) for placed in tensor.placements)
            if counts != tuple(len(mesh.names) for mesh in self.meshes):
                refuse(
                    f"{tensor.name}: it needs a placement for each dimension of each of the {len(self.meshes)} "
                    f"meshes, and has {counts}"
                )
        twice = next((n for n, count in Counter(t.name for t in self.tensors).items() if count > 1), None)
        if twice is not None:
            refuse(f"{twice}: two tensors of the model have this name")

    def mesh(self, names: Sequence[str]) -> int:
        """The index of the allowed mesh of these dimensions. Raises Invalid where there is none."""
        index = next((i for i, mesh in enumerate(self.meshes) if mesh.names == tuple(names)), None)
        if index is None:
            allowed = "; ".join(mesh.text for mesh in self.meshes)
            refuse(f"a mesh of {', '.join(names)} is none of those that the job may have: {allowed}")
        return index


def difference(ours: MeshModel, theirs: MeshModel) -> str:
    """The first difference of two models, of `theirs` in words; an empty string if they are the same."""
    if ours.meshes != theirs.meshes:
        texts = ["; ".join(mesh.text for mesh in model.meshes) for model in (theirs, ours)]
        return f"its meshes are {texts[0]}, not {texts[1]}"
    known = {tensor.name: tensor for tensor in ours.tensors}
    for tensor in theirs.tensors:
        before = known.pop(tensor.name, None)
        if before is None:
            return f"its model has a tensor {tensor.name}"
        for name in ("shape", "dtype", "kind"):
            if getattr(before, name) != getattr(tensor, name):
                return f"{tensor.name} has the {name} {getattr(tensor, name)}, not {getattr(before, name)}"
        for mesh, was, now in zip(ours.meshes, before.placements, tensor.placements, strict=True):
            if was != now:
                return f"{tensor.name} is placed {_placed(now)} on a mesh of {mesh.text}, not {_placed(was)}"
    if known:
        return f"its model has no tensor {next(iter(known))}"
    return "" if ours == theirs else "its tensors are in another order"


def _placed(placements: Sequence[Placement]) -> str:
    """The placements as torch writes them, without the factors of strided ones."""
    marks = ("R" if each.dim is None else f"{'_' * each.strided}S({each.dim})" for each in placements)
    return f"[{', '.join(marks)}]"


class MeshPlan(StoredValue, frozen=True, kw_only=True, dict=True, tag="mesh-plan"):
    """The mesh of a job, the devices on it, and the samples of a step that each lane takes."""

    number: int
    names: tuple[str, ...]  # of the mesh's dimensions
    shape: tuple[int, ...]  # [devices] of each dimension
    members: tuple[str, ...]  # devices in rank order: the last dimension of the mesh runs fastest
    samples: tuple[int, ...]  # of a step that each lane takes, lanes in rank order
    idle: tuple[str, ...] = ()  # standby
    binding: dict[str, str] = msgspec.field(default_factory=dict)  # incarnations of the members, by device
    prediction: Prediction | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if self.number < 0:
            refuse(f"plan {self.number}: its number must not be negative")
        if len(self.names) != len(self.shape) or min(self.shape, default=0) < 1:
            refuse(f"plan {self.number}: a mesh of {self.names} cannot have the shape {self.shape}")
        if len(self.members) != math.prod(self.shape):
            refuse(f"plan {self.number}: {len(self.members)} devices do not fill a mesh of {self.shape}")
        twice = next((d for d, n in Counter((*self.members, *self.idle)).items() if n > 1), None)
        if twice is not None:
            refuse(f"plan {self.number}: device {twice} is placed twice")
        if len(self.samples) != len(self.lanes):
            refuse(f"plan {self.number}: {len(self.lanes)} lanes need a share each, not {len(self.samples)}")
        if min(self.samples) < 1:
            refuse(f"plan {self.number}: each lane needs a sample at least, and the shares are {self.samples}")
        if self.binding and set(self.binding) != set(self.members):
            refuse(f"plan {self.number}: binding must name exactly the members {sorted(self.members)}")

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return sum(self.samples)

    @property
    def carriers(self) -> tuple[str, ...]:
        """None: every member of a mesh computes."""
        return ()

    @cached_property
    def coordinates(self) -> dict[str, tuple[int, ...]]:
        """The place of each member on the mesh, in rank order."""
        return dict(zip(self.members, product(*map(range, self.shape)), strict=True))

    @cached_property
    def lanes(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each lane, in rank order: they take the same samples."""
        found: dict[tuple[int, ...], list[str]] = {}
        apart = [d for d, name in enumerate(self.names) if name not in SAME_SAMPLES]
        for device, at in self.coordinates.items():
            found.setdefault(tuple(at[d] for d in apart), []).append(device)
        return tuple(map(tuple, found.values()))

    @cached_property
    def lane_of(self) -> dict[str, int]:
        """The index of each member's lane."""
        return {device: lane for lane, devices in enumerate(self.lanes) for device in devices}

    @cached_property
    def nodes(self) -> frozenset[str]:
        """The nodes that its members are on."""
        return frozenset(map(node_of, self.members))

    @property
    def mesh_text(self) -> str:
        """The mesh for people: "replicate=2, shard=2"."""
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True))

    @property
    def words(self) -> str:
        """The mesh and the shares of its lanes for people."""
        text = f"{self.mesh_text} on {len(self.members)} device{'s' if len(self.members) > 1 else ''}"
        shares = f"{self.global_batch} samples a step"
        if len({*self.samples}) == 1:
            return f"{text}; {shares}, {self.samples[0]} in each of {len(self.lanes)} lanes"
        listed = zip(self.lanes, self.samples, strict=True)
        most = ", ".join(f"{lane[0]}: {samples}" for lane, samples in [*listed][:16])
        more = f", and {len(self.lanes) - 16} more lanes" if len(self.lanes) > 16 else ""
        return f"{text}; {shares}, by lane {most}{more}"

    def rank(self, device: str) -> int:
        """The rank of a member. Raises ValueError for any other device."""
        return self.members.index(device)

    def same_mesh(self, other: JobPlan | None) -> bool:
        """Returns True if the workers of `other` stand where those of this plan do: groups, modules and state
        stay, and samples alone are shared otherwise."""
        return (
            isinstance(other, MeshPlan)
            and (self.names, self.shape, self.members) == (other.names, other.shape, other.members)
            and all(other.binding.get(device, one) == one for device, one in self.binding.items())
        )

    def replace(self, **changes: Any) -> MeshPlan:
        """The plan with other values of some fields, checked anew."""
        return msgspec.structs.replace(self, **changes)

    def to_json(self) -> bytes:
        """The plan as JSON."""
        return msgspec.json.encode(self)


#: A plan of a job: of the pipelines of a model that elasticd cuts, or of the mesh of a user's own loop.
JobPlan = Plan | MeshPlan
