"""A checkpoint as one safetensors file, written a piece at a time: a model larger than memory is no matter.
Tensors have the shapes of the model's own modules, whatever rules it was trained under.

The format (github.com/huggingface/safetensors, "Format"): eight bytes with the header's length, the header as
JSON (dtype, shape and byte range of each tensor, by name), then the tensors' bytes in row-major order.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from elasticd_planner.layout.layouts import Item, Role
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.model import BALANCE_COUNTS

from elasticd.checkpoints.manifest import Manifest, PlaneEntry
from elasticd.checkpoints.reader import CheckpointReader, Wanted

#: Bytes of one tensor that are read and written at once.
PIECE_BYTES = 64 << 20

#: safetensors' names of torch's dtypes.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


#: What the names of a model of one module begin with.
SECTIONS = frozenset({"embed", "blocks", "head"})


class CannotExport(ValueError):
    """The checkpoint has what a file cannot hold, or makes no folder of its library; the message says why."""


def export(path: Path, manifest: Manifest, out: Path, *, moments: bool = False, module: str = "") -> int:
    """Writes a checkpoint into one file, which gets its name when it is whole.

    Parameters and buffers have the names of the user's own modules, a tied one the first of its names; those of
    a model of several modules begin with the module's.

    Args:
        path: of the checkpoint.
        manifest: its own.
        out: the file.
        moments: the optimizer's planes follow as "optimizer.state.NAME.PLANE".
        module: of a model of several: that one alone, by the names that it has by itself. Empty: all.

    Returns:
        The bytes of the file.

    Raises:
        Damaged: the checkpoint is.
        CannotExport: it has what a file cannot hold, or no such module.
    """
    own = {full: names[0] for full, names in manifest.own_names().items()}
    prefix = f"{module}." if module else ""
    if module:
        _check_module(manifest, module)
    tensors = [
        (_key(own.get(name, name).removeprefix(prefix), role, plane), Item(name, role), plane)
        for role, entries in manifest.tensors.items()
        if role != "state" or moments
        for name, entry in entries.items()
        if name.startswith(prefix) and not name.endswith(f".{BALANCE_COUNTS}")
        for plane in entry.planes
    ]
    header: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "model": manifest.origin.model,
            "step": str(manifest.origin.step),
            "elasticd": manifest.origin.elasticd,
        }
    }
    at = 0
    for key, item, plane in tensors:
        shape = manifest.tensors[item.role][item.name].own_shape  # row by row the same bytes
        if plane.dtype not in DTYPES:
            raise CannotExport(f"{key} is {plane.dtype}, which safetensors has no name for")
        size = math.prod(shape) * plane.itemsize
        header[key] = {"dtype": DTYPES[plane.dtype], "shape": shape, "data_offsets": (at, at + size)}
        at += size
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    reader = CheckpointReader(path, manifest)
    part = out.with_name(out.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, item, plane in tensors:
                for box in _slabs(Box.whole(reader.entry(item).shape), plane):
                    into = np.empty(box.size * plane.itemsize, dtype=np.uint8)
                    reader.read([Wanted(item, plane.name, box, into)])
                    file.write(into.data)
            file.flush()
            os.fsync(file.fileno())
        part.rename(out)
    finally:
        part.unlink(missing_ok=True)
    return 8 + len(text) + at


def _check_module(manifest: Manifest, module: str) -> None:
    """Refuses a module that the model does not have."""
    names = (name for entries in manifest.tensors.values() for name in entries)
    modules = sorted({name.partition(".")[0] for name in names})
    if {*modules} <= SECTIONS:
        raise CannotExport(f"{manifest.origin.model} has one module: leave --module {module} out")
    if module not in modules:
        raise CannotExport(f"{manifest.origin.model} has no module {module!r}; it has: {', '.join(modules)}")


def _key(name: str, role: Role, plane: PlaneEntry) -> str:
    return name if role != "state" else f"optimizer.state.{name}.{plane.name}"


def _slabs(box: Box, plane: PlaneEntry) -> Iterator[Box]:
    """`box` in row-major order, in runs of at most `PIECE_BYTES` (or of one row of its first
    dimension)."""
    if not box.start or box.size * plane.itemsize <= PIECE_BYTES:
        yield box
        return
    row = box.size // box.shape[0] * plane.itemsize
    rows = max(1, PIECE_BYTES // row)
    for start in range(0, box.stop[0], rows):
        stop = min(start + rows, box.stop[0])
        yield Box(start=(start, *box.start[1:]), stop=(stop, *box.stop[1:]))
