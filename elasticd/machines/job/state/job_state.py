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
import zlib

import msgspec
from elasticd_planner.cost.model_profile import GUESSED_FLOPS, ModelProfile
from elasticd_planner.detection.data_shift import ShiftState
from elasticd_planner.detection.idle_probes import ProbeState
from elasticd_planner.detection.stragglers import DetectSettings, RateState
from elasticd_planner.policy.policy import Moved, PolicySettings
from elasticd_planner.policy.stability import Stability
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.profiling.fit import STEPS
from elasticd_planner.spec.cluster import Device, Link
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.sequence_lengths import Lengths
from elasticd_planner.spec.step_measurements import COLUMNS, Row, Step, row_of
from elasticd_planner.value import Value, refuse

from elasticd.machines.job.state.data_network import Network
from elasticd.machines.job.state.snapshot_sets import Snapshots
from elasticd.records import Fence, JobSpec, NodeRecord, Proposal, PublishedCheckpoint, Thrown
from elasticd.wire.main_thread import Halted
from elasticd.wire.messages import Raised, Saved, Standing
from elasticd.wire.node_health import Health


class Phase(enum.Enum):
    """Where a job is in its life; the module's docstring says what each means."""

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
OVER = frozenset({Phase.DONE, Phase.STOPPED})

#: From each phase, those that may follow; `documentation` draws the diagram from it.
TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.GATHERING: frozenset({Phase.ASSEMBLING}) | OVER,
    Phase.ASSEMBLING: frozenset({Phase.PLANNING}) | OVER,
    Phase.PLANNING: frozenset({Phase.ASSEMBLING, Phase.PROPOSED}) | OVER,
    Phase.PROPOSED: frozenset({Phase.RUNNING, Phase.ABORTING, Phase.RECOVERING}) | OVER,
    Phase.ABORTING: frozenset({Phase.RUNNING, Phase.RECOVERING}) | OVER,
    Phase.RUNNING: frozenset({Phase.PROPOSED, Phase.RECOVERING}) | OVER,
    Phase.RECOVERING: frozenset({Phase.PLANNING, Phase.PROPOSED}) | OVER,
    Phase.DONE: frozenset(),
    Phase.STOPPED: frozenset(),
}

#: The phases in which a job has workers and is not over: its devices are taken, and who is lost matters to it.
LIVE = frozenset(
    {Phase.ASSEMBLING, Phase.PLANNING, Phase.PROPOSED, Phase.ABORTING, Phase.RUNNING, Phase.RECOVERING}
)

#: The phases in which a plan is asked for; what was asked is dropped when a job leaves them.
ASKING = frozenset({Phase.PLANNING, Phase.RUNNING, Phase.RECOVERING})


class Settings(Value, frozen=True, kw_only=True):
    """Times in seconds, counts in steps. gather: from enough nodes to the start; prepare: for members to
    prepare a proposal; reconnect: for agents to return to a new leader, or after a broken connection;
    retry: from an abort to the next proposal, doubled for each further one that is made from the same and given
    up as well, up to most_retry; leave: for all members to take their leave after the first did, before the
    last step; stand: for members to say what they hold after a fence; bereft: from a member that lost the
    others to the fence, if nobody is known to have died; node: for a node that cannot be reached to be back,
    if the job's steps have stopped too; lone: the same for one that alone holds a part of the state, where
    there is no older state to go back to; hang: beyond twice the slowest step of late without one, until a
    worker that does not answer counts as lost; probe: for a worker that said so to tell how fast its device is,
    before it is given work; fit: measured steps that a profile is fitted from; keep: until a job that is over
    is forgotten, or sooner where more than keep_jobs are over. flops (of a normal device, per second) and the
    links inside a node and between nodes are what plans count with until something was measured."""

    gather_seconds: float = 1.0
    prepare_seconds: float = 30.0
    reconnect_seconds: float = 3.0
    retry_seconds: float = 30.0
    most_retry_seconds: float = 3600.0
    leave_seconds: float = 2.0
    stand_seconds: float = 10.0
    bereft_seconds: float = 0.5
    node_seconds: float = 0.4
    lone_seconds: float = 60.0
    hang_seconds: float = 0.4
    probe_seconds: float = 3.0
    fit_steps: int = STEPS
    keep_seconds: float = 7 * 86_400.0
    keep_jobs: int = 1000
    detect: DetectSettings = msgspec.field(default_factory=DetectSettings)
    policy: PolicySettings = msgspec.field(default_factory=PolicySettings)
    flops: float = GUESSED_FLOPS
    inside: Link = Link()
    between: Link = Link()

    def __post_init__(self) -> None:
        times = (
            *(self.gather_seconds, self.prepare_seconds, self.reconnect_seconds),
            *(self.retry_seconds, self.most_retry_seconds, self.leave_seconds),
            *(self.stand_seconds, self.bereft_seconds, self.node_seconds, self.hang_seconds),
            self.lone_seconds,
            *(self.probe_seconds, self.keep_seconds, self.keep_jobs),
        )
        if min(times) < 0 or self.fit_steps < STEPS:
            refuse(f"coordinator: times must not be negative and fit_steps at least {STEPS}, not {self}")


