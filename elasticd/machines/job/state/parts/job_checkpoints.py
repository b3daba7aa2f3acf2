"""The checkpoints of a job."""

from __future__ import annotations

import math

from elasticd_planner.value import Value

from elasticd.records import PublishedCheckpoint
from elasticd.wire.worker import Saved, SaveFailed


class JobCheckpoints(Value, frozen=True, kw_only=True):
    """Checkpoints that are published, that wait for it, and that were not made."""

    published: tuple[PublishedCheckpoint, ...] = ()  # checkpoints, newest last
    #: when the newest was made (None: before this leader led, or there is none)
    checkpoint_at: float | None = None
    unmade: SaveFailed | None = None  # the checkpoint that was tried last, where it was not made
    #: step of the checkpoint that the state was read from (0: from none; a new leader does not know)
    read_step: int = 0
    unpublished: tuple[Saved, ...] = ()  # checkpoints of a plan that is not recorded yet
    republish: bool = False  # the list of checkpoints is to be written again
    published_at: float = -math.inf  # when that list was last written
