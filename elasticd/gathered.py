"""Several messages of an agent as one: what a message costs its reader is more than what is in it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elasticd.decoding import decoded
from elasticd.messages import ToLeader, to_leader

_all: msgspec.json.Decoder[list[ToLeader]] = msgspec.json.Decoder(list[ToLeader])


def together(texts: Sequence[bytes]) -> bytes:
    """Encoded messages as one, in order; a single one as it is."""
    return texts[0] if len(texts) == 1 else b"[" + b",".join(texts) + b"]"


def all_to_leader(data: bytes) -> Sequence[ToLeader]:
    """What came as one message: one, or several `together`. Raises `msgspec.DecodeError`."""
    if not data.startswith(b"["):
        return (to_leader(data),)
    if not (found := decoded(_all.decode, data)):
        raise msgspec.ValidationError("several messages as one are one at least")
    return found
