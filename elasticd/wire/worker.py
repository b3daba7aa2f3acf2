"""Wire messages between a worker and its agent; most of what a worker says goes on to the leader.

JSON by msgspec with a tag and a version (`elasticd.codec.message`). Plans, proposals and aborts reach a worker
only as its agent reads them from the store. A torchrun says some of these too, beside its own
(`elasticd.wire.rendezvous`).
"""

from __future__ import annotations

import re

import msgspec
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.value import Value, refuse

from elasticd.codec.decoding import LARGE, MessageDecoder, decoder_of, tag_of
from elasticd.codec.message import WIRE_VERSION, Message
from elasticd.codec.record_parts import MOST_BYTES
from elasticd.records import AnyJobSpec, Proposal, Vote
from elasticd.wire.launch import Following, Happened, OfLaunch, OutputKept
from elasticd.wire.main_thread import Whereabouts
from elasticd.wire.rendezvous import (
    Attending,
    Join,
    Joined,
    Leave,
    OfRounds,
    RoundAnswer,
)
from elasticd.wire.snapshots import Fetched, Freed, OfSnapshots

#: Bytes of a report that is passed on undecoded, and objects and arrays in it.
MOST_PASSED, MOST_NESTED = 64 << 10, 64

# -- worker to agent ---------------------------------------------------------------------------------------


#: Characters of each word of a worker's device.
MOST_NAME = 200


class WorkerDevice(Value, frozen=True, kw_only=True):
    """The device of a worker, and the way in which its tensors reach other workers."""

    name: str  # as torch names it in the worker, as "cuda:0" or "cpu"
    model: str = ""  # as people name it, as "NVIDIA H100 80GB HBM3"
    identity: str = ""  # the same for all processes that compute on it ("": it has none)
    shared: bool = False  # other workers may compute on it, too, because the user asked for that
    transport: str = "gloo"  # the library that carries tensors to other workers

    def __post_init__(self) -> None:
        for text in (self.name, self.model, self.identity, self.transport):
            if len(text) > MOST_NAME or not text.isprintable():
                refuse(f"a worker's device has words of at most {MOST_NAME} printable characters")

    @property
    def text(self) -> str:
        """For people."""
        return self.name if self.model in ("", self.name) else f"{self.name} ({self.model})"


class RunningPlan(Value, frozen=True, kw_only=True):
    """The plan that a worker trains under, for a leader whose etcd was set up anew."""

    plan: JobPlan  # as it was proposed
    step: int  # updates before the first step under it
    highest: int  # the highest number of a proposal or fence that the worker has heard of


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """A worker's first message."""

    largest = LARGE

    job: str  # the job's name
    local_rank: int  # index of its device on the node
    world_size: int  # workers that torchrun started for the job, on all nodes
    pid: int  # process id
    spec: AnyJobSpec  # what it trains
    checkpoints: tuple[str, ...] = ()  # names of the checkpoints that it sees and that look sound, newest first
    incarnation: str = ""  # the id that it has already, if it comes back to an agent that was started again
    probes: bool = False  # it answers a `Probe`
    rehearses: bool = False  # it answers a `Rehearse`
    closes: bool = False  # it takes part in a last checkpoint that another member of a recovered plan asks for
    saves_now: bool = False  # it has a folder for checkpoints, and makes one when the leader asks: `SaveNow`
    release: str = ""  # of the sender's elasticd
    computes_on: WorkerDevice | None = None  # None: a worker of release 0.1
    longest: int = 0  # [tokens] the longest sequence that its checkpoints know of
    running: RunningPlan | None = None  # of one that comes back, and has a part in a plan


