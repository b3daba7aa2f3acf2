"""One job's state machine: what each event does in each phase (`TABLE`), and what becomes due (`DUE`).

A step is a pure function of state, event and time. It looks the event up in `TABLE` under the job's phase, and
then does what the state and the time ask for. An event without an entry in a phase cannot come there if all
programs work as they should: it changes nothing, and the log has a line of it, the first time. The arguments of
a handler go by where its event comes from:

    the leader's daemon   handler(turn, event)
    an agent              handler(turn, node, message)
    an opening            handler(turn, node, up, body)    a torchrun's or a worker's first word, or its last
    a worker              handler(turn, worker, body)

A worker is heard as long as no other process has taken its place. One that ended before this leader met it is
heard as well, if a plan is bound to it: its agent repeats its last words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, get_args

from elasticd_planner.spec.cluster import node_of

from elasticd.machines.job import adoption, assembly, lost_workers, recovery, replan, switch
from elasticd.machines.job.copies import checkpoints, snapshots
from elasticd.machines.job.faults import hangs, network_partition, user_exceptions
from elasticd.machines.job.lifecycle import drain, job_end, phase_time, stop_request
from elasticd.machines.job.lifecycle.fence import FALLIBLE
from elasticd.machines.job.measurements import all_reduce_probes, idle_probes
from elasticd.machines.job.state.events import (
    AgentDown,
    AgentUp,
    CheckpointAsked,
    Configured,
    CoordinatorTick,
    Effect,
    Event,
    Planned,
    Received,
    StopAsked,
    Unwritten,
)
from elasticd.machines.job.state.job_state import (
    ASKING,
    LIVE,
    OVER,
    JobPhase,
    JobSettings,
    JobState,
    NodeState,
    Worker,
    stranger,
)
from elasticd.machines.job.state.transaction import Transaction
from elasticd.wire.coordinator import FromClient, Frozen, Unreached, Unread, WorkerLost
from elasticd.wire.main_thread import Halted
from elasticd.wire.rendezvous import Join, Leave
from elasticd.wire.snapshots import SnapshotInventory
from elasticd.wire.worker import (
    DrainNotice,
    Finished,
    Goodbye,
    Hello,
    InDoubt,
    PeersLost,
    Prepared,
    Probed,
    Raised,
    Refused,
    Rehearsed,
    Report,
    Saved,
    SaveFailed,
    Statement,
    StateReport,
    StayedOnPlan,
    Switched,
)

Handler = Callable[..., None]

#: Workers of a job above which what follows from a message waits for the next tick, a tenth of a second away.
MANY = 64
#: What torchruns and workers say before, or instead of, anything about a plan.
OPENINGS = (Join, Leave, Hello)


# -- handlers that are the machine's own ---------------------------------------------------------------------


def ignored(turn: Transaction, *heard: object) -> None:
    """Nothing follows: a late or repeated word, which is expected in this phase."""


def met(turn: Transaction, worker: Worker, body: object) -> None:
    """Nothing follows but that this leader knows the worker from now on."""


def only_due(turn: Transaction, event: CoordinatorTick | Configured) -> None:
    """Nothing follows but what has become due."""


def agent_up(turn: Transaction, event: AgentUp) -> None:
    """An agent said hello; what its arrival means beyond this, the words of its workers tell."""
    stop_request.remind(turn, event.record.node)
    snapshots_gone(turn, event)
    if event.anew:
        lost_workers.orphaned(turn, event.record.node)


def snapshots_gone(turn: Transaction, event: AgentUp) -> None:
    """Forgets the snapshots in an agent's memory once another agent took its place."""
    if event.anew:
        turn.set(snapshots=turn.job.snapshots.forgotten(event.record.node))


def agent_down(turn: Transaction, event: AgentDown) -> None:
    """Torchruns that wait for others are gone with their agent."""
    assembly.forget(turn, event.node)


