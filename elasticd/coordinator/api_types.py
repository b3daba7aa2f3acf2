"""What the coordinator answers to REST, as values: the server makes them, the commands read them, and the
OpenAPI document is drawn from them.

A command of another release may read an answer that lacks what was added later: that has a default.
"""

from __future__ import annotations

import msgspec
from elasticd_planner.detection.slowness_history import Slowness
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Value

from elasticd.coordinator.events.event_log import EventRecord, Pacing
from elasticd.coordinator.events.switch_gain import StepRecord
from elasticd.records import ConfigRecord, HistoryRecord
from elasticd.wire.node_health import Health


class DeviceStatus(Value, frozen=True, kw_only=True):
    """A device: bytes of memory, its measured rate (1.0 normal), and the factor that chaos set. slowness: what
    kind it has shown in its job so far, and when (None: it was never slow)."""

    name: str
    memory: int
    rate: float
    pace: float
    slowness: Slowness | None = None


class NodeStatus(Value, frozen=True, kw_only=True):
    """A node whose agent has said hello to this leader. draining: its devices are to be left; members: those
    that plans use; health: what its agent last said of machine and devices."""

    node: str
    connected: bool
    address: str
    emulated: bool
    draining: bool = False
    members: int = 0
    health: Health | None = None
    devices: tuple[DeviceStatus, ...]


class MemberStatus(Value, frozen=True, kw_only=True):
    """A worker process."""

    device: str
    incarnation: str
    pid: int


class ExceptionStatus(Value, frozen=True, kw_only=True):
    """What the script's own code raised in the step of this index; kind: the name of its class."""

    device: str
    step: int
    kind: str
    message: str
    traceback: str


class JobStatus(Value, frozen=True, kw_only=True):
    """One job: `step` is the newest that was reported; loss and speed are of that step. `snapshot`: the newest
    step whose state is kept in the agents' memory, on two nodes where there are two. `exception`: the last
    that the script's own code raised, until the job has trained on beyond its step."""

    job: str
    phase: str
    reason: str
    plan: Plan | None
    proposal: int | None
    step: int
    loss: float | None
    tokens_per_second: float | None
    snapshot: int | None = None
    exception: ExceptionStatus | None = None
    members: tuple[MemberStatus, ...]


class Pace(Value, frozen=True, kw_only=True):
    """Seconds of a device's own computation in the last step, and how many times the others' they are."""

    seconds: float
    ratio: float


class RestartStatus(Value, frozen=True, kw_only=True):
    """A job in restart mode whose script has `elasticd.watch()`: out tells why torchruns take no part."""

    job: str
    round: int
    step: int
    step_seconds: float
    silent_seconds: float
    devices: dict[str, Pace]
    out: dict[str, str]


class LeaderStatus(Value, frozen=True, kw_only=True):
    """The coordinator that answers."""

    name: str
    url: str
    epoch: int


class LinkStatus(Value, frozen=True, kw_only=True):
    """A link between two nodes by its last probe: bytes a second, seconds one way, times slower than normal."""

    link: str
    bandwidth: float
    latency: float
    rate: float


class ClusterStatus(Value, frozen=True, kw_only=True):
    """The answer of `GET /v1/status`. paused: no plan is replaced by a better one (`elasticd pause`)."""

    cluster: str
    leader: LeaderStatus
    nodes: tuple[NodeStatus, ...]
    jobs: tuple[JobStatus, ...]
    restarts: tuple[RestartStatus, ...] = ()
    links: tuple[LinkStatus, ...] = ()
    paused: bool = False

    def job(self, name: str) -> JobStatus | None:
        return next((job for job in self.jobs if job.job == name), None)


class Settings(Value, frozen=True, kw_only=True):
    """The answer of `GET /v1/config`: all values by dotted key, those changed while running, every change."""

    values: dict[str, bool | int | float | str]
    changed: dict[str, bool | int | float | str]
    history: tuple[ConfigRecord, ...]


class Events(Value, frozen=True, kw_only=True):
    """Events of the journal, oldest first."""

    events: tuple[EventRecord, ...]


class Steps(Value, frozen=True, kw_only=True):
    """Steps of a job, and what its emulated devices reported of their pacing in all."""

    steps: tuple[StepRecord, ...]
    pacing: Pacing


class History(Value, frozen=True, kw_only=True):
    """Every plan of a job, oldest first."""

    history: tuple[HistoryRecord, ...]


class Stopping(Value, frozen=True, kw_only=True):
    """A job is being stopped: who asked for it, and the seconds until it ends in any case. unheard: nodes whose
    workers are not told, as the release of their agent, which stands beside each, cannot."""

    by: str = ""
    seconds: float = 0.0
    unheard: dict[str, str] = msgspec.field(default_factory=dict)


class Live(Value, frozen=True, kw_only=True):
    """It runs."""

    live: bool = True


class Ready(Value, frozen=True, kw_only=True):
    """It leads and serves."""

    ready: bool = True


class Refusal(Value, frozen=True, kw_only=True):
    """Why it was not done, and what would be right."""

    error: str
