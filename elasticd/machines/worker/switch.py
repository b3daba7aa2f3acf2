"""A worker's part in switches and faults: a pure state machine, one for each rank.

How a switch goes (DESIGN 6). A proposal is prepared in the background while training goes on. Once the
transition group (old and new members) stands, the rank puts the number into its vote; a vote in which all
records carry the same number ends training under the old plan, for every rank after the same step. Ranks then
move state into side buffers, and gather one *ok* each. All ok: all swap. One not ok:
all go on as before.

How a fault goes. The leader writes a fence, which closes every number up to its own. A rank that reads it
aborts what it waits for, comes to rest, and says which copies it holds, of which plans, at which step. From
these words the leader makes a recovery: a proposal without a vote, whose members move as soon as the transition
group stands. It may be fenced off in its turn.

How a rank goes that was told to (a spot notice). It says so and changes nothing else: it trains, votes and is a
source as before, until it stands by without a copy that others may need. That is after a plan without it was
recorded, or at once where it stood by.

Invariants, over all ranks that live (tests/machines/test_switch*.py walk the interleavings):

- If one rank swapped to n, every rank that lives holds a verified copy of n, until a vote under n completed or
  a fence's recovery took its place.
- A rank says ok only after it verified all that it needs, and never after it read an abort or a fence.
- A copy is dropped only after a vote under a newer number completed (which proves that all members of that
  plan swapped), or, by a leaver, after that plan was recorded.
- Only a rank that said ok and did not hear the others is in doubt. Who never said ok may keep the old plan,
  since nobody can have heard an ok from all. A rank that began to move therefore goes through with it also
  after an abort, and says not ok; one that only joins waits for the old members until the next proposal
  proves (it opens after all of them reported) that they will not come. Once it has said its word it waits for
  the end as they do: the next proposal may well be read before.
- After a fence no update is made until a recovery swapped.
- Who was told to go departs only while it holds no copy; and then it does, whatever comes.

Every event that a phase can meet is in `TABLE`; one that is not raises `Unexpected`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elasticd.machines.worker.switch_faults import (
    fenced_again,
    fenced_at_rest,
    fenced_in_doubt,
    fenced_moving,
    fenced_training,
    gather_failed_interrupted,
    gathered_interrupted,
    lost,
    rested,
    stop,
    told_to_go,
    unmoved,
    voted_interrupted,
)
from elasticd.machines.worker.switch_moves import (
    Step,
    abort,
    abort_moving,
    failed,
    gather_failed,
    gathered,
    ignore,
    kept_for_later,
    move_failed,
    moved,
    proposed,
    proposed_moving,
    recorded,
    recorded_fenced,
    stale,
    stands,
    superseded,
    to,
    voted,
    voting,
)
from elasticd.machines.worker.switch_state import (
    Aborted,
    Cancel,
    Depart,
    DropOld,
    Effect,
    Event,
    Failed,
    Fenced,
    Gathered,
    GatherFailed,
    Interrupt,
    Lost,
    Move,
    Moved,
    MoveFailed,
    Ordered,
    Phase,
    Prepare,
    Proposed,
    Recorded,
    Renounce,
    ReportDoubt,
    ReportKept,
    ReportLost,
    ReportPrepared,
    ReportRefused,
    ReportStanding,
    ReportSwapped,
    Rested,
    Retire,
    Say,
    Stands,
    State,
    Stop,
    Swap,
    ToldToGo,
    Unexpected,
    Voted,
    Voting,
)


def step(state: State, event: Event) -> Step:
    """The machine. It needs no clock: deadlines are the leader's, who aborts."""
    handler = TABLE.get((state.phase, type(event)))
    if handler is None:
        raise Unexpected(f"{type(event).__name__} in phase {state.phase.value}")
    state, effects = handler(state, event)
    if state.later and state.phase in (Phase.TRAINING, Phase.STANDBY):
        later = Proposed(number=state.later, joins=state.later_joins)
        state, more = proposed(to(state, later=0), later)
        effects = (*effects, *more)
    if state.leaving and state.phase is Phase.STANDBY and not state.holds_old:
        return to(state, phase=Phase.STOPPED), (*effects, Depart())
    return state, effects


