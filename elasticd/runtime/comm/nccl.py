"""NCCL as a `Library` of communicators, by torch's ProcessGroupNCCL. The only file that knows NCCL.

Each communicator has a process group of its own, so that it has a stream of its own, and messages are launched
when we say. What torch does beside that is switched off: its watchdog, which ends a process a minute after
another one died, and its timeouts. A peer's death is told by its agent, and `abort` frees the device.

Nothing here has run on several GPUs, and some of it on ranks that share one; docs/gpu.md says what. Tests run
it on an emulated device, with a process group that has NCCL's rules in the place of torch's.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from elasticd_planner.layout.channels import MOST, Channel
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.device_communicators import Communicator, DeviceCommunicators
from elasticd.runtime.comm.groups import Group, PlanGroups
from elasticd.system.torch_build import CONNECTIONS, CONNECTIONS_VARIABLE

log = logging.getLogger(__name__)

#: What torch must be told before it makes the first communicator: no watchdog, no thread that watches that one,
#: nothing that ends the process by itself. Waits of the host would block it; there are none.
SETTINGS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
#: What a script's own loop must have set to 0 before it starts: torch's watchdog and the thread that watches it
#: end processes. The waits of its wrappers stay as torch has them.
WATCHDOG = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
#: What is better so, and may be otherwise: the longest wait for a connection in seconds; no log of launches,
#: whose entries the watchdog would retire; no warning that messages are in line with a communicator's others.
DEFAULTS = {
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
#: Streams beside those of communicators: of computation, of copies, and torch's own.
OTHERS = 4
#: The oldest NCCL that is known not to hang: 2.25.1 does in an abort (pytorch/pytorch#149153), 2.26 where
#: communicators connect beside the host (pytorch/pytorch#153960).
OLDEST = (2, 27)
#: Seconds after which torch calls an abort too long. It waits on even so; the device's drain has a bound.
ABORT_SECONDS = 30.0
#: Thread blocks of a communicator between two devices, at most. Receipts are launched early, and those that
#: wait must leave room for what they wait for. What this costs in bandwidth was not measured.
PAIR_BLOCKS = 4

#: What is called of torch, by the class that has it; all but `Options` are private or undocumented.
NAMES = {
    "ProcessGroupNCCL": (
        "Options",
        "abort",
        "allreduce",
        "_allgather_base",
        "send",
        "recv",
        "_start_coalescing",
        "_end_coalescing",
        "eager_connect_single_device",
    ),
    "Work": ("synchronize", "is_completed"),
}


class NotUsable(RuntimeError):
    """NCCL is not as it must be for a job."""


def version() -> tuple[int, ...]:
    """NCCL's: of the library that is loaded, where torch tells it, else of that it was built with."""
    ask = getattr(c10d.ProcessGroupNCCL, "get_runtime_nccl_version", None)
    found: tuple[int, ...] = tuple(ask()) if ask is not None else torch.cuda.nccl.version()
    return found


def available() -> bool:
    """Returns True if this torch has NCCL, or RCCL, which it has under the same names."""
    return hasattr(c10d, "ProcessGroupNCCL")


def missing(module: Any = c10d) -> list[str]:
    """The names of torch that this file uses and this torch does not have."""
    return [
        f"{kind}.{name}"
        for kind, names in NAMES.items()
        for name in names
        if not hasattr(getattr(module, kind, None), name)
    ]


def settle_environment(environ: dict[str, str] | None = None, *, began: bool | None = None) -> None:
    """Sets what torch and the driver read when they begin. The user's own values stay.

    Args:
        environ: None: of this process.
        began: whether the driver has read it already. None: as torch says.
    """
    taken: Any = os.environ if environ is None else environ
    for name, value in (SETTINGS | DEFAULTS).items():
        taken.setdefault(name, value)
    if not (torch.cuda.is_initialized() if began is None else began):
        taken.setdefault(CONNECTIONS_VARIABLE, str(CONNECTIONS))


def check(
    found: tuple[int, ...], channels: int, environ: Mapping[str, str], lacking: Sequence[str] = ()
) -> None:
    """Checks that NCCL can carry out a plan.

    Args:
        found: the version of NCCL.
        channels: communicators of this device.
        environ: of this process.
        lacking: names that torch does not have.

    Raises:
        NotUsable: it cannot; says why, and what to do.
    """
    if lacking:
        raise NotUsable(
            f"this torch ({torch.__version__}) lacks {', '.join(lacking)}, which elasticd calls: install a "
            "version that docs/gpu.md names"
        )
    if found < OLDEST:
        at_least, is_ = (".".join(map(str, each)) for each in (OLDEST, found))
        raise NotUsable(f"NCCL {is_} may hang when a peer dies: install torch with NCCL {at_least} or later")
    for name, value in SETTINGS.items():
        if environ.get(name, value) != value:
            raise NotUsable(f"{name} is {environ[name]}, and elasticd needs {value}: leave it unset")
    given = environ.get(CONNECTIONS_VARIABLE, "8")  # the driver's own number
    if not given.isdecimal() or int(given) < min(CONNECTIONS, channels + OTHERS):
        raise NotUsable(
            f"{CONNECTIONS_VARIABLE} is {given}, and this plan has {channels} communicators on a device, which "
            f"could wait for each other: export {CONNECTIONS_VARIABLE}={CONNECTIONS} before the script starts"
        )


