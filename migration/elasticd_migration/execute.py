"""Runs a schedule: old state into side buffers of the new layout, every piece verified, the old untouched.

The order of a move, on every rank alike:

1. `agree`: all-gather what each rank holds, so that joiners know it too;
2. `reshard` and `schedule`: who sends what to whom, derived by each rank for itself;
3. `execute`: side buffers, what is held here copied, rounds of messages, each piece's sum compared;
4. the caller all-gathers whether all went well, drains the transport, and installs the moved state or drops
   it. Until then nothing that the old layout uses has changed.

`migrate` does 1 to 3. In a round a rank posts its receives and then its sends; beside the data go *seals*
(plan number, round, one sum for each piece) and, back, *acknowledgements*, which let the sender forget a
round's buffers and hold at most two rounds of them. Damage is noted and raised after the last
round, so that one rank's bad piece leaves no other waiting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from elasticd_planner.boxes import Box
from elasticd_planner.layouts import Layouts

from elasticd_migration.reshard import renewed, reshard, span
from elasticd_migration.rounds import ROUND_LIMIT, Message, Piece, Round, schedule
from elasticd_migration.schema import Disagreement, Schema, check_covers, merge
from elasticd_migration.state import LocalState, LocalTensor, restore, torch_dtype
from elasticd_migration.transport import Handle, Transport, as_bytes

DATA, SEAL, RECEIPT = 0, 1, 2
#: Elements of a seal before the sums: plan number and round.
HEADER = 2


class Corrupt(RuntimeError):
    """A piece that arrived is not the one that was sent, or not of this move."""


class Incomplete(RuntimeError):
    """The schedule left a part of the new state unfilled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """The new layout's state, verified but not in use.

    schema: what all ranks together hold. bytes_sent, bytes_received: of state, as they went over the
    transport. bytes_sealed: seals and acknowledgements that this rank sent beside it.
    """

    state: LocalState
    schema: Schema
    bytes_sent: int
    bytes_received: int
    bytes_sealed: int


def agree(transport: Transport, state: LocalState, *, refused: str = "") -> Schema:
    """One schema for all ranks. A rank that cannot take part says why in `refused`, and all raise it.

    Raises `Disagreement`, on every rank or on none.
    """
    mine = Schema(refused=refused) if refused else state.schema()
    texts = transport.all_gather(mine.to_json())
    return merge([Schema.from_json(text) for text in texts], transport.members)


def migrate(
    old: Layouts,
    new: Layouts,
    state: LocalState,
    transport: Transport,
    *,
    limit: int = ROUND_LIMIT,
    without: Collection[str] = (),
    device: torch.device | None = None,
) -> Moved:
    """Everything from old layout to verified side buffers; the caller then votes, and installs or drops.

    Every member of the transport calls it, with a leaver's or joiner's part empty. without: devices whose
    copies are gone. device: where the new state is to lie.
    Raises, on every rank alike, `Disagreement` or `Lost`; on the rank concerned `Corrupt` or `Incomplete`.
    """
    me = transport.members[transport.rank]
    if me in {*without, *renewed(old.plan, new.plan)}:
        state = LocalState()  # what it may still hold is of another history
    schema = agree(transport, state)
    check_covers(schema, new.names)
    transfers = reshard(old, new, schema.sizes, without=without)
    rounds = schedule(transfers, schema.planes, limit=limit)
    return execute(rounds, state, new.of(me), transport, schema, number=new.plan.number, device=device)


def execute(
    rounds: Sequence[Round],
    state: LocalState,
    boxes: Mapping[str, Box],
    transport: Transport,
    schema: Schema,
    *,
    number: int,
    device: torch.device | None = None,
) -> Moved:
    """Run `rounds` on this rank and give the state of `boxes`, in side buffers on `device`.

    A parameter whose box does not change keeps its old tensors by reference: the trainer stands still during
    a move, and if the move is dropped they are used on as they are. Scalars are always new.
    number: of the new plan; a message that belongs to another move is refused.

    Raises `Corrupt` or `Incomplete` after the last round; transport errors at once.
    """
    move = _Move(state=state, transport=transport, number=number)
    move.prepare(boxes, schema, device or torch.device("cpu"))
    posted: list[_Incoming] = []
    for index, turn in enumerate(rounds):
        move.release(before=index - 1)
        coming = move.post(index, turn)
        move.send(index, turn)
        move.place(posted)
        posted = coming
    move.place(posted)
    move.release(before=len(rounds))
    if move.damage:
        more = f" (and {len(move.damage) - 1} more)" if len(move.damage) > 1 else ""
        raise Corrupt(move.damage[0] + more)
    return Moved(
        state=move.result(schema, boxes, device or torch.device("cpu")),
        schema=schema,
        bytes_sent=move.sent,
        bytes_received=move.received,
        bytes_sealed=move.sealed,
    )


