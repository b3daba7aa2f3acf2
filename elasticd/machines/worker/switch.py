"""The switch machine of one rank: it prepares a proposed plan, switches to it, and comes to rest after a fault.

Pure: `step(state, event) -> (state, effects)`. The wire messages of `elasticd.wire.worker` are its events as
they are read, and it returns the messages that the leader is to read as `SendToLeader` effects.

How a switch goes (DESIGN 6). A proposal is prepared in the background while training goes on. Once the
transition group (old and new members) stands, the rank puts the number into its vote; a vote in which all
records carry the same number ends training under the old plan, for every rank after the same step. Ranks then
move state into side buffers, and all-gather one *ok* each. If every rank says ok, all swap to the new plan; if
one says not ok, all go on under the old one.

How a fault goes. The leader writes a fence, which closes every number up to its own. A rank that reads it
aborts the collectives that it waits in, comes to rest, and reports which copies of the state it holds, of which
plans, at which step. From these reports the leader makes a recovery: a proposal without a vote, whose members
move as soon as the transition group stands. It may be closed by another fence in its turn.

How a rank drains (after a preemption notice). It trains, votes and is a source of state as before, until it
stands by without a copy that others may need: after a plan without it was recorded, or at once where it stood
by.

Invariants, over all ranks that live (tests/machines/test_switch*.py walk the interleavings):

- If one rank swapped to n, every rank that lives holds a verified copy of n, until a vote under n completed or
  a fence's recovery took its place.
- A rank says ok only after it verified all that it needs, and never after it read an abort or a fence.
- A copy is dropped only after a vote under a newer number completed (which proves that all members of that plan
  swapped), or, by a rank that is no member of the newer plan, after that plan was recorded.
- Only a rank that said ok and did not hear the others is in doubt. A rank that never said ok may keep the old
  plan, since no rank can have heard an ok from all. A rank that began to move therefore completes the
  all-gather also after an abort, and says not ok; one that only joins waits for the old members until the next
  proposal proves (it opens after all of them reported) that they will not come. Once it has said its word it
  waits for the end as they do: the next proposal may well be read before.
- After a fence no update is made until a recovery swapped.
- A rank that drains departs only while it holds no copy; and then it does, whatever comes.

Every event that a phase can meet is in `TABLE`; any other raises `Unexpected`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, get_args

import msgspec
from elasticd_planner.value import Value

from elasticd.wire.worker import (
    Abort,
    Fenced,
    InDoubt,
    PeersLost,
    Prepared,
    Recorded,
    Refused,
    Rejected,
    Shutdown,
    StayedOnPlan,
)


class SwitchPhase(Enum):
    """The phase of a rank."""

    STANDBY = "standby"  # holds no plan: waits to be used
    TRAINING = "training"  # under the plan `number`
    PREPARING = "preparing"  # trains (or waits) while a proposal is prepared beside
    READY = "ready"  # prepared: votes the number
    REFUSED = "refused"  # could not prepare: votes 0 and waits for the abort
    MOVING = "moving"  # training is over: state moves into side buffers
    ACKING = "acking"  # this rank has said ok or not ok
    IN_DOUBT = "in doubt"  # said ok, and did not hear what the others said: waits for a fence
    PEERS_LOST = "peers lost"  # a collective of the plan in force failed: at rest, waits for a fence
    STOPPING = "stopping"  # a fence was read, and the main thread has not come to rest yet
    FENCED = "fenced"  # at rest with its copies, has reported them: waits for a recovery
    STOPPED = "stopped"


#: In these the plan in force may train, unless a fence holds it.
BESIDE = (SwitchPhase.TRAINING, SwitchPhase.PREPARING, SwitchPhase.READY, SwitchPhase.REFUSED)


class SwitchState(Value, frozen=True, kw_only=True):
    """A rank's knowledge of switches."""

    phase: SwitchPhase = SwitchPhase.STANDBY
    number: int = 0  # of the plan in force here (0: none)
    step: int = 0  # updates applied here when the last event came
    trains: bool = False  # whether this rank is a member of the plan in force
    proposal: int = 0  # number of the plan being switched to (0: none)
    joins: bool = False  # whether this rank is a member of the proposed plan
    seen: int = 0  # the highest number ever proposed or closed
    recorded: int = 0  # the highest plan that was read as recorded
    voting: int = 0  # the number in the vote record that is under way (0: none)
    aborted: str | None = None  # why the proposal was aborted, while the abort cannot be followed yet
    ok: bool = False  # what this rank said in the all-gather of ok
    holds_old: bool = False  # whether it keeps copies beside the one in force
    #: Number of a verified copy that this rank said ok to, without hearing whether all did (0: none).
    side: int = 0
    later: int = 0  # a proposal that was read before the end of the one that this rank moves to (0: none)
    later_joins: bool = False  # whether this rank is a member of the `later` plan
    fence: int = 0  # the highest fence read
    fenced: bool = False  # training is off until a recovery's swap
    evicted: bool = False  # this incarnation was fenced off; once at rest it owns nothing any more
    draining: bool = False  # this process is to end as soon as it holds nothing that others may need

    @property
    def at_work(self) -> bool:
        """True if the plan in force may make a step here."""
        return self.trains and not self.fenced and self.phase in BESIDE


