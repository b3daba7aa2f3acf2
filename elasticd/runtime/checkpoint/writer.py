"""The files that the ranks write for one checkpoint, in an order that leaves no half of it that looks whole.

Every rank: its data, synced; its part (what lies where), synced. Then the first rank: the small values,
`.metadata`, the manifest, all synced. The manifest is the last file that is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from elasticd_migration.local_state import LocalState
from elasticd_migration.schema import Schema
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.mesh import JobPlan

from elasticd.checkpoints.checksums import ChecksumWriter, FileSums
from elasticd.checkpoints.disk import Disk
from elasticd.checkpoints.folder import UNFINISHED, name_of
from elasticd.checkpoints.manifest import (
    MANIFEST,
    METADATA,
    Chunk,
    Origin,
    Part,
    PlaneEntry,
    TensorEntry,
    Tensors,
    merge,
    seal,
    unseal,
)
from elasticd.records import JobSpec
from elasticd.runtime.checkpoint import dcp_format
from elasticd.runtime.checkpoint.staging import Piece
from elasticd.version import __version__


@dataclass(frozen=True, kw_only=True)
class Task:
    """One rank's part in a checkpoint that goes to `path`. `held` are its pieces on the host; `shapes` has
    the whole shape of every item that it writes something of, `fused` the dimension of the parts of fused
    parameters by name, `small` the rest of its state: scalars, groups and extras, which no step changes any
    more. `names`, `pretrained` and `frozen` are the manifest's."""

    origin: Origin
    path: Path
    device: str
    members: tuple[str, ...]
    held: Sequence[Piece] = ()
    shapes: dict[Item, tuple[int, ...]]
    fused: Mapping[str, int] = field(default_factory=dict)
    small: LocalState
    names: Mapping[str, str] = field(default_factory=dict)
    pretrained: str = ""
    frozen: str = ""

    @property
    def step(self) -> int:
        """Updates that the saved state has seen."""
        return self.origin.step

    @property
    def rank(self) -> int:
        """The rank of this device, which numbers its files."""
        return self.members.index(self.device)

    @property
    def name(self) -> str:
        """The name of the folder once the checkpoint is whole."""
        return self.path.name.removesuffix(UNFINISHED)


def origin_of(spec: JobSpec, plan: JobPlan, step: int, longest: int = 0) -> Origin:
    """The training's entry in a checkpoint's manifest: see `Origin`."""
    return Origin(
        job=spec.job,
        model=spec.model.name,
        step=step,
        plan=plan.number,
        binding=dict(plan.binding),
        seed=spec.seed,
        global_batch=spec.global_batch,
        samples=spec.samples,
        global_tokens=spec.global_tokens,
        longest=longest,
        elasticd=__version__,
        torch=str(torch.__version__),
    )


def path_of(folder: Path, plan: JobPlan, step: int) -> Path:
    """The folder in which a checkpoint is written, the same on every rank."""
    return folder / (name_of(step, plan.number, plan.binding.get(plan.members[0], "unbound")) + UNFINISHED)


def write_part(disk: Disk, task: Task, check: Callable[[], None]) -> None:
    """This rank's files. `check` is called before each block; what it raises ends the writing."""
    disk.make_folder(task.path)
    schema = task.small.schema()
    name = dcp_format.data_file(task.rank)
    with closing(disk.create(task.path / name)) as stream:
        summed = ChecksumWriter(stream, check)
        tensors = _write_tensors(summed, name, task, schema)
        file = summed.finish(name)
    part = Part(
        device=task.device,
        tensors=tensors,
        files=(file,),
        groups=schema.groups,
        extras=schema.extras,
    )
    _write_file(disk, task.path / _part_file(task.rank), seal(part), check)
    disk.sync_folder(task.path)


def _write_tensors(stream: ChecksumWriter, file: str, task: Task, schema: Schema) -> Tensors:
    planes: dict[Item, dict[str, PlaneEntry]] = {item: {} for item in task.shapes}
    for item, plane, box, values in _in_parts(task):
        record, data = dcp_format.write_tensor(stream, file, values)
        known = planes[item].get(plane)
        chunk = Chunk(box=box, record=record, data=data)
        planes[item][plane] = PlaneEntry(
            name=plane,
            dtype=str(values.dtype).removeprefix("torch."),
            itemsize=values.element_size(),
            chunks=(*known.chunks, chunk) if known is not None else (chunk,),
        )
    tensors: Tensors = {}
    for item, held in planes.items():
        told = schema.of(item)
        tensors.setdefault(item.role, {})[item.name] = TensorEntry(
            shape=task.shapes[item],
            planes=tuple(held[plane] for plane in sorted(held)),
            scalars=told.scalars if told is not None else (),
            fused=task.fused.get(item.name),
        )
    return tensors


def _in_parts(task: Task) -> Iterator[Piece]:
    """The pieces, those of fused parameters part by part: each is a box of its module's own tensor, too, so
    that whoever reads them by torch's index finds the shapes that the modules have."""
    for piece in task.held:
        dim = task.fused.get(piece.item.name)
        if dim is None:
            yield piece
            continue
        start, stop = piece.box.start, piece.box.stop
        for index, part in enumerate(range(start[dim], stop[dim])):
            box = Box(
                start=(*start[:dim], part, *start[dim + 1 :]), stop=(*stop[:dim], part + 1, *stop[dim + 1 :])
            )
            yield Piece(piece.item, piece.plane, box, piece.values.select(dim, index).clone())


def write_whole(disk: Disk, task: Task, serial: int, check: Callable[[], None]) -> None:
    """Writes the first rank's files, once all parts are there. Raises `Damaged` or ValueError where they do not
    make a whole."""
    names = [_part_file(rank) for rank in range(len(task.members))]
    manifest = msgspec.structs.replace(
        merge(task.origin, serial, [unseal(task.path / name, Part) for name in names]),
        names=dict(task.names),
        pretrained=task.pretrained,
        frozen=task.frozen,
    )
    small = dcp_format.data_file(len(task.members))
    with closing(disk.create(task.path / small)) as stream:
        summed = ChecksumWriter(stream, check)
        records = dcp_format.write_small(summed, small, manifest)
        files = [*manifest.files, summed.finish(small)]
    files.append(_write_file(disk, task.path / METADATA, dcp_format.metadata(manifest, records), check))
    manifest = msgspec.structs.replace(manifest, files=tuple(files))
    _write_file(disk, task.path / MANIFEST, seal(manifest), check)
    for name in names:
        disk.remove(task.path / name)
    disk.sync_folder(task.path)


def _write_file(disk: Disk, path: Path, data: bytes, check: Callable[[], None]) -> FileSums:
    with closing(disk.create(path)) as stream:
        summed = ChecksumWriter(stream, check)
        summed.write(data)
        return summed.finish(path.name)


def _part_file(rank: int) -> str:
    return f"part-{rank:05d}.json"
