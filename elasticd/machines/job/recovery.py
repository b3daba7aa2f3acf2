"""From a loss to a recovery: the fence, what the survivors hold, and the proposal that goes on from it.

1. A member is lost (its process, its node) or the members lost each other: a fence closes every number up to
   its own, and names those that are fenced off.
2. Each survivor aborts what it waits for and says which copies it holds. Meanwhile a plan is made for them.
3. Of the plans that copies exist of, the one that is farthest is taken, if its live copies are the whole state,
   or are with snapshots of the same step that lost members left; who has not heard the last vote's outcome is
   told it, and makes that update too. Else all go back to an older state.
4. The new plan is proposed with this recovery. Its first swap records it, and ends the fault.

Another loss at any of these begins anew at 1, under a higher number.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.plan import Plan

from elasticd.machines.job import replan
from elasticd.machines.job.copies.holdings import last_holders, lost_boxes
from elasticd.machines.job.copies.rollback import Source, completed, older, older_state, waits
from elasticd.machines.job.faults.hangs import apart, busy, culprits, described, note, tell
from elasticd.machines.job.faults.network_partition import divided, regroup
from elasticd.machines.job.lifecycle.drain import ending
from elasticd.machines.job.lifecycle.fence import fault
from elasticd.machines.job.lifecycle.job_end import stop
from elasticd.machines.job.lifecycle.stop_request import ends_unsaved
from elasticd.machines.job.state.job_state import JobPhase, Worker, incarnations, stranger
from elasticd.machines.job.state.transaction import Transaction
from elasticd.machines.job.switch import propose
from elasticd.records import Recovery, Vote
from elasticd.wire.coordinator import Frozen
from elasticd.wire.worker import Copy, PeersLost, StateReport


def peers_lost(turn: Transaction, worker: Worker, body: PeersLost) -> None:
    """A member lost the others: most likely one of them died, and the word of it is on its way. Or all members
    want an older state. Of who is no member, or lost those of another plan, the job lacks nothing: such words
    are said again to a new leader."""
    job = turn.job
    if worker.peers_lost_at is not None:
        return
    if job.is_member(worker.device, worker.incarnation) and body.plan in (0, job.number):
        turn.worker(worker, peers_lost_at=turn.now)
        if body.back >= 0 and job.losses.fence is None:
            fault(turn, {}, body.reason, back=body.back)


def froze(turn: Transaction, node: str, message: Frozen) -> None:
    """A worker does not answer its agent, or does again. That alone costs nothing: see `suspect`."""
    if (worker := turn.job.worker(message.device, message.incarnation)) is not None:
        turn.worker(worker, frozen=message.how)


def stands(turn: Transaction, worker: Worker, body: StateReport) -> None:
    """A worker's answer to a fence. One to a fence that is over is an old word, said again."""
    if turn.job.losses.fence is not None and body.fence == turn.job.losses.fence.number:
        turn.worker(worker, standing=body, peers_lost_at=None)


def suspect(turn: Transaction) -> None:
    """Losses that nobody reports: of nodes that cannot be reached, and among members that all live."""
    job = turn.job
    since = min((w.peers_lost_at for w in job.workers.values() if w.peers_lost_at is not None), default=None)
    still = _without_steps(turn)
    stopped = still > turn.settings.node_seconds + 2 * job.steps.progress.slowest
    if since is not None or (stopped and job.phase in (JobPhase.RUNNING, JobPhase.ABORTING)):
        away = _unreachable(turn)
        if away:
            nodes = sorted({node_of(device) for device in away})
            why = f"node {', '.join(nodes)} cannot be reached, and the job's steps have stopped"
            if not _awaited(turn, nodes, away, why):
                fault(turn, away, why)
            return
    halted = still > turn.settings.hang_seconds + 2 * job.steps.progress.slowest
    if since is None and not halted:
        return
    frozen = [worker for worker in _owners(turn) if worker.frozen]
    if frozen:
        gone = incarnations(frozen)
        why = f"worker {', '.join(gone)} is frozen: {frozen[0].frozen}"
        if not _spared(turn, gone, why):
            fault(turn, gone, why)
        return
    if since is None and halted and (halted_workers := culprits(turn)):
        gone, why = incarnations(halted_workers), described(turn, halted_workers)
        if not _spared(turn, gone, why):
            note(turn, halted_workers)
            turn.change("losses", stuck_step=job.steps.progress.step)
            fault(turn, gone, why)
        return
    if since is None and (why := apart(turn)):
        fault(turn, {}, why)
        for worker in job.workers.values():  # which the fence moves on: agents tell where it stands next
            turn.worker(turn.job.workers[worker.device], halted=None)
    elif since is None:
        tell(turn)
    elif turn.now - since >= turn.settings.peers_lost_seconds:
        who = ", ".join(device for device, w in job.workers.items() if w.peers_lost_at is not None)
        regroup(turn, f"{who} lost the other members, and none of them is known to have died", at_once=True)


