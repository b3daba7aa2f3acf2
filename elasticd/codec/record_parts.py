"""A record that is too large for one request of the store, written in parts.

A plan of ten thousand devices is a megabyte of JSON, and etcd takes a request of one and a half. So the JSON of
such a record is taken apart: each plan in it, and the cluster, is a *piece*, and so is what is left. A piece is
cut into *parts* of a mebibyte. Each part is compressed, and stored at `jobs/JOB/parts/NAME`; its name is the
digest of what it holds. In place of the record stands its `Parted`: the names of each piece's parts.

- Equal pieces have equal names. The plan that a proposal, its history and the running plan's record have in
  common is therefore stored once.
- Parts never change, and they are written before the record that needs them. Who reads the store in the order
  of its revisions has them when the record comes.
- Only a record that does not fit otherwise is written so. A release that knows no parts refuses it by its
  version, with a message that names both releases; it could not have written such a record either.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Container, Iterable, Mapping

import msgspec
from elasticd_planner.value import StoredValue

from elasticd.codec.decoding import decode_stored, decoded_as
from elasticd.version import __version__

#: More than one above the version of any record that release 0.1 knows, so that it refuses these.
PARTED_VERSION = 3
#: Bytes of JSON in a part, before they are compressed.
PART_BYTES = 1 << 20
#: Bytes of a record's JSON at most: one of 50,000 devices has a fifth of it for each plan.
MOST_BYTES = 16 << 20
#: Within each kind of record: the values that others have in common with it, by their path.
SHARED = {
    "proposal": ("plan", "old"),
    "running-plan": ("plan",),
    "plan-history": ("plan", "problem.current", "problem.cluster"),
}

_REST = ""
_BEGIN = b'{"type":"in-parts",'


class Parted(StoredValue, frozen=True, kw_only=True, tag="in-parts"):
    """Stands in the place of a record whose tag is `of`. pieces: the names of each piece's parts, in order, by
    the piece's path in the record; an empty path is that of the rest."""

    of: str
    pieces: dict[str, tuple[str, ...]]
    release: str = __version__
    version: int = PARTED_VERSION

    @property
    def parts(self) -> frozenset[str]:
        """The names of all pieces' parts, each once. The record can be read only while the store has all of
        them."""
        return frozenset(name for names in self.pieces.values() for name in names)


def parted(data: bytes) -> Parted | None:
    """The placeholder of a record in parts, if this is one. Raises `msgspec.DecodeError`."""
    return decode_stored(data, Parted) if data.startswith(_BEGIN) else None


def cut(record: bytes, of: str, known: Container[str] = ()) -> tuple[Parted, dict[str, bytes]]:
    """A record in parts.

    Args:
        record: its JSON.
        of: its tag.
        known: names of parts that are stored already.

    Returns:
        What stands in the record's place, and the parts that are to be stored before it, by name.
    """
    rest = decoded_as(dict[str, msgspec.Raw], record)
    texts: dict[str, bytes] = {}
    for path in SHARED.get(of, ()):
        text = _get(rest, path)
        if len(text) > len(b"null"):
            texts[path] = text
            _put(rest, path, b"null")
    texts[_REST] = msgspec.json.encode(rest)
    pieces, parts = {}, {}
    for path, text in texts.items():
        chunks = [text[at : at + PART_BYTES] for at in range(0, len(text), PART_BYTES)]
        pieces[path] = tuple(map(_name, chunks))
        for name, chunk in zip(pieces[path], chunks, strict=True):
            if name not in known and name not in parts:
                parts[name] = zlib.compress(chunk)
    return Parted(of=of, pieces=pieces), parts


def whole(data: bytes, parts: Mapping[str, bytes]) -> bytes:
    """The JSON of a record that is stored whole, or in some of these parts. Raises `msgspec.DecodeError`."""
    index = parted(data)
    if index is None:
        return data
    texts = {path: b"".join(_part(name, parts) for name in names) for path, names in index.pieces.items()}
    record = decoded_as(dict[str, msgspec.Raw], texts.pop(_REST, b"{}"))
    for path, text in texts.items():
        _put(record, path, text)
    return msgspec.json.encode(record)


class Shelf:
    """The parts that the store holds, of each job: kept up by whoever reads the store, in the order of its
    revisions."""

    def __init__(self, jobs: str, items: Iterable[tuple[str, bytes]] = ()) -> None:
        """Begins with some keys and their values, of which it takes the parts. `jobs` is how the keys of all
        jobs begin."""
        self._jobs = jobs
        self._parts: dict[str, dict[str, bytes]] = {}
        for key, value in items:
            self.take(key, value)

    def take(self, key: str, value: bytes | None) -> bool:
        """Notes what is at a key now, or that it is gone. Returns False for a key that is no part's."""
        if not key.startswith(self._jobs):
            return False
        job, _, part = key.removeprefix(self._jobs).partition("/")
        folder, _, name = part.partition("/")
        if folder != "parts":
            return False
        if value is not None:
            self._parts.setdefault(job, {})[name] = value
        else:
            self._parts.get(job, {}).pop(name, None)
            if not self._parts.get(job):
                self._parts.pop(job, None)
        return True

    def of(self, key: str) -> Mapping[str, bytes]:
        """The parts of the job that a record's key belongs to."""
        return self._parts.get(key.removeprefix(self._jobs).partition("/")[0], {})


def _name(chunk: bytes) -> str:
    return hashlib.sha256(chunk).hexdigest()[:32]


def _part(name: str, parts: Mapping[str, bytes]) -> bytes:
    if name not in parts:
        raise msgspec.DecodeError(f"its part {name} is not in the store")
    unpacked = zlib.decompressobj()
    try:
        chunk = unpacked.decompress(parts[name], PART_BYTES + 1)
    except zlib.error as error:
        raise msgspec.DecodeError(f"its part {name} cannot be unpacked: {error}") from None
    if _name(chunk) != name:
        raise msgspec.DecodeError(f"its part {name} holds something else than its name says")
    return chunk


def _get(record: Mapping[str, msgspec.Raw], path: str) -> bytes:
    """The JSON at a path, null where there is nothing."""
    name, _, inner = path.partition(".")
    text = bytes(record.get(name, b"null"))
    return _get(decoded_as(dict[str, msgspec.Raw], text), inner) if inner else text


def _put(record: dict[str, msgspec.Raw], path: str, text: bytes) -> None:
    name, _, inner = path.partition(".")
    if inner:
        within = decoded_as(dict[str, msgspec.Raw], bytes(record[name]))
        _put(within, inner, text)
        text = msgspec.json.encode(within)
    record[name] = msgspec.Raw(text)
