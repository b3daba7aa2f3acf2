"""The process behind `elasticd checkpoint export --hf`: writes a checkpoint as a folder of transformers.

    python -m elasticd.models.huggingface CHECKPOINT FOLDER [--base FOLDER] [--max-shard-size SIZE]

Exit code 0: the folder is written; 1: it is not, for the reason on standard error.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from elasticd_migration.schema import VALUE
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box
from torch import Tensor

from elasticd.checkpoints.checksums import Damaged
from elasticd.checkpoints.export import CannotExport
from elasticd.checkpoints.folder import look
from elasticd.checkpoints.manifest import VALUES, Manifest, TensorEntry
from elasticd.checkpoints.reader import CheckpointReader, Wanted
from elasticd.models.huggingface.export import HfPretrained, from_description
from elasticd.runtime.model.pretrained import SHARD_SIZE
from elasticd.runtime.model.validation import ModelError


def export(checkpoint: Path, folder: Path, base: Path | None, max_shard_size: int | str) -> int:
    """Writes a checkpoint's model as a folder of transformers, a file of weights after the other.

    Returns:
        The step of the checkpoint.

    Raises:
        CannotExport: it is damaged, of no model of transformers, or the folder cannot be written.
    """
    found = look(checkpoint)
    if found.damage or found.manifest is None:
        raise CannotExport(found.damage)
    manifest = found.manifest
    pretrained, entries = _pretrained(manifest, base), _entries(manifest)
    lacking = [name for name in pretrained.owners.values() if name not in entries]
    if lacking:
        raise CannotExport(
            f"{checkpoint} has no {lacking[0]}, as {base or 'the model that it describes'} has: is it of this "
            "model?"
        )
    reader = CheckpointReader(checkpoint, manifest)

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        return {name: _value(reader, entries, name) for name in names}

    failure = pretrained.save(
        folder,
        read,
        dtypes={name: _dtype(entry) for name, (_, entry) in entries.items()},
        writes=True,
        base=base,
        max_shard_size=max_shard_size,
    )
    if failure:
        raise CannotExport(failure)
    return found.step


def _pretrained(manifest: Manifest, base: Path | None) -> HfPretrained:
    """The model as the checkpoint describes it, or the base's where it does not; with values of the base's of
    modules that were not trained."""
    if manifest.pretrained:
        pretrained = from_description(manifest.pretrained)
    elif base is not None:
        pretrained = _of_base(base)
    else:
        raise CannotExport(
            "the checkpoint does not describe its model, because an earlier elasticd wrote it or it is none of "
            "transformers: name the folder of the model that was trained, --base FOLDER"
        )
    return pretrained


def _of_base(base: Path) -> HfPretrained:
    from elasticd.models.huggingface import from_hf
    from elasticd.models.huggingface.folder import model_on_meta

    made = from_hf(model_on_meta(base)).pretrained
    assert isinstance(made, HfPretrained)
    return made


def _entries(manifest: Manifest) -> dict[str, tuple[Item, TensorEntry]]:
    """Parameters and buffers by full name."""
    return {
        name: (Item(name, role), entry)
        for role in VALUES
        for name, entry in manifest.tensors.get(role, {}).items()
    }


def _dtype(entry: TensorEntry) -> torch.dtype:
    plane = entry.plane(VALUE)
    dtype: Any = getattr(torch, plane.dtype if plane is not None else "float32")
    assert isinstance(dtype, torch.dtype)
    return dtype


def _value(reader: CheckpointReader, entries: Mapping[str, tuple[Item, TensorEntry]], name: str) -> Tensor:
    """A whole value, of the shape of its module: row by row the bytes of a fused one are the same."""
    item, entry = entries[name]
    dtype, box = _dtype(entry), Box.whole(entry.shape)
    into = np.empty(box.size * dtype.itemsize, dtype=np.uint8)
    reader.read([Wanted(item, VALUE, box, into)])
    return torch.from_numpy(into).view(dtype).reshape(entry.own_shape)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command of the command line."""
    parser = argparse.ArgumentParser(prog="python -m elasticd.models.huggingface")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--max-shard-size", default=SHARD_SIZE)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        step = export(asked.checkpoint, asked.folder, asked.base, asked.max_shard_size)
    except (CannotExport, Damaged, ModelError, OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(f"{asked.folder}: step {step}; from_pretrained({str(asked.folder)!r}) loads it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
