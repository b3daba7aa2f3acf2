"""The base of all wire messages: JSON by msgspec with a tag and a version.

A tag names its message for ever and on every wire; the class behind it may be renamed. Fields are only ever
added, with defaults: a release skips the fields and the messages that it does not know
(`elasticd.codec.decoding`). Requests of users are no messages: they are HTTP, and their version is in the path
(/v1/).

Each class of messages has a largest legal size, `largest`. A receiver counts the bytes of a message before it
decodes any of them, and skips a message that is larger: its time and memory are not in proportion to what a
peer chose to send.

An agent decodes most of what passes through it and encodes it again, and so drops the fields that it does not
know. Only a worker's reports and the leader's proposals are passed on as they came (release 0.1 decoded the
proposals, too). A field of `Proposal`, `Plan`, `JobSpec`, `FromClient.body` or `ToClient.body` that changes
what ranks or leaders do therefore takes effect only when every agent of the job has said a version that passes
it on; until then the leader leaves its default. `NodeState.release` and `NodeState.version` are what each
agent's hello said.
"""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec
from elasticd_planner.value import explicit_tag

from elasticd.codec.decoding import SMALL, version_refusal

#: Version of all messages; a peer one older or one newer is accepted, others are refused at hello.
WIRE_VERSION = 1
#: Version of what the ranks of a job exchange with each other (votes, sections of a migration, their headers),
#: which all of them share, since these bytes carry no version. Raise it also for another way of computing what
#: each rank computes for itself and all must find alike: batches, shares of lanes, launches.
PEERS_VERSION = 2


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=explicit_tag):
    """The base of every wire message: "type" is its tag, "version" its sender's `WIRE_VERSION`. A message
    without `tag="..."` is refused when its class is made."""

    #: Bytes of such a message as JSON, at most; those of a message within it (`body`) are counted by its class.
    largest: ClassVar[int] = SMALL

    version: int = WIRE_VERSION


def protocol_refusal(what: str, version: int, release: str) -> str:
    """Returns why a sender of this version of the protocol is refused, or an empty string; `what` is the
    refusal's subject."""
    return version_refusal(what, version, WIRE_VERSION, release)


_encoder = msgspec.json.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """A message as JSON."""
    return _encoder.encode(message)


def largest_of(message: msgspec.Struct) -> float:
    """Returns how many bytes a message may have as JSON, with the message within it; for what is no message but
    a value that was encoded already, infinity."""
    body = getattr(message, "body", None)
    within = largest_of(body) if isinstance(body, Message) else 0
    return message.largest + within if isinstance(message, Message) else math.inf