class Report(Message, frozen=True, kw_only=True, tag="report"):
    """One step of one rank."""

    measurement: Measurement  # times of the step
    loss: float | None = None  # mean per token; from rank 0 alone
    tokens: int | None = None  # tokens of the step over all ranks; from rank 0 alone
    #: seconds of the worker's monotonic clock at the step's end; from rank 0 alone (0: an older release)
    ended_at: float = 0.0
    paced: int = 0  # sections that an emulated device slowed down to its speed
    overruns: int = 0  # sections that took longer than the emulated speed allows
    #: steps in a row that changed no weight, up to this one, once people are to know; from rank 0 alone
    left_out: int = 0
    left_out_why: str = ""  # of the last of them


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
    """This rank stands still, because a collective of the plan in force failed, or because its members want to
    go on from an older state."""

    step: int  # updates so far
    reason: str  # the collective's error, or why an older state is wanted
    plan: int = 0  # number of that plan (0: of a release that does not say)
    back: int = -1  # index of the last step whose update is to be left out then (-1: the state here will do)


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


class SaveFailed(Message, frozen=True, kw_only=True, tag="checkpoint-failed"):
    """A checkpoint that this rank began, or was to begin, is not made."""

    step: int  # updates that would be in it
    plan: int  # number of the plan whose members were to write it
    reason: str  # in plain words
    skipped: bool = False  # it was not begun: the one before is still being written


class Finished(Message, frozen=True, kw_only=True, tag="finished"):
    """The last step's vote is complete. It tells the last step as each rank knows it, for the case that rank
    0's report of it does not come."""

    step: int  # updates in all
    plan: int = 0  # number of the last step's plan
    loss: float | None = None  # mean per token of the last step
    tokens: int | None = None  # tokens of the last step, over all ranks
    saved: bool = True  # the job keeps no checkpoints, or there is one after this step; False: it was not made


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
    #: of the step, as the script sees it: that of the loop's body where that raised (None: an older release)
    index: int | None = None


class DrainNotice(Message, frozen=True, kw_only=True, tag="preemption-notice"):
    """A preemption notice: this process was sent SIGTERM or a spot notice, and ends once it is drained."""

    reason: str  # what it was sent
    saves: bool = False  # it has a last checkpoint to make should all workers go


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """A clean end follows. Silence before an exit is a death."""

    reason: str = ""  # why it ends, for people
    drained: bool = False  # it was told to go: its script ends before what follows the last step


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    """The answer: this process runs."""


class Probed(Message, frozen=True, kw_only=True, tag="device-probe-result"):
    """The answer, for the leader."""

    seconds: tuple[float, ...]  # of the same small matrix product, made several times


class Rehearsed(Message, frozen=True, kw_only=True, tag="all-reduce-probe-result"):
    """The answer of the first member, for the leader."""

    seconds: dict[int, float]  # of one all-reduce, by width


class StoreCall(Message, frozen=True, kw_only=True, tag="store-call"):
    """A call on the job's bootstrap store, which the leader keeps."""

    largest = LARGE

    id: int  # by which the caller knows the answer
    #: "set", "get" (waits until the key is there), "add", "check" or "delete"; any other is answered with an
    #: error
    op: str
    key: str  # of the store
    value: bytes = b""  # to set; of `add`: the number as text
    seconds: float = 30.0  # for which the caller waits


# -- agent to worker ---------------------------------------------------------------------------------------


class EmulatedSpeed(Message, frozen=True, kw_only=True, tag="emulated-speed"):
    """Emulated speed of a device. Without times, `factor` stretches what the real computation took."""

    forward: float | None = None  # seconds a token takes in one complete block on a normal device
    backward: float | None = None  # the same of the backward pass
    factor: float = 1.0  # how many times slower this device is now
    # Tokens of a sequence of this length take as long in attention as in all else; 0: attention takes no time.
    attention_tokens: int = 0


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The answer to a worker's `Hello`."""

    device: str  # "node/local rank"
    incarnation: str  # id of this start of the worker's process
    address: str  # host that it listens on for its peers
    pace: EmulatedSpeed | None = None  # emulated speed, if it is not the device's own


