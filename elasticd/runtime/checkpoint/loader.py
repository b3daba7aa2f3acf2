"""The state that a job starts from: first values, or the newest checkpoint that all ranks can read.

A checkpoint may have been written under any layout: each rank reads the boxes that it is to hold, whatever
boxes they were written in. It may have been written by a job that computed in another type, too: what the
optimizer stepped on is then what is gone on from, as master weights or as the parameters themselves.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from elasticd_migration.local_state import LocalState, LocalTensor, Shard, restore, torch_dtype
from elasticd_migration.schema import MASTER, VALUE
from elasticd_planner.layout.holdings import Holdings
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box
from torch import Tensor

from elasticd.checkpoints import folder as folders
from elasticd.checkpoints.checksums import Damaged
from elasticd.checkpoints.disk import LocalDisk
from elasticd.checkpoints.manifest import (
    Manifest,
    PlaneEntry,
    TensorEntry,
    differences,
)
from elasticd.checkpoints.reader import CheckpointReader, Wanted
from elasticd.records import JobSpec
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.comm.groups import Group

log = logging.getLogger(__name__)

#: Checkpoints that a worker tells the leader of, the newest first.
MOST_TOLD = 16


class NoCheckpoint(RuntimeError):
    """There are checkpoints, and none of them can be read by all ranks: nothing is trained anew by mistake."""


@dataclass(frozen=True, kw_only=True)
class Types:
    """The types of a job's state: values as its layouts say, master weights (None: there are none)."""

    layouts: Holdings
    master: torch.dtype | None

    def value(self, item: Item) -> torch.dtype:
        """The type of an item's values under the layouts."""
        return torch_dtype(self.layouts.layout(item).dtype)


@dataclass(frozen=True, kw_only=True)
class FrozenValues:
    """The frozen parameters as the job's script makes them, for checkpoints that leave them out."""

    digest: str  # empty: the job's checkpoints have them
    value: Callable[[str, Box], Tensor]  # a box of a parameter, by its full name


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint's state for one rank; `step` updates were applied."""

    name: str
    step: int
    state: LocalState


def offered(folder: Path, spec: JobSpec, other: Callable[[Manifest], str] = lambda _: "") -> tuple[str, ...]:
    """The checkpoints that this worker sees and that look sound, the newest first. Makes the folder.

    `other` gives why a checkpoint is of another training where the record of the job does not say it, or
    nothing. Raises `NoCheckpoint` where all are damaged, ValueError where the newest is of another training, or
    none could be written: each message says what to do.
    """
    _refuse_unwritable(folder)
    found = folders.scan(folder)
    for item in found:
        if item.damage:
            log.warning("checkpoint %s is damaged and left out: %s", item.name, item.damage)
    sound = folders.sound(found)
    if found and not sound:
        raise NoCheckpoint(
            f"all {len(found)} checkpoints in {folder} are damaged ({found[0].damage}): restore one, or name "
            "an empty folder to train from the beginning"
        )
    newest = sound[0].manifest if sound else None
    if newest is not None and (why := _foreign(newest, spec) or other(newest)):
        raise ValueError(
            f"the checkpoint {sound[0].path} is of another training: {why}; name another folder, or train as "
            "before"
        )
    return tuple(item.name for item in sound[:MOST_TOLD])


def _refuse_unwritable(folder: Path) -> None:
    """Before the job starts, and not at its first checkpoint."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"no checkpoint can be written to {folder}: {error.strerror}; its folder must "
            "be one that all workers share and can write to: CheckpointingOptions(folder=...)"
        ) from None


def longest_trained(folder: Path) -> int:
    """Tokens of the longest sequence that the sound checkpoints of a folder know of."""
    found = folders.sound(folders.scan(folder))
    return max((item.manifest.origin.longest for item in found if item.manifest is not None), default=0)


def _foreign(manifest: Manifest, spec: JobSpec) -> str:
    """The samples of a step follow from its number, so that what decides them must not change."""
    tokens = manifest.origin.global_tokens or spec.global_tokens
    # With global_tokens a step has its samples by these, and global_batch is what is expected.
    for key in ("seed", "global_tokens" if tokens else "global_batch", "samples"):
        was, now = getattr(manifest.origin, key), getattr(spec, key)
        if was != now:
            return f"its {key} is {was}, not {now}"
    return differences(manifest, spec.specs, spec.numbers.master if spec.numbers is not None else None)


def start_from(
    folder: Path,
    names: Iterable[str],
    types: Types,
    group: Group,
    accelerator: Accelerator = CPU,
    frozen: FrozenValues | None = None,
) -> Loaded:
    """The first of the named checkpoints that all members of `group` can read; each calls this, and gets what
    it is to hold under the layouts of `types`, on its accelerator; of a checkpoint without the frozen
    parameters these come from `frozen`. Raises `NoCheckpoint` on all alike, or what the group raises.
    """
    reasons: dict[str, list[str]] = {}
    for name in names:
        loaded, why = _tried(folder, name, types.layouts.held(group.me), types, accelerator, frozen)
        oks = group.all_gather(torch.tensor([int(loaded is not None)]))
        if loaded is not None and all(int(ok) for ok in oks):
            if group.rank == 0:
                clear(folder)
                log.info("starting from %s", name)
            return loaded
        reasons.setdefault(why or "another rank cannot read it", []).append(name)
        log.warning("checkpoint %s is not used: %s", name, why or "another rank cannot read it")
    refusals = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
    raise NoCheckpoint(
        f"none of the checkpoints in {folder} can be used: {refusals}. Restore one, or name an empty folder to "
        "train from the beginning"
    )


def clear(folder: Path) -> None:
    """Removes what earlier starts left half written: a folder is of one job at a time."""
    left = folders.tidy(LocalDisk(), folder)
    if left:
        log.info("removed from %s what was left half written: %s", folder, ", ".join(left))


def _tried(
    folder: Path,
    name: str,
    held: Mapping[Item, Sequence[Box]],
    types: Types,
    accelerator: Accelerator,
    frozen: FrozenValues | None,
) -> tuple[Loaded | None, str]:
    found = folders.look(folder / name)
    if found.damage or found.manifest is None:
        return None, found.damage
    left_out = found.manifest.frozen
    if left_out and left_out != (frozen.digest if frozen is not None else ""):
        return None, (
            "it leaves out the frozen parameters, and this script's are not those that it was trained with: "
            "load the same base model"
        )
    try:
        state = load(found.path, found.manifest, held, types, accelerator.device, frozen)
    except (Damaged, OSError, ValueError) as error:
        return None, str(error)
    return Loaded(name=name, step=found.manifest.origin.step, state=state), ""


class _Source(NamedTuple):
    """The source that a plane of a job's state is read from, and the type that it is to be of."""

    name: str
    item: Item
    plane: PlaneEntry
    dtype: torch.dtype


