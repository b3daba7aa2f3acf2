"""Decodes bytes that another process wrote, which may be of another release, into values of this one.

Six things may be wrong with the bytes, and every receiver does the same about each:

    no JSON object with a tag            `msgspec.DecodeError`, whatever the bytes are; it refuses them
    a tag that this release lacks        `MessageDecoder` gives None: the receiver skips it; one log line a tag
    a known tag with other content       the same, but the first message of a connection is refused, and whoever
                                         waits for an answer to it may be told (`MessageDecoder`: `instead`)
    a field that this release lacks      the field is skipped; one log line for each tag and field
    a version that is too far away       `DecodeError` that names both versions and the remedy; so, too, that of
                                         a stored value within a message: it is content that cannot be decoded
    more bytes than its class may have   as a known tag with other content, and none of it is decoded

Two processes that talk may be one version apart. A stored value is decoded for ever: its version may be any
older one, or one newer. The log lines come once in a process, and all that is skipped is counted (`skipped`).
The decoder looks for unknown fields in one message of a tag a second, and in large messages less often, so that
a busy leader loses no time.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Generic, Literal, TypeVar, get_args, get_type_hints

import msgspec
from elasticd_planner.value import StoredValue

from elasticd.version import __version__

#: Bytes of a message at most: of one about a process, a step or a device, and of one that carries a job's spec,
#: a plan or a value of a store. Fields that this release lacks are looked for in none above the first. A leader
#: decodes a spec of 4 MiB in 40 ms; a plan for 20,000 devices has 2 MiB.
SMALL, LARGE = 256 << 10, 4 << 20
#: Commas of a message above SMALL, which bound its values: one costs as much as hundreds of bytes of text. A
#: plan for 20,000 devices has 66,000.
MOST_COMMAS = 150_000

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

#: Versions of the protocol, of a record and of the store's schema that may lie between two that work together.
MOST_APART = 1
#: Exceptions that msgspec raises beside its own: text is no UTF-8, values are nested too deep, or the check
#: of a value fails on an argument that it does not expect.
_LEAKED = (ArithmeticError, AttributeError, LookupError, RecursionError, UnicodeError)
#: Seconds between looks for unknown fields in messages of one tag, and what part of the time they take at most.
_LOOK_SECONDS = 1.0
_LOOK_SHARE = 0.01
#: Unknown names that are logged in all: somebody might invent them without end.
_MOST_LOGGED = 256
#: Characters that are logged of a name.
_LONGEST_NAME = 80

#: What may be skipped: a message of an unknown tag, or one whose content cannot be decoded; a field, in those
#: messages that were looked at; a key of the store, what is stored at a known one, and a setting in there.
Kind = Literal["message", "content", "field", "key", "record", "setting"]

_log = logging.getLogger(__name__)


class VersionRefused(msgspec.ValidationError):
    """A stored value is of a version that this release does not decode; the message names both versions."""


_making = threading.Lock()
_made: dict[tuple[Any, bool], msgspec.json.Decoder[Any]] = {}


def decoder_of(kind: type[T], *, strict: bool = True) -> msgspec.json.Decoder[T]:
    """The decoder of JSON as a value of this type.

    msgspec looks at a class, and at those of its fields, when it first decodes one. Two threads that do so at
    the same moment end the process (0.22: a segmentation fault). So decoders are made one at a time, and kept.
    """
    key = kind, strict
    decoder = _made.get(key)
    if decoder is None:
        with _making:
            decoder = _made[key] = msgspec.json.Decoder(kind, strict=strict)
    return decoder


def decoded(decode: Callable[[bytes], T], data: bytes) -> T:
    """`decode(data)`. Raises `msgspec.DecodeError` and nothing else."""
    try:
        return decode(data)
    except _LEAKED as error:
        raise msgspec.DecodeError(f"{type(error).__name__}: {str(error)[:200]}") from None


def decoded_as(kind: type[T], data: bytes, *, strict: bool = True) -> T:
    """JSON as a value of this type. Raises `msgspec.DecodeError` and nothing else."""
    return decoded(decoder_of(kind, strict=strict).decode, data)


# -- versions --------------------------------------------------------------------------------------------------


def version_refusal(what: str, version: object, known: int, release: str = "") -> str:
    """Returns why this release cannot talk with a sender of another version, or an empty string.

    Args:
        what: what has the version, as the sentence's subject: "the fence record".
        version: its version, as it came.
        known: the version that this release writes.
        release: the release that it comes from, where that is known.
    """
    return _refusal(what, version, known, release, least=known - MOST_APART)


def stored_refusal(what: str, version: object, known: int, release: str = "") -> str:
    """Returns why this release cannot decode a stored value of another version, or an empty string: it decodes
    every older version, and one newer. The arguments are those of `version_refusal`."""
    return _refusal(what, version, known, release, least=1)


def _refusal(what: str, version: object, known: int, release: str, *, least: int) -> str:
    if isinstance(version, int) and least <= version <= known + MOST_APART:
        return ""
    origin = f" (elasticd {shown(release)})" if release else ""
    return (
        f"{what} has version {shown(str(version))}{origin}, and elasticd {__version__} here knows version "
        f"{known}: "
        "install the same release of elasticd everywhere, and upgrade over the releases in between one by one"
    )


class _Head(msgspec.Struct):
    """The part of a stored value that is read before the rest."""

    version: Any = None
    release: Any = ""


def decode_stored(data: bytes, kind: type[S], *, partial: bool = False) -> S:
    """A stored value. Raises `msgspec.DecodeError` that names the field; or, where its version is more than one
    newer than that of `kind`, both versions. `partial`: `kind` lacks fields on purpose, and no line about them
    is logged."""
    known = _known_version(kind)
    head = decoded_as(_Head, data)
    release = head.release if isinstance(head.release, str) else ""
    version = known if head.version is None else head.version
    if refusal := stored_refusal(f"the value {tag_of(kind)!r}", version, known, release):
        raise VersionRefused(refusal)
    value = decoded_as(kind, data)
    if not partial:
        look(value, data)
    return value


def tag_of(kind: type[msgspec.Struct] | msgspec.Struct) -> str:
    """The tag of a message or a stored value."""
    tag = kind.__struct_config__.tag
    return tag if isinstance(tag, str) else ""


@cache
def _known_version(kind: type[msgspec.Struct]) -> int:
    """The newest version that this release writes of values of this type: the one by default, unless the class
    names a newer one that it writes only where a value needs it."""
    newest: int | None = getattr(kind, "newest", None)
    if newest is not None:
        return newest
    return next(int(field.default) for field in msgspec.structs.fields(kind) if field.name == "version")


@cache
def _holding(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields of a message that may hold a stored value, and the one that may hold another message."""
    hints = get_type_hints(kind)
    held = {name: get_args(hints[name]) or (hints[name],) for name in kind.__struct_fields__}
    return tuple(
        name
        for name, kinds in held.items()
        if name == "body" or any(isinstance(each, type) and issubclass(each, StoredValue) for each in kinds)
    )


