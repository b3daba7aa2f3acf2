"""Wire messages about snapshots in memory: worker to agent, and what agents tell the leader of them."""

from __future__ import annotations

import msgspec
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import refuse

from elasticd.codec.message import Message


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot: the share that member `device` of plan `plan` has in the state after `step` updates, copied
    on `node` into a memory file of `size` bytes. Agents do not read it."""

    job: str
    device: str
    incarnation: str
    plan: int
    step: int
    node: str
    size: int

    def __post_init__(self) -> None:
        if min(self.plan, self.step, self.size) < 0:
            refuse(f"a snapshot has no negative plan, step or size, as {self.plan}, {self.step}, {self.size}")


class Snapped(Message, frozen=True, kw_only=True, tag="snapshot-taken"):
    """A snapshot was copied. Its memory file comes with the message; the worker leaves it alone until it is
    `Freed`. The plan comes from the first rank alone: a set of snapshots without it is not whole."""

    held: Held
    plan: Plan | None = None


class Fetch(Message, frozen=True, kw_only=True, tag="snapshot-fetch"):
    """A worker wants a snapshot that its node's agent keeps, to go on from it."""

    held: Held


class Freed(Message, frozen=True, kw_only=True, tag="snapshot-freed"):
    """The snapshot of that plan and step is not needed any more: its memory may be used again."""

    plan: int
    step: int


class Fetched(Message, frozen=True, kw_only=True, tag="snapshot-fetched"):
    """The snapshot that was asked for: its memory file comes with the message, or `error` says why not."""

    held: Held
    error: str = ""


class Keeps(Message, frozen=True, kw_only=True, tag="snapshot-inventory"):
    """All snapshots of a job that this agent holds, its own workers' and others'; with the plans that first
    ranks gave it."""

    job: str
    snapshots: tuple[Held, ...]
    plans: tuple[Plan, ...] = ()


class Whole(Message, frozen=True, kw_only=True, tag="snapshot-set-complete"):
    """A hint: of this plan and step all snapshots are kept, on two nodes each where there are two. Older ones
    are not needed any more."""

    job: str
    plan: int
    step: int


#: What a worker says to its agent's snapshots, and no leader hears.
OfSnapshots = Snapped | Fetch
