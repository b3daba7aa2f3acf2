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
    """The answer, for the leader: seconds of the same small matrix product, made some times."""

    seconds: tuple[float, ...]


class Rehearse(Message, frozen=True, kw_only=True, tag="all-reduce-probe"):
    """The leader asks workers of one node, before a job's first plan, how long an all-reduce of `size` bytes
    takes among them: for each of the widths in their order, among as many of the `members`, the first ones."""

    members: tuple[str, ...]
    widths: tuple[int, ...]
    size: int


class Rehearsed(Message, frozen=True, kw_only=True, tag="all-reduce-probe-result"):
    """The answer of the first member, for the leader: by width, seconds of one all-reduce."""

    seconds: dict[int, float]


class Crossed(Message, frozen=True, kw_only=True, tag="link-probe-result"):
    """To the leader: the link from this agent's node to `target`, probed while neither has work. `size` bytes
    took `seconds` until they were there; the shortest of some messages took `latency` seconds one way."""

    target: str
    size: int
    seconds: float
    latency: float


class Unreached(Message, frozen=True, kw_only=True, tag="unreached-nodes"):
    """To the leader, the answer to its `TryReach`: the nodes that this agent's node does not reach, and why."""

    job: str
    round: int
    nodes: dict[str, str]


class Frozen(Message, frozen=True, kw_only=True, tag="worker-hang"):
    """To the leader: a worker does not answer its agent, and how that is known; or it answers again (empty)."""

    job: str
    device: str
    incarnation: str
    how: str = ""
