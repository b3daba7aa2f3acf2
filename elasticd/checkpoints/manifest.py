"""A checkpoint's description of itself: `manifest.json`, from which all is read, and the parts it is made of.

torch.distributed.checkpoint's own `.metadata` lies beside it for programs that know nothing of elasticd. It is
a pickle; elasticd writes it and never reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from elasticd_migration.schema import MASTER, VALUE, Group, Scalar, Schema
from elasticd_migration.schema import merge as agreed
from elasticd_planner.layout.layouts import Role
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.model import Specs, owned_parameters
from elasticd_planner.value import StoredValue, Value

from elasticd.checkpoints.checksums import Damaged, FileSums
from elasticd.codec.decoding import decode_stored, decoder_of

MANIFEST = "manifest.json"
#: torch.distributed.checkpoint's index of the same files.
METADATA = ".metadata"
#: The roles that have a plane of values.
VALUES: tuple[Role, ...] = ("value", "buffer")
VERSION = 1
#: Types between which what is not trained is rounded, where a model is trained on in another.
_FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})

T = TypeVar("T", bound=msgspec.Struct)


class Record(Value, frozen=True, kw_only=True):
    """A value that `torch.save` wrote: `length` bytes from `at` in `file`."""

    file: str
    at: int
    length: int


class Chunk(Value, frozen=True, kw_only=True):
    """One box of one plane. Its elements lie in row-major order from byte `data` of the record's file on."""

    box: Box
    record: Record
    data: int


class PlaneEntry(Value, frozen=True, kw_only=True):
    """A tensor of an item's shape; dtype as torch names it, bytes of an element."""

    name: str
    dtype: str
    itemsize: int
    chunks: tuple[Chunk, ...]


class TensorEntry(Value, frozen=True, kw_only=True):
    """All that is saved of one item. Its scalars are kept here, to the bit. fused: the dimension of the shape
    that counts the parts of a fused parameter; a chunk is then of one part."""

    shape: tuple[int, ...]
    planes: tuple[PlaneEntry, ...]
    scalars: tuple[Scalar, ...] = ()
    fused: int | None = None

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape that its module gives it: the parts of a fused parameter lie one behind the other."""
        if self.fused is None:
            return self.shape
        parts, size = self.shape[self.fused : self.fused + 2]
        return (*self.shape[: self.fused], parts * size, *self.shape[self.fused + 2 :])

    def own(self, chunk: Chunk) -> Box:
        """The chunk's box in that shape."""
        if self.fused is None:
            return chunk.box
        dim, (start, stop) = self.fused, (chunk.box.start, chunk.box.stop)
        first = start[dim] * self.shape[dim + 1]
        return Box(
            start=(*start[:dim], first + start[dim + 1], *start[dim + 2 :]),
            stop=(*stop[:dim], first + stop[dim + 1], *stop[dim + 2 :]),
        )

    def plane(self, name: str) -> PlaneEntry | None:
        """The plane of this name; None: it was not saved."""
        return next((plane for plane in self.planes if plane.name == name), None)


#: Entries by role ("value", "state", "buffer") and full name.
Tensors = dict[Role, dict[str, TensorEntry]]


class Origin(Value, frozen=True, kw_only=True):
    """The origin of a state: `step` updates were applied, under the plan of this number, by these
    incarnations of the members' workers. seed, global_batch, samples and global_tokens decide what the next
    steps train on."""

    job: str
    model: str
    step: int
    plan: int
    binding: dict[str, str]
    seed: int
    global_batch: int
    samples: int
    elasticd: str
    torch: str
    global_tokens: int = 0
    longest: int = 0  # [tokens] the longest sequence so far, that of a step which could not be made included


class Part(StoredValue, frozen=True, kw_only=True, tag="checkpoint-part"):
    """The part that one rank wrote: boxes of tensors, and what it knows of parameter groups and of the job's
    extras."""

    device: str
    tensors: Tensors
    files: tuple[FileSums, ...]
    groups: tuple[Group, ...] = ()
    extras: dict[str, str] = msgspec.field(default_factory=dict)
    version: int = VERSION


