"""Checks of the messages that a leader takes from a connection: names in the one grammar, and a node's word
about itself alone.

An agent's token or certificate is worth its node. Whoever has stolen one can say of that node's devices what he
likes, and nothing of any other's. He has no say in a job that this node does not take part in: its processes
cannot change the keys of that job's bootstrap store, and a worker of theirs that does not fit stops nobody.

A leader puts the words of workers and agents (reasons, how a process ended, names of checkpoints) into records,
events and the reasons of others, and etcd holds what is made of them for all jobs. So they are cut here
(`bounded`), where a message comes in, and nothing behind this asks how long they are.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from itertools import islice
from typing import TypeVar

import msgspec

from elasticd.codec.decoding import tag_of
from elasticd.codec.safe_text import MOST_TEXT, shortened
from elasticd.machines.job.state.job_state import JobState
from elasticd.names import LONGEST, MOST_DEVICES, device_of, harmless, name_refusal
from elasticd.records import NodeRecord
from elasticd.wire.coordinator import (
    AgentHello,
    Crossed,
    FromClient,
    Frozen,
    ToLeader,
    ToMachine,
    Unreached,
    Unread,
    WorkerLost,
)
from elasticd.wire.launch import FollowJob, OutputPart
from elasticd.wire.main_thread import Halted
from elasticd.wire.node_health import Health
from elasticd.wire.rendezvous import Join, Leave, StepTime, TorchrunState
from elasticd.wire.snapshots import SnapshotInventory
from elasticd.wire.worker import (
    DrainNotice,
    Goodbye,
    Hello,
    InDoubt,
    PeersLost,
    Refused,
    Report,
    SaveFailed,
    StayedOnPlan,
    StoreCall,
    Switched,
)

#: Characters of the ids that an agent gives to its clients, and to their incarnations.
LONGEST_ID = 256
#: Names of nodes that one node does not reach, and characters of why.
MOST_UNREACHED, MOST_WHY = 4096, 200
#: Resources that a node's work waits for: Linux tells of three.
MOST_PRESSURES = 8
#: Checkpoints that a worker sees: the newest of those that it tells of.
MOST_CHECKPOINTS = 256
#: The text in each message.
_TEXTS: dict[type, str] = {
    **dict.fromkeys(
        (Refused, StayedOnPlan, InDoubt, PeersLost, DrainNotice, Goodbye, SaveFailed, Unread), "reason"
    ),
    **dict.fromkeys((WorkerLost, Frozen), "how"),
    Switched: "checkpoint",
}
#: What a torchrun says, which drives no device.
OF_TORCHRUNS = (Join, Leave, StoreCall)
#: What is of a connection's own node, whatever it names; of a worker or a torchrun; of an agent about a device.
OF_THE_NODE = (Crossed, Health)
OF_CLIENTS = (FromClient, Unread)
OF_DEVICES = (WorkerLost, Frozen, Halted, StepTime)


def refusal(of: NodeRecord, message: ToLeader | Unread, jobs: Container[str]) -> str:
    """Why a message that came over the connection of this node is not heard, or nothing. jobs: those that there
    are already, whatever they are called: a release before this one may have let them in."""
    if isinstance(message, AgentHello):
        return record_refusal(message.record)
    if isinstance(message, OF_THE_NODE):
        return ""
    job = message.by.job if isinstance(message, StepTime) else message.job
    if job not in jobs and (why := name_refusal("the job's name", job)):
        return why
    if isinstance(message, FollowJob | OutputPart):
        return ""
    if isinstance(message, FromClient | Unread | WorkerLost) and len(message.incarnation) > LONGEST_ID:
        return f"an incarnation has {LONGEST_ID} characters at most, not {len(message.incarnation)}"
    if isinstance(message, OF_CLIENTS) and len(message.client) > LONGEST_ID:
        return f"a client's id has {LONGEST_ID} characters at most, not {len(message.client)}"
    if isinstance(message, FromClient) and not message.device and not isinstance(message.body, OF_TORCHRUNS):
        return f"a process without a device has no say of {tag_of(message.body)!r}"
    if isinstance(message, TorchrunState):
        longest = len(message.torchrun)
        return f"a torchrun's name has {LONGEST_ID} characters at most" if longest > LONGEST_ID else ""
    for device in _spoken_for(message):
        if not device_of(of.node, device):
            return f"node {of.node} has no say about {device[:LONGEST]!r}"
        # In restart mode torch's own launcher may start more processes than an agent has devices.
        most = MOST_DEVICES if isinstance(message, StepTime) else len(of.devices)
        if int(device.rpartition("/")[2]) >= most:
            return f"node {of.node} has {len(of.devices)} devices, and no {device}"
    return ""


def call_refusal(of: NodeRecord, up: FromClient, jobs: Mapping[str, JobState]) -> str:
    """Why a call on a job's bootstrap store is not heard from this node, or nothing. Who takes part has joined,
    or has said hello: an agent repeats both to a new leader before any call."""
    job = jobs.get(up.job)
    if job is None:
        return f"there is no job {up.job!r} here: a torchrun joins it before it calls on its bootstrap store"
    if job.involves(of):
        return ""
    return f"node {of.node} takes no part in job {up.job}, and has no say in its bootstrap store"


def record_refusal(record: NodeRecord) -> str:
    """Why a node's record is none, or nothing."""
    if why := name_refusal("[agent] node", record.node):
        return why
    if len(record.devices) > MOST_DEVICES:
        return f"node {record.node} has {len(record.devices)} devices: at most {MOST_DEVICES} are taken"
    for device in record.devices:
        if not device_of(record.node, device.name):
            return (
                f"node {record.node} names a device {device.name[:LONGEST]!r}, not {record.node}/0 or the like"
            )
    return ""


