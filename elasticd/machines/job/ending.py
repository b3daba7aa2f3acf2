"""How a job ends: its last step was voted, its workers left, or something made it impossible to go on."""

from __future__ import annotations

import msgspec

from elasticd.machines.job.effects import CancelPlan
from elasticd.machines.job.state import OVER, Phase, Worker
from elasticd.machines.job.turn import Turn
from elasticd.messages import Closed, Finished, Shutdown, WorkerLost
from elasticd.records import DoneRecord, Proposal


def finished(turn: Turn, body: Finished) -> None:
    """The last step's vote is complete: the job is over, whatever was being planned or proposed."""
    job = turn.job
    if job.phase in OVER:
        return
    turn.enter(
        Phase.DONE, proposal=None, asked=None, progress=msgspec.structs.replace(job.progress, step=body.step)
    )
    turn.effects.append(CancelPlan(job=job.job))
    told = turn.told("finished", f"finished at step {body.step}", step=body.step)
    turn.write(DoneRecord(step=body.step, epoch=turn.epoch), notes=(told,))
    members = job.plan.binding if job.plan is not None else {}
    for worker in job.workers.values():
        if worker.device not in members:  # a standby has no vote: it learns of the end from here
            turn.send(worker.node, worker.client, Closed(reason=f"the job finished at step {body.step}"))


AGAIN = "start the job again under another --rdzv-id"


def stop(turn: Turn, why: str) -> None:
    """The job cannot go on: it is recorded, and every worker is told why and what to do."""
    job = turn.job
    if job.phase in OVER:
        return
    reason = f"{why}; {AGAIN}"
    records: list[Proposal | DoneRecord] = [
        DoneRecord(step=job.progress.step, epoch=turn.epoch, reason=reason)
    ]
    if job.proposal is not None and job.proposal.status == "open":
        records.insert(0, aborted(job.proposal, turn.epoch, why))
    turn.enter(Phase.STOPPED, reason=reason, proposal=None, asked=None)
    turn.effects.append(CancelPlan(job=job.job))
    told = turn.told("stopped", f"stopped: {reason}", step=job.progress.step)
    turn.write(*records, notes=(told,))
    for worker in job.workers.values():
        turn.send(worker.node, worker.client, Shutdown(reason=reason))


def aborted(proposal: Proposal, epoch: int, why: str) -> Proposal:
    return msgspec.structs.replace(proposal, status="aborted", reason=why, epoch=epoch)


def lost(turn: Turn, gone: WorkerLost) -> None:
    """A worker's process is gone: cleanly, after the end or by its script's choice, or it died."""
    worker = turn.job.workers.get(gone.device)
    known = worker is not None and worker.incarnation == gone.incarnation
    if turn.over or not (known or bound(turn, gone.device, gone.incarnation)):
        return
    who = called(worker) if known and worker is not None else f"worker {gone.device}"
    how = f"{who} {'left' if gone.clean else 'died'}: {gone.how}"
    turn.note("worker_lost", how, device=gone.device, clean=gone.clean)
    needed = turn.job.phase in (Phase.ASSEMBLING, Phase.PLANNING) or bound(
        turn, gone.device, gone.incarnation
    )
    if needed and (not gone.clean or worker is None):
        stop(turn, how)
    elif needed and worker is not None:
        turn.worker(worker, left=True)
        _left(turn, how)
    else:
        turn.drop(gone.device)
        turn.set(decided=None)  # a plan that counted on this standby would name a device that is gone


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
        stop(turn, f"all workers left before the last step, after step {turn.job.progress.step}")
    elif turn.job.phase is Phase.PROPOSED and not turn.job.give_up:
        turn.set(give_up=how)
