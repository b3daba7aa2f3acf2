"""A folder of checkpoints: their names, which of them are sound, which is the newest, which may go.

    step-00000042.plan-7.3f2a91c0        whole and published: only then it has this name
    step-00000042.plan-7.3f2a91c0.tmp    being written, or left by a job that ended meanwhile
    ....removed                          being removed

The last part is the incarnation of rank 0's worker: two starts of a job never write into one folder.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from elasticd.checkpoints.checksums import ChecksumReader, Damaged
from elasticd.checkpoints.disk import Disk
from elasticd.checkpoints.manifest import MANIFEST, Manifest, unseal

UNFINISHED, REMOVED = ".tmp", ".removed"
_NAME = re.compile(r"step-(\d{8,})\.plan-(\d+)\.([0-9A-Za-z_-]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A checkpoint with its final name. `damage` says what is wrong with it, if anything; `manifest` is None
    where it is the manifest that is damaged."""

    path: Path
    step: int
    plan: int
    manifest: Manifest | None = None
    damage: str = ""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.name


def name_of(step: int, plan: int, incarnation: str) -> str:
    """The name of a checkpoint's folder; `incarnation` is that of rank 0's worker."""
    return f"step-{step:08d}.plan-{plan}.{incarnation}"


def scan(folder: Path) -> tuple[Found, ...]:
    """All checkpoints of a folder, the newest first; those whose manifest cannot be read come before, as
    nobody knows how old they are. What their files hold is not read: damage that only a checksum shows is
    found by `damages`, and by whoever loads it. A folder that is not there is empty.
    """
    if not folder.is_dir():
        return ()
    folders = [look(path) for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return tuple(sorted(folders, key=_age, reverse=True))


def _age(found: Found) -> tuple[float, int, int]:
    serial = found.manifest.serial if found.manifest is not None else float("inf")
    return serial, found.step, found.plan


def look(path: Path) -> Found:
    """One checkpoint, judged by its manifest and the sizes of its files."""
    match = _NAME.fullmatch(path.name.removesuffix(UNFINISHED))
    step, plan = (int(match[1]), int(match[2])) if match is not None else (0, 0)
    manifest = None
    try:
        manifest = unseal(path / MANIFEST, Manifest)
        for file in manifest.files:
            ChecksumReader(path, file).close()
    except Damaged as damage:
        return Found(path=path, step=step, plan=plan, manifest=manifest, damage=str(damage))
    return Found(path=path, step=step, plan=plan, manifest=manifest)


def damages(path: Path) -> tuple[str, ...]:
    """Reads all of a checkpoint; what is wrong with it, a line for each file."""
    try:
        manifest = unseal(path / MANIFEST, Manifest)
    except Damaged as damage:
        return (str(damage),)
    wrong = []
    for sums in manifest.files:
        try:
            with closing(ChecksumReader(path, sums)) as file:
                file.test()
        except Damaged as damage:
            wrong.append(str(damage))
    return tuple(wrong)


def sound(found: Sequence[Found]) -> tuple[Found, ...]:
    """Those without damage, in the same order."""
    return tuple(item for item in found if not item.damage)


def next_serial(found: Sequence[Found]) -> int:
    """The serial number of the next checkpoint in this folder: one above the largest, from 1."""
    return 1 + max((item.manifest.serial for item in found if item.manifest is not None), default=0)


def superfluous(found: Sequence[Found], keep: int, keep_every: int | None) -> tuple[Found, ...]:
    """Of checkpoints, the newest first, those that may go: all that are sound but the newest `keep` and those
    of each `keep_every`-th step. The damaged ones count for nothing and stay for whoever looks into them."""
    return tuple(item for item in sound(found)[max(1, keep) :] if not keep_every or item.step % keep_every)


def remove(disk: Disk, item: Found) -> None:
    """It loses its name first, on disk too, so that half a checkpoint is never found under one."""
    aside = item.path.with_name(item.name + REMOVED)
    disk.rename(item.path, aside)
    disk.sync_folder(item.path.parent)
    disk.remove_folder(aside)


def is_name(name: str) -> bool:
    """Returns True if a folder of this name is a checkpoint, finished or not."""
    return _NAME.fullmatch(name.removesuffix(UNFINISHED)) is not None


def tidy(disk: Disk, folder: Path) -> tuple[str, ...]:
    """Removes what jobs that ended left half written or half removed; the names of it."""
    left = [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.name.endswith((UNFINISHED, REMOVED)) and _NAME.fullmatch(path.name.rpartition(".")[0])
    ]
    for path in left:
        disk.remove_folder(path)
    return tuple(path.name for path in left)
