"""The messages of benchmarks/doors.py: each wire type that an agent may send, at its largest size, and frames
that are no message at all."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from elasticd.codec.decoding import tag_of
from elasticd.codec.message import Message
from elasticd.wire.coordinator import AgentHello, FromClient, ToLeader
from elasticd.wire.rendezvous import Join
from elasticd.wire.worker import FromWorker
from tests.machines.hostile import MARGIN, grown, plain

NODE, JOB, DEVICE = "alpha", "demo", "alpha/0"
#: The names that a leader knows: it hears no other.
_KNOWN = {"node": NODE, "job": JOB, "device": DEVICE, "incarnation": "i", "client": "w"}

Path = tuple[str | int, ...]


def greeting() -> bytes:
    """The hello of the agent of NODE."""
    hello = _named(plain(AgentHello))
    hello["record"] |= {"node": NODE, "devices": [{**hello["record"]["devices"][0], "name": DEVICE}]}
    return msgspec.json.encode(hello)


def join() -> bytes:
    """A torchrun of NODE that begins JOB."""
    body = {**plain(Join), "job": JOB, "min_nodes": 1, "max_nodes": 1}
    return msgspec.json.encode(_named(plain(FromClient)) | {"device": "", "body": body})


def largest_messages() -> Iterator[tuple[str, bytes]]:
    """Each wire type once for each list, mapping or text in it, which fills it up to the type's largest size.

    Yields:
        The type's tag with the part that is large, and the message.
    """
    for kind in sorted(get_args(ToLeader), key=lambda kind: kind.__name__):
        if kind is not FromClient:
            yield from _filled(kind, _named(plain(kind)), kind.largest, ())
    for body in sorted(get_args(FromWorker), key=lambda kind: kind.__name__):
        around = _named(plain(FromClient)) | {"body": _named(plain(body))}
        yield from _filled(body, around, FromClient.largest + body.largest, ("body",))


def no_messages(size: int = (8 << 20) - 1) -> Iterator[tuple[str, bytes]]:
    """Frames of so many bytes that no agent sends."""
    for element in (b"1", b"[]", b"{}", b'"a"', b'{"type":"agent-hello"}'):
        yield (
            f"a frame of {element.decode()}",
            b"[" + (element + b",") * (size // (len(element) + 1) - 1) + element + b"]",
        )
    yield "a frame of brackets", b"[" * size
    yield "a frame of braces", b'{"a":' * (size // 5)
    yield "a number without end", b"9" * size
    yield "a text without end", b'"' + b"x" * (size - 1)
    yield "an unknown message", b'{"type":"newer","more":"' + b"x" * (size - 30) + b'"}'
    yield "zeros", bytes(size)


def _filled(
    kind: type[Message], whole: dict[str, Any], largest: int, within: Path
) -> Iterator[tuple[str, bytes]]:
    for path in _paths(_at(whole, within), within):
        filled = copy.deepcopy(whole)
        value = _at(filled, path)
        room = largest - len(msgspec.json.encode(whole)) - MARGIN
        holder = _at(filled, path[:-1])
        holder[path[-1]] = grown(value, room)
        words = ".".join(map(str, path[len(within) :]))
        yield f"{tag_of(kind)}: {words}", msgspec.json.encode(filled)


def _paths(value: Any, before: Path) -> Iterator[Path]:
    """Of all lists, mappings without a type and texts inside; of a list's elements the first alone."""
    inner: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inner = [(key, part) for key, part in value.items() if key not in {"type", *_KNOWN}]
    elif isinstance(value, list) and value:
        inner = [(0, value[0])]
    for key, part in inner:
        if isinstance(part, str | list | dict):
            yield (*before, key)
            yield from _paths(part, (*before, key))


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _named(message: dict[str, Any]) -> dict[str, Any]:
    return {key: _KNOWN.get(key, value) for key, value in message.items()}
