"""A rank's share of a checkpoint, and its copy on the host: all that a training step waits for."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from elasticd_migration.checkpoint_writers import writers
from elasticd_migration.local_state import LocalState, LocalTensor
from elasticd_planner.layout.holdings import Holdings
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box
from torch import Tensor

from elasticd.runtime.accelerator import CPU, Accelerator

#: Bytes to which each piece begins in the buffer.
_ALIGNED_BYTES = 64


class Piece(NamedTuple):
    """One box of one plane of an item, and its values: where they are held, or their copy."""

    item: Item
    plane: str
    box: Box
    values: Tensor


def shares(layouts: Holdings, left_out: Container[str] = ()) -> dict[str, dict[Item, tuple[Box, ...]]]:
    """The boxes that each of the plan's members writes: disjoint, and together all that they hold of everything
    but the parameters of these full names."""
    found: dict[str, dict[Item, tuple[Box, ...]]] = {member: {} for member in layouts.plan.members}
    for role in ("value", "buffer", "state"):
        items = {i.name: i for i in layouts.items if i.role == role and i.name not in left_out}
        dealt = writers((layouts.layout(item) for item in items.values()), layouts.plan.members)
        for member, boxes in found.items():
            boxes |= {items[name]: mine for name, mine in dealt[member].items()}
    return found


def pieces(state: LocalState, boxes: dict[Item, tuple[Box, ...]]) -> list[Piece]:
    """The pieces of a share that exist; state that no step made yet has no planes."""
    found = []
    for item, mine in boxes.items():
        tensor = state.tensors.get(item)
        if tensor is None:
            continue
        for box in mine:
            shard = tensor.around(box)
            for plane in sorted(shard.planes):
                values = shard.planes[plane] if shard.box == box else shard.part(plane, box)
                found.append(Piece(item, plane, box, values))
    return found


def without_planes(state: LocalState, items: Iterable[Item]) -> LocalState:
    """The small rest of a state, in memory of its own: the scalars of these items, groups and extras."""
    tensors = {
        item: LocalTensor(
            shards=(),
            scalars={
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in state.tensors[item].scalars.items()
            },
        )
        for item in items
        if item in state.tensors
    }
    return LocalState(tensors=tensors, groups=state.groups, extras=dict(state.extras))


def padded(size: int) -> int:
    """Bytes up to where the next piece may begin in a buffer."""
    return -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES


def places(tensors: Iterable[Tensor]) -> list[int]:
    """The offset at which each of some tensors begins in a buffer, and where the last one's place ends."""
    return [*accumulate((padded(tensor.nbytes) for tensor in tensors), initial=0)]


class Staging:
    """One buffer on the host, as large as the largest share so far, used for one checkpoint after another.

    It is pinned where values come from an accelerator."""

    def __init__(self, accelerator: Accelerator = CPU) -> None:
        self._accelerator = accelerator
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._cut: list[Tensor] = []
        self._shapes: tuple[tuple[torch.dtype, torch.Size], ...] = ()

    def copy(self, held: Sequence[Piece]) -> list[Piece]:
        """Copies; it returns when all bytes are on the host. The copies last until the next call, each in a
        storage of its own."""
        self._prepare([piece.values for piece in held])
        self._accelerator.to_host(zip(self._cut, (piece.values for piece in held), strict=True))
        return [Piece(item, plane, box, to) for (item, plane, box, _), to in zip(held, self._cut, strict=True)]

    def _prepare(self, tensors: Sequence[Tensor]) -> None:
        shapes = tuple((tensor.dtype, tensor.shape) for tensor in tensors)
        if shapes == self._shapes:
            return
        *starts, total = places(tensors)
        self._cut = []
        if total > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # let the old one go first
            pin = not self._accelerator.immediate
            self._buffer = torch.empty(total, dtype=torch.uint8, pin_memory=pin)
        raw = self._buffer.numpy().data
        for start, tensor in zip(starts, tensors, strict=True):
            # A storage of its own, which torch.save writes whole.
            flat = torch.frombuffer(raw[start : start + tensor.nbytes], dtype=torch.uint8)
            self._cut.append(flat.view(tensor.dtype).reshape(tensor.shape))
        self._shapes = shapes
