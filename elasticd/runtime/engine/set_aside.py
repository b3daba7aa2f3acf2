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
import logging
from collections.abc import Mapping, Sequence

import torch
from elasticd_migration.local_state import LocalState, LocalTensor, Shard
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box
from torch import Tensor

from elasticd.runtime.accelerator import Accelerator

log = logging.getLogger(__name__)


class NoHostMemory(RuntimeError):
    """The host has no memory for what a device is to lend."""


class SetAside:
    """Sets the boxes of `state` aside that the new plan does not keep.

    Args:
        state: What this rank holds, by reference. It is set aside until `back`.
        kept: The boxes of the new plan here, by item. One that is in `state` too is used on as it is.
        accelerator: The device. What does not lie on it stays where it is.

    Raises:
        NoHostMemory: Nothing was changed.
    """

    state: LocalState  #: the same boxes; those that were set aside lie in host memory

    def __init__(self, state: LocalState, kept: Mapping[Item, Sequence[Box]], accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        lent = _changing(state, kept, accelerator.device)
        try:
            here = {key: _host_memory(storage.nbytes(), accelerator) for key, storage in lent.items()}
        except (RuntimeError, MemoryError) as error:
            size = sum(storage.nbytes() for storage in lent.values())
            raise NoHostMemory(
                f"the host has no {size / (1 << 20):,.0f} MiB for what {accelerator} holds of the plan before "
                f"({error}); give the node more memory, or let snapshots (CheckpointingOptions("
                "snapshot_every=...)) keep the state safe, so that it can move in place"
            ) from error
        accelerator.to_host((here[key], _bytes(storage)) for key, storage in lent.items())
        self._lent = [(storage, here[key]) for key, storage in lent.items()]
        self.state = LocalState(
            tensors={item: _moved(tensor, here) for item, tensor in state.tensors.items()},
            groups=state.groups,
            extras=state.extras,
        )
        for storage, _ in self._lent:
            storage.resize_(0)

    @property
    def bytes(self) -> int:
        """Bytes of host memory that it takes."""
        return sum(memory.numel() for _, memory in self._lent)

    def back(self) -> None:
        """Brings everything to the device again. The new plan's memory must be free by then."""
        gc.collect()  # the modules of the plan given up may be there: they and their hooks refer to each other
        for storage, memory in self._lent:
            storage.resize_(memory.numel())
            _bytes(storage).copy_(memory, non_blocking=True)
        self._accelerator.passed()  # the host's memory is given back here
        self._lent = []


def _changing(
    state: LocalState, kept: Mapping[Item, Sequence[Box]], device: torch.device
) -> dict[int, torch.UntypedStorage]:
    """The memory on `device` in which nothing lies that is kept, by its address."""
    found: dict[int, torch.UntypedStorage] = {}
    stays: set[int] = set()
    for item, tensor in state.tensors.items():
        boxes = kept.get(item, ())
        for shard in tensor.shards:
            for plane in shard.planes.values():
                storage = plane.untyped_storage()
                if plane.device == device and storage.nbytes():
                    found[storage.data_ptr()] = storage
                    if shard.box in boxes or not storage.resizable():
                        stays.add(storage.data_ptr())
    return {key: storage for key, storage in found.items() if key not in stays}


def _moved(tensor: LocalTensor, here: Mapping[int, Tensor]) -> LocalTensor:
    """The same shards, with the planes that were set aside as views of host memory."""

    def view(plane: Tensor) -> Tensor:
        memory = here.get(plane.untyped_storage().data_ptr())
        if memory is None:
            return plane
        made = torch.empty(0, dtype=plane.dtype)
        return made.set_(memory.untyped_storage(), plane.storage_offset(), plane.shape, plane.stride())

    shards = tuple(
        Shard(box=shard.box, planes={name: view(plane) for name, plane in shard.planes.items()})
        for shard in tensor.shards
    )
    return LocalTensor(shards=shards, scalars=tensor.scalars)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_memory(size: int, accelerator: Accelerator) -> Tensor:
    """Pinned, where the driver has it: copies from and to the device are several times as fast then."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=not accelerator.immediate)
    except RuntimeError as error:
        log.warning("%d MiB could not be pinned (%s): copies are slower", size >> 20, error)
        return torch.empty(size, dtype=torch.uint8)
