"""The dashboard's answers to browsers, as values: the JSON of its `/api`, and of its stream of events.

The contract between the server and the page. Paths, all below the dashboard's own address:

    GET    /api/cluster                 ClusterView       GET  /api/devices/NODE/RANK      DeviceView
    GET    /api/jobs/JOB                JobView           GET  /api/events?...             EventPage
    GET    /api/jobs/JOB/steps?since=   StepColumns       GET  /api/config                 ConfigView
    GET    /api/jobs/JOB/plans          PlanList          GET  /api/act                    ActList
    GET    /api/jobs/JOB/plans/NUMBER   PlanView          POST /api/act/NAME               Acted
    GET    /api/jobs/JOB/switch         SwitchView        GET  /api/viewer                 Viewer
    GET    /api/devices/NODE/RANK/output?after=&job=      OutputView, asked of the leader
    POST   /session   SignIn -> Viewer and a cookie       DELETE /session   -> Viewer, signed out
    GET    /api/live                    server-sent events, below

`/api/events` takes job, kind (several: kind=a,b), node, device, since and until (unix seconds), before (an id:
the page that ends before it) and limit. `/api/jobs/JOB/switch` takes number (default: the newest switch).

What is refused is answered with the JSON of `PageRefusal`: 400 a value cannot be; 401 sign in; 403 the role may
not, or a page of another site asked; 404 there is no such job, node, device, plan or event; 409 not in this
state; 503 nobody leads, or etcd is away.

Server-sent events of `/api/live`, each with an id `EPOCH:SEQUENCE`; `Last-Event-ID` resumes after it where the
dashboard still has what followed, and else begins with a `hello`, as for whoever lags:

    hello      ClusterView      everything anew; pages of jobs and devices ask for theirs again
    devices    LiveDevices      devices and nodes that changed, at most once a second
    step       LiveStep         a step of a job, with its stages where they were measured
    event      EventRow         something happened
    plan       LivePlan         a job's plan, phase or proposal changed
    progress   SwitchView       a switch under way, whole, at most four times a second
    leader     LiveLeader       who leads, whether leader and etcd are reached; also every second as a pulse

Fields with their default value may be left out of cells (`omit_defaults`); all others are always there. Times
are unix seconds, durations seconds, sizes bytes. Texts come from others (job names, reasons, tracebacks): they
are data, never HTML.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from elasticd_planner.value import Value

#: The state of a device in one word; of several that hold the first one. `hung`: its worker's main thread
#: stands still and others wait. `standby`: its job's plan leaves it idle. `state`: it keeps state alone.
#: `unused`: no job has it.
DeviceState = Literal[
    "unreachable", "hung", "drained", "draining", "slow", "standby", "state", "unused", "healthy"
]
DEVICE_STATES: tuple[DeviceState, ...] = (
    "unreachable",
    "hung",
    "drained",
    "draining",
    "slow",
    "standby",
    "state",
    "unused",
    "healthy",
)


class PageRefusal(Value, frozen=True, kw_only=True):
    """Why a request is not carried out."""

    error: str  # one sentence, with what would be right


class SignIn(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /session`."""

    token: str  # of a viewer or an operator of the coordinator


class Viewer(Value, frozen=True, kw_only=True):
    """The person at the browser."""

    signed_in: bool  # the pages may be shown
    asks: bool  # the coordinator asks for tokens: there is something to sign in to, and out of
    name: str = ""  # of the token (empty: it has none)
    role: Literal["viewer", "operator", ""] = ""  # empty: not signed in


# -- what several pages show -------------------------------------------------------------------------------


class LeaderView(Value, frozen=True, kw_only=True):
    """The leader, and whether the dashboard hears it."""

    name: str  # of the coordinator
    url: str  # of its port
    epoch: int  # grows with each leader; 0: none was ever heard
    reachable: bool  # its stream is open
    since: float  # when that began, unix seconds
    trouble: str = ""  # why it is not reached, with what would help


class EtcdView(Value, frozen=True, kw_only=True):
    """etcd as the leader sees it; as the dashboard does while it looks for a leader."""

    reachable: bool  # it answers; decisions wait while it does not
    since: float  # when that began, unix seconds
    unwritten_seconds: float  # for which what is shown has waited to be in etcd (0: all is there)


