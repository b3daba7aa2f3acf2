"""Workers that died or left before the last step, and those whose agent was started again: they live."""

from __future__ import annotations

from collections.abc import Sequence

from elasticd_planner.detection.stragglers import forget
from elasticd_planner.readable import counted
from elasticd_planner.spec.cluster import node_of

from elasticd.machines.job.copies.rollback import waits
from elasticd.machines.job.lifecycle.fence import FALLIBLE, fault
from elasticd.machines.job.lifecycle.job_end import stop
from elasticd.machines.job.lifecycle.stop_request import ends_unsaved
from elasticd.machines.job.recovery import lost_without
from elasticd.machines.job.state.job_state import JobPhase, JobState, Worker
from elasticd.machines.job.state.transaction import Transaction
from elasticd.wire.coordinator import WorkerLost


def lost(turn: Transaction, node: str, gone: WorkerLost) -> None:
    """A worker's process is gone before the job's end: by its script's choice, or it died."""
    worker = turn.job.workers.get(gone.device)
    known = worker is not None and worker.incarnation == gone.incarnation
    bound = turn.job.binds(gone.device, gone.incarnation)
    if not (known or bound):
        return
    if known and worker is not None and worker.left:
        return  # its agent says so again
    who = called(worker) if known and worker is not None else f"worker {gone.device}"
    how = f"{who} {'left' if gone.clean else 'died'}: {gone.how}"
    turn.note("worker_lost", how, device=gone.device, clean=gone.clean)
    needed = turn.job.starting or bound
    drains = known and worker is not None and bool(worker.draining)
    # Who drains, and cannot wait, is lost; so is what was in a process that another has followed.
    if needed and (not gone.clean or not known or drains):
        _died(turn, gone, how)
    elif needed and worker is not None:
        turn.worker(worker, left_at=turn.now, farewell=gone.how)
        _left(turn, how)
    else:
        turn.drop(gone.device)
        # A plan that counted on this standby would name a device that is gone; and the rate was that of its
        # worker, the next may be another.
        turn.change("detection", rates=forget(turn.job.detection.rates, gone.device))
        if not drains:  # no plan counts on who does
            turn.change("planning", decided=None, remedy=None)


def lost_after_end(turn: Transaction, node: str, gone: WorkerLost) -> None:
    """A worker of a job that is over ended. Once none is left the job may be forgotten."""
    if turn.job.worker(gone.device, gone.incarnation) is not None:
        turn.drop(gone.device)


def _died(turn: Transaction, gone: WorkerLost, how: str) -> None:
    """A process that the job needs. Before the first plan its torchrun may start another; whoever only was to
    join costs the proposal alone."""
    job = turn.job
    turn.change("detection", rates=forget(job.detection.rates, gone.device))
    if job.phase in FALLIBLE:
        joins = job.plan is not None and not job.is_member(gone.device, gone.incarnation)
        if joins and job.phase is JobPhase.PROPOSED and job.losses.fence is None:
            turn.drop(gone.device)
            turn.give_up(how)
            return
        fault(turn, {gone.device: gone.incarnation}, how)
        return
    turn.drop(gone.device)
    if job.phase is JobPhase.PLANNING:
        turn.enter(JobPhase.ASSEMBLING)
        turn.change("planning", asked=None)


def vanished(turn: Transaction, devices: Sequence[str]) -> None:
    """Workers that a plan is bound to, on nodes that returned to a new leader without them. They may not be
    back yet at an agent that was started again: those that alone hold a part of the state are waited for."""
    here = {device: seconds for device in devices if (seconds := turn.here_seconds(node_of(device))) >= 0}
    gone = {
        device: plan.binding[device]
        for device in here
        for plan in reversed(turn.job.candidates)
        if device in plan.binding
    }
    if not gone or turn.job.phase not in FALLIBLE:
        return
    names = ", ".join(sorted(gone))
    if max(here.values()) < turn.lone_seconds and (lost := lost_without(turn, gone)):
        if turn.job.phase is not JobPhase.RECOVERING:  # else `recover` says so
            waits(turn, f"{names} may live, and hold what nobody else does ({lost})")
        return
    fault(turn, gone, f"worker {names} is gone: it ended while no coordinator led")


def absent(turn: Transaction) -> None:
    """Members that this leader has never heard of, on nodes whose agents have been back for long enough to tell
    of all that live there."""
    patience = turn.settings.reconnect_seconds
    if gone := [device for device in turn.job.takeover.unmet if turn.here_seconds(node_of(device)) >= patience]:
        vanished(turn, gone)


