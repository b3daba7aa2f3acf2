"""The life of one proposal: opened, prepared, and then recorded or given up."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from elasticd_planner.policy.policy import Moved
from elasticd_planner.policy.stability import switched as answered_by
from elasticd_planner.problem import JobProblem, MeshProblem, Problem
from elasticd_planner.readable import readable_seconds
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.mesh import JobPlan, MeshPlan
from elasticd_planner.spec.plan import Plan

from elasticd.machines.job.copies import checkpoints
from elasticd.machines.job.copies.checkpoints import NotShared, offered
from elasticd.machines.job.copies.holdings import only_copies
from elasticd.machines.job.copies.memory import room_for
from elasticd.machines.job.copies.rollback import Source, called, spread, waits
from elasticd.machines.job.faults import user_exceptions
from elasticd.machines.job.faults.network_partition import regroup
from elasticd.machines.job.lifecycle.drain import ending, preempted
from elasticd.machines.job.lifecycle.fence import fault, resolved
from elasticd.machines.job.lifecycle.job_end import aborted, stop
from elasticd.machines.job.lifecycle.stop_request import ends_unsaved
from elasticd.machines.job.state.job_state import JobPhase, Worker, incarnations
from elasticd.machines.job.state.parts.job_steps import JobProgress
from elasticd.machines.job.state.parts.plan_requests import Setback
from elasticd.machines.job.state.transaction import Transaction, doubled
from elasticd.records import AnyHistoryRecord, HistoryRecord, MeshHistoryRecord, PlanRecord, Proposal
from elasticd.wire.worker import InDoubt, Prepared, Refused, StayedOnPlan, Switched

#: Seconds from a switch that was given up to the next, where a worker waits for it to leave.
AGAIN_SECONDS = 1.0

#: Switches whose measured cost the next one is expected to have.
MOST_MOVED = 4


def propose(
    turn: Transaction, plan: JobPlan, problem: JobProblem, reason: str, source: Source | None = None
) -> None:
    """Opens a proposal of `plan` under a number of its own, bound to the workers that are there. It goes on
    from the plan in force; after a fence, from its `source`."""
    job = turn.job
    plan = spread(plan)
    try:
        names = source.checkpoints if source is not None else offered(job)
    except NotShared as error:
        stop(turn, str(error))
        return
    room = room_for(turn, plan, source)
    if room.lacks:
        _does_not_fit(turn, room.lacks)
        return
    if source is not None and source.words:
        reason = f"{reason}; {source.words}"
    if room.aside:
        reason = f"{reason}; {room.cramped}: what changes of the old copy goes to the host's memory meanwhile"
    elif room.cramped:
        reason = (
            f"{reason}; {room.cramped}: state moves in place, and that cannot be given up once it has begun"
        )
    if any(device not in job.workers for device in plan.members):  # one was lost since it was asked for
        turn.change("planning", decided=None, remedy=None)
        return
    if isinstance(plan, MeshPlan) and job.spec is not None and only_copies(job.spec.specs, plan):
        reason = f"{reason}; parts of the state have one copy: without its device they are read from a snapshot"
    number = job.highest + 1
    plan = plan.replace(
        number=number,
        binding={device: job.workers[device].incarnation for device in plan.members},
    )
    proposal = Proposal(
        number=number,
        epoch=turn.epoch,
        plan=plan,
        old=source.plan if source is not None else job.plan,
        recovery=source.recovery if source is not None else None,
        checkpoints=names,
        in_place=bool(room.cramped) and not room.aside,
        aside=room.aside,
    )
    turn.drop_request()  # a recovery's plan may have waited for survivors, and others have come
    turn.enter(JobPhase.PROPOSED, proposal=proposal, highest=number)
    turn.change("switching", give_up="")
    seconds = plan.prediction.step_seconds if plan.prediction is not None else None
    turn.write(
        proposal,
        _history(number, plan, problem, reason),
        notes=(turn.told("proposed", f"plan {number}: {reason}", number=number, step_seconds=seconds),),
    )


def _history(number: int, plan: JobPlan, problem: JobProblem, reason: str) -> AnyHistoryRecord:
    if isinstance(plan, MeshPlan) and isinstance(problem, MeshProblem):
        return MeshHistoryRecord(number=number, plan=plan, problem=problem, reason=reason)
    assert isinstance(plan, Plan)
    assert isinstance(problem, Problem)
    return HistoryRecord(number=number, plan=plan, problem=problem, reason=reason)


def _does_not_fit(turn: Transaction, wrong: str) -> None:
    job = turn.job
    if job.phase is JobPhase.RECOVERING:
        turn.change("planning", remedy=None)  # another is made once more devices are there
        if not user_exceptions.unplanned(turn, wrong):
            no_capacity(turn, wrong)
    elif job.plan is None:
        stop(turn, f"the plan does not fit: {wrong}")
    else:
        turn.note("refused", f"plan {job.number} stays, the new one does not fit: {wrong}", number=job.number)


def no_capacity(turn: Transaction, why: str) -> None:
    """There is no plan for those that live: the job waits for more. One that is to end does not."""
    if ending(turn):
        ends_unsaved(turn, why)
    else:
        waits(turn, why)


def prepared(turn: Transaction, worker: Worker, body: Prepared) -> None:
    """A member votes for the proposal from now on."""
    proposal = turn.job.proposal
    if proposal is None or proposal.number != body.number or worker.prepared >= body.number:
        return
    turn.worker(worker, prepared=body.number)
    if worker.device not in proposal.plan.binding:  # it leaves with this plan, and has no part in it
        return
    # Members answer in about the order of their ranks: from the end, the first look mostly tells.
    if all(
        (other := turn.job.workers.get(device)) is not None
        and other.incarnation == incarnation
        and other.prepared == body.number
        for device, incarnation in reversed(proposal.plan.binding.items())
    ):
        turn.note("prepared", f"all members prepared plan {body.number}", number=body.number)


def refused(turn: Transaction, worker: Worker, body: Refused) -> None:
    """A member cannot prepare it."""
    if _open(turn, body.number):
        turn.give_up(f"{worker.device} cannot prepare it: {body.reason}")


def kept(turn: Transaction, worker: Worker, body: StayedOnPlan) -> None:
    """A member goes on under the old plan. It may say so of an open proposal: its all-gather said no."""
    proposal = turn.job.proposal
    if proposal is None or proposal.number != body.number:
        return
    turn.worker(worker, kept=body.number)
    if _open(turn, body.number):
        turn.change("switching", no_aside=turn.job.switching.no_aside or bool(proposal.aside))
        turn.give_up(f"{worker.device} kept the old plan: {body.reason or 'no reason given'}")


def swapped(turn: Transaction, worker: Worker, body: Switched) -> None:
    """A member runs the proposal's plan: that decides it for all. The first such report records it."""
    if worker.swapped >= body.number:
        return
    turn.worker(worker, swapped=body.number)
    proposal = turn.job.proposal
    record = (
        proposal is not None and proposal.number == body.number and turn.job.phase is not JobPhase.RECOVERING
    )
    if not record and turn.job.number != body.number:
        return  # of a plan that another one followed
    turn.note(
        "swapped",
        f"{worker.device} runs plan {body.number} from step {body.step} on, after a pause of "
        f"{readable_seconds(body.pause_seconds)}"
        + (f", from checkpoint {body.checkpoint}" if body.checkpoint else ""),
        number=body.number,
        step=body.step,
        pause_seconds=body.pause_seconds,
        bytes_sent=body.bytes_sent,
        bytes_lacking=body.bytes_lacking,
        bytes_state=body.bytes_state,
        device=worker.device,
        checkpoint=body.checkpoint,
    )
    if record and turn.job.plan is not None:  # nothing moves for the first plan
        turn.change(
            "switching",
            moved=(*turn.job.switching.moved, Moved(number=body.number, bytes_lacking=0, pause_seconds=0.0)),
        )
    if body.checkpoint:
        turn.change("checkpoints", read_step=body.step)
    _cost(turn, body)
    if record and proposal is not None:
        _record(turn, proposal, body.step)


