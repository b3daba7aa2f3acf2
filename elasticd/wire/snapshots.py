"""Wire messages about snapshots in memory: worker to agent, and what agents tell the leader of them."""

from __future__ import annotations

import msgspec
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.value import refuse

from elasticd.codec.decoding import LARGE
from elasticd.codec.message import Message


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot: one member's share of a plan's state, in a memory file. Agents do not read it."""

    job: str  # the job's name
    device: str  # of the member
    incarnation: str  # of the member
    plan: int  # number of the plan
    step: int  # updates in it
    node: str  # on which it was copied
    size: int  # bytes
    every: int = 0  # steps from one snapshot to the next (0: an older release)
    seconds: float = 0.0  # that the one before it held up the member's training

    def __post_init__(self) -> None:
        if min(self.plan, self.step, self.size) < 0:
            refuse(f"a snapshot has no negative plan, step or size, as {self.plan}, {self.step}, {self.size}")


class Snapped(Message, frozen=True, kw_only=True, tag="snapshot-taken"):
    """A snapshot was copied. Its memory file comes with the message; the worker leaves it alone until it is
    `Freed`."""

    largest = LARGE

    held: Held  # the snapshot
    plan: JobPlan | None = None  # from the first rank alone: without it a set of snapshots is not complete


class Fetch(Message, frozen=True, kw_only=True, tag="snapshot-fetch"):
    """A worker wants a snapshot that its node's agent keeps, to go on from it."""

    held: Held  # the snapshot


class Freed(Message, frozen=True, kw_only=True, tag="snapshot-freed"):
    """A snapshot is not needed any more: its memory may be used again."""

    plan: int  # number of its plan
    step: int  # updates in it


class Fetched(Message, frozen=True, kw_only=True, tag="snapshot-fetched"):
    """The snapshot that was asked for: its memory file comes with the message."""

    held: Held  # the snapshot
    error: str = ""  # why there is no file


class SnapshotInventory(Message, frozen=True, kw_only=True, tag="snapshot-inventory"):
    """All snapshots of a job that this agent holds, of its own workers and of others."""

    largest = LARGE

    job: str  # the job's name
    snapshots: tuple[Held, ...]  # what it holds
    plans: tuple[JobPlan, ...] = ()  # that first ranks gave it with their snapshots


class SnapshotSetComplete(Message, frozen=True, kw_only=True, tag="snapshot-set-complete"):
    """A hint: all snapshots of this plan and step are kept, on two nodes each where there are two. Older ones
    are not needed any more."""

    job: str  # the job's name
    plan: int  # number of the plan
    step: int  # updates in them


#: What a worker says to its agent's snapshots, and no leader hears.
OfSnapshots = Snapped | Fetch
