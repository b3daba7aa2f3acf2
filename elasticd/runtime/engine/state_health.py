"""The health of the training state on one device: the step that it is of, and whether all of it is here.

    whole ─► torn ─► whole     an update began, and ended; without ZeRO
    whole ─► torn ─► stale     with ZeRO: the new values are on their way
    stale ─► whole             they have arrived
    any   ─► torn              the device did not come to rest after a fault: nobody knows what it holds
    any   ─► consumed          a move in place began; back to the condition before it if nothing was moved

A state that is torn or consumed is no copy of any step: no other rank may go on from it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Condition(enum.Enum):
    """The condition of the state; the module's docstring explains each."""

    WHOLE = "whole"  # parameters have the values of the last update
    STALE = "stale"  # they have them only on the devices that keep their state, for all that is known
    TORN = "torn"  # of no step: an update began and did not end, or the device was lost
    CONSUMED = "consumed"  # its memory holds the state of another plan


WHOLE, STALE, TORN, CONSUMED = Condition

#: From each condition, those that may follow.
TRANSITIONS: Mapping[Condition, frozenset[Condition]] = {
    WHOLE: frozenset({STALE, TORN, CONSUMED}),
    STALE: frozenset({WHOLE, TORN, CONSUMED}),
    TORN: frozenset({WHOLE, STALE, CONSUMED}),
    CONSUMED: frozenset({WHOLE, STALE, TORN}),
}


class IllegalCondition(RuntimeError):
    """A condition followed another that the table does not let it follow: an error of this program."""


class StateHealth:
    """The condition of one copy of the state, changed by what happens to it."""

    def __init__(self) -> None:
        self.condition = WHOLE
        self._before = WHOLE  # a move in place began

    @property
    def usable(self) -> bool:
        """True if the state here is of a step, so that others may go on from it."""
        return self.condition in (WHOLE, STALE)

    @property
    def stale(self) -> bool:
        """True while parameters have new values only on the devices that keep their state."""
        return self.condition is STALE

    @property
    def torn(self) -> bool:
        """True if the state here is of no step."""
        return self.condition is TORN

    @property
    def consumed(self) -> bool:
        """True if a move in place took the memory: the engine cannot train any more."""
        return self.condition is CONSUMED

    def begin_update(self) -> None:
        """The state changes from now on."""
        self._enter(TORN)

    def end_update(self, *, stale: bool) -> None:
        """The update is over; stale: its values are yet to be sent to the devices that compute with them."""
        self._enter(STALE if stale else WHOLE)

    def send_parameters(self) -> None:
        """Other values than those of the last update are sent, as averages are."""
        self._enter(STALE)

    def receive_parameters(self) -> None:
        """All values that were sent have arrived. Nothing where none were."""
        if self.condition is STALE:
            self._enter(WHOLE)

    def lose(self) -> None:
        """The device was lost, and with it the state."""
        self._enter(TORN)

    def consume(self) -> None:
        """A move in place begins, and takes the memory."""
        self._before = self.condition
        self._enter(CONSUMED)

    def give_back(self) -> None:
        """The move in place ended before anything was moved."""
        self._enter(self._before)

    def _enter(self, condition: Condition) -> None:
        if condition is self.condition:
            return
        if condition not in TRANSITIONS[self.condition]:
            raise IllegalCondition(f"the state is {self.condition.value}: it cannot become {condition.value}")
        self.condition = condition
