"""The old state in host memory while the new one takes its place on the device: a switch where both do not fit.

A device lends the memory of the boxes that change to the new plan. What they held goes into pinned host memory
first, and stays there for as long as the old copy may be needed: until a vote under the new plan completed. So
this switch can be given up at any moment, as one beside the old state can, and unlike one in place.

`SetAside.state` is the old state meanwhile: other ranks are sent their parts of it from host memory. If the job
stays on the old plan, `back` brings it to the device again, into the same tensors: modules, views and the
optimizer never notice.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from elasticd_migration.local_state import LocalState, LocalTensor, Shard
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box
from torch import Tensor

from elasticd.runtime.accelerator import Accelerator

#: Bytes to a multiple of which what is set aside begins: those of the largest number.
_ALIGNED_BYTES = 64


class NoHostMemory(RuntimeError):
    """The host has no memory for what a device is to lend."""


class SetAside:
    """State of which a part lies in host memory.

    Args:
        state: What this rank holds, by reference.
        accelerator: The device. What does not lie on it stays where it is.
    """

    state: LocalState  #: the same boxes; those that were set aside lie in host memory

    def __init__(self, state: LocalState, accelerator: Accelerator) -> None:
        self.state, self._accelerator = state, accelerator
        self._lent: list[tuple[torch.UntypedStorage, Tensor]] = []  # memory of the device, and what it held
        self._unpin: list[weakref.finalize[Any, Any]] = []

    @property
    def bytes(self) -> int:
        """Bytes of host memory that it takes."""
        return sum(memory.numel() for _, memory in self._lent)

    def lend(self, kept: Mapping[Item, Sequence[Box]]) -> None:
        """Sets more aside: all that a plan does not keep.

        Args:
            kept: The boxes of the plan here, by item. One that lies on the device is used on as it is.

        Raises:
            NoHostMemory: Nothing was changed.
        """
        lent = _changing(self.state, kept, self._accelerator.device)
        if not lent:
            return
        sizes = [storage.nbytes() for storage in lent.values()]
        starts = [0, *accumulate(-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes)]
        try:
            buffer = torch.empty(starts[-1], dtype=torch.uint8)
        except (RuntimeError, MemoryError) as error:
            raise NoHostMemory(
                f"the host has no {starts[-1] / (1 << 20):,.0f} MiB for what {self._accelerator} holds of the "
                f"plan before ({error}); give the node more memory, or let snapshots (CheckpointingOptions("
                "snapshot_every=...)) keep the state safe, so that it can move in place"
            ) from error
        if (unpin := self._accelerator.pin(buffer)) is not None:
            # The buffer stays until it is called, also where this value is dropped.
            self._unpin.append(weakref.finalize(self, _called, unpin, buffer))
        here = {key: buffer[at : at + size] for key, at, size in zip(lent, starts, sizes, strict=False)}
        self._accelerator.to_host((here[key], _bytes(storage)) for key, storage in lent.items())
        self._lent += [(storage, here[key]) for key, storage in lent.items()]
        self.state = LocalState(
            tensors={item: _moved(tensor, here) for item, tensor in self.state.tensors.items()},
            groups=self.state.groups,
            extras=self.state.extras,
        )
        for storage in lent.values():
            storage.resize_(0)

    def back(self) -> None:
        """Brings everything to the device again. The other plan's memory must be free by then.

        Raises:
            RuntimeError: The device has no memory for it. All is aside as before.
        """
        gc.unfreeze()  # modules of the plan given up may be there, and in cycles
        gc.collect()
        taken: list[torch.UntypedStorage] = []
        try:
            for storage, memory in self._lent:
                storage.resize_(memory.numel())
                taken.append(storage)
                _bytes(storage).copy_(memory, non_blocking=True)
            self._accelerator.passed()
        except RuntimeError:
            for storage in taken:
                storage.resize_(0)
            raise
        self._lent = []
        while self._unpin:
            self._unpin.pop()()


def _called(unpin: Callable[[], object], buffer: Tensor) -> None:
    unpin()


def _changing(
    state: LocalState, kept: Mapping[Item, Sequence[Box]], device: torch.device
) -> dict[int, torch.UntypedStorage]:
    """The memory on `device` in which something lies that is not kept, by its address: boxes of one parameter
    lie in one memory, and all of it is given back."""
    found: dict[int, torch.UntypedStorage] = {}
    fixed: set[int] = set()
    for item, tensor in state.tensors.items():
        boxes = kept.get(item, ())
        for shard in tensor.shards:
            if shard.aside:
                continue
            for plane in shard.planes.values():
                storage = plane.untyped_storage()
                if plane.device == device and storage.nbytes():
                    if shard.box not in boxes:
                        found[storage.data_ptr()] = storage
                    if not storage.resizable():
                        fixed.add(storage.data_ptr())
    return {key: storage for key, storage in found.items() if key not in fixed}


def _moved(tensor: LocalTensor, here: Mapping[int, Tensor]) -> LocalTensor:
    """The same shards, with the planes that were set aside as views of host memory."""

    def moved(shard: Shard) -> Shard:
        found = {
            name: _view(plane, memory)
            for name, plane in shard.planes.items()
            if (memory := here.get(plane.untyped_storage().data_ptr())) is not None
        }
        return Shard(box=shard.box, planes={**shard.planes, **found}, aside=True) if found else shard

    return LocalTensor(shards=tuple(map(moved, tensor.shards)), scalars=tensor.scalars)


def _view(plane: Tensor, memory: Tensor) -> Tensor:
    """The view that stands for a tensor of the device in the copy of its storage."""
    whole = memory.view(plane.dtype)
    return whole.as_strided(plane.shape, plane.stride(), whole.storage_offset() + plane.storage_offset())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
