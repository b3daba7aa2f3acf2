"""The position of a rank's main thread: words of memory that a worker shares with its agent, and what is told
of them.

The main thread writes where it is whenever that changes, without a lock or a system call. The agent reads it a
few times a second, so that it is known also where that thread holds the interpreter's lock and no other thread
of the process runs.

    word 0   `MAGIC`
    word 1   the step that is under way, and one more; 0 between two steps; there in a task of `TASKS` the
             number of that, from -1 downwards
    word 2   a count of changes (31 bits) above the rank that is waited for, and one more (24 bits), above the
             place (8 bits)
    word 3   microseconds that a step takes at most, of late; 0 before that is known
    word 4   microseconds that it stays at one place of a step's computation at most, of late

The memory file goes on after `STACK` bytes: there the interpreter writes its stacks, at the signal that the
worker names (`faulthandler`).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from elasticd.codec.message import Message

MAGIC = 0x7768657265 + (1 << 48)  # "where", version 1
WORDS = struct.Struct("<qqqqq")
#: What one change adds to word 2.
CHANGE = 1 << 32
#: Where stacks begin in the memory file, in bytes.
STACK = 4096

#: What the main thread is at. An older agent shows a number that it does not know as `OTHER`.
SCRIPT, LOADER, FORWARD, LOSS, BACKWARD, UPDATE, TENSOR, BOUNDARY, REDUCE, VOTE, OTHER = range(11)
#: And between two steps, in what elasticd itself does or calls there.
IDLE, FIRST, OPTIMIZER, SCHEDULER, CALLBACK, EVALUATION, READING, MOVING, SAVING = range(11, 20)
#: As people are told.
NAMES = (
    "its script's own code",
    "its loader",
    "the forward pass",
    "the loss",
    "the backward pass",
    "the update",
    "a collective of its tensor-parallel group",
    "a message of its pipeline",
    "the reduction of gradients",
    "the vote",
    "a collective",
    "a wait for the coordinator",
    "the first values of its parameters (init)",
    "the optimizer's factory",
    "the scheduler's factory",
    "a callback",
    "an evaluation",
    "the reading of a checkpoint",
    "the move of its state to another plan",
    "the writing of the last checkpoint",
)
#: What all members of a plan do together between two steps, as the script calls it.
TASKS = ("job.evaluate()", "job.state_dict()", "job.save_pretrained()", "job.expert_load()")
#: In a step, what takes about as long each time.
COMPUTES = frozenset({FORWARD, LOSS, BACKWARD, UPDATE})
#: In which it waits for other ranks.
WAITS = frozenset({TENSOR, BOUNDARY, REDUCE, VOTE, OTHER})
#: Between two steps, what is told by its name. In a step's places it is there for an evaluation's sake.
BETWEEN = frozenset({FIRST, OPTIMIZER, SCHEDULER, CALLBACK, EVALUATION, READING, MOVING, SAVING})
#: The user's, which a start and each switch call.
FACTORIES = frozenset({OPTIMIZER, SCHEDULER})
_EVALUATES = frozenset({LOADER, FORWARD, LOSS})
#: What communication is labelled with, where that is no collective of another kind.
LABELS = {
    "input": LOADER,
    "tensor": TENSOR,
    "context": TENSOR,
    "boundary": BOUNDARY,
    "reduce": REDUCE,
    "vote": VOTE,
}


class Place(NamedTuple):
    """The position of a main thread, as its words of memory say."""

    step: int | None  # index of the step under way, None between two steps
    place: int  # index in `NAMES`
    rank: int | None  # rank that it waits for, None where that is not one rank
    changes: int  # count of changes: the same place at another time is another value
    usual: float  # seconds that a step takes at most (0: not known)
    stay: float  # seconds at one place of a step's computation, at most
    task: str = ""  # of `TASKS`, that is under way between two steps

    @property
    def name(self) -> str:
        """As people are told. Between two steps whatever elasticd does not do itself is the script's own."""
        if self.begins:
            return f"{NAMES[self.place]} (in its plan's first steps)"
        if self.waits or self.step is not None or self.place in BETWEEN:
            return NAMES[self.place]
        return NAMES[EVALUATION if self.place in _EVALUATES else SCRIPT]

    @property
    def waits(self) -> bool:
        """For other ranks."""
        return self.place in WAITS

    @property
    def computes(self) -> bool:
        """In a step, in what takes about as long each time, and it is known how long."""
        return self._in_computation and self.usual > 0

    @property
    def begins(self) -> bool:
        """In the computation of one of a plan's first two steps. How long that takes nobody knows: what is done
        once is done there, as a compilation."""
        return self._in_computation and not self.usual

    @property
    def _in_computation(self) -> bool:
        return self.step is not None and self.place in COMPUTES


def read(data: bytes) -> Place | None:
    """The place that these bytes say; None where they are no such words."""
    if len(data) < WORDS.size:
        return None
    magic, step, word, usual, stay = WORDS.unpack_from(data)
    if magic != MAGIC:
        return None
    place, rank = word & 0xFF, (word >> 8) & 0xFFFFFF
    return Place(
        step=step - 1 if step > 0 else None,
        place=place if place < len(NAMES) else OTHER,
        rank=rank - 1 if rank else None,
        changes=word >> 32,
        usual=max(0, usual) / 1e6,
        stay=max(0, stay) / 1e6,
        task=TASKS[-step - 1] if -len(TASKS) <= step < 0 else "",
    )


class Whereabouts(Message, frozen=True, kw_only=True, tag="whereabouts"):
    """A worker shares its words of memory with its agent: the memory file comes with the message."""

    signal: int = 0  # at which the worker writes its stacks into that file (0: none)


class Halted(Message, frozen=True, kw_only=True, tag="worker-halt"):
    """To the leader: a worker's main thread stands still at one place, or moves again."""

    job: str  # the job's name
    device: str  # "node/local rank"
    incarnation: str  # id of this start of the worker's process
    place: str = ""  # as people are told (empty: it moves again)
    step: int = -1  # index of the step under way, -1 between two steps
    rank: int = -1  # rank that it waits for, -1 where that is not one rank
    waits: bool = False  # it waits for other ranks
    computes: bool = False  # it is in a computation of the step, for longer than that has taken of late
    seconds: float = 0.0  # at this place so far
    stack: str = ""  # of its threads
    task: str = ""  # what all members do together between two steps, as the script calls it (empty: nothing)
