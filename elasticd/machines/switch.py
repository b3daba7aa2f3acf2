"""A worker's part in a switch of plans: a pure state machine, one for each rank.

How a switch goes (DESIGN 6). A proposal is prepared in the background while training goes on. Once the
transition group (old and new members) stands, the rank puts the number into its vote; a vote in which all
records carry the same number ends training under the old plan, for every rank after the same step. Ranks then
move state into side buffers, and gather one *ok* each. All ok: all swap. One not ok:
all go on as before.

Invariants, over all ranks that live (tests/machines/test_switch.py walks the interleavings):

- If one rank swapped to n, no rank that lives keeps the old plan for good: it swaps or is in doubt.
- A rank says ok only after it verified all that it needs, and never after it read an abort.
- The old copy is dropped only after a vote under the new number completed (which proves that all members of
  the new plan swapped), or, by a leaver, after the plan was recorded.
- Only a rank that said ok and did not hear the others is in doubt. Who never said ok may keep the old plan,
  since nobody can have heard an ok from all. A rank that began to move therefore goes through with it also
  after an abort, and says not ok; one that only joins waits for the old members until the next proposal
  proves (it opens after all of them reported) that they will not come.

Every event that a phase can meet is in `TABLE`; one that is not raises `Unexpected`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import msgspec
from elasticd_planner.value import Value


class Phase(Enum):
    STANDBY = "standby"  # holds no plan: waits to be used
    TRAINING = "training"  # under the plan `number`
    PREPARING = "preparing"  # trains (or waits) while a proposal is prepared beside
    READY = "ready"  # prepared: votes the number
    WITHDRAWN = "withdrawn"  # could not prepare: votes 0 and waits for the abort
    MOVING = "moving"  # training is over: state moves into side buffers
    SAYING = "saying"  # this rank has said ok or not ok
    DOUBT = "doubt"  # said ok, and did not hear what the others said: waits for the leader's word
    STOPPED = "stopped"


class State(Value, frozen=True, kw_only=True):
    """`number` is the plan in force here (0: none), `proposal` the one being switched to (0: none), `seen`
    the highest number ever proposed. `trains` tells whether this rank is a member of the plan in force, and
    `joins` whether of the proposed one; `voting` is the number in the vote record that is under way."""

    phase: Phase = Phase.STANDBY
    number: int = 0
    proposal: int = 0
    seen: int = 0
    trains: bool = False
    joins: bool = False
    voting: int = 0
    aborted: str | None = None
    ok: bool = False
    holds_old: bool = False


# -- events ------------------------------------------------------------------------------------------------


class Event(Value, frozen=True, kw_only=True):
    pass


class Proposed(Event, frozen=True, kw_only=True):
    """A proposal was read. `joins`: this rank is a member of its plan."""

    number: int
    joins: bool


class Aborted(Event, frozen=True, kw_only=True):
    number: int
    reason: str


class Recorded(Event, frozen=True, kw_only=True):
    number: int


class Stands(Event, frozen=True, kw_only=True):
    """All is prepared, the transition group last."""

    number: int


class Failed(Event, frozen=True, kw_only=True):
    """The preparation failed here."""

    number: int
    reason: str


class Voting(Event, frozen=True, kw_only=True):
    """The vote's record is made now; the new state's `voting` goes into it."""


class Voted(Event, frozen=True, kw_only=True):
    """The vote completed with these numbers in rank order."""

    prepared: tuple[int, ...]


class Moved(Event, frozen=True, kw_only=True):
    number: int


class MoveFailed(Event, frozen=True, kw_only=True):
    number: int
    reason: str


class Gathered(Event, frozen=True, kw_only=True):
    number: int
    oks: tuple[bool, ...]


class GatherFailed(Event, frozen=True, kw_only=True):
    number: int
    reason: str


class Ordered(Event, frozen=True, kw_only=True):
    """The job is stopped from outside, or a collective of the plan in force failed."""

    reason: str


# -- effects -----------------------------------------------------------------------------------------------


class Effect(Value, frozen=True, kw_only=True):
    pass


class Prepare(Effect, frozen=True, kw_only=True):
    number: int


class Cancel(Effect, frozen=True, kw_only=True):
    """Drop all that was made for this number; the plan in force is untouched."""

    number: int


class Move(Effect, frozen=True, kw_only=True):
    """Enter the transition group: move and verify."""

    number: int


class Say(Effect, frozen=True, kw_only=True):
    """Take part in the all-gather of ok."""

    number: int
    ok: bool


class Swap(Effect, frozen=True, kw_only=True):
    """The new plan is in force; the old copy is kept."""

    number: int
    member: bool


class DropOld(Effect, frozen=True, kw_only=True):
    pass


class Stop(Effect, frozen=True, kw_only=True):
    reason: str


class ReportPrepared(Effect, frozen=True, kw_only=True):
    number: int


class ReportRefused(Effect, frozen=True, kw_only=True):
    number: int
    reason: str


class ReportSwapped(Effect, frozen=True, kw_only=True):
    number: int


class ReportKept(Effect, frozen=True, kw_only=True):
    number: int
    reason: str


class ReportDoubt(Effect, frozen=True, kw_only=True):
    number: int
    reason: str


class Unexpected(RuntimeError):
    """An event that this phase cannot meet: a fault in the program around the machine."""


Step = tuple[State, tuple[Effect, ...]]
E = TypeVar("E", bound=Event)


def step(state: State, event: Event) -> Step:
    """The machine. It needs no clock: deadlines are the leader's, who aborts."""
    handler = TABLE.get((state.phase, type(event)))
    if handler is None:
        raise Unexpected(f"{type(event).__name__} in phase {state.phase.value}")
    return handler(state, event)


