"""Wire messages between an agent and the leading coordinator, over the agent's WebSocket.

JSON by msgspec with a tag and a version (`elasticd.codec.message`). What travels here are reports, the
bootstrap store's calls, a user's wishes and hints: orders to workers are read from the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from elasticd_planner.value import Value

from elasticd.codec.decoding import LARGE, SMALL, MessageDecoder, decoded_as, tag_of
from elasticd.codec.message import WIRE_VERSION, Message
from elasticd.records import NodeRecord
from elasticd.wire.launch import FollowJob, Happened, OutputPart, ReadOutput
from elasticd.wire.main_thread import Halted
from elasticd.wire.node_health import Health
from elasticd.wire.rendezvous import Join, StepTime, TorchrunState
from elasticd.wire.snapshots import SnapshotInventory, SnapshotSetComplete
from elasticd.wire.worker import FromWorker, Hello, ToWorker

#: Before a device's name: the address in `ToClient` of whoever drives that device, now or later.
DEVICE_PREFIX = "device:"
#: The code by which an agent that ends in good order closes its WebSocket.
AGENT_LEAVES = 4000
#: Characters that are told of why a message cannot be decoded.
MOST_WHY = 200
#: Messages in one frame at most, and bytes of a frame of several. A message that is skipped costs its reader
#: more than one that is read.
MOST_TOGETHER, BYTES_TOGETHER = 64, SMALL


# -- agent to leader ---------------------------------------------------------------------------------------


class AgentHello(Message, frozen=True, kw_only=True, tag="agent-hello"):
    """An agent's first message on each connection; its workers' last messages follow, each a `FromClient`."""

    record: NodeRecord  # of its node
    release: str = ""  # of the sender's elasticd
    #: slowdowns above 1 that chaos ordered, by device: a new leader has not heard of them
    factors: dict[str, float] = msgspec.field(default_factory=dict)


class FromClient(Message, frozen=True, kw_only=True, tag="from-client"):
    """A message of a worker, or of a torchrun, whose device and incarnation are empty."""

    client: str  # id that the agent gave it
    job: str  # the job's name
    device: str  # "node/local rank"
    incarnation: str  # id of this start of the worker's process
    body: FromWorker  # the message


class PassedReport(msgspec.Struct, frozen=True, kw_only=True, tag=tag_of(FromClient)):
    """The encoding of a `FromClient` around a worker's `Report`, which it passes on undecoded."""

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


class Crossed(Message, frozen=True, kw_only=True, tag="link-probe-result"):
    """To the leader: the link from this agent's node to another, probed while neither has work."""

    target: str  # the other node
    size: int  # bytes that were sent
    seconds: float  # until all of them were there
    latency: float  # seconds one way, the shortest of several messages


class Unreached(Message, frozen=True, kw_only=True, tag="unreached-nodes"):
    """To the leader, the answer to `TryReach`."""

    largest = LARGE

    job: str  # the job's name
    round: int  # as in `TryReach`
    nodes: dict[str, str]  # nodes that this agent's node does not reach, with the reason


class Frozen(Message, frozen=True, kw_only=True, tag="worker-hang"):
    """To the leader: a worker does not answer its agent's heartbeat, or does again."""

    job: str  # the job's name
    device: str  # "node/local rank"
    incarnation: str  # id of this start of the worker's process
    how: str = ""  # how that is known (empty: it answers again)


class Unread(Value, frozen=True, kw_only=True, tag="unread-opening"):
    """Not sent: an `FromClient` whose opening (`Hello`, `Join`) this leader cannot decode."""

    client: str  # id that the agent gave it
    job: str  # the job's name
    device: str  # "node/local rank", empty for a torchrun
    incarnation: str  # id of this start of the worker's process
    reason: str  # why it cannot be decoded
    release: str = ""  # the client's, where it can be read
    slot: int = -1  # a torchrun's, where it can be read (-1: none)


# -- leader to agent ---------------------------------------------------------------------------------------


class ToClient(Message, frozen=True, kw_only=True, tag="to-client"):
    """A message for one worker or torchrun of the agent."""

    client: str  # as in `FromClient`, or DEVICE_PREFIX and a device's name
    body: ToWorker  # the message


class AgentRejected(Message, frozen=True, kw_only=True, tag="agent-rejected"):
    """The leader does not take this agent."""

    reason: str  # why, and what to do


class Drain(Message, frozen=True, kw_only=True, tag="drain"):
    """A user drains this node, or ends that. The agent puts it into the node's record, and answers with an
    `AgentHello` on the same connection."""

    on: bool  # its devices are to be left


class End(Message, frozen=True, kw_only=True, tag="end-job"):
    """A user stops this job: the agent sends SIGTERM to workers, each once, and to torchruns in restart mode,
    which pass it on. A second SIGTERM ends a process at once."""

    job: str  # the job's name
    devices: tuple[str, ...]  # of the workers, without those that are known to drain
    at_once: bool = False  # the torchruns in restart mode are killed, and their workers with them


