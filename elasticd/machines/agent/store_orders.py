"""What an agent makes of the store's records: the orders for its workers, and what they outdate.

A record reaches the workers that it concerns, once, unless a leader wrote it after it was replaced: such a one
gives no orders. An epoch is a revision of the store too, that of its leader's key. So a record with an epoch
below the highest seen is obeyed if it was written before that revision: it holds still, whoever leads now, and
an agent that reads all anew learns what those know that watched. One written after it is refused. (No leader
can write one, for its writes compare its key: this is the second lock.) The highest epoch outlasts the agent,
whose daemon keeps it on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elasticd_planner.spec.plan import Plan

from elasticd.machines.agent.state import (
    AgentNote,
    AgentSend,
    AgentState,
    CheckpointsRead,
    Client,
    DoneRead,
    Effect,
    FenceRead,
    LeaderRead,
    PlanRead,
    ProposalRead,
    Result,
)
from elasticd.records import DoneRecord, Fence, Proposal
from elasticd.wire.worker import (
    Abort,
    Closed,
    DrainNotice,
    Fenced,
    Finished,
    Hello,
    PeersLost,
    Propose,
    Published,
    Raised,
    Recorded,
    Saved,
    Shutdown,
    Statement,
    StateReport,
    ToWorker,
)


def leader_read(state: AgentState, event: LeaderRead, now: float) -> Result:
    """A leader's epoch: orders of a lower one are refused from now on."""
    return replace(state, epoch=max(state.epoch, event.epoch)), ()


def proposal_read(state: AgentState, event: ProposalRead, now: float) -> Result:
    """A proposal, or its abort, goes to the workers of its old and its new plan."""
    job, proposal = event.job, event.proposal
    if proposal is None:
        return replace(state, proposals=_without(state.proposals, job)), ()
    if _usurped(state, proposal.epoch, event.revision):
        return state, (_stale(f"proposal {proposal.number}", job, proposal.epoch, state.epoch),)
    if state.proposals.get(job) == proposal:
        return state, ()
    effects = _orders(_workers(state, job), _bindings(proposal), _order(proposal))
    epoch = max(state.epoch, proposal.epoch)
    state = replace(state, epoch=epoch, proposals={**state.proposals, job: proposal})
    # A proposal opens only once all is settled of those before it.
    return _forget_before(state, job, proposal.number), effects


def plan_read(state: AgentState, event: PlanRead, now: float) -> Result:
    """A recorded plan: members hear that it is recorded, and words that it outdates are forgotten."""
    job, record = event.job, event.record
    if record is None:
        return replace(state, plans=_without(state.plans, job)), ()
    if _usurped(state, record.epoch, event.revision):
        return state, (_stale(f"the record of plan {record.plan.number}", job, record.epoch, state.epoch),)
    before, proposal = state.plans.get(job), state.proposals.get(job)
    if before == record:
        return state, ()
    recorded = Recorded(number=record.plan.number)
    fence = state.fences.get(job)
    settled = (
        fence is not None and before is not None and before.plan.number < fence.number < record.plan.number
    )
    if before is None or settled:
        # All stood still, and the recovery may have gone on without some: they stand by. Or this agent has just
        # begun to read, and does not know what its workers missed.
        effects: tuple[Effect, ...] = tuple(
            AgentSend(client=worker.id, body=recorded) for worker in _workers(state, job)
        )
    else:
        plans = [record.plan, before.plan]
        if proposal is not None and proposal.number == record.plan.number and proposal.old is not None:
            plans.append(proposal.old)
        effects = _orders(_workers(state, job), [_binding(plan) for plan in plans], recorded)
    state = replace(state, epoch=max(state.epoch, record.epoch), plans={**state.plans, job: record})
    return _forget_before(state, job, record.plan.number), effects


def fence_read(state: AgentState, event: FenceRead, now: float) -> Result:
    """To all workers of the job: who is fenced off learns that it is."""
    job, fence = event.job, event.record
    if fence is None:
        return replace(state, fences=_without(state.fences, job)), ()
    if state.fences.get(job) == fence:
        return state, ()
    if _usurped(state, fence.epoch, event.revision):
        return state, (_stale(f"fence {fence.number}", job, fence.epoch, state.epoch),)
    effects = tuple(_fenced(worker, fence) for worker in _workers(state, job))
    epoch = max(state.epoch, fence.epoch)
    return replace(state, epoch=epoch, fences={**state.fences, job: fence}), effects


def _fenced(worker: Client, fence: Fence) -> AgentSend:
    body = Fenced(number=fence.number, reason=fence.reason, evicted=_evicts(fence, worker))
    return AgentSend(client=worker.id, body=body)


def _evicts(fence: Fence, worker: Client) -> bool:
    return fence.gone.get(worker.device) == worker.incarnation


def done_read(state: AgentState, event: DoneRead, now: float) -> Result:
    """A job's end goes to all its workers."""
    job, record = event.job, event.record
    if record is None:
        return replace(state, done=_without(state.done, job)), ()
    if _usurped(state, record.epoch, event.revision):
        return state, (_stale("the end", job, record.epoch, state.epoch),)
    before = state.done.get(job)
    departed = tuple(client for client in state.departed if client.job != job)
    epoch = max(state.epoch, record.epoch)
    state = replace(state, epoch=epoch, done={**state.done, job: record}, departed=departed)
    if before is not None and (before.step, before.reason) == (record.step, record.reason):
        return state, ()  # a new leader said it again, for those that had refused the old one's word
    return state, _end(record, _workers(state, job))