def load(
    path: Path,
    manifest: Manifest,
    held: Mapping[Item, Sequence[Box]],
    types: Types | None = None,
    place: torch.device = CPU.device,
    frozen: FrozenValues | None = None,
) -> LocalState:
    """The boxes that one rank is to hold, on the device `place`, in the types of its job (None: as they were
    saved). State that no step had made when it was written is left out. Parameters that the checkpoint leaves
    out come from `frozen`.

    Raises `Damaged`, which names the file.
    """
    reader = CheckpointReader(path, manifest)
    wanted: list[Wanted] = []
    tensors: dict[Item, LocalTensor] = {}
    read: list[tuple[dict[str, torch.Tensor], _Source]] = []
    for item, boxes in held.items():
        if manifest.frozen and frozen is not None and item.role == "value" and _entry(manifest, item) is None:
            planes_of = ({VALUE: frozen.value(item.name, box).to(place)} for box in boxes)
            shards_of = (Shard(box=box, planes=each) for box, each in zip(boxes, planes_of, strict=True))
            tensors[item] = LocalTensor(shards=tuple(shards_of))
            continue
        sources = _sources(manifest, item, types)
        entry = _entry(manifest, item) if item.role == "state" else reader.entry(item)
        if entry is None and not sources:
            continue
        shards = []
        for box in boxes:
            planes: dict[str, torch.Tensor] = {}
            for source in sources:
                planes[source.name] = torch.empty(box.shape, dtype=torch_dtype(source.plane.dtype))
                read.append((planes, source))
                if not box.empty:
                    flat = planes[source.name].reshape(-1).view(torch.uint8).numpy()
                    wanted.append(Wanted(source.item, source.plane.name, box, flat))
            shards.append((box, planes))
        tensors[item] = LocalTensor(
            shards=tuple(Shard(box=box, planes=planes) for box, planes in shards),
            scalars={scalar.name: restore(scalar, place) for scalar in entry.scalars} if entry else {},
        )
    reader.read(wanted)
    for planes, source in read:
        planes[source.name] = planes[source.name].to(place).to(source.dtype)
    return LocalState(tensors=tensors, groups=manifest.groups, extras=manifest.extras)


def _entry(manifest: Manifest, item: Item) -> TensorEntry | None:
    return manifest.tensors.get(item.role, {}).get(item.name)


def _sources(manifest: Manifest, item: Item, types: Types | None) -> list[_Source]:
    """Of each plane that a job holds of an item. Master weights come from values where none were saved; values
    from master weights where they are of another type."""

    def plane(of: Item, name: str) -> PlaneEntry | None:
        entry = _entry(manifest, of)
        return entry.plane(name) if entry is not None else None

    entry = _entry(manifest, item)
    saved = [
        _Source(each.name, item, each, torch_dtype(each.dtype))
        for each in (entry.planes if entry is not None else ())
    ]
    if types is None:
        return saved
    if item.role == "state":
        if types.master is None:
            return [source for source in saved if source.name != MASTER]
        values = Item(item.name, "value")
        value = plane(values, VALUE)
        if value is None or plane(item, MASTER) is not None or torch_dtype(value.dtype) != types.master:
            return saved
        return [*saved, _Source(MASTER, values, value, types.master)]
    wanted, state = types.value(item), Item(item.name, "state")
    master = plane(state, MASTER)
    if master is not None and any(source.dtype != wanted for source in saved):
        return [_Source(VALUE, state, master, wanted)]
    floating = wanted.is_floating_point
    return [
        each._replace(dtype=wanted) if floating and each.dtype.is_floating_point else each for each in saved
    ]