# -- events: the messages that a rank reads or has prepared, and these -----------------------------------------


class Proposed(Value, frozen=True, kw_only=True):
    """A proposal was read."""

    number: int
    joins: bool  # whether this rank is a member of its plan


class Rested(Value, frozen=True, kw_only=True):
    """The main thread has come to rest between two steps, or after a move."""


class Voting(Value, frozen=True, kw_only=True):
    """The vote's record is made now; the new state's `voting` goes into it."""


class Voted(Value, frozen=True, kw_only=True):
    """The vote completed."""

    prepared: tuple[int, ...]  # the number that each rank voted, in rank order


class StateMoved(Value, frozen=True, kw_only=True):
    """All that this rank needs under the proposed plan is in side buffers, and verified."""

    number: int


class MoveFailed(Value, frozen=True, kw_only=True):
    """The move ended without that; the transition group may be gone with it."""

    number: int
    reason: str


class Gathered(Value, frozen=True, kw_only=True):
    """The all-gather of ok completed."""

    number: int
    oks: tuple[bool, ...]  # in rank order


class GatherFailed(Value, frozen=True, kw_only=True):
    """The all-gather of ok ended without its result: another rank may have it."""

    number: int
    reason: str


class DrainRequested(Value, frozen=True, kw_only=True):
    """This process is to end; the job goes on without it."""


#: The ends of a move to the proposed plan.
Outcome = StateMoved | MoveFailed | Gathered | GatherFailed
#: The messages of the agent that are events as they are; `Propose` becomes `Proposed`.
AgentOrder = Abort | Fenced | Recorded | Rejected | Shutdown
#: `Prepared` and `Refused` are the ends of a preparation here, `PeersLost` that a collective of the plan in
#: force failed, the main thread being at rest before the update of its step. They are sent on if they still
#: hold.
SwitchEvent = (
    AgentOrder | Prepared | Refused | PeersLost | Proposed | Rested | Voting | Voted | Outcome | DrainRequested
)

# -- effects ---------------------------------------------------------------------------------------------------


class SwitchEffect(Value, frozen=True, kw_only=True):
    """An action for the rank, in the order of the effects."""


class SendToLeader(SwitchEffect, frozen=True, kw_only=True):
    """Send this message to the leader."""

    message: Prepared | Refused | StayedOnPlan | InDoubt | PeersLost


class ReportState(SwitchEffect, frozen=True, kw_only=True):
    """Send the leader which copies are held, of which plans, at which step, in answer to this fence."""

    fence: int


