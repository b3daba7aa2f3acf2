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
import math
from collections.abc import Iterable, Mapping

import msgspec
from elasticd_planner.cost.model_profile import GUESSED_FLOPS, ModelProfile
from elasticd_planner.detection.data_shift import ShiftState
from elasticd_planner.detection.idle_probes import ProbeState
from elasticd_planner.detection.item_shift import ItemShiftState
from elasticd_planner.detection.stragglers import DetectSettings, RateState
from elasticd_planner.layout.channels import MOST
from elasticd_planner.policy.policy import Moved, PolicySettings
from elasticd_planner.policy.stability import Stability
from elasticd_planner.problem import JobAnswer, JobProblem, ModuleProblem
from elasticd_planner.profiling.fit import STEPS
from elasticd_planner.readable import counted
from elasticd_planner.spec.batch import BatchSummary
from elasticd_planner.spec.cluster import Device, Level, Link, node_of
from elasticd_planner.spec.expert_load import ExpertLoad
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.sequence_lengths import Lengths
from elasticd_planner.spec.step_measurements import Reported, Step
from elasticd_planner.value import Value, refuse

from elasticd.machines.job.state.data_network import Network
from elasticd.machines.job.state.expert_rows import ExpertRows
from elasticd.machines.job.state.snapshot_sets import SnapshotSets
from elasticd.records import AnyJobSpec, Fence, JobSpec, NodeRecord, Proposal, PublishedCheckpoint, Thrown
from elasticd.wire.main_thread import Halted
from elasticd.wire.node_health import Health
from elasticd.wire.worker import Raised, RunningPlan, Saved, SaveFailed, StateReport, WorkerDevice


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


class Rehearsal(Value, frozen=True, kw_only=True):
    """All-reduces that were asked for before the first plan."""

    until: float  # when the plan is made without the answers that lack
    awaited: frozenset[str] = frozenset()  # devices that have not answered
    #: seconds by width, one from each node
    found: dict[int, tuple[float, ...]] = msgspec.field(default_factory=dict)


class Joiner(Value, frozen=True, kw_only=True):
    """A torchrun that asked to take part."""

    node: str  # its node
    client: str  # id that its agent gave it
    pid: int  # process id
    min_nodes: int  # the least of --nnodes
    max_nodes: int  # the most of --nnodes
    answered: bool = False  # it was told to start its workers, or has them


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


class Basis(Value, frozen=True, kw_only=True):
    """The basis of a plan, beside the job's spec: another basis asks for another decision."""

    devices: tuple[Device, ...]  # that the plan may use
    rates: dict[str, float]  # slowdown of stragglers, by device
    profile: ModelProfile | None  # seconds and bytes of the model (None: of a job on a mesh none is known)
    interleave: int = 1  # chunks of layers that a device may have
    lanes: int = 1  # lanes that a pipeline may have
    packed: PackedSequences | None = None  # the sequences of a step, of a job that packs them
    modules: tuple[ModuleProblem, ...] = ()  # of items, of a job of several modules
    experts: ExpertLoad | None = None  # by which experts are placed


class Asked(Value, frozen=True, kw_only=True):
    """A plan that is being made."""

    token: int  # number of the request, which the answer repeats
    basis: Basis  # what it is made from
    problem: JobProblem  # as the planner has it


class Deferred(Value, frozen=True, kw_only=True):
    """An answer of the planner that is worth a switch once its basis has held for longer."""

    basis: Basis  # what it was made from
    problem: JobProblem  # as the planner had it
    answer: JobAnswer  # the plan
    step: int  # index of the step at which it is weighed again


class Remedy(Value, frozen=True, kw_only=True):
    """A plan for the survivors, made while they say what they hold."""

    basis: Basis  # what it was made from
    problem: JobProblem  # as the planner had it
    plan: JobPlan  # the plan


class Setback(Value, frozen=True, kw_only=True):
    """Plans from one basis that were given up in a row."""

    basis: Basis  # what they were made from
    times: int  # how many
    until: float  # when the next may be made from it


class JobProgress(Value, frozen=True, kw_only=True):
    """The newest step that rank 0 reported."""

    step: int = 0  # updates so far
    at: float = 0.0  # when the last step was reported
    slowest: float = 0.0  # seconds of the slowest of late; what is long past counts less


class StepPrediction(Value, frozen=True, kw_only=True):
    """The seconds of a step under a plan, by a profile that is newer than the plan."""

    number: int  # of the plan
    seconds: float  # of a step, at the slowdowns that the plan was made for


