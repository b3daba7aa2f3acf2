"""Wire messages: worker and torchrun to agent (unix socket), agent to leader (WebSocket).

JSON by msgspec with a tag and a version (`elasticd.codec.message`). Plans, proposals and aborts reach a worker
only as its agent reads them from the store; what travels over the WebSocket are reports, the bootstrap store's
calls, and hints.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.value import Value

from elasticd.codec.decoding import MessageReader, decoded_as, decoder_of, tag_of, version_refusal
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
    Present,
    ReadRound,
    RoundAnswer,
    StepTime,
    Watching,
    WriteRound,
)
from elasticd.wire.snapshots import Fetched, Freed, OfSnapshots, SnapshotInventory, SnapshotSetComplete

#: Before a device's name: the address in `ToClient` of whoever drives that device, now or later.
DEVICE_PREFIX = "device:"
#: Bytes of a report that is passed on undecoded, and objects and arrays in it.
MOST_PASSED, MOST_NESTED = 64 << 10, 64
#: Characters that are told of why a message cannot be decoded.
MOST_WHY = 200


# -- worker to agent ---------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """A worker's first message."""

    job: str  # the job's name
    local_rank: int  # index of its device on the node
    world_size: int  # workers that torchrun started for the job, on all nodes
    pid: int  # process id
    spec: JobSpec  # what it trains
    checkpoints: tuple[str, ...] = ()  # names of the checkpoints that it sees and that look sound, newest first
    incarnation: str = ""  # the id that it has already, if it comes back to an agent that was started again
    probes: bool = False  # it answers a `Probe`
    rehearses: bool = False  # it answers a `Rehearse`
    closes: bool = False  # it takes part in a last checkpoint that another member of a recovered plan asks for
    release: str = ""  # of the sender's elasticd


class Report(Message, frozen=True, kw_only=True, tag="report"):
    """One step of one rank."""

    measurement: Measurement  # times of the step
    loss: float | None = None  # mean per token; from rank 0 alone
    tokens: int | None = None  # tokens of the step over all ranks; from rank 0 alone
    paced: int = 0  # sections that an emulated device slowed down to its speed
    overruns: int = 0  # sections that took longer than the emulated speed allows


class Prepared(Message, frozen=True, kw_only=True, tag="prepared"):
    """The rank is ready for this proposal: the transition group stands, and its next vote carries the
    number."""

    number: int  # of the proposal


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """This worker cannot prepare the proposal; the leader aborts it."""

    number: int  # of the proposal
    reason: str  # for people


class Switched(Message, frozen=True, kw_only=True, tag="switched"):
    """The plan of this number is in force on this rank, with what the switch cost."""

    number: int  # of the plan
    step: int  # updates before the first step under it
    pause_seconds: float  # for which the step loop stood still
    bytes_sent: int  # by this rank, checksums included
    bytes_lacking: int  # at this rank before the switch
    bytes_state: int  # of the job's state, each element once
    checkpoint: str = ""  # name of the checkpoint that the state was read from (empty: none)
    #: by device that sent to this rank: bytes, and seconds until they were here
    flows: dict[str, tuple[int, float]] = msgspec.field(default_factory=dict)


class StayedOnPlan(Message, frozen=True, kw_only=True, tag="stayed-on-plan"):
    """The proposal is off on this rank: the old plan goes on."""

    number: int  # of the proposal
    step: int  # updates so far
    reason: str = ""  # for people


class InDoubt(Message, frozen=True, kw_only=True, tag="in-doubt"):
    """The last word of the switch failed to come: this rank holds both copies and does not know which plan is
    in force."""

    number: int  # of the proposal
    step: int  # updates so far
    reason: str  # for people


class PeersLost(Message, frozen=True, kw_only=True, tag="peers-lost"):
    """A collective of the plan in force failed: this rank stands still."""

    step: int  # updates so far
    reason: str  # the collective's error
    plan: int = 0  # number of that plan (0: of a release that does not say)


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of a plan's state that a rank holds."""

    number: int  # of the plan
    step: int  # updates in it
    behind: bool = False  # the reduced gradients of step `step` are there, and its update is not made
    stale: bool = False  # parameters are up to date only where this rank keeps their optimizer state (ZeRO)


class StateReport(Message, frozen=True, kw_only=True, tag="state-report"):
    """A rank's answer to a fence: the copies that it holds."""

    fence: int  # number of the fence
    copies: tuple[Copy, ...]  # by plan
    vote: Vote | None = None  # the last outcome of a vote that it heard


class Saved(Message, frozen=True, kw_only=True, tag="checkpoint-saved"):
    """A checkpoint is complete on disk but for its final name, which it gets when the store says that it
    may."""

    name: str  # of its folder
    step: int  # updates in it
    plan: int  # number of the plan whose members wrote it


class Finished(Message, frozen=True, kw_only=True, tag="finished"):
    """The last step's vote is complete."""

    step: int  # updates in all