class EventRow(Value, frozen=True, kw_only=True):
    """Something that happened, as `elasticd logs` has it."""

    id: int  # grows; the event's permalink is /events?id=ID
    time: float  # unix seconds
    kind: str  # one of docs/reference/events.md
    job: str  # empty: about no job
    text: str  # one line for people
    data: dict[str, Any]  # for programs
    node: str = ""  # that it is about (empty: about none)
    device: str = ""  # that it is about (empty: about none)
    by: str = ""  # the user who asked for it (empty: nobody did)


class TimeMark(Value, frozen=True, kw_only=True):
    """A moment on a time axis: a plan, a fault, a snapshot, a checkpoint."""

    time: float  # unix seconds
    step: int | None  # that it belongs to, where known
    kind: Literal["plan", "fault", "slow", "snapshot", "checkpoint", "change"]
    text: str  # for people
    event: int  # id of the event


# -- / (cluster) -------------------------------------------------------------------------------------------


class DeviceCell(Value, frozen=True, kw_only=True, omit_defaults=True):
    """A device of the heat map."""

    name: str  # "node/local rank"
    slowdown: float = 1.0  # measured, 1.0 normal; the one of /metrics and of `elasticd status`
    state: DeviceState = "healthy"
    job: str = ""  # that has it (empty: none)
    #: in its job's plan: module, pipeline, lane, stage, position in the TP group; null: it has none
    place: tuple[int, int, int, int, int] | None = None
    pace: float = 1.0  # slowdown that chaos set, 1.0 none


class NodeRow(Value, frozen=True, kw_only=True):
    """A row of the heat map."""

    node: str  # its name
    connected: bool  # its agent's connection stands
    draining: bool  # its devices are to be left
    members: int  # devices that plans use
    address: str  # host that its workers listen on
    emulated: bool  # its devices run at an emulated speed
    devices: tuple[DeviceCell, ...]  # by local rank


class Abnormal(Value, frozen=True, kw_only=True):
    """A row of the table "not normal": the accessible twin of the heat map."""

    what: Literal["device", "node", "link", "job"]
    name: str  # of it
    state: str  # in a word or two
    slowdown: float | None  # None: it has none
    why: str  # what is known of the cause, in words (empty: nothing)
    since: float | None  # unix seconds, where known
    job: str = ""  # that it matters to


class JobRow(Value, frozen=True, kw_only=True):
    """A row of the table of jobs, and the head of a job's page."""

    job: str  # its name
    phase: str  # of its life, or "restart mode"; failed: it stopped, and nobody told its workers to go
    sentence: str  # the phase in a sentence, with its reason
    step: int | None  # optimizer steps that are done (None: in restart mode without `elasticd.watch()`)
    loss: float | None  # of the newest step, mean per token
    tokens_per_second: float | None  # tokens over wall time, of the newest ten steps
    #: tokens per second of the newest step alone, without what the script does between two steps: this is what
    #: `predicted` and `bound` speak of; all three are those of the chart's last point
    within_steps: float | None
    #: tokens per second of a step alone, by the newest profile (None: no step has been measured to fit one)
    predicted: float | None
    #: tokens per second of a step alone, were its computation divided over all devices by the slowdowns that
    #: were measured, and nothing else took time; never below `within_steps` and `predicted`
    bound: float | None
    plan: int | None  # number of the plan in force
    proposal: int | None  # number of the open one
    devices: int  # that the plan in force uses
    standby: int  # that it leaves idle
    ettr: float | None  # productive part of the wall time, 0 to 1
    goodput: float | None  # the same, where a step counts for what it takes at the healthy speed
    last_event: EventRow | None


class LinkRow(Value, frozen=True, kw_only=True):
    """A link between two nodes that is slow."""

    link: str  # both nodes
    slowdown: float  # 1.0 normal
    bandwidth: float  # bytes a second
    latency: float  # seconds one way


class ClusterView(Value, frozen=True, kw_only=True):
    """`/`: is everything all right, and if not, what is wrong?"""

    cluster: str  # its name
    leader: LeaderView
    etcd: EtcdView
    paused: bool  # replanning is paused
    heard: float  # unix seconds of the newest word from a leader (0: none yet)
    now: float  # unix seconds at the dashboard
    viewer: Viewer
    nodes: tuple[NodeRow, ...]  # by name
    counts: dict[str, int]  # devices by state
    abnormal: tuple[Abnormal, ...]  # the worst first
    jobs: tuple[JobRow, ...]  # those that live first
    links: tuple[LinkRow, ...]  # slow ones