def _held_refusal(value: Any, release: str = "") -> str:
    """Why a stored value within a message is not decoded, or an empty string. Whoever takes one from a message
    may write it, and the next leader has to read it."""
    release = getattr(value, "release", release)
    for name in _holding(value.__class__):
        held = getattr(value, name)
        if isinstance(held, StoredValue):
            what = f"the value {tag_of(held)!r}"
            if refusal := stored_refusal(what, held.version, _known_version(held.__class__), release):
                return refusal
        if isinstance(held, msgspec.Struct) and (refusal := _held_refusal(held, release)):
            return refusal
    return ""


# -- messages --------------------------------------------------------------------------------------------------


class _Envelope(msgspec.Struct):
    """The part of a message that cannot be decoded which is read: its tag, and the message within it."""

    type: str
    body: msgspec.Raw = msgspec.Raw()


#: The tag that a message begins with, and that of the message within it, as every release writes them.
_TAG = re.compile(rb'\{"type":"([a-z-]{1,64})"')
_BODY = re.compile(rb'"body":\{"type":"([a-z-]{1,64})"')
#: Bytes in which the second of them is looked for.
_HEAD_BYTES = 4096


@cache
def _parts_of(most: int) -> type[msgspec.Struct]:
    """An array of that many elements at most, undecoded. One with more is refused at the first too many: a list
    would have all of them before it could be counted."""
    fields = [(f"part{at}", msgspec.Raw, msgspec.Raw()) for at in range(most)]
    return msgspec.defstruct("Parts", fields, array_like=True, forbid_unknown_fields=True)


def _parts(data: bytes, most: int) -> list[bytes]:
    """The elements of an array, which has `most` of them at most. Raises `msgspec.DecodeError`."""
    try:
        array = decoded_as(_parts_of(most), data)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"no array of messages, of which {most} are the most: {error}") from None
    return [part for part in map(bytes, msgspec.structs.astuple(array)) if part]


