"""From transfers to rounds: which messages go together, so that buffers stay bounded and both ends agree.

Pure: each rank derives the whole schedule and finds its own messages in it. Within a round no device
sends or receives more than the limit. Small pieces between one pair share a message; large ones go
as they lie, because packing costs a copy that only pays below about 32 KiB.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from elasticd_planner.boxes import Box
from elasticd_planner.value import Value, refuse

from elasticd_migration.reshard import Transfer
from elasticd_migration.schema import Plane

#: Bytes below which pieces are packed together.
PACK_BELOW = 32 * 1024
#: Bytes that a device sends, and receives, in one round at most.
ROUND_LIMIT = 64 * 1024 * 1024


class Piece(Value, frozen=True, kw_only=True):
    """A box of one plane of one tensor."""

    name: str
    plane: str
    box: Box
    itemsize: int

    @property
    def bytes(self) -> int:
        return self.box.size * self.itemsize


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
        return sum(piece.bytes for piece in self.pieces)


class Round(Value, frozen=True, kw_only=True):
    """Messages that are under way together, in the order in which each end posts its own."""

    messages: tuple[Message, ...]

    def sent_by(self, device: str) -> tuple[Message, ...]:
        return tuple(message for message in self.messages if message.source == device)

    def received_by(self, device: str) -> tuple[Message, ...]:
        return tuple(message for message in self.messages if message.destination == device)


def schedule(
    transfers: Sequence[Transfer], planes: Mapping[str, Sequence[Plane]], *, limit: int = ROUND_LIMIT
) -> tuple[Round, ...]:
    """Rounds in which every piece of `transfers` is sent once.

    planes: what moves of each tensor, by name. limit: bytes that one device sends or receives in a round.
    """
    if limit < 1:
        raise ValueError(f"limit of a round must be at least one byte, not {limit}")
    rounds: list[list[Message]] = []
    out: list[dict[str, int]] = []
    into: list[dict[str, int]] = []
    for message in _messages(transfers, planes, limit):
        index = _first_fit(message, out, into, limit)
        if index == len(rounds):
            rounds.append([])
            out.append(defaultdict(int))
            into.append(defaultdict(int))
        rounds[index].append(message)
        out[index][message.source] += message.bytes
        into[index][message.destination] += message.bytes
    return tuple(Round(messages=tuple(messages)) for messages in rounds)


def _first_fit(
    message: Message, out: Sequence[Mapping[str, int]], into: Sequence[Mapping[str, int]], limit: int
) -> int:
    for index, (sent, received) in enumerate(zip(out, into, strict=True)):
        busiest = max(sent.get(message.source, 0), received.get(message.destination, 0))
        if busiest + message.bytes <= limit:
            return index
    return len(out)


def _messages(
    transfers: Sequence[Transfer], planes: Mapping[str, Sequence[Plane]], limit: int
) -> Iterator[Message]:
    small: dict[tuple[str, str], list[Piece]] = {}
    weight: dict[tuple[str, str], int] = defaultdict(int)
    for transfer in transfers:
        pair = transfer.source, transfer.destination
        for plane in planes[transfer.name]:
            for box in split(transfer.box, max(1, limit // plane.itemsize)):
                piece = Piece(name=transfer.name, plane=plane.name, box=box, itemsize=plane.itemsize)
                if piece.bytes >= PACK_BELOW:
                    yield Message(source=pair[0], destination=pair[1], pieces=(piece,))
                    continue
                if weight[pair] + piece.bytes > limit and pair in small:
                    yield _packed(pair, small.pop(pair))
                    weight[pair] = 0
                small.setdefault(pair, []).append(piece)
                weight[pair] += piece.bytes
    for pair, pieces in small.items():
        yield _packed(pair, pieces)


def _packed(pair: tuple[str, str], pieces: Sequence[Piece]) -> Message:
    ordered = sorted(pieces, key=lambda piece: -piece.itemsize)
    return Message(source=pair[0], destination=pair[1], pieces=tuple(ordered))


def split(box: Box, elements: int) -> Iterator[Box]:
    """`box` in parts of at most `elements`, cut along the first dimension that can be cut: runs of whole
    rows, so that a part of a contiguous tensor is contiguous too."""
    if box.empty:
        return
    if box.size <= elements:
        yield box
        return
    dim = next(d for d, extent in enumerate(box.shape) if extent > 1)
    rows = max(1, elements // (box.size // box.shape[dim]))
    for start in range(box.start[dim], box.stop[dim], rows):
        stop = min(start + rows, box.stop[dim])
        part = Box(
            start=(*box.start[:dim], start, *box.start[dim + 1 :]),
            stop=(*box.stop[:dim], stop, *box.stop[dim + 1 :]),
        )
        yield from split(part, elements)
