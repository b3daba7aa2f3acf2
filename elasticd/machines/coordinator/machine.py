"""The coordinator's machine: which nodes are there, and every job's machine beside each other.

It takes what the agents say and hands it to the job that it is about. Jobs know nothing of each other, except
that a device belongs to one of them at a time. The leader's daemon executes the effects in order; its
writes carry the leader's key, so that a leader that was replaced changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.value import Value

from elasticd.machines.coordinator import absent_nodes, finished_jobs, message_checks, node_links
from elasticd.machines.coordinator.message_checks import OF_THE_NODE
from elasticd.machines.job import adoption, assembly, machine
from elasticd.machines.job.lifecycle import stop_request
from elasticd.machines.job.state.events import (
    AdoptAsked,
    AgentDown,
    AgentUp,
    CheckpointAsked,
    Configured,
    CoordinatorNote,
    CoordinatorSend,
    CoordinatorTick,
    Effect,
    Event,
    ForgetAsked,
    ForgetNodeAsked,
    Harmed,
    NodeDrained,
    Paced,
    Planned,
    Received,
    StopAsked,
    Stored,
    Unwritten,
)
from elasticd.machines.job.state.job_state import LIVE, OVER, JobPhase, JobSettings, JobState, NodeState, fresh
from elasticd.machines.job.state.restored_job import restored
from elasticd.machines.job.state.transaction import Transaction
from elasticd.records import NodeRecord
from elasticd.wire.coordinator import DEVICE_PREFIX, Crossed, Drain, FromClient, ToClient, Unread
from elasticd.wire.node_health import Health
from elasticd.wire.rendezvous import Join, Leave
from elasticd.wire.worker import EmulatedSpeed, Hello, Rejected, Switched

#: Jobs that a leader knows at once, those that are over among them.
MOST_JOBS = 12_000
#: Jobs in which torchruns of a node may wait for others, beside one for each of its devices.
MOST_BEGUN = 16


class CoordinatorState(Value, frozen=True, kw_only=True):
    """All that a leader knows."""

    epoch: int  # create revision of its key
    settings: JobSettings = msgspec.field(default_factory=JobSettings)  # as configured
    nodes: dict[str, NodeState] = msgspec.field(default_factory=dict)  # whose agents have said hello, by name
    jobs: dict[str, JobState] = msgspec.field(default_factory=dict)  # by name, those that are over among them
    links: node_links.Links = msgspec.field(default_factory=node_links.Links)  # measured links between nodes
    #: what users last asked of each node's drain, by node: it is kept in the store, and outlives agents
    drains: dict[str, bool] = msgspec.field(default_factory=dict)

    @property
    def measuring(self) -> list[JobState]:
        """The jobs that are not over: those that are measure nothing any more."""
        return [job for job in self.jobs.values() if job.phase not in OVER]

    @property
    def slowdowns(self) -> dict[str, float]:
        """The measured slowdown of each device that is slow, by its name."""
        return {device: rate for job in self.measuring for device, rate in job.detection.rates.rates.items()}


Result = tuple[CoordinatorState, tuple[Effect, ...]]


def takeover(
    epoch: int,
    stored: Iterable[Stored],
    settings: JobSettings,
    now: float,
    *,
    drains: Mapping[str, bool] | None = None,
) -> CoordinatorState:
    """A new leader's state, from the store alone. drains: wishes to drain nodes, by node."""
    jobs = {
        records.job: stop_request.restored(
            restored(records, now, settings), records.stop, records.stop_seconds, now
        )
        for records in stored
    }
    return CoordinatorState(epoch=epoch, settings=settings, jobs=jobs, drains=dict(drains or {}))


def step(state: CoordinatorState, event: Event, now: float) -> Result:
    """The state after `event` at `now` (seconds of a clock that never runs back), and what is to be done."""
    return TABLE[type(event)](state, event, now)


def _of_job(
    state: CoordinatorState,
    event: Planned | StopAsked | CheckpointAsked | AdoptAsked | Unwritten,
    now: float,
) -> Result:
    return _jobs(state, event, now, (event.job,))


def _forget_job(state: CoordinatorState, event: ForgetAsked, now: float) -> Result:
    return _without(state, finished_jobs.asked(state.jobs, state.nodes, event))


def _forget_node(state: CoordinatorState, event: ForgetNodeAsked, now: float) -> Result:
    away = event.node in state.nodes and not state.nodes[event.node].connected
    if away and event.node in state.drains:
        wishes = {name: on for name, on in state.drains.items() if name != event.node}
        state = msgspec.structs.replace(state, drains=wishes)
    return _without_nodes(state, {event.node: f"{event.by} had it forgotten"} if away else {})


