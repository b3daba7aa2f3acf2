"""The agent's decisions: who is let in, what goes up to the leader, what comes down to the workers.

Theory of operation. An agent stands between its node's clients (workers and torchruns, on a socket), the
leader (on a link that comes and goes), and the store (whose records are the only orders).

    up      a client's words go to the leader as `FromClient`. While the link is away, reports wait in a bounded
            buffer, and calls on the bootstrap store fail at their deadline.
    again   a link can break with words under way. So what must not be lost is kept (each client's opening,
            what it said of a switch, its end) and is said again on every new link; the leader takes a
            statement as often as it comes. What the store's records have outdated is forgotten.
    down    proposals, aborts, recorded plans and the job's end are forwarded as read from the store, to the
            workers that they concern, unless their epoch is below the highest seen (see below). The
            leader's own messages carry answers and hints alone: an order among them is dropped.

A record reaches the workers that it concerns, once, unless a leader wrote it after it was replaced: such a one
gives no orders. An epoch is a revision of the store too, that of its leader's key. So a record with an epoch
below the highest seen is obeyed if it was written before that revision: it holds still, whoever leads now, and
an agent that reads all anew learns what those know that watched. One written after it is refused. (No leader
can write one, for its writes compare its key: this is the second lock.) The highest epoch outlasts the agent,
whose daemon keeps it on disk.

Invariant: an outcome that a client said, and that no record in the store has outdated, was sent on the
present link or will be on the next; and no order is forwarded whose epoch is below one seen before.

`step` is pure; TABLE lists, for each phase of the link, what each event does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from elasticd_planner.readable import counted
from elasticd_planner.spec.mesh import JobPlan

from elasticd.codec.decoding import shown
from elasticd.codec.message import protocol_refusal
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
    DevicesHeld,
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
from elasticd.names import name_refusal
from elasticd.records import DoneRecord, Fence, MemberRecord, ProposalHead, StoredProposal
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
    DrainNotice,
    EmulatedSpeed,
    Fenced,
    Finished,
    FromItsAgent,
    FromWorker,
    Goodbye,
    Hello,
    PassedProposal,
    PeersLost,
    Probe,
    Probed,
    Propose,
    Published,
    Raised,
    Recorded,
    Rehearsed,
    Rejected,
    Report,
    RunningPlan,
    Saved,
    SaveFailed,
    Shutdown,
    Statement,
    StateReport,
    StoreAnswer,
    StoreCall,
    ToWorker,
    Welcome,
    WorkerDevice,
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
    """Returns the state and the effects after an event. Raises UnknownEvent for one that may not come in this
    phase."""
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
    if (handler := FAILED.get(type(event))) is not None:
        return handler(state, event, what)
    gone = _culprits(state, event, now)
    state, effects = _let_go(state, gone, what)
    if gone:
        try:
            state, more = step(state, event, now)
            return state, (*effects, *more)
        except Exception:
            what = f"{what}, and again without {', '.join(gone)}"
    if isinstance(event, LinkUp):
        try:  # without what is kept of those that are gone
            state, more = step(replace(state, departed=(), reports=()), event, now)
        except Exception:
            more = (HangUp(reason=what),)
        return state, (*effects, *more)
    if isinstance(event, AgentTick):
        return state, effects
    state, more = _let_go(state, [worker.id for worker in _workers(state, event.job)], what)  # type: ignore[union-attr]
    return state, (*effects, *more)


def _opening_failed(state: AgentState, event: Opened, what: str) -> Result:
    return state, (Dismiss(client=event.client, reason=f"{what}: please report it with the agent's log"),)


def _end_failed(state: AgentState, event: Ended, what: str) -> Result:
    return _drop(state, event.client, event.how)


def _message_failed(state: AgentState, event: Said, what: str) -> Result:
    if isinstance(event.body, StoreCall):
        return state, (_failed((event.client, event.body.id), what),)
    return state, ()


def _link_end_failed(state: AgentState, event: LinkDown, what: str) -> Result:
    return replace(state, phase=AgentPhase.AWAY), ()


def _nothing_lost(state: AgentState, event: Event, what: str) -> Result:
    return state, ()


#: What follows where an event fails that costs itself alone.
FAILED: dict[type, Callable[[AgentState, Any, str], Result]] = {
    Opened: _opening_failed,
    Ended: _end_failed,
    Said: _message_failed,
    LinkDown: _link_end_failed,
    **dict.fromkeys((DevicesHeld, Pulse, Stood, Heard, AgentDrained, LeaderRead), _nothing_lost),
}


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


def _let_go(state: AgentState, names: Iterable[str], what: str) -> Result:
    """These clients hear why, and count as gone."""
    effects: list[Effect] = []
    for name in names:
        state, ended = _drop(state, name, what)
        effects += [Dismiss(client=name, reason=f"{what}: please report it with the agent's log"), *ended]
    return state, tuple(effects)


def _drop(state: AgentState, name: str, how: str) -> Result:
    """Does the work of `_ended` where that fails: the others learn only that the client is gone."""
    client = state.clients.get(name)
    if client is None:
        return state, ()
    state = _without(state, name)
    if not client.device:
        return state, _up(state, client, Leave(job=client.job))
    return _depart(state, replace(client, said=()), how)


def _depart(state: AgentState, client: Client, how: str) -> Result:
    """A worker is gone: its last words are kept for a leader that may not have heard them."""
    client = replace(client, ended=how)
    if client.job not in state.done:
        state = replace(state, departed=(*state.departed, client)[-MOST_DEPARTED:])
    return state, (ClearMember(job=client.job, device=client.device), *_tell(state, _lost(client)))


def used_devices(state: AgentState) -> dict[str, str]:
    """The devices that have a worker, or a torchrun of the job's own, each with the job."""
    used = {device: held.job for held in state.held.values() for device in held.devices}
    for client in state.clients.values():
        if client.device:
            used[client.device] = client.job
        elif isinstance(client.opening, Join) and client.opening.slot is not None and not client.goodbye:
            used[f"{state.record.node}/{client.opening.slot}"] = client.job
    return used


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
    if not runs and (why := name_refusal("the job's name", body.job)):
        return why
    devices = len(state.record.devices)
    index = body.slot if isinstance(body, Join) else body.local_rank
    if index is not None and not 0 <= index < devices:
        return (
            f"local rank {index} has no device: node {node!r} has {devices}; "
            f"start torchrun with --nproc-per-node={devices} at most, or 'elasticd run' with --devices "
            f"{devices} at most, and with GPUs 0 to {devices - 1} in $CUDA_VISIBLE_DEVICES"
        )
    if index is not None and (why := _held_by_other(state, body.job, f"{node}/{index}")):
        return why
    if isinstance(body, Join):
        return ""
    other = state.worker_of(f"{node}/{body.local_rank}")
    # The same process may come as a new incarnation.
    if other is not None and (other.opening.pid, other.job) != (event.pid, body.job):
        return (
            f"device {other.device} is driven by process {other.opening.pid} of job {other.job!r}: a device "
            "belongs to one job at a time; end that job first, or use another node"
        )
    return _shares(state, body, body.computes_on) if body.computes_on is not None else ""


