"""The process behind `elasticd checkpoint export --hf`: writes a checkpoint as a folder of transformers.

    python -m elasticd.models.huggingface CHECKPOINT FOLDER [--base FOLDER] [--max-shard-size SIZE] [--merge]

Exit code 0: the folder is written; 1: it is not, for the reason on standard error.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from elasticd.models.huggingface.described import from_description
from elasticd.models.huggingface.export import HfExporter
from elasticd.models.huggingface.folder import FolderWeights, model_on_meta
from elasticd.models.huggingface.peft_export import PeftPretrained
from elasticd.runtime.model.pretrained import SHARD_SIZE, Pretrained
from elasticd.runtime.model.validation import ModelError


def export(
    checkpoint: Path, folder: Path, base: Path | None, max_shard_size: int | str, merge: bool = False
) -> int:
    """Writes a checkpoint's model as a folder of transformers, a file of weights after the other; an adapter
    as PEFT does, or merged.

    Returns:
        The step of the checkpoint.

    Raises:
        CannotExport: it is damaged, of no model of transformers, or the folder cannot be written.
    """
    item = look(checkpoint)
    if item.damage or item.manifest is None:
        raise CannotExport(item.damage)
    manifest = item.manifest
    pretrained, entries = _pretrained(manifest, base), _entries(manifest)
    if merge and not pretrained.adapted:
        raise CannotExport(f"{checkpoint} has no adapters to merge: leave --merge out")
    outside = _left_out(manifest, pretrained, base) if merge else {}
    lacking = [name for name in pretrained.wanted(merge) if name not in entries and name not in outside]
    if lacking:
        raise CannotExport(
            f"{checkpoint} has no {lacking[0]}, as {base or 'the model that it describes'} has: is it of this "
            "model?"
        )
    reader = CheckpointReader(checkpoint, manifest)

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        return {
            name: outside[name][1]() if name in outside else _value(reader, entries, name) for name in names
        }

    dtypes = {name: _dtype(entry) for name, (_, entry) in entries.items()}
    failure = pretrained.save(
        folder,
        read,
        dtypes=dtypes | {name: dtype for name, (dtype, _) in outside.items()},
        writes=True,
        base=base,
        max_shard_size=max_shard_size,
        merge=merge,
    )
    if failure:
        raise CannotExport(failure)
    return item.step


def _pretrained(manifest: Manifest, base: Path | None) -> Pretrained:
    """The model as the checkpoint describes it, or the base's where it does not; with the base's values of what
    no section holds."""
    if manifest.pretrained:
        pretrained = from_description(manifest.pretrained)
    elif base is not None:
        pretrained = _of_base(base)
    else:
        raise CannotExport(
            "the checkpoint does not describe its model, because an earlier elasticd wrote it or it is none of "
            "transformers: name the folder of the model that was trained, --base FOLDER"
        )
    return with_values_of(base, pretrained) if isinstance(pretrained, HfExporter) else pretrained


def with_values_of(base: Path | None, pretrained: HfExporter) -> HfExporter:
    """The model with the base's values of what no section holds, as modules that forward does not call."""
    shapes = {name: tuple(value.shape) for name, value in pretrained.skeleton.state_dict().items()}
    lacking = [name for name in shapes if name not in pretrained.owners and name not in pretrained.values]
    if base is None or not lacking:
        return pretrained
    reader = FolderWeights(base, pretrained.skeleton, str)
    values = {name: reader.read(name, Box.whole(shapes[name])) for name in lacking if reader.has(name)}
    return replace(pretrained, values={**pretrained.values, **values})


def _of_base(base: Path) -> HfExporter:
    from elasticd.models.huggingface import from_hf

    pretrained = from_hf(model_on_meta(base)).pretrained
    assert isinstance(pretrained, HfExporter)
    return pretrained


def _left_out(
    manifest: Manifest, pretrained: Pretrained, base: Path | None
) -> dict[str, tuple[torch.dtype, Callable[[], Tensor]]]:
    """The type and the value, from the base's folder, of the frozen values that the checkpoint leaves out, by
    full name."""
    if not manifest.frozen or not isinstance(pretrained, PeftPretrained):
        return {}
    if base is None:
        raise CannotExport(
            "the checkpoint has the adapters alone: name the folder of the base model, --base FOLDER"
        )
    entries, model = _entries(manifest), model_on_meta(base)
    names = {full: name for full, name in pretrained.names_of_base.items() if full not in entries}
    weights = FolderWeights(base, model, names.__getitem__)
    values: dict[str, tuple[torch.dtype, Callable[[], Tensor]]] = {}
    for full, name in names.items():
        shape = tuple(model.get_parameter(name).shape)
        first = Box(start=(0,) * len(shape), stop=(1,) * len(shape))
        values[full] = weights.read(full, first).dtype, partial(weights.read, full, Box.whole(shape))
    return values


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
    parser.add_argument("--merge", action="store_true")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        step = export(asked.checkpoint, asked.folder, asked.base, asked.max_shard_size, asked.merge)
    except (CannotExport, Damaged, ModelError, OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    whole = (asked.folder / "config.json").exists()
    loader = "from_pretrained(" if whole else "PeftModel.from_pretrained(base, "
    print(f"{asked.folder}: step {step}; {loader}{str(asked.folder)!r}) loads it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