def _tick(state: CoordinatorState, event: CoordinatorTick, now: float) -> Result:
    state, notes = _links(state, now)
    live = tuple(name for name, job in state.jobs.items() if job.phase not in OVER)
    state, effects = _jobs(state, event, now, live)
    state, gone = _without(state, finished_jobs.due(state.jobs, state.nodes, state.settings, now))
    state, left = _without_nodes(state, absent_nodes.gone(state.nodes, state.jobs, state.settings, now))
    return state, (*notes, *effects, *gone, *left)


def _without(state: CoordinatorState, forgotten: finished_jobs.Forgotten | None) -> Result:
    if forgotten is None:
        return state, ()
    return msgspec.structs.replace(state, jobs=forgotten.jobs), forgotten.effects


def _without_nodes(state: CoordinatorState, names: Mapping[str, str]) -> Result:
    """Nodes that are away are known no more, with what was measured of their links. names: why, by node."""
    if not names:
        return state, ()
    nodes = {name: node for name, node in state.nodes.items() if name not in names}
    links = node_links.without(state.links, names)
    state = msgspec.structs.replace(state, nodes=nodes, links=links)
    return state, tuple(absent_nodes.note(name, why) for name, why in names.items())


def _links(state: CoordinatorState, now: float) -> Result:
    """Which links became slow or recovered, by what was gathered: none is a device's slowness."""
    settings = state.settings
    try:
        links, changes = node_links.judge(state.links, settings.between, settings.detect, now)
    except Exception as error:  # what was gathered must not end the leader, nor come again with each tick
        what = f"elasticd failed on what was measured of links ({type(error).__name__}: {error})"
        links = msgspec.structs.replace(state.links, gathered=(), since=None)
        return msgspec.structs.replace(state, links=links), (CoordinatorNote(kind="defect", text=what),)
    if links is state.links:
        return state, ()
    notes = tuple(
        CoordinatorNote(
            kind="link",
            text=f"the link {change.reason} ({'probed' if kind == 'probe' else 'in moves of state'})",
            data={"link": change.device, "before": change.before, "after": change.after, "by": kind},
        )
        for kind, change in changes
    )
    return msgspec.structs.replace(state, links=links), notes


def _agent_up(state: CoordinatorState, event: AgentUp, now: float) -> Result:
    earlier, wish = state.nodes.get(event.record.node), state.drains.get(event.record.node)
    record, asked = _as_drained(event.record, earlier, wish)
    node = NodeState(
        record=record,
        connected=True,
        since=now,
        paces=_ordered_paces(event),
        release=event.release,
        version=event.version,
    )
    event = AgentUp(record=record, anew=earlier is not None and earlier.record.agent != record.agent)
    if earlier is not None:
        paces = {**node.paces, **earlier.paces}  # an agent may not have heard the last order
        node = msgspec.structs.replace(node, paces=paces, health=earlier.health)
    node = msgspec.structs.replace(node, drain_asked=asked)
    jobs, again = state.jobs, tuple[CoordinatorSend, ...]()
    # Else its record has changed, and it says nothing again.
    if earlier is None or not earlier.connected or event.anew:
        jobs = {name: finished_jobs.arrived(job, record.node) for name, job in jobs.items()}
        again = _repeated_orders(node)
    state = msgspec.structs.replace(state, nodes={**state.nodes, record.node: node}, jobs=jobs)
    note = _arrived(earlier, record)
    state, effects = _jobs(state, event, now, tuple(state.jobs))
    return state, (note, *again, *effects)


def _ordered_paces(event: AgentUp) -> dict[str, float]:
    """The speeds that an agent keeps of the node's devices, which an earlier leader told it."""
    names = (device.name for device in event.record.devices)
    factors = {name: event.factors.get(name, 1.0) for name in names}
    return {name: factor for name, factor in factors.items() if 1.0 < factor < math.inf}


def _as_drained(
    record: NodeRecord, known: NodeState | None, wish: bool | None
) -> tuple[NodeRecord, bool | None]:
    """The record of an agent that said hello, and what it has yet to hear of its node's drain. A node that was
    drained, as far as is known, is so from the first moment of its new agent."""
    if wish is None or wish == record.draining:
        return record, None
    if wish and (known is None or known.record.draining):
        record = msgspec.structs.replace(record, draining=True)
    return record, wish


