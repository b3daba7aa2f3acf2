"""What a worker does about faults: it comes to rest, and says what it holds."""

from __future__ import annotations

from elasticd.machines.worker.switch_moves import Step, swap, to
from elasticd.machines.worker.switch_state import (
    Cancel,
    DropOld,
    Effect,
    Fenced,
    Gathered,
    GatherFailed,
    Interrupt,
    Lost,
    Moved,
    MoveFailed,
    Ordered,
    Phase,
    Renounce,
    ReportLost,
    ReportStanding,
    Rested,
    Retire,
    State,
    Stop,
    ToldToGo,
    Voted,
)

# -- a fault -----------------------------------------------------------------------------------------------


def lost(state: State, event: Lost) -> Step:
    """The others are gone: what has been prepared beside stays until the fence closes it."""
    return to(state, phase=Phase.BEREFT, voting=0), (ReportLost(reason=event.reason),)


def fence(state: State, event: Fenced) -> State:
    return to(
        state,
        fence=event.number,
        seen=max(state.seen, event.number),
        evicted=event.evicted,
        later=0,
        fenced=state.fenced or state.trains or state.holds_old or state.side != 0,
    )


def over(state: State, event: Fenced) -> bool:
    """Whether this fence was read before, or was resolved before the proposal that this rank is busy with: a
    worker that comes back to its agent is told it again."""
    return event.number <= state.fence or (event.number < state.proposal and not event.evicted)


def fenced_training(state: State, event: Fenced) -> Step:
    """The main thread is at work: it is freed, and comes to rest. What was prepared is closed."""
    if over(state, event):
        return state, ()
    cancel: tuple[Effect, ...] = (Cancel(number=state.proposal),) if state.proposal else ()
    state = to(fence(state, event), phase=Phase.INTERRUPTED, proposal=0, joins=False, aborted=None, voting=0)
    return state, (*cancel, Interrupt())


def fenced_moving(state: State, event: Fenced) -> Step:
    """In the midst of a move: its end, which is near, tells what this rank holds."""
    if over(state, event):
        return state, ()
    return to(fence(state, event), phase=Phase.INTERRUPTED), (Interrupt(),)


def fenced_at_rest(state: State, event: Fenced) -> Step:
    """Nothing is under way here but, perhaps, a preparation."""
    if over(state, event):
        return state, ()
    cancel: tuple[Effect, ...] = (Cancel(number=state.proposal),) if state.proposal else ()
    state = to(fence(state, event), proposal=0, joins=False, aborted=None)
    state, said = stand(state)
    return state, (*cancel, Interrupt(), *said)


def fenced_in_doubt(state: State, event: Fenced) -> Step:
    """The verified copy stays beside the old one: either may be what the others go on from."""
    if over(state, event):
        return state, ()
    state = to(state, side=state.proposal, proposal=0, joins=False, ok=False)
    return fenced_at_rest(state, event)


def fenced_again(state: State, event: Fenced) -> Step:
    """Before the main thread came to rest."""
    if event.number <= state.fence:
        return state, ()
    return fence(state, event), (Interrupt(),)


def stand(state: State) -> Step:
    """At rest: what is held is told. An incarnation that was fenced off owns nothing any more."""
    if state.evicted:
        after = State(seen=state.seen, fence=state.fence, leaving=state.leaving)
        return after, (Retire() if state.leaving else Renounce(),)  # who goes does not come again
    phase = Phase.FENCED if state.fenced else Phase.STANDBY
    return to(state, phase=phase), (ReportStanding(fence=state.fence),)


def rested(state: State, event: Rested | Lost) -> Step:
    return stand(state)


def voted_interrupted(state: State, event: Voted) -> Step:
    """The vote completed all the same: its update is made; it moves nothing any more."""
    effects: tuple[Effect, ...] = (DropOld(),) if state.holds_old else ()
    return to(state, voting=0, holds_old=False), effects


def unmoved(state: State, event: Moved | MoveFailed) -> Step:
    """A move that ends after the fence: ok was not said, so nobody can have swapped."""
    if event.number != state.proposal:
        return state, ()
    return to(state, proposal=0, joins=False, aborted=None), (Cancel(number=event.number),)


def gathered_interrupted(state: State, event: Gathered) -> Step:
    """All said ok before the fence: this rank swapped, and stands under the new plan."""
    if event.number != state.proposal:
        return state, ()
    if not all(event.oks):
        return to(state, proposal=0, joins=False, aborted=None, ok=False), (Cancel(number=event.number),)
    state, effects = swap(state)
    return to(state, phase=Phase.INTERRUPTED, fenced=True), effects


def gather_failed_interrupted(state: State, event: GatherFailed) -> Step:
    if event.number != state.proposal:
        return state, ()
    after = to(state, proposal=0, joins=False, aborted=None, ok=False)
    if state.ok:
        return to(after, side=event.number, fenced=True), ()
    return after, (Cancel(number=event.number),)


def told_to_go(state: State, event: ToldToGo) -> Step:
    """It stays what it is, a source most of all, until a plan without it is in force: see `machines.switch`."""
    return to(state, leaving=True), ()


def stop(state: State, event: Ordered) -> Step:
    return to(state, phase=Phase.STOPPED), (Stop(reason=event.reason),)