class Prepare(SwitchEffect, frozen=True, kw_only=True):
    """Make the transition group and the modules of the proposed plan, beside training."""

    number: int


class Cancel(SwitchEffect, frozen=True, kw_only=True):
    """Drop all that was made for this number; the plan in force is untouched."""

    number: int


class MoveState(SwitchEffect, frozen=True, kw_only=True):
    """Enter the transition group: move and verify."""

    number: int


class AllGatherOk(SwitchEffect, frozen=True, kw_only=True):
    """Take part in the all-gather of ok."""

    number: int
    ok: bool


class Swap(SwitchEffect, frozen=True, kw_only=True):
    """Put the new plan into force, keep the old copy, and send the leader what the switch cost."""

    number: int
    member: bool  # whether this rank trains under the new plan


class DropOld(SwitchEffect, frozen=True, kw_only=True):
    """Drop every copy but the one in force."""


class DropState(SwitchEffect, frozen=True, kw_only=True):
    """Drop every copy: the job went on without this rank, which stands by."""


class DropStateAndRejoin(SwitchEffect, frozen=True, kw_only=True):
    """Drop every copy and take a new incarnation."""


class Interrupt(SwitchEffect, frozen=True, kw_only=True):
    """Abort the collectives that this rank may wait in, never the optimizer; the copies stay."""


class StopTraining(SwitchEffect, frozen=True, kw_only=True):
    """End: the job is stopped from outside."""

    reason: str
    orderly: bool = False  # the workers were told to go: this is no failure
    refused: bool = False  # the leader does not take this worker, and would not take it after a restart


class LeaveJob(SwitchEffect, frozen=True, kw_only=True):
    """End, after a drain: no rank needs anything of this one any more."""


class Unexpected(RuntimeError):
    """An event that this phase cannot meet: a fault in the program around the machine."""


_Step = tuple[SwitchState, tuple[SwitchEffect, ...]]
_Handler = Callable[[SwitchState, Any], _Step]


def step(state: SwitchState, event: SwitchEvent, updates: int = 0) -> _Step:
    """Takes one event. The machine needs no clock: deadlines are the leader's, who aborts.

    Args:
        state: What the last event left.
        event: What happened.
        updates: Updates that this rank has applied, which some of its messages tell.

    Returns:
        The new state, and the effects to carry out in their order.

    Raises:
        Unexpected: The phase cannot meet this event.
    """
    handler = TABLE.get((state.phase, type(event)))
    if handler is None:
        raise Unexpected(f"{type(event).__name__} in phase {state.phase.value}")
    if isinstance(event, Proposed) and event.number <= state.seen:
        handler = ignore  # read again, after a reconnect
    elif isinstance(event, Outcome) and event.number != state.proposal:
        handler = ignore if state.phase is SwitchPhase.STOPPING else stale
    state, effects = handler(to(state, step=updates), event)
    if state.later and state.phase in (SwitchPhase.TRAINING, SwitchPhase.STANDBY):
        later, state = Proposed(number=state.later, joins=state.later_joins), to(state, later=0)
        if later.number > state.seen:  # else a fenced rank, which does not take it up, went on to a newer one
            state, more = proposed(state, later)
            effects = (*effects, *more)
    if state.draining and state.phase is SwitchPhase.STANDBY and not state.holds_old:
        return to(state, phase=SwitchPhase.STOPPED), (*effects, LeaveJob())
    return state, effects


def to(state: SwitchState, **changes: Any) -> SwitchState:
    """The state with these fields changed."""
    return msgspec.structs.replace(state, **changes)


def without_proposal(state: SwitchState, **changes: Any) -> SwitchState:
    """The state without a proposal, and with these fields changed."""
    return to(state, proposal=0, joins=False, aborted=None, ok=False, **changes)


def resume(state: SwitchState) -> SwitchState:
    """Back to where the plan in force (if any) leaves this rank, with no proposal."""
    state = without_proposal(state)
    if state.fenced:
        return to(state, phase=SwitchPhase.FENCED)
    return to(state, phase=SwitchPhase.TRAINING if state.trains else SwitchPhase.STANDBY)


