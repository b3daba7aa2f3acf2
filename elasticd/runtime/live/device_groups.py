"""Process groups of torch's own tables on an accelerator, over NCCL: those of a plan end with its gloo groups.

The vote, and state that moves, stay on gloo. What the model's wrappers launch on the device goes over these
groups, of the class that jobs have communicators of (`elasticd.runtime.comm.nccl`). `PlanGroups.shut` aborts
all of a plan side by side. An aborted operation raises nothing and leaves garbage, so the loop looks at
`PlanGroups.dead` once the device has come to the vote, before it votes.

torch's `_reconfigure`, which 2.13 lacks, makes new communicators, too, and `shrink_group` hangs with
SHRINK_ABORT and NCCL from 2.31 on: a plan has new groups.

Nothing here has run on a GPU. Tests run it on an emulated device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from elasticd.runtime.accelerator import CPU, Accelerator, placed
from elasticd.runtime.comm.groups import MEANWHILE, Cancelled, PlanGroups
from elasticd.runtime.comm.nccl import NcclCommunicator, NcclLibrary, nccl_library, refuse_watchdog

#: Set to 1, a loop of its own trains on accelerators.
VARIABLE = "ELASTICD_LIVE_NCCL"
#: Makes the process groups of an accelerator, by the type of its device.
LIBRARIES: dict[str, Callable[[Accelerator], NcclLibrary]] = {"cuda": nccl_library}


def chosen(environ: Mapping[str, str]) -> Accelerator:
    """The device that this worker's loop trains on: the CPU, unless `VARIABLE` is 1.

    Raises:
        NoDevice: there is no accelerator.
        NotUsable: torch's watchdog would end this process some time after a fault.
    """
    if environ.get(VARIABLE) != "1":
        return CPU
    accelerator = placed(None, environ)
    if accelerator.immediate:
        return CPU
    refuse_watchdog(environ)
    if accelerator.device.type not in LIBRARIES:
        raise ValueError(
            f"{VARIABLE} is 1, and {accelerator.device.type} has no NCCL: elasticd.live trains on "
            f"{' and '.join(LIBRARIES)} with it; leave it unset, and train on CPUs"
        )
    accelerator.use()
    return accelerator


class DeviceGroups:
    """The process groups of one plan on one member's accelerator: a `DataPlane`."""

    def __init__(self, plan_groups: PlanGroups, accelerator: Accelerator) -> None:
        self._plan_groups = plan_groups
        self._library = LIBRARIES[accelerator.device.type](accelerator)
        self._lock, self._aborted, self._ended = threading.Lock(), False, threading.Event()
        self._all: list[NcclCommunicator] = []
        plan_groups.ends_with(self)

    def process_group(self, members: tuple[str, ...], name: str) -> Any:
        """A process group as torch's tables have it. Each member calls it; it connects in a thread of its own.

        Args:
            members: devices in the order of their ranks.
            name: of this group among those of the plan.

        Raises:
            Cancelled: the plan's groups are shut.
        """
        groups = self._plan_groups
        if groups.dead:
            raise Cancelled("the plan's groups are shut")
        store, rank = groups.store(f"device/{name}/{'_'.join(members)}"), members.index(groups.me)
        group = self._library.process_group(f"user {' '.join(members)}", rank, len(members), store)
        communicator = NcclCommunicator(group, self._library.device)
        with self._lock:
            self._all.append(communicator)
            late = self._aborted  # without this one
        if late:
            self._library.abort([communicator])
            raise Cancelled(MEANWHILE)
        return group

    def taken(self) -> tuple[Callable[[list[Any]], None], list[Any]]:
        """See `DataPlane`."""
        with self._lock:
            self._aborted, first = True, not self._aborted
            return self._library.abort, list(self._all) if first else []

    def ended(self) -> None:
        """See `DataPlane`."""
        self._all.clear()  # a plan's groups are let go once nothing holds them
        self._ended.set()

    def rest(self, seconds: float) -> bool:
        """After the plan's groups were shut: returns True once nothing writes to the device's tensors any more,
        False if that takes longer."""
        return not self._all or self._ended.wait(seconds)
