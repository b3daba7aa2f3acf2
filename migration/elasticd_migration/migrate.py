"""Runs a move: old state into side buffers of the new layout, every piece verified, the old untouched.

The order of a move, on every rank alike:

1. `agree`: all tell what they hold, each thing once, so that joiners know it too;
2. `reshard` and `schedule`: who sends what to whom, derived by each rank for itself;
3. `execute`: side buffers, what is held here copied, rounds of messages, each piece's sum compared;
4. the caller all-gathers whether all went well, drains the transport, and installs the moved state or drops
   it. Until then nothing that the old layout uses has changed.

`migrate` does 1 to 3. What is agreed on in 1 changes from step to step only in its scalars, so that 2 can be
done ahead, while training goes on (`prepare_move`); if 1 then finds other planes, 2 is done again. With
`in_place`, for states that do not fit twice, old boxes give their memory back during 3: such a move has no way
back, and whoever asks for it must know where to fetch what a failure loses.
"""

from __future__ import annotations

import gc
import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch
from elasticd_planner.layout.holdings import Holdings
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box

from elasticd_migration.exchange import Exchange
from elasticd_migration.local_state import LocalState
from elasticd_migration.reshard import Lost, renewed, reshard
from elasticd_migration.rounds import ROUND_BYTES, Round, schedule
from elasticd_migration.schema import Disagreement, Plane, Schema, check_covers, merge
from elasticd_migration.target_buffers import Incomplete as Incomplete
from elasticd_migration.target_buffers import TargetBuffers
from elasticd_migration.transport import Transport

#: zlib's fastest: the names of tensors repeat each other, anything packs them.
_LEVEL = 1
#: Bytes of a rank's schema that it tells at once, packed, rather than its digest first.
_SHORT_BYTES = 1 << 15


class Corrupt(RuntimeError):
    """A piece that arrived is not the one that was sent, or not of this move."""


class _Section(msgspec.Struct, frozen=True, array_like=True):
    """A part of a rank's schema by its digest, and its bytes; packed: the part itself, of a short schema."""

    digest: bytes
    size: int
    packed: bytes = b""


