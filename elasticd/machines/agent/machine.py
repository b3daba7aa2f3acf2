"""The agent's decisions: who is let in, what goes up to the leader, what comes down to the workers.

Theory of operation. An agent stands between its node's clients (workers and torchruns, on a socket), the
leader (on a link that comes and goes), and the store (whose records are the only orders).

    up      a client's words go to the leader as `FromClient`. While the link is away, reports wait in a bounded
            buffer, and calls on the bootstrap store fail at their deadline.
    again   a link can break with words under way. So what must not be lost is kept (each client's opening,
            what it said of a switch, its end) and is said again on every new link; the leader takes a
            statement as often as it comes. What the store's records have outdated is forgotten.
    down    proposals, aborts, recorded plans and the job's end are forwarded as read from the store, to the
            workers that they concern, unless their epoch is below the highest seen (`store_orders`). The
            leader's own messages carry answers and hints alone: an order among them is dropped.

Invariant: an outcome that a client said, and that no record in the store has outdated, was sent on the
present link or will be on the next; and no order is forwarded whose epoch is below one seen before.

`step` is pure; TABLE lists, for each phase of the link, what each event does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from elasticd.codec.decoding import shown
from elasticd.codec.message import protocol_refusal
from elasticd.machines.agent import store_orders
from elasticd.machines.agent.state import (
    AgentDrained,
    AgentNote,
    AgentPhase,
    AgentSend,
    AgentState,
    AgentTell,
    AgentTick,
    Call,
    CheckpointsRead,
    ClearMember,
    Client,
    Dismiss,
    DoneRead,
    Effect,
    Ended,
    Event,
    FenceRead,
    HangUp,
    Heard,
    LeaderRead,
    LinkDown,
    LinkUp,
    Opened,
    PlanRead,
    ProposalRead,
    Pulse,
    Result,
    Said,
    SetMember,
    SetNode,
    Stood,
    Stop,
    UnknownEvent,
)
from elasticd.machines.agent.store_orders import (
    checkpoints_read,
    done_read,
    fence_read,
    leader_read,
    plan_read,
    proposal_read,
)
from elasticd.names import name_refusal
from elasticd.records import MemberRecord
from elasticd.version import __version__
from elasticd.wire.coordinator import (
    DEVICE_PREFIX,
    AgentHello,
    AgentRejected,
    FromAgent,
    FromClient,
    Frozen,
    PassedReport,
    WorkerLost,
)
from elasticd.wire.main_thread import Halted
from elasticd.wire.rendezvous import Join, Leave
from elasticd.wire.worker import (
    Abort,
    Closed,
    EmulatedSpeed,
    Fenced,
    FromWorker,
    Goodbye,
    Hello,
    Probe,
    Probed,
    Propose,
    Published,
    Recorded,
    Rehearsed,
    Rejected,
    Report,
    Shutdown,
    StoreAnswer,
    StoreCall,
    ToWorker,
    Welcome,
)

#: Reports kept while the link is away; the oldest go first.
MOST_REPORTS = 256
#: Calls of a process on the bootstrap store that wait for their answers. A worker has a few threads that ask.
MOST_CALLS = 64
#: Words of a process that a new leader is to hear. The store's records outdate them one by one.
MOST_SAID = 64
#: Ended workers whose last words are kept for a leader that may not have heard them.
MOST_DEPARTED = 256
#: Seconds that the leader has beyond a call's own deadline to answer it.
GRACE_SECONDS = 1.0
#: What is never heard over the link, whoever it is for. A worker hears of its job's end from the store, too.
_ORDERS = (Propose, Abort, Fenced, Recorded, Published, Welcome, Shutdown)


def step(state: AgentState, event: Event, now: float) -> Result:
    """What an event means. Raises UnknownEvent for one that may not come in this phase."""
    try:
        handler = TABLE[state.phase, type(event)]
    except KeyError:
        raise UnknownEvent(f"{type(event).__name__} may not come while {state.phase.value}") from None
    return handler(state, event, now)


def failed(state: AgentState, event: Event, error: Exception, now: float) -> Result:
    """`step` raised this, which is a defect of elasticd: the state before is kept, and the agent goes on.

    What a client or the leader says costs itself. Any other event is taken without those clients that make it
    fail: they are let go, as if they had ended. If it fails without any client, it costs the workers of its job
    where it is an order of the store, and the connection where it is a new link; a tick costs nothing.
    """
    what = f"elasticd failed on {type(event).__name__} ({type(error).__name__}: {shown(str(error))})"
    if isinstance(event, Opened):
        return state, (Dismiss(client=event.client, reason=f"{what}: please report it with the agent's log"),)
    if isinstance(event, Ended):
        return _drop(state, event.client, event.how)
    if isinstance(event, Said):
        if isinstance(event.body, StoreCall):
            return state, (_failed((event.client, event.body.id), what),)
        return state, ()
    if isinstance(event, Pulse | Stood | Heard | AgentDrained | LeaderRead):
        return state, ()
    if isinstance(event, LinkDown):
        return replace(state, phase=AgentPhase.AWAY), ()
    gone = _culprits(state, event, now)
    effects: list[Effect] = []
    for client in gone:
        state, ended = _let_go(state, client, what)
        effects += ended
    if gone:
        try:
            state, more = step(state, event, now)
            return state, (*effects, *more)
        except Exception:
            what = f"{what}, and again without {', '.join(gone)}"
    if isinstance(event, LinkUp):
        try:  # without what is kept of those that are gone
            state, more = step(replace(state, departed=(), reports=()), event, now)
            effects += more
        except Exception:
            effects.append(HangUp(reason=what))
    elif not isinstance(event, AgentTick):
        for client in [each.id for each in state.clients.values() if each.device and each.job == event.job]:
            state, ended = _let_go(state, client, what)
            effects += ended
    return state, tuple(effects)


def _culprits(state: AgentState, event: Event, now: float) -> list[str]:
    """The clients with each of which alone the event fails; none where it fails without any."""

    def fails(*clients: Client) -> bool:
        names = {client.id: client for client in clients}
        calls = {key: call for key, call in state.calls.items() if key[0] in names}
        try:
            step(replace(state, clients=names, calls=calls), event, now)
        except Exception:
            return True
        return False

    return [] if fails() else [client.id for client in state.clients.values() if fails(client)]


def _let_go(state: AgentState, name: str, what: str) -> Result:
    """A client hears why, and counts as gone."""
    state, effects = _drop(state, name, what)
    return state, (Dismiss(client=name, reason=f"{what}: please report it with the agent's log"), *effects)


def _drop(state: AgentState, name: str, how: str) -> Result:
    """What `_ended` does, where that fails: nobody hears more of the client than that it is gone."""
    client = state.clients.get(name)
    if client is None:
        return state, ()
    state = _without(state, name)
    if not client.device:
        return state, _up(state, client, Leave(job=client.job))
    client = replace(client, said=(), ended=how)
    if client.job not in state.done:
        state = replace(state, departed=(*state.departed, client)[-MOST_DEPARTED:])
    gone = ClearMember(job=client.job, device=client.device)
    return state, (gone, AgentTell(message=_lost(client))) if state.phase is AgentPhase.LINKED else (gone,)


# -- clients -----------------------------------------------------------------------------------------------


def refusal(state: AgentState, event: Opened) -> str:
    """Why this worker or torchrun is not let in, with the remedy; empty for one that is."""
    body, node = event.body, state.record.node
    if apart := protocol_refusal("this process's hello to its agent", body.version, body.release):
        return apart
    if body.pid != event.pid:
        return (
            f"process {event.pid} says that it is {body.pid}: agent and trainer must share one PID namespace "
            "(with containers, run the agent in the same one or share the host's)"
        )
    # A job that runs already, let in by release 0.1, may be called otherwise.
    runs = (isinstance(body, Hello) and body.incarnation) or body.job in state.plans
    if not runs and (why := name_refusal("the job's name (--rdzv-id)", body.job)):
        return why
    if isinstance(body, Join):
        return ""
    devices = len(state.record.devices)
    if not 0 <= body.local_rank < devices:
        return (
            f"local rank {body.local_rank} has no device: node {node!r} has {devices}; "
            f"start torchrun with --nproc-per-node={devices} at most, or 'elasticd run' with --devices "
            f"{devices} at most, and with GPUs 0 to {devices - 1} in $CUDA_VISIBLE_DEVICES"
        )
    other = state.worker_of(f"{node}/{body.local_rank}")
    # The same process may come as a new incarnation.
    if other is not None and (other.opening.pid, other.job) != (event.pid, body.job):
        return (
            f"device {other.device} is driven by process {other.opening.pid} of job {other.job!r}: a device "
            "belongs to one job at a time; end that job first, or use another node"
        )
    return ""


def _opened(state: AgentState, event: Opened, now: float) -> Result:
    reason = refusal(state, event)
    if reason:
        return state, (Dismiss(client=event.client, reason=reason),)
    body = event.body
    if isinstance(body, Join):
        client = Client(id=event.client, opening=body)
        return _with_client(state, client), _up(state, client, body)
    device = f"{state.record.node}/{body.local_rank}"
    incarnation = body.incarnation or event.incarnation
    before = state.worker_of(device)
    ended: tuple[Effect, ...] = ()
    if before is not None:
        state, ended = _ended(state, Ended(client=before.id, how="took a new incarnation"), now)
    client = Client(id=event.client, opening=body, device=device, incarnation=incarnation)
    welcome = Welcome(
        device=device,
        incarnation=incarnation,
        address=state.record.address,
        pace=_pace(state, device),
    )
    member = MemberRecord(device=device, incarnation=incarnation, pid=event.pid)
    effects = (
        *ended,
        SetMember(job=client.job, record=member),
        AgentSend(client=client.id, body=welcome),
        *_up(state, client, body),
    )
    state, asked = _probe_due(_with_client(state, client), now)
    return state, (*effects, *store_orders.standing(state, client), *asked)


def _said(state: AgentState, event: Said, now: float) -> Result:
    client, body = state.clients.get(event.client), event.body
    if client is None:
        return state, ()
    if isinstance(body, Hello) or (isinstance(body, Join) and client.device):
        return state, (AgentNote(text=f"{client.id} said hello twice; the second was not heard"),)
    if isinstance(body, StoreCall):
        mine = sum(1 for asker, _ in state.calls if asker == client.id)
        if mine >= MOST_CALLS and (client.id, body.id) not in state.calls:
            return state, (
                _failed((client.id, body.id), f"{mine} calls of this process wait for answers already"),
            )
        call = Call(call=body, deadline=now + body.seconds + GRACE_SECONDS)
        return replace(state, calls={**state.calls, (client.id, body.id): call}), _up(state, client, body)
    if isinstance(body, Report | msgspec.Raw):
        if state.phase is AgentPhase.LINKED:
            return state, _up(state, client, body)
        return replace(state, reports=(*state.reports, _wrap(client, body))[-MOST_REPORTS:]), ()
    if isinstance(body, Join):  # A torchrun asks again after a local restart.
        if body.job != client.job:
            why = f"this torchrun takes part in job {client.job}: start another for job {shown(body.job)}"
            return state, (AgentSend(client=client.id, body=Rejected(reason=why)),)
        client = replace(client, opening=body, goodbye=False)
    elif isinstance(body, Goodbye | Leave):
        farewell = body.reason if isinstance(body, Goodbye) else ""
        client = replace(client, goodbye=True, farewell=farewell)
    elif isinstance(body, Probed):
        client = replace(client, probed=body)
    elif isinstance(body, Rehearsed):  # a leader that did not ask has no use for it
        return state, _up(state, client, body)
    elif body not in client.said:
        client = replace(client, said=(*client.said, body)[-MOST_SAID:])
    return _with_client(state, client), _up(state, client, body)


def _pulse(state: AgentState, event: Pulse, now: float) -> Result:
    client = state.clients.get(event.client)
    if client is None or not client.device:
        return state, ()
    client = replace(client, frozen=event.how)
    told = (AgentTell(message=_frozen(client)),) if state.phase is AgentPhase.LINKED else ()
    return _with_client(state, client), told


def _stood(state: AgentState, event: Stood, now: float) -> Result:
    client = state.clients.get(event.client)
    if client is None or not client.device or (event.halted is None and client.halted is None):
        return state, ()
    client = replace(client, halted=event.halted, halted_at=now)
    told = (AgentTell(message=_halted(client, now)),) if state.phase is AgentPhase.LINKED else ()
    return _with_client(state, client), told


def _ended(state: AgentState, event: Ended, now: float) -> Result:
    client = state.clients.get(event.client)
    if client is None:
        return state, ()
    state = _without(state, event.client)
    if not client.device:
        # Whether or not it took its leave, the leader hears one. A new link does not speak of it at all.
        return state, () if client.goodbye else _up(state, client, Leave(job=client.job))
    client = replace(client, ended=event.how)
    if client.job not in state.done:
        state = replace(state, departed=(*state.departed, client)[-MOST_DEPARTED:])
    gone = ClearMember(job=client.job, device=client.device)
    return state, (gone, AgentTell(message=_lost(client))) if state.phase is AgentPhase.LINKED else (gone,)


# -- the link ----------------------------------------------------------------------------------------------


def _link_up(state: AgentState, event: LinkUp, now: float) -> Result:
    words: list[FromAgent] = [AgentHello(record=state.record, release=__version__)]
    # Torchruns come first: a job that has not begun takes no worker without its torchrun.
    torchruns = (client for client in state.clients.values() if not client.device and not client.goodbye)
    words += [_wrap(client, client.opening) for client in torchruns]
    for client in state.departed:
        # With its hello, for a leader that took over meanwhile has not met it; but for one whose device has
        # another worker by now: that hello would be taken for the newer.
        follower = state.worker_of(client.device)
        hello = (client.opening,) if follower is None else ()
        words += [_wrap(client, body) for body in (*hello, *client.said)]
        words.append(_lost(client))
    for client in state.clients.values():
        if not client.device:
            continue
        words.append(_wrap(client, client.opening))
        words += [_wrap(client, body) for body in client.said]
        if client.probed is not None:
            words.append(_wrap(client, client.probed))
        if client.frozen:
            words.append(_frozen(client))
        if client.halted is not None:
            words.append(_halted(client, now))
        if client.goodbye:
            words.append(_wrap(client, Goodbye(reason=client.farewell)))
    words += [_wrap(state.clients[name], call.call) for (name, _), call in state.calls.items()]
    words += state.reports
    state = replace(state, phase=AgentPhase.LINKED, reports=())
    return state, tuple(AgentTell(message=word) for word in words)


def _link_down(state: AgentState, event: LinkDown, now: float) -> Result:
    # Whether an `add` was done cannot be known, and it must not be done twice. The rest is asked again.
    unknown = [key for key, call in state.calls.items() if call.call.op == "add"]
    effects = tuple(_failed(key, "the link to the leader broke before its answer came") for key in unknown)
    calls = {key: call for key, call in state.calls.items() if key not in unknown}
    return replace(state, phase=AgentPhase.AWAY, calls=calls), effects


def _heard(state: AgentState, event: Heard, now: float) -> Result:
    message = event.message
    if isinstance(message, AgentRejected):
        return replace(state, phase=AgentPhase.OVER), (Stop(reason=message.reason),)
    body, to = message.body, state.clients.get(message.client)
    to_worker = message.client.startswith(DEVICE_PREFIX) or (to is not None and to.device != "")
    if isinstance(body, _ORDERS) or (to_worker and isinstance(body, Closed)):
        text = f"the leader sent {type(body).__name__} over the link, but only the store gives orders: dropped"
        return state, (AgentNote(text=text),)
    if message.client.startswith(DEVICE_PREFIX):
        return _to_device(state, message.client.removeprefix(DEVICE_PREFIX), body)
    if to is None:
        return state, ()
    if isinstance(body, StoreAnswer):
        key = (message.client, body.id)
        if key not in state.calls:
            return state, ()
        state = replace(state, calls={other: call for other, call in state.calls.items() if other != key})
    return state, (AgentSend(client=message.client, body=body),)


def _drained(state: AgentState, event: AgentDrained, now: float) -> Result:
    record = msgspec.structs.replace(state.record, draining=event.on)
    if record == state.record:
        return state, ()
    told = (
        (AgentTell(message=AgentHello(record=record, release=__version__)),)
        if state.phase is AgentPhase.LINKED
        else ()
    )
    return replace(state, record=record), (SetNode(record=record), *told)


def _to_device(state: AgentState, device: str, body: ToWorker) -> Result:
    if isinstance(body, EmulatedSpeed):
        # Kept, for it is the device that is slow: its next worker is slow too.
        state = replace(state, factors={**state.factors, device: body.factor})
        body = _pace(state, device) or EmulatedSpeed()
    worker = state.worker_of(device)
    return state, () if worker is None else (AgentSend(client=worker.id, body=body),)


def _tick(state: AgentState, event: AgentTick, now: float) -> Result:
    state, asked = _probe_due(state, now)
    late = [key for key, call in state.calls.items() if call.deadline <= now]
    if not late:
        return state, asked
    calls = {key: call for key, call in state.calls.items() if key not in late}
    why = "no leader can be reached" if state.phase is AgentPhase.AWAY else "the leader did not answer in time"
    return replace(state, calls=calls), (*asked, *(_failed(key, why) for key in late))


def _probe_due(state: AgentState, now: float) -> tuple[AgentState, tuple[AgentSend, ...]]:
    """Asks workers to probe their devices: those that stand by, never one that a plan has work for.

    A worker is asked as soon as it is there, before any plan can have a place for it, and then again and again
    while no plan, in force or open, is bound to it. It has the last word: one that computes does not answer.
    """
    asked = [client for client in state.clients.values() if _stands_by(state, client, now)]
    if not asked:
        return state, ()
    clients = {**state.clients, **{client.id: replace(client, asked=now) for client in asked}}
    return replace(state, clients=clients), tuple(AgentSend(client=client.id, body=Probe()) for client in asked)


def _stands_by(state: AgentState, client: Client, now: float) -> bool:
    if not isinstance(client.opening, Hello) or not client.opening.probes or client.frozen or client.goodbye:
        return False
    if client.asked is not None and not 0 < state.probe_seconds <= now - client.asked:
        return False
    record, proposal = state.plans.get(client.job), state.proposals.get(client.job)
    plans = (
        record.plan if record is not None else None,
        proposal.plan if proposal is not None and proposal.status == "open" else None,
    )
    return not any(plan is not None and plan.binding.get(client.device) == client.incarnation for plan in plans)


# -- parts -------------------------------------------------------------------------------------------------


def _with_client(state: AgentState, client: Client) -> AgentState:
    return replace(state, clients={**state.clients, client.id: client})


def _without(state: AgentState, name: str) -> AgentState:
    return replace(
        state,
        clients={known: other for known, other in state.clients.items() if known != name},
        calls={key: call for key, call in state.calls.items() if key[0] != name},
    )


def _wrap(client: Client, body: FromWorker | msgspec.Raw) -> FromClient | PassedReport:
    name, job, device, incarnation = client.id, client.job, client.device, client.incarnation
    if isinstance(body, msgspec.Raw):
        return PassedReport(client=name, job=job, device=device, incarnation=incarnation, body=body)
    return FromClient(client=name, job=job, device=device, incarnation=incarnation, body=body)


def _up(state: AgentState, client: Client, body: FromWorker | msgspec.Raw) -> tuple[Effect, ...]:
    """To the leader if the link stands; if not, what is kept in the state speaks on the next one."""
    return (AgentTell(message=_wrap(client, body)),) if state.phase is AgentPhase.LINKED else ()


def _frozen(client: Client) -> Frozen:
    return Frozen(job=client.job, device=client.device, incarnation=client.incarnation, how=client.frozen)


def _halted(client: Client, now: float) -> Halted:
    known = client.halted or Halted(job="", device="", incarnation="")
    return msgspec.structs.replace(
        known,
        job=client.job,
        device=client.device,
        incarnation=client.incarnation,
        seconds=known.seconds + now - client.halted_at,
    )


def _lost(client: Client) -> WorkerLost:
    return WorkerLost(
        job=client.job,
        device=client.device,
        incarnation=client.incarnation,
        clean=client.goodbye,
        how=client.farewell or client.ended,
    )


def _failed(key: tuple[str, int], why: str) -> AgentSend:
    return AgentSend(client=key[0], body=StoreAnswer(id=key[1], error=why))


def _pace(state: AgentState, device: str) -> EmulatedSpeed | None:
    factor = state.factors.get(device, 1.0)
    if state.pace is not None:
        return EmulatedSpeed(forward=state.pace.forward, backward=state.pace.backward, factor=factor)
    return EmulatedSpeed(factor=factor) if factor != 1.0 else None


def _ignored(state: AgentState, event: Event, now: float) -> Result:
    return state, ()


Handler = Callable[[AgentState, Any, float], Result]
_ALWAYS: dict[type, Handler] = {
    Opened: _opened,
    Said: _said,
    Ended: _ended,
    AgentDrained: _drained,
    Pulse: _pulse,
    Stood: _stood,
    LeaderRead: leader_read,
    ProposalRead: proposal_read,
    PlanRead: plan_read,
    FenceRead: fence_read,
    DoneRead: done_read,
    CheckpointsRead: checkpoints_read,
    AgentTick: _tick,
}
#: What each event does in each phase of the link.
TABLE: Mapping[tuple[AgentPhase, type], Handler] = {
    **{
        (phase, event): handler
        for phase in (AgentPhase.AWAY, AgentPhase.LINKED)
        for event, handler in _ALWAYS.items()
    },
    (AgentPhase.AWAY, LinkUp): _link_up,
    (AgentPhase.LINKED, LinkDown): _link_down,
    (AgentPhase.LINKED, Heard): _heard,
    **{(AgentPhase.OVER, event): _ignored for event in (*_ALWAYS, LinkUp, LinkDown, Heard)},
}
