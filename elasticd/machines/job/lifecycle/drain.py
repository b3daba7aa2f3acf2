"""Devices that are to be left: those of nodes that a user drains, and those whose worker drains.

One rule for both: no plan takes them up, and one that uses them is replaced as soon as another can be made.
Where the survivors of a fault are all on drained nodes, they go on there until other devices come.
What is theirs moves off while training goes on, for they are sources of that switch as any member is. A node
that is drained waits for it however long that takes. A worker that drains (SIGTERM, a spot notice) has a
deadline that nobody here knows: it ends by itself once the plan without it is recorded; one that ends earlier
is a loss like any other. If all drain, the members of the plan make a last checkpoint, and the job stops. A
loss before that checkpoint is made costs the others no step: they recover among themselves, and make it then.
"""

from __future__ import annotations

from elasticd_planner.spec.cluster import node_of

from elasticd.machines.job.lifecycle.job_end import stop
from elasticd.machines.job.state.job_state import JobPhase, Worker
from elasticd.machines.job.state.last_checkpoint import after_steps, lost_steps
from elasticd.machines.job.state.transaction import Transaction
from elasticd.wire.worker import DrainNotice


def notice(turn: Transaction, worker: Worker, body: DrainNotice) -> None:
    """A worker drains from now on. A plan that only was to take it up is given up."""
    if worker.left or worker.raised is not None:
        return
    before = worker.draining
    turn.worker(worker, draining=before or body.reason, saves=body.saves)
    if before:
        return
    turn.change("planning", remedy=None, decided=None)
    follows = "the job ends with all its workers" if ending(turn) else "the next plan leaves it"
    text = f"worker {worker.device} drains ({body.reason}): {follows}"
    turn.note("leaving", text, device=worker.device, reason=body.reason)
    job = turn.job
    if (
        job.phase is not JobPhase.PROPOSED
        or job.losses.fence is not None
        or job.plan is None
        or job.proposal is None
    ):
        return
    joins = worker.device in job.proposal.plan.binding and worker.device not in job.plan.binding
    nobody = all(_drains(turn, device) for device in job.proposal.plan.members)
    if joins or nobody:
        which = "which was to join" if joins else "the last that was to stay"
        turn.give_up(f"worker {worker.device}, {which}, drains")


def ending(turn: Transaction) -> bool:
    """Returns whether the job makes a last checkpoint and ends, with nobody to go on: a user stops it, or all
    its workers drain."""
    job = turn.job
    if job.ending.failing:
        return False
    if job.ending.stopping:
        return True
    holders = {worker.device for worker in job.holders}
    there = [each for each in job.workers.values() if each.device in holders or _goes_on(turn, each)]
    return bool(there) and all(worker.draining and worker.raised is None for worker in there)


def all_drain(turn: Transaction) -> None:
    """Every worker drains, as when one torchrun that has them all is ended: nobody is left to go on. Those that
    hold the state make a last checkpoint before; after a loss they first recover without who is lost."""
    job = turn.job
    if any(not worker.draining and not worker.left for worker in job.holders):
        return  # which the first of thousands says
    if job.takeover.unmet or not job.all_reported:
        return  # members that a new leader has not met were told nothing that it knows of
    if not job.workers or any(_goes_on(turn, worker) for worker in job.workers.values()):
        return
    draining = [worker.draining for worker in job.workers.values() if worker.draining]
    if not draining and not job.ending.stopping:
        return  # those that are left cannot be reached: a loss, which a recovery judges
    if not saving(turn):
        reasons = ", ".join(dict.fromkeys(draining))
        why = job.ending.stopping or f"all workers drain ({reasons})"
        requested = bool(job.ending.stopping)
        stop(turn, f"{why}, {after_steps(job)}", orderly=not lost_steps(job), requested=requested)


def _goes_on(turn: Transaction, worker: Worker) -> bool:
    """Returns whether a worker may train on once all others have left: not if the job is being stopped, nor if
    its node cannot be reached."""
    return not (worker.left or worker.draining or turn.job.ending.stopping) and turn.here(worker.node)


def saving(turn: Transaction) -> bool:
    """Returns whether workers that hold the state have a last checkpoint to make. After a loss they recover
    first, if the job is `ending`."""
    job = turn.job
    if job.plan is None or (job.losses.fence is not None and not ending(turn)):
        return False
    if job.losses.fence is not None:
        return any(worker.saves for worker in job.holders)
    return any(job.workers[device].saves for device in job.plan.members if device in job.workers)


def to_leave(turn: Transaction) -> tuple[str, ...]:
    """The devices to be left that the plan in force still uses, in rank order."""
    members = turn.job.plan.members if turn.job.plan is not None else ()
    drained = any(node.record.draining for node in turn.nodes.values())
    if not drained and not any(worker.draining for worker in turn.job.workers.values()):
        return ()
    return tuple(device for device in members if _drained(turn, device) or _drains(turn, device))


def preempted(turn: Transaction) -> bool:
    """Returns True if one of them has a deadline."""
    return any(_drains(turn, device) for device in to_leave(turn))


def only_drained(turn: Transaction) -> tuple[str, ...]:
    """Returns the nodes of the job's workers if a user drains them all: no first plan can be made. Else
    nothing."""
    nodes = {worker.node for worker in turn.job.workers.values()}
    drained = {name for name in nodes if name in turn.nodes and turn.nodes[name].record.draining}
    return tuple(sorted(nodes)) if nodes == drained else ()


def words(turn: Transaction, devices: tuple[str, ...]) -> str:
    """Why they are left."""
    nodes = sorted({node_of(device) for device in devices if _drained(turn, device)})
    workers = [device for device in devices if not _drained(turn, device)]
    parts = [f"node {', '.join(nodes)} is to be left"] if nodes else []
    parts += [f"worker {', '.join(workers)} drains"] if workers else []
    return "; ".join(parts)


def _drained(turn: Transaction, device: str) -> bool:
    node = turn.nodes.get(node_of(device))
    return node is not None and node.record.draining


def _drains(turn: Transaction, device: str) -> bool:
    worker = turn.job.workers.get(device)
    return worker is not None and bool(worker.draining)
