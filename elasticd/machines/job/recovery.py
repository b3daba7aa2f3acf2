"""From a loss to a recovery: the fence, what the survivors hold, and the proposal that goes on from it.

1. A member is lost (its process, its node) or the members lost each other: a fence closes every number up to
   its own, and names those that are fenced off.
2. Each survivor aborts what it waits for and says which copies it holds. Meanwhile a plan is made for them.
3. Of the plans that copies exist of, the one that is farthest is taken, if its live copies are the whole state;
   who has not heard the last vote's outcome is told it, and makes that update too.
4. The new plan is proposed with this recovery. Its first swap records it, and ends the fault.

Another loss at any of these begins anew at 1, under a higher number.
"""

from __future__ import annotations

from elasticd_planner.plan import Plan
from elasticd_planner.value import Value

from elasticd.machines.job.ending import stop
from elasticd.machines.job.fence import FALLIBLE, fault
from elasticd.machines.job.holdings import lost_boxes
from elasticd.machines.job.state import Phase, Worker
from elasticd.machines.job.switch import propose
from elasticd.machines.job.turn import Turn
from elasticd.messages import Bereft, Copy, Standing
from elasticd.records import Recovery, Vote


def bereft(turn: Turn, worker: Worker, body: Bereft) -> None:
    """A member lost the others: most likely one of them died, and the word of it is on its way."""
    if turn.job.phase in FALLIBLE and worker.bereft_at is None:
        turn.worker(worker, bereft_at=turn.now)


def stands(turn: Turn, worker: Worker, body: Standing) -> None:
    turn.worker(worker, standing=body, bereft_at=None)


def suspect(turn: Turn) -> None:
    """Losses that nobody reports: of nodes that cannot be reached, and among members that all live."""
    job = turn.job
    if job.phase not in FALLIBLE or job.phase is Phase.RECOVERING or job.settle_until is not None:
        return
    since = min((w.bereft_at for w in job.workers.values() if w.bereft_at is not None), default=None)
    stopped = turn.now - job.progress.at > turn.settings.node_seconds + 2 * job.progress.seconds
    if since is not None or (stopped and job.phase is Phase.RUNNING):
        away = _unreachable(turn)
        if away:
            nodes = sorted({device.rpartition("/")[0] for device in away})
            fault(turn, away, f"node {', '.join(nodes)} cannot be reached, and the job's steps have stopped")
            return
    if since is not None and turn.now - since >= turn.settings.bereft_seconds:
        who = ", ".join(device for device, w in job.workers.items() if w.bereft_at is not None)
        fault(turn, {}, f"{who} lost the other members, of whom none is known to have died")


def _unreachable(turn: Turn) -> dict[str, str]:
    """Members on nodes that have been away for too long; nobody, where no node at all can be reached: then it
    is this leader who is cut off."""
    if not any(node.connected for node in turn.nodes.values()):
        return {}
    away = {}
    for worker in _owners(turn):
        node = turn.nodes.get(worker.node)
        known = node is not None and (node.connected or turn.now - node.since < turn.settings.node_seconds)
        if not known:
            away[worker.device] = worker.incarnation
    return away


def recover(turn: Turn) -> None:
    """Proposes the recovery once all that live have said what they hold and there is a plan for them."""
    job = turn.job
    if job.phase is not Phase.RECOVERING or job.settle_until is not None or job.fence is None:
        return
    owners = _owners(turn)
    silent = [w for w in owners if w.standing is None or w.standing.fence != job.fence.number]
    if silent:
        _silent(turn, silent)
        return
    if not owners:
        stop(turn, f"{job.fence.reason}: nobody is left who holds any state")
        return
    source = survey(turn)
    if isinstance(source, str):
        _nothing(turn, source)
    elif job.remedy is not None:
        propose(turn, job.remedy.plan, job.remedy.problem, job.fence.reason, source.plan, source.recovery)


def _silent(turn: Turn, silent: list[Worker]) -> None:
    """Who does not answer a fence is gone, too: frozen, or with a node that is away."""
    away = _unreachable(turn)
    gone = {worker.device: worker.incarnation for worker in silent if worker.device in away}
    if turn.now - turn.job.since >= turn.settings.stand_seconds:
        gone = {worker.device: worker.incarnation for worker in silent}
    if gone:
        fault(turn, gone, f"no answer to fence {turn.job.highest} from {', '.join(sorted(gone))}")


def _nothing(turn: Turn, lost: str) -> None:
    """No plan's copies are whole. Before anything was trained, the job starts anew."""
    job = turn.job
    held = [copy for worker in _owners(turn) for copy in _copies(worker)]
    if job.plan is None and not held:
        turn.enter(Phase.PLANNING, proposal=None, fence=None)
        return
    assert job.fence is not None
    stop(turn, f"{job.fence.reason}; state is lost: {lost}")


class Source(Value, frozen=True, kw_only=True):
    """What a recovery goes on from."""

    plan: Plan
    recovery: Recovery


def survey(turn: Turn) -> Source | str:
    """The plan that survivors are farthest under and hold all of, or what is lacking of the best."""
    job = turn.job
    assert job.fence is not None
    assert job.spec is not None
    lacking = "no member that lives holds any copy"
    options = []
    for plan in job.candidates:
        held = {w.device: copy for w in job.bound(plan) for copy in _copies(w) if copy.number == plan.number}
        if held:
            options.append((max(copy.step for copy in held.values()), plan.number, plan, held))
    for step, _, plan, held in sorted(options, key=lambda option: option[:2], reverse=True):
        vote = _vote(turn, step)
        sources = {device for device, copy in held.items() if copy.step == step}
        if vote is not None:
            sources |= {device for device, copy in held.items() if copy.behind and copy.step == step - 1}
        # The update of who was behind leaves it with new parameters only where it keeps their state.
        stale = {d for d in sources if held[d].stale or held[d].step < step}
        lost = lost_boxes(job.spec.model, plan, sources, stale)
        if lost:
            lacking = f"{lost} is held by nobody who lives, of plan {plan.number}"
            continue
        recovery = Recovery(
            fence=job.fence.number,
            step=step,
            sources={device: plan.binding[device] for device in plan.members if device in sources},
            vote=vote,
            stale=tuple(device for device in plan.members if device in stale) if plan.state.zero else (),
        )
        return Source(plan=plan, recovery=recovery)
    return lacking


def _vote(turn: Turn, step: int) -> Vote | None:
    """The outcome of the vote that led to `step`, where one that lives heard it."""
    heard = (w.standing.vote for w in turn.job.workers.values() if w.standing is not None)
    return next((vote for vote in heard if vote is not None and vote.step == step - 1), None)


def _copies(worker: Worker) -> tuple[Copy, ...]:
    return worker.standing.copies if worker.standing is not None else ()


def _owners(turn: Turn) -> list[Worker]:
    """The living workers that may hold a copy of some plan."""
    job = turn.job
    found = {worker.device: worker for plan in job.candidates for worker in job.bound(plan)}
    return [worker for worker in found.values() if not worker.left]


def waits(turn: Turn, refusal: str) -> None:
    """There is no plan for those that are left: the job waits, its state safe, for more to come."""
    if turn.job.reason != refusal:
        turn.set(reason=refusal)
        turn.note("waiting", f"waiting for capacity: {refusal}", number=turn.job.number)
