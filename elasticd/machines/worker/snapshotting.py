"""When a worker copies a snapshot, and into which of its memory files: a pure machine, one on each rank.

Theory of operation. A worker has a few slots, each a memory file. A snapshot is copied into a slot that is
free, and its file handed to the agent, who keeps it and sends it on: until it says that the snapshot is freed,
the worker leaves the slot alone. The vote that ends a step carries one bit of every rank: a snapshot is due and
a slot is free here. All see the same bits; where every one is set all copy, else none does, so that a set of
snapshots is of one step without a message of its own.

Files are made beside training, when the size of this rank's share is known, for fresh memory is slow: a slot
without room for the share is not free. A worker that is let in by another agent, or as another incarnation,
leaves the files that it had handed over to whoever has them, and makes others.

Invariants (tests/machines/test_snapping.py): a slot in use is never copied into nor made anew; all ranks copy
at the same steps; a bit that was said holds until that vote ends, whatever comes meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from elasticd_planner.value import Value

#: Slots of a worker: the newest set of snapshots that is whole, and the one that is to become it.
SLOTS = 2


class Slot(Value, frozen=True, kw_only=True):
    """A memory file of `room` bytes (0: none yet). used: plan and step of what lies in it. making: a file with
    more room is on its way."""

    room: int = 0
    used: tuple[int, int] | None = None
    making: bool = False


class State(Value, frozen=True, kw_only=True):
    """A snapshot is due every `every` steps; a share of plan `plan` takes `need` bytes."""

    every: int
    plan: int = -1
    need: int = 0
    slots: tuple[Slot, ...] = (Slot(),) * SLOTS

    def free(self) -> int | None:
        """A slot that may be copied into."""
        for index, slot in enumerate(self.slots):
            if slot.used is None and not slot.making and slot.room >= self.need:
                return index
        return None

    def ready(self, plan: int, step: int) -> bool:
        """For the record of the vote after which `step` updates are applied under plan `plan`."""
        return step % self.every == 0 and plan == self.plan and self.free() is not None


def first(every: int) -> State:
    """At the start of a worker. With a snapshot at every step one more slot is copied into while the one before
    is still on its way to another node: with two, every other step went without."""
    return State(every=every, slots=(Slot(),) * (SLOTS + (every == 1)))


class Make(Value, frozen=True, kw_only=True):
    """Make a memory file of so many bytes for a slot, in place of what it has; say `made` then."""

    slot: int
    size: int


Step = tuple[State, tuple[Make, ...]]


def sized(state: State, plan: int, need: int) -> Step:
    """Under this plan a share takes so many bytes."""
    return _make(msgspec.structs.replace(state, plan=plan, need=need))


def made(state: State, slot: int, room: int) -> Step:
    return _make(_with(state, slot, msgspec.structs.replace(state.slots[slot], room=room, making=False)))


def voted(state: State, step: int, bits: Sequence[bool]) -> tuple[State, int | None]:
    """The vote after which `step` updates are applied carried these bits: the slot to copy into, if any."""
    slot = state.free() if bits and all(bits) else None
    if slot is None:
        return state, None
    return _with(state, slot, msgspec.structs.replace(state.slots[slot], used=(state.plan, step))), slot


def freed(state: State, plan: int, step: int) -> Step:
    """The agent let that snapshot go, or it could not be copied."""
    slots = [
        msgspec.structs.replace(slot, used=None) if slot.used == (plan, step) else slot for slot in state.slots
    ]
    return _make(msgspec.structs.replace(state, slots=tuple(slots)))


def left(state: State) -> Step:
    """Another agent, or another incarnation: what was handed over stays as it is, in files of others."""
    slots = [Slot() if slot.used is not None else slot for slot in state.slots]
    return _make(msgspec.structs.replace(state, slots=tuple(slots)))


def _with(state: State, index: int, slot: Slot) -> State:
    return msgspec.structs.replace(state, slots=(*state.slots[:index], slot, *state.slots[index + 1 :]))


def _make(state: State) -> Step:
    """Whatever is too small and free gets a new file."""
    effects = []
    for index, slot in enumerate(state.slots):
        if slot.used is None and not slot.making and slot.room < state.need:
            state = _with(state, index, msgspec.structs.replace(slot, making=True))
            effects.append(Make(slot=index, size=state.need))
    return state, tuple(effects)
