"""What the coordinator's machine hears (events) and asks of its daemon (effects)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from elasticd_planner.detection.stragglers import DetectSettings
from elasticd_planner.policy.policy import PolicySettings
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.value import Value

from elasticd.records import (
    CheckpointsRecord,
    DoneRecord,
    Fence,
    HistoryRecord,
    JobSpec,
    NodeRecord,
    OutRecord,
    PlanRecord,
    Proposal,
)
from elasticd.wire.agent_orders import Drain, End, Harm, TryReach
from elasticd.wire.main_thread import Halted
from elasticd.wire.messages import Down, Unread, Up, WorkerLost
from elasticd.wire.node_health import OfNode
from elasticd.wire.probes import Frozen, Unreached
from elasticd.wire.snapshots import Keeps, Whole

#: The kinds of a `Note`. docs/reference/events.md is written from these lines.
EventKind = Literal[
    "configured",  # Detection or policy settings were changed while running.
    "node_up",  # A node's agent connected.
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
    "recovered",  # A straggler became faster, or normal again.
    "link",  # A link between nodes became slow, or normal again.
    "shifted",  # The sequence lengths of the data have changed.
    "kept_plan",  # The running plan stays, because a switch would not pay.
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
    "snapshot",  # A snapshot is complete.
    "finished",  # The job has trained all its steps.
    "stopped",  # The job ended without finishing; why.
    "forgotten",  # What the cluster kept of a job that is over was deleted.
]

#: What a leader writes of a job.
Record = JobSpec | PlanRecord | Proposal | Fence | HistoryRecord | CheckpointsRecord | DoneRecord | OutRecord

# -- events --------------------------------------------------------------------------------------------------


class AgentUp(Value, frozen=True, kw_only=True):
    """An agent said hello on a connection of its own; what its workers last said follows. The leader adds
    whether it took the place of another: the workers that spoke to that one are no workers of its own.
    `release` and `version` (of messages) are the agent's."""

    record: NodeRecord
    anew: bool = False
    release: str = ""
    version: int = 1


class AgentDown(Value, frozen=True, kw_only=True):
    """That connection is gone: the node is unreachable, its workers may well train on."""

    node: str


class Received(Value, frozen=True, kw_only=True):
    """A message from a connected agent."""

    node: str
    message: Up | Unread | WorkerLost | Frozen | Unreached | Halted | OfNode | Keeps


class Planned(Value, frozen=True, kw_only=True):
    """The planner's answer to the request with this token; `error` where it failed to give one."""

    job: str
    token: int
    answer: Answer | None = None
    error: str = ""


class Unwritten(Value, frozen=True, kw_only=True):
    """The store does not take a write of this job, and never will: the tags of its records, and why."""

    job: str
    records: tuple[str, ...]
    reason: str


class Paced(Value, frozen=True, kw_only=True):
    """Chaos: this device is to run `factor` times slower than normal."""

    device: str
    factor: float


class Reread(Value, frozen=True, kw_only=True):
    """Chaos: this job is to read its data in sequences of so many tokens (0: as they are)."""

    job: str
    tokens: int


class Harmed(Value, frozen=True, kw_only=True):
    """Chaos: the agent of `node` is to do this."""

    node: str
    harm: Harm


class Configured(Value, frozen=True, kw_only=True):
    """Detection and policy go by these from now on; `changes` says in words what was changed."""

    detect: DetectSettings
    policy: PolicySettings
    changes: str


class Drained(Value, frozen=True, kw_only=True):
    """A user wants this node's devices left, or used again."""

    node: str
    on: bool


class StopAsked(Value, frozen=True, kw_only=True):
    """A user stops this job: its workers have so many seconds (0: none) for a last checkpoint. `by` names the
    user."""

    job: str
    by: str
    seconds: float


class ForgetAsked(Value, frozen=True, kw_only=True):
    """A user wants nothing of this job kept, which is over. `by` names the user."""

    job: str
    by: str


class Tick(Value, frozen=True, kw_only=True):
    """Time has passed."""


Event = (
    AgentUp
    | AgentDown
    | Received
    | Planned
    | Unwritten
    | Paced
    | Harmed
    | Reread
    | Configured
    | Drained
    | StopAsked
    | ForgetAsked
    | Tick
)

# -- effects -------------------------------------------------------------------------------------------------


class Stored(Value, frozen=True, kw_only=True):
    """A job's records as the store holds them: all that a new leader starts from. `highest` is the highest
    number in its history; `history` tells why the proposal, else the plan, was made. over_seconds: since its
    end, as far as its record says when that was."""

    job: str
    spec: JobSpec | None = None
    plan: PlanRecord | None = None
    proposal: Proposal | None = None
    fence: Fence | None = None
    done: DoneRecord | None = None
    history: HistoryRecord | None = None
    checkpoints: CheckpointsRecord | None = None
    highest: int = 0
    over_seconds: float = 0.0


class Note(Value, frozen=True, kw_only=True):
    """Something that people want to know of: one line for them, data for programs."""

    kind: EventKind
    text: str
    job: str = ""
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class Log(Value, frozen=True, kw_only=True):
    """A line for the leader's log, of what people need not know of while all goes well."""

    job: str  # the job's name
    text: str  # the line


class Send(Value, frozen=True, kw_only=True):
    """To the agent of `node`, if it is connected."""

    node: str
    message: Down | Harm | Drain | End | TryReach | Whole


class Write(Value, frozen=True, kw_only=True):
    """One transaction under the leader's key, in the order in which such effects were made; `notes` are told
    when it is done. `close` deletes the proposal: the plan recorded with it took its place. `forget` deletes
    all that leaders wrote of the job, which is over; there are no records then."""

    job: str
    records: tuple[Record, ...]
    close: bool = False
    forget: bool = False
    notes: tuple[Note, ...] = ()


class RequestPlan(Value, frozen=True, kw_only=True):
    """Ask the planner; a request of this job that is still under way is stale and ends."""

    job: str
    token: int
    problem: Problem


class CancelPlan(Value, frozen=True, kw_only=True):
    """Nobody waits for this job's plan any more."""

    job: str


Effect = Note | Log | Send | Write | RequestPlan | CancelPlan
