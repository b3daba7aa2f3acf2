"""Several messages of an agent as one: what a message costs its reader is more than what is in it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elasticd.wire.messages import ToLeader, Unread, several_to_leader, to_leader

#: Messages in one at most. One that is skipped costs its reader more than one that is read.
MOST_TOGETHER = 64


def together(texts: Sequence[bytes]) -> bytes:
    """Encoded messages as one, in order; a single one as it is."""
    return texts[0] if len(texts) == 1 else b"[" + b",".join(texts) + b"]"


def all_to_leader(data: bytes, *, first: bool = False) -> Sequence[ToLeader | Unread | None]:
    """What came as one message: one, or several `together`; None for each that is to be skipped. Raises
    `msgspec.DecodeError`, also for more than `MOST_TOGETHER`, and for the `first` message of a connection whose
    content cannot be decoded."""
    if not data.startswith(b"["):
        return (to_leader(data, first=first),)
    if not data.strip(b"[] \t\r\n"):
        raise msgspec.ValidationError("several messages as one are one at least")
    return several_to_leader(data, most=MOST_TOGETHER, first=first)