class NodeState(Value, frozen=True, kw_only=True):
    """A node whose agent has said hello to this leader; `since` its connection came or went. `paces` are the
    factors that chaos set, by device; `health` what its agent last said of machine and devices. `release` and
    `version` (of messages) are its agent's, as its hello said."""

    record: NodeRecord
    connected: bool
    since: float
    paces: dict[str, float] = msgspec.field(default_factory=dict)
    health: Health | None = None
    release: str = ""
    version: int = 1


class Rehearsal(Value, frozen=True, kw_only=True):
    """All-reduces that were asked for before the first plan: the devices whose answers are `awaited` `until`
    then, and the seconds that were `found`, by width, one from each node."""

    until: float
    awaited: frozenset[str] = frozenset()
    found: dict[int, tuple[float, ...]] = msgspec.field(default_factory=dict)


class Joiner(Value, frozen=True, kw_only=True):
    """A torchrun that asked to take part; `answered` once it was told to start its workers, or has them."""

    node: str
    client: str
    pid: int
    min_nodes: int
    max_nodes: int
    answered: bool = False


class Worker(Value, frozen=True, kw_only=True):
    """A worker process that said hello, and the last that it said about a proposal (0: nothing yet). Once it
    took its leave: since when, and why. `orphan`: its node's agent was started again, and it has not come back
    to that one yet. `bereft_at`: since when it stands still, having lost the others; `standing` what it said
    after a fence. `checkpoints` are the names of those that it sees, the newest first. `leaving`:
    it was told to go, and by what; `saves` while it has a last checkpoint to make should all go. `probe_by`:
    until when its device's first probe is waited for (None: no more). `rehearses`, `closes`: see `Hello`.
    `raised`: what the script's own code raised in it, and `judged` once it is clear what follows. `halted`:
    where its main thread stands still, since `halted_at` at least; without, since when it moves again.
    """

    device: str
    incarnation: str
    node: str
    client: str
    pid: int
    prepared: int = 0
    kept: int = 0
    swapped: int = 0
    left_at: float | None = None
    farewell: str = ""
    orphan: bool = False
    bereft_at: float | None = None
    frozen: str = ""
    standing: Standing | None = None
    checkpoints: tuple[str, ...] = ()
    leaving: str = ""
    saves: bool = False
    probe_by: float | None = None
    rehearses: bool = False
    closes: bool = False
    raised: Raised | None = None
    judged: bool = False
    halted: Halted | None = None
    halted_at: float = 0.0

    @property
    def left(self) -> bool:
        return self.left_at is not None


class Basis(Value, frozen=True, kw_only=True):
    """What a plan is made from, beside the job's spec: another basis asks for another decision."""

    devices: tuple[Device, ...]
    rates: dict[str, float]
    profile: ModelProfile
    interleave: int = 1


class Asked(Value, frozen=True, kw_only=True):
    """A plan that is being made."""

    token: int
    basis: Basis
    problem: Problem


class Deferred(Value, frozen=True, kw_only=True):
    """An answer of the planner that is worth a switch once its `basis` has held up to `step`."""

    basis: Basis
    problem: Problem
    answer: Answer
    step: int


class Remedy(Value, frozen=True, kw_only=True):
    """A plan for those that live, made while they say what they hold."""

    basis: Basis
    problem: Problem
    plan: Plan


class Setback(Value, frozen=True, kw_only=True):
    """Plans made from `basis` were given up `times` times in a row: the next may be made at `until`."""

    basis: Basis
    times: int
    until: float