def _cost(turn: Transaction, body: Switched) -> None:
    """Adds what the switch cost this member: bytes sum up, and the longest pause is everybody's."""
    moved = turn.job.switching.moved
    if not moved or moved[-1].number != body.number:
        return
    last = moved[-1]
    cost = Moved(
        number=body.number,
        bytes_lacking=last.bytes_lacking + body.bytes_lacking,
        pause_seconds=max(last.pause_seconds, body.pause_seconds),
    )
    turn.change("switching", moved=(*moved[:-1], cost)[-MOST_MOVED:])


def _record(turn: Transaction, proposal: Proposal, step: int) -> None:
    kept_it = [other.device for other in turn.job.workers.values() if other.kept == proposal.number]
    job = turn.job
    rates = job.planning.decided.rates if job.planning.decided is not None else job.detection.rates.rates
    again = job.steps.progress.step - step if called(proposal) else 0
    if again > 0:  # what was measured of steps that are made again counts
        _go_back(turn, step)
        job = turn.job
    turn.set(snapshots=job.snapshots.recorded(proposal.number, step))
    turn.enter(JobPhase.RUNNING, plan=proposal.plan, proposal=None)
    turn.change("switching", give_up="")
    turn.change("steps", gathered={})
    turn.change("learned", first_step=None)
    turn.change(
        "planning",
        deferred=None,
        stability=answered_by(job.planning.stability, rates, step, turn.settings.policy.horizon_steps),
    )
    turn.change("takeover", unmet=job.unmet_of(proposal.plan))
    text = f"plan {proposal.number} is recorded"
    if called(proposal):
        text = f"{text}: the job goes on from step {step}" + (f", {again} before the last" if again > 0 else "")
    note = turn.told("recorded", text, number=proposal.number, step=step, again=max(0, again))
    turn.write(PlanRecord(plan=proposal.plan, epoch=turn.epoch, step=step), notes=(note,), close=True)
    resolved(turn)
    checkpoints.recorded(turn)
    if kept_it:  # they hold the copy that they verified no more: what the others hold must do
        who = ", ".join(kept_it)
        fault(turn, {}, f"{who} kept the plan before {proposal.number} while others swapped to it")