# -- /jobs/JOB ---------------------------------------------------------------------------------------------

#: What a step's seconds went into, in the order of a stacked bar. `tp`: collectives of the TP group.
#: `bubble`: waiting for neighbour stages. `reduction`: of gradients. `input`: waiting for data. `context`:
#: exchange of keys of sequences cut over lanes. `blocks`: forward and backward, where they were not told apart.
#: `other`: the rest of the wall time. Parts without a second are left out.
PARTS = (
    "forward",
    "backward",
    "blocks",
    "recompute",
    "embed and head",
    "tp",
    "context",
    "bubble",
    "reduction",
    "vote",
    "optimizer",
    "input",
    "other",
)


class StageParts(Value, frozen=True, kw_only=True):
    """A stage of a pipeline in the newest step, as its slowest device measured it."""

    module: str
    pipeline: int
    lane: int
    stage: int
    layers: str  # as "0-3"
    devices: tuple[str, ...]  # its TP group
    slowest: str  # the device whose computation took longest
    seconds: dict[str, float]  # by PARTS
    total: float  # of the step, on this device


class LostTime(Value, frozen=True, kw_only=True):
    """Wall time that no step of the surviving history took."""

    cause: str  # start, switch, recovery, repeated steps, waiting, between steps, stalled now
    seconds: float
    times: int  # how often


class MemberRow(Value, frozen=True, kw_only=True):
    """A worker process."""

    device: str  # "node/local rank"
    node: str
    pid: int  # process id
    computes_on: str  # the device as torch names it (empty: not told)
    transport: str  # the library between workers (empty: not told)
    rank: int | None  # in the plan in force (None: it has none)
    role: Literal["computes", "state", "standby"]
    hung: str = ""  # where its main thread stands still (empty: it moves)


class Kept(Value, frozen=True, kw_only=True):
    """A snapshot in memory or a checkpoint on disk."""

    kind: Literal["snapshot", "checkpoint"]
    step: int  # whose state it is
    time: float  # unix seconds
    name: str  # of the checkpoint's folder (empty: a snapshot)


class LaneRow(Value, frozen=True, kw_only=True):
    """A lane of a pipeline: how much slower than the others it is, and its share of the tokens."""

    pipeline: int
    lane: int
    devices: tuple[str, ...]
    slowdown: float  # that workers agreed on, 1.0 normal
    rows: int  # micro-batches of a step


class ExpertBlock(Value, frozen=True, kw_only=True):
    """The experts of a block on a group of devices that compute for each other."""

    block: int  # of the model
    holders: tuple[tuple[int, ...], ...]  # of each expert the places of its devices in the group
    busiest: int  # place of the device that takes longest for these experts
    over: float  # its time over the least possible for the group, 1.0 at the least


class ExpertGroup(Value, frozen=True, kw_only=True):
    """Devices that compute for each other: a TP group, or the lanes of a stage that share experts."""

    pipeline: int
    lane: int | None  # None: all lanes of the stage
    stage: int
    devices: tuple[str, ...]
    blocks: tuple[ExpertBlock, ...]


class ExpertsView(Value, frozen=True, kw_only=True):
    """The load of experts, in the mean of the last reports, and the devices that have them."""

    parts: dict[int, tuple[float, ...]]  # by block: of its rows those that go to each expert
    groups: tuple[ExpertGroup, ...]


class LengthsView(Value, frozen=True, kw_only=True):
    """Sequence lengths of the newest step."""

    mean: float | None  # tokens
    shortest: float | None  # tokens
    longest: float | None  # tokens
    now: tuple[tuple[int, int, int], ...]  # of the newest step: from and to so many tokens, how many sequences


class BatchView(Value, frozen=True, kw_only=True):
    """The batch of a step."""

    samples: int  # global batch
    micro_batch: int  # samples of a micro-batch
    by_pipeline: tuple[int, ...]  # micro-batches of each pipeline
    sequences: int | None = None  # of the packed batch (None: samples are padded)
    tokens: int | None = None
    cut: int | None = None  # sequences on several lanes
    imbalance: float | None = None  # busiest lane over even work, 1.0 even


