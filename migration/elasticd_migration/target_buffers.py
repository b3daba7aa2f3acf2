"""The new layout's state on one rank while it is filled, beside the old one or in its place.

Beside (the usual way): all boxes that change get memory at once, and what this rank holds of them is copied;
the old state is not touched. In place (when both do not fit): a box gets memory when the first piece of it
comes, and an old one gives its memory back when all that others need of it has arrived there and what stays
here has been copied. Rounds go through the model in order and fill both ways alike, so that little more is
held than the larger of the two states; but the old one is gone, and a move that fails has lost it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box

from elasticd_migration.local_state import LocalState, LocalTensor, Shard, restore, torch_dtype
from elasticd_migration.rounds import Piece
from elasticd_migration.schema import Schema, TensorSchema


class Incomplete(RuntimeError):
    """The schedule left a part of the new state unfilled."""


@dataclass(eq=False, kw_only=True, slots=True)
class _New:
    """A box of the new layout: an old shard that stays, or memory of its own once it is opened. `from_old`:
    what is to be copied from old shards of this rank."""

    item: Item
    box: Box
    described: TensorSchema
    from_old: list[tuple[_Old, Box]]
    shard: Shard | None = None


@dataclass(eq=False, kw_only=True, slots=True)
class _Old:
    """A shard of the old state: pieces of it that are still to be sent, and boxes that wait to be copied."""

    shard: Shard
    pieces: int = 0
    into: list[_New]
    kept: bool = False
    freed: bool = False


class TargetBuffers:
    """`boxes` of the new layout, filled piece by piece. `missing` counts elements that did not come yet."""

    def __init__(
        self,
        state: LocalState,
        boxes: Mapping[Item, Sequence[Box]],
        schema: Schema,
        device: torch.device,
        *,
        outgoing: Iterable[Piece] = (),
        in_place: bool = False,
    ) -> None:
        self._schema, self._device, self._in_place = schema, device, in_place
        self._old = {
            item: [_Old(shard=shard, into=[]) for shard in tensor.shards]
            for item, tensor in state.tensors.items()
        }
        self._shrinking = _shrinking(state, boxes)
        self._new: dict[Item, list[_New]] = {}
        self._missing: dict[tuple[Item, str], int] = defaultdict(int)
        for item, parts in boxes.items():
            described = schema.of(item)
            if described is not None:
                self._new[item] = [self._plan(item, box, described) for box in parts]
        self._users: Counter[int] = Counter()
        if in_place:
            for piece in outgoing:
                self._holding(piece).pieces += 1
            self._users.update(key for old in self._olds() for key in _storages(old.shard))
            for old in self._olds():
                self._let_go(old)
        else:
            for new in self._news():
                self._open(new)

    def outgoing(self, piece: Piece) -> torch.Tensor:
        """A view of a piece that this rank holds."""
        return self._holding(piece).shard.part(piece.plane, piece.box)

    def target(self, piece: Piece) -> torch.Tensor:
        """A view of the place where a piece that arrives belongs."""
        news = self._new[piece.item]
        for new in news:
            if len(news) == 1 or new.box.contains(piece.box):
                return self._open(new).part(piece.plane, piece.box)
        raise Incomplete(f"{piece.box} of {piece.item} came, which is not to be held here")

    def filled(self, piece: Piece) -> None:
        """A piece is in its place."""
        self._missing[piece.item, piece.plane] -= piece.box.size

    def sent(self, pieces: Iterable[Piece]) -> None:
        """These have arrived."""
        if self._in_place:
            for piece in pieces:
                old = self._holding(piece)
                old.pieces -= 1
                self._let_go(old)

    def result(self, me: str) -> LocalState:
        """The new state with what the job has once. Raises `Incomplete` where anything was left unfilled."""
        for new in self._news():
            self._open(new)
        for (item, key), count in self._missing.items():
            if count:
                raise Incomplete(f"{key} of {item}: {count} elements more or less than {me} lacks came")
        tensors = {}
        for item, parts in self._new.items():
            scalars = {s.name: restore(s, self._device) for s in parts[0].described.scalars} if parts else {}
            tensors[item] = LocalTensor(shards=tuple(self._open(new) for new in parts), scalars=scalars)
        return LocalState(tensors=tensors, groups=self._schema.groups, extras=self._schema.extras)

    def _plan(self, item: Item, box: Box, described: TensorSchema) -> _New:
        olds = self._old.get(item, ())
        for old in olds:
            if (
                old.shard.box == box
                and not old.shard.aside
                and self._shrinking.isdisjoint(_storages(old.shard))
            ):
                old.kept = True
                return _New(item=item, box=box, described=described, from_old=[], shard=old.shard)
        common = [(old, part) for old in olds if (part := old.shard.box.overlap(box)) is not None]
        new = _New(item=item, box=box, described=described, from_old=common)
        for old, _ in common:
            old.into.append(new)
        missing = box.size - sum(part.size for _, part in common)
        for plane in described.planes:
            self._missing[item, plane.name] += missing
        return new

    def _open(self, new: _New) -> Shard:
        """Its memory, with what was here already."""
        if new.shard is None:
            planes = {
                plane.name: torch.empty(new.box.shape, dtype=torch_dtype(plane.dtype), device=self._device)
                for plane in new.described.planes
            }
            for old, part in new.from_old:
                for key, plane in planes.items():
                    plane[part.slices(new.box)].copy_(old.shard.part(key, part))
            new.shard = Shard(box=new.box, planes=planes)
            for old, _ in new.from_old:
                self._let_go(old)
        return new.shard

    def _let_go(self, old: _Old) -> None:
        """Give back the memory of an old shard that nobody needs any more. What waits to be copied from it is
        copied as soon as all is sent."""
        if not self._in_place or old.kept or old.freed or old.pieces:
            return
        for new in old.into:
            if new.shard is None:
                self._open(new)  # comes here again for each old shard that it was the last to need
        if old.freed:
            return
        old.freed = True
        for key, plane in zip(_storages(old.shard), old.shard.planes.values(), strict=True):
            self._users[key] -= 1
            storage = plane.untyped_storage()
            if not self._users[key] and storage.resizable():
                storage.resize_(0)

    def _holding(self, piece: Piece) -> _Old:
        olds = self._old[piece.item]
        for old in olds:
            if len(olds) == 1 or old.shard.box.contains(piece.box):
                return old
        raise KeyError(f"{piece.box} of {piece.item} lies in no box that is held here")

    def _olds(self) -> Iterable[_Old]:
        return (old for olds in self._old.values() for old in olds)

    def _news(self) -> Iterable[_New]:
        return (new for news in self._new.values() for new in news)


def _shrinking(state: LocalState, boxes: Mapping[Item, Sequence[Box]]) -> frozenset[int]:
    """The memory in which boxes lie that do not stay: as boxes of one parameter do, of which a plan keeps some.
    What stays of it is copied, or the memory of the rest would stay with it."""
    return frozenset(
        key
        for item, tensor in state.tensors.items()
        for shard in tensor.shards
        if shard.box not in boxes.get(item, ())
        for key in _storages(shard)
    )


def _storages(shard: Shard) -> list[int]:
    """The memory that each plane lies in; several planes may lie in one, as boxes of one parameter do."""
    return [plane.untyped_storage().data_ptr() for plane in shard.planes.values()]