def ignore(state: SwitchState, event: Any) -> _Step:
    """Nothing follows from this event in this phase."""
    return state, ()


def stale(state: SwitchState, event: Any) -> _Step:
    """The end of a move that was left: superseded, fenced off, or stopped."""
    if event.number >= state.seen and state.phase not in (SwitchPhase.IN_DOUBT, SwitchPhase.STOPPED):
        raise Unexpected(f"{type(event).__name__} of {event.number} in phase {state.phase.value}")
    return state, ()


def stayed(state: SwitchState, number: int, reason: str) -> SendToLeader:
    """Tells the leader that the plan in force goes on here."""
    return SendToLeader(message=StayedOnPlan(number=number, step=state.step, reason=reason))


def stay(state: SwitchState, reason: str) -> _Step:
    """Gives the proposal up: the plan in force goes on."""
    number = state.proposal
    return resume(state), (Cancel(number=number), stayed(state, number, reason))


# -- a proposal: from reading it to the swap, or back ----------------------------------------------------------


def proposed(state: SwitchState, event: Proposed) -> _Step:
    """A proposal of a number that was not seen before is prepared beside whatever runs."""
    drop: tuple[SwitchEffect, ...] = ()
    if state.holds_old and not state.trains and not state.fenced:
        drop = (DropOld(),)  # it was no member and is used again: the next proposal proves the record
        state = to(state, holds_old=False)
    state = to(
        state,
        phase=SwitchPhase.PREPARING,
        proposal=event.number,
        seen=event.number,
        joins=event.joins,
        aborted=None,
    )
    return state, (*drop, Prepare(number=event.number))


def superseded(state: SwitchState, event: Proposed) -> _Step:
    """A new proposal while one is open here: the leader has closed the old one, this rank missed why."""
    state, effects = stay(state, f"superseded by {event.number}")
    state, more = proposed(state, event)
    return state, (*effects, *more)


def proposed_moving(state: SwitchState, event: Proposed) -> _Step:
    """To a rank that only joins it says that the old members will not come any more."""
    return postponed(state, event) if state.trains else superseded(state, event)


def postponed(state: SwitchState, event: Proposed) -> _Step:
    """Others have heard the end of this switch already; here it is on its way."""
    return to(state, later=event.number, later_joins=event.joins), ()


def recorded(state: SwitchState, event: Recorded) -> _Step:
    """A rank that left the recorded plan drops its copies; members keep the old one until their next vote."""
    state = to(state, recorded=max(state.recorded, event.number))
    if state.holds_old and not state.trains and not state.fenced and event.number >= state.number:
        return to(state, holds_old=False), (DropOld(),)
    return state, ()


def recorded_fenced(state: SwitchState, event: Recorded) -> _Step:
    """The others recovered, and this rank's copies were of no use: it stands by."""
    if event.number <= state.fence:
        return state, ()
    seen = max(state.seen, event.number)
    return SwitchState(seen=seen, fence=state.fence, draining=state.draining), (DropState(),)


def abort(state: SwitchState, event: Abort) -> _Step:
    """The open proposal is given up, at once or after the vote that has its number."""
    if event.number != state.proposal:
        if event.number <= state.seen:
            return state, ()  # read again
        # Never seen open, so never prepared: the leader waits for this member's word all the same.
        word = (stayed(state, event.number, event.reason),) if state.trains else ()
        return to(state, seen=event.number), word
    if state.voting == event.number:  # the number is in a vote under way, whose outcome comes first
        return to(state, aborted=event.reason), ()
    return stay(state, event.reason)


def abort_moving(state: SwitchState, event: Abort) -> _Step:
    """Others may already have said ok: the move goes on to the all-gather, in which this rank says not ok."""
    if event.number == state.later:
        return to(state, later=0, seen=event.number), (stayed(state, event.number, event.reason),)
    if event.number != state.proposal:
        return state, ()
    return to(state, aborted=event.reason), ()