def _to(state: State, **changes: Any) -> State:
    return msgspec.structs.replace(state, **changes)


def _rest(state: State, **changes: Any) -> State:
    """Back to where the plan in force (if any) leaves this rank, with no proposal."""
    phase = Phase.TRAINING if state.trains else Phase.STANDBY
    return _to(state, phase=phase, proposal=0, joins=False, aborted=None, ok=False, **changes)


def _ignore(state: State, event: Any) -> Step:
    return state, ()


def _stale(state: State, event: Moved | MoveFailed | Gathered | GatherFailed) -> Step:
    """The end of a move that was left: superseded, or stopped."""
    if event.number >= state.seen and state.phase not in (Phase.DOUBT, Phase.STOPPED):
        raise Unexpected(f"{type(event).__name__} of {event.number} in phase {state.phase.value}")
    return state, ()


def _keep(state: State, reason: str) -> Step:
    number = state.proposal
    return _rest(state), (Cancel(number=number), ReportKept(number=number, reason=reason))


def _proposed(state: State, event: Proposed) -> Step:
    if event.number <= state.seen:
        return state, ()  # read again, after a reconnect
    drop: tuple[Effect, ...] = ()
    if state.holds_old and not state.trains:
        drop = (DropOld(),)  # a leaver that is used again: the next proposal proves the record
        state = _to(state, holds_old=False)
    state = _to(
        state,
        phase=Phase.PREPARING,
        proposal=event.number,
        seen=event.number,
        joins=event.joins,
        aborted=None,
    )
    return state, (*drop, Prepare(number=event.number))


def _superseded(state: State, event: Proposed) -> Step:
    """A new proposal while one is open here: the leader has closed the old one, this rank missed why."""
    if event.number <= state.seen:
        return state, ()
    kept, effects = _keep(state, f"superseded by {event.number}")
    after, more = _proposed(kept, event)
    return after, (*effects, *more)


def _proposed_moving(state: State, event: Proposed) -> Step:
    """For one that only joins: the old members will not come any more."""
    return (state, ()) if state.trains else _superseded(state, event)


def _recorded(state: State, event: Recorded) -> Step:
    if state.holds_old and not state.trains and event.number >= state.number:
        return _to(state, holds_old=False), (DropOld(),)
    return state, ()


def _abort(state: State, event: Aborted) -> Step:
    if event.number != state.proposal:
        if event.number <= state.seen:
            return state, ()  # read again
        # Never seen open, so never prepared: the leader waits for this member's word all the same.
        kept = (ReportKept(number=event.number, reason=event.reason),) if state.trains else ()
        return _to(state, seen=event.number), kept
    if state.voting == event.number:  # the number is in a vote under way: what that says comes first
        return _to(state, aborted=event.reason), ()
    return _keep(state, event.reason)


def _abort_moving(state: State, event: Aborted) -> Step:
    """Others may already have said ok: go through with it, and say not ok."""
    if event.number != state.proposal:
        return state, ()
    return _to(state, aborted=event.reason), ()


def _stands(state: State, event: Stands) -> Step:
    if event.number != state.proposal:
        return state, ()  # cancelled meanwhile
    report = ReportPrepared(number=event.number)
    if state.trains:
        return _to(state, phase=Phase.READY), (report,)
    return _to(state, phase=Phase.MOVING), (report, Move(number=event.number))


