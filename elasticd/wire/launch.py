"""Wire messages about launches: what the workers of a node write, and what a launcher tells its user.

The torchrun of `elasticd run` shares with its agent the newest output of each worker, in a memory file
(`elasticd.system.output_ring`), which outlives it. The leader asks for a part of it when somebody wants to
read. The launcher hears from the leader, through its agent, what happens to its job.
"""

from __future__ import annotations

from typing import Any

import msgspec

from elasticd.codec.message import Message

# -- to the agent --------------------------------------------------------------------------------------------


class KeepOutput(Message, frozen=True, kw_only=True, tag="keep-output"):
    """A torchrun shares the memory file with the newest output of one of its workers, which comes with the
    message."""

    job: str  # the job's name
    index: int  # of the worker's device on the node
    release: str = ""  # of the sender's elasticd


class FollowEvents(Message, frozen=True, kw_only=True, tag="follow-events"):
    """A launcher is to hear what happens to its job. It says so again with the devices that it wants, and has
    them until it hangs up, unless the answer says that another job uses one."""

    job: str  # the job's name
    slots: tuple[int, ...] = ()  # indices of these devices on the node
    release: str = ""  # of the sender's elasticd


# -- agent to torchrun or launcher -----------------------------------------------------------------------------


class OutputKept(Message, frozen=True, kw_only=True, tag="output-kept"):
    """The answer to `KeepOutput`."""

    index: int  # of the worker's device on the node
    device: str  # "node/index"


class Following(Message, frozen=True, kw_only=True, tag="following-events"):
    """The answer to `FollowEvents`."""

    devices: tuple[str, ...]  # of this node, "node/index"
    used: dict[str, str]  # devices that have a worker, a torchrun or a launcher: by device, the job


class Happened(Message, frozen=True, kw_only=True, tag="event-of-job"):
    """An event of a job, from the leader through the agent to launchers."""

    job: str  # the job's name
    kind: str  # for programs
    text: str  # for people
    data: dict[str, Any] = msgspec.field(default_factory=dict)  # for programs


# -- agent and leader ------------------------------------------------------------------------------------------


class FollowJob(Message, frozen=True, kw_only=True, tag="follow-job"):
    """To the leader: a launcher of this node is to hear of this job."""

    job: str  # the job's name


class ReadOutput(Message, frozen=True, kw_only=True, tag="read-output"):
    """The leader asks for what a worker wrote, and gets `OutputPart`."""

    id: int  # by which it knows the answer
    device: str  # "node/index"
    job: str  # the job's name (empty: the one whose output is the newest)
    after: int  # bytes that the reader has already (negative: only so many of the newest)
    most: int  # bytes of the answer


class OutputPart(Message, frozen=True, kw_only=True, tag="output-part"):
    """To the leader: a part of what a worker wrote."""

    id: int  # of the question
    job: str = ""  # whose output it is
    begin: int = 0  # [bytes] where the part begins in all that the worker wrote
    end: int = 0  # [bytes] where the part ends: the next question's `after`
    data: bytes = b""  # as the worker wrote it
    error: str = ""  # why there is none, for people


#: Kinds of events that launchers hear of.
FOLLOWED = frozenset(
    (
        "job_gathered",
        "proposed",
        "recorded",
        "fenced",
        "leaving",
        "stopping",
        "waiting",
        "no_progress",
        "finished",
        "stopped",
    )
)
#: Jobs that the launchers of a node may follow at once.
MOST_FOLLOWED = 1000
#: What the agent's machine does not hear.
OfLaunch = KeepOutput | FollowEvents