def checksum(tensor: torch.Tensor) -> int:
    """64-bit sum of a contiguous tensor's bytes taken as little-endian words, the last one filled with
    zeros."""
    raw = as_bytes(tensor)
    words, rest = divmod(raw.numel(), 8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    total = raw[: words * 8].view(torch.int64).sum() if words else torch.zeros((), dtype=torch.int64)
    if rest:
        last = torch.zeros(8, dtype=torch.uint8)
        last[:rest] = raw[words * 8 :]
        total = total.cpu() + last.view(torch.int64)[0]
    return int(total)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Incoming:
    """What is posted from one source in one round: seal and messages, with the buffers they go to."""

    index: int
    source: int
    seal: tuple[Handle, torch.Tensor]
    messages: tuple[tuple[Handle, Message, torch.Tensor, bool], ...]


@dataclass(kw_only=True, slots=True)
class _Move:
    """One rank's progress through a move."""

    state: LocalState
    transport: Transport
    number: int
    side: dict[str, LocalTensor] = field(default_factory=dict)
    filled: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    damage: list[str] = field(default_factory=list)
    receipts: list[tuple[int, int, Handle, torch.Tensor, list[int]]] = field(default_factory=list)
    sent: int = 0
    received: int = 0
    sealed: int = 0

    @property
    def me(self) -> str:
        return self.transport.members[self.transport.rank]

    def prepare(self, boxes: Mapping[str, Box], schema: Schema, device: torch.device) -> None:
        """Side buffers, filled with what this rank holds already."""
        for name, box in boxes.items():
            held = self.state.tensors.get(name)
            if held is not None and held.box == box:
                self.side[name] = held
                continue
            planes = {
                plane.name: torch.empty(box.shape, dtype=torch_dtype(plane.dtype), device=device)
                for plane in schema.tensors[name].planes
            }
            self.side[name] = LocalTensor(box=box, planes=planes)
            common = held.box.overlap(box) if held is not None else None
            if held is None or common is None:
                continue
            for key, plane in planes.items():
                plane[common.slices(box)].copy_(held.planes[key][common.slices(held.box)])
                self.filled[name, key] += common.size

    def post(self, index: int, turn: Round) -> list[_Incoming]:
        """Ask for all that this round brings."""
        by_source: dict[str, list[Message]] = defaultdict(list)
        for message in turn.received_by(self.me):
            by_source[message.source].append(message)
        return [self._ask(index, source, messages) for source, messages in by_source.items()]

    def _ask(self, index: int, source: str, messages: Sequence[Message]) -> _Incoming:
        rank = self.transport.members.index(source)
        pieces = sum(len(message.pieces) for message in messages)
        seal = torch.empty(HEADER + pieces, dtype=torch.int64)
        posted = []
        for message in messages:
            buffer, in_place = self._buffer(message)
            handle = self.transport.receive(rank, buffer, channel=DATA)
            posted.append((handle, message, buffer, in_place))
        return _Incoming(
            index=index,
            source=rank,
            seal=(self.transport.receive(rank, seal, channel=SEAL), seal),
            messages=tuple(posted),
        )

    def _buffer(self, message: Message) -> tuple[torch.Tensor, bool]:
        """Where a message is received: the side buffer itself where its piece lies there in one run."""
        if len(message.pieces) == 1:
            target = self._target(message.pieces[0])
            if target.is_contiguous() and target.device == self.transport.device:
                return target, True
        return torch.empty(message.bytes, dtype=torch.uint8, device=self.transport.device), False

    def _target(self, piece: Piece) -> torch.Tensor:
        tensor = self.side[piece.name]
        return tensor.planes[piece.plane][piece.box.slices(tensor.box)]

    def send(self, index: int, turn: Round) -> None:
        """Send this round's messages, then for each receiver the seal; ask for its acknowledgement."""
        tickets: dict[int, list[int]] = defaultdict(list)
        sums: dict[int, list[int]] = defaultdict(list)
        for message in turn.sent_by(self.me):
            rank = self.transport.members.index(message.destination)
            parts = [self._outgoing(piece) for piece in message.pieces]
            sums[rank].extend(checksum(part) for part in parts)
            packed = parts[0] if len(parts) == 1 else torch.cat([as_bytes(part) for part in parts])
            tickets[rank].append(self.transport.send(rank, packed, channel=DATA))
            self.sent += message.bytes
        for rank, found in sums.items():
            seal = torch.tensor([self.number, index, *found], dtype=torch.int64)
            tickets[rank].append(self._beside(rank, seal, SEAL))
            receipt = torch.empty(HEADER, dtype=torch.int64)
            handle = self.transport.receive(rank, receipt, channel=RECEIPT)
            self.receipts.append((index, rank, handle, receipt, tickets[rank]))

    def _outgoing(self, piece: Piece) -> torch.Tensor:
        """A piece of the old state, contiguous and where the transport can send it; copied only if needed."""
        tensor = self.state.tensors[piece.name]
        part = tensor.planes[piece.plane][piece.box.slices(tensor.box)]
        return part.to(self.transport.device).contiguous()

    def _beside(self, rank: int, tensor: torch.Tensor, channel: int) -> int:
        self.sealed += tensor.numel() * tensor.element_size()
        return self.transport.send(rank, tensor, channel=channel)

    def place(self, posted: Sequence[_Incoming]) -> None:
        """Wait for what was posted, verify it, put it where it belongs, acknowledge it."""
        for incoming in posted:
            handle, seal = incoming.seal
            handle.wait()
            number, index, *sums = seal.tolist()
            source = self.transport.members[incoming.source]
            if (number, index) != (self.number, incoming.index):
                self.damage.append(
                    f"{source} sends round {index} of the move to plan {number}, {self.me} is in round "
                    f"{incoming.index} of the move to plan {self.number}"
                )
            expected = iter(sums)
            for handle, message, buffer, in_place in incoming.messages:
                handle.wait()
                self.received += message.bytes
                for piece, part in _unpacked(message, buffer):
                    self._accept(piece, part, next(expected), in_place, source)
            receipt = torch.tensor([self.number, incoming.index], dtype=torch.int64)
            self._beside(incoming.source, receipt, RECEIPT)

    def _accept(self, piece: Piece, part: torch.Tensor, expected: int, in_place: bool, source: str) -> None:
        if checksum(part) != expected:
            self.damage.append(
                f"{piece.plane} of {piece.name} {span(piece.box)} from {source} arrived damaged at {self.me} "
                f"in the move to plan {self.number}: the old state is kept"
            )
            return
        if not in_place:
            target = self._target(piece)
            target.copy_(part.view(target.dtype).reshape(target.shape))
        self.filled[piece.name, piece.plane] += piece.box.size

    def release(self, *, before: int) -> None:
        """Wait for the acknowledgements of all rounds before that one, and let go of what they cover."""
        while self.receipts and self.receipts[0][0] < before:
            index, rank, handle, receipt, tickets = self.receipts.pop(0)
            handle.wait()
            if receipt.tolist() != [self.number, index]:
                source = self.transport.members[rank]
                self.damage.append(f"{source} acknowledges {receipt.tolist()}, not {[self.number, index]}")
            self.transport.drain(tickets)

    def result(self, schema: Schema, boxes: Mapping[str, Box], device: torch.device) -> LocalState:
        """The new state with its scalars. Raises `Incomplete` where anything was left unfilled."""
        for name, box in boxes.items():
            if self.side[name] is self.state.tensors.get(name):
                continue
            for key in self.side[name].planes:
                filled = self.filled[name, key]
                if filled != box.size:
                    raise Incomplete(f"{key} of {name}: {filled} of {box.size} elements came to {self.me}")
        return LocalState(
            tensors={
                name: LocalTensor(
                    box=tensor.box,
                    planes=tensor.planes,
                    scalars={s.name: restore(s, device) for s in schema.tensors[name].scalars},
                )
                for name, tensor in self.side.items()
            }
        )


def _unpacked(message: Message, buffer: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    if len(message.pieces) == 1:
        yield message.pieces[0], buffer
        return
    start = 0
    for piece in message.pieces:
        yield piece, buffer[start : start + piece.bytes]
        start += piece.bytes


__all__ = ["Corrupt", "Disagreement", "Incomplete", "Moved", "agree", "checksum", "execute", "migrate"]
