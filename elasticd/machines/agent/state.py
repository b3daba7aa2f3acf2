"""What the agent's machine knows, hears and asks for: its state, its events, its effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from elasticd.records import (
    CheckpointsRecord,
    DoneRecord,
    Fence,
    MemberRecord,
    NodeRecord,
    PlanRecord,
    Proposal,
)
from elasticd.wire.main_thread import Halted
from elasticd.wire.messages import (
    AgentRejected,
    Bereft,
    Doubt,
    Down,
    Finished,
    FromAgent,
    FromWorker,
    Hello,
    Join,
    Kept,
    Leaving,
    Pace,
    PassedReport,
    Prepared,
    Raised,
    Refused,
    Saved,
    Standing,
    StoreCall,
    Swapped,
    ToWorker,
    Up,
)
from elasticd.wire.probes import Probed

#: Seconds between the probes of a device that stands by.
PROBE_SECONDS = 30.0

Outcome = Prepared | Refused | Swapped | Kept | Doubt | Bereft | Standing | Saved | Finished | Raised | Leaving


class Phase(Enum):
    """Of the link to the leader; `OVER` once this agent has to end."""

    AWAY = "away"
    LINKED = "linked"
    OVER = "over"


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """A worker (with device and incarnation) or a torchrun; `said` is what a new leader must hear again,
    `farewell` why it said goodbye, `frozen` how it was found not to answer, `halted` where its main thread
    stands still, as was found at `halted_at`. `asked`: when its device was last to be probed, and `probed` what
    that gave."""

    id: str
    opening: Hello | Join
    device: str = ""
    incarnation: str = ""
    said: tuple[Outcome, ...] = ()
    goodbye: bool = False
    farewell: str = ""
    ended: str = ""
    frozen: str = ""
    halted: Halted | None = None
    halted_at: float = 0.0
    asked: float | None = None
    probed: Probed | None = None

    @property
    def job(self) -> str:
        return self.opening.job


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call on the bootstrap store without an answer yet."""

    call: StoreCall
    deadline: float


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """All that an agent knows. `pace` holds the emulated times of a normal device, if there are any; `epoch`
    is the highest seen, by this agent or one before it on its node. `probe_seconds` pass between the probes of
    a device that stands by (0: it is probed as it comes, and never again)."""

    record: NodeRecord
    pace: Pace | None = None
    phase: Phase = Phase.AWAY
    epoch: int = 0
    clients: Mapping[str, Client] = field(default_factory=dict)
    departed: tuple[Client, ...] = ()
    proposals: Mapping[str, Proposal] = field(default_factory=dict)
    plans: Mapping[str, PlanRecord] = field(default_factory=dict)
    fences: Mapping[str, Fence] = field(default_factory=dict)
    done: Mapping[str, DoneRecord] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    reports: tuple[Up | PassedReport, ...] = ()
    calls: Mapping[tuple[str, int], Call] = field(default_factory=dict)
    probe_seconds: float = PROBE_SECONDS

    def worker_of(self, device: str) -> Client | None:
        """The worker that drives a device now."""
        return next((client for client in self.clients.values() if client.device == device), None)


# -- events ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A client's first message; `pid` is the kernel's word, `incarnation` is minted for this hello."""

    client: str
    body: Hello | Join
    pid: int
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """A later message of a client; a worker's report may be undecoded."""

    client: str
    body: FromWorker | msgspec.Raw


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A client's process ended, or let go of its connection."""

    client: str
    how: str


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A connection to the leader stands."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """It is gone; what was sent last may not have arrived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """A worker is found frozen, `how` says by what, or it answers again (empty)."""

    client: str
    how: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stood:
    """A worker's main thread stands still; `halted` names no worker yet. Or it moves again (None)."""

    client: str
    halted: Halted | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Drained:
    """Whether this node's devices are to be left from now on."""

    on: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """A message from the leader, for a client or for the agent's end."""

    message: Down | AgentRejected


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderRead:
    """The leader's key, as read from the store; `epoch` is its create revision."""

    epoch: int


#: Of a record of which nobody said when it was written: after everything that was seen.
UNKNOWN = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposalRead:
    """A job's proposal, as read from the store; None when the key is gone. `revision`, here and below: the
    store's, of the write that made the record what it is."""

    job: str
    proposal: Proposal | None
    revision: int = UNKNOWN


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRead:
    """A job's recorded plan, as read from the store; None when the key is gone."""

    job: str
    record: PlanRecord | None
    revision: int = UNKNOWN


@dataclass(frozen=True, kw_only=True, slots=True)
class FenceRead:
    """A job's fence, as read from the store; None when the key is gone."""

    job: str
    record: Fence | None
    revision: int = UNKNOWN


@dataclass(frozen=True, kw_only=True, slots=True)
class DoneRead:
    """How a job ended, as read from the store; None when the key is gone."""

    job: str
    record: DoneRecord | None
    revision: int = UNKNOWN


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointsRead:
    """A job's published checkpoints, as read from the store; None when the key is gone."""

    job: str
    record: CheckpointsRecord | None
    revision: int = UNKNOWN


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Opened
    | Said
    | Ended
    | Pulse
    | Stood
    | LinkUp
    | LinkDown
    | Heard
    | Drained
    | LeaderRead
    | ProposalRead
    | PlanRead
    | FenceRead
    | DoneRead
    | CheckpointsRead
    | Tick
)


# -- effects -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send this to a client."""

    client: str
    body: ToWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class Dismiss:
    """Say why and let go of a connection: of a client that is not let in, or not kept."""

    client: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tell:
    """Send this to the leader."""

    message: FromAgent


@dataclass(frozen=True, kw_only=True, slots=True)
class SetNode:
    """Write this node's key anew."""

    record: NodeRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class SetMember:
    """Write a worker's member key."""

    job: str
    record: MemberRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class ClearMember:
    """Delete a worker's member key."""

    job: str
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """One sentence for the log."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HangUp:
    """Give up the link that has just come about, and try another: why."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """This agent has to end: why, and what to do."""

    reason: str


Effect = Send | Dismiss | Tell | SetNode | SetMember | ClearMember | Note | HangUp | Stop
Result = tuple[State, tuple[Effect, ...]]


class UnknownEvent(TypeError):
    """An event that the table lacks: an error of the program."""
