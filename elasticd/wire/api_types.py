"""The coordinator's REST answers, as values: the server makes them, the commands read them, and the OpenAPI
document is drawn from them.

A command of another release may read an answer that lacks what was added later: that has a default.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from elasticd_planner.detection.slowness_history import Slowness
from elasticd_planner.spec.batch import BatchSummary
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.value import Value

from elasticd.records import AnyHistoryRecord, ConfigRecord
from elasticd.wire.event_record import EventRecord, Pacing
from elasticd.wire.node_health import Health
from elasticd.wire.step_record import StepRecord
from elasticd.wire.worker import WorkerDevice

#: Why an order to harm the cluster is not carried out.
CHAOS_OFF = (
    "chaos is off: set enabled = true in section [chaos] of the coordinator's configuration and the agents', "
    "or start 'elasticd up --chaos'"
)
#: Values of `JobStatus.phase` after which nothing follows.
OVER_PHASES = frozenset({"done", "stopped"})

#: The header in which a sender says who it is.
USER_HEADER = "x-elasticd-user"


class DeviceStatus(Value, frozen=True, kw_only=True):
    """A device."""

    name: str  # "node/local rank"
    memory: int  # bytes
    rate: float  # measured slowdown, 1.0 normal
    pace: float  # slowdown that chaos set, 1.0 none
    #: of what kind it was in its job so far, and when (None: it was never slow)
    slowness: Slowness | None = None


class NodeStatus(Value, frozen=True, kw_only=True):
    """A node whose agent has said hello to this leader."""

    node: str  # its name
    connected: bool  # its agent's connection stands
    address: str  # host that its workers listen on
    emulated: bool  # its devices run at an emulated speed
    draining: bool = False  # its devices are to be left
    #: what a user asked of a drain, and the agent has not confirmed: it is told again (None: nothing)
    drain_asked: bool | None = None
    members: int = 0  # devices that plans use
    health: Health | None = None  # what its agent last said of machine and devices
    devices: tuple[DeviceStatus, ...]  # by local rank

    @property
    def drain_pending(self) -> bool:
        """True until the agent confirms a drain, or its end, that a user asked for."""
        return self.drain_asked is not None


class MemberStatus(Value, frozen=True, kw_only=True):
    """A worker process."""

    device: str  # "node/local rank"
    incarnation: str  # id of this start of the worker's process
    pid: int  # process id
    computes_on: WorkerDevice | None = None  # and over what its tensors travel (None: it did not say)


class ExceptionStatus(Value, frozen=True, kw_only=True):
    """An exception that the script's own code raised."""

    device: str  # "node/local rank"
    step: int  # index of the step
    kind: str  # name of its class
    message: str  # the exception as a string
    traceback: str  # as Python prints it


class CheckpointStatus(Value, frozen=True, kw_only=True):
    """A job's checkpoints: the newest, and what became of the last that was tried."""

    step: int  # of the newest (0: there is none)
    age_seconds: float | None = None  # since it was made (None: this leader does not know)
    failed_step: int | None = None  # of the last that was tried, where it was not made
    failure: str = ""  # why it was not made


class ModuleDeviceStatus(Value, frozen=True, kw_only=True):
    """A device in one module of a model of several, in the newest step that all have reported."""

    device: str  # its name
    seconds: float  # of its computation
    items: int = 0  # that its lane took (0: the module runs on samples; and below)
    share: float = 0.0  # that its lane had of the rows of all items
    planned_share: float = 0.0  # that the plan says
    slowdown: float = 0.0  # its lane's time for a row over the planned one (0: shares do not follow)


class ModuleStatus(Value, frozen=True, kw_only=True):
    """One module of a model of several, in the newest step that all have reported."""

    module: str  # its name
    devices: int  # that compute with it
    busiest: str  # the device whose computation took longest
    seconds: float  # of that computation
    items: str = ""  # the key of what it runs on, as "images" (empty: samples)
    items_a_sample: float = 0.0  # in the mean of the last steps
    rows_an_item: float = 0.0  # tokens, likewise
    by_device: tuple[ModuleDeviceStatus, ...] = ()  # that compute with it, lane by lane


class ExpertDeviceStatus(Value, frozen=True, kw_only=True):
    """A device of a TP group with experts."""

    device: str  # its name
    experts: int  # that it has, of all of its blocks
    work: float  # of its blocks, by the rows that go to its experts, over that by its share