class Raised(Message, frozen=True, kw_only=True, tag="user-exception"):
    """The script's own code (model, loss, optimizer, loop) raised an exception on a rank."""

    plan: int  # number of the plan
    step: int  # updates before the step that failed
    kind: str  # name of the exception's class
    text: str  # the exception as a string
    traceback: str  # as Python prints it
    holds: bool = False  # the rank's copy of the state is intact, and the rank stays until nobody needs it
    saves: bool = False  # the rank keeps checkpoints
    #: the job ends by it, on all members alike; if they keep checkpoints, they have made a last one
    ends: bool = False


class Leaving(Message, frozen=True, kw_only=True, tag="preemption-notice"):
    """A preemption notice: this process was sent SIGTERM or a spot notice, and ends once it is drained."""

    reason: str  # what it was sent
    saves: bool = False  # it has a last checkpoint to make should all workers go


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """A clean end follows. Silence before an exit is a death."""

    reason: str = ""  # why it ends, for people


class StoreCall(Message, frozen=True, kw_only=True, tag="store-call"):
    """A call on the job's bootstrap store, which the leader keeps."""

    id: int  # by which the caller knows the answer
    #: "set", "get" (waits until the key is there), "add", "check" or "delete"; any other is answered with an
    #: error
    op: str
    key: str  # of the store
    value: bytes = b""  # to set; of `add`: the number as text
    seconds: float = 30.0  # for which the caller waits


# -- torchrun's rendezvous handler to agent -----------------------------------------------------------------


class Join(Message, frozen=True, kw_only=True, tag="join"):
    """A torchrun asks to take part in a job."""

    job: str  # the job's name
    min_nodes: int  # the least of --nnodes
    max_nodes: int  # the most of --nnodes
    pid: int  # process id
    slot: int | None = None  # index of its one device (None: all devices of its node)
    release: str = ""  # of the sender's elasticd


class Leave(Message, frozen=True, kw_only=True, tag="leave"):
    """That torchrun ends."""

    job: str  # the job's name


# -- agent to worker and to rendezvous handler ---------------------------------------------------------------


class EmulatedSpeed(Message, frozen=True, kw_only=True, tag="emulated-speed"):
    """Emulated speed of a device. Without times, `factor` stretches what the real computation took."""

    forward: float | None = None  # seconds a token takes in one complete block on a normal device
    backward: float | None = None  # the same of the backward pass
    factor: float = 1.0  # how many times slower this device is now


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The answer to a worker's `Hello`."""

    device: str  # "node/local rank"
    incarnation: str  # id of this start of the worker's process
    address: str  # host that it listens on for its peers
    pace: EmulatedSpeed | None = None  # emulated speed, if it is not the device's own


class Rejected(Message, frozen=True, kw_only=True, tag="rejected"):
    """The worker or torchrun cannot take part."""

    reason: str  # why, and what to do


class Propose(Message, frozen=True, kw_only=True, tag="propose"):
    """The open proposal, as read from the store."""

    proposal: Proposal  # as the leader wrote it


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """A proposal was aborted, as read from the store."""

    number: int  # of the proposal
    reason: str  # for people


class Fenced(Message, frozen=True, kw_only=True, tag="fenced"):
    """A fence, as read from the store."""

    number: int  # of the fence
    reason: str  # for people
    evicted: bool = False  # it fences off this very incarnation


class Recorded(Message, frozen=True, kw_only=True, tag="plan-recorded"):
    """A plan is recorded, as read from the store: a rank that leaves may drop its copy."""

    number: int  # of the plan


class Published(Message, frozen=True, kw_only=True, tag="checkpoint-published"):
    """A checkpoint may get its final name, as read from the store."""

    name: str  # of its folder


class StoreAnswer(Message, frozen=True, kw_only=True, tag="store-answer"):
    """The answer to a `StoreCall`."""

    id: int  # of the call
    value: bytes = b""  # of `get`
    number: int = 0  # of `add`: the sum; of `check` and `delete`: 1 or 0
    error: str | None = None  # why it failed (a timeout, no leader); None: it was done


class Shutdown(Message, frozen=True, kw_only=True, tag="shutdown"):
    """The job cannot go on, as read from the store: say why and end."""

    reason: str  # for people


class Joined(Message, frozen=True, kw_only=True, tag="joined"):
    """The job's nodes are complete."""

    node_rank: int  # this node's index among them
    nodes: int  # their count


class Closed(Message, frozen=True, kw_only=True, tag="job-closed"):
    """The job finished: to a torchrun that asks again and then ends gracefully; to workers as read from the
    store."""

    reason: str  # for people


FromWorker = (
    Hello
    | Report
    | Prepared
    | Refused
    | Switched
    | StayedOnPlan
    | InDoubt
    | PeersLost
    | StateReport
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
    | EmulatedSpeed
    | Joined
    | Attending
    | RoundAnswer
    | Closed
)


# -- agent to leader -------------------------------------------------------------------------------------------