def hello(turn: Transaction, node: str, up: FromClient, body: Hello) -> None:
    """A worker is there, and is told if its job is being stopped."""
    if adoption.trains_unknown(turn.job, body):
        adoption.meet(turn, node, up, body)
        return
    assembly.hello(turn, node, up, body)
    stop_request.remind(turn, node)


def finished(turn: Transaction, worker: Worker, body: Finished) -> None:
    """A member says that the last step's vote is complete."""
    if turn.job.binds(worker.device, worker.incarnation):
        job_end.finished(turn, body)


def settle(turn: Transaction) -> None:
    """A new leader's patience ends when all members have reported, or when it has waited long enough; a member
    that is missing then, on a node that did return, died while nobody led."""
    job = turn.job
    if job.takeover.settle_until is None or (turn.now < job.takeover.settle_until and not job.all_reported):
        return
    missing = job.unreported()
    if not missing or job.phase is JobPhase.ASSEMBLING:
        turn.change("takeover", settle_until=None)
        return
    longest = max(turn.here_seconds(node_of(device)) for device in missing)
    if longest >= turn.settings.reconnect_seconds:
        turn.change("takeover", settle_until=None)
        lost_workers.vanished(turn, missing)
    elif longest < 0:  # none of their nodes is back
        turn.change("takeover", settle_until=None)


# -- the table -----------------------------------------------------------------------------------------------

GATHERING, ASSEMBLING, PLANNING = {JobPhase.GATHERING}, {JobPhase.ASSEMBLING}, {JobPhase.PLANNING}
PROPOSED, ABORTING, RUNNING = {JobPhase.PROPOSED}, {JobPhase.ABORTING}, {JobPhase.RUNNING}
RECOVERING = {JobPhase.RECOVERING}
ALL = frozenset(JobPhase)
NOT_OVER = ALL - OVER

#: What is said beside plans and faults.
_ASIDE = (Report, Probed, Rehearsed, Goodbye, Frozen, Halted, Unreached, SnapshotInventory)
#: Each event with phases, and what it does there. No phase of an event is in two of its rows.
ROWS: tuple[tuple[type, Collection[JobPhase], Handler], ...] = (
    # Time, users and the other parts of the leader.
    (CoordinatorTick, ALL, only_due),
    (Configured, ALL, only_due),
    (AgentUp, LIVE, agent_up),
    (AgentUp, GATHERING | OVER, snapshots_gone),
    (AgentDown, GATHERING | ASSEMBLING, agent_down),
    (AgentDown, ALL - GATHERING - ASSEMBLING, ignored),
    (Planned, PLANNING, replan.first_plan),
    (Planned, RUNNING, replan.next_plan),
    (Planned, RECOVERING, replan.recovery_plan),
    (Planned, ALL - GATHERING - ASKING, ignored),
    (Unwritten, NOT_OVER, job_end.unwritten),
    (Unwritten, OVER, job_end.end_unwritten),
    (StopAsked, FALLIBLE, stop_request.asked),
    (StopAsked, NOT_OVER - FALLIBLE, stop_request.at_once),
    (CheckpointAsked, checkpoints.TRAINING, checkpoints.asked),
    (CheckpointAsked, ALL - checkpoints.TRAINING, ignored),
    # Openings of torchruns and workers.
    (Join, GATHERING, assembly.join),
    (Join, ASSEMBLING, assembly.join_assembling),
    (Join, PLANNING | FALLIBLE, assembly.join_late),
    (Join, OVER, assembly.join_after_end),
    (Leave, ALL, assembly.leave),
    (Hello, NOT_OVER, hello),
    (Hello, OVER, assembly.hello_after_end),
    (Unread, ALL, assembly.unread),
    # What agents say of their nodes and workers.
    (WorkerLost, NOT_OVER, lost_workers.lost),
    (WorkerLost, OVER, lost_workers.lost_after_end),
    (Frozen, NOT_OVER, recovery.froze),
    (Halted, NOT_OVER, hangs.stood),
    (SnapshotInventory, NOT_OVER, snapshots.keeps),
    (Unreached, LIVE, network_partition.heard),
    (Unreached, GATHERING, ignored),  # asked before the job was started again
    # What workers say of plans and faults.
    (Report, FALLIBLE, replan.measured),
    (Prepared, PROPOSED | ABORTING | RECOVERING, switch.prepared),
    (Prepared, RUNNING, met),
    (Refused, PROPOSED, switch.refused),
    (Refused, FALLIBLE - PROPOSED, met),
    (Switched, FALLIBLE, switch.swapped),
    (StayedOnPlan, PROPOSED | ABORTING | RECOVERING, switch.kept),
    (StayedOnPlan, RUNNING, met),
    (InDoubt, FALLIBLE, switch.doubt),
    (PeersLost, FALLIBLE, recovery.peers_lost),
    (StateReport, PROPOSED | RECOVERING, recovery.stands),
    (StateReport, ASSEMBLING | PLANNING | ABORTING | RUNNING, met),
    (Saved, FALLIBLE, checkpoints.saved),
    (SaveFailed, FALLIBLE, checkpoints.failed),
    (Raised, LIVE, user_exceptions.raised),
    (Finished, FALLIBLE, finished),
    # What workers say beside.
    (DrainNotice, NOT_OVER, drain.notice),
    (Probed, NOT_OVER, idle_probes.probed),
    (Rehearsed, ASSEMBLING | PLANNING, all_reduce_probes.rehearsed),
    (Rehearsed, GATHERING | FALLIBLE, met),
    (Goodbye, NOT_OVER, met),  # its `WorkerLost` follows, and says that it was clean
    # Words on their way as the job ended, or repeated to a new leader.
    *((kind, OVER, ignored) for kind in (*get_args(Statement), *_ASIDE)),
)
#: What each event does in each phase. An event that is not here is logged.
TABLE: dict[tuple[JobPhase, type], Handler] = {
    (phase, event): handler for event, phases, handler in ROWS for phase in phases
}