P = Phase
Handler = Callable[[State, Any], Step]
_OUTCOMES = (Moved, MoveFailed, Gathered, GatherFailed)
_BESIDE = (P.TRAINING, P.PREPARING, P.READY, P.WITHDRAWN)


def _by_thread(training: Handler, resting: Handler) -> Handler:
    """A preparation runs beside training, or beside a main thread that waits."""

    def handler(state: State, event: Any) -> Step:
        return (training if state.trains and not state.fenced else resting)(state, event)

    return handler


TABLE: dict[tuple[Phase, type[Event]], Handler] = {
    **{(phase, Ordered): stop for phase in P if phase is not P.STOPPED},
    **{(phase, ToldToGo): told_to_go for phase in P},
    **{(phase, Recorded): recorded for phase in P},
    **{(phase, Proposed): proposed for phase in (P.STANDBY, P.TRAINING, P.FENCED)},
    **{(phase, Proposed): superseded for phase in (P.PREPARING, P.READY, P.WITHDRAWN)},
    (P.MOVING, Proposed): proposed_moving,
    (P.SAYING, Proposed): kept_for_later,
    **{(phase, Aborted): abort for phase in (*_BESIDE, P.STANDBY, P.FENCED)},
    **{(phase, Aborted): abort_moving for phase in (P.MOVING, P.SAYING)},
    **{(phase, Voting): voting for phase in (*_BESIDE, P.INTERRUPTED)},
    **{(phase, Voted): voted for phase in _BESIDE},
    **{(phase, Lost): lost for phase in _BESIDE},
    **{(phase, Fenced): _by_thread(fenced_training, fenced_at_rest) for phase in _BESIDE},
    **{(phase, Fenced): fenced_moving for phase in (P.MOVING, P.SAYING)},
    **{(phase, Fenced): fenced_at_rest for phase in (P.STANDBY, P.BEREFT, P.FENCED)},
    # What a thread of a cancelled preparation still says is met in any phase, and meant for no one.
    **{(phase, kind): ignore for phase in P for kind in (Stands, Failed)},
    **{(phase, kind): stale for phase in P for kind in _OUTCOMES},
    (P.FENCED, Recorded): recorded_fenced,
    (P.PREPARING, Stands): stands,
    (P.PREPARING, Failed): failed,
    (P.MOVING, Moved): moved,
    (P.MOVING, MoveFailed): move_failed,
    (P.SAYING, Gathered): gathered,
    (P.SAYING, GatherFailed): gather_failed,
    (P.DOUBT, Fenced): fenced_in_doubt,
    (P.INTERRUPTED, Fenced): fenced_again,
    (P.INTERRUPTED, Rested): rested,
    (P.INTERRUPTED, Lost): rested,
    (P.INTERRUPTED, Voted): voted_interrupted,
    (P.INTERRUPTED, Moved): unmoved,
    (P.INTERRUPTED, MoveFailed): unmoved,
    (P.INTERRUPTED, Gathered): gathered_interrupted,
    (P.INTERRUPTED, GatherFailed): gather_failed_interrupted,
    # The main thread says that it rests wherever it may have been freed.
    **{(phase, Rested): ignore for phase in P if phase is not P.INTERRUPTED},
    **{(phase, kind): ignore for phase in (P.STOPPED, P.DOUBT, P.BEREFT) for kind in (Proposed, Aborted)},
    **{(P.INTERRUPTED, kind): ignore for kind in (Proposed, Aborted)},
    # The main thread hears of the end only between two steps.
    **{(P.STOPPED, kind): ignore for kind in (Ordered, Fenced, Lost, Voting, Voted)},
}

__all__ = [
    "TABLE", "Aborted", "Cancel", "Depart", "DropOld", "Effect", "Event", "Failed", "Fenced", "GatherFailed",
    "Gathered", "Interrupt", "Lost", "Move", "MoveFailed", "Moved", "Ordered", "Phase", "Prepare", "Proposed",
    "Recorded", "Renounce", "ReportDoubt", "ReportKept", "ReportLost", "ReportPrepared", "ReportRefused",
    "ReportStanding", "ReportSwapped", "Rested", "Retire", "Say", "Stands", "State", "Stop", "Swap", "ToldToGo",
    "Unexpected", "Voted", "Voting",
    "step",
]  # fmt: skip
