"""The live feed of a leader (`GET /v1/live`), one keyed stream: one JSON line each.

A listener first gets `LiveHello`, then a `PutValue` for each thing that is known, then `Whole`. From then on it
gets the changes: `PutValue` is the state of a thing now, not the difference to before, so that one that comes
twice does no harm; `Drop` forgets a thing, and all things of its children (`PARENTS`); `Append` is the next of
a stream. Events and steps from before the hello are not among them: a listener asks for those above the last
that it knows (`/v1/events?after=`, `/v1/jobs/JOB/steps?after=`) once it has the hello.

The type of a line of `PutValue` and `Append` is the kind of its value (`THINGS`, `STREAMS`). A line of a type
that a listener does not know is of a newer release, and is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, Union, cast

import msgspec
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.slowness_history import Slowness
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.value import Value

from elasticd.records import PublishedCheckpoint
from elasticd.wire.api_types import (
    JobStatus,
    LeaderStatus,
    LinkStatus,
    MemberStatus,
    NodeStatus,
    Pace,
    Settings,
)
from elasticd.wire.event_record import EventRecord
from elasticd.wire.job_time import JobTime
from elasticd.wire.main_thread import Halted
from elasticd.wire.node_health import Health
from elasticd.wire.step_record import StepRecord

#: The columns of `MeasuredStep`: fields of a device's `Measurement`, then what detection makes of it: the
#: device's slowdown in this step against the fleet, and the CUSUM evidence that its slowdown changes.
MEASURED = (
    "block_seconds",
    "forward_seconds",
    "backward_seconds",
    "again_seconds",
    "embed_seconds",
    "head_seconds",
    "tensor_seconds",
    "context_seconds",
    "boundary_seconds",
    "reduce_seconds",
    "vote_seconds",
    "optimizer_seconds",
    "input_seconds",
    "step_seconds",
    "memory_bytes",
)
JUDGED = ("slowdown", "evidence")
#: The columns of each module of items, behind those: fields of its `ModuleMeasurement`,
#: as "vision/tensor_seconds".
OF_ITEMS = (
    "block_seconds",
    "forward_seconds",
    "backward_seconds",
    "again_seconds",
    "embed_seconds",
    "head_seconds",
    "tensor_seconds",
    "reduce_seconds",
)
COLUMNS = (*MEASURED, *JUDGED)


class News(Value, frozen=True, kw_only=True, tag_field="type"):
    """The base of all lines. `id`: the leader's epoch and a sequence number of its own, as
    "12:345"; those of the lines after a hello repeat the id of the hello."""

    id: str

    @property
    def kind(self) -> str:
        """The kind of the thing or stream that the line is about; of another line its type."""
        return str(self.__struct_config__.tag)


class LiveHello(News, frozen=True, kw_only=True, tag="hello"):
    """The first message, and after a listener lagged: what it knew counts no more."""

    cluster: str  # the cluster's name
    leader: LeaderStatus  # who leads
    release: str  # of the leader's elasticd
    at: float  # unix seconds
    chaos: bool  # `elasticd chaos` is enabled
    newest_event: int  # id of the newest event (0: there is none)
    detect: DetectSettings  # thresholds in force
    store: str = ""  # the etcd's cluster ID: ids of events are of this etcd (empty: not known)


class Whole(News, frozen=True, kw_only=True, tag="whole"):
    """All that is known has been said since the hello."""


class LeaderPulse(News, frozen=True, kw_only=True, tag="pulse"):
    """Every second: the leader lives."""

    at: float  # unix seconds
    store_away: bool  # etcd does not answer, and decisions wait
    paused: bool  # no plan is replaced by a better one
    #: seconds for which something that listeners were told has waited to be in etcd, once above 1 (0: all is)
    unwritten_seconds: float = 0.0


class Keyed(News, frozen=True, kw_only=True):
    """The base of the lines about one thing, which its kind and its key name."""

    key: str  # a node's or a job's name; empty where there is one thing of the kind


class Drop(Keyed, frozen=True, kw_only=True, tag="drop"):
    """The leader forgot a thing, and all things of its children."""

    kind: str


class Valued(Keyed, frozen=True, kw_only=True):
    """The base of the lines with a value. Their classes are made of `THINGS` and `STREAMS`, one a kind."""

    value: Any


class PutValue(Valued, frozen=True, kw_only=True):
    """A thing is there, or its state is another. `value`: the state, by `THINGS`."""


class Append(Valued, frozen=True, kw_only=True):
    """The next of a stream. `value`: by `STREAMS`."""


class LiveJob(Value, frozen=True, kw_only=True):
    """A job, without its plan and members, which are things of their own."""

    job: JobStatus
    plan: int  # number of the plan in force (0: none)
    over: bool  # it is done or stopped
    time: JobTime | None = None  # where its wall time went (None: it made no step)
    checkpoints: tuple[PublishedCheckpoint, ...] = ()  # newest last


class RestartingJob(Value, frozen=True, kw_only=True):
    """A job in restart mode, as `RestartStatus`, with a time in place of a silence, which grows by itself."""

    job: str  # the job's name
    round: int  # number of the rendezvous round (-1: none yet)
    step: int  # newest that was reported
    step_seconds: float  # of that step
    heard: float  # unix seconds at which something of it was reported last
    devices: dict[str, Pace]  # by device
    out: dict[str, str]  # torchruns that take no part, with the reason
    phase: str = "running"  # as in `RestartStatus`
    nodes: tuple[str, ...] = ()  # of its torchruns
    members: tuple[str, ...] = ()  # devices that its torchruns hold
    ran_on: tuple[str, ...] = ()  # devices that they hold, or held as they ended
    workers: int = 0  # of them in all (0: not known)
    restarts: int = 0  # how often its workers were started again
    sentence: str = ""  # all that in words, with why it failed
    failure: str = ""  # as in `RestartStatus`


class LiveSettings(Value, frozen=True, kw_only=True):
    """Detection and policy in force, and their changes."""

    settings: Settings
    detect: DetectSettings


class Slowdowns(Value, frozen=True, kw_only=True):
    """Devices whose slowdown, or kind of slowness, changed."""

    rates: dict[str, float]  # 1.0 normal
    slowness: dict[str, Slowness]  # of those that were ever slow


class MeasuredStep(Value, frozen=True, kw_only=True):
    """The measurements of a job's members in their newest step, at most once a second."""

    plan: int  # number of the plan in force
    step: int  # the newest of which something is here
    #: little-endian 32-bit floats [members of the plan in rank order, `columns`]; NaN: nothing new
    numbers: bytes
    columns: tuple[str, ...]  # a later release may append some
    #: sequences of the step by bucket (`sequence_lengths.bucket`); empty: not all pipelines have told theirs
    lengths: dict[int, int]
    sequence_tokens: int = 0  # of all these sequences (0: not known)
    shortest: int = 0  # tokens of the shortest sequence (0: not known)
    longest: int = 0  # tokens of the longest sequence (0: not known)


