"""What all wire messages are: JSON by msgspec, tagged by type."""

from __future__ import annotations

import msgspec

#: Version of all messages; a peer one older or one newer is accepted, others are refused at hello.
WIRE_VERSION = 1


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The base of every wire message."""
