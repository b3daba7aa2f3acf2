"""From transfers to rounds: which messages go together, so that buffers stay bounded and both ends agree.

Pure: each rank fills the same rounds with the same transfers, and then finds its own pieces in them. Within a
round no device sends or receives more than the limit. Transfers go into the first rounds that have room at both
ends, in the model's order, so that all devices go through the model together. Small pieces between one pair
share a message; large ones go as they lie, because packing costs a copy at both ends.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from elasticd_planner.layout.layouts import Item, Role
from elasticd_planner.spec.box import Box
from elasticd_planner.value import Value, refuse

from elasticd_migration.reshard import Transfer
from elasticd_migration.schema import Plane

#: Bytes below which pieces are packed together. A message of its own costs about 100 us, both ends together; a
#: copy into staging memory and out of it costs that for more than 128 KiB.
PACK_BELOW = 128 * 1024
#: Bytes that a device sends, and receives, in one round at most.
ROUND_BYTES = 64 * 1024 * 1024
#: A transfer is divided between rounds where this fraction of the limit goes into each of them.
LEAST = 8
#: Parameters in a row whose transfers between one pair are placed together.
TOGETHER = 16
#: Rounds that are looked at together.
WINDOW = 128

#: Source and destination.
Pair = tuple[str, str]
#: Of a transfer: bytes, bytes of the elements that it is cut at, elements, elements that it is cut at.
_Sized = tuple[int, int, int, int]


class Piece(Value, frozen=True, kw_only=True):
    """A box of one plane of one item; `bytes` of it."""

    item: Item
    plane: str
    box: Box
    itemsize: int
    bytes: int

    @classmethod
    def of(cls, item: Item, plane: Plane, box: Box) -> Piece:
        """The piece of `plane` that lies in `box`, with its bytes."""
        size = box.size * plane.itemsize
        return cls(item=item, plane=plane.name, box=box, itemsize=plane.itemsize, bytes=size)


class Message(Value, frozen=True, kw_only=True, dict=True):
    """Pieces that go from one device to another in one send, one behind the other.

    Widest elements first, so that each piece starts at a multiple of its element size without padding.
    """

    source: str
    destination: str
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        widths = [piece.itemsize for piece in self.pieces]
        if not widths or widths != sorted(widths, reverse=True):
            refuse(f"message to {self.destination}: needs pieces, those with the widest elements first")

    @cached_property
    def bytes(self) -> int:
        """Bytes of all its pieces."""
        return sum(piece.bytes for piece in self.pieces)


class Round(Value, frozen=True, kw_only=True):
    """Messages that are under way together, in the order in which each end posts its own."""

    messages: tuple[Message, ...]

    def sent_by(self, device: str) -> tuple[Message, ...]:
        """The messages that `device` posts sends for, in their order."""
        return tuple(message for message in self.messages if message.source == device)

    def received_by(self, device: str) -> tuple[Message, ...]:
        """The messages that `device` posts receives for, in their order."""
        return tuple(message for message in self.messages if message.destination == device)


def schedule(
    transfers: Sequence[Transfer],
    planes: Mapping[Item, Sequence[Plane]],
    *,
    limit: int = ROUND_BYTES,
    me: str | None = None,
) -> tuple[Round, ...]:
    """Rounds in which every piece of `transfers` is sent once.

    planes: what moves of each item. limit: bytes that one device sends or receives in a round. me: the device
    whose messages are wanted (all rounds are there, with its messages alone); None for all.
    Raises ValueError for a limit below eight elements.
    """
    if limit < 1:
        raise ValueError(f"limit of a round must be at least one byte, not {limit}")
    packer = RoundPacker(limit)
    pieces_by_pair: dict[int, dict[Pair, list[Piece]]] = defaultdict(lambda: defaultdict(list))
    for group in _groups(transfers, planes, limit, me):
        parts = packer.place(*group.pair, group.size, group.slack)
        if group.transfers:
            for index, pieces in group.pieces(parts, planes):
                pieces_by_pair[index][group.pair] += pieces
    return tuple(
        Round(
            messages=tuple(m for pair, pieces in pieces_by_pair[index].items() for m in _messages(pair, pieces))
        )
        for index in range(packer.rounds)
    )


@dataclass(slots=True)
class _Group:
    """Transfers of one pair that are placed together: (transfer, elements, bytes of each, elements that are
    cut at). Their bytes lie one behind the other; `slack` is what a cut may be early by."""

    pair: Pair
    wanted: bool
    size: int = 0
    slack: int = 0
    transfers: list[tuple[Transfer, int, int, int]] = field(default_factory=list)

    def pieces(
        self, parts: Sequence[tuple[int, int]], planes: Mapping[Item, Sequence[Plane]]
    ) -> Iterator[tuple[int, list[Piece]]]:
        """For each part (round, bytes) what is in it; every transfer is cut in multiples of its rows."""
        waiting = iter(self.transfers)
        transfer, count, weight, block = next(waiting)
        begin, start, border = 0, 0, 0
        for index, size in parts:
            border += size
            pieces_of_transfers: list[Piece] = []
            while True:
                inside = (border - begin) // weight // block * block
                stop = count if border >= begin + count * weight else max(start, inside)
                if start < stop:
                    pieces_of_transfers += _pieces(transfer, count, start, stop, planes)
                start = stop
                if stop < count:
                    break
                begin, start = begin + count * weight, 0
                following = next(waiting, None)
                if following is None:
                    break
                transfer, count, weight, block = following
            yield index, pieces_of_transfers


def _groups(
    transfers: Sequence[Transfer], planes: Mapping[Item, Sequence[Plane]], limit: int, me: str | None
) -> Iterator[_Group]:
    """All transfers, those of a few parameters in a row and one pair together. The groups of other pairs than
    those of `me` have a size only."""
    weighed: dict[tuple[str, tuple[Role, ...]], int] = {}
    sized: dict[int, dict[int, _Sized]] = defaultdict(dict)  # by weight and box: layers share their boxes
    open_groups: dict[Pair, _Group] = {}
    seen: tuple[str, tuple[Role, ...]] = "", ()
    weight, parameters, known = 0, 0, sized[0]
    for transfer in transfers:
        name, roles = transfer.name, transfer.roles
        if name != seen[0] or roles != seen[1]:
            if name != seen[0]:
                parameters += 1
            seen = name, roles
            if parameters > TOGETHER:
                yield from open_groups.values()
                open_groups, parameters = {}, 1
            weight = weighed.get(seen, -1)
            if weight < 0:
                held = (plane for item in transfer.items for plane in planes[item])
                weight = weighed[seen] = sum(plane.itemsize for plane in held)
            if LEAST * weight > limit:
                raise ValueError(
                    f"limit of a round must be at least {LEAST} elements of {weight} bytes, not {limit} bytes"
                )
            known = sized[weight]
        box = transfer.box
        found = known.get(id(box))
        if found is None:
            found = known[id(box)] = _sized(box.shape, weight, limit)
        size, slack, count, block = found
        if not size:
            continue
        pair = transfer.source, transfer.destination
        group = open_groups.get(pair)
        if group is None:
            group = open_groups[pair] = _Group(pair, wanted=me is None or me in pair)
        group.size += size
        if slack > group.slack:
            group.slack = slack
        if group.wanted:
            group.transfers.append((transfer, count, weight, block))
    yield from open_groups.values()


def _sized(shape: tuple[int, ...], weight: int, limit: int) -> _Sized:
    count, block = math.prod(shape), _rows(shape, limit // LEAST // max(1, weight))
    return count * weight, min(block, count) * weight, count, block


def _rows(shape: tuple[int, ...], most: int) -> int:
    """Elements of the trailing dimensions that together have at most so many: whole rows where they are short
    enough."""
    block = 1
    for extent in reversed(shape):
        if block * extent > most:
            break
        block *= extent
    return block


class RoundPacker:
    """Places messages in rounds, by the bytes that each end has in each round."""

    def __init__(self, limit: int) -> None:
        self.limit, self.rounds = limit, 0
        self._least = max(1, limit // LEAST)
        self._rows: dict[tuple[str, str], int] = {}
        self._room = np.full((16, WINDOW), limit, dtype=np.int64)
        self._first: list[int] = []

    def place(self, source: str, destination: str, size: int, slack: int) -> list[tuple[int, int]]:
        """(round, bytes) of each part of so many bytes; where they are divided, up to `slack` bytes more of
        room are taken in each."""
        out, into = self._row("out", source), self._row("in", destination)
        first = max(self._first[out], self._first[into])
        parts: list[tuple[int, int]] = []
        while size:
            if first + WINDOW > self._room.shape[1]:
                self._room = np.pad(self._room, ((0, 0), (0, self._room.shape[1])), constant_values=self.limit)
            ours, theirs = self._room[out, first : first + WINDOW], self._room[into, first : first + WINDOW]
            rooms = np.minimum(ours, theirs)
            enough = rooms >= min(size, self._least)
            k = int(enough.argmax())
            if not parts and rooms[k] >= size:  # in one round, as it is
                ours[k] -= size
                theirs[k] -= size
                parts.append((first + k, size))
                break
            rooms -= slack
            places = (enough & (rooms >= min(size, max(1, self._least // 2)))).nonzero()[0]
            if len(places):
                taken = rooms[places].cumsum()
                count = min(int(taken.searchsorted(size)) + 1, len(places))
                places, takes = places[:count], rooms[places[:count]]
                takes[-1] -= max(0, int(taken[count - 1]) - size)
                ours[places] -= takes + slack
                theirs[places] -= takes + slack
                parts += zip((first + places).tolist(), takes.tolist(), strict=True)
                size -= min(size, int(taken[count - 1]))
            first += WINDOW
        if parts:
            self.rounds = max(self.rounds, parts[-1][0] + 1)
            self._advance(out)
            self._advance(into)
        return parts

    def _row(self, way: str, device: str) -> int:
        row = self._rows.get((way, device))
        if row is None:
            row = self._rows[way, device] = len(self._rows)
            self._first.append(0)
            if row == len(self._room):
                self._room = np.pad(self._room, ((0, row), (0, 0)), constant_values=self.limit)
        return row

    def _advance(self, row: int) -> None:
        """Rounds at the beginning with too little room are not looked at again."""
        first, room = self._first[row], self._room[row]
        while first < len(room) and room[first] < self._least // 4:
            first += 1
        self._first[row] = first


def _pieces(
    transfer: Transfer, count: int, start: int, stop: int, planes: Mapping[Item, Sequence[Plane]]
) -> Iterator[Piece]:
    """The elements `start` to `stop` of a transfer, in all planes of all its roles."""
    boxes = (transfer.box,) if stop - start == count else tuple(run(transfer.box, start, stop))
    for item in transfer.items:
        for plane in planes[item]:
            for box in boxes:
                yield Piece.of(item, plane, box)


def _messages(pair: tuple[str, str], pieces: Sequence[Piece]) -> Iterator[Message]:
    """The large pieces one by one, then the small ones together."""
    small = [piece for piece in pieces if piece.bytes < PACK_BELOW]
    for piece in pieces:
        if piece.bytes >= PACK_BELOW:
            yield Message(source=pair[0], destination=pair[1], pieces=(piece,))
    if small:
        small.sort(key=lambda piece: -piece.itemsize)
        yield Message(source=pair[0], destination=pair[1], pieces=tuple(small))


def run(box: Box, start: int, stop: int) -> Iterator[Box]:
    """The elements `start` to `stop` of a box in the order in which they lie in memory, as few boxes: part of
    a row, whole rows, part of a row."""
    if start >= stop:
        return
    shape = box.shape
    if stop - start == math.prod(shape):
        yield box
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _in_row(box, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(box, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box(start=(box.start[0] + first, *box.start[1:]), stop=(box.start[0] + last, *box.stop[1:]))
    if last * row < stop:
        yield from _in_row(box, last, 0, stop - last * row)


def _in_row(box: Box, index: int, start: int, stop: int) -> Iterator[Box]:
    inner = Box(start=box.start[1:], stop=box.stop[1:])
    at = box.start[0] + index
    for part in run(inner, start, stop):
        yield Box(start=(at, *part.start), stop=(at + 1, *part.stop))
