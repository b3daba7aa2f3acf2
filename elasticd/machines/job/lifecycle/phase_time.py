"""The time that a job may spend in a phase: an event names whom it waits for, then the job stops with that.

Torchruns that wait for others, and workers that wait at their `elasticd.Job` for those that never come, would
wait for ever: no message ends these phases. Time counts from the last one that came. Scripts whose workers have
not made a Job yet may need none, or prepare data: nobody waits for them, so they are told of and not ended.

A proposal that is given up waits until each member of the old plan says that it kept it. While steps come the
job trains, and is only not planned anew; without them a fence finds out who lives. A job that recovers may wait
for devices, or for a node that alone holds a part of the state, for days.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from elasticd_planner.readable import counted, readable_duration

from elasticd.machines.job.lifecycle.drain import only_drained
from elasticd.machines.job.lifecycle.fence import fault
from elasticd.machines.job.lifecycle.job_end import stop
from elasticd.machines.job.state.job_state import OVER, JobPhase, JobState
from elasticd.machines.job.state.transaction import Transaction

#: Workers and places that a sentence names.
MOST_NAMED = 8
#: The phases in which a job waits for somebody.
_WAITS = frozenset(JobPhase) - OVER - {JobPhase.RUNNING}
#: The settings that end a wait, as a user changes them.
ASSEMBLE, RECOVER = "assemble_seconds in section [coordinator]", "recover_days in section [coordinator]"


def due(turn: Transaction) -> None:
    """Tells whom a phase waits for once it lasts, and ends what took too long."""
    job, settings = turn.job, turn.settings
    seconds = turn.now - waits_since(job)
    if job.phase is JobPhase.GATHERING:  # whom it waits for it says from its first second on
        if job.start.joiners and seconds >= settings.assemble_seconds:
            _stop(turn, seconds, job.reason or "the nodes that --nnodes asks for are not there", ASSEMBLE)
        return
    text = _awaited(turn)
    if seconds >= settings.event_seconds and text:
        _publish_reason(turn, text)
    begins = job.spec is not None and (job.phase is JobPhase.ASSEMBLING or (job.starting and text))
    if begins and seconds >= settings.assemble_seconds:
        _stop(turn, seconds, text, ASSEMBLE)
    elif job.phase is JobPhase.ABORTING and text and _stands(turn) >= settings.assemble_seconds:
        fault(turn, {}, text)
    elif job.phase is JobPhase.RECOVERING and seconds >= settings.recover_seconds:
        _stop(turn, seconds, job.reason or text, RECOVER)


def waited_seconds(job: JobState, now: float) -> float:
    """The seconds for which torchruns, workers or the whole job have waited for others; 0 where nobody does."""
    waits = job.phase in _WAITS
    if job.phase is JobPhase.GATHERING:
        waits = bool(job.start.joiners)
    elif job.phase is JobPhase.ASSEMBLING:
        waits = job.spec is not None
    return max(0.0, now - waits_since(job)) if waits else 0.0


def waits_since(job: JobState) -> float:
    """The time since which nothing that the phase waits for has come, on the leader's clock."""
    if job.phase in (JobPhase.GATHERING, JobPhase.ASSEMBLING):
        return max(job.since, job.start.arrived)
    if job.phase is JobPhase.RECOVERING and job.steps.progress.at:  # however often the recovery began anew
        return min(job.since, job.steps.progress.at)
    return job.since


def _stands(turn: Transaction) -> float:
    """The seconds for which the job has been in its phase without a step."""
    return turn.now - max(turn.job.since, turn.job.steps.progress.at)


def _publish_reason(turn: Transaction, text: str) -> None:
    """Shows `text` as the job's reason, unless it has a better one, and tells of it once."""
    job = turn.job
    if job.reason == text or (job.reason and job.phase is JobPhase.RECOVERING):
        return
    if not job.reason:
        turn.note("waiting", f"waiting: {text}", number=job.number, phase=job.phase.value)
    turn.set(reason=text)