def _held_by_other(state: AgentState, job: str, device: str) -> str:
    """Why a worker of a job in live mode cannot have a device: a job in restart mode holds it; or nothing."""
    for held in state.held.values():
        if held.job != job and device in held.devices:
            return _in_use(device, held.job)
    return ""


def cannot_hold(state: AgentState, job: str, devices: Iterable[str]) -> str:
    """Why a torchrun in restart mode cannot have these devices, with the remedy; empty where it can."""
    used, there = used_devices(state), {device.name for device in state.record.devices}
    for device in devices:
        if device not in there:
            return (
                f"there is no device {device}: node {state.record.node!r} has {len(there)}; start 'elasticd "
                f"run' with --devices {len(there)} at most, or name others by --device-ids"
            )
        if (other := used.get(device, job)) != job:
            return _in_use(device, other)
    return ""


def _in_use(device: str, job: str) -> str:
    return (
        f"{device} is used by job {job}: a device belongs to one job at a time; end that job first (elasticd "
        f"stop {job}), or use another device (elasticd status shows those that are free)"
    )


def _shares(state: AgentState, body: Hello, on: WorkerDevice) -> str:
    """Why this worker must not compute on a device that another one computes on; empty where both may."""
    for client in state.clients.values():
        other = client.opening
        if not isinstance(other, Hello) or other.computes_on is None:
            continue
        if other.pid == body.pid or other.local_rank == body.local_rank:
            continue  # it is the same worker, or the one before it
        if on.identity == other.computes_on.identity != "" and not (on.shared and other.computes_on.shared):
            return (
                f"process {body.pid} computes on {on.text}, as process {other.pid} does: start the job with "
                "'elasticd run', which gives each worker a device of its own, or name the device in "
                "ELASTICD_DEVICE, as cuda:0, to have workers share it"
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
    if before is not None and before.incarnation == incarnation:
        state = _without(state, before.id)  # on another connection: it says again what it has to say
    elif before is not None:
        state, ended = _ended(state, Ended(client=before.id, how="took a new incarnation"), now)
    client = Client(id=event.client, opening=body, device=device, incarnation=incarnation)
    pace = _pace(state, device)
    welcome = Welcome(device=device, incarnation=incarnation, address=state.record.address, pace=pace)
    member = MemberRecord(device=device, incarnation=incarnation, pid=event.pid)
    effects = (
        *ended,
        SetMember(job=client.job, record=member),
        AgentSend(client=client.id, body=welcome),
        *_up(state, client, body),
    )
    state, asked = _probe_due(_with_client(state, client), now)
    return state, (*effects, *standing(state, client), *asked)


def _said(state: AgentState, event: Said, now: float) -> Result:
    client, body = state.clients.get(event.client), event.body
    if client is None:
        return state, ()
    if isinstance(body, Hello) or (isinstance(body, Join) and client.device):
        return state, (AgentNote(text=f"{client.id} said hello twice; the second was not heard"),)
    return OF_CLIENT.get(type(body), _kept_message)(state, client, body, now)


def _call(state: AgentState, client: Client, call: StoreCall, now: float) -> Result:
    key, calls = (client.id, call.id), sum(asker == client.id for asker, _ in state.calls)
    if calls >= MOST_CALLS and key not in state.calls:
        return state, (_failed(key, f"{calls} calls of this process wait for answers already"),)
    pending = Call(call=call, deadline=now + call.seconds + GRACE_SECONDS)
    return replace(state, calls={**state.calls, key: pending}), _up(state, client, call)


def _report(state: AgentState, client: Client, report: Report | msgspec.Raw, now: float) -> Result:
    if state.phase is AgentPhase.LINKED:
        return state, _up(state, client, report)
    return replace(state, reports=(*state.reports, _wrap(client, report))[-MOST_REPORTS:]), ()


def _join_again(state: AgentState, client: Client, join: Join, now: float) -> Result:
    """A torchrun asks again after a local restart."""
    if join.job != client.job:
        why = f"this torchrun takes part in job {client.job}: start another for job {shown(join.job)}"
        return state, (AgentSend(client=client.id, body=Rejected(reason=why)),)
    return _with_client(state, replace(client, opening=join, goodbye=False)), _up(state, client, join)


def _goodbye(state: AgentState, client: Client, body: Goodbye | Leave, now: float) -> Result:
    farewell = body.reason if isinstance(body, Goodbye) else ""
    client = replace(client, goodbye=True, farewell=farewell)
    return _with_client(state, client), _up(state, client, body)


def _probed(state: AgentState, client: Client, body: Probed, now: float) -> Result:
    client = replace(client, probed=body)
    return _with_client(state, client), _up(state, client, body)


def _passed_on(state: AgentState, client: Client, body: Rehearsed, now: float) -> Result:
    """A leader that did not ask has no use for it: it is not kept for the next one."""
    return state, _up(state, client, body)


def _kept_message(state: AgentState, client: Client, body: Statement, now: float) -> Result:
    """It is kept for a new leader."""
    if body not in client.said:
        client = replace(client, said=(*client.said, body)[-MOST_SAID:])
    return _with_client(state, client), _up(state, client, body)


#: What follows from a message of a client; from each other type `_kept_message`.
OF_CLIENT: dict[type, Callable[[AgentState, Client, Any, float], Result]] = {
    StoreCall: _call,
    Report: _report,
    msgspec.Raw: _report,
    Join: _join_again,
    Goodbye: _goodbye,
    Leave: _goodbye,
    Probed: _probed,
    Rehearsed: _passed_on,
}


def _pulse(state: AgentState, event: Pulse, now: float) -> Result:
    client = state.clients.get(event.client)
    if client is None or not client.device:
        return state, ()
    client = replace(client, frozen=event.how)
    return _with_client(state, client), _tell(state, _frozen(client))


def _stood(state: AgentState, event: Stood, now: float) -> Result:
    client = state.clients.get(event.client)
    if client is None or not client.device or (event.halted is None and client.halted is None):
        return state, ()
    client = replace(client, halted=event.halted, halted_at=now)
    return _with_client(state, client), _tell(state, _halted(client, now))


def _ended(state: AgentState, event: Ended, now: float) -> Result:
    client = state.clients.get(event.client)
    if client is None:
        return state, ()
    state = _without(state, event.client)
    if not client.device:
        # Whether or not it took its leave, the leader hears one. A new link does not speak of it at all.
        return state, () if client.goodbye else _up(state, client, Leave(job=client.job))
    return _depart(state, client, event.how)


def _hold(state: AgentState, event: DevicesHeld, now: float) -> Result:
    held = {client: other for client, other in state.held.items() if client != event.client}
    if event.devices:
        held[event.client] = event
    return replace(state, held=held), ()


# -- the link ----------------------------------------------------------------------------------------------


def _link_up(state: AgentState, event: LinkUp, now: float) -> Result:
    words: list[FromAgent] = [_greeting(state)]
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
    state = replace(state, record=record)
    return state, (SetNode(record=record), *_tell(state, _greeting(state)))


def _greeting(state: AgentState) -> AgentHello:
    """The hello of this agent, also to a leader that has never met it."""
    factors = {device: factor for device, factor in state.factors.items() if factor != 1.0}
    return AgentHello(record=state.record, release=__version__, factors=factors)


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
    record, proposal = state.plans.get(client.job), state.open_proposal(client.job)
    plans = (record.plan if record is not None else None, proposal.plan if proposal is not None else None)
    return not any(plan is not None and plan.binding.get(client.device) == client.incarnation for plan in plans)


# -- the store -----------------------------------------------------------------------------------------


def leader_read(state: AgentState, event: LeaderRead, now: float) -> Result:
    """A leader's epoch: orders of a lower one are refused from now on."""
    return replace(state, epoch=max(state.epoch, event.epoch)), ()


def proposal_read(state: AgentState, event: ProposalRead, now: float) -> Result:
    """A proposal, or its abort, goes to the workers of its old and its new plan."""
    job, proposal = event.job, event.proposal
    if proposal is None:
        return replace(state, proposals=_without_job(state.proposals, job)), ()
    head = proposal.head
    if _usurped(state, head.epoch, event.revision):
        return state, (_stale(f"proposal {head.number}", job, head.epoch, state.epoch),)
    if state.proposals.get(job) == proposal:
        return state, ()
    effects = _orders(_workers(state, job), _bindings(head), _order(proposal))
    epoch = max(state.epoch, head.epoch)
    state = replace(state, epoch=epoch, proposals={**state.proposals, job: proposal})
    # A proposal opens only once all is settled of those before it.
    return _forget_before(state, job, head.number), effects


def plan_read(state: AgentState, event: PlanRead, now: float) -> Result:
    """A recorded plan: members hear that it is recorded, and words that it outdates are forgotten."""
    job, record = event.job, event.record
    if record is None:
        return _unrecorded(state, job), ()
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
        bound = [_binding(record.plan), _binding(before.plan)]
        head = proposal.head if proposal is not None else None
        if head is not None and head.number == record.plan.number and head.old is not None:
            bound.append(head.old.binding)
        effects = _orders(_workers(state, job), bound, recorded)
    state = replace(state, epoch=max(state.epoch, record.epoch), plans={**state.plans, job: record})
    return _forget_before(state, job, record.plan.number), effects


def _unrecorded(state: AgentState, job: str) -> AgentState:
    """A plan is in the store no more, as when somebody deleted all: its members train on under it. The hello of
    each says so to the next leader, which leaves the job alone (`machines.job.adoption`)."""
    before, proposal, fence = state.plans.get(job), state.proposals.get(job), state.fences.get(job)
    state = replace(state, plans=_without_job(state.plans, job))
    if before is None or job in state.done:
        return state
    highest = max(
        before.plan.number,
        proposal.head.number if proposal is not None else 0,
        fence.number if fence is not None else 0,
    )
    running = RunningPlan(plan=before.plan, step=before.step, highest=highest)
    for client in _workers(state, job):
        if before.plan.binding.get(client.device) == client.incarnation:
            hello = msgspec.structs.replace(client.opening, incarnation=client.incarnation, running=running)
            state = _with_client(state, replace(client, opening=hello))
    return state


def fence_read(state: AgentState, event: FenceRead, now: float) -> Result:
    """To all workers of the job: who is fenced off learns that it is."""
    job, fence = event.job, event.record
    if fence is None:
        return replace(state, fences=_without_job(state.fences, job)), ()
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
        return replace(state, done=_without_job(state.done, job)), ()
    if _usurped(state, record.epoch, event.revision):
        return state, (_stale("the end", job, record.epoch, state.epoch),)
    before = state.done.get(job)
    departed = tuple(client for client in state.departed if client.job != job)
    epoch = max(state.epoch, record.epoch)
    state = replace(state, epoch=epoch, done={**state.done, job: record}, departed=departed)
    if before is not None and (before.step, before.reason) == (record.step, record.reason):
        return state, ()  # a new leader said it again, for those that had refused the old one's word
    return state, (*_end(record, _workers(state, job)), *_end_of_starting(state, job, record))


def _end_of_starting(state: AgentState, job: str, record: DoneRecord) -> tuple[Effect, ...]:
    """The torchruns of a job that ended before its first plan, whose workers have not come to their Job: these
    would not hear of it. A script of a job that trained may still have work of its own to do."""
    if not record.reason or job in state.plans:
        return ()
    there = {worker.device for worker in _workers(state, job)}
    reason = f"job {job} is over: {record.reason}"
    body: ToWorker = Closed(reason=reason) if record.orderly else Rejected(reason=reason)
    waiting = []
    for client in state.clients.values():
        if client.job == job and isinstance(client.opening, Join):
            slot = client.opening.slot
            its = there if slot is None else there & {f"{state.record.node}/{slot}"}
            waiting += [] if its else [AgentSend(client=client.id, body=body)]
    return tuple(waiting)


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
            waiting = tuple(body for body in client.said if body not in waited)
            clients[client.id] = replace(client, said=waiting)
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
    if proposal is None or (fence is not None and fence.number > proposal.head.number):
        return missed
    return missed + _orders([worker], _bindings(proposal.head), _order(proposal))


def _returns(worker: Client) -> bool:
    """Returns True if it comes again as what it was."""
    return isinstance(worker.opening, Hello) and worker.opening.incarnation == worker.incarnation


def _order(proposal: StoredProposal) -> PassedProposal | Abort:
    if proposal.head.status == "aborted":
        return Abort(number=proposal.head.number, reason=proposal.head.reason)
    return PassedProposal(proposal=proposal.stored)


def _end(record: DoneRecord, workers: Iterable[Client]) -> tuple[Effect, ...]:
    """To all: a job that cannot go on ends for them. One that finished ends by itself for those who made the
    last step; whoever stood by, or lost the others before it heard the last vote, learns of it from here."""
    body: ToWorker = Closed(reason=f"the job finished after {counted(record.step, 'step')}")
    if record.reason:
        body = Shutdown(reason=record.reason, orderly=record.orderly)
    return tuple(AgentSend(client=worker.id, body=body) for worker in workers)


def _workers(state: AgentState, job: str) -> list[Client]:
    return [client for client in state.clients.values() if client.device and client.job == job]


def _orders(workers: Iterable[Client], bound: Sequence[_Binding], body: FromItsAgent) -> tuple[Effect, ...]:
    """`body` for those workers that one of these names, this incarnation of theirs."""
    return tuple(
        AgentSend(client=worker.id, body=body)
        for worker in workers
        if any(binding.get(worker.device) in ("", worker.incarnation) for binding in bound)
    )


#: Device to incarnation; an empty one is any.
_Binding = Mapping[str, str]


def _binding(plan: JobPlan) -> _Binding:
    return {device: plan.binding.get(device, "") for device in plan.members}


def _bindings(proposal: ProposalHead) -> list[_Binding]:
    """The workers that a proposal concerns: the members of both plans. A recovery concerns those of the new
    one, and of the others those alone whose copies or snapshots it goes on from."""
    if proposal.recovery is not None:
        return [proposal.plan.binding, proposal.recovery.sources]
    return [plan.binding for plan in (proposal.plan, proposal.old) if plan is not None]


def _usurped(state: AgentState, epoch: int, revision: int) -> bool:
    """Returns True if the leader of this epoch wrote after the newest one that was seen had taken its place."""
    return epoch < state.epoch <= revision


def _stale(what: str, job: str, epoch: int, highest: int) -> AgentNote:
    why = f"was written under epoch {epoch}, when {highest} led already"
    return AgentNote(text=f"{what} of job {job!r} {why}: refused")


def _forget_before(state: AgentState, job: str, number: int) -> AgentState:
    """Drop what was said of numbers below, in this job: the store has shown that they are settled."""

    def current(body: Statement) -> bool:
        if isinstance(body, Finished | Saved | SaveFailed | Raised | DrainNotice):
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


def _without_job(records: Mapping[str, Any], job: str) -> Mapping[str, Any]:
    return {name: record for name, record in records.items() if name != job}


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
    return _tell(state, _wrap(client, body))


def _tell(state: AgentState, message: FromAgent) -> tuple[Effect, ...]:
    """To the leader if the link stands; if not, what is kept in the state speaks on the next one."""
    return (AgentTell(message=message),) if state.phase is AgentPhase.LINKED else ()


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
        return msgspec.structs.replace(state.pace, factor=factor)
    return EmulatedSpeed(factor=factor) if factor != 1.0 else None


def _ignored(state: AgentState, event: Event, now: float) -> Result:
    return state, ()


Handler = Callable[[AgentState, Any, float], Result]
_ALWAYS: dict[type, Handler] = {
    Opened: _opened,
    DevicesHeld: _hold,
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