def _without_steps(turn: Transaction) -> float:
    """Seconds without a step. They count while there is somebody to tell of one: agents that come back after a
    pause of their network, of etcd or of the leader come one after the other."""
    heard = max((turn.here_seconds(node) for node in {worker.node for worker in _owners(turn)}), default=0.0)
    return min(turn.now - turn.job.steps.progress.at, max(heard, 0.0))


def _spared(turn: Transaction, found: Collection[str], why: str) -> bool:
    """Returns True if members that live, but stand still, are waited for: those that alone hold a part of the
    state, where there is none to go back to. Without them the job would end; and a step that takes longer than
    any of late, or a debugger, looks no different from a hang."""
    if turn.job.cause != "sole holders" or older_state(turn):  # else they are waited for already
        lost = lost_without(turn, found)
        if not lost:
            return False
        waits(turn, f"{why}; they are waited for, as nobody else holds {lost}", "sole holders")
        note(turn, tuple(worker for worker in _owners(turn) if worker.device in found and worker.halted))
    return True


def lost_without(turn: Transaction, found: Collection[str]) -> str:
    """The state that nobody else holds if these devices are lost, where there is no older state to go back to:
    without them the job would end."""
    job, plan = turn.job, turn.job.plan
    if job.spec is None or older_state(turn):
        return ""
    if job.phase is JobPhase.RECOVERING:
        lacking = survey(turn)
        return lacking if isinstance(lacking, str) else ""
    holders = set(plan.members) if plan is not None else set()
    if job.losses.fence is not None:
        recovery = (
            job.proposal.recovery if job.proposal is not None and job.phase is JobPhase.PROPOSED else None
        )
        plan = job.proposal.old if job.proposal is not None and recovery is not None else None
        holders = set(recovery.sources) if recovery is not None else set()
    return lost_boxes(job.spec.specs, plan, holders - {*found}) if plan is not None else ""


def _awaited(turn: Transaction, nodes: Collection[str], away: Collection[str], why: str) -> bool:
    """Returns True if nodes are waited for longer than others: the job would end without what they hold, and
    most networks that break are mended within a minute."""
    takeover = (
        turn.job.takeover.patient_until - turn.settings.reconnect_seconds
    )  # of nodes that this leader never met
    since = [turn.nodes[name].since if name in turn.nodes else takeover for name in nodes]
    return all(turn.now - each < turn.lone_seconds for each in since) and _spared(turn, away, why)


def _unreachable(turn: Transaction) -> dict[str, str]:
    """Members on nodes that have been away for too long; nobody, where no member's node can be reached: then
    nobody is left to say that the steps have stopped, and it may be this leader who is cut off."""
    owners = _owners(turn)
    nodes = {worker.node for worker in owners}
    if not any(map(turn.here, nodes)):
        return {}
    known = (turn.nodes[name] for name in nodes if name in turn.nodes)
    near = {
        node.record.node
        for node in known
        if node.connected or turn.now - node.since < turn.settings.node_seconds
    }
    return incarnations(worker for worker in owners if worker.node not in near)


def recover(turn: Transaction) -> None:
    """Proposes the recovery once all that live have said what they hold and there is a plan for them."""
    job = turn.job
    if job.losses.fence is None:
        return
    owners = _owners(turn)
    silent = [w for w in owners if w.standing is None or w.standing.fence != job.losses.fence.number]
    if silent and job.losses.fence.epoch < turn.epoch:
        fault(
            turn, {}, job.losses.fence.reason
        )  # agents that have seen this leader refuse the word of the one before
        return
    if silent:
        _silent(turn, silent)
        return
    if divided(turn, owners, lambda nodes: isinstance(survey(turn, nodes), Source)):
        return
    source = survey(turn)
    if job.losses.fence.back >= 0 and isinstance(older_one := older(turn, survivors=True), Source):
        source = older_one
    if job.ending.failing:
        _once_more(turn, source)
    elif isinstance(source, str):
        _go_back(turn, source, survivors=bool(owners))
    else:
        _go_on(turn, source)