class MessageDecoder(Generic[T]):
    """Decodes the messages that a receiver may get: `kind` is their union; `sender` names who sends them, for
    the log. instead: what the receiver gets in the place of a message that is skipped (None: nothing), from its
    bytes and why it cannot be decoded."""

    def __init__(
        self, kind: Any, sender: str, instead: Callable[[bytes, str], T | None] = lambda data, why: None
    ) -> None:
        self._instead = instead
        self._decode = decoder_of(kind).decode
        self._decode_list = decoder_of(list[kind]).decode
        self._sender = sender
        kinds = get_args(kind) or (kind,)
        within = {tag_of(each): _kinds_within(each) for each in kinds}
        self._tags = {tag: frozenset(map(tag_of, bodies)) or None for tag, bodies in within.items()}
        every = (*kinds, *itertools.chain.from_iterable(within.values()))
        #: Bytes that a message of each tag may have; what is no message but a value has no limit of its own.
        self._largest: dict[str, float] = {tag_of(each): getattr(each, "largest", math.inf) for each in every}

    def one(self, data: bytes, *, first: bool = False) -> T | None:
        """A message; None for one to be skipped. Raises `msgspec.DecodeError` for bytes that are no message,
        and for the `first` message of a connection if its content cannot be decoded."""
        if len(data) > SMALL:
            tag, too_large = self._too_large(data)
            if too_large:
                return self._refuse_size(data, tag, too_large, first=first)
        try:
            message: T = decoded(self._decode, data)
            if refusal := _held_refusal(message):
                raise VersionRefused(refusal)
        except msgspec.DecodeError as error:
            if self._skips(data, error, first=first):
                return self._instead(data, str(error))
            raise
        look(message, data)
        return message

    def several(self, data: bytes, *, most: int, first: bool = False) -> Sequence[T | None]:
        """The messages of a JSON array; None for each that is to be skipped. Raises `msgspec.DecodeError` where
        `one` does, and for more than `most` of them."""
        if len(data) > SMALL:  # one of them may be too large: each is counted before it is decoded
            return self._one_by_one(data, most, first=first)
        try:
            messages: list[T] = decoded(self._decode_list, data)
            if any(map(_held_refusal, messages)):
                raise VersionRefused("of one of them, which is named when each is decoded by itself")
        except msgspec.DecodeError:
            return self._one_by_one(data, most, first=first)
        if len(messages) > most:
            raise msgspec.ValidationError(f"{len(messages)} messages in one, where {most} are the most")
        now, next_look = time.monotonic(), _next_look.get
        for message in messages:  # a busy leader is here for each report
            if next_look(getattr(message, "body", message).__class__, 0.0) <= now:
                self._look_at_all(messages, data)
                break
        return messages

    def _one_by_one(self, data: bytes, most: int, *, first: bool) -> list[T | None]:
        return [self.one(part, first=first and not at) for at, part in enumerate(_parts(data, most))]

    def _too_large(self, data: bytes) -> tuple[str, str]:
        """The tag with which a message begins, and why it is too large for that; or nothing."""
        outer = _TAG.match(data)
        tag = outer[1].decode() if outer else ""
        largest = self._largest.get(tag, SMALL)
        if self._tags.get(tag) and (inner := _BODY.search(data, 0, _HEAD_BYTES)):
            tag = inner[1].decode()
            largest += self._largest.get(tag, 0)
        if len(data) > largest:
            return tag, f"it has {len(data)} bytes, where {largest} are the most"
        if (commas := data.count(b",")) > MOST_COMMAS:
            return tag, f"it has {commas} commas, where {MOST_COMMAS} are the most"
        return tag, ""

    def _refuse_size(self, data: bytes, tag: str, why: str, *, first: bool) -> T | None:
        if first:
            raise msgspec.ValidationError(f"a message {tag!r} is too large: {why}")
        skip(
            "content",
            ("size", self._sender, tag),
            f"{self._sender} sent a message {tag!r} that is too large ({why}): it is skipped",
        )
        return self._instead(data, why)

    def _look_at_all(self, messages: list[T], data: bytes) -> None:
        for message, part in zip(messages, decoded_as(list[msgspec.Raw], data), strict=True):
            look(message, bytes(part))

    def _skips(self, data: bytes, error: msgspec.DecodeError, *, first: bool) -> bool:
        """Returns True if a message that cannot be decoded is skipped, which is logged once for its tag: it
        has a tag that this release lacks, or has a message with such a tag within it, or it is not the
        `first` one."""
        try:
            outer = inner = decoded_as(_Envelope, data)
        except msgspec.DecodeError:
            return False
        known, where = frozenset(self._tags), ""
        if within := self._tags.get(outer.type):
            try:
                inner = decoded_as(_Envelope, bytes(outer.body))
            except msgspec.DecodeError:
                pass  # no message is within it: the outer one is not decoded
            else:
                known, where = within, f" in a message {outer.type!r}"
        tag = shown(inner.type)
        if inner.type not in known:
            skip(
                "message",
                ("tag", self._sender, tag, where),
                f"{self._sender} sent a message {tag!r}{where}, which elasticd {__version__} does not know: it "
                "is skipped; is its sender of a newer release?",
            )
            return True
        try:
            decoded(bytes.decode, data)
        except msgspec.DecodeError:  # no JSON: the text of fields that the envelope lacks was not looked at
            return False
        if first:
            return False
        skip(
            "content",
            ("content", self._sender, tag, where),
            f"{self._sender} sent a message {tag!r}{where} whose content elasticd {__version__} cannot decode "
            f"({shown(str(error))}): it is skipped; is its sender of another release?",
        )
        return True