class Progress(Value, frozen=True, kw_only=True):
    """The newest step that rank 0 reported, when, and how long it took: `step` updates were applied; None
    where nothing was yet. `slowest`: seconds of the slowest of late; what is long past counts less."""

    step: int = 0
    at: float = 0.0
    seconds: float = 0.0
    slowest: float = 0.0
    loss: float | None = None
    tokens_per_second: float | None = None


#: Of the reports of a step: of 8,000 devices a hundred are in each.
BUCKETS = 79


class Reported(Value, frozen=True, kw_only=True):
    """What some members reported of a step, by bucket and device. In buckets, since a report makes another of
    these values, and is not to copy what thousands of others said. Each report is packed at once, so that the
    last one finds little left to do. `columns` are those of the rows."""

    buckets: dict[int, dict[str, Row]] = msgspec.field(default_factory=dict)
    columns: tuple[str, ...] = COLUMNS

    def after(self, measurement: Measurement) -> Reported:
        """With one more; a later word of a device takes the place of its earlier one."""
        if self.columns != COLUMNS:  # a recording of another release has these
            return NOTHING.after(measurement)
        bucket = zlib.crc32(measurement.device.encode()) % BUCKETS
        before = self.buckets.get(bucket, {})
        held = {**before, measurement.device: row_of(measurement)}
        return Reported(buckets={**self.buckets, bucket: held})

    @property
    def count(self) -> int:
        """The devices that have reported. Not a field: a recording of another release would bring one that its
        other fields do not bear out here."""
        return sum(map(len, self.buckets.values()))

    def whole(self, plan: int, step: int, devices: tuple[str, ...]) -> Step:
        """The step, once all of these devices have reported it."""
        rows: dict[str, Row] = {}
        for held in self.buckets.values():
            rows |= held
        return Step.gathered(plan, step, devices, [*map(rows.__getitem__, devices)])


NOTHING = Reported()