#: What becomes due in these phases, in this order: each looks at state and time. `settled`: not before a leader
#: that took over knows which workers there are, or has waited for them long enough (`settle`).
DUE: tuple[tuple[Handler, Collection[JobPhase], bool], ...] = (
    (assembly.complete, GATHERING | ASSEMBLING, False),
    (assembly.assemble, ASSEMBLING, False),
    (assembly.count_again, PLANNING, False),
    (settle, LIVE, False),
    (assembly.answer_late, FALLIBLE | ASSEMBLING, True),
    (lost_workers.deserted, LIVE, True),
    (lost_workers.absent, FALLIBLE, True),
    (lost_workers.strayed, FALLIBLE, True),
    (lost_workers.unheard, FALLIBLE, True),
    (lost_workers.stranded, ASSEMBLING, False),
    (drain.all_drain, FALLIBLE, True),
    (stop_request.due, LIVE, False),
    (user_exceptions.judge, FALLIBLE, True),
    (recovery.suspect, FALLIBLE - RECOVERING, True),
    (network_partition.due, FALLIBLE, True),
    (switch.overdue, PROPOSED, True),
    (switch.unrecovered, PROPOSED, True),
    (switch.abort, PROPOSED, True),
    (switch.all_kept, ABORTING, False),
    (checkpoints.due, LIVE, False),
    (replan.request, ASKING, False),
    (recovery.recover, RECOVERING, True),
    (phase_time.due, GATHERING | ASSEMBLING | PLANNING | ABORTING | RECOVERING, False),
)


# -- steps ---------------------------------------------------------------------------------------------------


def step(
    job: JobState, event: Event, nodes: Mapping[str, NodeState], epoch: int, settings: JobSettings, now: float
) -> tuple[JobState, tuple[Effect, ...]]:
    """The job after `event` at time `now` (seconds), and what its daemon is to do, in order."""
    turn = Transaction(job, nodes, epoch, settings, now)
    _dispatch(turn, event)
    if not _waits(job, turn.job, event):
        _due(turn)
    return turn.job, tuple(turn.effects)


