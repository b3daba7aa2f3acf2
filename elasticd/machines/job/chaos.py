"""Chaos: a job's data is read in sequences of another length, from one step on, by all of its ranks alike.

What a step reads is a function of its plan. So the order is a proposal of the plan in force, with another
`sequence`: all ranks take it up after the same step, joiners and recoveries have it from their plan, and a new
leader from the record. Each later plan keeps it. Nothing else is told of it: that lengths have shifted, the
leader sees as it would of any data, from what is measured.
"""

from __future__ import annotations

from elasticd.machines.job import replan
from elasticd.machines.job.state.events import Reread
from elasticd.machines.job.state.transaction import Turn
from elasticd.machines.job.switch import propose


def ordered(turn: Turn, event: Reread) -> None:
    """From now on, or from when nothing else is under way."""
    words = f"in sequences of {event.tokens} tokens" if event.tokens else "as it is"
    turn.note("chaos", f"chaos: job {turn.job.job} is to read its data {words}", tokens=event.tokens)
    turn.set(sequence=event.tokens, reread=True)


def due(turn: Turn) -> None:
    """Proposes what was ordered, once the job runs and nothing is proposed. What its members gave up is off."""
    job = turn.job
    if job.plan is None or job.plan.sequence == job.sequence:
        return
    if not job.reread:
        turn.set(sequence=job.plan.sequence)
        return
    if turn.now < job.not_before or not replan.all_there(turn):
        return
    problem = replan.problem_now(turn)
    if problem is None:
        return
    turn.set(reread=False)
    propose(turn, job.plan, problem, "chaos: its layout stays, its data is read in other sequences")
