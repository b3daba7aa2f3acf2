"""What a worker's switch machine knows, hears and asks for: its state, its events, its effects."""

from __future__ import annotations

from enum import Enum

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
    BEREFT = "bereft"  # a collective of the plan in force failed: at rest, waits for the fence
    INTERRUPTED = "interrupted"  # a fence was read, and the main thread has not come to rest yet
    FENCED = "fenced"  # at rest with its copies, has said where it stands: waits for a recovery
    STOPPED = "stopped"


class State(Value, frozen=True, kw_only=True):
    """`number` is the plan in force here (0: none), `proposal` the one being switched to (0: none), `seen`
    the highest number ever proposed or closed, `fence` the highest fence read.

    `trains` tells whether this rank is a member of the plan in force, and `joins` whether of the proposed
    one; `voting` is the number in the vote record that is under way. `fenced`: training is off until a
    recovery's swap; `side`: the number of a copy in side buffers that this rank said ok to, without hearing
    whether all did. `evicted`: this incarnation was fenced off; once at rest it owns nothing any more. `later`
    is a proposal that was read before the end of the one that this rank moves to. `recorded` is the
    highest plan that was read as recorded. `leaving`: this process was told to go, and does as soon as it holds
    nothing that others may need."""

    phase: Phase = Phase.STANDBY
    number: int = 0
    proposal: int = 0
    seen: int = 0
    fence: int = 0
    trains: bool = False
    joins: bool = False
    voting: int = 0
    aborted: str | None = None
    ok: bool = False
    holds_old: bool = False
    fenced: bool = False
    side: int = 0
    evicted: bool = False
    later: int = 0
    later_joins: bool = False
    recorded: int = 0
    leaving: bool = False


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


class Fenced(Event, frozen=True, kw_only=True):
    """A fence was read: every number up to `number` is closed. `evicted`: this incarnation is fenced off."""

    number: int
    evicted: bool = False


class Lost(Event, frozen=True, kw_only=True):
    """A collective of the plan in force failed: the main thread is at rest, before the update of its step."""

    reason: str


class Rested(Event, frozen=True, kw_only=True):
    """The main thread has come to rest between two steps, or after a move."""


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
    """The job is stopped from outside."""

    reason: str


class ToldToGo(Event, frozen=True, kw_only=True):
    """This process is to end; the job goes on without it."""


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
    """Every copy but the one in force goes."""


class Interrupt(Effect, frozen=True, kw_only=True):
    """Abort the collectives that this rank may wait in, never the optimizer; the copies stay."""


class Renounce(Effect, frozen=True, kw_only=True):
    """Drop all state and take a new incarnation."""


class Retire(Effect, frozen=True, kw_only=True):
    """Every copy goes: the job went on without this rank, which stands by."""


class Stop(Effect, frozen=True, kw_only=True):
    reason: str


class Depart(Effect, frozen=True, kw_only=True):
    """Nobody needs anything of this rank any more: it ends, after it was told to go."""


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


class ReportLost(Effect, frozen=True, kw_only=True):
    reason: str


class ReportStanding(Effect, frozen=True, kw_only=True):
    """Say which copies are held, of which plans, at which step."""

    fence: int


class Unexpected(RuntimeError):
    """An event that this phase cannot meet: a fault in the program around the machine."""