class ExceptionView(Value, frozen=True, kw_only=True):
    """An exception of the script's own code."""

    device: str
    step: int
    kind: str  # name of its class
    message: str
    traceback: str


class RestartDevice(Value, frozen=True, kw_only=True):
    """A device of a job in restart mode."""

    device: str  # "node/local rank"
    seconds: float | None  # of its own computation in the last step (None: no step was heard)
    ratio: float | None  # how many times the others' seconds


class RestartView(Value, frozen=True, kw_only=True):
    """A job in restart mode."""

    nodes: tuple[str, ...]  # of its torchruns
    workers: int  # processes in all (0: not known)
    restarts: int  # how often they were started again
    round: int | None  # number of the rendezvous round (None: none yet)
    step_seconds: float | None  # of the last step (None: none was heard)
    devices: tuple[RestartDevice, ...]  # that it runs on, or ran on last: the slowest first
    out: dict[str, str]  # torchruns that take no part, with the reason
    failure: str  # the last failure of a worker: its traceback, or its last line (empty: none failed)


class JobView(Value, frozen=True, kw_only=True):
    """`/jobs/JOB`: how fast does it train, how fast could it, and where did the rest go?"""

    head: JobRow
    heard: float  # unix seconds of the newest word about it
    measured_step: int | None  # the step that `stages` are of
    stages: tuple[StageParts, ...]  # at most 128: of more, those that compute longest
    wall_seconds: float  # since its first step
    productive_seconds: float  # of the steps of the surviving history
    healthy_seconds: float | None  # of a step at the healthy speed: the median step of the fastest plan so far
    lost: tuple[LostTime, ...]  # by cause, the most first
    slowness_seconds: float | None  # of the productive seconds, those beyond the healthy speed
    repeated_steps: int  # steps that were done again
    lanes: tuple[LaneRow, ...]  # of pipelines with several (empty: none has)
    experts: ExpertsView | None  # None: the model has none, or none of their load is known
    lengths: LengthsView | None
    batch: BatchView | None
    members: tuple[MemberRow, ...]  # by rank, standby last
    kept: tuple[Kept, ...]  # newest first
    exception: ExceptionView | None
    restart: RestartView | None  # of a job in restart mode, which has nothing but this and `head`


class StepColumns(Value, frozen=True, kw_only=True):
    """`/api/jobs/JOB/steps`: columns of the same length, oldest first. At most 4,000 steps: of more, every
    n-th is there. `since`: steps above this index alone."""

    job: str
    every: int  # 1: every step is there
    step: tuple[int, ...]
    time: tuple[float, ...]  # unix seconds of its end
    plan: tuple[int, ...]
    seconds: tuple[float, ...]  # of the step itself (0: not measured)
    tokens_per_second: tuple[float | None, ...]  # tokens over wall time since the step before it that is here
    within_steps: tuple[float | None, ...]  # tokens over the step's own seconds
    predicted: tuple[float | None, ...]  # tokens per second of a step alone, as predicted at that time
    bound: tuple[float | None, ...]  # tokens per second of a step alone that no plan could exceed then
    loss: tuple[float | None, ...]
    marks: tuple[TimeMark, ...]  # plans, faults, slow devices, snapshots and checkpoints of this time


# -- /jobs/JOB/plans/N -------------------------------------------------------------------------------------


class PlanRow(Value, frozen=True, kw_only=True):
    """A plan in the list of a job's plans."""

    number: int
    time: float | None  # when it was proposed, where known
    reason: str  # why it was proposed
    outcome: Literal["in force", "replaced", "proposed", "aborted", "unknown"]
    predicted_seconds: float | None  # of a step, by the newest profile
    first_predicted_seconds: float | None  # when it was made, where that differs
    guessed: bool  # the prediction is by the model's shapes alone: no step had been measured
    measured_seconds: float | None  # median of its steps themselves (None: fewer than three)
    steps: int  # that were measured under it
    pause_seconds: float | None  # of the switch to it
    bytes_sent: int | None  # in the switch to it


class PlanList(Value, frozen=True, kw_only=True):
    """`/api/jobs/JOB/plans`, newest first."""

    job: str
    plans: tuple[PlanRow, ...]