def _repeated_orders(node: NodeState) -> tuple[CoordinatorSend, ...]:
    """The drain and the speeds that users asked for, once more for an agent that has a new connection: they may
    have been lost with the last one."""
    name = node.record.node
    paces = (
        ToClient(client=DEVICE_PREFIX + device, body=EmulatedSpeed(factor=factor))
        for device, factor in node.paces.items()
    )
    sent = [CoordinatorSend(node=name, message=message) for message in paces]
    if node.drain_asked is not None:
        sent.append(CoordinatorSend(node=name, message=Drain(on=node.drain_asked)))
    return tuple(sent)


def _arrived(known: NodeState | None, record: NodeRecord) -> CoordinatorNote:
    if known is not None and known.record.draining != record.draining:
        text = f"node {record.node} is used again"
        if record.draining:
            text = f"node {record.node} is being drained: the next plans leave its devices"
        return CoordinatorNote(
            kind="drained", text=text, data={"node": record.node, "draining": record.draining}
        )
    text = f"node {record.node} is there with {len(record.devices)} devices"
    return CoordinatorNote(kind="node_up", text=text, data={"node": record.node})


def _agent_down(state: CoordinatorState, event: AgentDown, now: float) -> Result:
    known = state.nodes.get(event.node)
    if known is None or not known.connected:
        return state, ()
    node = msgspec.structs.replace(known, connected=False, left=event.left, since=now)
    state = msgspec.structs.replace(state, nodes={**state.nodes, event.node: node})
    text = f"node {event.node} cannot be reached; its workers may well train on"
    note = CoordinatorNote(kind="node_down", text=text, data={"node": event.node})
    state, effects = _jobs(state, event, now, tuple(state.jobs))
    gone = absent_nodes.gone(state.nodes, state.jobs, state.settings, now)
    if event.node in gone:
        state, left = _without_nodes(state, {event.node: gone[event.node]})
        return state, (*left, *effects)
    return state, (note, *effects)


def _received(state: CoordinatorState, event: Received, now: float) -> Result:
    message = message_checks.bounded(event.message)
    if message is not event.message:
        event = Received(node=event.node, message=message)
    if event.node not in state.nodes:
        return state, ()
    if isinstance(message, OF_THE_NODE):
        return _of_node(state, event.node, message, now), ()
    up = message if isinstance(message, FromClient) else None
    if up is not None and _is_first_report(state, up):
        links = node_links.moved(state.links, up, state.nodes, now)
        state = state if links is state.links else msgspec.structs.replace(state, links=links)
    if message.job in state.jobs:
        if up is not None and (begun := _begun_again(state, event.node, up, now)):
            state, before = begun
            if message.job in state.jobs and state.jobs[message.job].phase in OVER:
                return state, before
            state, effects = _received(state, event, now)
            return state, (*before, *effects)
        taken = _taken(state, event.node, up) if up is not None else ""
    elif isinstance(message, Unread):
        down = ToClient(client=message.client, body=Rejected(reason=assembly.cannot_read(message)))
        return state, (CoordinatorSend(node=event.node, message=down),)
    elif up is None or not isinstance(up.body, Join | Hello):
        return state, ()
    else:
        known = fresh(up.job, JobPhase.GATHERING, now)
        taken = _crowded(state, event.node) or _taken(state, event.node, up)
        if not taken and isinstance(up.body, Hello) and not adoption.trains_unknown(known, up.body):
            taken = assembly.uninvited(known, event.node, up.device)  # its torchrun would have joined before
        if not taken:
            state = msgspec.structs.replace(state, jobs={**state.jobs, up.job: known})
    if taken and up is not None:
        return _turned_away(state, event, up, taken, now)
    return _jobs(state, event, now, (message.job,))


def _of_node(state: CoordinatorState, name: str, message: Health | Crossed, now: float) -> CoordinatorState:
    if isinstance(message, Crossed):
        links = node_links.crossed(state.links, name, message, state.nodes, now)
        return msgspec.structs.replace(state, links=links)
    node = msgspec.structs.replace(state.nodes[name], health=message)
    return msgspec.structs.replace(state, nodes={**state.nodes, name: node})