def refuse_watchdog(environ: Mapping[str, str]) -> None:
    """Refuses an environment in which torch's watchdog, or the thread that watches that, ends this process.

    Raises:
        NotUsable: with what to set.
    """
    for name in WATCHDOG:
        if environ.get(name) != "0":
            raise NotUsable(
                f"{name} is {environ.get(name, 'not set')}, and torch would end this process a while after the "
                f"death of a peer: export {' '.join(f'{each}=0' for each in WATCHDOG)} before the script starts"
            )


def nccl_library(accelerator: Accelerator) -> NcclLibrary:
    """NCCL for the process groups of a script's own wrappers.

    Raises:
        NotUsable: this NCCL, or this torch, cannot carry out a plan.
    """
    check(version(), 0, os.environ, missing())
    return NcclLibrary(accelerator.device, c10d.ProcessGroupNCCL)


def nccl_communicators(
    plan_groups: PlanGroups, channels: tuple[Channel, ...], everyone: Group, accelerator: Accelerator
) -> DeviceCommunicators:
    """The communicators of one member of a plan: a `Connect`.

    Raises:
        NotUsable: NCCL cannot carry out this plan here.
    """
    settle_environment()
    if channels:
        check(version(), len(channels), os.environ, missing())
    library = NcclLibrary(accelerator.device, c10d.ProcessGroupNCCL)
    return DeviceCommunicators(plan_groups, channels, everyone, library)


class NcclLibrary:
    """Communicators whose process groups torch makes."""

    def __init__(self, device: torch.device, process_group: Any) -> None:
        """
        Args:
            device: on which tensors are.
            process_group: ProcessGroupNCCL, or what is called as it is.
        """
        self.device, self._make = device, process_group

    def connect(self, channel: Channel, me: str, store: Store) -> NcclCommunicator:
        """See `Library`."""
        rank, size = channel.members.index(me), len(channel.members)
        blocks = PAIR_BLOCKS if channel.use in ("activation", "gradient") else None
        return NcclCommunicator(self.process_group(str(channel), rank, size, store, blocks), self.device)

    def process_group(self, name: str, rank: int, size: int, store: Store, blocks: int | None = None) -> Any:
        """A process group of torch's. NCCL connects in a thread of its own.

        Args:
            name: for people.
            rank: of this member.
            size: members.
            store: in which they find each other.
            blocks: thread blocks at most; None: as many as NCCL takes.
        """
        options = self._make.Options()
        options._timeout = timedelta(seconds=ABORT_SECONDS)
        options.config.blocking = 0
        options.is_high_priority_stream = True  # before computation, and not of the pool of other streams
        if blocks is not None:
            options.config.max_ctas = blocks
        options.group_name = name
        group = self._make(store, rank, size, options)
        group.eager_connect_single_device(self.device)
        return group

    def abort(self, communicators: Sequence[Communicator]) -> None:
        """See `Library`. Each has a thread: an abort may wait for the device, which another one must free."""
        threads = [
            threading.Thread(target=communicator.abort, name="abort", daemon=True)
            for communicator in communicators
            if isinstance(communicator, NcclCommunicator)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class NcclCommunicator:
    """One process group of torch's."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._connecting: threading.Thread | None = None
        self._error: Exception | None = None

    def ready(self) -> bool:
        """See `Communicator`. Torch has no question for it that does not wait: its pointer is asked for in a
        thread. Where torch does not give that, the first launch waits."""
        if not hasattr(self._group, "_comm_ptr"):
            return True
        if self._connecting is None:
            self._connecting = threading.Thread(target=self._connect, name="connect", daemon=True)
            self._connecting.start()
        if self._error is not None:
            raise self._error
        return not self._connecting.is_alive()

    def _connect(self) -> None:
        try:
            torch.accelerator.set_device_index(self._device.index or 0)
            self._group._comm_ptr()
        except RuntimeError as error:
            self._error = error

    def all_reduce(self, tensor: Tensor) -> NcclWork:
        """See `Communicator`."""
        return NcclWork(self._group.allreduce([tensor]), [tensor])

    def all_gather(self, out: Tensor, tensor: Tensor) -> NcclWork:
        """See `Communicator`."""
        return NcclWork(self._group._allgather_base(out, tensor), [out, tensor])

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> NcclWork:
        """See `Communicator`."""
        tensors = [tensor for _, tensor in (*sends, *receives)]
        if len(tensors) == 1:
            (work,) = self._launched(sends, receives)
            return NcclWork(work, tensors)
        self._group._start_coalescing()
        try:
            for _ in self._launched(sends, receives):
                pass
        finally:
            work = self._group._end_coalescing()
        return NcclWork(work, tensors)

    def _launched(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Iterator[Any]:
        for to, tensor in sends:
            yield self._group.send([tensor], to, 0)
        for source, tensor in receives:
            yield self._group.recv([tensor], source, 0)

    def abort(self) -> None:
        """Ends the process group, and lets it go."""
        try:
            self._group.abort()
        except RuntimeError as error:  # it took long; whether the device is free its drain finds
            log.warning("a communicator was not aborted in time: %s", error)


class NcclWork:
    """A launch of a process group, with its tensors."""

    def __init__(self, work: Any, tensors: list[Tensor]) -> None:
        self._work, self._tensors = work, tensors

    def join(self) -> None:
        """See `Work`. Its `wait` would block the host."""
        self._work.synchronize()
        self._tensors = []

    def over(self) -> bool:
        """See `Work`."""
        return bool(self._work.is_completed())


assert MOST + OTHERS <= CONNECTIONS