class Rejected(Message, frozen=True, kw_only=True, tag="rejected"):
    """The worker or torchrun cannot take part."""

    reason: str  # why, and what to do
    restart: bool = False  # the job runs in restart mode, where the torchrun may take part
    later: bool = False  # the torchrun may take part once workers of the job's last start have ended


class Propose(Message, frozen=True, kw_only=True, tag="propose"):
    """The open proposal, as read from the store."""

    largest = MOST_BYTES

    proposal: Proposal  # as the leader wrote it


class PassedProposal(msgspec.Struct, frozen=True, kw_only=True, tag=tag_of(Propose)):
    """The encoding of a `Propose` around a proposal, which it passes on undecoded."""

    version: int = WIRE_VERSION
    proposal: msgspec.Raw


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

    largest = LARGE

    id: int  # of the call
    value: bytes = b""  # of `get`
    number: int = 0  # of `add`: the sum; of `check` and `delete`: 1 or 0
    error: str | None = None  # why it failed (a timeout, no leader); None: it was done


class Shutdown(Message, frozen=True, kw_only=True, tag="shutdown"):
    """The job cannot go on, as read from the store: say why and end."""

    reason: str  # for people
    orderly: bool = False  # the workers were told to go: this is no failure


class Closed(Message, frozen=True, kw_only=True, tag="job-closed"):
    """The job finished: to a torchrun that asks again and then ends gracefully; to workers as read from the
    store."""

    reason: str  # for people


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """An agent asks a worker's control thread for an answer, and gets `Pong`."""


class Probe(Message, frozen=True, kw_only=True, tag="device-probe"):
    """An agent asks a worker that stands by how fast its device is; one that computes does not answer."""


class Rehearse(Message, frozen=True, kw_only=True, tag="all-reduce-probe"):
    """Before a job's first plan the leader asks workers of one node how long an all-reduce takes among them."""

    members: tuple[str, ...]  # devices, in rank order
    widths: tuple[int, ...]  # for each: an all-reduce among the first so many members, in this order
    size: int  # bytes of each all-reduce


class SaveNow(Message, frozen=True, kw_only=True, tag="checkpoint-now"):
    """The leader asks one member of the plan to have all make a checkpoint at their next vote."""


# -- reading and writing -----------------------------------------------------------------------------------


#: What a worker says of switches, faults and its end: an agent keeps it, and says it again to a new leader.
Statement = (
    Prepared
    | Refused
    | Switched
    | StayedOnPlan
    | InDoubt
    | PeersLost
    | StateReport
    | Saved
    | SaveFailed
    | Finished
    | Raised
    | DrainNotice
)
FromWorker = Hello | Report | Statement | Goodbye | Probed | Rehearsed | StoreCall | Join | Leave
#: All that an agent's machine does not hear.
ToAgentAlone = Pong | OfSnapshots | OfRounds | Whereabouts | OfLaunch
ToWorker = (
    Welcome
    | Ping
    | Probe
    | Rehearse
    | SaveNow
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
    | OutputKept
    | Following
    | Happened
    | Closed
)
#: What an agent encodes for a worker or torchrun.
FromItsAgent = ToWorker | PassedProposal


#: What an encoded report begins with.
_REPORT = f'{{"type":"{tag_of(Report)}",'.encode()
#: A number that may be beyond a float's range: a leader of release 0.1 ends the connection for one.
_MAY_OVERFLOW = re.compile(rb"\d{300}|[eE]\+?0*[1-9]\d{2}")
_as_it_came = decoder_of(msgspec.Raw).decode
_Said = FromWorker | ToAgentAlone

# Each of these gives None for a message that the receiver skips: its tag is unknown, or its content cannot be
# decoded. They raise `msgspec.DecodeError` for bytes that are no message, and for the `first` message of a
# connection if its content cannot be decoded (`MessageDecoder.one`).

#: What a worker or torchrun said to its agent.
from_worker = MessageDecoder[_Said](_Said, "a worker or torchrun").one
#: What an agent said to a worker or torchrun.
to_worker = MessageDecoder[ToWorker](ToWorker, "the agent").one


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