def prepared(state: SwitchState, event: Prepared) -> _Step:
    """All is prepared: the next vote carries the number; a rank that makes no steps moves at once."""
    if event.number != state.proposal:
        return state, ()  # cancelled meanwhile
    if state.at_work:
        return to(state, phase=SwitchPhase.READY), (SendToLeader(message=event),)
    return to(state, phase=SwitchPhase.MOVING), (SendToLeader(message=event), MoveState(number=event.number))


def refused(state: SwitchState, event: Refused) -> _Step:
    """The preparation failed: the leader hears why, and aborts."""
    if event.number != state.proposal:
        return state, ()
    return to(state, phase=SwitchPhase.REFUSED), (SendToLeader(message=event),)


def voting(state: SwitchState, event: Voting) -> _Step:
    """The number that the vote being made carries: the one that was prepared, or none."""
    return to(state, voting=state.proposal if state.phase is SwitchPhase.READY else 0), ()


def voted(state: SwitchState, event: Voted) -> _Step:
    """A vote of one number by all ends training under the old plan; any other leaves it in force."""
    number = state.voting
    agreed = number != 0 and number == state.proposal and set(event.prepared) == {number}
    state, effects = voted_stopping(state, event)
    if agreed:
        return to(state, phase=SwitchPhase.MOVING), (*effects, MoveState(number=number))
    if state.aborted is not None:
        state, more = stay(state, state.aborted)
        return state, (*effects, *more)
    return state, effects


def moved(state: SwitchState, event: StateMoved) -> _Step:
    """All that this rank needs is verified: it says ok, unless the proposal was aborted meanwhile."""
    ok = state.aborted is None
    return to(state, phase=SwitchPhase.ACKING, ok=ok), (AllGatherOk(number=event.number, ok=ok),)


def move_failed(state: SwitchState, event: MoveFailed) -> _Step:
    """Not ok is said all the same, so that the others need not wait to learn it."""
    state = to(state, phase=SwitchPhase.ACKING, ok=False, aborted=state.aborted or event.reason)
    return state, (AllGatherOk(number=event.number, ok=False),)


def swap(state: SwitchState) -> _Step:
    """The proposed plan is in force from here on; the old copies stay beside it."""
    number, member = state.proposal, state.joins
    held = state.trains or state.holds_old or state.side != 0
    state = to(state, number=number, trains=member, holds_old=held, fenced=False, side=0)
    return resume(state), (Swap(number=number, member=member),)


def gathered(state: SwitchState, event: Gathered) -> _Step:
    """If every rank said ok the rank swaps; else the old plan goes on."""
    if not all(event.oks):
        return stay(state, state.aborted or "another rank said not ok")
    state, effects = swap(state)
    if state.holds_old and not state.trains and state.number <= state.recorded:  # others heard the end earlier
        return to(state, holds_old=False), (*effects, DropOld())
    return state, effects


def gather_failed(state: SwitchState, event: GatherFailed) -> _Step:
    """Without the others' words a rank that said ok is in doubt; one that did not keeps the old plan."""
    if not state.ok:  # without this rank's ok no rank can have swapped
        return stay(state, state.aborted or event.reason)
    word = InDoubt(number=state.proposal, step=state.step, reason=event.reason)
    return to(state, phase=SwitchPhase.IN_DOUBT), (SendToLeader(message=word),)


# -- a fault: the rank comes to rest, and reports what it holds ------------------------------------------------


def peers_lost(state: SwitchState, event: PeersLost) -> _Step:
    """The others are gone: what has been prepared beside stays until the fence closes it."""
    return to(state, phase=SwitchPhase.PEERS_LOST, voting=0), (SendToLeader(message=event),)