class StageBox(Value, frozen=True, kw_only=True):
    """A stage in the picture of a plan: a box as wide as its layers."""

    stage: int
    layers: int  # how many blocks
    named: str  # which, as "0-3"
    devices: tuple[str, ...]  # the TP group
    slowdowns: tuple[float, ...]  # that the plan was made for, of each device
    shares: tuple[float, ...]  # part of each layer that each device holds, 0 to 1
    load: float  # its seconds for one micro-batch over those of the busiest stage of the plan
    recompute: bool


class PipelineBox(Value, frozen=True, kw_only=True):
    """A lane of a pipeline in the picture of a plan."""

    module: str
    pipeline: int
    lane: int
    micro_batches: int
    seconds: float | None  # of a step, predicted, before the gradients' reduction
    stages: tuple[StageBox, ...]
    items: str = (
        ""  # what its module takes of samples; micro_batches is the lane's weight then (empty: samples)
    )


class TimelinePass(Value, frozen=True, kw_only=True):
    """One pass of a stage in the predicted 1F1B schedule."""

    kind: Literal["forward", "backward"]
    micro_batch: int
    chunk: int
    start: float  # seconds from the step's begin
    stop: float


class TimelineLane(Value, frozen=True, kw_only=True):
    """The predicted 1F1B schedule of one lane of a pipeline."""

    module: str
    pipeline: int
    lane: int
    alike: int  # lanes with the same schedule; only the first is listed
    seconds: float
    stages: tuple[tuple[TimelinePass, ...], ...]
    shortened: bool  # micro-batches beyond the first 32 are left out


class Moving(Value, frozen=True, kw_only=True):
    """A device in the difference of two plans."""

    device: str
    before: str  # what it held, in words
    after: str  # what it holds, in words
    bytes_lacking: int  # of state that it has to be sent


class PlanDiff(Value, frozen=True, kw_only=True):
    """The difference to the plan before."""

    before: int  # number of that plan
    devices: tuple[Moving, ...]  # whose part changes
    bytes_lacking: int  # of all devices: no algorithm sends fewer
    bytes_state: int  # of all that devices hold under this plan
    bytes_sent: int | None  # in the switch, checksums included (None: not known)
    ratio: float | None  # sent over lacking


class Policy(Value, frozen=True, kw_only=True):
    """The policy's inequality: a plan is worth its switch if saving > price."""

    current_seconds: float | None  # of a step under the plan before, at the slowdowns of then
    new_seconds: float | None  # of a step under this plan
    price_seconds: float | None  # of the switch
    steps: int | None  # that the saving is counted for
    saving_seconds: float | None
    text: str  # the reason as decided


class Communication(Value, frozen=True, kw_only=True):
    """Operations of one purpose in a step, by `elasticd plan --explain`'s rules."""

    purpose: str
    operation: str
    groups: int  # sets of devices that do the same
    devices: tuple[str, ...]  # of the first set
    times: int  # in a step, for one set
    bytes: dict[str, int]  # over links in a step, by level of links, of all sets
    seconds: float | None  # of one set


class PlanView(Value, frozen=True, kw_only=True):
    """`/jobs/JOB/plans/NUMBER`: what is this plan, why was it chosen, and what did it bring?"""

    row: PlanRow
    newest: int  # number of the newest plan
    numbers: tuple[int, ...]  # of all plans that are kept, ascending
    pipelines: tuple[PipelineBox, ...]
    idle: tuple[str, ...]
    carriers: tuple[str, ...]  # devices that keep state alone
    timeline: tuple[TimelineLane, ...]
    timeline_seconds: float | None  # of the slowest lane
    why: str  # the lines of `elasticd why NUMBER`
    policy: Policy | None
    diff: PlanDiff | None  # None: it is the first, or the one before is not kept
    communications: tuple[Communication, ...]
    communications_missing: str  # why there are none (empty: there are)


# -- /jobs/JOB/switch --------------------------------------------------------------------------------------


class RankProgress(Value, frozen=True, kw_only=True):
    """A rank in a switch. Seconds count from the proposal; null: not yet, or not heard."""

    device: str
    rank: int  # in the new plan; -1: it leaves
    prepared: float | None  # it was ready: groups, memory and schedule
    moved: float | None  # it runs the new plan: state moved and verified
    pause: float | None  # for which its step loop stood still
    bytes_sent: int | None
    bytes_lacking: int | None
    kept: bool = False  # it stayed on the old plan


