"""Wire messages: worker and torchrun to agent (unix socket), agent to leader (WebSocket).

JSON by msgspec, tagged by type. Plans, proposals and aborts reach a worker only as its agent reads them from
the store; what travels over the WebSocket are reports, the bootstrap store's calls, and hints.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from elasticd_planner.measurement import Measurement

from elasticd.decoding import decoded
from elasticd.health import OfNode
from elasticd.orders import Drain, Harm
from elasticd.pulses import Frozen, Ping, Pong, Probe, Probed
from elasticd.records import JobSpec, NodeRecord, Proposal, Vote
from elasticd.rounds import (
    Attend,
    Attending,
    Lap,
    Lapped,
    Present,
    ReadRound,
    RoundAnswer,
    Watching,
    WriteRound,
)
from elasticd.snapshots import Fetched, Freed, Keeps, OfSnapshots, Whole
from elasticd.wire import WIRE_VERSION as WIRE_VERSION
from elasticd.wire import Message as Message

#: Before a device's name: the address in `Down` of whoever drives that device, now or later.
DEVICE_PREFIX = "device:"


# -- worker to agent ---------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """A worker's first message. `world_size` is what torchrun started for the job in all, `checkpoints` the
    names of those that this worker sees and that look sound, the newest first. `incarnation`: the one that it
    has already, if it comes back to an agent that was started again. `probes`: it answers a `Probe`."""

    job: str
    local_rank: int
    world_size: int
    pid: int
    spec: JobSpec
    checkpoints: tuple[str, ...] = ()
    incarnation: str = ""
    probes: bool = False
    version: int = WIRE_VERSION


class Report(Message, frozen=True, kw_only=True):
    """One step of one rank; rank 0 adds the step's loss (mean per token) and all its tokens. On an emulated
    device: how many sections were paced, and how many took longer than they were to."""

    measurement: Measurement
    loss: float | None = None
    tokens: int | None = None
    paced: int = 0
    overruns: int = 0


class Prepared(Message, frozen=True, kw_only=True):
    """All is ready for this proposal: the transition group stands, the number will be voted."""

    number: int


class Refused(Message, frozen=True, kw_only=True):
    """This worker cannot prepare the proposal; the leader aborts it."""

    number: int
    reason: str


class Swapped(Message, frozen=True, kw_only=True):
    """The plan of this number is in force here after `step` updates; with what the switch cost in bytes
    (sent by this rank, checksums included; lacking at it before; and beside them the job's whole state, each
    element once) and in seconds of its step loop. `checkpoint` names what its state was read from, if so. By
    device that sent to this rank: `flows`, the bytes and the seconds until they were here."""

    number: int
    step: int
    pause_seconds: float
    bytes_sent: int
    bytes_lacking: int
    bytes_state: int
    checkpoint: str = ""
    flows: dict[str, tuple[int, float]] = msgspec.field(default_factory=dict)


class Kept(Message, frozen=True, kw_only=True):
    """The proposal of this number is off here: the old plan goes on."""

    number: int
    step: int
    reason: str = ""


class Doubt(Message, frozen=True, kw_only=True):
    """The last word of the switch failed to come: this rank holds both copies and does not know which holds."""

    number: int
    step: int
    reason: str


class Bereft(Message, frozen=True, kw_only=True):
    """A collective of the plan in force failed after `step` updates: this rank stands still."""

    step: int
    reason: str


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of the plan `number`'s state, after `step` updates; `behind`: the update of step `step` was not
    made, but its reduced gradients are there. `stale`: parameters are true only where their state is kept."""

    number: int
    step: int
    behind: bool = False
    stale: bool = False


class Standing(Message, frozen=True, kw_only=True):
    """After the fence of this number: what this rank holds, and the last vote that it heard the outcome of."""

    fence: int
    copies: tuple[Copy, ...]
    vote: Vote | None = None


class Saved(Message, frozen=True, kw_only=True):
    """A checkpoint is whole on disk but for its name, which it gets when the store says that it may: the state
    after `step` updates, written by all members of this plan."""

    name: str
    step: int
    plan: int


class Finished(Message, frozen=True, kw_only=True):
    """The last step's vote is complete: `step` updates were applied in all."""

    step: int


class Leaving(Message, frozen=True, kw_only=True):
    """This process was told to go, and by what. `saves`: it has a last checkpoint to make should all go."""

    reason: str
    saves: bool = False


class Goodbye(Message, frozen=True, kw_only=True):
    """A clean end follows. Silence before an exit is a death."""

    reason: str = ""


class StoreCall(Message, frozen=True, kw_only=True):
    """A call on the job's bootstrap store, which the leader keeps. `get` waits until the key is there."""

    id: int
    op: Literal["set", "get", "add", "check", "delete"]
    key: str
    value: bytes = b""
    seconds: float = 30.0


# -- torchrun's rendezvous handler to agent -----------------------------------------------------------------


class Join(Message, frozen=True, kw_only=True):
    """A torchrun asks to take part in a job. `slot`: the index of its one device (None: all of its node's)."""

    job: str
    min_nodes: int
    max_nodes: int
    pid: int
    slot: int | None = None
    version: int = WIRE_VERSION