def strayed(turn: Transaction) -> None:
    """Workers that stand by on nodes whose agents have been away for too long: no plan can use them, and nobody
    waits for them. One that lives says hello again once its agent is back."""
    job, patience = turn.job, turn.settings.reconnect_seconds
    if all(map(turn.here, {worker.node for worker in job.workers.values()})):
        return
    holders = {worker.device for worker in job.holders}
    gone = [
        worker.device
        for worker in job.workers.values()
        if worker.device not in holders and not worker.left and _away_seconds(turn, worker) >= patience
    ]
    if gone:
        turn.drop(*gone)
        turn.change("planning", decided=None, remedy=None)
        names = ", ".join(sorted(gone))
        turn.note("worker_lost", f"{names}, standing by, cannot be reached: no plan counts on it", devices=gone)


def _away_seconds(turn: Transaction, worker: Worker) -> float:
    """For how long the agent of a worker's node has been away; 0 where it is here."""
    node = turn.nodes.get(worker.node)
    return turn.now - node.since if node is not None and not node.connected else 0.0


def unheard(turn: Transaction) -> None:
    """Members of a job that is being stopped whose agents are away: they cannot be told. The others go on
    without them to the last checkpoint; who alone holds a part of the state is waited for."""
    job, settings = turn.job, turn.settings
    if not job.ending.stopping or job.phase is JobPhase.RECOVERING or job.takeover.unmet:
        return
    asked = turn.now - job.ending.stop_asked_at
    away = {worker.device: min(asked, _away_seconds(turn, worker)) for worker in job.holders}
    if away and min(away.values()) >= turn.lone_seconds:
        names = ", ".join(sorted(away))
        ends_unsaved(turn, f"{names} cannot be reached, and nobody else holds the state")
        return
    late = {
        worker.device: worker.incarnation
        for worker in job.holders
        if not worker.draining and away[worker.device] >= settings.reconnect_seconds
    }
    if not late or not any(turn.here(worker.node) for worker in job.holders):
        return
    names = ", ".join(sorted(late))
    if asked < turn.lone_seconds and (lost := lost_without(turn, late)):
        waits(turn, f"{names} cannot be told to stop, and nobody else holds {lost}")
        return
    fault(turn, late, f"{names} cannot be told that the job is being stopped: its agent cannot be reached")


def called(worker: Worker) -> str:
    """A worker, as messages call it."""
    return f"worker {worker.device}" + (f" (pid {worker.pid})" if worker.pid else "")


def _left(turn: Transaction, how: str) -> None:
    if turn.job.starting:
        stop(turn, f"{how}, before the first step")
    elif not turn.job.takeover.unmet and all(worker.left for worker in _members(turn.job)):
        reasons = dict.fromkeys(worker.farewell for worker in turn.job.workers.values() if worker.farewell)
        why = "; ".join(reasons) or f"after {counted(turn.job.steps.progress.step, 'step')}"
        stop(turn, f"its workers left before the last step: {why}", orderly=True)
    elif turn.job.phase is JobPhase.PROPOSED:
        turn.give_up(how)


def _members(job: JobState) -> list[Worker]:
    """The workers that train; those that stand by can do no step without them."""
    return [worker for worker in job.workers.values() if job.is_member(worker.device, worker.incarnation)]


def deserted(turn: Transaction) -> None:
    """Members left before the last step while others stay, who can do no step without them: nobody died, so
    that no collective fails, and they would wait until their own patience ends."""
    gone = [worker for worker in turn.job.workers.values() if worker.left_at is not None]
    since = min((worker.left_at for worker in gone if worker.left_at is not None), default=turn.now)
    if not gone or turn.now - since < turn.settings.leave_seconds:
        return
    names = ", ".join(called(worker) for worker in gone)
    why = "; ".join(dict.fromkeys(worker.farewell for worker in gone))
    stop(turn, f"{names} left before the last step: {why}")


def orphaned(turn: Transaction, node: str) -> None:
    """An agent was started again on `node`. The workers that spoke to the one before train on, and come back to
    it: no plan can be proposed before they have. Before the first plan they are waited for (`stranded`)."""
    workers = [worker for worker in turn.job.workers.values() if worker.node == node and not worker.left]
    if not workers or all(worker.orphan for worker in workers):
        return
    for worker in workers:
        turn.worker(worker, orphan=True)
    then = "its workers go on training, and nothing is replanned until they have come back to it"
    if turn.job.starting:
        then = "the first plan is made once its workers have come back to it"
    if turn.job.phase is JobPhase.PLANNING:
        turn.enter(JobPhase.ASSEMBLING)
        turn.change("planning", asked=None)
    text = f"node {node}'s agent was started again: {then}"
    turn.note("agent_restarted", text, node=node, devices=[worker.device for worker in workers])


def stranded(turn: Transaction) -> None:
    """Workers that have not come back to the agent that their node has now, before the first plan. No agent saw
    them end, and no collective fails without them: all others would wait for ever."""
    patience = turn.settings.reconnect_seconds
    for worker in turn.job.workers.values():
        if worker.orphan and turn.here_seconds(worker.node) >= patience:
            stop(
                turn,
                f"node {worker.node}'s agent was started again before the first step, and {called(worker)} did "
                "not come back to it",
            )
            return
