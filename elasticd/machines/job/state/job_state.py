"""The state of one job as its leader knows it: the table of phases, and the values that a phase goes on.

    gathering ─► assembling ─► planning ─► proposed ─► running ⇄ proposed
                                               └─► aborting ─► running
    proposed, aborting, running ─► recovering ─► proposed
    any of these ─► done | stopped

gathering   torchruns ask to take part, until enough nodes are there.
assembling  their workers say hello, until all that torchrun started are there.
planning    the first plan is being made. (A later one is made while the job runs: `asked`.)
proposed    a proposal is open: members prepare it while they train on under the old plan, if there is one.
aborting    the proposal is marked aborted: waiting until every member of the old plan says that it kept it.
running     a plan is recorded and nothing is proposed.
recovering  a fence is written: its members stand still and say what they hold; a plan is made for those that
            live. It is proposed with its recovery. Where there is none, the job waits for capacity.
done        the last step's vote was reported.
stopped     the job cannot go on, and its workers were told why.

Invariants, which the tests check after every prefix of whole lives:

1. At most one proposal is open; the next opens only after `plan` was recorded, or after every member of the
   old plan reported that it kept it, or after a fence closed it and all that live said what they hold.
2. Numbers only grow: a proposal's or a fence's number is above every number that the store ever held.
3. No two different plans are recorded under one number, and a plan is recorded only after a member reported
   that it swapped to it. Such a report overrides an abort.
4. A leader that took over neither aborts nor proposes before all members have reported to it or
   `reconnect_seconds` have passed.
5. done and stopped are final.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import msgspec
from elasticd_planner.cost.model_profile import GUESSED_FLOPS
from elasticd_planner.detection.stragglers import DetectSettings
from elasticd_planner.layout.channels import MOST
from elasticd_planner.policy.policy import PolicySettings
from elasticd_planner.profiling.fit import STEPS
from elasticd_planner.spec.cluster import Level, Link, node_of
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Value, refuse

from elasticd.machines.job.state.data_network import Network
from elasticd.machines.job.state.parts.device_detection import DeviceDetection
from elasticd.machines.job.state.parts.job_checkpoints import JobCheckpoints
from elasticd.machines.job.state.parts.job_data import JobData
from elasticd.machines.job.state.parts.job_ending import JobEnding
from elasticd.machines.job.state.parts.job_start import JobStart
from elasticd.machines.job.state.parts.job_steps import JobSteps
from elasticd.machines.job.state.parts.lane_shares import LaneShares
from elasticd.machines.job.state.parts.learned_profile import LearnedProfile
from elasticd.machines.job.state.parts.losses import Losses
from elasticd.machines.job.state.parts.plan_requests import PlanRequests
from elasticd.machines.job.state.parts.switching import Switching
from elasticd.machines.job.state.parts.takeover import Takeover
from elasticd.machines.job.state.snapshot_sets import SnapshotSets
from elasticd.records import AnyJobSpec, JobSpec, NodeRecord, Proposal
from elasticd.wire.main_thread import Halted
from elasticd.wire.node_health import Health
from elasticd.wire.worker import Raised, StateReport, WorkerDevice


class JobPhase(enum.Enum):
    """The phase of a job's life; the module's docstring explains each."""

    GATHERING = "gathering"
    ASSEMBLING = "assembling"
    PLANNING = "planning"
    PROPOSED = "proposed"
    ABORTING = "aborting"
    RUNNING = "running"
    RECOVERING = "recovering"
    DONE = "done"
    STOPPED = "stopped"


#: The final phases: nothing follows.
OVER = frozenset({JobPhase.DONE, JobPhase.STOPPED})

#: From each phase, those that may follow; `documentation` draws the diagram from it.
TRANSITIONS: dict[JobPhase, frozenset[JobPhase]] = {
    JobPhase.GATHERING: frozenset({JobPhase.ASSEMBLING}) | OVER,
    JobPhase.ASSEMBLING: frozenset({JobPhase.PLANNING}) | OVER,
    JobPhase.PLANNING: frozenset({JobPhase.ASSEMBLING, JobPhase.PROPOSED}) | OVER,
    JobPhase.PROPOSED: frozenset({JobPhase.RUNNING, JobPhase.ABORTING, JobPhase.RECOVERING}) | OVER,
    JobPhase.ABORTING: frozenset({JobPhase.RUNNING, JobPhase.RECOVERING}) | OVER,
    JobPhase.RUNNING: frozenset({JobPhase.PROPOSED, JobPhase.RECOVERING}) | OVER,
    JobPhase.RECOVERING: frozenset({JobPhase.ASSEMBLING, JobPhase.PLANNING, JobPhase.PROPOSED}) | OVER,
    JobPhase.DONE: frozenset(),
    JobPhase.STOPPED: frozenset(),
}

#: The phases in which a job has workers and is not over: its devices are taken, and who is lost matters to it.
LIVE = frozenset(JobPhase) - OVER - {JobPhase.GATHERING}

#: The phases in which a plan is asked for; what was asked is dropped when a job leaves them.
ASKING = frozenset({JobPhase.PLANNING, JobPhase.RUNNING, JobPhase.RECOVERING})


class JobSettings(Value, frozen=True, kw_only=True):
    """Settings of the jobs' machine.

    Detection, policy, how long jobs wait, how long those that are over are kept, and speeds until they are
    measured come from the leader's configuration. The other times are constants, which tests and the simulator
    change."""

    gather_seconds: float = 1.0  # from enough nodes to the start, for more to come
    #: for torchruns and workers that a job waits for before it begins, since the last one came
    assemble_seconds: float = 900.0
    recover_seconds: float = 7 * 86_400.0  # for a job that recovers, since its last step
    event_seconds: float = 60.0  # from the begin of a wait to the event that names who is missing
    prepare_seconds: float = 30.0  # for members to prepare a proposal
    reconnect_seconds: float = 3.0  # for agents to return to a new leader, or after a broken connection
    #: from an abort to the next proposal; doubled for each further one from the same basis that is given up as
    #: well
    retry_seconds: float = 30.0
    most_retry_seconds: float = 3600.0  # up to this
    leave_seconds: float = 2.0  # for all members to say goodbye after the first did, before the last step
    stand_seconds: float = 10.0  # for members to say what they hold after a fence
    #: from a member that lost the others to the fence, if nobody is known to have died
    peers_lost_seconds: float = msgspec.field(default=0.5, name="bereft_seconds")
    #: for a node that cannot be reached to be back, if the job's steps have stopped too
    node_seconds: float = 0.4
    #: the same for a node that alone holds a part of the state, where there is no older state to go back to
    lone_seconds: float = 60.0
    #: for those who hold the state of a job that is being stopped to be back, or to recover from a loss
    stopping_seconds: float = 20.0
    #: without a step, beyond twice the slowest step of late, until a worker that does not answer counts as lost
    hang_seconds: float = 0.4
    #: for a worker that answers probes to tell how fast its device is, before it is given work
    probe_seconds: float = 3.0
    fit_steps: int = STEPS  # measured steps that a profile is fitted from
    keep_seconds: float = 7 * 86_400.0  # until a job that is over is forgotten
    keep_jobs: int = 1000  # jobs that are over and not forgotten; with more, the oldest are
    node_away_seconds: float = 86_400.0  # until a node that is away, and that no job needs, is forgotten
    keep_nodes: int = 1000  # nodes that are away and not forgotten; with more, the longest away are
    #: detection of stragglers and of changes in the data
    detect: DetectSettings = msgspec.field(default_factory=DetectSettings)
    #: when a better plan is worth a switch
    policy: PolicySettings = msgspec.field(default_factory=PolicySettings)
    flops: float = GUESSED_FLOPS  # of a normal device, per second, until steps were measured
    memory_bandwidth: float = 0.0  # of a normal device [bytes/s]; 0: not known
    inside: Link = Link()  # links inside a node, until they are measured
    between: Link = Link()  # links between nodes, until they are measured
    levels: tuple[Level, ...] = ()  # further levels of links, which join some nodes, the nearest first
    communicator: int = 0  # bytes of a device's memory that a communicator takes

    def __post_init__(self) -> None:
        times = [getattr(self, name) for name in self.__struct_fields__ if name.endswith("_seconds")]
        if min(*times, self.keep_jobs, self.keep_nodes) < 0 or self.fit_steps < STEPS:
            refuse(f"coordinator: times must not be negative and fit_steps at least {STEPS}, not {self}")

    def usable(self, memory: int) -> int:
        """Of a device's bytes those that plans may use; the rest is for its communicators."""
        return max(1, memory - MOST * self.communicator)