def _stop(turn: Transaction, seconds: float, text: str, setting: str) -> None:
    stop(turn, f"{text}; it has waited for {readable_duration(seconds)}, and waits no longer ({setting})")


def _awaited(turn: Transaction) -> str:
    job = turn.job
    if job.phase is JobPhase.PLANNING:
        return unplanned(turn)
    if job.phase is JobPhase.ASSEMBLING:
        return missing(job)
    if job.phase is JobPhase.ABORTING:
        return unkept(job)
    return unrecovered(job) if job.phase is JobPhase.RECOVERING else ""


def missing(job: JobState) -> str:
    """Which workers have not come to their Job, in words; nothing where all have."""
    if job.phase is not JobPhase.ASSEMBLING:
        return ""
    if not job.start.joined:
        return "the torchruns of its workers have not come back since another coordinator leads"
    orphans = [worker.device for worker in job.workers.values() if worker.orphan]
    if job.start.world_size and len(job.workers) >= job.start.world_size:
        return f"waits for {_few(orphans)} to come back to the agent that was started again" if orphans else ""
    there = len(job.workers)
    if not there:
        return "its workers run, and none has made an elasticd.Job or called elasticd.live so far"
    have = f"{there} of {job.start.world_size} have made an elasticd.Job or called elasticd.live so far"
    return f"its workers run, and {have}; missing: {_few(_absent(job))}"


def _absent(job: JobState) -> list[str]:
    """The places whose workers have not all come; of a node also how many."""
    there = Counter(place for worker in job.workers.values() for place in (worker.node, worker.device))
    of_node = (job.start.world_size or 0) // len(job.start.joined)
    absent = []
    for place in job.start.joined:
        if "/" in place:
            absent += [place] if not there[place] else []
        elif there[place] < of_node:
            absent.append(f"{counted(of_node - there[place], 'worker')} of node {place}")
    return absent


def unplanned(turn: Transaction) -> str:
    """The reason that no first plan is made, in words; nothing where the planner is asked."""
    if turn.job.planning.asked is not None:
        return ""
    away = sorted({worker.node for worker in turn.job.workers.values() if not turn.here(worker.node)})
    if away:
        nodes = "node" if len(away) == 1 else "nodes"
        return f"the first plan waits for {nodes} {_few(away)}, whose agent cannot be reached"
    drained = only_drained(turn)
    if not drained:
        return ""
    are = "node {} is" if len(drained) == 1 else "nodes {} are"
    return (
        f"{are.format(_few(drained))} drained, and no other device is there: undo it (elasticd drain --undo "
        f"{drained[0]}), or give the job's command on other nodes"
    )


def unkept(job: JobState) -> str:
    """Which members have not said that they go on under the old plan, in words; nothing where all have."""
    if job.phase is not JobPhase.ABORTING or job.proposal is None or job.plan is None:
        return ""
    number = job.proposal.number
    kept = {worker.device for worker in job.bound(job.plan) if worker.kept == number}
    late = [device for device in job.plan.binding if device not in kept]
    if not late:
        return ""
    return f"{_few(late)} did not say so far that plan {job.number} goes on; until then it is not planned anew"


def unrecovered(job: JobState) -> str:
    """The workers or the plan that a recovery waits for, in words, where it has no reason of its own."""
    if job.phase is not JobPhase.RECOVERING or job.losses.fence is None:
        return ""
    number = job.losses.fence.number
    answered = {worker.device for worker in job.holders if worker.standing and worker.standing.fence == number}
    silent = [*(worker.device for worker in job.holders if worker.device not in answered), *job.takeover.unmet]
    if silent:
        return f"{_few(silent)} did not say so far what state it holds, since fence {number}"
    return "a plan is made for the devices that are left" if job.planning.asked is not None else ""


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"
