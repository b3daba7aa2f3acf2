"""Wire messages by which the leader passes a user's wish on to an agent, for its whole node or one process."""

from __future__ import annotations

from typing import Literal

from elasticd.codec.message import Message


def is_first(release: str) -> bool:
    """Whether an agent is of release 0.1, which skips the orders that came later: `End`, `TryReach` and cuts of
    the data network."""
    return release.startswith("0.1.")


class Drain(Message, frozen=True, kw_only=True, tag="drain"):
    """A user drains this node, or ends that. The agent puts it into the node's record, and answers with an
    `AgentHello` on the same connection."""

    on: bool  # its devices are to be left


class End(Message, frozen=True, kw_only=True, tag="end-job"):
    """A user stops this job: the agent sends SIGTERM to workers, each once. A second SIGTERM ends a process at
    once."""

    job: str  # the job's name
    devices: tuple[str, ...]  # of the workers, without those that are known to be leaving


class TryReach(Message, frozen=True, kw_only=True, tag="try-reach"):
    """The agent tests which nodes it reaches on the data network, and answers with `Unreached`."""

    job: str  # the job's name
    round: int  # number of the test, which the answer repeats
    targets: dict[str, str]  # "host:port" by node


class Harm(Message, frozen=True, kw_only=True, tag="inject-fault"):
    """Fault injection, a hint: into the process that drives a device, or into this node's links."""

    #: to a process: kill, freeze, thaw. cut: the agent loses leader and store, until it is healed or the leader
    #: is gone. cut-data: what this node sends to `peer` is lost, until heal-data
    how: Literal["kill", "freeze", "thaw", "cut", "cut-data", "heal-data"]
    device: str = ""  # of kill, freeze and thaw
    seconds: float = 0.0  # until a cut ends by itself (0: never)
    peer: str = ""  # data address of cut-data and heal-data