class NodeState(Value, frozen=True, kw_only=True):
    """A node whose agent has said hello to this leader."""

    record: NodeRecord  # as the agent wrote it
    connected: bool  # its connection stands
    #: what a user asked of a drain, and the agent has not confirmed (None: nothing)
    drain_asked: bool | None = None
    left: bool = False  # it ended in good order, while workers of its node may have trained on
    since: float  # when the connection came or went
    #: factors of chaos by device, above 1 for slower
    paces: dict[str, float] = msgspec.field(default_factory=dict)
    health: Health | None = None  # what its agent last said of machine and devices
    release: str = ""  # of its agent's elasticd
    version: int = 1  # of the messages that its agent sends


class Worker(Value, frozen=True, kw_only=True):
    """A worker process that said hello, and what it last said."""

    device: str  # "node/local rank"
    incarnation: str  # id of this start of the worker's process
    node: str  # its node
    client: str  # id that its agent gave it
    pid: int  # process id, 0 if not known
    prepared: int = 0  # number of the last proposal that it prepared (0: none)
    kept: int = 0  # number of the last proposal that it stayed on its plan for (0: none)
    swapped: int = 0  # number of the last plan that it switched to (0: none)
    left_at: float | None = None  # when it left before the last step
    farewell: str = ""  # why it left
    orphan: bool = False  # its node's agent was started again, and it has not come back to that one yet
    #: since when it stands still, having lost the others
    peers_lost_at: float | None = msgspec.field(default=None, name="bereft_at")
    frozen: str = ""  # how it was found not to answer its agent (empty: it answers)
    standing: StateReport | None = None  # its answer to the last fence
    checkpoints: tuple[str, ...] = ()  # names of those that it sees, newest first
    #: why it drains: a preemption notice, or its code raised (empty: it does not)
    draining: str = msgspec.field(default="", name="leaving")
    saves: bool = False  # it has a last checkpoint to make should all workers go
    probe_by: float | None = None  # until when its device's first probe is waited for (None: no more)
    rehearses: bool = False  # it answers a `Rehearse`
    closes: bool = False  # it takes part in a last checkpoint that another member asks for
    saves_now: bool = False  # it has a folder for checkpoints, and makes one when the leader asks
    raised: Raised | None = None  # what the script's own code raised in it
    judged: bool = False  # it is clear what follows from `raised`
    halted: Halted | None = None  # where its main thread stands still (None: it moves)
    halted_at: float = 0.0  # since when it stands still at least; else since when it moves again
    computes_on: WorkerDevice | None = None  # as it said (None: it did not)

    @property
    def left(self) -> bool:
        """True if it said goodbye before the last step."""
        return self.left_at is not None


