"""One job's step: an event, then whatever has become due; a pure function of state, event and time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elasticd_planner.spec.cluster import node_of

from elasticd.machines.job import assembly, chaos, losses, recovery, replan, switch
from elasticd.machines.job.copies import checkpoints, snapshots
from elasticd.machines.job.faults import hangs, network_partition, user_exceptions
from elasticd.machines.job.lifecycle import drain, job_end, stop_request
from elasticd.machines.job.measurements import all_reduce_probes, idle_probes
from elasticd.machines.job.state.events import (
    AgentDown,
    AgentUp,
    Effect,
    Event,
    Planned,
    Received,
    Reread,
    StopAsked,
    Unwritten,
)
from elasticd.machines.job.state.job_state import LIVE, OVER, JobState, NodeState, Phase, Settings, Worker
from elasticd.machines.job.state.participants import joins
from elasticd.machines.job.state.transaction import Turn
from elasticd.wire.main_thread import Halted
from elasticd.wire.messages import (
    Bereft,
    Doubt,
    Finished,
    Hello,
    Join,
    Kept,
    Leave,
    Leaving,
    Prepared,
    Raised,
    Refused,
    Report,
    Saved,
    Standing,
    Swapped,
    Unread,
    Up,
    WorkerLost,
)
from elasticd.wire.node_health import OfNode
from elasticd.wire.probes import Frozen, Probed, Rehearsed, Unreached
from elasticd.wire.snapshots import Keeps

#: Workers of a job above which what follows from a message waits for the next tick, a tenth of a second away.
MANY = 64


def step(
    job: JobState, event: Event, nodes: Mapping[str, NodeState], epoch: int, settings: Settings, now: float
) -> tuple[JobState, tuple[Effect, ...]]:
    """The job after `event` at time `now` (seconds), and what its daemon is to do, in order.

    What only completes the picture of a step or of a switch makes nothing due, nor does an agent that comes or
    goes: what time asks for, a tick does. In a job of many workers other messages wait for it as well: after a
    loss each worker says what it holds. So a thousand messages cost a thousand short looks, and not each one at
    all devices.
    """
    turn = Turn(job, nodes, epoch, settings, now)
    if isinstance(event, Received):
        if not isinstance(event.message, OfNode):  # which is about no job
            _message(turn, event.node, event.message)
        if _adds(job, event):
            waits = _alike(job, turn.job) and not replan.ripe(turn.job)
        else:
            waits = len(job.workers) > MANY
        if waits:
            return turn.job, tuple(turn.effects)
    elif isinstance(event, Planned):
        replan.answered(turn, event)
    elif isinstance(event, Unwritten):
        job_end.unwritten(turn, event)
    elif isinstance(event, Reread):
        chaos.ordered(turn, event)
    elif isinstance(event, StopAsked):
        stop_request.asked(turn, event)
    elif isinstance(event, AgentDown):
        assembly.forget(turn, event.node)
        return turn.job, tuple(turn.effects)
    elif isinstance(event, AgentUp):
        stop_request.remind(turn, event.record.node)
        if event.anew:
            turn.set(snapshots=turn.job.snapshots.forgotten(event.record.node))
            losses.orphaned(turn, event.record.node)
        # What else an agent's arrival means for a job, its workers' messages tell.
        return turn.job, tuple(turn.effects)
    _due(turn)
    return turn.job, tuple(turn.effects)


def failed(
    job: JobState,
    event: Event,
    error: Exception,
    nodes: Mapping[str, NodeState],
    epoch: int,
    settings: Settings,
    now: float,
) -> tuple[JobState, tuple[Effect, ...]]:
    """A step of the job raised this: a defect of elasticd, whoever brought it about. A message costs itself;
    what no message asked for would come again with each tick, and costs the job."""
    turn = Turn(job, nodes, epoch, settings, now)
    what = f"{type(error).__name__}: {error}"
    trace = "\n".join(_frames(error))
    if isinstance(event, Received):
        text = f"a message of node {event.node} was dropped: elasticd failed on it ({what})"
        turn.effects.append(turn.told("defect", text, node=event.node, traceback=trace))
    elif job.phase not in OVER:
        turn.effects.append(turn.told("defect", f"elasticd failed on the job ({what})", traceback=trace))
        job_end.stop(turn, f"elasticd failed on the job ({what}); please report it with the leader's log")
    return turn.job, tuple(turn.effects)


def _frames(error: Exception) -> Iterator[str]:
    """Where it was raised, the innermost call last."""
    at = error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        yield f"{code.co_filename}:{at.tb_lineno} in {code.co_name}"
        at = at.tb_next


def turned_away(
    job: JobState,
    event: Received,
    why: str,
    nodes: Mapping[str, NodeState],
    epoch: int,
    settings: Settings,
    now: float,
) -> tuple[JobState, tuple[Effect, ...]]:
    """A worker of the job was told that it cannot take part: the job ends if it waits for this one."""
    turn = Turn(job, nodes, epoch, settings, now)
    said = event.message
    if job.phase is Phase.ASSEMBLING and isinstance(said, Up) and joins(job, event.node, said.device):
        job_end.stop(turn, why)
    return turn.job, tuple(turn.effects)


def _adds(job: JobState, event: Received) -> bool:
    """Whether it is one of what all members, or their agents, say alike. After a loss snapshots may be what was
    waited for."""
    if isinstance(event.message, Keeps):
        return job.phase is not Phase.RECOVERING
    return isinstance(event.message, Up) and isinstance(event.message.body, Report | Prepared | Swapped)


def _alike(before: JobState, after: JobState) -> bool:
    """Whether nothing changed that anything could become due from at once. A profile that was fitted is asked
    about with the end of the step: to fit it was enough for one message."""
    same = before.rates is after.rates and before.phase is after.phase
    return same and len(before.workers) == len(after.workers)


def _message(
    turn: Turn, node: str, message: Up | Unread | WorkerLost | Frozen | Unreached | Halted | Keeps
) -> None:
    if isinstance(message, Keeps):
        snapshots.keeps(turn, node, message)
        return
    if isinstance(message, WorkerLost):
        losses.lost(turn, message)
        return
    if isinstance(message, Frozen):
        recovery.froze(turn, message)
        return
    if isinstance(message, Unreached):
        network_partition.heard(turn, node, message)
        return
    if isinstance(message, Halted):
        hangs.stood(turn, message)
        return
    if isinstance(message, Unread):
        assembly.unread(turn, node, message)
        return
    body = message.body
    if isinstance(body, Join):
        assembly.join(turn, node, message, body)
    elif isinstance(body, Leave):
        assembly.leave(turn, node, message)
    elif isinstance(body, Hello):
        assembly.hello(turn, node, message, body)
        stop_request.remind(turn, node)
    else:
        _report(turn, message)


def _report(turn: Turn, up: Up) -> None:
    """What a worker says of itself. A process that another took the place of has no say; one that ended
    before this leader met it does, if a plan is bound to it: its agent repeats its last words."""
    worker = turn.job.workers.get(up.device)
    if turn.over:
        return
    if worker is None and losses.bound(turn, up.device, up.incarnation):
        node = node_of(up.device)
        worker = turn.worker(
            Worker(device=up.device, incarnation=up.incarnation, node=node, client=up.client, pid=0)
        )
    if worker is None or worker.incarnation != up.incarnation:
        return
    body = up.body
    if isinstance(body, Report):
        replan.measured(turn, body)
    elif isinstance(body, Prepared):
        switch.prepared(turn, worker, body)
    elif isinstance(body, Refused):
        switch.refused(turn, worker, body)
    elif isinstance(body, Swapped):
        switch.swapped(turn, worker, body)
    elif isinstance(body, Kept):
        switch.kept(turn, worker, body)
    elif isinstance(body, Doubt):
        switch.doubt(turn, worker, body)
    elif isinstance(body, Bereft):
        recovery.bereft(turn, worker, body)
    elif isinstance(body, Standing):
        recovery.stands(turn, worker, body)
    elif isinstance(body, Saved):
        checkpoints.saved(turn, body)
    elif isinstance(body, Finished):
        if losses.bound(turn, up.device, up.incarnation):
            job_end.finished(turn, body)
    elif isinstance(body, Raised):
        user_exceptions.raised(turn, worker, body)
    elif isinstance(body, Leaving):
        drain.told(turn, worker, body)
    elif isinstance(body, Probed):
        idle_probes.probed(turn, worker, body)
    elif isinstance(body, Rehearsed):
        all_reduce_probes.rehearsed(turn, worker, body)
    # A Goodbye needs no answer: its WorkerLost follows and says that it was clean.


def _due(turn: Turn) -> None:
    """What the state and the time ask for, whatever the event was; each looks at its own phase."""
    assembly.complete(turn)
    assembly.assemble(turn)
    _settle(turn)
    assembly.answer_late(turn)
    losses.deserted(turn)
    losses.absent(turn)
    losses.stranded(turn)
    drain.all_told(turn)
    stop_request.due(turn)
    user_exceptions.judge(turn)
    recovery.suspect(turn)
    network_partition.due(turn)
    switch.overdue(turn)
    switch.unrecovered(turn)
    switch.abort(turn)
    switch.all_kept(turn)
    chaos.due(turn)
    checkpoints.due(turn)
    if not turn.job.stopping and not turn.job.failing:
        replan.request(turn)
    recovery.recover(turn)


def _settle(turn: Turn) -> None:
    """A new leader's patience ends when all members have reported, or when it has waited long enough; who
    is missing then, on a node that did return, died while nobody led."""
    job = turn.job
    if job.settle_until is None or job.phase not in LIVE:
        return
    if turn.now < job.settle_until and not job.all_reported:
        return
    missing = job.unreported()
    if not missing or job.phase is Phase.ASSEMBLING:
        turn.set(settle_until=None)
        return
    returned = [turn.nodes.get(node_of(device)) for device in missing]
    patience = turn.settings.reconnect_seconds
    for node in returned:
        if node is not None and node.connected and turn.now - node.since >= patience:
            turn.set(settle_until=None)
            losses.vanished(turn, missing)
            return
    if not any(node is not None and node.connected for node in returned):
        turn.set(settle_until=None)