class Manifest(StoredValue, frozen=True, kw_only=True, tag="checkpoint-manifest"):
    """A whole checkpoint. `serial` grows by one from checkpoint to checkpoint of a folder: the newest is the
    one that was written last, also where steps were gone back. groups and extras are a `Schema`'s. names: the
    full name of each value by its name in the state dict of the user's own modules; of one that is not in it,
    the two are the same. pretrained: the model as its library describes it, for an export; empty: it is of
    none. frozen: a digest of the frozen parameters, which are left out because the script makes them again;
    empty: none are left out."""

    origin: Origin
    serial: int
    tensors: Tensors
    files: tuple[FileSums, ...]
    groups: tuple[Group, ...] = ()
    extras: dict[str, str] = msgspec.field(default_factory=dict)
    names: dict[str, str] = msgspec.field(default_factory=dict)
    pretrained: str = ""
    frozen: str = ""
    version: int = VERSION

    @property
    def bytes(self) -> int:
        """Bytes of all files that the manifest names."""
        return sum(file.size for file in self.files)

    def own_names(self) -> dict[str, tuple[str, ...]]:
        """The values' names in the state dict of the user's own modules, by full name: several of a tied one.
        A value whose full name is missing here has the same one there."""
        own: dict[str, tuple[str, ...]] = {}
        for name, full in self.names.items():
            own[full] = (*own.get(full, ()), name)
        return own


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A body with its own checksum: a manifest vouches for all files, and this for the manifest."""

    sha256: str
    body: msgspec.Raw


def seal(value: msgspec.Struct) -> bytes:
    """A value as JSON with its SHA-256, as `unseal` reads it."""
    body = msgspec.json.encode(value)
    return msgspec.json.encode(_Sealed(sha256=hashlib.sha256(body).hexdigest(), body=msgspec.Raw(body)))


def unseal(path: Path, kind: type[T]) -> T:
    """Reads what `seal` made. Raises `Damaged`, which names the file."""
    try:
        sealed = decoder_of(_Sealed).decode(path.read_bytes())
        body = bytes(sealed.body)
        if hashlib.sha256(body).hexdigest() != sealed.sha256:
            raise Damaged(f"{path}: is not what was written (its checksum is another)")
        return decode_stored(body, kind)
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # msgspec's errors are the former
        raise Damaged(f"{path}: {error}") from None


def merge(origin: Origin, serial: int, parts: Sequence[Part]) -> Manifest:
    """The checkpoint that the ranks' parts make, in rank order.

    Raises ValueError where parts of one item do not fit or leave some of it out, and `Disagreement` where
    ranks tell different things of groups and extras.
    """
    tensors: Tensors = {}
    for part in parts:
        for role, entries in part.tensors.items():
            held = tensors.setdefault(role, {})
            for name, entry in entries.items():
                held[name] = _joined(name, held[name], entry) if name in held else entry
    for entries in tensors.values():
        for name, entry in entries.items():
            _check_whole(name, entry)
    schemas = [Schema(groups=part.groups, extras=part.extras) for part in parts]
    agreed_schemas = agreed(schemas, [part.device for part in parts])
    return Manifest(
        origin=origin,
        serial=serial,
        tensors=tensors,
        files=tuple(file for part in parts for file in part.files),
        groups=agreed_schemas.groups,
        extras=agreed_schemas.extras,
    )


def _joined(name: str, one: TensorEntry, two: TensorEntry) -> TensorEntry:
    if (one.shape, one.fused, one.scalars) != (two.shape, two.fused, two.scalars):
        raise ValueError(
            f"{name}: one rank has {one.shape} {one.scalars}, another {two.shape} {two.scalars}: they have "
            "not taken the same steps"
        )
    planes = {plane.name: plane for plane in one.planes}
    for plane in two.planes:
        known = planes.setdefault(plane.name, plane)
        if (known.dtype, known.itemsize) != (plane.dtype, plane.itemsize):
            raise ValueError(f"{name}: {plane.name} is {known.dtype} on one rank and {plane.dtype} on another")
        if known is not plane:
            planes[plane.name] = msgspec.structs.replace(known, chunks=(*known.chunks, *plane.chunks))
    return msgspec.structs.replace(one, planes=tuple(planes[key] for key in sorted(planes)))


def _check_whole(name: str, entry: TensorEntry) -> None:
    """Writers are disjoint by construction, so that counting elements is enough."""
    whole = Box.whole(entry.shape).size
    for plane in entry.planes:
        written = sum(chunk.box.size for chunk in plane.chunks)
        if written != whole:
            raise ValueError(f"{name}: of {plane.name} {written} elements were written and not {whole}")


def differences(manifest: Manifest, specs: Specs, master: str | None = None) -> str:
    """Why what was saved is not the state of this model, whose master weights, if any, are of type `master`; or
    nothing. The type that is computed in may be another: what is trained is what was stepped on."""
    saved = {name: entry for role in VALUES for name, entry in manifest.tensors.get(role, {}).items()}
    model = owned_parameters(specs)
    if manifest.frozen:
        model = {name: each for name, each in model.items() if each.kind != "frozen" or name in saved}
    missing = [name for name in model if name not in saved]
    extra = [name for name in saved if name not in model]
    if missing or extra:
        modules = _modules(saved), _modules(model)
        if modules[0] != modules[1]:
            return f"it has {modules[0]}, and the script's model has {modules[1]}"
        name = (missing or extra)[0]
        return (
            f"{name} is only in the {'model' if missing else 'checkpoint'} "
            f"({len(missing) + len(extra)} such tensors)"
        )
    for name, parameter in model.items():
        value = saved[name].plane(VALUE)
        have, want = value.dtype if value is not None else "nothing", parameter.dtype
        if parameter.kind == "trained":
            have, want = _stepped_on(manifest, name, have), master or want
        same = have == want or (parameter.kind != "trained" and {have, want} <= _FLOATING)
        if not same or saved[name].shape != parameter.shape:
            was, now = saved[name].shape, parameter.shape
            return f"{name} is {was} {have} in the checkpoint and {now} {want} in the model"
    return ""


def _modules(names: Iterable[str]) -> str:
    """The modules of a model, in words, by the names of its tensors."""
    firsts = sorted({name.partition(".")[0] for name in names})
    if {*firsts} <= {"embed", "blocks", "head"}:
        return "one module"
    return f"the modules {', '.join(firsts)}" if len(firsts) > 1 else f"the module {firsts[0]}"


def _stepped_on(manifest: Manifest, name: str, value: str) -> str:
    """The type of what an optimizer stepped on: of the master weights, else of the values."""
    entry = manifest.tensors.get("state", {}).get(name)
    master = entry.plane(MASTER) if entry is not None else None
    return master.dtype if master is not None else value