class LeftOut(Value, frozen=True, kw_only=True):
    """Steps in a row whose update was left out, up to the newest one."""

    first: int  # index of the first of them
    count: int  # of them
    why: str  # of the last of them

    @property
    def words(self) -> str:
        """For people."""
        steps = f"{counted(self.count, 'step')} in a row, from step {self.first} on"
        return f"no progress: {steps}, changed no weight; of the last one, {self.why}"


class JobState(Value, frozen=True, kw_only=True):
    """One job as its leader knows it. Values are frozen: a step makes another one. Times are seconds of the
    leader's clock."""

    job: str  # the job's name
    phase: JobPhase  # the module's docstring says what each means
    since: float  # when it entered the phase
    reason: str = ""  # why it waits or has ended, for people
    joiners: dict[str, Joiner] = msgspec.field(default_factory=dict)  # torchruns by place: a node, or a device
    abandoned: bool = False  # its last torchrun left while it was gathering: it is about to be forgotten
    enough_since: float | None = None  # since when enough torchruns are there
    joined: tuple[str, ...] = ()  # places that take part, in rank order
    fresh: bool = False  # it begins anew: checkpoints that it did not make itself are none of its own
    spec: AnyJobSpec | None = None  # what all its workers train
    world_size: int | None = None  # workers that torchrun started
    workers: dict[str, Worker] = msgspec.field(default_factory=dict)  # processes that said hello, by device
    plan: JobPlan | None = None  # in force
    unadopted: RunningPlan | None = None  # the plan that its workers run, and that the store lacks
    proposal: Proposal | None = None  # open or aborting
    highest: int = 0  # the highest number ever used
    earlier: int = 0  # that of its earlier starts under this name, as far as this leader knows of any
    settle_until: float | None = None  # end of a new leader's patience (invariant 4), then None
    give_up: str = ""  # why the proposal is to be aborted (empty: it is not)
    #: a switch that set old copies aside in host memory was given up: the next one does without
    no_aside: bool = False
    fence: Fence | None = None  # the one that no recorded plan has followed yet
    #: incarnations that were ever fenced off, the last of each device: their words count no more
    gone: dict[str, str] = msgspec.field(default_factory=dict)
    #: updates so far when members were last given up since they stood still (-1: none was)
    stuck_step: int = -1
    remedy: Remedy | None = None  # the plan that is to follow the fence
    #: index of the step in which members were last said to hang though none is given up (-1: none was)
    standstill: int = -1
    #: seconds and bytes of the model, as far as they are known; of several modules, of the one with the loss
    profile: ModelProfile | None = None
    modules: tuple[ModuleProblem, ...] = ()  # likewise of the modules of items, and the items of samples
    expert_rows: ExpertRows = ExpertRows()  # measured
    experts: ExpertLoad | None = None  # the load that plans are made for (None: experts go by shares)
    item_shifts: dict[str, ItemShiftState] = msgspec.field(default_factory=dict)  # by module of items
    rates: RateState = msgspec.field(default_factory=RateState)  # measured slowdown of each device
    probes: ProbeState = msgspec.field(default_factory=ProbeState)  # of devices without work
    decided: Basis | None = None  # what the last decision was made from; None: one is due
    not_before: float = 0.0  # when the next plan may be made
    setback: Setback | None = None  # when it may be made from a basis whose plans were given up
    asked: Asked | None = None  # the plan that is being made
    deferred: Deferred | None = None  # an answer that waits for more steps
    #: how long conditions last; a new leader learns it anew
    stability: Stability = msgspec.field(default_factory=Stability)
    moved: tuple[Moved, ...] = ()  # what the last switches cost; a new leader learns it anew
    token: int = 0  # requests to the planner so far
    #: reports by step, of steps that some members have not reported yet
    gathered: dict[int, Reported] = msgspec.field(default_factory=dict)
    first_step: int | None = None  # of the plan in force: steps after it are sampled for the fit
    rehearsal: Rehearsal | None = None  # all-reduces before the first plan
    rehearsed: frozenset[int] = frozenset()  # widths whose all-reduce is known from the rehearsal alone
    taught_by: int = 0  # number of the plan that the profile was last fitted to
    prediction: StepPrediction | None = None  # by the newest profile (None: that of the plan is)
    last_steps: tuple[Step, ...] = ()  # complete ones of the plan in force
    sampled: tuple[Step, ...] = ()  # steps for the fit of the profile
    shifts: ShiftState = msgspec.field(default_factory=ShiftState)  # what is known of the data's lengths
    lengths: Lengths | None = None  # those that the profile is for (None: all as the spec says)
    longest: int = 0  # [tokens] of the longest sequence of any step so far
    likely: int = 0  # [tokens] of the longest that checkpoints know of: it may come again
    #: by which lanes get their shares of tokens [64ths], by device, as far as it is not that of the others
    shares: dict[str, int] = msgspec.field(default_factory=dict)
    #: likewise of items, by module and the first device of a lane
    item_shares: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    shares_plan: int = 0  # number of the plan that those are of
    batch: BatchSummary | None = None  # the newest packed batch
    progress: JobProgress = JobProgress()  # the newest step
    left_out: LeftOut | None = None  # the newest steps, if they change no weight
    done_epoch: int = 0  # epoch of the job's end in the store
    orderly: bool = False  # it ended since its workers were told to go, by a user who stopped it or by signals
    stopping: str = ""  # who stops the job (empty: nobody)
    stop_at: float = 0.0  # when it ends then, at the latest
    stop_asked_at: float = 0.0  # when somebody asked for that
    thrown: tuple[Thrown, ...] = ()  # exceptions of the script's own code, newest last
    failing: str = ""  # which of them ends the job, once its state is saved (empty: none)
    snapshots: SnapshotSets = msgspec.field(default_factory=SnapshotSets)  # in the agents' memory
    published: tuple[PublishedCheckpoint, ...] = ()  # checkpoints, newest last
    checkpoint_at: float | None = (
        None  # when the newest was made (None: before this leader led, or there is none)
    )
    unmade: SaveFailed | None = None  # the checkpoint that was tried last, where it was not made
    #: step of the checkpoint that the state was read from (0: from none; a new leader does not know)
    read_step: int = 0
    unpublished: tuple[Saved, ...] = ()  # checkpoints of a plan that is not recorded yet
    republish: bool = False  # the list of checkpoints is to be written again
    published_at: float = -math.inf  # when that list was last written
    arrived: float = -math.inf  # when a worker last came, or a torchrun that the job waits for
    patient_until: float = 0.0  # until then a new leader takes nothing for lost that it has not heard of
    #: incarnations by device that a leader before this one bound, and that this one has not heard of: they may
    #: live, and hold copies
    unmet: dict[str, str] = msgspec.field(default_factory=dict)
    network: Network = Network()  # which nodes reach each other
    #: events that the log has a line of, since their phase has nothing for them
    unexpected: frozenset[str] = frozenset()

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
        if self.prediction is not None and self.prediction.number == self.number:
            return self.prediction.seconds
        own = self.plan.prediction if self.plan is not None else None
        return own.step_seconds if own is not None else None

    @property
    def prediction_guessed(self) -> bool:
        """True if `predicted_seconds` is by the model's shapes alone: no profile has been fitted."""
        fitted = self.profile is not None and self.profile.fitted
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
        places = self.joined or self.joiners
        return node in places or device in places

    def joined_from(self, node: NodeRecord) -> bool:
        """Returns True if a torchrun of this node has asked to take part."""
        return node.node in self.joiners or any(device.name in self.joiners for device in node.devices)

    def involves(self, node: NodeRecord) -> bool:
        """Returns True if this node has a part in the job, or a torchrun of it waits for one."""
        return self.joined_from(node) or self.has_part(node)

    def has_part(self, node: NodeRecord) -> bool:
        """Returns True if a torchrun of this node was let in, or a worker on one of its devices is known, or is
        bound by a plan."""
        if node.node in self.joined:
            return True
        held = (self.joined, self.workers, *(plan.binding for plan in self.plans))
        return any(device.name in devices for devices in held for device in node.devices)

    def binds(self, device: str, incarnation: str) -> bool:
        """Returns True if a plan, in force or proposed, is bound to that worker, which this leader may not have
        met. Nothing is bound to one that was fenced off."""
        if self.gone.get(device) == incarnation:
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
        return {device: one for device, one in self.unmet.items() if bound.get(device) == one}

    @property
    def all_reported(self) -> bool:
        """True if nobody is `unreported`; quick while thousands of workers come back one by one."""
        few = self.plan is not None and len(self.workers) + len(self.gone) < len(self.plan.binding)
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
                if self.gone.get(device) != incarnation:
                    devices[device] = None
        return tuple(devices)


def fresh(job: str, phase: JobPhase, now: float) -> JobState:
    """A job that nobody has heard of before."""
    return JobState(job=job, phase=phase, since=now)
