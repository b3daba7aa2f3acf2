"""The snapshot machine of one rank: when it copies a snapshot, and into which of its memory files. Pure.

Theory of operation. A worker has a few slots, each a memory file. A snapshot is copied into a slot that is
free, and its file handed to the agent, who keeps it and sends it on: until it says that the snapshot is freed,
the worker leaves the slot alone. The vote that ends a step carries one bit of every rank: a snapshot is due and
a slot is free here. All see the same bits; where every one is set all copy, else none does, so that a set of
snapshots is of one step without a message of its own.

Files are made beside training, when the size of this rank's share is known, for fresh memory is slow: a slot
without room for the share is not free. Where there is no memory for a file, the next plan's share is tried.
A worker that is let in by another agent, or as another incarnation, leaves the files that it had handed over to
whoever has them, and makes others.

Invariants (`test_snapshotting.py`): a slot in use is never copied into nor made anew; all ranks copy
at the same steps; a bit that was said holds until that vote ends, whatever comes meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from elasticd_planner.value import Value

#: Slots of a worker: for the newest complete set of snapshots, and for the next one.
SLOTS = 2


class Slot(Value, frozen=True, kw_only=True):
    """A memory file for one snapshot."""

    room: int = 0  # bytes (0: there is no file yet)
    used: tuple[int, int] | None = None  # plan and step of the snapshot in it
    making: bool = False  # whether a larger file is being made
    lacking: bool = False  # whether there was no memory for a file of this plan's share


class SnapshotState(Value, frozen=True, kw_only=True):
    """A rank's knowledge of snapshots."""

    every: int  # steps from one snapshot to the next
    plan: int = -1  # number of the plan in force (-1: none)
    need: int = 0  # bytes of this rank's share under that plan
    slots: tuple[Slot, ...] = (Slot(),) * SLOTS

    def free(self) -> int | None:
        """Returns the index of a slot that may be copied into, if any."""
        for index, slot in enumerate(self.slots):
            if slot.used is None and not slot.making and slot.room >= self.need:
                return index
        return None

    def ready(self, plan: int, step: int) -> bool:
        """Returns this rank's bit in the vote after which `step` updates are applied under plan `plan`."""
        return step % self.every == 0 and plan == self.plan and self.free() is not None


def first(every: int) -> SnapshotState:
    """At the start of a worker. With a snapshot at every step one more slot is copied into while the one before
    is still on its way to another node: with two, every other step went without."""
    return SnapshotState(every=every, slots=(Slot(),) * (SLOTS + (every == 1)))


class Make(Value, frozen=True, kw_only=True):
    """Make a memory file for a slot, in place of the one it has, and call `made` then."""

    slot: int
    size: int  # bytes


SnapshotStep = tuple[SnapshotState, tuple[Make, ...]]


def sized(state: SnapshotState, plan: int, need: int) -> SnapshotStep:
    """Takes the bytes of this rank's share under a new plan, or of one that has grown."""
    slots = tuple(msgspec.structs.replace(slot, lacking=False) for slot in state.slots)
    return _make(msgspec.structs.replace(state, plan=plan, need=need, slots=slots))


def made(state: SnapshotState, slot: int, room: int) -> SnapshotStep:
    """A slot has a new memory file of `room` bytes."""
    return _make(_with(state, slot, msgspec.structs.replace(state.slots[slot], room=room, making=False)))


def unmade(state: SnapshotState, slot: int, size: int) -> SnapshotStep:
    """There is no memory for a file of `size` bytes: the slot has none."""
    lacks = msgspec.structs.replace(state.slots[slot], room=0, making=False, lacking=size == state.need)
    return _make(_with(state, slot, lacks))


def voted(state: SnapshotState, step: int, bits: Sequence[bool]) -> tuple[SnapshotState, int | None]:
    """Takes the bits of a vote, after which `step` updates are applied: returns the slot to copy to, if any."""
    slot = state.free() if bits and all(bits) else None
    if slot is None:
        return state, None
    return _with(state, slot, msgspec.structs.replace(state.slots[slot], used=(state.plan, step))), slot


def freed(state: SnapshotState, plan: int, step: int) -> SnapshotStep:
    """The agent freed that snapshot, or it could not be copied."""
    slots = [
        msgspec.structs.replace(slot, used=None) if slot.used == (plan, step) else slot for slot in state.slots
    ]
    return _make(msgspec.structs.replace(state, slots=tuple(slots)))


def left(state: SnapshotState) -> SnapshotStep:
    """The worker has another agent or incarnation: files that it handed over are not its own any more."""
    slots = [Slot() if slot.used is not None else slot for slot in state.slots]
    return _make(msgspec.structs.replace(state, slots=tuple(slots)))


def _with(state: SnapshotState, index: int, slot: Slot) -> SnapshotState:
    return msgspec.structs.replace(state, slots=(*state.slots[:index], slot, *state.slots[index + 1 :]))


def _make(state: SnapshotState) -> SnapshotStep:
    """Asks for a new file for each free slot that is too small."""
    effects = []
    for index, slot in enumerate(state.slots):
        if slot.used is None and not (slot.making or slot.lacking) and slot.room < state.need:
            state = _with(state, index, msgspec.structs.replace(slot, making=True))
            effects.append(Make(slot=index, size=state.need))
    return state, tuple(effects)