#: Made with the module: two threads that first decode a class at one moment end the process (msgspec 0.22).
_sections_of = msgspec.msgpack.Decoder(list[_Section])


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """The new layout's state, verified but not in use.

    schema: what all ranks together hold. bytes_sent, bytes_received: of state, as they went over the
    transport. flows: by device that sent, bytes and the seconds until they were here. bytes_sealed: seals and
    receipts that this rank sent beside it. bytes_staged: memory that the move took besides both states.
    """

    state: LocalState
    schema: Schema
    bytes_sent: int
    bytes_received: int
    bytes_sealed: int
    bytes_staged: int
    flows: Mapping[str, tuple[int, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedMove:
    """The rounds of a move that is not yet to be made, and the planes and the limit for which they hold."""

    planes: dict[Item, tuple[Plane, ...]]
    limit: int
    rounds: tuple[Round, ...]


def agree(transport: Transport, schema: Schema) -> Schema:
    """One schema for all ranks. A rank that cannot take part says why in `schema.refused`, and all raise it.

    Few bytes are gathered. A schema falls into sections; all gather the digests of theirs, then each section
    goes over the wire once, in as many parts as ranks have it, each part from one of them. A part is packed
    after it was cut, since two machines may pack the same bytes differently. Short schemas go with their
    digests: one gathering is sooner over than two.
    Raises `Disagreement`, on every rank or on none.
    """
    texts = {_digest(text): text for text in (section.to_json() for section in _sections(schema))}
    short = sum(map(len, texts.values())) <= _SHORT_BYTES
    agreed = [
        _Section(digest, len(text), zlib.compress(text, _LEVEL) if short else b"")
        for digest, text in texts.items()
    ]
    heard = [_sections_of.decode(row) for row in transport.all_gather(msgspec.msgpack.encode(agreed))]
    having: dict[bytes, list[int]] = {}
    known: dict[bytes, _Section] = {}
    for rank, row in enumerate(heard):
        for section in row:
            having.setdefault(section.digest, []).append(rank)
            known.setdefault(section.digest, section)
    packed = {digest: [section.packed] for digest, section in known.items()}
    long = [section for section in known.values() if not section.packed]
    if long:
        packed |= _in_parts(transport, long, having, texts)
    schemas, members = [], []
    for digest, ranks in having.items():
        text = b"".join(map(zlib.decompress, packed[digest]))
        if _digest(text) != digest:
            raise Disagreement(f"what {transport.members[ranks[0]]} says that it holds arrived damaged")
        schemas.append(Schema.from_json(text))
        members.append(transport.members[ranks[0]])
    return merge(schemas, members)


def _in_parts(
    transport: Transport,
    sections: Sequence[_Section],
    having: Mapping[bytes, Sequence[int]],
    texts: Mapping[bytes, bytes],
) -> dict[bytes, list[bytes]]:
    """The packed parts of each section, in order, from all ranks together. `texts`: of those held here."""
    parts = {
        each.digest: zlib.compress(
            texts[each.digest][slice(*_span(each.size, having[each.digest], transport.rank))], _LEVEL
        )
        for each in sections
        if each.digest in texts
    }
    rows = [
        msgspec.msgpack.decode(row, type=dict[bytes, bytes])
        for row in transport.all_gather(msgspec.msgpack.encode(parts))
    ]
    return {each.digest: [rows[rank][each.digest] for rank in having[each.digest]] for each in sections}


def migrate(
    old: Holdings,
    new: Holdings,
    state: LocalState,
    transport: Transport,
    *,
    limit: int = ROUND_BYTES,
    device: torch.device | None = None,
    in_place: bool = False,
    prepared: PreparedMove | None = None,
) -> Moved:
    """Everything from old layout to verified side buffers; the caller then votes, and installs or drops.

    Every member of the transport calls it, with a leaver's or joiner's part empty. limit: bytes that a rank
    sends, and receives, in a round; besides both states a move takes at most four times as much memory.
    Where devices' copies are gone, `old` says so (`SurvivingLayouts`). device: where the new state is to lie.
    in_place: memory of the old state is given back on the way, and `state` is of no use afterwards. prepared:
    what `prepare_move` gave for these layouts; it is used if it still holds.
    Raises, on every rank alike, `Disagreement` or `Lost`; on the rank concerned `Corrupt` or `Incomplete`.
    """
    me = transport.members[transport.rank]
    if me in renewed(old.plan, new.plan):
        state = LocalState()  # what it may still hold is of another history
    with _without_collections():
        schema = agree(transport, state.schema())
        check_covers(schema, new.items)
        planes = schema.planes
        if prepared is not None and (prepared.planes, prepared.limit) == (planes, limit):
            rounds = prepared.rounds
        else:
            transfers = reshard(old, new, schema.sizes)
            rounds = schedule(transfers, planes, limit=limit, me=me)
        return execute(
            rounds,
            state,
            new.held(me),
            transport,
            schema,
            number=new.plan.number,
            device=device,
            in_place=in_place,
        )


@contextmanager
def _without_collections() -> Iterator[None]:
    """A move makes many objects, and none that only a collection would free; Python, which counts them, would
    go through all that the process has, again and again, while training stands still."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def prepare_move(
    old: Holdings, new: Holdings, mine: Schema, transport: Transport, *, limit: int = ROUND_BYTES
) -> PreparedMove | None:
    """The rounds of a move that may follow, by all ranks together while they train. `mine`: what this rank
    holds; its scalars do not matter. None, on every rank alike, where the ranks do not agree: why, `migrate`
    will say. Raises what the transport raises.
    """
    me = transport.members[transport.rank]
    if me in renewed(old.plan, new.plan):
        mine = Schema()
    try:
        schema = agree(transport, mine.still())
        check_covers(schema, new.items)
        transfers = reshard(old, new, schema.sizes)
    except (Disagreement, Lost):
        return None
    rounds = schedule(transfers, schema.planes, limit=limit, me=me)
    return PreparedMove(planes=schema.planes, limit=limit, rounds=rounds)


def execute(
    rounds: Sequence[Round],
    state: LocalState,
    boxes: Mapping[Item, Sequence[Box]],
    transport: Transport,
    schema: Schema,
    *,
    number: int,
    device: torch.device | None = None,
    in_place: bool = False,
) -> Moved:
    """Run `rounds` on this rank and give the state of `boxes`, in side buffers on `device`.

    A box that does not change keeps its old tensors by reference: the trainer stands still during a move, and
    if the move is dropped they are used on as they are. Scalars are always new. State that no rank describes
    was not made yet, and is left out.
    number: of the new plan; a message that belongs to another move is refused.

    Raises `Corrupt` or `Incomplete` after the last round; transport errors at once.
    """
    me = transport.members[transport.rank]
    outgoing = [piece for turn in rounds for message in turn.sent_by(me) for piece in message.pieces]
    side = TargetBuffers(
        state, boxes, schema, device or torch.device("cpu"), outgoing=outgoing, in_place=in_place
    )
    exchange = Exchange(side, transport, schema, rounds, number)
    exchange.run()
    if exchange.damage:
        more = f" (and {len(exchange.damage) - 1} more)" if len(exchange.damage) > 1 else ""
        kept = "the old state is gone" if in_place else "the old state is kept"
        raise Corrupt(f"{exchange.damage[0]}{more}: {kept}")
    return Moved(
        state=side.result(me),
        schema=schema,
        bytes_sent=exchange.sent,
        bytes_received=exchange.received,
        bytes_sealed=exchange.sealed,
        bytes_staged=exchange.staged,
        flows=exchange.flows,
    )


def _sections(schema: Schema) -> Iterator[Schema]:
    """The parts of a schema that a rank may well hold alike with others, each by itself; together they are the
    schema."""
    for role, named in schema.tensors.items():
        yield Schema(tensors={role: named})
    yield Schema(groups=schema.groups, extras=schema.extras, refused=schema.refused)


def _span(size: int, ranks: Sequence[int], rank: int) -> tuple[int, int]:
    """Which bytes of a section that these ranks have are said by `rank`."""
    at, count = ranks.index(rank), len(ranks)
    return size * at // count, size * (at + 1) // count


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