def _kinds_within(kind: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """The classes that the message in this message's `body` may be of; none where it has none."""
    body = get_type_hints(kind).get("body")
    kinds = [each for each in get_args(body) or (body,) if isinstance(each, type)]
    return [each for each in kinds if issubclass(each, msgspec.Struct)]


# -- unknown names ---------------------------------------------------------------------------------------------

_logged: set[tuple[str, ...]] = set()
_counting = threading.Lock()
_skipped: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
#: When a message of a class is next looked at, by the monotonic clock; the class is that of the message within
#: it, if it has one: most of a leader's messages are of one class.
_next_look: dict[type, float] = {}


def log_once(key: tuple[str, ...], text: str) -> None:
    """Logs a warning of this key once in this process; nothing after `_MOST_LOGGED` keys, the last of which is
    replaced by a line that says so."""
    if key in _logged or len(_logged) >= _MOST_LOGGED:
        return
    _logged.add(key)
    if len(_logged) == _MOST_LOGGED:
        text = f"{_MOST_LOGGED} unknown names were found: this process logs no further ones"
    _log.warning("%s", text)


def count(kind: Kind) -> None:
    """One more of this kind is skipped."""
    with _counting:
        _skipped[kind] += 1


def skip(kind: Kind, key: tuple[str, ...], text: str) -> None:
    """Counts what is skipped, and logs it as `log_once` does."""
    count(kind)
    log_once(key, text)


def skipped() -> dict[Kind, int]:
    """The number of messages of each kind that this process has skipped so far."""
    with _counting:
        return dict(_skipped)


def look(value: object, data: bytes) -> None:
    """Logs the fields in `data` that the value decoded from it lacks, if values of its class are due."""
    kind, now = getattr(value, "body", value).__class__, time.monotonic()
    if now < _next_look.get(kind, 0.0) or len(data) > SMALL:
        return
    _next_look[kind] = now + _LOOK_SECONDS
    tag = tag_of(value) if isinstance(value, msgspec.Struct) else ""
    try:
        raw = decoded(msgspec.json.decode, data)
        fields = list(_unknown_fields(value, raw, ""))
    except (msgspec.DecodeError, RecursionError):  # in what was skipped, where nothing is checked; or too deep
        return
    for field in fields:
        name = shown(field)
        skip(
            "field",
            ("field", tag, name),
            f"{tag!r} has a field {name!r}, which elasticd {__version__} does not know: it is skipped",
        )
    took = time.monotonic() - now
    _next_look[kind] = now + max(_LOOK_SECONDS, took / _LOOK_SHARE)


def _unknown_fields(value: object, raw: object, path: str) -> Iterator[str]:
    """The dotted names of what `raw` has in objects and the structs decoded from them have not."""
    if isinstance(value, msgspec.Struct) and isinstance(raw, dict):
        config = value.__struct_config__
        names = dict(zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True))
        for key, inner in raw.items():
            if key in names:
                yield from _unknown_fields(getattr(value, names[key]), inner, f"{path}{key}.")
            elif config.tag is None or key != config.tag_field:
                yield f"{path}{key}"
    elif isinstance(value, dict) and isinstance(raw, dict):
        for inner, other in zip(value.values(), raw.values(), strict=False):
            yield from _unknown_fields(inner, other, path)
    elif isinstance(value, list | tuple) and isinstance(raw, list):
        for inner, other in zip(value, raw, strict=False):
            yield from _unknown_fields(inner, other, path)


def shown(name: str) -> str:
    """A name that another process chose, shortened for a log line."""
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