def _begun_again(state: CoordinatorState, node: str, up: FromClient, now: float) -> Result | None:
    """Forgets what is known under a job's name where another life of the job begins: its script makes no Job,
    and goes on in restart mode; or a user starts a job again that is over. None where neither is so."""
    job = state.jobs[up.job]
    if isinstance(up.body, Leave) and up.body.how == "restart" and finished_jobs.is_without_job(job):
        text = "no worker made an elasticd.Job or elasticd.live: the job goes on in restart mode"
        return _without(state, finished_jobs.replaced(state.jobs, up.job, text, "restart_mode"))
    if not isinstance(up.body, Join) or not finished_jobs.begins_again(job, up.body, now):
        return None
    if devices := finished_jobs.living(job, state.nodes):
        why = f"the worker of job {up.job} on {', '.join(devices)} has not ended yet: end its process"
        down = ToClient(client=up.client, body=Rejected(reason=why, later=True))
        return state, (CoordinatorSend(node=node, message=down),)
    text = f"started again: it was {job.phase.value}" + (f" before ({job.reason})" if job.reason else "")
    forgotten = finished_jobs.replaced(state.jobs, up.job, text, "started_again")
    gathering = fresh(up.job, JobPhase.GATHERING, now)
    again = msgspec.structs.replace(gathering, highest=job.highest).changed("start", earlier=job.highest)
    state, effects = _without(state, forgotten)
    return msgspec.structs.replace(state, jobs={**state.jobs, up.job: again}), effects


def _is_first_report(state: CoordinatorState, up: FromClient) -> bool:
    """Returns True if a worker tells of a switch, and not again: to a new leader agents say all that still
    holds."""
    job = state.jobs.get(up.job)
    worker = job.workers.get(up.device) if job is not None and job.takeover.settle_until is None else None
    return isinstance(up.body, Switched) and worker is not None and worker.swapped < up.body.number


def _taken(state: CoordinatorState, node: str, up: FromClient) -> str:
    """Why a worker cannot have its device, or a torchrun its node: another living job has it."""
    if not isinstance(up.body, Hello | Join):
        return ""
    for name, job in state.jobs.items():
        if name == up.job or job.phase not in LIVE:
            continue
        held = [worker for worker in job.workers.values() if worker.node == node and not worker.left]
        if isinstance(up.body, Hello):
            held = [worker for worker in held if worker.device == up.device]
        elif up.body.slot is not None:
            held = [worker for worker in held if worker.device == f"{node}/{up.body.slot}"]
        if held:
            devices = ", ".join(worker.device for worker in held)
            return f"{devices}: in use by job {name}; {_ONE_JOB}"
    return ""


def _crowded(state: CoordinatorState, node: str) -> str:
    """Why no job more is known, or nothing. Jobs count for the nodes whose torchruns have joined, also once
    they are over: one node's leave half of what there is room for to others, two nodes' a third."""
    free = MOST_JOBS - len(state.jobs)
    if free <= 0:
        return f"the cluster has {MOST_JOBS} jobs already: end some, and forget them"
    record = state.nodes[node].record
    own = [job.phase for job in state.jobs.values() if job.joined_from(record)]
    begun = sum(phase in (JobPhase.GATHERING, JobPhase.ASSEMBLING) for phase in own)
    if begun < len(record.devices) + MOST_BEGUN and len(own) < free:
        return ""
    return (
        f"node {node} has torchruns in {begun} jobs that have not begun and in {len(own)} in all, and room is "
        f"left for {free} jobs of all nodes: end some of its torchruns, and forget jobs that are over"
    )


_ONE_JOB = "a device belongs to one job at a time: wait for the end of that job or use other nodes"


def _turned_away(state: CoordinatorState, event: Received, up: FromClient, why: str, now: float) -> Result:
    """A worker that cannot come may be one that all others of its job wait for: they would wait for ever."""
    down = ToClient(client=up.client, body=Rejected(reason=why))
    effects: tuple[Effect, ...] = (CoordinatorSend(node=event.node, message=down),)
    job = state.jobs.get(up.job)
    if isinstance(up.body, Hello) and job is not None:
        turn = Transaction(job, state.nodes, state.epoch, state.settings, now)
        machine.turned_away(turn, event.node, up.device, why)
        effects = (*effects, *turn.effects)
        state = msgspec.structs.replace(state, jobs={**state.jobs, up.job: turn.job})
    return state, effects