def _go_on(turn: Transaction, source: Source) -> None:
    job = turn.job
    assert job.losses.fence is not None
    if job.planning.remedy is not None:
        recovery = msgspec.structs.replace(source.recovery, leave_out=job.losses.fence.back)
        source = msgspec.structs.replace(source, recovery=recovery)
        propose(turn, job.planning.remedy.plan, job.planning.remedy.problem, job.losses.fence.reason, source)


def _once_more(turn: Transaction, source: Source | str) -> None:
    """The plan in force, under which its members make a last checkpoint (`raised`)."""
    problem = replan.problem_now(turn)
    if isinstance(source, Source) and problem is not None and turn.job.plan is not None:
        propose(turn, turn.job.plan, problem, turn.job.ending.failing, source)
    if turn.job.phase is JobPhase.RECOVERING:
        stop(turn, f"{turn.job.ending.failing}; no last checkpoint could be made")


def _silent(turn: Transaction, silent: list[Worker]) -> None:
    """A worker that does not answer a fence is gone, too: frozen, or with a node that is away. An agent that is
    being started again has the time for that; and who may hold what nobody else does is waited for."""
    late = [worker for worker in silent if _late(turn, worker)]
    late, outside = [w for w in late if not busy(turn, w)], [w for w in late if busy(turn, w)]
    if outside and not late:
        where = ", ".join(f"{w.device} (in {w.halted.place})" for w in outside if w.halted is not None)
        waits(turn, f"{where} answers the fence once it is out of there")
    if not late:
        return
    names = ", ".join(sorted(worker.device for worker in late))
    lacking = survey(turn)
    waited = turn.job.plan is not None and not turn.job.ending.failing
    if isinstance(lacking, str) and waited and not older_state(turn):
        waits(turn, f"{names} may live, and hold what nobody else does ({lacking}): no answer since the fence")
        return
    if waited and turn.now - turn.job.since < _leavers_wait(turn, late):
        waits(turn, f"{names} may live, and no other device could go on: no answer since the fence")
        return
    fault(turn, incarnations(late), f"no answer to fence {turn.job.highest} from {names}")


def _leavers_wait(turn: Transaction, late: list[Worker]) -> float:
    """Seconds that these are waited for because all other workers drain, or their code raised: without these
    the job would end. That is not for long where the others were told to go: they end by themselves soon."""
    job, absent = turn.job, {worker.device for worker in late}
    here = [each for each in job.workers.values() if not each.left and each.device not in absent]
    if job.ending.stopping or not here or not all(worker.draining or worker.raised for worker in here):
        return 0.0
    saves = any(worker.saves for worker in here)
    return turn.settings.stand_seconds if saves else turn.settings.lone_seconds


def _late(turn: Transaction, worker: Worker) -> bool:
    """Returns True if it has had its time to answer. One that this leader never met had it while agents came
    back."""
    job, settings, node = turn.job, turn.settings, turn.nodes.get(worker.node)
    if worker.device in job.takeover.unmet:
        since = max(
            node.since if node is not None else 0.0, job.takeover.patient_until - settings.reconnect_seconds
        )
        return turn.now - since >= settings.reconnect_seconds
    since = max(job.since, worker.halted_at if worker.halted is None else job.since)
    if turn.here(worker.node):  # in a step it comes to rest at its next collective, almost a step away maybe
        return turn.now - since >= settings.stand_seconds + 2 * job.steps.progress.slowest
    return turn.now - max(since, node.since if node is not None else since) >= settings.reconnect_seconds


def _go_back(turn: Transaction, lost: str, *, survivors: bool) -> None:
    """No plan's copies are whole: the newest older state is taken, or waited for. Before anything was trained,
    the job starts anew; else it ends, and says what is lost."""
    job = turn.job
    if turn.now < job.takeover.patient_until:
        return  # agents are still on their way to this leader, and with them what they keep
    source = older(turn, survivors=survivors)
    if ending(turn) and survivors and (source is None or (isinstance(source, Source) and source.plan is None)):
        ends_unsaved(turn, f"{job.losses.fence.reason if job.losses.fence is not None else 'a loss'}; {lost}")
        return
    if isinstance(source, Source):
        _go_on(turn, source)
        return
    if source is not None:
        if source:
            waits(turn, source)
        return
    if job.plan is None and not any(_copies(turn, worker) for worker in _owners(turn)):
        _begin_anew(turn)
        return
    assert job.losses.fence is not None
    why = job.losses.fence.reason
    stop(turn, f"{why}; state is lost: {lost}, and there is no snapshot or checkpoint to go back to")