class Leave(Message, frozen=True, kw_only=True):
    """That torchrun ends."""

    job: str


# -- agent to worker and to rendezvous handler ---------------------------------------------------------------


class Pace(Message, frozen=True, kw_only=True):
    """Emulated speed: seconds a token takes in one whole block on a normal device, and how many times slower
    this device is now. Without times, `factor` stretches what the real computation took."""

    forward: float | None = None
    backward: float | None = None
    factor: float = 1.0


class Welcome(Message, frozen=True, kw_only=True):
    """The worker's device, this incarnation of it, the address that it listens on for its peers."""

    device: str
    incarnation: str
    address: str
    pace: Pace | None = None


class Rejected(Message, frozen=True, kw_only=True):
    """No: why, and what to do."""

    reason: str


class Propose(Message, frozen=True, kw_only=True):
    """The open proposal, as read from the store."""

    proposal: Proposal


class Abort(Message, frozen=True, kw_only=True):
    """The proposal of this number was aborted, as read from the store."""

    number: int
    reason: str


class Fenced(Message, frozen=True, kw_only=True):
    """A fence, as read from the store. `evicted`: it fences off this very incarnation."""

    number: int
    reason: str
    evicted: bool = False


class Recorded(Message, frozen=True, kw_only=True):
    """The plan of this number is recorded, as read from the store: a leaver may drop its copy."""

    number: int


class Published(Message, frozen=True, kw_only=True):
    """The checkpoint of this name may get it, as read from the store."""

    name: str


class StoreAnswer(Message, frozen=True, kw_only=True):
    """The answer to a `StoreCall`; `error` is set where it failed (a timeout, no leader)."""

    id: int
    value: bytes = b""
    number: int = 0
    error: str | None = None


class Shutdown(Message, frozen=True, kw_only=True):
    """The job cannot go on, as read from the store: say why and end."""

    reason: str


class Joined(Message, frozen=True, kw_only=True):
    """The job's nodes are complete: this node's index among them."""

    node_rank: int
    nodes: int


class Closed(Message, frozen=True, kw_only=True):
    """The job finished: the leader's answer to a torchrun that asks again and then ends gracefully; or, to all
    workers of the job, as read from the store."""

    reason: str


FromWorker = (
    Hello
    | Report
    | Prepared
    | Refused
    | Swapped
    | Kept
    | Doubt
    | Bereft
    | Standing
    | Saved
    | Finished
    | Leaving
    | Goodbye
    | Probed
    | StoreCall
    | Join
    | Leave
)
#: What a torchrun in restart mode says to its agent's rounds, and no leader hears.
OfRounds = Attend | Present | ReadRound | WriteRound | Watching | Lap
#: All that an agent's machine does not hear.
ToAgentAlone = Pong | OfSnapshots | OfRounds
ToWorker = (
    Welcome
    | Ping
    | Probe
    | Rejected
    | Propose
    | Abort
    | Fenced
    | Recorded
    | Published
    | Freed
    | Fetched
    | StoreAnswer
    | Shutdown
    | Pace
    | Joined
    | Attending
    | RoundAnswer
    | Closed
)


# -- agent to leader -------------------------------------------------------------------------------------------


class AgentHello(Message, frozen=True, kw_only=True):
    """An agent's first message on each connection; what its workers last said follows as `Up` messages."""

    record: NodeRecord
    version: int = WIRE_VERSION


class Up(Message, frozen=True, kw_only=True):
    """A message of a local client: of a worker (device and incarnation set) or of a torchrun (both empty)."""

    client: str
    job: str
    device: str
    incarnation: str
    body: FromWorker


class WorkerLost(Message, frozen=True, kw_only=True):
    """A worker's process ended; `clean` if it had said goodbye, and then `how` is the reason that it gave."""

    job: str
    device: str
    incarnation: str
    clean: bool
    how: str


class Down(Message, frozen=True, kw_only=True):
    """For one local client of the agent (`client` as in `Up`, or DEVICE_PREFIX and a device's name)."""

    client: str
    body: ToWorker


class AgentRejected(Message, frozen=True, kw_only=True):
    """The leader does not take this agent: why, and what to do."""

    reason: str


ToLeader = AgentHello | Up | WorkerLost | Frozen | OfNode | Keeps | Lapped
ToAgent = Down | Whole | AgentRejected | Harm | Drain

_encoder = msgspec.json.Encoder()
_from_worker: msgspec.json.Decoder[FromWorker | ToAgentAlone] = msgspec.json.Decoder(FromWorker | ToAgentAlone)
_to_worker: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)
_to_leader: msgspec.json.Decoder[ToLeader] = msgspec.json.Decoder(ToLeader)
_to_agent: msgspec.json.Decoder[ToAgent] = msgspec.json.Decoder(ToAgent)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def from_worker(data: bytes) -> FromWorker | ToAgentAlone:
    return decoded(_from_worker.decode, data)


def to_worker(data: bytes) -> ToWorker:
    return decoded(_to_worker.decode, data)


def to_leader(data: bytes) -> ToLeader:
    return decoded(_to_leader.decode, data)


def to_agent(data: bytes) -> ToAgent:
    return decoded(_to_agent.decode, data)
