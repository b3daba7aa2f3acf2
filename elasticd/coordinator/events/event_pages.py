"""The journal in the store: the next leader has the events and steps of those before it.

Every few seconds, what is new goes into a page, a key of its own. Every so many pages are put together into
one, which takes the first one's key. So the store, and whoever watches it, is sent each line about twice,
however long the journal is. The oldest pages go when all of them have too many bytes.

Lines of the last second are lost where a leader dies: what is decided never waits for the journal.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
from elasticd_planner.value import StoredValue, Value

from elasticd.codec.decoding import decode_stored, skip
from elasticd.coordinator.events.event_log import Lines
from elasticd.records import Keys, decode_at, encode, numbered
from elasticd.store.protocol import KeyValue
from elasticd.wire.event_record import EventRecord

#: Pages, and bytes of their JSON, that are put together into one.
TOGETHER, TOGETHER_BYTES = 32, 256 << 10
#: Compressed bytes of all pages.
MOST_BYTES = 2 << 20
#: Events, and steps of all jobs, in a page when it is written: so that it fits into one request of the store.
MOST_EVENTS, MOST_STEPS = 64, 400
#: Bytes of an event's JSON, above which its data stays behind.
MOST_EVENT_BYTES = 16 << 10
#: Bytes of JSON that a page can hold.
_MOST_PAGE_BYTES = 64 << 20


class Page(StoredValue, frozen=True, kw_only=True, tag="journal-page"):
    """A page of the journal, as the store has it."""

    lines: bytes  # `Lines` as compressed JSON


class Paged(Value, frozen=True, kw_only=True):
    """A page to be written."""

    key: str  # its key
    value: bytes  # its value
    gone: tuple[str, ...]  # keys that are to be deleted with it


@dataclass(frozen=True)
class _Small:
    """A page that is to be put together with others."""

    key: str
    lines: Lines
    size: int  # bytes of its JSON


class Pages:
    """The pages of the journal in the store, and those to be written next. Begins with what was `known` of it
    when this leader took over; keys that are no pages are left alone."""

    def __init__(self, keys: Keys, known: Iterable[KeyValue] = ()) -> None:
        self._folder = keys.journal
        self._sizes: dict[str, int] = {}  # in the order of the keys
        self._small: list[_Small] = []
        self._number = 0
        self._before: tuple[dict[str, int], list[_Small]] = ({}, [])
        self._known: list[KeyValue] = []
        for item in sorted(known, key=lambda item: item.key):
            name = item.key.removeprefix(self._folder)
            if len(name) == len(_name(0)) and (number := numbered(name)) is not None:
                self._known.append(item)
                self._sizes[item.key] = len(item.value)
                self._number = number

    def restored(self) -> Iterator[Lines]:
        """The lines of all pages, the oldest first. One that cannot be read is skipped, and the log says so."""
        known, self._known = self._known, []
        for item in known:
            try:
                yield decode_stored(_unpacked(decode_at(item.key, item.value, Page).lines), Lines)
            except msgspec.DecodeError as error:
                skip("record", ("journal",), f"a page of the journal is skipped: {error}")

    def written(self, lines: Lines) -> Paged:
        """Returns the writes that bring these lines into the store. Earlier lines are to be written, or
        `refused`, first."""
        self._before = dict(self._sizes), list(self._small)
        lines = msgspec.structs.replace(lines, events=tuple(map(_bounded, lines.events)))
        text = encode(lines)
        self._number += 1
        key = self._folder + _name(self._number)
        gone: tuple[str, ...] = ()
        if len(text) > TOGETHER_BYTES // 4:
            self._small = []  # it stays by itself, and those before it do: pages are put together in order
        else:
            self._small.append(_Small(key, lines, len(text)))
        if len(self._small) >= TOGETHER or sum(page.size for page in self._small) > TOGETHER_BYTES:
            pages, self._small = self._small, []
            text = encode(_joined(page.lines for page in pages))
            key, gone = pages[0].key, tuple(page.key for page in pages[1:] if page.key in self._sizes)
        value = encode(Page(lines=zlib.compress(text, 1)))
        for each in gone:
            del self._sizes[each]
        self._sizes[key] = len(value)
        return Paged(key=key, value=value, gone=(*gone, *self._too_old(key)))

    def refused(self) -> None:
        """The store did not take what was to be written last: it has what it had before."""
        self._sizes, self._small = self._before

    def _too_old(self, newest: str) -> Iterator[str]:
        total = sum(self._sizes.values())
        for key in [key for key in self._sizes if key != newest][:TOGETHER]:
            if total <= MOST_BYTES:
                return
            total -= self._sizes.pop(key)
            self._small = [page for page in self._small if page.key != key]
            yield key


def _name(number: int) -> str:
    return f"{number:012d}"


def _joined(pages: Iterable[Lines]) -> Lines:
    events: list[EventRecord] = []
    steps: dict[str, tuple[object, ...]] = {}
    stamp = led = 0.0
    for lines in pages:
        stamp, led = max(stamp, lines.stamp), max(led, lines.led)
        events += lines.events
        for job, records in lines.steps.items():
            steps[job] = (*steps.get(job, ()), *records)
    return Lines(events=tuple(events), steps=steps, stamp=stamp, led=led)  # type: ignore[arg-type]


def _bounded(event: EventRecord) -> EventRecord:
    size = len(encode(event))
    if size <= MOST_EVENT_BYTES:
        return event
    note = f"of {size} bytes, not kept beyond the leader that told it"
    return msgspec.structs.replace(event, text=event.text[: MOST_EVENT_BYTES // 8], data={"left_out": note})


def _unpacked(data: bytes) -> bytes:
    unpacked = zlib.decompressobj()
    try:
        text = unpacked.decompress(data, _MOST_PAGE_BYTES)
    except zlib.error as error:
        raise msgspec.DecodeError(f"it cannot be unpacked: {error}") from None
    if not unpacked.eof:
        raise msgspec.DecodeError("it is cut off, or too large")
    return text


def stamp_of(pages: Iterable[Lines]) -> float:
    """The newest stamp in the journal, in unix seconds; 0 where there is none."""
    return max((lines.stamp for lines in pages), default=0.0)


def newest_of(pages: Iterable[Lines]) -> float:
    """The newest time in the journal, in unix seconds; 0 where it is empty."""
    newest = 0.0
    for lines in pages:
        times = [event.time for event in lines.events]
        times += [step.time for steps in lines.steps.values() for step in steps]
        newest = max(newest, *times) if times else newest
    return newest
