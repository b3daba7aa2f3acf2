"""The live feed of a leader (`GET /v1/live`), as values: one JSON line each.

A listener first hears `LiveHello`, then all that is known (`NodeNews`, `JobNews`, `PlanNews`, ...), then
`Whole`. From then on it hears what changes. Every message says how things are, not how they differ: one that
comes twice, or once too often, does no harm. Events and steps from before the hello are not among them: a
listener asks for those above the last that it knows (`/v1/events?after=`, `/v1/jobs/JOB/steps?after=`) once it
has the hello.

A message of a type that a listener does not know is of a newer release, and is skipped.
"""

from __future__ import annotations

import msgspec
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.slowness_history import Slowness
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.value import Value

from elasticd.coordinator.api_types import (
    JobStatus,
    LeaderStatus,
    LinkStatus,
    MemberStatus,
    NodeStatus,
    Pace,
    Settings,
)
from elasticd.coordinator.events.event_log import EventRecord
from elasticd.coordinator.events.job_times import JobTime
from elasticd.coordinator.events.switch_gain import StepRecord
from elasticd.records import PublishedCheckpoint
from elasticd.wire.main_thread import Halted
from elasticd.wire.node_health import Health

#: The columns of `MeasuredNews`: fields of a device's `Measurement`, then what detection makes of it: the
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
    """The base of all that listeners hear. `id`: the leader's epoch and a sequence number of its own, as
    "12:345"; those of the lines after a hello repeat the id of the hello."""

    id: str


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


class NodeNews(News, frozen=True, kw_only=True, tag="node"):
    """A node is there, or its record, connection, members or chaos changed. Its health comes apart."""

    node: NodeStatus


class NodeGone(News, frozen=True, kw_only=True, tag="node-gone"):
    """The leader forgot a node."""

    node: str


class HealthNews(News, frozen=True, kw_only=True, tag="health"):
    """An agent's report of its machine and devices."""

    node: str
    health: Health


class SlowdownNews(News, frozen=True, kw_only=True, tag="slowdowns"):
    """Devices whose slowdown, or kind of slowness, changed."""

    rates: dict[str, float]  # 1.0 normal
    slowness: dict[str, Slowness]  # of those that were ever slow


class JobNews(News, frozen=True, kw_only=True, tag="job"):
    """A job, without its plan and members, which come apart."""

    job: JobStatus
    plan: int  # number of the plan in force (0: none)
    over: bool  # it is done or stopped
    time: JobTime | None = None  # where its wall time went (None: it made no step)
    checkpoints: tuple[PublishedCheckpoint, ...] = ()  # newest last


class JobGone(News, frozen=True, kw_only=True, tag="job-gone"):
    """A job was forgotten."""

    job: str


class PlanNews(News, frozen=True, kw_only=True, tag="plan"):
    """The plan of a job that is in force, or the one that is proposed."""

    job: str
    plan: JobPlan
    proposed: bool


class MembersNews(News, frozen=True, kw_only=True, tag="members"):
    """All workers of a job."""

    job: str
    members: tuple[MemberStatus, ...]


class HaltNews(News, frozen=True, kw_only=True, tag="halts"):
    """All workers of a job whose main thread stands still."""

    job: str
    halts: dict[str, Halted]  # by device


class ExpertsNews(News, frozen=True, kw_only=True, tag="experts"):
    """The load of a job's experts, in the mean of the last reports."""

    job: str
    rows: dict[int, tuple[float, ...]]  # of each expert in a step, by block


class LinksNews(News, frozen=True, kw_only=True, tag="links"):
    """All links between nodes that were probed."""

    links: tuple[LinkStatus, ...]


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


class RestartNews(News, frozen=True, kw_only=True, tag="restarts"):
    """All jobs in restart mode, at most once a second."""

    restarts: tuple[RestartingJob, ...]


class SettingsNews(News, frozen=True, kw_only=True, tag="settings"):
    """Detection and policy in force, and their changes."""

    settings: Settings
    detect: DetectSettings


class EventNews(News, frozen=True, kw_only=True, tag="event"):
    """Something happened."""

    event: EventRecord


class StepNews(News, frozen=True, kw_only=True, tag="step"):
    """A job made a step."""

    job: str
    step: StepRecord


class MeasuredNews(News, frozen=True, kw_only=True, tag="measured"):
    """The measurements of a job's members in their newest step, at most once a second."""

    job: str
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


class ProgressNews(News, frozen=True, kw_only=True, tag="progress"):
    """The reports of ranks about a switch since the last of these messages."""

    job: str
    number: int  # of the proposal
    ranks: tuple[RankNews, ...]


AnyNews = (
    LiveHello
    | Whole
    | LeaderPulse
    | NodeNews
    | NodeGone
    | HealthNews
    | SlowdownNews
    | JobNews
    | JobGone
    | PlanNews
    | MembersNews
    | HaltNews
    | ExpertsNews
    | LinksNews
    | RestartNews
    | SettingsNews
    | EventNews
    | StepNews
    | MeasuredNews
    | ProgressNews
)
