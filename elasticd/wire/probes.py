"""Wire messages about whether a worker's process still runs (it may live and be stopped all the same), and how
fast its device, and the links of its node, are while they have no work; and which nodes reach each other."""

from __future__ import annotations

from elasticd.codec.message import Message


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """An agent asks a worker's control thread for an answer, and gets `Pong`."""


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    """The answer: this process runs."""


class Probe(Message, frozen=True, kw_only=True, tag="device-probe"):
    """An agent asks a worker that stands by how fast its device is; one that computes does not answer."""


class Probed(Message, frozen=True, kw_only=True, tag="device-probe-result"):
    """The answer, for the leader."""

    seconds: tuple[float, ...]  # of the same small matrix product, made several times


class Rehearse(Message, frozen=True, kw_only=True, tag="all-reduce-probe"):
    """Before a job's first plan the leader asks workers of one node how long an all-reduce takes among them."""

    members: tuple[str, ...]  # devices, in rank order
    widths: tuple[int, ...]  # for each: an all-reduce among the first so many members, in this order
    size: int  # bytes of each all-reduce


class Rehearsed(Message, frozen=True, kw_only=True, tag="all-reduce-probe-result"):
    """The answer of the first member, for the leader."""

    seconds: dict[int, float]  # of one all-reduce, by width


class Crossed(Message, frozen=True, kw_only=True, tag="link-probe-result"):
    """To the leader: the link from this agent's node to another, probed while neither has work."""

    target: str  # the other node
    size: int  # bytes that were sent
    seconds: float  # until all of them were there
    latency: float  # seconds one way, the shortest of several messages


class Unreached(Message, frozen=True, kw_only=True, tag="unreached-nodes"):
    """To the leader, the answer to `TryReach`."""

    job: str  # the job's name
    round: int  # as in `TryReach`
    nodes: dict[str, str]  # nodes that this agent's node does not reach, with the reason


class Frozen(Message, frozen=True, kw_only=True, tag="worker-hang"):
    """To the leader: a worker does not answer its agent's heartbeat, or does again."""

    job: str  # the job's name
    device: str  # "node/local rank"
    incarnation: str  # id of this start of the worker's process
    how: str = ""  # how that is known (empty: it answers again)