def _go_back(turn: Transaction, step: int) -> None:
    """The steps from `step` on are made again: they count once, as they will be."""
    job = turn.job
    turn.change("steps", progress=JobProgress(step=step, at=turn.now, slowest=job.steps.progress.slowest))
    turn.change("detection", rates=msgspec.structs.replace(job.detection.rates, step=step - 1))


def doubt(turn: Transaction, worker: Worker, body: InDoubt) -> None:
    """A member does not know which plan holds, and stands still: what all hold tells."""
    if body.number > turn.job.highest - 1 and worker.peers_lost_at is None:
        turn.worker(worker, peers_lost_at=turn.now)


def overdue(turn: Transaction) -> None:
    """Gives an open proposal up that is not prepared in time, or that an unreachable node cannot hear of."""
    job = turn.job
    if job.switching.give_up or job.proposal is None:
        return
    old: Iterable[str] = job.plan.members if job.plan is not None else ()
    if job.proposal.recovery is not None:
        old = job.proposal.recovery.sources
    for name in dict.fromkeys(node_of(device) for device in (*old, *job.proposal.plan.members)):
        node = turn.nodes.get(name)
        if node is not None and node.connected:
            continue
        if turn.now - (node.since if node is not None else job.since) >= turn.settings.reconnect_seconds:
            turn.give_up(f"node {name} is unreachable")
            return
    if turn.now - job.since >= turn.settings.prepare_seconds:
        late = [
            device
            for device in job.proposal.plan.members
            if (worker := job.workers.get(device)) is None or worker.prepared < job.proposal.number
        ]
        if late:  # once all are prepared the vote decides, however long a step takes
            turn.give_up(f"not ready within {turn.settings.prepare_seconds:g} s: {', '.join(late)}")


def unrecovered(turn: Transaction) -> None:
    """A recovery that was given up leaves no plan to go on under: another is made, after a while."""
    job = turn.job
    if not job.switching.give_up or job.proposal is None or job.proposal.recovery is None:
        return
    why, older_state = job.switching.give_up, called(job.proposal)
    if older_state:
        turn.set(snapshots=job.snapshots.failing(older_state))
    # Whose code raised may not be able to give its state away: the next goes on without.
    gone = incarnations(worker for worker in job.workers.values() if worker.raised)
    if gone:
        fault(turn, gone, f"the recovery {job.proposal.number} failed: {why}")
    else:
        regroup(turn, f"the recovery {job.proposal.number} failed: {why}")


def abort(turn: Transaction) -> None:
    """Marks a proposal aborted that was given up; with no plan to go on under the job stops."""
    job = turn.job
    if not job.switching.give_up:
        return
    assert job.proposal is not None
    if job.plan is None:
        stop(turn, f"the first plan failed: {job.switching.give_up}")
        return
    proposal = aborted(job.proposal, turn.epoch, job.switching.give_up)
    turn.enter(JobPhase.ABORTING, proposal=proposal)
    note = turn.told(
        "aborted", f"plan {proposal.number} is given up: {job.switching.give_up}", number=proposal.number
    )
    turn.write(proposal, notes=(note,))


def all_kept(turn: Transaction) -> None:
    """The old plan goes on once every one of its members has said so."""
    job = turn.job
    if job.proposal is None:
        return
    if job.plan is None:  # found so in the store: the leader that aborted it ended before it could say more
        stop(turn, f"the first plan failed: {job.proposal.reason}")
        return
    members = job.all_known(job.plan.binding)
    if members and all(worker.kept == job.proposal.number for worker in members):
        hurry = preempted(turn)
        retry = turn.now + (AGAIN_SECONDS if hurry else turn.settings.retry_seconds)
        setback = _setback(turn) if not hurry else None
        turn.enter(JobPhase.RUNNING, proposal=None)
        turn.change("switching", give_up="")
        turn.change("planning", decided=None, not_before=retry, setback=setback)
        turn.change("takeover", unmet=job.unmet_of(job.plan))


def _setback(turn: Transaction) -> Setback | None:
    """The setback of a plan that was given up and would be given up again, unless rates or devices change: each
    time that it is, the next attempt waits twice as long."""
    job, settings = turn.job, turn.settings
    if (
        job.planning.decided is None
    ):  # it changed while the proposal was open: nothing is known against the new one
        return None
    before = job.planning.setback
    times = before.times + 1 if before is not None and before.basis == job.planning.decided else 1
    seconds = doubled(settings.retry_seconds, times, settings.most_retry_seconds)
    if times > 1:
        text = (
            f"plan {job.number} stays: another for these rates and devices was given up {times} times; the "
            f"next is tried in {seconds:g} s, or when they change"
        )
        turn.note("put_off", text, number=job.number, times=times, seconds=seconds)
    return Setback(basis=job.planning.decided, times=times, until=turn.now + seconds)


def _open(turn: Transaction, number: int) -> bool:
    proposal = turn.job.proposal
    return turn.job.phase is JobPhase.PROPOSED and proposal is not None and proposal.number == number
