"""The events of the coordinator's machine, and the effects that it asks of its daemon."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from elasticd_planner.detection.residual_test import Change
from elasticd_planner.detection.stragglers import DetectSettings
from elasticd_planner.policy.policy import PolicySettings
from elasticd_planner.problem import Answer, JobAnswer, JobProblem, RefusalCause
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.value import Value

from elasticd.records import (
    AnyHistoryRecord,
    AnyJobSpec,
    CheckpointsRecord,
    DoneRecord,
    Fence,
    HistoryRecord,
    JobSpec,
    MeshHistoryRecord,
    MeshJobSpec,
    NodeRecord,
    OutRecord,
    PlanRecord,
    ProfileRecord,
    Proposal,
    RestartEndRecord,
    StopRecord,
)
from elasticd.wire.coordinator import FromMachine, Harm, ToMachine, Unread

#: The kinds of a `CoordinatorNote`. docs/reference/events.md is written from these lines.
EventKind = Literal[
    "asked",  # A user had something changed: who, and what. All of these are the audit.
    "configured",  # Detection or policy settings were changed while running.
    "node_up",  # A node's agent connected.
    "node_left",  # A node's agent ended in good order, or a user had the node forgotten.
    "node_down",  # The connection to a node's agent is gone; its workers may still train.
    "agent_restarted",  # A new agent took the place of one whose workers are lost.
    "worker_lost",  # A worker process ended.
    "job_gathered",  # All nodes and workers for a start of the job are there.
    "planning",  # The planner was asked for a plan.
    "proposed",  # A new plan was proposed to its members.
    "prepared",  # All members have prepared the proposed plan.
    "swapped",  # A worker runs the new plan.
    "recorded",  # The new plan is in force.
    "aborted",  # The proposed plan is given up.
    "fenced",  # Lost workers are fenced off; nothing that they still send counts.
    "waiting",  # The job waits: for devices, for a copy of the state, or for a rank that hangs.
    "joined",  # A node or a worker joined the running job.
    "slow",  # A device became a straggler, or slower still.
    "faster",  # A straggler became faster, and is one still.
    "recovered",  # A straggler is as fast as the others again.
    "corrected",  # More steps say better how slow a straggler is; the device did not change.
    "link",  # A link between nodes became slow, or normal again.
    "shares",  # A lane gets another share of the tokens, since it has become slower or faster. No state moves.
    "shifted",  # The sequence lengths of the data have changed.
    "no_progress",  # Steps in a row change no weight (their loss or gradient is not finite), or do again.
    "kept_plan",  # The running plan stays: a switch would not pay, or the job keeps its plan.
    "put_off",  # After failed switches the next one is put off.
    "refused",  # A plan or a profile was refused; the one in force stays.
    "rehearsed",  # The workers measured all-reduces before the first plan.
    "fitted",  # The model's profile was fitted to measured steps.
    "chaos",  # A fault was injected.
    "drained",  # A drain of a node began or ended.
    "leaving",  # A worker leaves in good order: preemption, drain or stop.
    "stopping",  # A user stopped the job; its workers may make a last checkpoint.
    "excluded",  # A job in restart mode goes on without a slow node.
    "defect",  # An error of elasticd itself; please report it.
    "gained",  # The measured gain of a switch.
    "raised",  # The script's own code raised an exception.
    "halted",  # A worker's main thread hangs; where it is.
    "checkpoint",  # A checkpoint is complete.
    "checkpoint_failed",  # A checkpoint was due, and is not made; why.
    "snapshot",  # A snapshot is complete.
    "finished",  # The job has trained all its steps.
    "stopped",  # The job ended without finishing; why.
    "started_again",  # A job that was over was started again under its name.
    "restart_mode",  # No worker made an elasticd.Job: the job goes on in restart mode.
    "forgotten",  # What the cluster kept of a job that is over was deleted.
]

#: The kinds that say that a device's slowdown is another one.
SLOWDOWN_KINDS: tuple[EventKind, ...] = ("slow", "faster", "recovered", "corrected")


def slowdown_kind(change: Change) -> EventKind:
    """The kind of the event that tells of a change of a device's slowdown."""
    return "slow" if change.kind == "slower" else change.kind


#: What a leader writes of a job.
Record = (
    JobSpec
    | MeshJobSpec
    | PlanRecord
    | Proposal
    | Fence
    | HistoryRecord
    | MeshHistoryRecord
    | ProfileRecord
    | CheckpointsRecord
    | DoneRecord
    | StopRecord
    | OutRecord
    | RestartEndRecord
)

# -- events --------------------------------------------------------------------------------------------------


class AgentUp(Value, frozen=True, kw_only=True):
    """An agent said hello on a connection of its own; what its workers last said follows."""

    record: NodeRecord  # of its node
    #: it took the place of another agent, added by the leader: workers that spoke to that one are none of its
    #: own
    anew: bool = False
    release: str = ""  # of the agent's elasticd
    version: int = 1  # of the messages that it sends
    #: slowdowns above 1 that chaos ordered, by device
    factors: dict[str, float] = msgspec.field(default_factory=dict)


class AgentDown(Value, frozen=True, kw_only=True):
    """An agent's connection is gone: the node is unreachable, its workers may well train on."""

    node: str  # its node
    left: bool = False  # the agent ended in good order


class Received(Value, frozen=True, kw_only=True):
    """A message from a connected agent."""

    node: str  # the agent's node
    message: ToMachine | Unread  # what it said


