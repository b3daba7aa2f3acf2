"""Wire messages by which the leader passes a user's wish on to an agent, for its whole node or one process."""

from __future__ import annotations

from typing import Literal

from elasticd.codec.message import Message


def is_first(release: str) -> bool:
    """Whether an agent is of release 0.1, which skips the orders that came later: `End`, `TryReach` and cuts of
    the data network."""
    return release.startswith("0.1.")


class Drain(Message, frozen=True, kw_only=True, tag="drain"):
    """Whether this node's devices are to be left: its agent puts it into the node's record, and says so to the
    leader by another `AgentHello` on the same connection."""

    on: bool


class End(Message, frozen=True, kw_only=True, tag="end-job"):
    """A user stops this job: the agent sends SIGTERM to the workers of these devices, once. Those that the
    leader knows to be leaving are not among them: a second SIGTERM ends a process at once."""

    job: str
    devices: tuple[str, ...]


class TryReach(Message, frozen=True, kw_only=True, tag="try-reach"):
    """The agent tries whether it reaches these nodes on the data network, by node "host:port", and says so by
    `Unreached` with the same job and round."""

    job: str
    round: int
    targets: dict[str, str]


class Harm(Message, frozen=True, kw_only=True, tag="inject-fault"):
    """Chaos, a hint: this is done to the process that drives `device`; or (cut) this agent loses its leader and
    its store, until it is healed, the leader is gone, or `seconds` have passed, if that is not 0. cut-data:
    what this node sends to the data address `peer` is lost, until heal-data, or for `seconds`."""

    how: Literal["kill", "freeze", "thaw", "cut", "cut-data", "heal-data"]
    device: str = ""
    seconds: float = 0.0
    peer: str = ""