def _dispatch(turn: Transaction, event: Event) -> None:
    """Handles the event as the job's phase asks; where the table has no row, the log has a line of it."""
    message: Any = event.message if isinstance(event, Received) else event
    up = message if isinstance(message, FromClient) else None
    body = up.body if up is not None else message
    kind = type(body)
    handler = TABLE.get((turn.job.phase, kind))
    if handler is ignored and turn.job.takeover.unadopted is None:
        return
    heard: tuple[object, ...] = (message,)
    if isinstance(event, Received):
        heard = (event.node, message)
    if isinstance(event, Received) and up is not None:
        heard = (event.node, up, body)
    if turn.job.takeover.unadopted is not None:
        adoption.hear(turn, kind, heard)
        return
    if up is not None and kind not in OPENINGS:
        worker = _speaker(turn, up)
        if worker is None:
            return
        heard = (worker, body)
    if handler is None:
        turn.unexpected(kind.__name__)
    else:
        handler(turn, *heard)


def _speaker(turn: Transaction, up: FromClient) -> Worker | None:
    """The worker whose word this is, if it is heard."""
    if up.device not in turn.job.workers and turn.job.binds(up.device, up.incarnation):
        return turn.worker(stranger(up.device, up.incarnation, client=up.client))
    return turn.job.worker(up.device, up.incarnation)


def _due(turn: Transaction) -> None:
    if turn.job.takeover.unadopted is not None:
        return
    for act, phases, settled in DUE:
        if turn.job.phase in phases and not (settled and turn.job.takeover.settle_until is not None):
            act(turn)


def _waits(before: JobState, after: JobState, event: Event) -> bool:
    """Returns True if what has become due may wait for the next tick.

    What only completes the picture of a step or of a switch makes nothing due, nor does an agent that comes or
    goes: what time asks for, a tick does. In a job of many workers other messages wait for it as well: after a
    loss each worker says what it holds. So a thousand messages cost a thousand short looks, and not each one at
    all devices.
    """
    if isinstance(event, AgentUp | AgentDown):
        return True
    if not isinstance(event, Received):
        return False
    if _adds(before, event):
        return _alike(before, after) and not replan.ripe(after)
    return len(before.workers) > MANY


def failed(turn: Transaction, event: Event, error: Exception) -> None:
    """A step of the job raised this: a defect of elasticd, whoever brought it about. A message costs itself;
    what no message asked for would come again with each tick, and costs the job."""
    what = f"{type(error).__name__}: {error}"
    trace = "\n".join(_frames(error))
    if isinstance(event, Received):
        text = f"a message of node {event.node} was dropped: elasticd failed on it ({what})"
        turn.note("defect", text, node=event.node, traceback=trace)
    elif not turn.over:
        turn.note("defect", f"elasticd failed on the job ({what})", traceback=trace)
        job_end.stop(turn, f"elasticd failed on the job ({what}); please report it with the leader's log")


def _frames(error: Exception) -> Iterator[str]:
    """The frames of the exception, the innermost call last."""
    at = error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        yield f"{code.co_filename}:{at.tb_lineno} in {code.co_name}"
        at = at.tb_next


def turned_away(turn: Transaction, node: str, device: str, why: str) -> None:
    """A worker of the job was told that it cannot take part: the job ends if it waits for this one."""
    if turn.job.phase is JobPhase.ASSEMBLING and turn.job.joins(node, device):
        job_end.stop(turn, why)


def _adds(job: JobState, event: Received) -> bool:
    """Returns True if it is one of what all members, or their agents, say alike. After a loss snapshots may be
    what was waited for."""
    if isinstance(event.message, SnapshotInventory):
        return job.phase is not JobPhase.RECOVERING
    return isinstance(event.message, FromClient) and isinstance(
        event.message.body, Report | Prepared | Switched
    )


def _alike(before: JobState, after: JobState) -> bool:
    """Returns True if nothing changed that anything could become due from at once. A profile that was fitted is
    asked about with the end of the step: to fit it was enough for one message."""
    same = before.detection.rates is after.detection.rates and before.phase is after.phase
    return same and len(before.workers) == len(after.workers)