def _begin_anew(turn: Transaction) -> None:
    """Has another first plan made, as nothing was trained, for the workers that live. Where there are none,
    torchruns start others, and are counted again."""
    # The plan that was made meanwhile was to go on from a fence that is no more: another is asked for.
    turn.set(proposal=None)
    turn.change("losses", fence=None)
    turn.change("planning", remedy=None, decided=None)
    turn.change("takeover", unmet={})
    workers = turn.job.workers.values()
    if not workers:
        turn.enter(JobPhase.ASSEMBLING, reason="")
        turn.change("start", joined=(), world_size=None, enough_since=None)
        return
    places = {place for worker in workers for place in (worker.node, worker.device)}
    joined = tuple(place for place in turn.job.start.joined if place in places)
    turn.enter(JobPhase.PLANNING)
    turn.change("start", joined=joined, world_size=len(workers))


def survey(turn: Transaction, nodes: Collection[str] | None = None) -> Source | str:
    """The plan that survivors (on these nodes) are farthest under and hold all of, snapshots of the same step
    counted where none is as far without; or what is lacking of the best."""
    job = turn.job
    assert job.losses.fence is not None
    assert job.spec is not None
    lacking = "no member that lives holds any copy"
    options = []
    for plan in job.candidates:
        bound = [worker for worker in job.bound(plan) if nodes is None or worker.node in nodes]
        held = {w.device: copy for w in bound for copy in _copies(turn, w) if copy.number == plan.number}
        if held:
            options.append((max(copy.step for copy in held.values()), plan.number, plan, held))
    best: Source | None = None
    for step, _, plan, held in sorted(options, key=lambda option: option[:2], reverse=True):
        if best is not None and best.recovery.step > step:
            break  # it has snapshots beside its copies, and these are of a step before
        vote = _vote(turn, step)
        sources = {device for device, copy in held.items() if copy.step == step}
        if vote is not None:
            sources |= {device for device, copy in held.items() if copy.behind and copy.step == step - 1}
        # The update of who was behind leaves it with new parameters only where it keeps their state.
        stale = {d for d in sources if held[d].stale or held[d].step < step}
        source = Source(
            plan=plan,
            recovery=Recovery(
                fence=job.losses.fence.number,
                step=step,
                sources={device: plan.binding[device] for device in plan.members if device in sources},
                vote=vote,
                stale=tuple(device for device in plan.members if device in stale)
                if isinstance(plan, Plan) and plan.state.zero
                else (),
            ),
        )
        lost = lost_boxes(job.spec.specs, plan, sources, stale)
        if not lost:
            return source
        lacking = f"{lost} is held by nobody who lives, of plan {plan.number}"
        holders = last_holders(job.spec.specs, plan, sources, stale)
        best = best or completed(turn, source, holders, nodes)
    return best or lacking


def _vote(turn: Transaction, step: int) -> Vote | None:
    """The outcome of the vote that led to `step`, where one that lives heard it."""
    heard = (
        answer.vote for worker in turn.job.workers.values() if (answer := _answer(turn, worker)) is not None
    )
    return next((vote for vote in heard if vote is not None and vote.step == step - 1), None)


def _answer(turn: Transaction, worker: Worker) -> StateReport | None:
    """Its report after the last fence; the state of an earlier report may be gone."""
    fence, standing = turn.job.losses.fence, worker.standing
    return standing if standing is not None and fence is not None and standing.fence == fence.number else None


def _copies(turn: Transaction, worker: Worker) -> tuple[Copy, ...]:
    answer = _answer(turn, worker)
    return answer.copies if answer is not None else ()


def _owners(turn: Transaction) -> list[Worker]:
    """The living workers that may hold a copy of some plan: those that this leader knows, and those that it has
    not met yet, of which it knows the names."""
    job = turn.job
    owners = {worker.device: worker for plan in job.candidates for worker in job.bound(plan)}
    unmet = (stranger(device, one) for device, one in job.takeover.unmet.items())
    return [*(worker for worker in owners.values() if not worker.left), *unmet]
