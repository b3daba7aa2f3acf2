"""When a checkpoint is written, and when it is whole: a pure machine, one on each rank.

Theory of operation. The vote that ends a step carries one small word from every rank: which checkpoint it is
busy with, and how far it is. All ranks see the same words, so that all decide alike, without a message of
their own:

- begin, at a step that is a multiple of `every`, if all words say free: each rank copies what it is to write,
  and a thread of its own brings that to disk while training goes on. If one is still busy, all skip alike.
- close, once the words of all ranks that began say written: the first of them merges what they wrote, has it
  published and gives it its name. It is busy until that is done; the others are free.
- give up, if a word says failed, or if one of those that began is in the plan no more and says nothing.

A word counts as it was when the vote's record was made, whatever came meanwhile. So a rank that says written
may be told to give up or to close, and one whose thread still writes may be told to give up: it is free
when its thread has let go.

Invariants (tests/machines/test_saving.py walks the interleavings): at most one checkpoint is under way; it is
closed only after all that began it have written; and no rank copies before its last copy is on disk or given
up.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec
from elasticd_planner.value import Value


class Status(IntEnum):
    FREE = 0
    WRITING = 1
    WRITTEN = 2
    FAILED = 3
    BUSY = 4  # closing it, or letting go of one that was given up


#: A word is `step * _BASE + status`.
_BASE = 8
_PART = (Status.WRITING, Status.WRITTEN, Status.FAILED)


class State(Value, frozen=True, kw_only=True):
    """`step` is the last checkpoint that was begun here (-1: none), `members` how many began it, `first`
    whether this rank closes it."""

    every: int
    step: int = -1
    status: Status = Status.FREE
    members: int = 0
    first: bool = False

    @property
    def word(self) -> int:
        """What goes into the vote's record."""
        return 0 if self.status is Status.FREE else self.step * _BASE + self.status


class Begin(Value, frozen=True, kw_only=True):
    """Copy this rank's share of the state after `step` updates, and write it in the background."""

    step: int


class Close(Value, frozen=True, kw_only=True):
    """All have written: merge, publish, name."""

    step: int


class GiveUp(Value, frozen=True, kw_only=True):
    """Stop writing it; the first removes what there is of it."""

    step: int
    reason: str


class Skip(Value, frozen=True, kw_only=True):
    """The checkpoint due at `step` is not begun."""

    step: int
    reason: str


Effect = Begin | Close | GiveUp | Skip
Step = tuple[State, tuple[Effect, ...]]


def due(state: State, step: int) -> bool:
    return step % state.every == 0 and step > 0


def voted(state: State, step: int, words: Sequence[int], rank: int, *, now_due: bool) -> Step:
    """The vote after which `step` updates are applied carried these words, in rank order. `now_due`: a
    checkpoint of this step is wanted."""
    told = [(word // _BASE, Status(word % _BASE)) for word in words]
    state, effects = _settle(state, told)
    if not now_due:
        return state, effects
    busy = [at for at, status in told if status is not Status.FREE]
    if busy:
        skip = Skip(step=step, reason=f"the checkpoint of step {busy[0]} is still being written")
        return state, (*effects, skip)
    state = State(every=state.every, step=step, status=Status.WRITING, members=len(words), first=rank == 0)
    return state, (*effects, Begin(step=step))


def _settle(state: State, told: Sequence[tuple[int, Status]]) -> Step:
    """What the words say about the checkpoint that this rank has a part in."""
    if state.status not in _PART:
        return state, ()
    part = [status for at, status in told if at == state.step and status in _PART]
    if Status.FAILED in part:
        return _give_up(state, "a rank could not write its part")
    if len(part) < state.members:
        return _give_up(state, "a rank that began it left the plan")
    if any(status is not Status.WRITTEN for status in part):
        return state, ()
    if state.first:
        return msgspec.structs.replace(state, status=Status.BUSY), (Close(step=state.step),)
    return msgspec.structs.replace(state, status=Status.FREE), ()


def _give_up(state: State, reason: str) -> Step:
    return msgspec.structs.replace(state, status=Status.BUSY), (GiveUp(step=state.step, reason=reason),)


def left(state: State) -> Step:
    """This rank is no member of the plan any more: the others give up what it began with them, or go on to
    the next while it closes this one, which would then be taken for the newer."""
    if state.status is Status.FREE:
        return state, ()
    return _give_up(state, "this rank left the plan")


def wrote(state: State, step: int, *, ok: bool) -> State:
    """This rank's thread has brought its part to disk, or could not."""
    if step != state.step or state.status is not Status.WRITING:
        return state
    return msgspec.structs.replace(state, status=Status.WRITTEN if ok else Status.FAILED)


def done(state: State, step: int) -> State:
    """Nothing is left to do for it: it was closed, or its thread let go of it."""
    if step != state.step or state.status is not Status.BUSY:
        return state
    return msgspec.structs.replace(state, status=Status.FREE)
