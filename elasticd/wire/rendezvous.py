"""Wire messages of the restart mode: a torchrun, or a worker that is watched, and its agent.

The state of a rendezvous is torch's own, bytes that no agent reads. No leader hears of rounds, but of laps.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from elasticd_planner.value import StoredValue

from elasticd.codec.message import Message

# -- to the agent --------------------------------------------------------------------------------------------


class Attend(Message, frozen=True, kw_only=True, tag="rendezvous-hello"):
    """The first message of a torchrun whose rounds torch itself makes."""

    job: str
    pid: int
    release: str = ""


class Present(Message, frozen=True, kw_only=True, tag="rendezvous-presence"):
    """What the others are to know of this torchrun, for as long as it lives: its name, where it serves the
    store of a round that it is first in ("host:port"), and whether it has ended its part in good order."""

    id: int
    name: str
    store: str
    left: bool = False


class ReadRound(Message, frozen=True, kw_only=True, tag="rendezvous-read"):
    """The state of the job's rendezvous, please."""

    id: int


class WriteRound(Message, frozen=True, kw_only=True, tag="rendezvous-write"):
    """Set the state of the job's rendezvous, if it still is the one with this token (0: if there is none)."""

    id: int
    value: bytes
    token: int


class Watching(Message, frozen=True, kw_only=True, tag="watch-hello"):
    """The first message of a worker of such a torchrun whose script has `elasticd.watch()`: which process of
    which round it is. nodes: torchruns in the round; least: how many it may shrink to."""

    job: str
    torchrun: str
    local_rank: int
    pid: int
    round: int
    world: int
    nodes: int
    least: int
    release: str = ""


class Lap(Message, frozen=True, kw_only=True, tag="step-time"):
    """One optimizer step of one process: `seconds` of its own computation, spent on `work` (whatever unit, the
    same everywhere), and the step's wall time."""

    step: int
    seconds: float
    wall: float
    work: float = 1.0


# -- from the agent ------------------------------------------------------------------------------------------


class Attending(Message, frozen=True, kw_only=True, tag="rendezvous-welcome"):
    """The answer to `Attend`: the address that this node listens on for the others."""

    address: str


class Torchrun(StoredValue, frozen=True, kw_only=True, tag="torchrun"):
    """A torchrun in restart mode as its agent keeps it in the store. out: it is to take no part (why)."""

    node: str
    store: str
    status: Literal["here", "left", "died", "out"] = "here"
    reason: str = ""


class RoundAnswer(Message, frozen=True, kw_only=True, tag="rendezvous-state"):
    """The state of the job's rendezvous with its token (0: there is none), whether what was asked was done, and
    all torchruns that the store knows of. `error`: the store cannot be asked now."""

    id: int
    value: bytes = b""
    token: int = 0
    done: bool = True
    torchruns: dict[str, Torchrun] = msgspec.field(default_factory=dict)
    error: str = ""


# -- agent to leader -----------------------------------------------------------------------------------------


class Lapped(Message, frozen=True, kw_only=True, tag="device-step-time"):
    """A lap on `device`, in restart mode."""

    device: str
    by: Watching
    lap: Lap
