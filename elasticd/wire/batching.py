"""Several messages of an agent as one: what a message costs its reader is more than what is in it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elasticd.wire.messages import ToLeader, Unread, several_to_leader, to_leader


def together(texts: Sequence[bytes]) -> bytes:
    """Encoded messages as one, in order; a single one as it is."""
    return texts[0] if len(texts) == 1 else b"[" + b",".join(texts) + b"]"


def all_to_leader(data: bytes, *, first: bool = False) -> Sequence[ToLeader | Unread]:
    """What came as one message: one, or several `together`, without those that are to be skipped. Raises
    `msgspec.DecodeError`, also for the `first` message of a connection if its content cannot be decoded."""
    if not data.startswith(b"["):
        message = to_leader(data, first=first)
        return () if message is None else (message,)
    if not data.strip(b"[] \t\r\n"):
        raise msgspec.ValidationError("several messages as one are one at least")
    return several_to_leader(data, first=first)
