"""The fence: closes every number that is under way, and fences off those that are lost.

`turn.write` hands the record to `coordinator.store_writer`. Agents obey it as `elasticd_agent.store_watch`
reads it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from elasticd.codec.safe_text import shortened
from elasticd.machines.job.lifecycle.job_end import MOST_REASON, aborted, stop
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.machines.job.state.transaction import Transaction
from elasticd.records import Fence, Proposal

#: Phases in which a plan is in force, or may be.
FALLIBLE = frozenset({JobPhase.PROPOSED, JobPhase.ABORTING, JobPhase.RUNNING, JobPhase.RECOVERING})
#: Exceptions that are stored.
MOST_STORED = 2


def fault(turn: Transaction, gone: Mapping[str, str], why: str, *, back: int = -1) -> None:
    """Fences `gone` (device to incarnation) off, and every number that is under way. A job that was to end
    with a last checkpoint ends without it. back: as `Fence.back`; that of a fence which stands stays."""
    job = turn.job
    back = max(back, job.losses.fence.back if job.losses.fence is not None else -1)
    if job.ending.failing:
        stop(turn, f"{job.ending.failing}; no last checkpoint could be made: {why}")
        return
    number, why = job.highest + 1, shortened(why, MOST_REASON)
    fence = Fence(
        number=number,
        epoch=turn.epoch,
        gone={**job.losses.gone, **gone},
        reason=why,
        thrown=job.ending.thrown[-MOST_STORED:],
        back=back,
    )
    proposal = job.proposal
    records: list[Fence | Proposal] = [fence]
    if proposal is not None and proposal.status == "open":
        proposal = aborted(proposal, turn.epoch, why)
        records.append(proposal)
    turn.drop(*(worker.device for worker in job.known(gone)))
    turn.drop_request()
    if job.phase is not JobPhase.RECOVERING:
        turn.enter(JobPhase.RECOVERING)
    turn.set(since=turn.now, highest=number, proposal=proposal)
    turn.change("losses", fence=fence, gone=fence.gone)
    turn.change("switching", give_up="")
    turn.change(
        "takeover", unmet={device: one for device, one in job.takeover.unmet.items() if device not in gone}
    )
    turn.change("planning", remedy=None, decided=None, deferred=None, not_before=0.0)
    turn.change("steps", gathered={})
    note = turn.told("fenced", f"fence {number}: {why}", number=number, gone=sorted(gone))
    turn.write(*records, notes=(note,))


def resolved(turn: Transaction) -> None:
    """A plan was recorded after the fence: the fault is over."""
    workers = {
        device: msgspec.structs.replace(worker, standing=None, peers_lost_at=None)
        for device, worker in turn.job.workers.items()
    }
    turn.set(reason="", workers=workers)
    turn.change("losses", fence=None)
    turn.change("planning", remedy=None)
