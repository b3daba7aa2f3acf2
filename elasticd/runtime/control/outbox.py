"""The messages of a worker about switches and faults, as far as they still hold: another agent is told it
again.

The order matters as much as the words: an old one that is heard last is taken for news.
"""

from __future__ import annotations

from collections.abc import Iterator

from elasticd_planner.spec.mesh import JobPlan

from elasticd.codec.message import Message
from elasticd.wire.worker import (
    Abort,
    DrainNotice,
    Fenced,
    Finished,
    InDoubt,
    PeersLost,
    Prepared,
    Propose,
    Raised,
    Recorded,
    Refused,
    RunningPlan,
    Saved,
    SaveFailed,
    StateReport,
    StayedOnPlan,
    Switched,
)

#: The kinds of words that are kept, of each the newest.
LASTING = frozenset(
    {
        Prepared,
        Refused,
        Switched,
        StayedOnPlan,
        InDoubt,
        PeersLost,
        StateReport,
        Saved,
        SaveFailed,
        Finished,
        Raised,
        DrainNotice,
    }
)
#: Proposals of which a worker keeps the plans: one is open at a time, and the end of another may still come.
MOST_PROPOSED = 4


class Outbox:
    """The newest word of each kind, in the order in which they were said. A word about a number outdates all
    about lower ones, since a number opens only once those before it are settled; and that a rank lost the
    others, since it came to rest before it said more."""

    def __init__(self) -> None:
        self._said: dict[type, tuple[Message, bytes]] = {}

    def __iter__(self) -> Iterator[bytes]:
        """As they were encoded, the oldest first."""
        return iter([data for _, data in self._said.values()])

    def __contains__(self, kind: type[Message]) -> bool:
        return kind in self._said

    def add(self, message: Message, data: bytes) -> None:
        """Keeps `message`, encoded as `data`, if it is of a kind that lasts."""
        if type(message) not in LASTING:
            return
        number = _number(message)
        for kind, (old, _) in list(self._said.items()):
            if kind is type(message) or (number is not None and _outdated(old, number)):
                del self._said[kind]
        self._said[type(message)] = message, data

    def clear(self) -> None:
        """Forgets all words, because they are of an incarnation that is left behind."""
        self._said.clear()


class PlanMemory:
    """The plan that this worker runs, as far as it has a part in one: a leader whose etcd was set up anew is
    told it. Proposals are heard on the control thread, and a switch to one is said on any."""

    def __init__(self) -> None:
        self._proposed: dict[int, JobPlan] = {}  # by number, those that may still be switched to
        self._running: tuple[JobPlan, int] | None = None  # and the updates before its first step
        self._highest = 0

    @property
    def plan(self) -> RunningPlan | None:
        """The plan in force here, with the highest number that was heard; None where there is none."""
        if self._running is None:
            return None
        plan, step = self._running
        return RunningPlan(plan=plan, step=step, highest=self._highest)

    def heard(self, message: object) -> None:
        """Takes up what an agent says of numbers."""
        if isinstance(message, Propose):
            plan = message.proposal.plan
            proposed = {**self._proposed, plan.number: plan}
            self._proposed = {number: proposed[number] for number in sorted(proposed)[-MOST_PROPOSED:]}
            self._highest = max(self._highest, plan.number)
        elif isinstance(message, Abort | Fenced | Recorded):
            self._highest = max(self._highest, message.number)
            if isinstance(message, Recorded) and self._running is not None:
                self._left(message.number)

    def _left(self, recorded: int) -> None:
        """A plan was recorded that this worker has no part in: it stands by."""
        if self._running is not None and self._running[0].number < recorded:
            self._running = None

    def said(self, message: object) -> None:
        """Takes up that this worker has switched."""
        if isinstance(message, Switched) and (plan := self._proposed.get(message.number)) is not None:
            self._running = plan, message.step
            self._proposed = {number: one for number, one in self._proposed.items() if number > message.number}


def _outdated(old: Message, number: int) -> bool:
    before = _number(old)
    return isinstance(old, PeersLost) or (before is not None and before < number)


def _number(message: Message) -> int | None:
    """The number that it is about, a proposal's or a fence's."""
    if isinstance(message, StateReport):
        return message.fence
    if isinstance(message, Prepared | Refused | Switched | StayedOnPlan | InDoubt):
        return message.number
    return None
