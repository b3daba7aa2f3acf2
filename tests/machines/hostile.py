"""Messages that no honest agent sends, from a seed: samples of every message with other values than meant."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, get_args

import msgspec

from elasticd.wire.coordinator import FromClient, ToLeader, all_to_leader
from elasticd.wire.worker import FromWorker
from tests.releases.samples import sample

NUMBERS = (-(2**62), -7, -1, 0, 1, 2, 3, 5, 7, 2**31, 2**53, 2**62)
FLOATS = (-1e308, -1.0, -0.0, 0.0, 1e-308, 0.5, 1.0, 3.0, 1e18, 1e308)
RANKS = "rdzv/torchelastic/role_info/0"
TEXTS = ("", "/", "a\nb", "\x1b[2J", "x" * 3000, "9" * 5000, "long " * 20_000, "plan/1/x", RANKS)


#: Bytes that a message of the largest size keeps free for what surrounds the part that fills it.
MARGIN = 64


class Hostile:
    """What a node's agent may say, which speaks for its own devices and of these jobs. large: the share of the
    messages that are as large as their type may be."""

    def __init__(
        self,
        seed: int,
        devices: Sequence[str],
        jobs: Sequence[str],
        incarnations: Sequence[str],
        *,
        large: float = 0.0,
    ) -> None:
        self._draw, self._long = Random(seed), False
        self._sizes, self._large = Random(f"{seed}/sizes"), large
        self.sizes: list[int] = []  # bytes of the large ones
        self._known = {"device": [*devices], "job": [*jobs, "other"], "incarnation": [*incarnations, "gone"]}
        kinds = {kind for kind in get_args(ToLeader) if kind is not FromClient}
        self._kinds = sorted(kinds, key=lambda kind: kind.__name__)
        self._bodies = sorted(get_args(FromWorker), key=lambda kind: kind.__name__)

    def messages(self, count: int) -> Iterator[ToLeader]:
        """As many as can be decoded of this many."""
        for _ in range(count):
            yield from filter(None, all_to_leader(b"[" + self.raw() + b"]"))

    def raw(self) -> bytes:
        """One of them, as JSON."""
        draw = self._draw
        if draw.random() < 0.8:  # of a worker
            kind = draw.choice(self._bodies)
            made, largest = plain(FromClient) | {"body": plain(kind)}, FromClient.largest + kind.largest
        else:
            kind = draw.choice(self._kinds)
            made, largest = plain(kind), kind.largest
        self._long = False
        for _ in range(draw.choice((0, 1, 1, 2, 5))):
            self._change(made)
        self._name(made)
        if self._sizes.random() < self._large:
            self._fill(made.get("body", made), largest - len(msgspec.json.encode(made)) - MARGIN)
            self.sizes.append(len(msgspec.json.encode(made)))
        return msgspec.json.encode(made)

    def _fill(self, made: dict[str, Any], room: int) -> None:
        """Makes one list, mapping or text in a message larger by as much as there is room for."""
        places = [
            (part, key)
            for part in _parts(made)
            for key, value in part.items()
            if isinstance(value, str | list | dict) and key not in {"type", *self._known}
        ]
        if places and room > 0:
            part, key = self._sizes.choice(places)
            part[key] = grown(part[key], room)

    def _name(self, made: dict[str, Any]) -> None:
        """Names that there are, in most messages: else none gets far."""
        for part in _parts(made):
            for key in part.keys() & self._known.keys():
                if isinstance(part[key], str) and self._draw.random() < 0.95:
                    part[key] = self._draw.choice(self._known[key])

    def _change(self, made: dict[str, Any]) -> None:
        draw = self._draw
        part = draw.choice(list(_parts(made)))
        if not part:
            return
        key = draw.choice([*part])
        if key == "type":
            return
        value = part[key]
        if isinstance(value, bool):
            part[key] = not value
        elif isinstance(value, int):
            part[key] = draw.choice(NUMBERS)
        elif isinstance(value, float):
            part[key] = draw.choice(FLOATS)
        elif isinstance(value, str):
            part[key] = draw.choice(TEXTS)
        elif isinstance(value, list):
            # One long list in a message: lists in lists would be gigabytes, which no connection takes.
            few, many = (1, 1) if self._long else (3, 200)
            part[key] = draw.choice(([], value * few, value[:1] * many))
            self._long = True
        elif isinstance(value, dict):
            part[key] = draw.choice(({}, value, {f"{name}x": inner for name, inner in value.items()}))
        if draw.random() < 0.05:
            part.pop(key, None)


def grown(value: Any, room: int) -> Any:
    """A text, list or mapping with more of the same, up to so many bytes of JSON."""
    if isinstance(value, str):
        return value + "x" * room
    if isinstance(value, list):
        element = value[0] if value else 1
        return value + [element] * (room // (len(msgspec.json.encode(element)) + 1))
    inner = next(iter(value.values()), 1)
    count = room // (len(msgspec.json.encode(inner)) + 12)
    return {**value, **{f"k{index:07d}": inner for index in range(count)}}


def plain(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A sample of a message, as JSON that the caller may change."""
    found: dict[str, Any] = msgspec.json.decode(_encoded(kind))
    return found


@functools.cache
def _encoded(kind: type[msgspec.Struct]) -> bytes:
    return msgspec.json.encode(sample(kind))


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """All JSON objects inside."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _parts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _parts(inner)