def _failed(state: State, event: Failed) -> Step:
    if event.number != state.proposal:
        return state, ()
    return _to(state, phase=Phase.WITHDRAWN), (ReportRefused(number=event.number, reason=event.reason),)


def _voting(state: State, event: Voting) -> Step:
    return _to(state, voting=state.proposal if state.phase is Phase.READY else 0), ()


def _voted(state: State, event: Voted) -> Step:
    number = state.voting
    agreed = number != 0 and number == state.proposal and set(event.prepared) == {number}
    effects: tuple[Effect, ...] = (DropOld(),) if state.holds_old else ()
    state = _to(state, voting=0, holds_old=False)
    if agreed:
        return _to(state, phase=Phase.MOVING), (*effects, Move(number=number))
    if state.aborted is not None:
        state, more = _keep(state, state.aborted)
        return state, (*effects, *more)
    return state, effects


def _moved(state: State, event: Moved) -> Step:
    if event.number != state.proposal:
        return _stale(state, event)
    ok = state.aborted is None
    return _to(state, phase=Phase.SAYING, ok=ok), (Say(number=event.number, ok=ok),)


def _move_failed(state: State, event: MoveFailed) -> Step:
    """Not ok is said all the same, so that the others need not wait to learn it."""
    if event.number != state.proposal:
        return _stale(state, event)
    return _to(state, phase=Phase.SAYING, ok=False, aborted=state.aborted or event.reason), (
        Say(number=event.number, ok=False),
    )


def _gathered(state: State, event: Gathered) -> Step:
    if event.number != state.proposal:
        return _stale(state, event)
    if not all(event.oks):
        return _keep(state, state.aborted or "another rank said not ok")
    number, member = state.proposal, state.joins
    old = state.trains
    swapped = _rest(_to(state, number=number, trains=member, holds_old=old))
    return swapped, (Swap(number=number, member=member), ReportSwapped(number=number))


def _gather_failed(state: State, event: GatherFailed) -> Step:
    if event.number != state.proposal:
        return _stale(state, event)
    if not state.ok:  # without this rank's ok nobody can have swapped
        return _keep(state, state.aborted or event.reason)
    return _to(state, phase=Phase.DOUBT), (ReportDoubt(number=state.proposal, reason=event.reason),)


def _stop(state: State, event: Ordered) -> Step:
    return _to(state, phase=Phase.STOPPED), (Stop(reason=event.reason),)


P = Phase
Handler = Callable[[State, Any], Step]
TABLE: dict[tuple[Phase, type[Event]], Handler] = {
    **{(phase, Ordered): _stop for phase in P if phase is not P.STOPPED},
    **{(phase, Recorded): _recorded for phase in P},
    **{(phase, Proposed): _proposed for phase in (P.STANDBY, P.TRAINING)},
    **{(phase, Proposed): _superseded for phase in (P.PREPARING, P.READY, P.WITHDRAWN)},
    **{(phase, Proposed): _proposed_moving for phase in (P.MOVING, P.SAYING)},
    **{(phase, Aborted): _abort for phase in (P.STANDBY, P.TRAINING, P.PREPARING, P.READY, P.WITHDRAWN)},
    **{(phase, Aborted): _abort_moving for phase in (P.MOVING, P.SAYING)},
    **{(phase, Voting): _voting for phase in (P.TRAINING, P.PREPARING, P.READY, P.WITHDRAWN)},
    **{(phase, Voted): _voted for phase in (P.TRAINING, P.PREPARING, P.READY, P.WITHDRAWN)},
    # What a thread of a cancelled preparation still says is met in any phase, and meant for no one.
    **{(phase, kind): _ignore for phase in P for kind in (Stands, Failed)},
    **{(phase, kind): _stale for phase in P for kind in (Moved, MoveFailed, Gathered, GatherFailed)},
    (P.PREPARING, Stands): _stands,
    (P.PREPARING, Failed): _failed,
    (P.MOVING, Moved): _moved,
    (P.MOVING, MoveFailed): _move_failed,
    (P.SAYING, Gathered): _gathered,
    (P.SAYING, GatherFailed): _gather_failed,
    **{(phase, kind): _ignore for phase in (P.STOPPED, P.DOUBT) for kind in (Proposed, Aborted)},
    (P.STOPPED, Ordered): _ignore,
}