class Planned(Value, frozen=True, kw_only=True):
    """The planner's answer."""

    job: str  # the job's name
    token: int  # of the request
    answer: JobAnswer | None = None  # the plan, or why there is none
    error: str = ""  # why the planner gave no answer

    @property
    def plan(self) -> JobPlan | None:
        """The plan, if there is one."""
        return self.answer.plan if self.answer is not None else None

    @property
    def refusal(self) -> str:
        """Why there is none."""
        return self.answer.refusal if self.answer is not None else self.error

    @property
    def cause(self) -> RefusalCause:
        """Its cause, where there is advice for it."""
        return self.answer.cause if isinstance(self.answer, Answer) else ""


class Unwritten(Value, frozen=True, kw_only=True):
    """The store does not take a write of this job, and never will."""

    job: str  # the job's name
    records: tuple[str, ...]  # tags of what was to be written
    reason: str  # why it is not taken


class Paced(Value, frozen=True, kw_only=True):
    """Chaos: a device is to run slower."""

    device: str  # "node/local rank"
    factor: float  # times slower than normal


class Harmed(Value, frozen=True, kw_only=True):
    """Chaos: an agent is to inject a fault."""

    node: str  # the agent's node
    harm: Harm  # the fault


class Configured(Value, frozen=True, kw_only=True):
    """Detection and policy have changed."""

    detect: DetectSettings  # in force from now on
    policy: PolicySettings  # in force from now on
    changes: str  # what was changed, in words


class NodeDrained(Value, frozen=True, kw_only=True):
    """A user drains a node, or has it used again."""

    node: str  # the node
    on: bool  # its devices are to be left


class StopAsked(Value, frozen=True, kw_only=True):
    """A user stops this job."""

    job: str  # the job's name
    by: str  # the user
    seconds: float  # that its workers have for a last checkpoint (0: none)


class CheckpointAsked(Value, frozen=True, kw_only=True):
    """A user wants a checkpoint of this job now."""

    job: str  # the job's name


class AdoptAsked(Value, frozen=True, kw_only=True):
    """A user wants the plan that this job's workers run written to the store, which lacks it."""

    job: str  # the job's name
    by: str  # the user


class ForgetAsked(Value, frozen=True, kw_only=True):
    """A user wants nothing kept of this job, which is over."""

    job: str  # the job's name
    by: str  # the user


class ForgetNodeAsked(Value, frozen=True, kw_only=True):
    """A user wants this node shown no more, which is away."""

    node: str  # the node's name
    by: str  # the user


class CoordinatorTick(Value, frozen=True, kw_only=True):
    """Time has passed."""


Event = (
    AgentUp
    | AgentDown
    | Received
    | Planned
    | Unwritten
    | Paced
    | Harmed
    | Configured
    | NodeDrained
    | StopAsked
    | CheckpointAsked
    | AdoptAsked
    | ForgetAsked
    | ForgetNodeAsked
    | CoordinatorTick
)

# -- effects -------------------------------------------------------------------------------------------------


class Stored(Value, frozen=True, kw_only=True):
    """A job's records as the store holds them: all that a new leader starts from."""

    job: str  # the job's name
    spec: AnyJobSpec | None = None  # what it trains
    plan: PlanRecord | None = None  # in force
    proposal: Proposal | None = None  # the last one
    fence: Fence | None = None  # the last one
    done: DoneRecord | None = None  # its end
    history: AnyHistoryRecord | None = None  # why the proposal, else the plan, was made
    checkpoints: CheckpointsRecord | None = None  # published ones
    profile: ProfileRecord | None = None  # of its model, where steps have taught it
    stop: StopRecord | None = None  # a user's wish to stop it
    stop_seconds: float = 0.0  # since that, as far as clocks agree
    highest: int = 0  # highest number in its history
    over_seconds: float = 0.0  # since its end, as far as its record says when that was


class CoordinatorNote(Value, frozen=True, kw_only=True):
    """Something that people want to know of."""

    kind: EventKind  # for programs
    text: str  # one line for people
    job: str = ""  # empty: about no job
    data: dict[str, Any] = msgspec.field(default_factory=dict)  # for programs


class Log(Value, frozen=True, kw_only=True):
    """A line for the leader's log, of what people need not know of while all goes well."""

    job: str  # the job's name
    text: str  # the line


class CoordinatorSend(Value, frozen=True, kw_only=True):
    """A message to an agent, if it is connected."""

    node: str  # the agent's node
    message: FromMachine  # what it is told


class Write(Value, frozen=True, kw_only=True):
    """One transaction under the leader's key, in the order in which such effects were made."""

    job: str  # the job's name
    records: tuple[Record, ...]  # what is written
    close: bool = False  # deletes the proposal: the plan recorded with it took its place
    forget: bool = False  # deletes all that leaders wrote of the job, which is over; there are no records then
    keep_history: bool = False  # what is forgotten does not include the history of plans: the job starts again
    notes: tuple[CoordinatorNote, ...] = ()  # told when it is done


class RequestPlan(Value, frozen=True, kw_only=True):
    """Ask the planner; a request of this job that is still under way is stale and ends."""

    job: str  # the job's name
    token: int  # which the answer repeats
    problem: JobProblem  # what to plan


class CancelPlan(Value, frozen=True, kw_only=True):
    """Nobody waits for this job's plan any more."""

    job: str  # the job's name


Effect = CoordinatorNote | Log | CoordinatorSend | Write | RequestPlan | CancelPlan
