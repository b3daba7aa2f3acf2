"""The values of the agent's machine: its state, its events, its effects."""

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
    ProposalHead,
    StoredProposal,
)
from elasticd.wire.coordinator import AgentRejected, FromAgent, FromClient, PassedReport, ToClient
from elasticd.wire.main_thread import Halted
from elasticd.wire.rendezvous import Join
from elasticd.wire.worker import EmulatedSpeed, FromItsAgent, FromWorker, Hello, Probed, Statement, StoreCall

#: Seconds between the probes of a device that stands by.
PROBE_SECONDS = 30.0


class AgentPhase(Enum):
    """Of the link to the leader; `OVER` once this agent has to end."""

    AWAY = "away"
    LINKED = "linked"
    OVER = "over"


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """A worker, or a torchrun, which has no device and no incarnation."""

    id: str  # that the agent gave it
    opening: Hello | Join  # its first message
    device: str = ""  # "node/local rank"
    incarnation: str = ""  # id of this start of the worker's process
    said: tuple[Statement, ...] = ()  # what a new leader must hear again
    goodbye: bool = False  # it said goodbye
    farewell: str = ""  # why it said goodbye
    ended: str = ""  # how its process ended
    frozen: str = ""  # how it was found not to answer (empty: it answers)
    halted: Halted | None = None  # where its main thread stands still (None: it moves)
    halted_at: float = 0.0  # when that was found
    asked: float | None = None  # when its device was last to be probed
    probed: Probed | None = None  # what the last probe gave

    @property
    def job(self) -> str:
        """The job's name, by its first message."""
        return self.opening.job


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicesHeld:
    """An event: a torchrun in restart mode holds devices from now on, or lets go of them."""

    client: str  # its id
    job: str  # the job's name
    devices: frozenset[str] = frozenset()  # "node/index" (empty: it lets go)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call on the bootstrap store without an answer yet."""

    call: StoreCall  # as the client asked
    deadline: float  # when it fails, in seconds of the agent's clock


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentState:
    """All that an agent knows."""

    record: NodeRecord  # of its node
    pace: EmulatedSpeed | None = None  # emulated times of a normal device, if there are any
    phase: AgentPhase = AgentPhase.AWAY  # of the link
    epoch: int = 0  # highest seen, by this agent or one before it on its node
    clients: Mapping[str, Client] = field(default_factory=dict)  # by id
    departed: tuple[Client, ...] = ()  # ended workers whose last words a leader may not have heard
    proposals: Mapping[str, StoredProposal] = field(default_factory=dict)  # by job, as read from the store
    plans: Mapping[str, PlanRecord] = field(default_factory=dict)  # by job, as read from the store
    fences: Mapping[str, Fence] = field(default_factory=dict)  # by job, as read from the store
    done: Mapping[str, DoneRecord] = field(default_factory=dict)  # by job, as read from the store
    held: Mapping[str, DevicesHeld] = field(default_factory=dict)  # of torchruns in restart mode, by client
    factors: Mapping[str, float] = field(default_factory=dict)  # of chaos by device, above 1 for slower
    reports: tuple[FromClient | PassedReport, ...] = ()  # that wait for the link
    calls: Mapping[tuple[str, int], Call] = field(default_factory=dict)  # on bootstrap stores, by client and id
    #: between the probes of a device that stands by (0: it is probed as it comes, and never again)
    probe_seconds: float = PROBE_SECONDS

    def worker_of(self, device: str) -> Client | None:
        """The worker that drives a device now."""
        return next((client for client in self.clients.values() if client.device == device), None)

    def open_proposal(self, job: str) -> ProposalHead | None:
        """The job's proposal, unless there is none or it was aborted."""
        proposal = self.proposals.get(job)
        return proposal.head if proposal is not None and proposal.head.status == "open" else None


