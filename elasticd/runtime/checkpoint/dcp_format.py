"""torch.distributed.checkpoint's format, and all that elasticd knows of torch's own files.

A data file is one `torch.save` after another. `.metadata` is a pickle of torch's `Metadata`, which says where
each tensor's boxes lie. Plain torch reads both without elasticd. What is used beyond torch's public names:
the class `_StorageInfo`, and where in a `torch.save` archive a tensor's bytes lie; tests/runtime/test_dcp.py
fails when torch changes either, and so does a checkpoint that is being written.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterable, Sequence
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from elasticd_migration.local_state import restore
from elasticd_migration.text_codec import from_text
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from elasticd.checkpoints.checksums import ChecksumWriter
from elasticd.checkpoints.manifest import Manifest, Record

#: Names a key of the state dict: plain torch nests by it.
Path = tuple[str | int, ...]
_LOCAL_HEADER = b"PK\x03\x04"


class FormatChanged(RuntimeError):
    """This torch writes its files in a way that elasticd does not know."""


class Small(NamedTuple):
    """Something that is saved whole: a number, a text, a tensor without dimensions. `like` is that tensor."""

    path: Path
    record: Record
    like: torch.Tensor | None


def data_file(rank: int) -> str:
    """The name that torch gives a rank's file."""
    return f"__{rank}_0.distcp"


def write_tensor(stream: ChecksumWriter, file: str, tensor: torch.Tensor) -> tuple[Record, int]:
    """Appends a host tensor that fills its storage; where it lies, and where in the file its bytes begin."""
    record = _save(stream, file, tensor)
    start = _data(stream.head)
    first = bytes(tensor.reshape(-1)[:64].view(torch.uint8).numpy())
    if bytes(stream.head[start : start + len(first)]) != first:
        raise FormatChanged(f"torch {torch.__version__} does not lay a tensor out as elasticd expects")
    return record, record.at + start


def _save(stream: ChecksumWriter, file: str, value: Any) -> Record:
    at = stream.mark()
    torch.save(value, cast(IO[bytes], stream))
    return Record(file=file, at=at, length=stream.size - at)


def _data(head: bytearray) -> int:
    """The offset of the bytes of the only storage in a `torch.save` archive: after its entry's header."""
    at = head.find(_LOCAL_HEADER)
    while at >= 0:
        name, extra = struct.unpack_from("<HH", head, at + 26)
        if head[at + 30 : at + 30 + name].endswith(b"/data/0"):
            return at + 30 + name + extra
        at = head.find(_LOCAL_HEADER, at + 4)
    raise FormatChanged(f"torch {torch.__version__} wrote an archive without data/0")


def paths_of(role: str, names: Sequence[str], plane: str) -> list[Path]:
    """The paths at which plain torch finds a plane: `model` is a module's state dict, in which a tied parameter
    has several `names`; `optimizer` is what `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`
    gives, in which it has the first of them."""
    if role == "state":
        return [("optimizer", "state", names[0], plane)]
    return [("model", name) for name in names]


def write_small(stream: ChecksumWriter, file: str, manifest: Manifest) -> list[Small]:
    """All that the manifest has as text, once more for plain torch."""
    return [
        Small(path, _save(stream, file, value), value if isinstance(value, torch.Tensor) else None)
        for path, value in _small(manifest)
    ]


def _small(manifest: Manifest) -> Iterable[tuple[Path, Any]]:
    cpu, own = torch.device("cpu"), manifest.own_names()
    for role, entries in manifest.tensors.items():
        for name, entry in entries.items():
            for scalar in entry.scalars:
                value = restore(scalar, cpu)
                for path in paths_of(role, own.get(name, (name,)), scalar.name):
                    yield path, value.cpu() if torch.is_tensor(value) else value
    for index, group in enumerate(manifest.groups):
        for key, value in from_text(group.settings).items():
            yield from _leaves(("optimizer", "param_groups", index, key), value)
        yield from _leaves(
            ("optimizer", "param_groups", index, "params"), [own.get(name, (name,))[0] for name in group.names]
        )
    for name, text in manifest.extras.items():
        yield from _leaves(("extras", name), from_text(text))
    origin = manifest.origin
    for key in ("step", "plan", "seed", "global_batch", "samples", "job", "model", "elasticd"):
        yield ("elasticd", key), getattr(origin, key)


def _leaves(path: Path, value: Any) -> Iterable[tuple[Path, Any]]:
    """As torch flattens a state dict: into mappings, and into lists that hold mappings or tensors."""
    if isinstance(value, np.ndarray):  # which torch does not read without pickle
        value = torch.from_numpy(value)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves((*path, str(key)), item)
    elif _whole(value) or isinstance(value, torch.Tensor):
        yield path, value
    else:
        for index, item in enumerate(value):
            yield from _leaves((*path, index), item)


def _whole(value: Any) -> bool:
    if not isinstance(value, list):
        return not isinstance(value, dict | torch.Tensor)
    return all(_whole(item) for item in value)


def metadata(manifest: Manifest, small: Iterable[Small]) -> bytes:
    """The file `.metadata` for the tensors of a manifest and for what is saved whole beside them."""
    kinds: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, Path] = {}
    places: dict[MetadataIndex, Any] = {}
    own = manifest.own_names()
    for role, entries in manifest.tensors.items():
        for name, entry in entries.items():
            for plane in entry.planes:
                boxes = [entry.own(chunk) for chunk in plane.chunks]
                chunks = [ChunkStorageMetadata(torch.Size(b.start), torch.Size(b.shape)) for b in boxes]
                properties = TensorProperties(dtype=getattr(torch, plane.dtype))
                for path in paths_of(role, own.get(name, (name,)), plane.name):
                    key = ".".join(map(str, path))
                    kinds[key] = TensorStorageMetadata(properties, torch.Size(entry.own_shape), chunks)
                    paths[key] = path
                    for box, chunk in zip(boxes, plane.chunks, strict=True):
                        places[MetadataIndex(key, box.start)] = _place(chunk.record)
    for one in small:
        key = ".".join(map(str, one.path))
        paths[key] = one.path
        if one.like is None:
            kinds[key] = BytesStorageMetadata()
            places[MetadataIndex(key)] = _place(one.record)
        else:
            size = one.like.shape
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            kinds[key] = TensorStorageMetadata(TensorProperties(dtype=one.like.dtype), size, [whole])
            places[MetadataIndex(key, whole.offsets)] = _place(one.record)
    told = Metadata(
        state_dict_metadata=kinds,
        planner_data=paths,
        storage_data=places,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
    out = io.BytesIO()
    pickle.dump(told, out)
    return out.getvalue()


def _place(record: Record) -> Any:
    return _StorageInfo(record.file, record.at, record.length)