class JobState(Value, frozen=True, kw_only=True):
    """One job. Its values by what they are for:

    gathering: `joiners` by place (a node or a device), `enough_since` there are enough, `joined` in rank order.
    workers: by device; `world_size` is how many torchrun started, `spec` what all of them train.
    switch: `plan` is in force, `proposal` open or aborting, `highest` the highest number ever used, `give_up`
        why the proposal is to be aborted; `settle_until` a new leader's patience (invariant 4), then None.
    planning: `decided` is what the last decision was made from, None where one is due, but not before
        `not_before`, and from the basis of a `setback` not before its own time; `asked` is under way; `token`
        counts requests; `deferred` waits for more steps; `stability` knows how long conditions last, and
        `moved` what the last switches cost. A new leader learns the latter two anew.
    fault: `fence` is the one that no recorded plan has followed yet, `remedy` the plan that is to; `gone` are
        all that were ever fenced off, by device the last of them: their words count no more. `standstill` is
        the step in which members were last said to hang though nobody is given up (-1: none was).
    measuring: `gathered` of steps that some members have not reported yet; `sampled` for the fit, from the step
        after `first_step` on; `last_steps` whole ones of the plan in force; `probes` of devices without work;
        `rehearsal` of all-reduces before the first plan, `rehearsed` the widths that are known of it alone;
        `taught_by` the plan that the profile was last fitted to. `shifts` watches the data's lengths; the
        profile is for such as `lengths` (None: as the spec says, all alike).
    chaos: the data is to be read in sequences of `sequence` tokens (0: as they are); `reread`: that was
        ordered, and no plan with it was proposed yet.
    end: `done_epoch` is that of the record in the store. `stopping` says who stops the job (empty: nobody),
        which ends by `stop_at`. `thrown` are exceptions of the script's own code, the newest last; `failing`
        says that one of them ends the job (empty: none does), once its state is saved.
    older state: `snapshots` in the agents' memory, checkpoints `published`, the newest last, and `unpublished`
        ones of a plan that is not recorded yet. `republish`: the list, last written at `published_at`, is to be
        written again. When a worker last `arrived`. Until `patient_until` a new
        leader takes nothing for lost that it has not heard of.
    takeover: `unmet` are the members, by device their incarnations, that a leader before this one bound and
        that this one has not heard of yet. They may live, and hold copies.
    network: what is known of who reaches whom, and how often the members could not go on together.
    log: `unexpected` are events that the log has a line of, since their phase had nothing for them.
    """

    job: str
    phase: Phase
    since: float
    reason: str = ""
    joiners: dict[str, Joiner] = msgspec.field(default_factory=dict)
    enough_since: float | None = None
    joined: tuple[str, ...] = ()
    spec: JobSpec | None = None
    world_size: int | None = None
    workers: dict[str, Worker] = msgspec.field(default_factory=dict)
    plan: Plan | None = None
    proposal: Proposal | None = None
    highest: int = 0
    settle_until: float | None = None
    give_up: str = ""
    fence: Fence | None = None
    gone: dict[str, str] = msgspec.field(default_factory=dict)
    remedy: Remedy | None = None
    standstill: int = -1
    profile: ModelProfile | None = None
    rates: RateState = msgspec.field(default_factory=RateState)
    probes: ProbeState = msgspec.field(default_factory=ProbeState)
    decided: Basis | None = None
    not_before: float = 0.0
    setback: Setback | None = None
    asked: Asked | None = None
    deferred: Deferred | None = None
    stability: Stability = msgspec.field(default_factory=Stability)
    moved: tuple[Moved, ...] = ()
    token: int = 0
    gathered: dict[int, Reported] = msgspec.field(default_factory=dict)
    first_step: int | None = None
    rehearsal: Rehearsal | None = None
    rehearsed: frozenset[int] = frozenset()
    taught_by: int = 0
    sequence: int = 0
    reread: bool = False
    last_steps: tuple[Step, ...] = ()
    sampled: tuple[Step, ...] = ()
    shifts: ShiftState = msgspec.field(default_factory=ShiftState)
    lengths: Lengths | None = None
    progress: Progress = Progress()
    done_epoch: int = 0
    stopping: str = ""
    stop_at: float = 0.0
    thrown: tuple[Thrown, ...] = ()
    failing: str = ""
    snapshots: Snapshots = msgspec.field(default_factory=Snapshots)
    published: tuple[PublishedCheckpoint, ...] = ()
    unpublished: tuple[Saved, ...] = ()
    republish: bool = False
    published_at: float = -math.inf
    arrived: float = -math.inf
    patient_until: float = 0.0
    unmet: dict[str, str] = msgspec.field(default_factory=dict)
    network: Network = Network()
    unexpected: frozenset[str] = frozenset()

    @property
    def number(self) -> int:
        """The running plan's number, 0 without one."""
        return self.plan.number if self.plan is not None else 0

    def bound(self, plan: Plan | None) -> tuple[Worker, ...]:
        """The workers that `plan` binds and that are known here, in rank order."""
        binding = plan.binding if plan is not None else {}
        found = ((incarnation, self.workers.get(device)) for device, incarnation in binding.items())
        return tuple(worker for incarnation, worker in found if worker and worker.incarnation == incarnation)

    @property
    def candidates(self) -> tuple[Plan, ...]:
        """The plans that somebody may hold a copy of, newest first: in force, proposed, and what that goes on
        from."""
        proposal = self.proposal
        plans = (proposal.plan, proposal.old, self.plan) if proposal is not None else (self.plan,)
        known = {plan.number: plan for plan in plans if plan is not None}
        return tuple(known[number] for number in sorted(known, reverse=True))

    @property
    def all_reported(self) -> bool:
        """Whether nobody is `unreported`; quick while thousands of workers come back one by one."""
        few = self.plan is not None and len(self.workers) + len(self.gone) < len(self.plan.binding)
        return not few and not self.unreported()

    def unreported(self) -> tuple[str, ...]:
        """Devices of members, of the running or the proposed plan, whose worker has not said hello, or not
        to the agent that its node has now. Who is fenced off is not waited for."""
        plans = (self.plan, self.proposal.plan if self.proposal is not None else None)
        found: dict[str, None] = {}
        for plan in plans:
            for device, incarnation in plan.binding.items() if plan is not None else ():
                worker = self.workers.get(device)
                if worker is not None and worker.incarnation == incarnation and not worker.orphan:
                    continue
                if self.gone.get(device) != incarnation:
                    found[device] = None
        return tuple(found)


def fresh(job: str, phase: Phase, now: float) -> JobState:
    """A job that nobody has heard of before."""
    return JobState(job=job, phase=phase, since=now)