def checkpoints_read(state: AgentState, event: CheckpointsRead, now: float) -> Result:
    """Tells the workers that wait for it that a checkpoint of theirs is published, and then forgets that they
    said so; a leader that never heard them writes nothing, and hears them again."""
    job, record = event.job, event.record
    if record is None:
        return state, ()
    if _usurped(state, record.epoch, event.revision):
        return state, (_stale("the list of checkpoints", job, record.epoch, state.epoch),)
    names = {checkpoint.name for checkpoint in record.published}
    clients, effects = dict(state.clients), []
    for client in _workers(state, job):
        waited = [body for body in client.said if isinstance(body, Saved) and body.name in names]
        if waited:
            effects += [AgentSend(client=client.id, body=Published(name=body.name)) for body in waited]
            said = tuple(body for body in client.said if body not in waited)
            clients[client.id] = replace(client, said=said)
    return replace(state, epoch=max(state.epoch, record.epoch), clients=clients), tuple(effects)


def standing(state: AgentState, worker: Client) -> tuple[Effect, ...]:
    """The orders that hold already for a worker that comes now, for the first time or again: to an agent that
    was started anew, and may have missed what the one before it did not read."""
    done, proposal = state.done.get(worker.job), state.proposals.get(worker.job)
    if done is not None:
        return _end(done, [worker])
    fence, plan = state.fences.get(worker.job), state.plans.get(worker.job)
    missed: tuple[Effect, ...] = ()
    if fence is not None and (plan is None or plan.plan.number < fence.number or _evicts(fence, worker)):
        missed = (_fenced(worker, fence),)
    elif plan is not None and _returns(worker) and plan.plan.binding.get(worker.device) != worker.incarnation:
        # It may stand still since it lost the others, or keep a copy for them: they went on without it.
        over = (_fenced(worker, fence),) if fence is not None else ()
        missed = (*over, AgentSend(client=worker.id, body=Recorded(number=plan.plan.number)))
    if proposal is None or (fence is not None and fence.number > proposal.number):
        return missed
    return missed + _orders([worker], _bindings(proposal), _order(proposal))


def _returns(worker: Client) -> bool:
    """Whether it comes again as what it was."""
    return isinstance(worker.opening, Hello) and worker.opening.incarnation == worker.incarnation


def _order(proposal: Proposal) -> Propose | Abort:
    if proposal.status == "aborted":
        return Abort(number=proposal.number, reason=proposal.reason)
    return Propose(proposal=proposal)


def _end(record: DoneRecord, workers: Iterable[Client]) -> tuple[Effect, ...]:
    """To all: a job that cannot go on ends for them. One that finished ends by itself for those who made the
    last step; whoever stood by, or lost the others before it heard the last vote, learns of it from here."""
    body: ToWorker = Closed(reason=f"the job finished at step {record.step}")
    if record.reason:
        body = Shutdown(reason=record.reason)
    return tuple(AgentSend(client=worker.id, body=body) for worker in workers)


def _workers(state: AgentState, job: str) -> list[Client]:
    return [client for client in state.clients.values() if client.device and client.job == job]


def _orders(workers: Iterable[Client], bound: Sequence[_Binding], body: ToWorker) -> tuple[Effect, ...]:
    """`body` for those workers that one of these names, this incarnation of theirs."""
    return tuple(
        AgentSend(client=worker.id, body=body)
        for worker in workers
        if any(binding.get(worker.device) in ("", worker.incarnation) for binding in bound)
    )


#: Device to incarnation; an empty one is any.
_Binding = Mapping[str, str]


def _binding(plan: Plan) -> _Binding:
    return {device: plan.binding.get(device, "") for device in plan.members}


def _bindings(proposal: Proposal) -> list[_Binding]:
    """Whom a proposal concerns: the members of both plans. A recovery concerns those of the new one, and of the
    others those alone whose copies or snapshots it goes on from."""
    if proposal.recovery is not None:
        return [_binding(proposal.plan), proposal.recovery.sources]
    return [_binding(plan) for plan in (proposal.plan, proposal.old) if plan is not None]


def _usurped(state: AgentState, epoch: int, revision: int) -> bool:
    """Whether the leader of this epoch wrote after the newest one that was seen had taken its place."""
    return epoch < state.epoch <= revision


def _stale(what: str, job: str, epoch: int, highest: int) -> AgentNote:
    why = f"was written under epoch {epoch}, when {highest} led already"
    return AgentNote(text=f"{what} of job {job!r} {why}: refused")


def _forget_before(state: AgentState, job: str, number: int) -> AgentState:
    """Drop what was said of numbers below, in this job: the store has shown that they are settled."""

    def current(body: Statement) -> bool:
        if isinstance(body, Finished | Saved | Raised | DrainNotice):
            return True
        if isinstance(body, PeersLost):
            return False
        return (body.fence if isinstance(body, StateReport) else body.number) >= number

    def shorten(client: Client) -> Client:
        if client.job != job or all(current(body) for body in client.said):
            return client
        return replace(client, said=tuple(body for body in client.said if current(body)))

    clients = {name: shorten(client) for name, client in state.clients.items()}
    return replace(state, clients=clients, departed=tuple(shorten(client) for client in state.departed))


def _without(records: Mapping[str, Any], job: str) -> Mapping[str, Any]:
    return {name: record for name, record in records.items() if name != job}
