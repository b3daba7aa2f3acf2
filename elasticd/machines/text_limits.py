"""What processes say in words, and how much of it is kept: reasons, how a process ended, names of checkpoints.

A leader puts such words into records, events and the reasons of others. They come from workers and agents, and
etcd holds what is made of them for all jobs. So they are cut here, where a message comes in, and nothing behind
this asks how long they are.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from elasticd.names import harmless
from elasticd.wire.coordinator import FromClient, Frozen, ToMachine, Unreached, Unread, WorkerLost
from elasticd.wire.worker import (
    DrainNotice,
    Goodbye,
    Hello,
    InDoubt,
    PeersLost,
    Refused,
    StayedOnPlan,
    Switched,
)

#: Characters of one such text. Stacks and tracebacks have bounds of their own (`job.halted`, `job.raised`).
MOST_TEXT = 4000
#: Names of nodes that one node does not reach, and characters of why.
MOST_UNREACHED, MOST_WHY = 4096, 200
#: Checkpoints that a worker sees: the newest of those that it tells of.
MOST_CHECKPOINTS = 256
#: What stands where the rest of a text was.
MARK = "... (cut)"

#: The texts in each message.
_TEXTS: dict[type, tuple[str, ...]] = {
    Refused: ("reason",),
    StayedOnPlan: ("reason",),
    InDoubt: ("reason",),
    PeersLost: ("reason",),
    DrainNotice: ("reason",),
    Goodbye: ("reason",),
    Switched: ("checkpoint",),
    Unread: ("reason",),
    WorkerLost: ("how",),
    Frozen: ("how",),
}

M = TypeVar("M", bound=msgspec.Struct)


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """At most so many characters of a text, and a mark where some are missing."""
    return text if len(text) <= most else text[: most - len(MARK)] + MARK


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
    if isinstance(message, Unreached):
        nodes = dict(list(message.nodes.items())[:MOST_UNREACHED])
        nodes = {node: shortened(why, MOST_WHY) for node, why in nodes.items() if harmless(node)}
        return message if nodes == message.nodes else msgspec.structs.replace(message, nodes=nodes)
    return _cut(message)


def _cut(said: M) -> M:
    texts = {name: getattr(said, name) for name in _TEXTS.get(type(said), ())}
    long = {name: shortened(text) for name, text in texts.items() if len(text) > MOST_TEXT}
    return msgspec.structs.replace(said, **long) if long else said