class TryReach(Message, frozen=True, kw_only=True, tag="try-reach"):
    """The agent tests which nodes it reaches on the data network, and answers with `Unreached`."""

    largest = LARGE

    job: str  # the job's name
    round: int  # number of the test, which the answer repeats
    targets: dict[str, str]  # "host:port" by node


class ReportWindow(Message, frozen=True, kw_only=True, tag="report-window"):
    """Spreads the reports of many agents, whose steps end at one moment: each agent lets its reports wait for a
    fixed part of this time, which it draws by itself."""

    seconds: float  # 0: they do not wait


class Harm(Message, frozen=True, kw_only=True, tag="inject-fault"):
    """Fault injection, a hint: into the process that drives a device, or into this node's links."""

    #: to a process: kill, freeze, thaw. cut: the agent loses leader and store, until it is healed or the leader
    #: is gone. cut-data: what this node sends to `peer` is lost, until heal-data
    how: Literal["kill", "freeze", "thaw", "cut", "cut-data", "heal-data"]
    device: str = ""  # of kill, freeze and thaw
    seconds: float = 0.0  # until a cut ends by itself (0: never)
    peer: str = ""  # data address of cut-data and heal-data


def is_first(release: str) -> bool:
    """Returns True if an agent is of release 0.1, which skips the orders that came later: `End`, `TryReach` and
    cuts of the data network."""
    return release.startswith("0.1.")


# -- reading and writing -----------------------------------------------------------------------------------


#: What agents tell of their nodes, and that is about no job.
OfNode = Crossed | Health
#: What is about a job's processes and network, and may lead to something that is written.
OfJob = FromClient | WorkerLost | Frozen | Unreached | Halted
#: What the coordinator's machine hears.
ToMachine = OfJob | OfNode | SnapshotInventory
ToLeader = AgentHello | StepTime | TorchrunState | ToMachine | FollowJob | OutputPart
#: What an agent sends to a leader.
FromAgent = ToLeader | PassedReport
#: What the coordinator's machine says to agents.
FromMachine = ToClient | SnapshotSetComplete | Harm | Drain | End | TryReach
ToAgent = AgentRejected | FromMachine | Happened | ReadOutput | ReportWindow

_to_leader: MessageDecoder[ToLeader | Unread] = MessageDecoder(
    ToLeader, "an agent", lambda data, why: _unread(data, why)
)
#: What an agent said to the leader, and the leader to an agent (`MessageDecoder.one`).
to_leader, to_agent = _to_leader.one, MessageDecoder[ToAgent](ToAgent, "the leader").one


def together(texts: Sequence[bytes]) -> bytes:
    """Encoded messages as one frame, in order; a single one as it is."""
    return texts[0] if len(texts) == 1 else b"[" + b",".join(texts) + b"]"


def frames(texts: Sequence[bytes]) -> Iterator[bytes]:
    """Encoded messages in frames, in order, of at most `MOST_TOGETHER` messages and `BYTES_TOGETHER` bytes. A
    message that has more is a frame of its own."""
    start, size = 0, 0
    for at, text in enumerate(texts):
        if start < at and (size + len(text) > BYTES_TOGETHER or at - start == MOST_TOGETHER):
            yield together(texts[start:at])
            start, size = at, 0
        size += len(text) + 1
    if texts:
        yield together(texts[start:])


def all_to_leader(data: bytes, *, first: bool = False) -> Sequence[ToLeader | Unread | None]:
    """The messages that came as one: one, or several `together`; None for each that is to be skipped. Raises
    `msgspec.DecodeError`, also for more than `MOST_TOGETHER`, and for the `first` message of a connection whose
    content cannot be decoded."""
    if not data.startswith(b"["):
        return (to_leader(data, first=first),)
    messages = _to_leader.several(data, most=MOST_TOGETHER, first=first)
    if not messages:
        raise msgspec.ValidationError("several messages as one are one at least")
    return messages


class _HelloOpening(msgspec.Struct, tag=tag_of(Hello)):
    """The part of a hello that is read although the hello cannot be decoded. Its tag is checked, so that a
    report with a second tag in it is no opening."""

    release: Any = ""
    slot: Any = None


class _JoinOpening(_HelloOpening, tag=tag_of(Join)):
    """The same of a torchrun's join."""


class _Passed(msgspec.Struct, tag=tag_of(FromClient)):
    """And of the `FromClient` around it."""

    client: str
    job: str
    device: str
    incarnation: str
    body: _HelloOpening | _JoinOpening


def _unread(data: bytes, why: str) -> Unread | None:
    """The sender whose opening cannot be decoded, and who is to learn of it; None where this is no opening."""
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