class Transfer(Value, frozen=True, kw_only=True):
    """Bytes that went from node to node in a switch."""

    source: str
    target: str
    bytes: int


class SwitchView(Value, frozen=True, kw_only=True):
    """`/jobs/JOB/switch`: how far is the switch, and whom does it wait for?"""

    job: str
    number: int  # of the plan (0: there was no switch yet)
    phase: Literal["none", "preparing", "voting", "moving", "done", "aborted"]
    sentence: str  # the phase in a sentence
    proposed: float | None  # unix seconds
    recorded: float | None  # unix seconds
    step: int | None  # updates before the first step under the plan
    pause: float | None  # the longest of all ranks
    recovery: bool  # it follows a fault: there is no vote
    ranks: tuple[RankProgress, ...]  # in rank order
    links: tuple[Transfer, ...]  # the most bytes first
    events: tuple[EventRow, ...]  # of this switch, oldest first


# -- /devices/NODE/RANK ------------------------------------------------------------------------------------


class JobMoment(Value, frozen=True, kw_only=True):
    """A moment in a job."""

    job: str
    step: int | None  # index (None: before the job's first step)
    time: float  # unix seconds


class SlowTime(Value, frozen=True, kw_only=True):
    """An episode: a time in which the device was slow in one run of a job."""

    start: JobMoment
    stop: JobMoment | None  # it was normal again (None: it was not, as long as the job lasted)
    now: bool  # it is slow still
    slowdown: float


class SlowdownColumns(Value, frozen=True, kw_only=True):
    """A device's slowdown over time, columns of the same length, oldest first. Each value holds until the next
    one; where all of a time are null nothing was measured until the next."""

    time: tuple[float, ...]
    step: tuple[int, ...]
    measured: tuple[float | None, ...]  # of a step, against the fleet
    decided: tuple[float | None, ...]  # that plans are made with
    cusum: tuple[float | None, ...]  # evidence of a change, in the units of `Thresholds.cusum`


class Thresholds(Value, frozen=True, kw_only=True):
    """By which detection judges, as configured now."""

    slow: float  # a device whose slowdown reaches this is a straggler
    recovered: float  # below this it is normal again
    min_steps: int
    false_alarms: float
    cusum: float | None  # evidence at which a change is decided


class HealthColumns(Value, frozen=True, kw_only=True):
    """The readings of the node's agent about the device: columns of the same length, oldest first; null at a
    time after which nothing was seen until the next. Columns that the system does not offer are left out."""

    time: tuple[float, ...]
    values: dict[str, tuple[float | None, ...]]
    units: dict[str, str]  # of each column


class Hang(Value, frozen=True, kw_only=True):
    """A worker's main thread that stands still, or stood still last."""

    now: bool  # it still does
    time: float  # when it was told, unix seconds
    step: int  # index (-1: between two steps)
    place: str  # where
    stack: str  # of its threads, as py-spy or faulthandler prints it


class DeviceView(Value, frozen=True, kw_only=True):
    """`/devices/NODE/RANK`: is this device the culprit, and why?"""

    cell: DeviceCell
    node: str
    memory: int  # bytes
    connected: bool
    draining: bool
    use: str  # what the plan in force does with it, in words
    kind: str  # of slowness so far: transient, periodic, irregular, persistent (empty: never slow)
    kind_reason: str
    causes: tuple[str, ...]  # what may make it slow now, in words
    thresholds: Thresholds | None
    slowdown: SlowdownColumns
    episodes: tuple[SlowTime, ...]
    parts: dict[str, float]  # of the newest step, by PARTS (empty: not measured)
    health: HealthColumns
    throttled: tuple[str, ...]  # why its clocks are held down, now
    xids: tuple[int, ...]
    plans: tuple[tuple[int, float, str], ...]  # number, slowdown that the plan was made with, use in words
    hang: Hang | None
    events: tuple[EventRow, ...]  # newest first, at most 50


# -- /events -----------------------------------------------------------------------------------------------


class EventGroup(Value, frozen=True, kw_only=True):
    """Events that belong together: from a cause to the plan that answers it."""

    title: str  # as "plan 7: alpha/1 slow"
    job: str
    plan: int | None
    start: float
    stop: float
    durations: dict[str, float]  # seconds from the event before, by kind
    events: tuple[EventRow, ...]  # oldest first


