"""What a worker said of switches and faults, as far as it still holds: another agent is told it again.

The order matters as much as the words: an old one that is heard last is taken for news.
"""

from __future__ import annotations

from collections.abc import Iterator

from elasticd.codec.message import Message
from elasticd.wire.worker import (
    DrainNotice,
    Finished,
    InDoubt,
    PeersLost,
    Prepared,
    Raised,
    Refused,
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


class Outbox:
    """The newest word of each kind, in the order in which they were said. A word about a number outdates all
    about lower ones, since a number opens only once those before it are settled; and that a rank lost the
    others, since it came to rest before it said more."""

    def __init__(self) -> None:
        self._said: dict[type, tuple[Message, bytes]] = {}

    def __iter__(self) -> Iterator[bytes]:
        """As they were encoded, the oldest first."""
        return iter([data for _, data in self._said.values()])

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
