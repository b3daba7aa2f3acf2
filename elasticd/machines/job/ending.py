"""How a job ends: its last step was voted, its workers left, or something made it impossible to go on.

An end is decided by what is written: the workers hear of it from their agents, which read it in the store.
"""

from __future__ import annotations

import msgspec
from elasticd_planner.rates import forget

from elasticd.machines.job.effects import CancelPlan
from elasticd.machines.job.state import LIVE, OVER, Phase, Worker
from elasticd.machines.job.turn import Turn
from elasticd.messages import Finished, WorkerLost
from elasticd.records import DoneRecord, Proposal


def finished(turn: Turn, body: Finished) -> None:
    """The last step's vote is complete: the job is over, whatever was being planned or proposed."""
    job = turn.job
    if job.phase in OVER:
        return
    progress = msgspec.structs.replace(job.progress, step=body.step)
    turn.enter(Phase.DONE, proposal=None, asked=None, progress=progress, done_epoch=turn.epoch)
    turn.effects.append(CancelPlan(job=job.job))
    told = turn.told("finished", f"finished at step {body.step}", step=body.step)
    turn.write(DoneRecord(step=body.step, epoch=turn.epoch), notes=(told,))


AGAIN = "start the job again under another --rdzv-id"


def stop(turn: Turn, why: str) -> None:
    """The job cannot go on: it is recorded, with why and what to do."""
    job = turn.job
    if job.phase in OVER:
        return
    reason = f"{why}; {AGAIN}"
    records: list[Proposal | DoneRecord] = [DoneRecord(step=job.progress.step, epoch=turn.epoch, reason=reason)]
    if job.proposal is not None and job.proposal.status == "open":
        records.insert(0, aborted(job.proposal, turn.epoch, why))
    turn.enter(Phase.STOPPED, reason=reason, proposal=None, asked=None, done_epoch=turn.epoch)
    turn.effects.append(CancelPlan(job=job.job))
    told = turn.told("stopped", f"stopped: {reason}", step=job.progress.step)
    turn.write(*records, notes=(told,))


def affirm(turn: Turn) -> None:
    """A worker of a job that is over lives still: its agent may have missed the end, and refuses what a leader
    before this one wrote. So it is written once more, as it is, under this one's epoch."""
    job = turn.job
    if job.phase in OVER and job.done_epoch < turn.epoch:
        turn.set(done_epoch=turn.epoch)
        turn.write(DoneRecord(step=job.progress.step, epoch=turn.epoch, reason=job.reason))


def aborted(proposal: Proposal, epoch: int, why: str) -> Proposal:
    return msgspec.structs.replace(proposal, status="aborted", reason=why, epoch=epoch)


def lost(turn: Turn, gone: WorkerLost) -> None:
    """A worker's process is gone: cleanly, after the end or by its script's choice, or it died."""
    worker = turn.job.workers.get(gone.device)
    known = worker is not None and worker.incarnation == gone.incarnation
    if turn.over or not (known or bound(turn, gone.device, gone.incarnation)):
        return
    if known and worker is not None and worker.left:
        return  # its agent says so again
    who = called(worker) if known and worker is not None else f"worker {gone.device}"
    how = f"{who} {'left' if gone.clean else 'died'}: {gone.how}"
    turn.note("worker_lost", how, device=gone.device, clean=gone.clean)
    needed = turn.job.phase in (Phase.ASSEMBLING, Phase.PLANNING) or bound(turn, gone.device, gone.incarnation)
    if needed and (not gone.clean or worker is None):
        stop(turn, how)
    elif needed and worker is not None:
        turn.worker(worker, left_at=turn.now, farewell=gone.how)
        _left(turn, how)
    else:
        turn.drop(gone.device)
        # A plan that counted on this standby would name a device that is gone; and the rate was that of its
        # worker, the next may be another.
        turn.set(decided=None, rates=forget(turn.job.rates, gone.device))


def called(worker: Worker) -> str:
    """A worker, as messages call it."""
    return f"worker {worker.device}" + (f" (pid {worker.pid})" if worker.pid else "")


def bound(turn: Turn, device: str, incarnation: str) -> bool:
    """Whether a plan, in force or proposed, is bound to that worker, which this leader may not have met."""
    plans = (turn.job.plan, turn.job.proposal.plan if turn.job.proposal is not None else None)
    return any(plan is not None and plan.binding.get(device) == incarnation for plan in plans)


def _left(turn: Turn, how: str) -> None:
    if turn.job.phase in (Phase.ASSEMBLING, Phase.PLANNING):
        stop(turn, f"{how}, before the first step")
    elif all(worker.left for worker in turn.job.workers.values()):
        why = "; ".join(dict.fromkeys(worker.farewell for worker in turn.job.workers.values()))
        stop(turn, f"all workers left before the last step, after step {turn.job.progress.step}: {why}")
    elif turn.job.phase is Phase.PROPOSED and not turn.job.give_up:
        turn.set(give_up=how)


def deserted(turn: Turn) -> None:
    """Members left before the last step while others stay, who can do no step without them: nobody died, so
    that no collective fails, and they would wait until their own patience ends."""
    job = turn.job
    if job.phase not in LIVE or job.settle_until is not None:
        return
    gone = [worker for worker in job.workers.values() if worker.left_at is not None]
    since = min((worker.left_at for worker in gone if worker.left_at is not None), default=turn.now)
    if not gone or turn.now - since < turn.settings.leave_seconds:
        return
    names = ", ".join(called(worker) for worker in gone)
    why = "; ".join(dict.fromkeys(worker.farewell for worker in gone))
    stop(turn, f"{names} left before the last step: {why}")


def orphaned(turn: Turn, node: str) -> None:
    """An agent was started again on `node`. The workers that spoke to the one before train on, if they train,
    but have no line to anybody: no plan can be proposed while they are needed."""
    workers = [worker for worker in turn.job.workers.values() if worker.node == node and not worker.left]
    if turn.job.phase not in LIVE or not workers or all(worker.orphan for worker in workers):
        return
    for worker in workers:
        turn.worker(worker, orphan=True)
    if turn.job.phase in (Phase.ASSEMBLING, Phase.PLANNING):
        stop(turn, f"node {node}'s agent was started again before the first step")
        return
    text = (
        f"node {node}'s agent was started again: its workers go on training but cannot be replanned until "
        "the job is started again"
    )
    turn.note("agent_restarted", text, node=node, devices=[worker.device for worker in workers])
