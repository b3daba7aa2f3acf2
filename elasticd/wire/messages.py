"""Wire messages: worker and torchrun to agent (unix socket), agent to leader (WebSocket).

JSON by msgspec with a tag and a version (`elasticd.codec.message`). Plans, proposals and aborts reach a worker
only as its agent reads them from the store; what travels over the WebSocket are reports, the bootstrap store's
calls, and hints.
"""

from __future__ import annotations

from typing import Any

import msgspec
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.value import Value

from elasticd.codec.decoding import Reader, decoded_as, decoder_of, tag_of, version_refusal
from elasticd.codec.message import WIRE_VERSION as WIRE_VERSION
from elasticd.codec.message import Message as Message
from elasticd.records import JobSpec, NodeRecord, Proposal, Vote
from elasticd.wire.agent_orders import Drain, End, Harm, TryReach
from elasticd.wire.main_thread import Halted, Whereabouts
from elasticd.wire.node_health import OfNode
from elasticd.wire.probes import Frozen, Ping, Pong, Probe, Probed, Rehearse, Rehearsed, Unreached
from elasticd.wire.rendezvous import (
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
from elasticd.wire.snapshots import Fetched, Freed, Keeps, OfSnapshots, Whole

#: Before a device's name: the address in `Down` of whoever drives that device, now or later.
DEVICE_PREFIX = "device:"
#: Bytes of a report that is passed on undecoded, and objects and arrays in it.
MOST_PASSED, MOST_NESTED = 64 << 10, 64
#: Characters that are told of why a message cannot be decoded.
MOST_WHY = 200


# -- worker to agent ---------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """A worker's first message. `world_size` is what torchrun started for the job in all, `checkpoints` the
    names of those that this worker sees and that look sound, the newest first. `incarnation`: the one that it
    has already, if it comes back to an agent that was started again. `probes`: it answers a `Probe`, and
    `rehearses` a `Rehearse`. `closes`: it takes part in a last checkpoint that another member of a recovered
    plan asks for. release: of its elasticd, as in the other hellos."""

    job: str
    local_rank: int
    world_size: int
    pid: int
    spec: JobSpec
    checkpoints: tuple[str, ...] = ()
    incarnation: str = ""
    probes: bool = False
    rehearses: bool = False
    closes: bool = False
    release: str = ""


class Report(Message, frozen=True, kw_only=True, tag="report"):
    """One step of one rank; rank 0 adds the step's loss (mean per token) and all its tokens. On an emulated
    device: how many sections were paced, and how many took longer than they were to."""

    measurement: Measurement
    loss: float | None = None
    tokens: int | None = None
    paced: int = 0
    overruns: int = 0


class Prepared(Message, frozen=True, kw_only=True, tag="prepared"):
    """All is ready for this proposal: the transition group stands, the number will be voted."""

    number: int


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """This worker cannot prepare the proposal; the leader aborts it."""

    number: int
    reason: str


class Swapped(Message, frozen=True, kw_only=True, tag="switched"):
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


class Kept(Message, frozen=True, kw_only=True, tag="stayed-on-plan"):
    """The proposal of this number is off here: the old plan goes on."""

    number: int
    step: int
    reason: str = ""


class Doubt(Message, frozen=True, kw_only=True, tag="in-doubt"):
    """The last word of the switch failed to come: this rank holds both copies and does not know which holds."""

    number: int
    step: int
    reason: str


class Bereft(Message, frozen=True, kw_only=True, tag="peers-lost"):
    """A collective of the plan in force, of this number (0: of a release that did not say), failed after `step`
    updates: this rank stands still."""

    step: int
    reason: str
    plan: int = 0


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of the plan `number`'s state, after `step` updates; `behind`: the update of step `step` was not
    made, but its reduced gradients are there. `stale`: parameters are true only where their state is kept."""

    number: int
    step: int
    behind: bool = False
    stale: bool = False


class Standing(Message, frozen=True, kw_only=True, tag="state-report"):
    """After the fence of this number: what this rank holds, and the last vote that it heard the outcome of."""

    fence: int
    copies: tuple[Copy, ...]
    vote: Vote | None = None


class Saved(Message, frozen=True, kw_only=True, tag="checkpoint-saved"):
    """A checkpoint is whole on disk but for its name, which it gets when the store says that it may: the state
    after `step` updates, written by all members of this plan."""

    name: str
    step: int
    plan: int


class Finished(Message, frozen=True, kw_only=True, tag="finished"):
    """The last step's vote is complete: `step` updates were applied in all."""

    step: int


class Raised(Message, frozen=True, kw_only=True, tag="user-exception"):
    """The script's own code (model, loss, optimizer, loop) raised this on a rank of the plan, after `step`
    updates. `holds`: the rank's copy of the state is whole, and it stays until nobody needs it. `saves`: it
    keeps checkpoints. `ends`: the job ends by it, on all members alike; if they keep checkpoints, they have
    made a last one."""

    plan: int
    step: int
    kind: str
    text: str
    traceback: str
    holds: bool = False
    saves: bool = False
    ends: bool = False


class Leaving(Message, frozen=True, kw_only=True, tag="preemption-notice"):
    """This process was told to go, and by what. `saves`: it has a last checkpoint to make should all go."""

    reason: str
    saves: bool = False


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """A clean end follows. Silence before an exit is a death."""

    reason: str = ""


class StoreCall(Message, frozen=True, kw_only=True, tag="store-call"):
    """A call on the job's bootstrap store, which the leader keeps. `get` waits until the key is there."""

    id: int
    op: str  # "set", "get", "add", "check" or "delete"; any other one is answered with an error
    key: str
    value: bytes = b""
    seconds: float = 30.0


# -- torchrun's rendezvous handler to agent -----------------------------------------------------------------


class Join(Message, frozen=True, kw_only=True, tag="join"):
    """A torchrun asks to take part in a job. `slot`: the index of its one device (None: all of its node's)."""

    job: str
    min_nodes: int
    max_nodes: int
    pid: int
    slot: int | None = None
    release: str = ""


class Leave(Message, frozen=True, kw_only=True, tag="leave"):
    """That torchrun ends."""

    job: str


# -- agent to worker and to rendezvous handler ---------------------------------------------------------------


class Pace(Message, frozen=True, kw_only=True, tag="emulated-speed"):
    """Emulated speed: seconds a token takes in one whole block on a normal device, and how many times slower
    this device is now. Without times, `factor` stretches what the real computation took."""

    forward: float | None = None
    backward: float | None = None
    factor: float = 1.0


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The worker's device, this incarnation of it, the address that it listens on for its peers."""

    device: str
    incarnation: str
    address: str
    pace: Pace | None = None


class Rejected(Message, frozen=True, kw_only=True, tag="rejected"):
    """No: why, and what to do."""

    reason: str


class Propose(Message, frozen=True, kw_only=True, tag="propose"):
    """The open proposal, as read from the store."""

    proposal: Proposal


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """The proposal of this number was aborted, as read from the store."""

    number: int
    reason: str


class Fenced(Message, frozen=True, kw_only=True, tag="fenced"):
    """A fence, as read from the store. `evicted`: it fences off this very incarnation."""

    number: int
    reason: str
    evicted: bool = False


class Recorded(Message, frozen=True, kw_only=True, tag="plan-recorded"):
    """The plan of this number is recorded, as read from the store: a leaver may drop its copy."""

    number: int


class Published(Message, frozen=True, kw_only=True, tag="checkpoint-published"):
    """The checkpoint of this name may get it, as read from the store."""

    name: str


class StoreAnswer(Message, frozen=True, kw_only=True, tag="store-answer"):
    """The answer to a `StoreCall`; `error` is set where it failed (a timeout, no leader)."""

    id: int
    value: bytes = b""
    number: int = 0
    error: str | None = None


class Shutdown(Message, frozen=True, kw_only=True, tag="shutdown"):
    """The job cannot go on, as read from the store: say why and end."""

    reason: str


class Joined(Message, frozen=True, kw_only=True, tag="joined"):
    """The job's nodes are complete: this node's index among them."""

    node_rank: int
    nodes: int


class Closed(Message, frozen=True, kw_only=True, tag="job-closed"):
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
    | Raised
    | Leaving
    | Goodbye
    | Probed
    | Rehearsed
    | StoreCall
    | Join
    | Leave
)
#: What a torchrun in restart mode says to its agent's rounds, and no leader hears.
OfRounds = Attend | Present | ReadRound | WriteRound | Watching | Lap
#: All that an agent's machine does not hear.
ToAgentAlone = Pong | OfSnapshots | OfRounds | Whereabouts
ToWorker = (
    Welcome
    | Ping
    | Probe
    | Rehearse
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


class AgentHello(Message, frozen=True, kw_only=True, tag="agent-hello"):
    """An agent's first message on each connection; what its workers last said follows as `Up` messages."""

    record: NodeRecord
    release: str = ""


class Up(Message, frozen=True, kw_only=True, tag="from-client"):
    """A message of a local client: of a worker (device and incarnation set) or of a torchrun (both empty)."""

    client: str
    job: str
    device: str
    incarnation: str
    body: FromWorker


class PassedReport(msgspec.Struct, frozen=True, kw_only=True, tag=tag_of(Up)):
    """How an agent encodes an `Up` around a worker's `Report`, which it passes on as it came, undecoded."""

    version: int = WIRE_VERSION
    client: str
    job: str
    device: str
    incarnation: str
    body: msgspec.Raw


class WorkerLost(Message, frozen=True, kw_only=True, tag="worker-lost"):
    """A worker's process ended; `clean` if it had said goodbye, and then `how` is the reason that it gave."""

    job: str
    device: str
    incarnation: str
    clean: bool
    how: str


class Down(Message, frozen=True, kw_only=True, tag="to-client"):
    """For one local client of the agent (`client` as in `Up`, or DEVICE_PREFIX and a device's name)."""

    client: str
    body: ToWorker


class AgentRejected(Message, frozen=True, kw_only=True, tag="agent-rejected"):
    """The leader does not take this agent: why, and what to do."""

    reason: str


class Unread(Value, frozen=True, kw_only=True, tag="unread-opening"):
    """Not sent: what a leader has of an `Up` whose opening of a client (`Hello`, `Join`) it cannot decode, and
    why. release, and a torchrun's slot (-1: none): the client's, where they can be read."""

    client: str
    job: str
    device: str
    incarnation: str
    reason: str
    release: str = ""
    slot: int = -1


ToLeader = AgentHello | Up | WorkerLost | Frozen | Unreached | Halted | OfNode | Keeps | Lapped
#: What an agent sends to a leader.
FromAgent = ToLeader | PassedReport
ToAgent = Down | Whole | AgentRejected | Harm | Drain | End | TryReach


def protocol_refusal(what: str, hello: Hello | Join | Attend | Watching | AgentHello) -> str:
    """Returns why this sender's version is refused, or an empty string; `what` is the refusal's subject."""
    return version_refusal(what, hello.version, WIRE_VERSION, hello.release)


#: What an encoded report begins with.
_REPORT = f'{{"type":"{tag_of(Report)}",'.encode()
_as_it_came = decoder_of(msgspec.Raw).decode
_encoder = msgspec.json.Encoder()
_from_worker: Reader[FromWorker | ToAgentAlone] = Reader(FromWorker | ToAgentAlone, "a worker or torchrun")
_to_worker: Reader[ToWorker] = Reader(ToWorker, "the agent")
_to_leader: Reader[ToLeader | Unread] = Reader(ToLeader, "an agent", lambda data, why: _unread(data, why))
_to_agent: Reader[ToAgent] = Reader(ToAgent, "the leader")


def encode(message: Message | PassedReport) -> bytes:
    """A message as JSON."""
    return _encoder.encode(message)


# Each of these functions gives None for a message that the receiver skips: its tag is unknown, or its content
# cannot be decoded. They raise `msgspec.DecodeError` for bytes that are no message, and for the `first` message
# of a connection if its content cannot be decoded.


def from_worker(data: bytes, *, first: bool = False) -> FromWorker | ToAgentAlone | None:
    """What a worker or torchrun said to its agent."""
    return _from_worker.one(data, first=first)


def passed_report(data: bytes) -> msgspec.Raw | None:
    """Returns a worker's report as it came, for a `PassedReport`; or None for what is to be decoded first:
    another message, and bytes that a leader could not skip alone (no JSON, too large, too deeply nested)."""
    if not data.startswith(_REPORT) or len(data) > MOST_PASSED:
        return None
    if data.count(b"{") + data.count(b"[") > MOST_NESTED:
        return None
    try:
        data.decode()  # a decoder does not look at the text of what it skips
        return _as_it_came(data)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None


def to_worker(data: bytes, *, first: bool = False) -> ToWorker | None:
    """What an agent said to a worker or torchrun."""
    return _to_worker.one(data, first=first)


def to_leader(data: bytes, *, first: bool = False) -> ToLeader | Unread | None:
    """What an agent said to the leader."""
    return _to_leader.one(data, first=first)


def several_to_leader(data: bytes, *, first: bool = False) -> list[ToLeader | Unread]:
    """What an agent said to the leader in one JSON array, without what is skipped."""
    return _to_leader.several(data, first=first)


class _Opening(msgspec.Struct):
    """What is read of an opening that cannot be decoded."""

    type: str
    release: Any = ""
    slot: Any = None


class _Passed(msgspec.Struct, tag=tag_of(Up)):
    """And of the `Up` around it."""

    client: str
    job: str
    device: str
    incarnation: str
    body: _Opening


def _unread(data: bytes, why: str) -> Unread | None:
    """Who is to be told that its opening cannot be decoded; nobody where this is none."""
    try:
        up = decoded_as(_Passed, data)
    except msgspec.DecodeError:
        return None
    if up.body.type not in (tag_of(Hello), tag_of(Join)):
        return None
    return Unread(
        client=up.client,
        job=up.job,
        device=up.device,
        incarnation=up.incarnation,
        reason=why[:MOST_WHY],
        release=up.body.release if isinstance(up.body.release, str) else "",
        slot=up.body.slot if isinstance(up.body.slot, int) else -1,
    )


def to_agent(data: bytes, *, first: bool = False) -> ToAgent | None:
    """What the leader said to an agent."""
    return _to_agent.one(data, first=first)