def _spoken_for(
    message: FromClient | Unread | WorkerLost | Frozen | Unreached | Halted | SnapshotInventory | StepTime,
) -> Iterator[str]:
    """The devices about which a message is their own node's word. A torchrun has none."""
    if isinstance(message, OF_CLIENTS):
        if message.device:
            yield message.device
        if isinstance(message, FromClient) and isinstance(message.body, Report):
            yield message.body.measurement.device
    elif isinstance(message, OF_DEVICES):
        yield message.device
    # SnapshotInventory: an agent keeps snapshots of other nodes' devices.
    # Unreached: of the connection's own node.


M = TypeVar("M", bound=msgspec.Struct)


def bounded(message: ToMachine | Unread) -> ToMachine | Unread:
    """The message, with its texts cut."""
    if isinstance(message, FromClient):
        body = message.body
        if isinstance(body, Hello):
            names = tuple(filter(harmless, body.checkpoints[:MOST_CHECKPOINTS]))
            if names == body.checkpoints:
                return message
            return msgspec.structs.replace(message, body=msgspec.structs.replace(body, checkpoints=names))
        cut = _cut(body)
        return message if cut is body else msgspec.structs.replace(message, body=cut)
    if isinstance(message, Health):
        first = islice(message.pressure.items(), MOST_PRESSURES)
        pressure = {resource: part for resource, part in first if harmless(resource)}
        return msgspec.structs.replace(message, pressure=pressure, devices=message.devices[:MOST_DEVICES])
    if isinstance(message, Unreached):
        nodes = dict(list(message.nodes.items())[:MOST_UNREACHED])
        nodes = {node: shortened(why, MOST_WHY) for node, why in nodes.items() if harmless(node)}
        return message if nodes == message.nodes else msgspec.structs.replace(message, nodes=nodes)
    return _cut(message)


def _cut(said: M) -> M:
    name = _TEXTS.get(type(said), "")
    text = getattr(said, name) if name else ""
    return msgspec.structs.replace(said, **{name: shortened(text)}) if len(text) > MOST_TEXT else said