def fence(state: SwitchState, event: Fenced) -> SwitchState:
    """The state after a fence: its number closes all below it, and training is off where there is a copy."""
    return to(
        state,
        fence=event.number,
        seen=max(state.seen, event.number),
        evicted=event.evicted,
        later=0,
        fenced=state.fenced or state.trains or state.holds_old or state.side != 0,
    )


def resolved(state: SwitchState, event: Fenced) -> bool:
    """Returns True if this fence was read before, or was resolved before the proposal that this rank is busy
    with: a worker that comes back to its agent reads it again."""
    return event.number <= state.fence or (event.number < state.proposal and not event.evicted)


def fenced_beside(state: SwitchState, event: Fenced) -> _Step:
    """A preparation runs beside training, or beside a main thread that waits."""
    return (fenced_training if state.at_work else fenced_at_rest)(state, event)


def fenced_training(state: SwitchState, event: Fenced) -> _Step:
    """The main thread is at work: it is freed, and comes to rest. What was prepared is closed."""
    if resolved(state, event):
        return state, ()
    cancel: tuple[SwitchEffect, ...] = (Cancel(number=state.proposal),) if state.proposal else ()
    state = without_proposal(fence(state, event), phase=SwitchPhase.STOPPING, voting=0)
    return state, (*cancel, Interrupt())


def fenced_moving(state: SwitchState, event: Fenced) -> _Step:
    """In the midst of a move: its end, which is near, decides what this rank holds."""
    if resolved(state, event):
        return state, ()
    return to(fence(state, event), phase=SwitchPhase.STOPPING), (Interrupt(),)


def fenced_at_rest(state: SwitchState, event: Fenced) -> _Step:
    """Nothing is under way here but, perhaps, a preparation."""
    if resolved(state, event):
        return state, ()
    cancel: tuple[SwitchEffect, ...] = (Cancel(number=state.proposal),) if state.proposal else ()
    state, report = at_rest(without_proposal(fence(state, event)))
    return state, (*cancel, Interrupt(), *report)


def fenced_in_doubt(state: SwitchState, event: Fenced) -> _Step:
    """The verified copy stays beside the old one: either may be what the others go on from."""
    if resolved(state, event):
        return state, ()
    return fenced_at_rest(without_proposal(state, side=state.proposal), event)


def fenced_again(state: SwitchState, event: Fenced) -> _Step:
    """Before the main thread came to rest."""
    if event.number <= state.fence:
        return state, ()
    return fence(state, event), (Interrupt(),)


def at_rest(state: SwitchState, event: Rested | PeersLost | None = None) -> _Step:
    """Reports the holdings. An incarnation that was fenced off owns nothing any more."""
    if state.evicted:
        after = SwitchState(seen=state.seen, fence=state.fence, draining=state.draining)
        return after, (DropState() if state.draining else DropStateAndRejoin(),)
    phase = SwitchPhase.FENCED if state.fenced else SwitchPhase.STANDBY
    return to(state, phase=phase), (ReportState(fence=state.fence),)


def voted_stopping(state: SwitchState, event: Voted) -> _Step:
    """After a fence, too, a vote that completes has its update made; but it moves nothing any more."""
    effects: tuple[SwitchEffect, ...] = (DropOld(),) if state.holds_old else ()
    return to(state, voting=0, holds_old=False), effects


def moved_stopping(state: SwitchState, event: StateMoved | MoveFailed) -> _Step:
    """A move that ends after the fence: ok was not said, so no rank can have swapped."""
    return without_proposal(state), (Cancel(number=event.number),)


def gathered_stopping(state: SwitchState, event: Gathered) -> _Step:
    """All said ok before the fence: this rank swapped, and is under the new plan."""
    if not all(event.oks):
        return without_proposal(state), (Cancel(number=event.number),)
    state, effects = swap(state)
    return to(state, phase=SwitchPhase.STOPPING, fenced=True), effects


