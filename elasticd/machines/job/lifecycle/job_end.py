"""The end of a job: its last step was voted, its workers left, or something made it impossible to go on.

An end is decided by what is written: the workers hear of it from their agents, which read it in the store.
"""

from __future__ import annotations

import msgspec
from elasticd_planner.readable import counted

from elasticd.codec.decoding import tag_of
from elasticd.codec.safe_text import shortened
from elasticd.machines.job.state.events import CancelPlan, Unwritten
from elasticd.machines.job.state.job_state import OVER, JobPhase
from elasticd.machines.job.state.last_checkpoint import after_steps
from elasticd.machines.job.state.transaction import Transaction
from elasticd.records import DoneRecord, Proposal
from elasticd.wire.worker import Closed, Finished, Rejected


def finished(turn: Transaction, body: Finished) -> None:
    """The last step's vote is complete: the job is over, whatever was being planned. Without its last
    checkpoint it has stopped: its command makes the steps after the newest one again."""
    job = turn.job
    progress = msgspec.structs.replace(job.steps.progress, step=body.step)
    if not body.saved:
        turn.change("steps", progress=progress)
        stop(turn, f"made all its steps, and not its last checkpoint, {after_steps(turn.job)}")
        return
    turn.enter(JobPhase.DONE, reason="", proposal=None)
    turn.change("planning", asked=None)
    turn.change("steps", progress=progress)
    turn.change("ending", done_epoch=turn.epoch)
    turn.effects.append(CancelPlan(job=job.job))
    _answer_waiting(
        turn, Closed(reason=f"job {job.job} is over: it finished after {counted(body.step, 'step')}; {ANEW}")
    )
    note = turn.told("finished", f"finished after {counted(body.step, 'step')}", step=body.step)
    turn.write(DoneRecord(step=body.step, epoch=turn.epoch), notes=(note,))


#: Characters of why a job ended, a proposal was given up or a fence made: many members' reasons may be in it.
MOST_REASON = 2000

#: What a user does about a job that stopped, and about one that finished.
AGAIN = "the same command starts it again"
ANEW = "with --fresh 'elasticd run' trains it from the beginning"


def stop(turn: Transaction, why: str, *, orderly: bool = False, requested: bool = False) -> None:
    """The job cannot go on: it is recorded, with why and what to do. orderly: its workers were told to go, by a
    user or by signals, so that nothing has failed. requested: somebody asked for it."""
    job = turn.job
    if job.phase in OVER:
        return
    reason = f"{shortened(why, MOST_REASON)}; {AGAIN}"
    done = DoneRecord(
        step=job.steps.progress.step, epoch=turn.epoch, reason=reason, orderly=orderly, requested=requested
    )
    records: list[Proposal | DoneRecord] = [done]
    if job.proposal is not None and job.proposal.status == "open":
        records.insert(0, aborted(job.proposal, turn.epoch, why))
    turn.enter(JobPhase.STOPPED, reason=reason, proposal=None)
    turn.change("ending", orderly=orderly, requested=requested, done_epoch=turn.epoch)
    turn.change("planning", asked=None)
    turn.effects.append(CancelPlan(job=job.job))
    answer = Closed if orderly else Rejected
    _answer_waiting(turn, answer(reason=f"job {job.job} is over: {reason}"))
    step = job.steps.progress.step
    note = turn.told("stopped", f"stopped: {reason}", orderly=orderly, requested=requested, step=step)
    turn.write(*records, notes=(note,))


def unwritten(turn: Transaction, event: Unwritten) -> None:
    """The store does not take a record of the job, for its size. The members would never read what they are to
    go by, so the job ends, with the reason; the leader and other jobs go on."""
    turn.set(proposal=None)  # the store may lack it, and may not take it as aborted either
    stop(turn, f"the store does not take its {' and '.join(event.records)}: {event.reason}")


def end_unwritten(turn: Transaction, event: Unwritten) -> None:
    """The store did not take the end of the job with what was written beside it: the end itself is small."""
    if len(event.records) > 1 and tag_of(DoneRecord) in event.records:
        turn.write(_done_again(turn))


def _answer_waiting(turn: Transaction, body: Rejected | Closed) -> None:
    """To the torchruns that wait for their workers' start: nobody else would tell them that there is none. One
    that has workers is not waiting, but was heard of again."""
    started = {place for worker in turn.job.workers.values() for place in (worker.node, worker.device)}
    for place, joiner in turn.job.start.joiners.items():
        if not joiner.answered and place not in started:
            turn.send(joiner.node, joiner.client, body)


def affirm(turn: Transaction) -> None:
    """A worker of a job that is over lives still: its agent may have missed the end, and refuses what a leader
    before this one wrote. So it is written once more, as it is, under this one's epoch."""
    job = turn.job
    if job.ending.done_epoch < turn.epoch:
        turn.change("ending", done_epoch=turn.epoch)
        turn.write(_done_again(turn))


def _done_again(turn: Transaction) -> DoneRecord:
    job = turn.job
    return DoneRecord(
        step=job.steps.progress.step,
        epoch=turn.epoch,
        reason=job.reason,
        orderly=job.ending.orderly,
        requested=job.ending.requested,
    )


def aborted(proposal: Proposal, epoch: int, why: str) -> Proposal:
    """The proposal given up, as it is written."""
    reason = shortened(why, MOST_REASON)
    return msgspec.structs.replace(proposal, status="aborted", reason=reason, epoch=epoch)
