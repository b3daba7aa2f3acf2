"""The agent's decisions: who is let in, what goes up to the leader, what comes down to the workers.

Theory of operation. An agent stands between its node's clients (workers and torchruns, on a socket), the
leader (on a link that comes and goes), and the store (whose records are the only orders).

    up      a client's words go to the leader as `Up`. While the link is away, reports wait in a bounded
            buffer, and calls on the bootstrap store fail at their deadline.
    again   a link can break with words under way. So what must not be lost is kept (each client's opening,
            what it said of a switch, its end) and is said again on every new link; the leader takes a
            statement as often as it comes. What the store's records have outdated is forgotten.
    down    proposals, aborts and recorded plans are forwarded as read from the store, to the workers that
            they concern, unless their epoch is below the highest seen. The leader's own messages carry
            answers and hints alone: an order among them is dropped.

Invariant: an outcome that a client said, and that no record in the store has outdated, was sent on the
present link or will be on the next; and no order is forwarded whose epoch is below one seen before.

`step` is pure; TABLE lists, for each phase of the link, what each event does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elasticd_planner.plan import Plan

from elasticd.machines.agent_admission import refusal
from elasticd.machines.agent_state import (
    Call,
    ClearMember,
    Client,
    Dismiss,
    DoneRead,
    Effect,
    Ended,
    Event,
    Heard,
    LeaderRead,
    LinkDown,
    LinkUp,
    Note,
    Opened,
    Outcome,
    Phase,
    PlanRead,
    ProposalRead,
    Said,
    Send,
    SetMember,
    State,
    Stop,
    Tell,
    Tick,
)
from elasticd.messages import (
    Abort,
    AgentHello,
    AgentRejected,
    Finished,
    FromWorker,
    Goodbye,
    Hello,
    Join,
    Leave,
    Pace,
    Propose,
    Recorded,
    Report,
    StoreAnswer,
    StoreCall,
    ToLeader,
    ToWorker,
    Up,
    Welcome,
    WorkerLost,
)
from elasticd.records import MemberRecord

#: Reports kept while the link is away; the oldest go first.
MOST_REPORTS = 256
#: Ended workers whose last words are kept for a leader that may not have heard them.
MOST_DEPARTED = 256
#: Seconds that the leader has beyond a call's own deadline to answer it.
GRACE_SECONDS = 1.0
#: A client address of the leader's: whoever drives this device, now or later.
DEVICE_PREFIX = "device:"

Result = tuple[State, tuple[Effect, ...]]


class UnknownEvent(TypeError):
    """An event that the table lacks: an error of the program."""


def step(state: State, event: Event, now: float) -> Result:
    """What an event means. Raises UnknownEvent for one that may not come in this phase."""
    try:
        handler = TABLE[state.phase, type(event)]
    except KeyError:
        raise UnknownEvent(f"{type(event).__name__} may not come while {state.phase.value}") from None
    return handler(state, event, now)


# -- clients -----------------------------------------------------------------------------------------------


def _opened(state: State, event: Opened, now: float) -> Result:
    reason = refusal(state, event)
    if reason:
        return state, (Dismiss(client=event.client, reason=reason),)
    body = event.body
    if isinstance(body, Join):
        client = Client(id=event.client, opening=body)
        return _with_client(state, client), _up(state, client, body)
    device = f"{state.record.node}/{body.local_rank}"
    client = Client(id=event.client, opening=body, device=device, incarnation=event.incarnation)
    welcome = Welcome(
        device=device,
        incarnation=event.incarnation,
        address=state.record.address,
        pace=_pace(state, device),
    )
    member = MemberRecord(device=device, incarnation=event.incarnation, pid=event.pid)
    effects: list[Effect] = [
        SetMember(job=client.job, record=member),
        Send(client=client.id, body=welcome),
        *_up(state, client, body),
    ]
    proposal = state.proposals.get(client.job)
    if proposal is not None and proposal.status == "open" and proposal.epoch >= state.epoch:
        effects += _orders([client], (proposal.old, proposal.plan), Propose(proposal=proposal))
    return _with_client(state, client), tuple(effects)


def _said(state: State, event: Said, now: float) -> Result:
    client, body = state.clients.get(event.client), event.body
    if client is None:
        return state, ()
    if isinstance(body, Hello) or (isinstance(body, Join) and client.device):
        return state, (Note(text=f"{client.id} said hello twice; the second was not heard"),)
    if isinstance(body, StoreCall):
        call = Call(call=body, deadline=now + body.seconds + GRACE_SECONDS)
        return replace(state, calls={**state.calls, (client.id, body.id): call}), _up(state, client, body)
    if isinstance(body, Report):
        if state.phase is Phase.LINKED:
            return state, _up(state, client, body)
        return replace(state, reports=(*state.reports, _wrap(client, body))[-MOST_REPORTS:]), ()
    if isinstance(body, Join):  # A torchrun asks again after a local restart.
        client = replace(client, opening=body, goodbye=False)
    elif isinstance(body, Goodbye | Leave):
        client = replace(client, goodbye=True)
    elif body not in client.said:
        client = replace(client, said=(*client.said, body))
    return _with_client(state, client), _up(state, client, body)


def _ended(state: State, event: Ended, now: float) -> Result:
    client = state.clients.get(event.client)
    if client is None:
        return state, ()
    state = replace(
        state,
        clients={known: other for known, other in state.clients.items() if known != event.client},
        calls={key: call for key, call in state.calls.items() if key[0] != event.client},
    )
    if not client.device:
        # Whether or not it took its leave, the leader hears one. A new link does not speak of it at all.
        return state, () if client.goodbye else _up(state, client, Leave(job=client.job))
    client = replace(client, ended=event.how)
    if client.job not in state.done:
        state = replace(state, departed=(*state.departed, client)[-MOST_DEPARTED:])
    gone = ClearMember(job=client.job, device=client.device)
    return state, (gone, Tell(message=_lost(client))) if state.phase is Phase.LINKED else (gone,)


# -- the link ----------------------------------------------------------------------------------------------


def _link_up(state: State, event: LinkUp, now: float) -> Result:
    words: list[ToLeader] = [AgentHello(record=state.record)]
    for client in state.departed:
        # With its hello, for a leader that took over meanwhile has not met it.
        words += [_wrap(client, body) for body in (client.opening, *client.said)]
        words.append(_lost(client))
    for client in state.clients.values():
        if client.goodbye and not client.device:
            continue
        words.append(_wrap(client, client.opening))
        words += [_wrap(client, body) for body in client.said]
        if client.goodbye:
            words.append(_wrap(client, Goodbye()))
    words += [_wrap(state.clients[name], call.call) for (name, _), call in state.calls.items()]
    words += state.reports
    state = replace(state, phase=Phase.LINKED, reports=())
    return state, tuple(Tell(message=word) for word in words)


def _link_down(state: State, event: LinkDown, now: float) -> Result:
    # Whether an `add` was done cannot be known, and it must not be done twice. The rest is asked again.
    unknown = [key for key, call in state.calls.items() if call.call.op == "add"]
    effects = tuple(_failed(key, "the link to the leader broke before its answer came") for key in unknown)
    calls = {key: call for key, call in state.calls.items() if key not in unknown}
    return replace(state, phase=Phase.AWAY, calls=calls), effects


def _heard(state: State, event: Heard, now: float) -> Result:
    message = event.message
    if isinstance(message, AgentRejected):
        return replace(state, phase=Phase.OVER), (Stop(reason=message.reason),)
    body = message.body
    if isinstance(body, Propose | Abort | Recorded | Welcome):
        text = f"the leader sent {type(body).__name__} over the link, but only the store gives orders: dropped"
        return state, (Note(text=text),)
    if message.client.startswith(DEVICE_PREFIX):
        return _to_device(state, message.client.removeprefix(DEVICE_PREFIX), body)
    if message.client not in state.clients:
        return state, ()
    if isinstance(body, StoreAnswer):
        key = (message.client, body.id)
        if key not in state.calls:
            return state, ()
        state = replace(state, calls={other: call for other, call in state.calls.items() if other != key})
    return state, (Send(client=message.client, body=body),)


def _to_device(state: State, device: str, body: ToWorker) -> Result:
    if isinstance(body, Pace):
        # Kept, for it is the device that is slow: its next worker is slow too.
        state = replace(state, factors={**state.factors, device: body.factor})
        body = _pace(state, device) or Pace()
    worker = state.worker_of(device)
    return state, () if worker is None else (Send(client=worker.id, body=body),)


def _tick(state: State, event: Tick, now: float) -> Result:
    late = [key for key, call in state.calls.items() if call.deadline <= now]
    if not late:
        return state, ()
    calls = {key: call for key, call in state.calls.items() if key not in late}
    why = "no leader can be reached" if state.phase is Phase.AWAY else "the leader did not answer in time"
    return replace(state, calls=calls), tuple(_failed(key, why) for key in late)


# -- the store ---------------------------------------------------------------------------------------------


def _leader_read(state: State, event: LeaderRead, now: float) -> Result:
    return replace(state, epoch=max(state.epoch, event.epoch)), ()


def _proposal_read(state: State, event: ProposalRead, now: float) -> Result:
    job, proposal = event.job, event.proposal
    if proposal is None:
        return replace(state, proposals=_without(state.proposals, job)), ()
    if proposal.epoch < state.epoch:
        return state, (_stale(f"proposal {proposal.number}", job, proposal.epoch, state.epoch),)
    if state.proposals.get(job) == proposal:
        return state, ()
    order: Propose | Abort = Propose(proposal=proposal)
    if proposal.status == "aborted":
        order = Abort(number=proposal.number, reason=proposal.reason)
    effects = _orders(_workers(state, job), (proposal.old, proposal.plan), order)
    state = replace(state, epoch=proposal.epoch, proposals={**state.proposals, job: proposal})
    # A proposal opens only once all is settled of those before it.
    return _forget_before(state, job, proposal.number), tuple(effects)


def _plan_read(state: State, event: PlanRead, now: float) -> Result:
    job, record = event.job, event.record
    if record is None:
        return replace(state, plans=_without(state.plans, job)), ()
    if record.epoch < state.epoch:
        return state, (_stale(f"the record of plan {record.plan.number}", job, record.epoch, state.epoch),)
    before, proposal = state.plans.get(job), state.proposals.get(job)
    if before == record:
        return state, ()
    plans = [record.plan, before.plan if before is not None else None]
    if proposal is not None and proposal.number == record.plan.number:
        plans.append(proposal.old)
    effects = _orders(_workers(state, job), plans, Recorded(number=record.plan.number))
    state = replace(state, epoch=record.epoch, plans={**state.plans, job: record})
    return _forget_before(state, job, record.plan.number), tuple(effects)


def _done_read(state: State, event: DoneRead, now: float) -> Result:
    if not event.done:
        return replace(state, done=state.done - {event.job}), ()
    departed = tuple(client for client in state.departed if client.job != event.job)
    return replace(state, done=state.done | {event.job}, departed=departed), ()


# -- parts -------------------------------------------------------------------------------------------------


def _with_client(state: State, client: Client) -> State:
    return replace(state, clients={**state.clients, client.id: client})


def _workers(state: State, job: str) -> list[Client]:
    return [client for client in state.clients.values() if client.device and client.job == job]


def _wrap(client: Client, body: FromWorker) -> Up:
    return Up(client=client.id, job=client.job, device=client.device, incarnation=client.incarnation, body=body)


def _up(state: State, client: Client, body: FromWorker) -> tuple[Effect, ...]:
    """To the leader if the link stands; if not, what is kept in the state speaks on the next one."""
    return (Tell(message=_wrap(client, body)),) if state.phase is Phase.LINKED else ()


def _lost(client: Client) -> WorkerLost:
    return WorkerLost(
        job=client.job,
        device=client.device,
        incarnation=client.incarnation,
        clean=client.goodbye,
        how=client.ended,
    )


def _failed(key: tuple[str, int], why: str) -> Send:
    return Send(client=key[0], body=StoreAnswer(id=key[1], error=why))


def _pace(state: State, device: str) -> Pace | None:
    factor = state.factors.get(device, 1.0)
    if state.pace is not None:
        return Pace(forward=state.pace.forward, backward=state.pace.backward, factor=factor)
    return Pace(factor=factor) if factor != 1.0 else None


def _orders(workers: list[Client], plans: Sequence[Plan | None], body: ToWorker) -> list[Effect]:
    """`body` for those workers that one of the plans binds, this incarnation of theirs."""
    return [
        Send(client=worker.id, body=body)
        for worker in workers
        if any(plan is not None and _bound(plan, worker) for plan in plans)
    ]


def _bound(plan: Plan, worker: Client) -> bool:
    if worker.device not in plan.places:
        return False
    return plan.binding.get(worker.device, worker.incarnation) == worker.incarnation


def _stale(what: str, job: str, epoch: int, highest: int) -> Note:
    return Note(text=f"{what} of job {job!r} has epoch {epoch}, below {highest} that was seen: refused")


def _forget_before(state: State, job: str, number: int) -> State:
    """Drop what was said of numbers below, in this job: the store has shown that they are settled."""

    def current(body: Outcome) -> bool:
        return isinstance(body, Finished) or body.number >= number

    def shorten(client: Client) -> Client:
        if client.job != job or all(current(body) for body in client.said):
            return client
        return replace(client, said=tuple(body for body in client.said if current(body)))

    clients = {name: shorten(client) for name, client in state.clients.items()}
    return replace(state, clients=clients, departed=tuple(shorten(client) for client in state.departed))


def _without(records: Mapping[str, Any], job: str) -> Mapping[str, Any]:
    return {name: record for name, record in records.items() if name != job}


def _ignored(state: State, event: Event, now: float) -> Result:
    return state, ()


Handler = Callable[[State, Any, float], Result]
_ALWAYS: dict[type, Handler] = {
    Opened: _opened,
    Said: _said,
    Ended: _ended,
    LeaderRead: _leader_read,
    ProposalRead: _proposal_read,
    PlanRead: _plan_read,
    DoneRead: _done_read,
    Tick: _tick,
}
#: What each event does in each phase of the link.
TABLE: Mapping[tuple[Phase, type], Handler] = {
    **{(phase, event): handler for phase in (Phase.AWAY, Phase.LINKED) for event, handler in _ALWAYS.items()},
    (Phase.AWAY, LinkUp): _link_up,
    (Phase.LINKED, LinkDown): _link_down,
    (Phase.LINKED, Heard): _heard,
    **{(Phase.OVER, event): _ignored for event in (*_ALWAYS, LinkUp, LinkDown, Heard)},
}