# -- events ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A client's first message."""

    client: str  # its id
    body: Hello | Join  # the message
    pid: int  # process id, by the kernel's word
    incarnation: str  # minted for this hello


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """A later message of a client; a worker's report may be undecoded."""

    client: str  # its id
    body: FromWorker | msgspec.Raw  # the message


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A client's process ended, or let go of its connection."""

    client: str  # its id
    how: str  # in words


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A connection to the leader stands."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """It is gone; what was sent last may not have arrived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """A worker's heartbeat stopped, or is back."""

    client: str  # its id
    how: str  # how that was found (empty: it is back)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stood:
    """A worker's main thread stands still, or moves again."""

    client: str  # its id
    halted: Halted | None = None  # where, without the worker's names (None: it moves)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentDrained:
    """A user drains this node, or has it used again."""

    on: bool  # its devices are to be left


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """A message from the leader, for a client or for the agent's end."""

    message: ToClient | AgentRejected  # the message


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderRead:
    """The leader's key, as read from the store."""

    epoch: int  # its create revision


#: Of a record of which nobody said when it was written: after everything that was seen.
UNKNOWN = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposalRead:
    """A job's proposal, as read from the store."""

    job: str  # the job's name
    proposal: StoredProposal | None  # None when the key is gone
    revision: int = UNKNOWN  # of the store, of the write that made the record what it is


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRead:
    """A job's recorded plan, as read from the store."""

    job: str  # the job's name
    record: PlanRecord | None  # None when the key is gone
    revision: int = UNKNOWN  # as in `ProposalRead`


@dataclass(frozen=True, kw_only=True, slots=True)
class FenceRead:
    """A job's fence, as read from the store."""

    job: str  # the job's name
    record: Fence | None  # None when the key is gone
    revision: int = UNKNOWN  # as in `ProposalRead`


@dataclass(frozen=True, kw_only=True, slots=True)
class DoneRead:
    """The end of a job, as read from the store."""

    job: str  # the job's name
    record: DoneRecord | None  # None when the key is gone
    revision: int = UNKNOWN  # as in `ProposalRead`


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointsRead:
    """A job's published checkpoints, as read from the store."""

    job: str  # the job's name
    record: CheckpointsRecord | None  # None when the key is gone
    revision: int = UNKNOWN  # as in `ProposalRead`


@dataclass(frozen=True, slots=True)
class AgentTick:
    """Time has passed."""


Event = (
    Opened
    | DevicesHeld
    | Said
    | Ended
    | Pulse
    | Stood
    | LinkUp
    | LinkDown
    | Heard
    | AgentDrained
    | LeaderRead
    | ProposalRead
    | PlanRead
    | FenceRead
    | DoneRead
    | CheckpointsRead
    | AgentTick
)


# -- effects -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSend:
    """Send this to a client."""

    client: str  # its id
    body: FromItsAgent  # the message


@dataclass(frozen=True, kw_only=True, slots=True)
class Dismiss:
    """Let go of the connection of a client that is not let in, or not kept."""

    client: str  # its id
    reason: str  # which the client is told


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTell:
    """Send this to the leader."""

    message: FromAgent  # the message


@dataclass(frozen=True, kw_only=True, slots=True)
class SetNode:
    """Write this node's key anew."""

    record: NodeRecord  # its value


@dataclass(frozen=True, kw_only=True, slots=True)
class SetMember:
    """Write a worker's member key."""

    job: str  # the job's name
    record: MemberRecord  # its value


@dataclass(frozen=True, kw_only=True, slots=True)
class ClearMember:
    """Delete a worker's member key."""

    job: str  # the job's name
    device: str  # "node/local rank"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentNote:
    """One sentence for the log."""

    text: str  # the sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class HangUp:
    """Give up the link that has just come about, and try another."""

    reason: str  # for the log


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """This agent has to end."""

    reason: str  # why, and what to do


Effect = AgentSend | Dismiss | AgentTell | SetNode | SetMember | ClearMember | AgentNote | HangUp | Stop
Result = tuple[AgentState, tuple[Effect, ...]]


class UnknownEvent(TypeError):
    """An event that the table lacks: an error of the program."""