def stranger(device: str, incarnation: str, *, client: str = "") -> Worker:
    """A worker of which this leader knows only the names, by a plan or by a message about it."""
    return Worker(device=device, incarnation=incarnation, node=node_of(device), client=client, pid=0)


def incarnations(workers: Iterable[Worker]) -> dict[str, str]:
    """The incarnation of each, by device: as a fence names those that are lost."""
    return {worker.device: worker.incarnation for worker in workers}


#: Causes of a wait that decisions go by. Sole holders: members that stand still are waited for, as nobody else
#: holds a part of the state.
WaitCause = Literal["", "sole holders"]

#: The fields of `JobState` that are parts: each a value of its own, of one phase or of one concern.
Part = Literal[
    "start",
    "planning",
    "switching",
    "learned",
    "data",
    "lanes",
    "steps",
    "detection",
    "losses",
    "takeover",
    "checkpoints",
    "ending",
]


class JobState(Value, frozen=True, kw_only=True):
    """One job as its leader knows it. Values are frozen: a step makes another one. Times are seconds of the
    leader's clock. Recordings have the fields of its parts beside its own (`elasticd.recording`): no two of
    them have one name."""

    job: str  # the job's name
    phase: JobPhase  # the module's docstring says what each means
    since: float  # when it entered the phase
    reason: str = ""  # why it waits or has ended, for people: no decision reads it
    cause: WaitCause = ""  # of that reason, where a decision goes by it
    spec: AnyJobSpec | None = None  # what all its workers train
    workers: dict[str, Worker] = msgspec.field(default_factory=dict)  # processes that said hello, by device
    plan: JobPlan | None = None  # in force
    proposal: Proposal | None = None  # open or aborting
    highest: int = 0  # the highest number ever used
    snapshots: SnapshotSets = msgspec.field(default_factory=SnapshotSets)  # in the agents' memory
    network: Network = Network()  # which nodes reach each other
    #: events that the log has a line of, since their phase has nothing for them
    unexpected: frozenset[str] = frozenset()
    #: torchruns that take part; waits before the first plan
    start: JobStart = msgspec.field(default_factory=JobStart)
    #: requests to the planner, and its answers that wait
    planning: PlanRequests = msgspec.field(default_factory=PlanRequests)
    #: the end of the open proposal; costs of switches
    switching: Switching = msgspec.field(default_factory=Switching)
    #: the profile of the model, as far as it is known
    learned: LearnedProfile = msgspec.field(default_factory=LearnedProfile)
    data: JobData = msgspec.field(default_factory=JobData)  # lengths and items of the data so far
    lanes: LaneShares = msgspec.field(default_factory=LaneShares)  # shares by which lanes get tokens and items
    steps: JobSteps = msgspec.field(default_factory=JobSteps)  # progress and the newest steps
    detection: DeviceDetection = msgspec.field(default_factory=DeviceDetection)  # measured slowdowns of devices
    losses: Losses = msgspec.field(default_factory=Losses)  # the fence, workers that are fenced off, and hangs
    takeover: Takeover = msgspec.field(default_factory=Takeover)  # waits of a new leader
    #: published, waiting and missed checkpoints
    checkpoints: JobCheckpoints = msgspec.field(default_factory=JobCheckpoints)
    ending: JobEnding = msgspec.field(default_factory=JobEnding)  # requests and exceptions that end the job

    def changed(self, part: Part, **changes: Any) -> JobState:
        """Returns the job with other values of these fields of one part."""
        value = msgspec.structs.replace(getattr(self, part), **changes)
        return msgspec.structs.replace(self, **{part: value})

    @property
    def number(self) -> int:
        """The running plan's number, 0 without one."""
        return self.plan.number if self.plan is not None else 0

    @property
    def pipeline_plan(self) -> Plan | None:
        """The plan in force, if it is one of pipelines."""
        return self.plan if isinstance(self.plan, Plan) else None

    @property
    def pipeline_spec(self) -> JobSpec | None:
        """The spec, if elasticd cuts the model."""
        return self.spec if isinstance(self.spec, JobSpec) else None

    @property
    def predicted_seconds(self) -> float | None:
        """Of a step under the plan in force, by the newest profile; None without a plan."""
        if self.learned.prediction is not None and self.learned.prediction.number == self.number:
            return self.learned.prediction.seconds
        own = self.plan.prediction if self.plan is not None else None
        return own.step_seconds if own is not None else None

    @property
    def prediction_guessed(self) -> bool:
        """True if `predicted_seconds` is by the model's shapes alone: no profile has been fitted."""
        fitted = self.learned.profile is not None and self.learned.profile.fitted
        return self.predicted_seconds is not None and self.pipeline_plan is not None and not fitted

    @property
    def plans(self) -> tuple[JobPlan, ...]:
        """The plan in force and the proposed one, as far as there are any."""
        proposed = self.proposal.plan if self.proposal is not None else None
        return tuple(plan for plan in (self.plan, proposed) if plan is not None)

    @property
    def starting(self) -> bool:
        """True if it waits for its workers or for its first plan: it can spare none."""
        return self.phase in (JobPhase.ASSEMBLING, JobPhase.PLANNING)

    def joins(self, node: str, device: str) -> bool:
        """Returns True if a job that has not begun waits for this worker: the torchrun of its node, or of its
        device, takes part. While torchruns still come, each that has asked counts."""
        places = self.start.joined or self.start.joiners
        return node in places or device in places

    def joined_from(self, node: NodeRecord) -> bool:
        """Returns True if a torchrun of this node has asked to take part."""
        return node.node in self.start.joiners or any(
            device.name in self.start.joiners for device in node.devices
        )

    def involves(self, node: NodeRecord) -> bool:
        """Returns True if this node has a part in the job, or a torchrun of it waits for one."""
        return self.joined_from(node) or self.has_part(node)

    def has_part(self, node: NodeRecord) -> bool:
        """Returns True if a torchrun of this node was let in, or a worker on one of its devices is known, or is
        bound by a plan."""
        if node.node in self.start.joined:
            return True
        held = (self.start.joined, self.workers, *(plan.binding for plan in self.plans))
        return any(device.name in devices for devices in held for device in node.devices)

    def binds(self, device: str, incarnation: str) -> bool:
        """Returns True if a plan, in force or proposed, is bound to that worker, which this leader may not have
        met. Nothing is bound to one that was fenced off."""
        if self.losses.gone.get(device) == incarnation:
            return False
        return any(plan.binding.get(device) == incarnation for plan in self.plans)

    def worker(self, device: str, incarnation: str) -> Worker | None:
        """The worker of this incarnation, if it is known here and no other process has taken its place."""
        worker = self.workers.get(device)
        return worker if worker is not None and worker.incarnation == incarnation else None

    def is_member(self, device: str, incarnation: str) -> bool:
        """Returns True if the plan in force is bound to that worker."""
        return self.plan is not None and self.plan.binding.get(device) == incarnation

    def bound(self, plan: JobPlan | None) -> tuple[Worker, ...]:
        """The workers that `plan` binds and that are known here, in rank order."""
        return self.known(plan.binding if plan is not None else {})

    def known(self, binding: Mapping[str, str]) -> tuple[Worker, ...]:
        """The workers of these incarnations, by device, that are known here, in order."""
        workers = ((incarnation, self.workers.get(device)) for device, incarnation in binding.items())
        return tuple(worker for incarnation, worker in workers if worker and worker.incarnation == incarnation)

    def all_known(self, binding: Mapping[str, str]) -> tuple[Worker, ...]:
        """The same; none where one of them is not known."""
        workers = self.known(binding)
        return workers if len(workers) == len(binding) else ()

    @property
    def candidates(self) -> tuple[JobPlan, ...]:
        """The plans that somebody may hold a copy of, newest first: in force, proposed, and what that goes on
        from."""
        proposal = self.proposal
        plans = (proposal.plan, proposal.old, self.plan) if proposal is not None else (self.plan,)
        known = {plan.number: plan for plan in plans if plan is not None}
        return tuple(known[number] for number in sorted(known, reverse=True))

    @property
    def holders(self) -> tuple[Worker, ...]:
        """The known workers, not gone, that may hold a copy of the state: those that a candidate binds."""
        bound = {worker.device: worker for plan in self.candidates for worker in self.bound(plan)}
        return tuple(worker for worker in bound.values() if not worker.left)

    def unmet_of(self, plan: JobPlan | None) -> dict[str, str]:
        """The incarnations of this plan, by device, that this leader has not met."""
        bound = plan.binding if plan is not None else {}
        return {device: one for device, one in self.takeover.unmet.items() if bound.get(device) == one}

    @property
    def all_reported(self) -> bool:
        """True if nobody is `unreported`; quick while thousands of workers come back one by one."""
        few = self.plan is not None and len(self.workers) + len(self.losses.gone) < len(self.plan.binding)
        return not few and not self.unreported()

    def unreported(self) -> tuple[str, ...]:
        """Devices of members, of the running or the proposed plan, whose worker has not said hello, or not
        to the agent that its node has now. Who is fenced off is not waited for."""
        devices: dict[str, None] = {}
        for plan in self.plans:
            for device, incarnation in plan.binding.items():
                worker = self.workers.get(device)
                if worker is not None and worker.incarnation == incarnation and not worker.orphan:
                    continue
                if self.losses.gone.get(device) != incarnation:
                    devices[device] = None
        return tuple(devices)


def fresh(job: str, phase: JobPhase, now: float) -> JobState:
    """A job that nobody has heard of before."""
    return JobState(job=job, phase=phase, since=now)


#: The class of each part.
PARTS: dict[Part, type[msgspec.Struct]] = {
    part: field.type
    for part in get_args(Part)
    for field in msgspec.structs.fields(JobState)
    if field.name == part
}