class ExpertsStatus(Value, frozen=True, kw_only=True):
    """The experts of a job and their load, in the mean of the last reports."""

    experts: int  # of all blocks
    copies: int  # on further devices of their TP groups, in all pipelines
    uneven: float  # the experts' time of the busiest device over the least possible, less 1, of the worst group
    block: int  # that has the heaviest expert
    heaviest: int  # that expert
    part: float  # of that block's rows that go to it
    by_device: tuple[ExpertDeviceStatus, ...] = ()  # of TP groups of several devices, in the order of the plan


class JobStatus(Value, frozen=True, kw_only=True):
    """One job."""

    job: str  # the job's name
    phase: str  # of its life
    reason: str  # why it waits or has ended
    #: it has ended since its workers were told to go, by a user or by signals: nothing has failed
    orderly: bool = False
    plan: JobPlan | None  # in force
    proposal: int | None  # number of the open one
    step: int  # newest that was reported
    loss: float | None  # of the newest step, mean per token
    tokens_per_second: float | None  # tokens over wall time, of the newest ten steps
    step_seconds: float | None = None  # of the newest step itself, from its begin to its end
    #: of wall time a step, in the mean over the newest ten: the steps, and the script's own code between them
    wall_seconds: float | None = None
    #: of a step under the plan in force, by the newest profile and the slowdowns that the plan was made for
    predicted_seconds: float | None = None
    #: `predicted_seconds` is by the model's shapes alone: no profile has been fitted to measured steps
    prediction_guessed: bool = False
    checkpoint: CheckpointStatus | None = None  # None: it has made none, and none has failed
    stopping: bool | None = None  # somebody stops it (None: the coordinator does not say)
    #: newest step whose state is kept in the agents' memory, on two nodes where there are two
    snapshot: int | None = None
    #: the last that the script's own code raised, until the job has trained on beyond its step
    exception: ExceptionStatus | None = None
    batch: BatchSummary | None = None  # the newest packed batch (None: samples are padded)
    members: tuple[MemberStatus, ...]  # its workers, by device
    modules: tuple[ModuleStatus, ...] = ()  # of a model of several (empty: it has one, or nothing was measured)
    experts: ExpertsStatus | None = None  # of a model that has some (None: no load was measured)

    @property
    def over(self) -> bool:
        """Nothing follows: the job is done, or was stopped."""
        return self.phase in OVER_PHASES

    @property
    def shown_phase(self) -> str:
        """The phase for people: "failed" where the job has stopped, and its workers were not told to go."""
        is_said = self.stopping is not None  # by a leader that says whether they were
        return "failed" if self.phase == "stopped" and is_said and not self.orderly else self.phase


class Pace(Value, frozen=True, kw_only=True):
    """A device's own computation in the last step."""

    seconds: float  # that it took
    ratio: float  # how many times the others' seconds


class RestartStatus(Value, frozen=True, kw_only=True):
    """A job in restart mode. What is of steps is heard from a script that has `elasticd.watch()`."""

    job: str  # the job's name
    round: int  # number of the rendezvous round (-1: none yet)
    step: int  # newest that was reported
    step_seconds: float  # of that step
    silent_seconds: float  # since it was reported (0: none was)
    devices: dict[str, Pace]  # by device
    out: dict[str, str]  # torchruns that take no part, with the reason
    phase: str = "running"  # gathering, running, finished, failed or stopped
    nodes: tuple[str, ...] = ()  # of its torchruns
    members: tuple[str, ...] = ()  # devices that its torchruns hold
    ran_on: tuple[str, ...] = ()  # devices that they hold, or held as they ended
    workers: int = 0  # of them in all (0: not known)
    restarts: int = 0  # how often its workers were started again
    sentence: str = ""  # all that in words, with why it failed
    #: the last failure of a worker: its traceback, or its last line (empty: none failed)
    failure: str = ""
    stopped_by: str = ""  # the user who stopped it, or the signal that ended it (empty: neither)

    @property
    def stopping(self) -> bool:
        """True if a user stopped it, and some of its torchruns have not ended yet."""
        return bool(self.stopped_by) and not self.over

    @property
    def orderly(self) -> bool:
        """True if its torchruns were told to end, as `JobStatus.orderly`."""
        return bool(self.stopped_by)

    @property
    def reason(self) -> str:
        """The job in words, as `JobStatus.reason`."""
        return self.sentence

    @property
    def over(self) -> bool:
        """True if none of its torchruns has anything left to do."""
        return self.phase not in ("running", "gathering")


class LeaderStatus(Value, frozen=True, kw_only=True):
    """The coordinator that answers."""

    name: str  # of the coordinator
    url: str  # of its port
    epoch: int  # create revision of its key


