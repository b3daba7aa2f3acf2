"""What a worker does about proposals: from reading one to the swap, or back."""

from __future__ import annotations

from typing import Any

import msgspec

from elasticd.machines.worker.switch_state import (
    Aborted,
    Cancel,
    DropOld,
    Effect,
    Failed,
    Gathered,
    GatherFailed,
    Move,
    Moved,
    MoveFailed,
    Phase,
    Prepare,
    Proposed,
    Recorded,
    ReportDoubt,
    ReportKept,
    ReportPrepared,
    ReportRefused,
    ReportSwapped,
    Retire,
    Say,
    Stands,
    State,
    Swap,
    Unexpected,
    Voted,
    Voting,
)

Step = tuple[State, tuple[Effect, ...]]


def to(state: State, **changes: Any) -> State:
    return msgspec.structs.replace(state, **changes)


def rest(state: State, **changes: Any) -> State:
    """Back to where the plan in force (if any) leaves this rank, with no proposal."""
    state = to(state, proposal=0, joins=False, aborted=None, ok=False, **changes)
    if state.fenced:
        return to(state, phase=Phase.FENCED)
    return to(state, phase=Phase.TRAINING if state.trains else Phase.STANDBY)


def ignore(state: State, event: Any) -> Step:
    return state, ()


def stale(state: State, event: Moved | MoveFailed | Gathered | GatherFailed) -> Step:
    """The end of a move that was left: superseded, fenced off, or stopped."""
    if event.number >= state.seen and state.phase not in (Phase.DOUBT, Phase.STOPPED):
        raise Unexpected(f"{type(event).__name__} of {event.number} in phase {state.phase.value}")
    return state, ()


def keep(state: State, reason: str) -> Step:
    number = state.proposal
    return rest(state), (Cancel(number=number), ReportKept(number=number, reason=reason))


# -- a proposal --------------------------------------------------------------------------------------------


def proposed(state: State, event: Proposed) -> Step:
    if event.number <= state.seen:
        return state, ()  # read again, after a reconnect
    drop: tuple[Effect, ...] = ()
    if state.holds_old and not state.trains and not state.fenced:
        drop = (DropOld(),)  # a leaver that is used again: the next proposal proves the record
        state = to(state, holds_old=False)
    state = to(
        state,
        phase=Phase.PREPARING,
        proposal=event.number,
        seen=event.number,
        joins=event.joins,
        aborted=None,
    )
    return state, (*drop, Prepare(number=event.number))


def superseded(state: State, event: Proposed) -> Step:
    """A new proposal while one is open here: the leader has closed the old one, this rank missed why."""
    if event.number <= state.seen:
        return state, ()
    kept, effects = keep(state, f"superseded by {event.number}")
    after, more = proposed(kept, event)
    return after, (*effects, *more)


def proposed_moving(state: State, event: Proposed) -> Step:
    """For one that only joins: the old members will not come any more."""
    return kept_for_later(state, event) if state.trains else superseded(state, event)


def kept_for_later(state: State, event: Proposed) -> Step:
    """Others have heard the end of this switch already; here it is on its way."""
    return (
        (state, ())
        if event.number <= state.seen
        else (to(state, later=event.number, later_joins=event.joins), ())
    )


def recorded(state: State, event: Recorded) -> Step:
    state = to(state, recorded=max(state.recorded, event.number))
    if state.holds_old and not state.trains and not state.fenced and event.number >= state.number:
        return to(state, holds_old=False), (DropOld(),)
    return state, ()


def recorded_fenced(state: State, event: Recorded) -> Step:
    """The others recovered, and this rank's copies were of no use: it stands by."""
    if event.number <= state.fence:
        return state, ()
    seen = max(state.seen, event.number)
    return State(seen=seen, fence=state.fence, leaving=state.leaving), (Retire(),)


def abort(state: State, event: Aborted) -> Step:
    if event.number != state.proposal:
        if event.number <= state.seen:
            return state, ()  # read again
        # Never seen open, so never prepared: the leader waits for this member's word all the same.
        kept = (ReportKept(number=event.number, reason=event.reason),) if state.trains else ()
        return to(state, seen=event.number), kept
    if state.voting == event.number:  # the number is in a vote under way: what that says comes first
        return to(state, aborted=event.reason), ()
    return keep(state, event.reason)


def abort_moving(state: State, event: Aborted) -> Step:
    """Others may already have said ok: go through with it, and say not ok."""
    if event.number == state.later:
        kept = (ReportKept(number=event.number, reason=event.reason),)
        return to(state, later=0, seen=event.number), kept
    if event.number != state.proposal:
        return state, ()
    return to(state, aborted=event.reason), ()


def stands(state: State, event: Stands) -> Step:
    if event.number != state.proposal:
        return state, ()  # cancelled meanwhile
    report = ReportPrepared(number=event.number)
    if state.trains and not state.fenced:
        return to(state, phase=Phase.READY), (report,)
    return to(state, phase=Phase.MOVING), (report, Move(number=event.number))


def failed(state: State, event: Failed) -> Step:
    if event.number != state.proposal:
        return state, ()
    return to(state, phase=Phase.WITHDRAWN), (ReportRefused(number=event.number, reason=event.reason),)


def voting(state: State, event: Voting) -> Step:
    return to(state, voting=state.proposal if state.phase is Phase.READY else 0), ()


def voted(state: State, event: Voted) -> Step:
    number = state.voting
    agreed = number != 0 and number == state.proposal and set(event.prepared) == {number}
    effects: tuple[Effect, ...] = (DropOld(),) if state.holds_old else ()
    state = to(state, voting=0, holds_old=False)
    if agreed:
        return to(state, phase=Phase.MOVING), (*effects, Move(number=number))
    if state.aborted is not None:
        state, more = keep(state, state.aborted)
        return state, (*effects, *more)
    return state, effects


def moved(state: State, event: Moved) -> Step:
    if event.number != state.proposal:
        return stale(state, event)
    ok = state.aborted is None
    return to(state, phase=Phase.SAYING, ok=ok), (Say(number=event.number, ok=ok),)


def move_failed(state: State, event: MoveFailed) -> Step:
    """Not ok is said all the same, so that the others need not wait to learn it."""
    if event.number != state.proposal:
        return stale(state, event)
    return to(state, phase=Phase.SAYING, ok=False, aborted=state.aborted or event.reason), (
        Say(number=event.number, ok=False),
    )


def swap(state: State) -> Step:
    number, member = state.proposal, state.joins
    held = state.trains or state.holds_old
    state = to(state, number=number, trains=member, holds_old=held, fenced=False, side=0)
    return rest(state), (Swap(number=number, member=member), ReportSwapped(number=number))


def gathered(state: State, event: Gathered) -> Step:
    if event.number != state.proposal:
        return stale(state, event)
    if not all(event.oks):
        return keep(state, state.aborted or "another rank said not ok")
    state, effects = swap(state)
    if state.holds_old and not state.trains and state.number <= state.recorded:  # others heard the end earlier
        return to(state, holds_old=False), (*effects, DropOld())
    return state, effects


def gather_failed(state: State, event: GatherFailed) -> Step:
    if event.number != state.proposal:
        return stale(state, event)
    if not state.ok:  # without this rank's ok nobody can have swapped
        return keep(state, state.aborted or event.reason)
    return to(state, phase=Phase.DOUBT), (ReportDoubt(number=state.proposal, reason=event.reason),)
