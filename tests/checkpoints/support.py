"""Checkpoints of a small trained model, written by the real parts of every rank, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from elasticd_migration.local_state import LocalState
from elasticd_planner.layout.layouts import Layouts
from torch import Tensor

from elasticd.checkpoints.disk import Disk, LocalDisk
from elasticd.checkpoints.folder import next_serial, scan
from elasticd.records import JobSpec
from elasticd.runtime.checkpoint.staging import Staging, pieces, shares, without_planes
from elasticd.runtime.checkpoint.writer import Task, origin_of, path_of, write_part, write_whole
from tests.migration.plans import LAYERS, SPEC, alone, plan
from tests.migration.ranks import Training, local, trained

SPEC_OF_JOB = JobSpec(
    job="job", model=SPEC, global_batch=4, micro_batch=1, samples=100, sample_tokens=7.0, seed=3
)
WHOLE = trained()
#: The whole model on one device, and on three in two pipelines.
ONE = Layouts(SPEC, alone())
THREE = Layouts(
    SPEC,
    plan(
        7,
        [(1, [("n0/0", 3), ("n0/1", 1)]), (LAYERS - 1, [("n1/0", 1)])],
        [(LAYERS, [("n1/1", 1)])],
        binding={"n0/0": "aa", "n0/1": "bb", "n1/0": "cc", "n1/1": "dd"},
    ),
)


def task_of(
    folder: Path, layouts: Layouts, device: str, step: int, state: LocalState, spec: JobSpec = SPEC_OF_JOB
) -> Task:
    mine = shares(layouts)[device]
    return Task(
        origin=origin_of(spec, layouts.plan, step),
        path=path_of(folder, layouts.plan, step),
        device=device,
        members=layouts.plan.members,
        held=Staging().copy(pieces(state, mine)),
        shapes={item: layouts.layout(item).shape for item in mine if item in state.tensors},
        small=without_planes(state, mine),
    )


def save(
    folder: Path,
    layouts: Layouts = THREE,
    step: int = 42,
    *,
    whole: Training = WHOLE,
    disk: Disk | None = None,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """A whole checkpoint under its final name."""
    disk = disk or LocalDisk()
    tasks = [
        task_of(folder, layouts, device, step, local(whole, layouts, device)) for device in layouts.plan.members
    ]
    return write(folder, tasks, disk, check)


def write(folder: Path, tasks: Sequence[Task], disk: Disk, check: Callable[[], None] = lambda: None) -> Path:
    """What the ranks' threads do, in their order."""
    for task in tasks:
        write_part(disk, task, check)
    first = tasks[0]
    write_whole(disk, first, next_serial(scan(folder)), check)
    disk.rename(first.path, folder / first.name)
    disk.sync_folder(folder)
    return folder / first.name


def whole_values() -> dict[str, Tensor]:
    """Every parameter and buffer of the whole model, by name."""
    return {
        item.name: tensor.shards[0].planes["value"]
        for item, tensor in WHOLE.state().tensors.items()
        if item.role != "state"
    }
