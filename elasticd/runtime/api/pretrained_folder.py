"""`save_pretrained`: the model of a job as a folder of its own library, written by the plan's first rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from elasticd.runtime.api.full_state_dict import gathered
from elasticd.runtime.comm.groups import Group
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.model.pretrained import Pretrained


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `save_pretrained`."""

    path: str  # of the folder
    base: str | None  # of the folder whose tokenizer is copied
    max_shard_size: int | str  # of a file of weights, in bytes or as "5GB"
    merge: bool = False  # adapters are merged into the model


_folder_of = msgspec.json.Decoder(Folder)


def save(engine: Engine, pretrained: Pretrained, contents: str, folder: Folder | None) -> str:
    """Writes the folder. All members of the plan call it together, between two steps.

    Args:
        engine: of the plan in force.
        pretrained: writes it.
        contents: "value" or "average".
        folder: as this rank's script asks for it; None: its script is elsewhere, as after a recovery.

    Returns:
        Why it could not be written, the same on every rank; empty: it was.
    """
    group = engine.everyone
    asked = next(
        text for text in all_gather_text(group, msgspec.json.encode(folder) if folder else b"") if text
    )
    wanted = _folder_of.decode(asked)
    layouts = engine.layouts
    dtypes = {item.name: _dtype(layouts.layout(item).dtype) for item in layouts.items if item.role != "state"}

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        return gathered(engine, contents, dict.fromkeys(names))

    failure = pretrained.save(
        Path(wanted.path),
        read,
        dtypes=dtypes,
        writes=not group.rank,
        base=Path(wanted.base) if wanted.base is not None else None,
        max_shard_size=wanted.max_shard_size,
        merge=wanted.merge,
    )
    return all_gather_text(group, failure.encode())[0].decode()


def _dtype(name: str) -> torch.dtype:
    dtype: Any = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def all_gather_text(group: Group, text: bytes) -> list[bytes]:
    """The text of each rank, in rank order."""
    sizes = [int(size) for size in group.all_gather(torch.tensor([len(text)]))]
    if not any(sizes):
        return [b""] * len(sizes)
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    if text:
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = group.all_gather(padded)
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