class AgentHello(Message, frozen=True, kw_only=True, tag="agent-hello"):
    """An agent's first message on each connection; its workers' last messages follow, each a `FromClient`."""

    record: NodeRecord  # of its node
    release: str = ""  # of the sender's elasticd


class FromClient(Message, frozen=True, kw_only=True, tag="from-client"):
    """A message of a worker, or of a torchrun, whose device and incarnation are empty."""

    client: str  # id that the agent gave it
    job: str  # the job's name
    device: str  # "node/local rank"
    incarnation: str  # id of this start of the worker's process
    body: FromWorker  # the message


class PassedReport(msgspec.Struct, frozen=True, kw_only=True, tag=tag_of(FromClient)):
    """How an agent encodes a `FromClient` around a worker's `Report`, which it passes on undecoded."""

    version: int = WIRE_VERSION
    client: str
    job: str
    device: str
    incarnation: str
    body: msgspec.Raw


class WorkerLost(Message, frozen=True, kw_only=True, tag="worker-lost"):
    """A worker's process ended."""

    job: str  # the job's name
    device: str  # "node/local rank"
    incarnation: str  # id of this start of the worker's process
    clean: bool  # it had said goodbye
    how: str  # its own reason if clean, else how it ended


class ToClient(Message, frozen=True, kw_only=True, tag="to-client"):
    """A message for one worker or torchrun of the agent."""

    client: str  # as in `FromClient`, or DEVICE_PREFIX and a device's name
    body: ToWorker  # the message


class AgentRejected(Message, frozen=True, kw_only=True, tag="agent-rejected"):
    """The leader does not take this agent."""

    reason: str  # why, and what to do


class Unread(Value, frozen=True, kw_only=True, tag="unread-opening"):
    """Not sent: an `FromClient` whose opening (`Hello`, `Join`) this leader cannot decode."""

    client: str  # id that the agent gave it
    job: str  # the job's name
    device: str  # "node/local rank", empty for a torchrun
    incarnation: str  # id of this start of the worker's process
    reason: str  # why it cannot be decoded
    release: str = ""  # the client's, where it can be read
    slot: int = -1  # a torchrun's, where it can be read (-1: none)


ToLeader = (
    AgentHello | FromClient | WorkerLost | Frozen | Unreached | Halted | OfNode | SnapshotInventory | StepTime
)
#: What an agent sends to a leader.
FromAgent = ToLeader | PassedReport
ToAgent = ToClient | SnapshotSetComplete | AgentRejected | Harm | Drain | End | TryReach


def protocol_refusal(what: str, hello: Hello | Join | Attend | Watching | AgentHello) -> str:
    """Returns why this sender's version is refused, or an empty string; `what` is the refusal's subject."""
    return version_refusal(what, hello.version, WIRE_VERSION, hello.release)


#: What an encoded report begins with.
_REPORT = f'{{"type":"{tag_of(Report)}",'.encode()
#: A number that may be beyond a float's range: a leader of release 0.1 ends the connection for one.
_MAY_OVERFLOW = re.compile(rb"\d{300}|[eE]\+?0*[1-9]\d{2}")
_as_it_came = decoder_of(msgspec.Raw).decode
_encoder = msgspec.json.Encoder()
_from_worker: MessageReader[FromWorker | ToAgentAlone] = MessageReader(
    FromWorker | ToAgentAlone, "a worker or torchrun"
)
_to_worker: MessageReader[ToWorker] = MessageReader(ToWorker, "the agent")
_to_leader: MessageReader[ToLeader | Unread] = MessageReader(
    ToLeader, "an agent", lambda data, why: _unread(data, why)
)
_to_agent: MessageReader[ToAgent] = MessageReader(ToAgent, "the leader")


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
    if data.count(b"{") + data.count(b"[") > MOST_NESTED or _MAY_OVERFLOW.search(data):
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


def several_to_leader(data: bytes, *, most: int, first: bool = False) -> Sequence[ToLeader | Unread | None]:
    """What an agent said to the leader in one JSON array; None for each message that is skipped. Raises
    `msgspec.DecodeError` for more than `most` of them."""
    return _to_leader.several(data, most=most, first=first)


class _HelloOpening(msgspec.Struct, tag=tag_of(Hello)):
    """What is read of a hello that cannot be decoded. Its tag is checked, so that a report with a second tag in
    it is no opening."""

    release: Any = ""
    slot: Any = None


class _JoinOpening(msgspec.Struct, tag=tag_of(Join)):
    """The same of a torchrun's join."""

    release: Any = ""
    slot: Any = None


class _Passed(msgspec.Struct, tag=tag_of(FromClient)):
    """And of the `FromClient` around it."""

    client: str
    job: str
    device: str
    incarnation: str
    body: _HelloOpening | _JoinOpening


def _unread(data: bytes, why: str) -> Unread | None:
    """Who is to be told that its opening cannot be decoded; nobody where this is none."""
    try:
        up = decoded_as(_Passed, data)
    except msgspec.DecodeError:
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
