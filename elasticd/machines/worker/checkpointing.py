"""The checkpoint machine of one rank: when a checkpoint is written, and when it is complete. Pure.

Theory of operation. The vote that ends a step carries one small word from every rank: which checkpoint it is
busy with, and how far it is. All ranks see the same words, so that all decide alike, without a message of
their own:

- begin, at a step that is a multiple of `every`, if all words say free: each rank copies what it is to write,
  and a thread of its own brings that to disk while training goes on. If one is still busy, all skip alike.
- begin at once, if a word says asked and all others free: a user asked for a checkpoint now, and the leader
  told one rank. While one is busy, the rank that was told asks on.
- close, once the words of all ranks that began say written: the first of them merges what they wrote, has it
  published and gives it its name. It is busy until that is done; the others are free.
- give up, if a word says failed, or if one of those that began is in the plan no more and says nothing.
- give up, and begin none, when the job goes back to a state before the checkpoint's.

A word counts as it was when the vote's record was made, whatever came meanwhile. So a rank that says written
may be told to give up or to close, and one whose thread still writes may be told to give up: it is free
when its thread has let go.

Invariants (`test_checkpointing.py` walks the interleavings): at most one checkpoint is under way; it is
closed only after all that began it have written; and no rank copies before its last copy is on disk or given
up.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec
from elasticd_planner.value import Value


class Status(IntEnum):
    """The state of a rank's work for the checkpoint that was begun last."""

    FREE = 0  # nothing
    WRITING = 1  # its share of the state goes to disk
    WRITTEN = 2  # its share is on disk
    FAILED = 3  # its share could not be written
    BUSY = 4  # closing it, or letting go of one that was given up
    ASKED = 5  # nothing, and a checkpoint is to be made now; of words alone


#: A word is `step * _BASE + status`.
_BASE = 8
_PART = (Status.WRITING, Status.WRITTEN, Status.FAILED)


class CheckpointState(Value, frozen=True, kw_only=True):
    """A rank's knowledge of checkpoints."""

    every: int  # steps from one checkpoint to the next
    step: int = -1  # of the last checkpoint that was begun here (-1: none)
    status: Status = Status.FREE
    members: int = 0  # ranks that began it
    first: bool = False  # whether this rank closes it
    asked: bool = False  # the leader told this rank to have one made now

    @property
    def word(self) -> int:
        """This rank's word in the vote's record."""
        return Status.ASKED if self.asked and self.status is Status.FREE else self.busy_word

    @property
    def busy_word(self) -> int:
        """The same whatever was asked for."""
        return 0 if self.status is Status.FREE else self.step * _BASE + self.status


class Begin(Value, frozen=True, kw_only=True):
    """Copy this rank's share of the state after `step` updates, and write it in the background."""

    step: int


class Close(Value, frozen=True, kw_only=True):
    """All ranks have written their shares: merge them, have the checkpoint published and give it its name."""

    step: int


class GiveUp(Value, frozen=True, kw_only=True):
    """Stop writing this checkpoint; the first rank removes its files."""

    step: int
    reason: str
    said: bool = False  # a rank failed, and says itself why
    failed_here: bool = False  # this rank is one that failed
    first: bool = False  # it is the first of those, which logs it


class Skip(Value, frozen=True, kw_only=True):
    """The checkpoint due at `step` is not begun."""

    step: int
    reason: str


CheckpointEffect = Begin | Close | GiveUp | Skip
CheckpointStep = tuple[CheckpointState, tuple[CheckpointEffect, ...]]


def due(state: CheckpointState, step: int) -> bool:
    """Returns True if a checkpoint is due after `step` updates."""
    return step % state.every == 0 and step > 0


def voted(
    state: CheckpointState, step: int, words: Sequence[int], rank: int, *, now_due: bool, begins: bool = True
) -> CheckpointStep:
    """Takes the outcome of a vote.

    Args:
        state: What this rank knows.
        step: Updates applied after that vote.
        words: The word of each rank, in rank order.
        rank: This rank's index.
        now_due: Whether a checkpoint of this step is wanted.
        begins: Whether one may begin. False: the job goes back to a state before this step.
    """
    statuses = [(word // _BASE, Status(word % _BASE)) for word in words]
    state, effects = _settle(state, statuses, rank)
    busy = [at for at, status in statuses if status not in (Status.FREE, Status.ASKED)]
    asked = any(status is Status.ASKED for _, status in statuses)
    if not begins or (not now_due and (busy or not asked)):
        return state, effects
    if busy:
        skip = Skip(step=step, reason=f"the checkpoint of step {busy[0]} is still being written")
        return state, (*effects, skip)
    state = CheckpointState(
        every=state.every, step=step, status=Status.WRITING, members=len(words), first=rank == 0
    )
    return state, (*effects, Begin(step=step))


def _settle(state: CheckpointState, told: Sequence[tuple[int, Status]], rank: int) -> CheckpointStep:
    """Closes the checkpoint that this rank has a part in, or gives it up, as the words say."""
    if state.status not in _PART:
        return state, ()
    part = [status for at, status in told if at == state.step and status in _PART]
    if Status.FAILED in part:
        failed = [place for place, word in enumerate(told) if word == (state.step, Status.FAILED)]
        effect = GiveUp(
            step=state.step,
            reason="a rank could not write its part",
            said=True,
            failed_here=rank in failed,
            first=rank == failed[0],
        )
        return _give_up(state, effect)
    if len(part) < state.members:
        return _give_up(state, GiveUp(step=state.step, reason="a rank that began it left the plan"))
    if any(status is not Status.WRITTEN for status in part):
        return state, ()
    if state.first:
        return msgspec.structs.replace(state, status=Status.BUSY), (Close(step=state.step),)
    return msgspec.structs.replace(state, status=Status.FREE), ()


def _give_up(state: CheckpointState, effect: GiveUp) -> CheckpointStep:
    return msgspec.structs.replace(state, status=Status.BUSY), (effect,)


def left(state: CheckpointState) -> CheckpointStep:
    """This rank is no member of the plan any more: the others give up what it began with them, or go on to
    the next while it closes this one, which would then be taken for the newer."""
    state = msgspec.structs.replace(state, asked=False)
    if state.status is Status.FREE:
        return state, ()
    return _give_up(state, GiveUp(step=state.step, reason="this rank left the plan"))


def went_back(state: CheckpointState, step: int) -> CheckpointStep:
    """The job goes on from the state after `step` updates: all ranks give up a checkpoint of a later one, which
    a start would take for the newest."""
    if state.status is Status.FREE or state.step <= step:
        return state, ()
    return _give_up(state, GiveUp(step=state.step, reason=f"the job went back to step {step}"))


def asked(state: CheckpointState) -> CheckpointState:
    """The leader wants a checkpoint now, and told this rank. One that begins before it says so counts."""
    return msgspec.structs.replace(state, asked=True)


def wrote(state: CheckpointState, step: int, *, ok: bool) -> CheckpointState:
    """This rank's thread has written its share of the checkpoint of `step`, or could not."""
    if step != state.step or state.status is not Status.WRITING:
        return state
    return msgspec.structs.replace(state, status=Status.WRITTEN if ok else Status.FAILED)


def done(state: CheckpointState, step: int) -> CheckpointState:
    """The checkpoint of `step` was closed, or this rank's thread has stopped writing it."""
    if step != state.step or state.status is not Status.BUSY:
        return state
    return msgspec.structs.replace(state, status=Status.FREE)