class LinkStatus(Value, frozen=True, kw_only=True):
    """A link between two nodes, by its last probe."""

    link: str  # both nodes
    bandwidth: float  # bytes a second
    latency: float  # seconds one way
    rate: float  # slowdown, 1.0 normal


class ClusterStatus(Value, frozen=True, kw_only=True):
    """The answer of `GET /v1/status`."""

    cluster: str  # its name
    leader: LeaderStatus  # that answers
    nodes: tuple[NodeStatus, ...]  # by name
    jobs: tuple[JobStatus, ...]  # by name
    restarts: tuple[RestartStatus, ...] = ()  # jobs in restart mode
    links: tuple[LinkStatus, ...] = ()  # between nodes
    paused: bool = False  # no plan is replaced by a better one (`elasticd pause`)
    #: seconds for which something that is shown here has waited to be in etcd, once above 1 (0: all is there)
    unwritten_seconds: float = 0.0

    def job(self, name: str) -> JobStatus | None:
        """The status of one job; None where there is none of this name."""
        return next((job for job in self.jobs if job.job == name), None)


class Settings(Value, frozen=True, kw_only=True):
    """The answer of `GET /v1/config`: detection and policy."""

    values: dict[str, bool | int | float | str]  # in force, by dotted key
    changed: dict[str, bool | int | float | str]  # those changed while running
    history: tuple[ConfigRecord, ...]  # every change


class Events(Value, frozen=True, kw_only=True):
    """Events of the journal."""

    events: tuple[EventRecord, ...]  # oldest first


class Steps(Value, frozen=True, kw_only=True):
    """Steps of a job."""

    steps: tuple[StepRecord, ...]  # oldest first
    pacing: Pacing  # what its emulated devices reported of their pacing in all


class History(Value, frozen=True, kw_only=True):
    """Every plan of a job."""

    history: tuple[AnyHistoryRecord, ...]  # oldest first


class OutputText(Value, frozen=True, kw_only=True):
    """A part of what a worker wrote."""

    device: str  # "node/index"
    job: str  # whose output it is
    begin: int  # [bytes] where the part begins in all that the worker wrote
    end: int  # [bytes] where the part ends: the next request's `after`
    text: str  # with what the worker wrote to move a terminal's cursor


class Stopping(Value, frozen=True, kw_only=True):
    """A job is being stopped."""

    by: str = ""  # who asked for it
    seconds: float = 0.0  # until it ends in any case
    #: nodes whose workers are not told, as their agents cannot, with the release of each agent
    unheard: dict[str, str] = msgspec.field(default_factory=dict)


class Harming(Value, frozen=True, kw_only=True):
    """An order of chaos that reached the agents, or waits for some."""

    action: str  # as it was asked
    device: str = ""  # of what is done to devices
    node: str = ""  # of what is done to nodes
    other: str = ""  # the second node of a cut of the data network
    factor: float = 1.0  # of slow
    seconds: float = 0.0  # of a cut
    one_way: bool = False  # of a cut of the data network
    #: of slow and recover: nodes whose agents have not heard of it, and are told once they are back
    pending: tuple[str, ...] = ()


class CallerStatus(Value, frozen=True, kw_only=True):
    """The sender of the request."""

    name: str  # of the token or certificate (empty: it has none)
    role: str  # what it may do: viewer, operator or agent
    asks: bool  # this coordinator asks for tokens


class Live(Value, frozen=True, kw_only=True):
    """It runs."""

    live: bool = True  # always true


class Ready(Value, frozen=True, kw_only=True):
    """It leads and serves."""

    ready: bool = True  # always true


class Refusal(Value, frozen=True, kw_only=True):
    """A request that was not carried out."""

    error: str  # why, and what would be right


#: Why a request is not carried out; `http` has the status of each.
#: invalid: one of its values cannot be. forbidden: the configuration has it off. unknown: no job, node or
#: device has that name. conflict: not in the state that the job or node is in. unavailable: not now; the same
#: request may be carried out later.
Reason = Literal["invalid", "forbidden", "unknown", "conflict", "unavailable"]


class ApiError(Exception):
    """A request that is not carried out. Its text says what would be right."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def unknown(kind: str, name: str, known: Iterable[str]) -> ApiError:
    """The error for a `name` that no job, node or device (`kind`) has; its text lists the `known` ones."""
    text = f"there is no {kind} {name!r}; there are: {', '.join(sorted(known)) or 'none'}"
    return ApiError("unknown", text)
