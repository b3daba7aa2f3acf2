"""Rounds over a transport: pieces sent and received, each one's sum compared, in bounded memory.

A rank starts all its messages of a round together. Beside them go *seals* (plan number, round, which
pieces with which dtypes, one sum for each) and, back, *receipts*, which let the sender forget a round's
buffers. While a round is under way the one before it is checked and placed.

A piece that lies in one run of memory is sent from where it is and received where it belongs. The others, and
the small ones that share a message, pass through staging memory: two rounds of it each way and no more, which
is all the memory that a move needs besides the state itself.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from elasticd_migration.reshard import span
from elasticd_migration.rounds import Message, Piece, Round
from elasticd_migration.schema import Schema
from elasticd_migration.target_buffers import TargetBuffers
from elasticd_migration.transport import Handle, Transport

SEAL, RECEIPT = 1, 2
#: Elements of a seal before the sums (plan number, round, which pieces), and of a receipt.
HEADER, PROOF = 3, 2
#: Staged messages start at multiples of this.
ALIGNED = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Incoming:
    """The receives from one source in one round: seal and messages, with the buffers that they go to and
    whether that is where their one piece belongs."""

    index: int
    source: int
    asked: float
    seal: tuple[Handle, torch.Tensor]
    messages: tuple[tuple[Handle, Message, torch.Tensor, bool], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sent:
    """The messages to one receiver in one round, until its receipt comes."""

    index: int
    rank: int
    receipt: tuple[Handle, torch.Tensor]
    tickets: tuple[int, ...]
    messages: tuple[Message, ...]


class Exchange:
    """One rank's part in the rounds of one move.

    sent, received: bytes of state. flows: by device that sent to this one, the bytes and the seconds that this
    one had asked for them until they were here, all rounds together. sealed: bytes of seals and receipts that
    went beside it. damage: what did not arrive as it was sent; it is noted, so that one rank's bad piece leaves
    no other waiting."""

    def __init__(
        self, side: TargetBuffers, transport: Transport, schema: Schema, rounds: Sequence[Round], number: int
    ) -> None:
        self.sent = self.received = self.sealed = 0
        self.damage: list[str] = []
        self.flows: dict[str, tuple[int, float]] = {}
        self._last: dict[str, float] = {}
        self._side, self._transport, self._number = side, transport, number
        self._rounds = rounds
        self._me = transport.members[transport.rank]
        self._ranks = {member: rank for rank, member in enumerate(transport.members)}
        self._dtypes = {
            (item, plane.name): plane.dtype for item, held in schema.planes.items() for plane in held
        }
        self._waiting: list[_Sent] = []
        self._out = _Staging(_most(rounds, "source", self._me), transport.device)
        self._in = _Staging(_most(rounds, "destination", self._me), transport.device)

    @property
    def staged(self) -> int:
        """Bytes of staging memory that were used at most."""
        return self._out.used + self._in.used

    def run(self) -> None:
        """All rounds. Transport errors are raised at once."""
        posted: list[_Incoming] = []
        for index, turn in enumerate(self._rounds):
            self._release(before=index - 1)
            coming = self._begin(index, turn)
            self._place(posted)
            posted = coming
        self._place(posted)
        self._release(before=len(self._rounds))

    def _begin(self, index: int, turn: Round) -> list[_Incoming]:
        """Starts the messages of a round, sends each receiver its seal, and asks for seals and receipts."""
        began = time.perf_counter()
        come: dict[str, list[tuple[Message, torch.Tensor, bool]]] = defaultdict(list)
        go: dict[str, list[tuple[Message, torch.Tensor, list[torch.Tensor]]]] = defaultdict(list)
        for message in turn.received_by(self._me):
            come[message.source].append((message, *self._buffer(index, message)))
        for message in turn.sent_by(self._me):
            go[message.destination].append((message, *self._outgoing(index, message)))
        sent, asked_for = self._transport.round(
            [(self._ranks[to], whole) for to, held in go.items() for _, whole, _ in held],
            [(self._ranks[source], buffer) for source, asked in come.items() for _, buffer, _ in asked],
        )
        tickets, handles = iter(sent), iter(asked_for)
        incoming = []
        for source, asked in come.items():
            seal = torch.empty(HEADER + sum(len(each[0].pieces) for each in asked), dtype=torch.int64)
            incoming.append(
                _Incoming(
                    index=index,
                    source=self._ranks[source],
                    asked=began,
                    seal=(self._transport.receive(self._ranks[source], seal, channel=SEAL), seal),
                    messages=tuple((next(handles), *each) for each in asked),
                )
            )
        for to, held in go.items():
            self._seal(index, self._ranks[to], held, [next(tickets) for _ in held])
        return incoming

    def _buffer(self, index: int, message: Message) -> tuple[torch.Tensor, bool]:
        """The buffer in which a message is received, and whether that is where its one piece belongs."""
        if len(message.pieces) == 1:
            target = self._side.target(message.pieces[0])
            if target.is_contiguous() and target.device == self._transport.device:
                return target, True
        return self._in.take(index, message.bytes), False

    def _seal(
        self,
        index: int,
        rank: int,
        held: Sequence[tuple[Message, torch.Tensor, list[torch.Tensor]]],
        tickets: list[int],
    ) -> None:
        """Sends the seal of messages that are on their way, and asks for their receipt."""
        messages = [message for message, _, _ in held]
        sums = checksums([part for _, _, parts in held for part in parts])
        self.sent += sum(message.bytes for message in messages)
        header = [self._number, index, self._signature(messages)]
        tickets.append(self._beside(rank, torch.tensor([*header, *sums], dtype=torch.int64), SEAL))
        receipt = torch.empty(PROOF, dtype=torch.int64)
        self._waiting.append(
            _Sent(
                index=index,
                rank=rank,
                receipt=(self._transport.receive(rank, receipt, channel=RECEIPT), receipt),
                tickets=tuple(tickets),
                messages=tuple(messages),
            )
        )

    def _outgoing(self, index: int, message: Message) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A message in one run of memory where the transport can send it, and its pieces in it."""
        first = self._side.outgoing(message.pieces[0])
        if len(message.pieces) == 1 and first.is_contiguous() and first.device == self._transport.device:
            return first, [first]
        staged = self._out.take(index, message.bytes)
        parts = list(_cut(message, staged))
        for piece, part in zip(message.pieces, parts, strict=True):
            held = self._side.outgoing(piece)
            part.view(held.dtype).view(held.shape).copy_(held)
        return staged, parts

    def _beside(self, rank: int, tensor: torch.Tensor, channel: int) -> int:
        self.sealed += tensor.numel() * tensor.element_size()
        return self._transport.send(rank, tensor, channel=channel)

    def _place(self, posted: Sequence[_Incoming]) -> None:
        """Wait for what was posted, verify it, put it where it belongs, and give a receipt."""
        for incoming in posted:
            source = self._transport.members[incoming.source]
            arrived: list[tuple[Piece, torch.Tensor, bool]] = []
            sums_here: list[int] = []
            for handle, message, buffer, in_place in incoming.messages:
                handle.wait()
                self.received += message.bytes
                self._flowed(source, message.bytes, incoming.asked)
                parts = [buffer] if in_place else list(_cut(message, buffer))
                arrived += [(piece, part, in_place) for piece, part in zip(message.pieces, parts, strict=True)]
                if self._transport.device.type == "cpu":
                    sums_here += checksums(parts)  # while the next is on its way
            sums_here = sums_here or checksums([part for _, part, _ in arrived])
            sums = self._opened(incoming, source)
            for (piece, part, in_place), computed, expected in zip(arrived, sums_here, sums, strict=True):
                if computed == expected:
                    self._accept(piece, part, in_place)
                else:
                    self.damage.append(
                        f"{piece.plane} of {piece.item} {span(piece.box)} from {source} arrived damaged at "
                        f"{self._me} in the move to plan {self._number}"
                    )
            receipt = torch.tensor([self._number, incoming.index], dtype=torch.int64)
            self._beside(incoming.source, receipt, RECEIPT)

    def _flowed(self, source: str, size: int, asked: float) -> None:
        """A message is here. What came before it from the same source was in its way: that time is its own."""
        now, (before, seconds) = time.perf_counter(), self.flows.get(source, (0, 0.0))
        self.flows[source] = before + size, seconds + now - max(asked, self._last.get(source, asked))
        self._last[source] = now

    def _opened(self, incoming: _Incoming, source: str) -> list[int]:
        """The sums in a seal that is of this move, this round and these pieces."""
        handle, seal = incoming.seal
        handle.wait()
        number, index, signature, *sums = seal.tolist()
        if (number, index) != (self._number, incoming.index):
            self.damage.append(
                f"{source} sends round {index} of the move to plan {number}, {self._me} is in round "
                f"{incoming.index} of the move to plan {self._number}"
            )
        elif signature != self._signature([message for _, message, _, _ in incoming.messages]):
            self.damage.append(f"{source} sends other pieces in round {index} than {self._me} expects")
        return [int(each) for each in sums]

    def _accept(self, piece: Piece, part: torch.Tensor, in_place: bool) -> None:
        if not in_place:
            target = self._side.target(piece)
            target.copy_(part.view(target.dtype).view(target.shape))
        self._side.filled(piece)

    def _signature(self, messages: Sequence[Message]) -> int:
        """63 bits that stand for names, boxes and dtypes of the pieces, in order."""
        signatures = [
            (*piece.item, piece.plane, piece.box.start, piece.box.stop, self._dtypes[piece.item, piece.plane])
            for message in messages
            for piece in message.pieces
        ]
        digest = hashlib.blake2b(repr(signatures).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _release(self, *, before: int) -> None:
        """Wait for the receipts of all rounds before that one, and let go of what they cover."""
        while self._waiting and self._waiting[0].index < before:
            sent = self._waiting.pop(0)
            handle, receipt = sent.receipt
            handle.wait()
            if receipt.tolist() != [self._number, sent.index]:
                source = self._transport.members[sent.rank]
                self.damage.append(
                    f"{source} acknowledges {receipt.tolist()}, not {[self._number, sent.index]}"
                )
            self._transport.drain(sent.tickets)
            self._side.sent(piece for message in sent.messages for piece in message.pieces)


class _Staging:
    """Memory for two rounds of messages, used in turn; a page of it is touched only when it is used."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self._halves: list[torch.Tensor] = []
        self._index, self._start = -1, 0
        self._most = [0, 0]

    @property
    def used(self) -> int:
        return sum(self._most)

    def take(self, index: int, size: int) -> torch.Tensor:
        """Room for a message of round `index`, which is that round's until the next but one begins."""
        if not self._halves:
            self._halves = [torch.empty(self._size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        if index != self._index:
            self._index, self._start = index, 0
        buffer = self._halves[index % 2][self._start : self._start + size]
        self._start += -(-size // ALIGNED) * ALIGNED
        self._most[index % 2] = max(self._most[index % 2], self._start)
        return buffer


def _most(rounds: Sequence[Round], end: str, me: str) -> int:
    """Bytes of the largest round at one end, aligned."""
    return max(
        (
            sum(-(-m.bytes // ALIGNED) * ALIGNED for m in turn.messages if getattr(m, end) == me)
            for turn in rounds
        ),
        default=0,
    )


def _cut(message: Message, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of each piece of a message."""
    start = 0
    for piece in message.pieces:
        yield buffer[start : start + piece.bytes]
        start += piece.bytes


class _Memory:
    """A tensor's memory for NumPy. (`Tensor.numpy` marks the storage as one that cannot be resized, and memory
    of the old state could no longer be given back.)"""

    def __init__(self, start: int, count: int, kind: str) -> None:
        self.__array_interface__ = {"data": (start, True), "shape": (count,), "typestr": kind, "version": 3}


def checksums(parts: Sequence[torch.Tensor]) -> list[int]:
    """`checksum` of each. Those on an accelerator are added up there, and read together."""
    if not parts or parts[0].device.type == "cpu":
        return [checksum(part) for part in parts]
    sums: list[int] = torch.stack([_sum_there(part) for part in parts]).tolist()
    return sums


def _sum_there(tensor: torch.Tensor) -> torch.Tensor:
    """`checksum` on an accelerator, whose sums of int64 wrap around as those of the host do."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    size = flat.numel()
    whole = flat.new_zeros(-(-size // 8) * 8) if size % 8 or flat.storage_offset() % 8 else flat
    if whole is not flat:
        whole[:size] = flat
    return whole.view(torch.int64).sum()


def checksum(tensor: torch.Tensor) -> int:
    """64-bit sum of a contiguous tensor's bytes taken as little-endian words, the last one filled with zeros.

    By NumPy, which adds three times as fast as torch."""
    if not tensor.is_contiguous():
        raise ValueError(f"tensor of shape {tuple(tensor.shape)} is not contiguous: sum a copy")
    tensor = tensor.cpu()  # the same where it lies there
    size, start = tensor.nbytes, tensor.data_ptr()
    total = int(np.add.reduce(np.asarray(_Memory(start, size // 8, "<u8")))) if size >= 8 else 0
    if size % 8:
        rest = np.asarray(_Memory(start + size // 8 * 8, size % 8, "|u1"))
        total += int.from_bytes(rest.tobytes(), "little")
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
