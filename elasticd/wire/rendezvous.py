"""Wire messages of torchruns: of the live mode, and of the restart mode with the workers that it watches.

The state of a rendezvous is torch's own, bytes that no agent reads. No leader hears of rounds, but of laps.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from elasticd_planner.value import StoredValue, Value

from elasticd.codec.decoding import LARGE
from elasticd.codec.message import Message

# -- to the agent --------------------------------------------------------------------------------------------


class WorkerFailure(Value, frozen=True, kw_only=True):
    """The failure of a worker process, as its torchrun knows it: by its exit code and what it wrote to
    stderr."""

    kind: str = ""  # name of the exception's class (empty: no exception was printed)
    text: str = ""  # the exception as a string; without one the last line, or the signal
    traceback: str = ""  # the last one that Python printed
    code: int = 1  # exit code; -N: ended by signal N
    refusal: bool = False  # elasticd refused the script, and would refuse it again
    lost_peer: bool = False  # another rank failed first: communication with it broke

    @property
    def line(self) -> str:
        """The failure in one line."""
        return f"{self.kind}: {self.text}" if self.kind and self.text else self.kind or self.text


class Join(Message, frozen=True, kw_only=True, tag="join"):
    """A torchrun asks to take part in a job."""

    job: str  # the job's name
    min_nodes: int  # the least of --nnodes
    max_nodes: int  # the most of --nnodes
    pid: int  # process id
    slot: int | None = None  # index of its one device (None: all devices of its node)
    release: str = ""  # of the sender's elasticd
    failure: WorkerFailure | None = None  # why it starts its worker again (None: it starts the first)
    #: seconds since it was started, or `elasticd run` before it (None: an older release, which does not say)
    age: float | None = None
    fresh: bool = False  # the job is to begin anew, whatever checkpoints there are


class Leave(Message, frozen=True, kw_only=True, tag="leave"):
    """The torchrun of this connection ends."""

    job: str  # the job's name
    failure: WorkerFailure | None = None  # by which it ends (None: otherwise)
    #: finished: its script ended with exit code 0. restart: the job goes on in restart mode
    how: Literal["", "finished", "restart"] = ""
    signal: str = ""  # name of the signal that told it to end (empty: none did)


class Attend(Message, frozen=True, kw_only=True, tag="rendezvous-hello"):
    """The first message of a torchrun whose rounds torch itself makes."""

    job: str  # the job's name
    pid: int  # process id
    release: str = ""  # of the sender's elasticd
    slots: tuple[int, ...] = ()  # indices of its devices on the node (empty: not known before it has workers)


class AtWork(Value, frozen=True, kw_only=True):
    """The state of the workers of a torchrun in restart mode."""

    phase: Literal["waits", "runs", "failed", "finished"] = "waits"  # failed: no other is started
    workers: int = 0  # on its node
    world: int = 0  # workers of the round
    round: int = -1  # number of the round (-1: none yet)
    restarts: int = 0  # how often its workers were started again
    failure: WorkerFailure | None = None  # the last of its workers (None: none failed)
    failures: int = 0  # how many there were
    ended_by: str = ""  # name of the signal that ended it, and its workers with it (empty: none did)
    slots: tuple[int, ...] = ()  # indices of its devices on the node (empty: not known yet)


class Present(Message, frozen=True, kw_only=True, tag="rendezvous-presence"):
    """The values of a torchrun that others are to know, for as long as it lives."""

    id: int  # by which it knows the answer
    name: str  # its name in the rendezvous
    store: str  # "host:port" of its store, for rounds that it is first in
    left: bool = False  # it has ended its part in good order
    at_work: AtWork | None = None  # what its workers do (None: an older release, which does not say)


class ReadRound(Message, frozen=True, kw_only=True, tag="rendezvous-read"):
    """Asks for the state of the job's rendezvous."""

    id: int  # by which it knows the answer


class WriteRound(Message, frozen=True, kw_only=True, tag="rendezvous-write"):
    """Sets the state of the job's rendezvous, if it still has this token."""

    largest = LARGE

    id: int  # by which it knows the answer
    value: bytes  # the state, which is torch's own
    token: int  # of the state that it replaces (0: there is none)


class Watching(Message, frozen=True, kw_only=True, tag="watch-hello"):
    """The first message of a worker of such a torchrun whose script has `elasticd.watch()`."""

    job: str  # the job's name
    torchrun: str  # its torchrun's name in the rendezvous
    local_rank: int  # on its node
    pid: int  # process id
    round: int  # number of the round
    world: int  # workers of the round
    nodes: int  # torchruns of the round
    least: int  # torchruns that the round may shrink to
    release: str = ""  # of the sender's elasticd


class Lap(Message, frozen=True, kw_only=True, tag="step-time"):
    """One optimizer step of one process."""

    step: int  # index
    seconds: float  # of its own computation
    wall: float  # seconds of the step
    work: float = 1.0  # what the seconds were spent on, in a unit that is the same everywhere


# -- from the agent ------------------------------------------------------------------------------------------


class Joined(Message, frozen=True, kw_only=True, tag="joined"):
    """The job's nodes are complete."""

    node_rank: int  # this node's index among them
    nodes: int  # their count


class Attending(Message, frozen=True, kw_only=True, tag="rendezvous-welcome"):
    """The answer to `Attend`."""

    address: str  # host that this node listens on for the others


class Torchrun(StoredValue, frozen=True, kw_only=True, tag="torchrun"):
    """A torchrun in restart mode as its agent keeps it in the store."""

    node: str  # its node
    store: str  # "host:port" of its store
    status: Literal["here", "left", "died", "out"] = "here"  # out: it is to take no part
    reason: str = ""  # why it is out


class RoundAnswer(Message, frozen=True, kw_only=True, tag="rendezvous-state"):
    """The state of the job's rendezvous, after what was asked."""

    largest = LARGE

    id: int  # of what it answers
    value: bytes = b""  # the state, which is torch's own
    token: int = 0  # of the state (0: there is none)
    done: bool = True  # what was asked was done
    torchruns: dict[str, Torchrun] = msgspec.field(default_factory=dict)  # all that the store knows of, by name
    error: str = ""  # why the store cannot be asked now


# -- agent to leader -----------------------------------------------------------------------------------------


class StepTime(Message, frozen=True, kw_only=True, tag="device-step-time"):
    """A step time in restart mode, to the leader."""

    device: str  # "node/local rank"
    by: Watching  # the process
    lap: Lap  # its step


class TorchrunState(Message, frozen=True, kw_only=True, tag="restart-torchrun"):
    """To the leader: a torchrun in restart mode. Said at each change, and again every few seconds."""

    job: str  # the job's name
    torchrun: str  # its name in the rendezvous
    status: Literal["here", "left", "died"]  # left: it has ended in good order
    at_work: AtWork = AtWork()  # what its workers do


#: What a torchrun in restart mode says to its agent's rounds, and no leader hears.
OfRounds = Attend | Present | ReadRound | WriteRound | Watching | Lap