class RankNews(Value, frozen=True, kw_only=True):
    """A rank's report of a switch."""

    device: str
    at: float  # unix seconds when the leader heard it
    what: str  # prepared, swapped, kept
    pause: float = 0.0  # seconds, of `swapped`
    bytes_sent: int = 0
    bytes_lacking: int = 0
    flows: dict[str, int] = msgspec.field(default_factory=dict)  # bytes by device that sent to this rank


class SwitchProgress(Value, frozen=True, kw_only=True):
    """The reports of ranks about a switch since the last of these."""

    number: int  # of the proposal
    ranks: tuple[RankNews, ...]


#: The value of each kind of thing.
THINGS: dict[str, Any] = {
    "node": NodeStatus,  # by node: its record, connection, members, chaos; its health is a thing of its own
    "health": Health,  # by node: an agent's report of its machine and devices
    "job": LiveJob,  # by job
    "plan": JobPlan,  # by job: in force
    "proposed": JobPlan,  # by job
    "members": tuple[MemberStatus, ...],  # by job: all its workers
    "halts": dict[str, Halted],  # by job: its workers whose main thread stands still, by device
    "experts": dict[int, tuple[float, ...]],  # by job: rows of each expert in a step, by block
    "links": tuple[LinkStatus, ...],  # all links between nodes that were probed
    "restarts": tuple[RestartingJob, ...],  # all jobs in restart mode, at most once a second
    "settings": LiveSettings,
}
#: The value of each kind of stream.
STREAMS: dict[str, Any] = {
    "event": EventRecord,  # by job (empty: of the cluster)
    "step": StepRecord,  # by job
    "measured": MeasuredStep,  # by job
    "progress": SwitchProgress,  # by job
    "slowdowns": Slowdowns,  # of the cluster
}
#: Kinds that are forgotten with the thing of another kind that has the same key.
PARENTS = {
    "health": "node",
    "plan": "job",
    "proposed": "job",
    "members": "job",
    "halts": "job",
    "step": "job",
    "measured": "plan",
    "experts": "plan",
}
V = TypeVar("V", bound=Valued)


def _classes(base: type[V], values: Mapping[str, Any]) -> dict[str, type[V]]:
    options: dict[str, Any] = {"frozen": True, "kw_only": True, "module": __name__}
    return {
        kind: cast(
            "type[V]",
            msgspec.defstruct(base.__name__, [("value", value)], bases=(base,), tag=kind, **options),
        )
        for kind, value in values.items()
    }


_PUT = _classes(PutValue, THINGS)
_APPEND = _classes(Append, STREAMS)
AnyNews = LiveHello | Whole | LeaderPulse | Drop | PutValue | Append
#: The union to decode.
LINES: Any = Union[(LiveHello, Whole, LeaderPulse, Drop, *_PUT.values(), *_APPEND.values())]


def put(number: str, kind: str, key: str, value: Any) -> PutValue:
    """Returns the line of an id about a thing's state."""
    return _PUT[kind](id=number, key=key, value=value)


def append(number: str, kind: str, key: str, value: Any) -> Append:
    """Returns the line of an id about the next of a stream."""
    return _APPEND[kind](id=number, key=key, value=value)


def dropped(drop: Drop) -> tuple[str, ...]:
    """Returns the kinds that lose the thing of a key: that of the line, its children, and theirs."""
    kinds = [drop.kind]
    for kind in kinds:
        kinds += [child for child, parent in PARENTS.items() if parent == kind]
    return tuple(kinds)