def _paced(state: CoordinatorState, event: Paced, now: float) -> Result:
    """Chaos: a hint to the device's agent, which keeps the table of paces."""
    name = node_of(event.device)
    node = state.nodes.get(name)
    if node is None:
        return state, ()
    node = msgspec.structs.replace(node, paces={**node.paces, event.device: event.factor})
    down = ToClient(client=DEVICE_PREFIX + event.device, body=EmulatedSpeed(factor=event.factor))
    speed = f"{event.factor:g} times slower than normal" if event.factor != 1 else "at normal speed"
    text = f"chaos: {event.device} is to run {speed}"
    data = {"device": event.device, "factor": event.factor}
    effects = (CoordinatorNote(kind="chaos", text=text, data=data), CoordinatorSend(node=name, message=down))
    return msgspec.structs.replace(state, nodes={**state.nodes, name: node}), effects


def _configured(state: CoordinatorState, event: Configured, now: float) -> Result:
    settings = msgspec.structs.replace(state.settings, detect=event.detect, policy=event.policy)
    if settings == state.settings:
        return state, ()
    state = msgspec.structs.replace(state, settings=settings)
    note = CoordinatorNote(kind="configured", text=event.changes)
    state, effects = _jobs(state, event, now, tuple(state.jobs))
    return state, (note, *effects)


def _drained(state: CoordinatorState, event: NodeDrained, now: float) -> Result:
    """The wish is kept in the store. The agent puts it into its node's record, and comes with that. Until then
    it is told again whenever it has a new connection; so is one that is started anew."""
    node = state.nodes.get(event.node)
    if node is None or not node.connected:
        return state, ()
    drains = _bounded_drains({**state.drains, event.node: event.on}, state)
    if drains != state.drains:
        state = msgspec.structs.replace(state, drains=drains)
    if node.record.draining == event.on and node.drain_asked is None:
        return state, ()
    node = msgspec.structs.replace(node, drain_asked=event.on)
    state = msgspec.structs.replace(state, nodes={**state.nodes, event.node: node})
    return state, (CoordinatorSend(node=event.node, message=Drain(on=event.on)),)


def _bounded_drains(drains: dict[str, bool], state: CoordinatorState) -> dict[str, bool]:
    """The wishes, without the first ones of nodes that are not there, where there are too many."""
    absent = [name for name in drains if name not in state.nodes]
    dropped = {*absent[: max(0, len(absent) - state.settings.keep_nodes)]}
    return {name: on for name, on in drains.items() if name not in dropped} if dropped else drains


def _harmed(state: CoordinatorState, event: Harmed, now: float) -> Result:
    """Chaos: what the agent is to do to its node; what follows comes as any fault does."""
    node = state.nodes.get(event.node)
    if node is None or not node.connected:
        return state, ()
    harm = event.harm
    lasts = f" for {harm.seconds:g} s" if harm.seconds else ""
    of_node = {
        "cut": f"cut node {event.node}'s agent off from leader and store{lasts}",
        "cut-data": f"what node {event.node} sends to the data address {harm.peer} is to be lost{lasts}",
        "heal-data": f"node {event.node} is to reach the data address {harm.peer} again",
    }
    text = f"chaos: {of_node.get(harm.how, f'{harm.how} the worker of {harm.device}')}"
    data = {"node": event.node, "device": harm.device, "how": harm.how, "seconds": harm.seconds}
    note = CoordinatorNote(kind="chaos", text=text, data=data)
    return state, (note, CoordinatorSend(node=event.node, message=harm))


def _jobs(state: CoordinatorState, event: Event, now: float, names: tuple[str, ...]) -> Result:
    changed: dict[str, JobState] = {}
    effects: list[Effect] = []
    for name in names:
        job = state.jobs.get(name)
        if job is None:
            continue
        try:
            after, asked = machine.step(job, event, state.nodes, state.epoch, state.settings, now)
        except Exception as error:  # of this job alone: what is wrong with it must not end the others
            turn = Transaction(job, state.nodes, state.epoch, state.settings, now)
            machine.failed(turn, event, error)
            after, asked = turn.job, tuple(turn.effects)
        effects += asked
        if after is not job:
            changed[name] = after
    if changed:
        state = msgspec.structs.replace(state, jobs={**state.jobs, **changed})
    return state, tuple(effects)


#: What each event leads to.
TABLE: dict[type, Callable[[CoordinatorState, Any, float], Result]] = {
    AgentUp: _agent_up,
    AgentDown: _agent_down,
    Received: _received,
    Planned: _of_job,
    Unwritten: _of_job,
    Paced: _paced,
    Harmed: _harmed,
    Configured: _configured,
    NodeDrained: _drained,
    StopAsked: _of_job,
    CheckpointAsked: _of_job,
    AdoptAsked: _of_job,
    ForgetAsked: _forget_job,
    ForgetNodeAsked: _forget_node,
    CoordinatorTick: _tick,
}
