"""`CheckpointingOptions`: where and how often a job's state is kept."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from elasticd.runtime.exits import script_options


@script_options
@dataclass(frozen=True, kw_only=True)
class CheckpointingOptions:
    """Checkpoints on a shared disk and snapshots in memory: the argument `checkpointing` of `elasticd.Job`.

    Neither holds training up beyond a copy of the state.

    Raises:
        ValueError: a number of steps, or of checkpoints, is below 1.
    """

    #: A folder that all nodes share. None: no checkpoints. A job that is started again with the same folder
    #: resumes from its newest complete checkpoint, under any layout.
    folder: str | os.PathLike[str] | None = None
    #: Steps from one checkpoint to the next. The last step always makes one.
    every: int = 1000
    #: Checkpoints that stay on the disk, the newest ones.
    keep: int = 3
    #: Steps: the checkpoint of each multiple of it stays too. None: no other checkpoint stays.
    keep_every: int | None = None
    #: Steps from one snapshot to the next, which copies the state into memory of two nodes' agents. When the
    #: survivors of a fault hold no full copy of the state, the job rolls back to the newest snapshot. None: no
    #: snapshots.
    snapshot_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("every", "keep", "keep_every", "snapshot_every"):
            value = getattr(self, name)
            if value is None and name in ("keep_every", "snapshot_every"):
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"checkpointing: {name} is {value!r}; it must be a whole number from 1 on")

    @property
    def interval(self) -> int | None:
        """Steps from one snapshot to the next, or, without any, from one checkpoint to the next; None:
        there are neither."""
        return self.snapshot_every or (self.every if self.folder is not None else None)

    @cached_property
    def path(self) -> Path | None:
        """The folder as an absolute path."""
        return None if self.folder is None else Path(self.folder).absolute()