def gather_failed_stopping(state: SwitchState, event: GatherFailed) -> _Step:
    """The fault took the end of the all-gather: a copy that this rank said ok to stays beside."""
    if state.ok:
        return without_proposal(state, side=event.number, fenced=True), ()
    return without_proposal(state), (Cancel(number=event.number),)


# -- the end ---------------------------------------------------------------------------------------------------


def drain(state: SwitchState, event: DrainRequested) -> _Step:
    """The rank stays what it is, a source most of all, until a plan without it is in force: see `step`."""
    return to(state, draining=True), ()


def stop(state: SwitchState, event: Shutdown | Rejected) -> _Step:
    """The job is over for this rank, which ends."""
    orderly = isinstance(event, Shutdown) and event.orderly
    effect = StopTraining(reason=event.reason, orderly=orderly, refused=isinstance(event, Rejected))
    return to(state, phase=SwitchPhase.STOPPED), (effect,)


P = SwitchPhase

TABLE: dict[tuple[SwitchPhase, type], _Handler] = {
    **{(phase, kind): stop for kind in (Shutdown, Rejected) for phase in P if phase is not P.STOPPED},
    **{(phase, DrainRequested): drain for phase in P},
    **{(phase, Recorded): recorded for phase in P},
    **{(phase, Proposed): proposed for phase in (P.STANDBY, P.TRAINING, P.FENCED)},
    **{(phase, Proposed): superseded for phase in (P.PREPARING, P.READY, P.REFUSED)},
    (P.MOVING, Proposed): proposed_moving,
    (P.ACKING, Proposed): postponed,
    **{(phase, Abort): abort for phase in (*BESIDE, P.STANDBY, P.FENCED)},
    **{(phase, Abort): abort_moving for phase in (P.MOVING, P.ACKING)},
    **{(phase, Voting): voting for phase in (*BESIDE, P.STOPPING)},
    **{(phase, Voted): voted for phase in BESIDE},
    **{(phase, PeersLost): peers_lost for phase in BESIDE},
    **{(phase, Fenced): fenced_beside for phase in BESIDE},
    **{(phase, Fenced): fenced_moving for phase in (P.MOVING, P.ACKING)},
    **{(phase, Fenced): fenced_at_rest for phase in (P.STANDBY, P.PEERS_LOST, P.FENCED)},
    # The thread of a cancelled preparation may end in any phase: nothing waits for it.
    **{(phase, kind): ignore for phase in P for kind in (Prepared, Refused)},
    **{(phase, kind): stale for phase in P for kind in get_args(Outcome)},
    (P.FENCED, Recorded): recorded_fenced,
    (P.PREPARING, Prepared): prepared,
    (P.PREPARING, Refused): refused,
    (P.MOVING, StateMoved): moved,
    (P.MOVING, MoveFailed): move_failed,
    (P.ACKING, Gathered): gathered,
    (P.ACKING, GatherFailed): gather_failed,
    (P.IN_DOUBT, Fenced): fenced_in_doubt,
    (P.STOPPING, Fenced): fenced_again,
    (P.STOPPING, Rested): at_rest,
    (P.STOPPING, PeersLost): at_rest,
    (P.STOPPING, Voted): voted_stopping,
    (P.STOPPING, StateMoved): moved_stopping,
    (P.STOPPING, MoveFailed): moved_stopping,
    (P.STOPPING, Gathered): gathered_stopping,
    (P.STOPPING, GatherFailed): gather_failed_stopping,
    # The main thread says that it rests wherever it may have been freed.
    **{(phase, Rested): ignore for phase in P if phase is not P.STOPPING},
    **{
        (phase, kind): ignore
        for phase in (P.STOPPED, P.IN_DOUBT, P.PEERS_LOST, P.STOPPING)
        for kind in (Proposed, Abort)
    },
    # The main thread learns of the end only between two steps.
    **{(P.STOPPED, kind): ignore for kind in (Shutdown, Rejected, Fenced, PeersLost, Voting, Voted)},
}