class EventPage(Value, frozen=True, kw_only=True):
    """`/events`: what happened, in which order? Newest first."""

    events: tuple[EventRow, ...]
    groups: tuple[EventGroup, ...]  # of these events, newest first; each event is in one at most
    before: int | None  # ask with it for the next page (None: there is none)
    kinds: tuple[str, ...]  # that there are, for the filter
    jobs: tuple[str, ...]
    nodes: tuple[str, ...]
    oldest: float | None  # unix seconds of the oldest event that is kept


# -- /act --------------------------------------------------------------------------------------------------


class ConfigValue(Value, frozen=True, kw_only=True):
    """A key of detection or policy."""

    key: str  # as policy.horizon_steps
    value: bool | int | float | str  # in force
    changed: bool  # while running: it differs from the file


class ConfigChange(Value, frozen=True, kw_only=True):
    """A change while running."""

    number: int
    time: float  # unix seconds
    by: str
    set: dict[str, bool | int | float | str]  # keys that it gave a value
    unset: tuple[str, ...]  # keys that are the file's again


class ConfigView(Value, frozen=True, kw_only=True):
    """`/api/config`."""

    values: tuple[ConfigValue, ...]
    history: tuple[ConfigChange, ...]  # newest first


class Act(Value, frozen=True, kw_only=True):
    """Something that can be asked of the leader."""

    name: str  # the path: POST /api/act/NAME
    words: str  # what it does, in a sentence
    #: the equal command line, with the fields in capitals, as "elasticd drain NODE"; where a field is empty,
    #: the brackets around it and what is in them are left out
    command: str
    fields: tuple[str, ...]  # of the body, as ("node",)
    allowed: bool
    why_not: str  # empty where it is allowed
    #: typed by the user before it is done: the value of this field (empty: no confirmation)
    confirm: str = ""
    choices: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)  # by field, where they are known


class ActList(Value, frozen=True, kw_only=True):
    """`/api/act`: what can be done, and how from a shell?"""

    viewer: Viewer
    acts: tuple[Act, ...]


class OutputView(Value, frozen=True, kw_only=True):
    """A part of what a device's worker wrote."""

    device: str
    job: str  # whose output it is
    begin: int  # [bytes] where the part begins in all that the worker wrote
    end: int  # [bytes] where the part ends: the next request's `after`
    text: str  # with what the worker wrote to move a terminal's cursor


class Acted(Value, frozen=True, kw_only=True):
    """The answer to `POST /api/act/NAME`."""

    name: str
    command: str  # the equal command line, filled in
    answer: Any  # the leader's own, as JSON


# -- /api/live ---------------------------------------------------------------------------------------------


class LiveDevices(Value, frozen=True, kw_only=True):
    """Devices and nodes that changed since the last such event."""

    devices: tuple[DeviceCell, ...]  # whole cells
    nodes: tuple[NodeRow, ...]  # whole rows: new nodes, and those that came, went or drain
    gone: tuple[str, ...]  # nodes that are no more
    counts: dict[str, int]  # of all devices, by state
    abnormal: tuple[Abnormal, ...] | None  # the whole table, where it changed
    heard: float


class LiveStep(Value, frozen=True, kw_only=True):
    """The newest step of a job; of several within a second the last."""

    job: str
    step: int
    time: float
    plan: int
    seconds: float  # of the step itself (0: not measured)
    tokens_per_second: float | None  # tokens over wall time since the step that was told before it
    within_steps: float | None  # tokens over the step's own seconds
    predicted: float | None
    bound: float | None
    loss: float | None
    head: JobRow  # the job's row, as of this step
    measured_step: int | None  # the step that `stages` are of
    stages: tuple[StageParts, ...]  # empty: as in the last one


class LivePlan(Value, frozen=True, kw_only=True):
    """A job's row changed otherwise than by a step. With another plan or place of devices, `devices` events
    follow."""

    row: JobRow
    over: bool  # the job is done, stopped or forgotten
    gone: bool = False  # it is forgotten: it has no row any more


class LiveLeader(Value, frozen=True, kw_only=True):
    """The leader, the reachability of all, and the slow links."""

    leader: LeaderView
    etcd: EtcdView
    paused: bool
    links: tuple[LinkRow, ...]  # the slow ones
    heard: float  # unix seconds of the newest word from a leader
    now: float
