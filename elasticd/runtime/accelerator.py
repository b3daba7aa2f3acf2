"""`Accelerator`: the device that a worker computes on, and all that the host asks of it.

The only file that tells one type of device from another. Streams, events and memory are those of
`torch.accelerator`, so that CUDA, ROCm, XPU and a device of a plugin are one case; what torch has no common
word for is in `KINDS`, three functions for each type. The CPU is an accelerator whose work is done when a call
returns: its events are over at once, and copies to the host are copies.

Control (votes, headers, sample ids) stays on the host whatever the accelerator.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from elasticd.system.torch_build import AMD, DEVICE_VARIABLE, NVIDIA, driver_is_there, gpu_is_there, visible
from elasticd.wire.unix_socket import SLOT_VARIABLE

log = logging.getLogger(__name__)

#: What torch's build for a GPU may see, NVIDIA's and AMD's: a list that begins with no GPU hides all.
_HIDING = ("CUDA_VISIBLE_DEVICES",)
_HIDING_OF_AMD = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", *_HIDING)
#: Devices whose work is done when a call returns; the second one has shapes and no values.
_HOST = ("cpu", "meta")
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Seconds between two looks at an event that is not over: at first none, then a share of the time waited, as
#: much as this at most.
_PAUSE_SECONDS = 5e-4


class NoDevice(ValueError):
    """The device that a worker is to compute on is not there, or is not to be used so."""


class DeviceLost(RuntimeError):
    """The device does not answer any more; what lies on it is lost. The process must end."""


class Event(Protocol):
    """A moment in a device's queue, as torch.Event is."""

    def record(self, stream: torch.Stream | None = None) -> None:
        """Enters the event into a stream, else into the current one of the thread's current device."""

    def query(self) -> bool:
        """Returns True if the device has passed it."""

    def synchronize(self) -> None:
        """Returns when the device has passed it."""

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds from this event to a later one; the device must have passed both."""


class _HostEvent:
    """An event of the CPU: over when it is recorded."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: torch.Stream | None = None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def elapsed_time(self, later: _HostEvent, /) -> float:
        return (later.at - self.at) * 1e3


_Value = TypeVar("_Value")


class Graphs(Protocol):
    """Launches on a device, captured, so that one call repeats them."""

    def capture(self, launch: Callable[[], _Value], place: Hashable, /) -> tuple[Callable[[], None], _Value]:
        """Captures all that a function launches. The device does nothing of it meanwhile.

        Args:
            launch: asks the device. It waits for it nowhere.
            place: of the memory that is allocated inside. Captures of one place share it: what one of them
                leaves there is gone with the replay of another one, unless a tensor of it is still held.

        Returns:
            A function that asks for all of it again, and what `launch` returned: tensors in it get their values
            anew by each replay.

        Raises:
            RuntimeError: something in it cannot be captured.
        """

    def event(self) -> Event:
        """An event that is recorded inside a capture, and by each replay anew."""

    def release(self) -> None:
        """Forgets all places. Their memory is free once nothing that was captured is held any more."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The functions of one type of device for which torch has no common name."""

    #: Pins host memory that others own; returns what undoes it. Raises RuntimeError.
    register: Callable[[Tensor], Callable[[], object]]
    #: Bytes of a device's memory that its driver has free.
    free_bytes: Callable[[torch.device], int]
    #: Bytes of it that this process has: its tensors', and what its allocator keeps for others to come.
    used_bytes: Callable[[torch.device], int]
    #: Bytes of it in all.
    total_bytes: Callable[[torch.device], int]
    #: Makes what captures on this device; None: torch captures nothing there.
    graphs: Callable[[], Graphs] | None = None


class Accelerator:
    """One device, as one process computes on it. Threads may share it."""

    device: torch.device
    #: Whether its work is done when a call returns, as that of the CPU.
    immediate: bool
    #: Whether several workers may compute on it.
    shared: bool

    def __init__(self, device: torch.device | str = "cpu", *, shared: bool = False) -> None:
        self.device, self.shared = torch.device(device), shared
        self.immediate = self.device.type in _HOST
        if not self.immediate and self.device.index is None:
            self.device = torch.device(self.device.type, torch.accelerator.current_device_index())
        self._kind = KINDS.get(self.device.type, _OTHER)
        self._threads = threading.local()

    def __repr__(self) -> str:
        return f"Accelerator({str(self.device)!r})"

    @cached_property
    def name(self) -> str:
        """The name that people know it by, as "NVIDIA H100"; the device's own where there is none."""
        ask = None if self.immediate else getattr(self._module, "get_device_name", None)
        return str(ask(self.device)) if ask is not None else str(self.device)

    @property
    def text(self) -> str:
        """The device and its name, for people."""
        device = str(self.device)
        return device if self.name == device else f"{device} ({self.name})"

    @cached_property
    def identity(self) -> str:
        """The same in all processes that compute on this device, of those of one machine; "" where it cannot be
        told apart, as the CPU."""
        if self.immediate:
            return ""
        ask = getattr(self._module, "get_device_properties", None)
        found = str(getattr(ask(self.device), "uuid", "")) if ask is not None else ""
        # Without an id of its own its number says it, where this process sees several.
        return found or (str(self.device) if torch.accelerator.device_count() > 1 else "")

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    def use(self) -> None:
        """Makes it this thread's current device."""
        if not self.immediate:
            torch.accelerator.set_device_index(self.device.index)

    def wait(self) -> None:
        """Returns when the device has done all that was asked of it."""
        if not self.immediate:
            torch.accelerator.synchronize(self.device)

    def event(self, *, timing: bool = False) -> Event:
        """An event, not recorded yet. `timing`: `elapsed_time` can be asked of it."""
        if self.immediate:
            return _HostEvent()
        made: Event = torch.Event(self.device, enable_timing=timing)
        return made

    @property
    def captures(self) -> bool:
        """True if torch captures what it is asked to do (CUDA graphs)."""
        return self._kind.graphs is not None

    def graphs(self) -> Graphs:
        """Captures on this device, which `captures`."""
        assert self._kind.graphs is not None
        return self._kind.graphs()

    def free_bytes(self) -> int:
        """Bytes of memory that are free on the device, for anybody."""
        return self._kind.free_bytes(self.device)

    def used_bytes(self) -> int:
        """Bytes of its memory that this process has: its tensors', and what its allocator keeps for others."""
        return self._kind.used_bytes(self.device)

    def total_bytes(self) -> int:
        """Bytes of memory of the device in all."""
        return self._kind.total_bytes(self.device)

    def give_back(self) -> None:
        """Gives memory that no tensor has, and its allocator keeps, back to the device."""
        if not self.immediate:
            self._module.empty_cache()

    def put(self, values: Tensor) -> Tensor:
        """The values on this device, see `put`."""
        return put(values, self.device)

    def _here(self, values: Tensor) -> None:
        """Raises ValueError for values of another device: our events say nothing of them."""
        if values.device != self.device:
            raise ValueError(f"a tensor is on {values.device}, and this process computes on {self.device}")

    def read(self, *numbers: Tensor | float, check: Callable[[], None] = lambda: None) -> list[float]:
        """Numbers that may lie on the device, in double precision: one copy and one event for all of them, and
        no synchronization. Other threads run while this one waits.

        Args:
            numbers: to read.
            check: called while this waits, and once more when the values are here. It raises where they are not
                to be believed.
        """
        there = [each for each in numbers if isinstance(each, Tensor) and each.device.type != "cpu"]
        if not there:  # what else was asked of the device is waited for all the same
            self.passed(check)
            return [float(each) for each in numbers]
        for each in there:
            self._here(each)
        values = torch.stack([each.detach().double().reshape(()) for each in there])
        here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        here.copy_(values, non_blocking=True)
        copied = self.event()
        copied.record(torch.accelerator.current_stream(self.device))
        self._poll(copied, check)
        found = iter(here.tolist())
        return [
            next(found) if isinstance(each, Tensor) and each.device.type != "cpu" else float(each)
            for each in numbers
        ]

    def passed(self, check: Callable[[], None] = lambda: None) -> None:
        """Returns when the device has done what this thread has asked of it so far; `check` as in `read`."""
        if not self.immediate:
            self._poll(self.now(), check)

    def drained(self, seconds: float) -> bool:
        """Returns True if the device comes to the end of what this thread has asked of it, within so many
        seconds. It does not where a kernel hangs, or where the driver reports an error."""
        deadline = time.monotonic() + seconds

        def check() -> None:
            if time.monotonic() > deadline:
                raise TimeoutError

        try:
            self.passed(check)
        except TimeoutError:
            return False
        except RuntimeError as error:
            log.error("%s is lost: %s", self, error)
            return False
        return True

    def now(self) -> Event:
        """An event behind what this thread has asked of the device so far."""
        event = self.event()
        event.record(None if self.immediate else torch.accelerator.current_stream(self.device))
        return event

    def to_host(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Event | None = None) -> None:
        """Copies values to where they belong on the host. It returns when all bytes are there.

        They go on a stream of this thread's own, so that what is asked of the device meanwhile need not wait
        for them. Into memory that is not pinned the driver copies through a small buffer of its own, at a
        fraction of the speed.

        Args:
            pairs: of host memory and the values.
            after: the values are there once the device has passed it, perhaps recorded by another thread; None:
                once it has done what this thread has asked of it so far.
        """
        every = list(pairs)
        here = [pair for pair in every if pair[1].device.type == "cpu"]
        there = [pair for pair in every if pair[1].device.type != "cpu"]
        for _, values in there:
            self._here(values)
        if not there:
            for to, values in here:
                to.copy_(values)
            return
        stream: torch.Stream | None = getattr(self._threads, "copies", None)
        if stream is None:
            stream = self._threads.copies = torch.Stream(self.device)
        stream.wait_event(after if after is not None else self.now())  # type: ignore[arg-type]  # not the host's
        copied = self.event()
        try:
            with stream:
                for to, values in there:
                    to.copy_(values, non_blocking=True)
                copied.record(stream)
            for to, values in here:
                to.copy_(values)
            self._poll(copied)
        except BaseException:
            stream.synchronize()  # what is copied may change or go, whatever happens here
            raise

    def pin(self, memory: Tensor) -> Callable[[], object] | None:
        """Pins host memory that others own. It must stay until what is returned was called.

        Returns:
            What undoes it; None where there is nothing to pin for, or the driver refused.
        """
        if self.immediate:
            return None
        try:
            unpin = self._kind.register(memory)
        except RuntimeError as error:
            log.warning("%d MiB could not be pinned (%s): copies are slower", memory.nbytes >> 20, error)
            return None

        def undo() -> None:
            self.use()  # whatever thread drops the memory
            unpin()

        return undo

    @contextmanager
    def beside(self, after: Event) -> Iterator[None]:
        """Inside, this thread asks the device on a stream of its own, beside what it has asked for before.

        Args:
            after: what is asked for inside waits for it.
        """
        if self.immediate:
            yield
            return
        stream: torch.Stream | None = getattr(self._threads, "beside", None)
        if stream is None:
            stream = self._threads.beside = torch.Stream(self.device)
        stream.wait_event(after)  # type: ignore[arg-type]  # not the host's
        with stream:
            yield

    def _poll(self, event: Event, check: Callable[[], None] = lambda: None) -> None:
        start = time.perf_counter()
        check()  # first: to ask a device that an abort is freeing may block
        while not event.query():
            time.sleep(min(_PAUSE_SECONDS, (time.perf_counter() - start) / 20))
            check()
        check()


def put(values: Tensor, device: torch.device) -> Tensor:
    """The values on a device. The host waits for no copy: they go through pinned memory of our own, in order
    with what the current stream does. Their owner may change them at once."""
    if values.device.type != "cpu" or device.type in _HOST or values.layout != torch.strided:
        return values.to(device)
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values.detach())
    return pinned.to(device, non_blocking=True)


def generators() -> list[torch.Generator]:
    """The default generators that a module may draw from: the CPU's, and that of this thread's current device
    of an accelerator that is in use."""
    found = [torch.default_generator]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        if made := getattr(module, "default_generators", ()):  # there are none before its first use
            found.append(made[module.current_device()])
    return found


# -- what differs from type to type --------------------------------------------------------------------------


def _host_free(device: torch.device) -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * _PAGE


def _host_used(device: torch.device) -> int:
    """The resident bytes of this process; 0 where the system does not say."""
    try:
        return int(os.pread(_statm(os.getpid()), 128, 0).split()[1]) * _PAGE
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _statm(pid: int) -> int:
    """Open as long as the process lives: it is read in every step."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)


def _host_total(device: torch.device) -> int:
    return os.sysconf("SC_PHYS_PAGES") * _PAGE


def _driver_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free, and bytes in all."""
    if hasattr(torch.accelerator, "get_memory_info"):
        free, total = torch.accelerator.get_memory_info(device)
    else:
        free, total = torch.get_device_module(device).mem_get_info(device)  # torch 2.9
    return int(free), int(total)


def _driver_free(device: torch.device) -> int:
    return _driver_memory(device)[0]


def _driver_total(device: torch.device) -> int:
    return _driver_memory(device)[1]


def _cuda_register(memory: Tensor) -> Callable[[], object]:
    driver, start = torch.cuda.cudart(), memory.data_ptr()
    portable = 1  # cudaHostRegisterPortable: for all devices of this process
    if error := int(driver.cudaHostRegister(start, memory.nbytes, portable)):
        raise RuntimeError(f"CUDA error {error}")
    return lambda: driver.cudaHostUnregister(start)


def _register_nothing(memory: Tensor) -> Callable[[], object]:
    raise RuntimeError("this type of device pins memory of its own alone")


class _CudaGraphs:
    """CUDA graphs, with a pool of memory for each place."""

    def __init__(self) -> None:
        self._pools: dict[Hashable, Any] = {}

    def capture(self, launch: Callable[[], _Value], place: Hashable) -> tuple[Callable[[], None], _Value]:
        if place not in self._pools:
            self._pools[place] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads read samples and pin memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pools[place], capture_error_mode="thread_local"):
            values = launch()
        return graph.replay, values

    def event(self) -> Event:
        made: Event = torch.cuda.Event(external=True)
        return made

    def release(self) -> None:
        self._pools.clear()


_OTHER = Kind(
    register=_register_nothing,
    free_bytes=_driver_free,
    used_bytes=torch.accelerator.memory_reserved,
    total_bytes=_driver_total,
)
#: By the type of the device, as in `torch.device.type`; any other type is as `_OTHER`.
KINDS = {
    "cpu": Kind(
        register=_register_nothing, free_bytes=_host_free, used_bytes=_host_used, total_bytes=_host_total
    ),
    "cuda": replace(_OTHER, register=_cuda_register, graphs=_CudaGraphs),
}

#: The machine's processors.
CPU = Accelerator("cpu")


# -- which one a worker computes on --------------------------------------------------------------------------


def placed(asked: str | None, environ: Mapping[str, str]) -> Accelerator:
    """The accelerator of this worker: the one that was asked for, else that of its local rank, else the CPU.

    Args:
        asked: "cpu"; a type of device as "cuda", of which the local rank is the index; or a device as "cuda:1",
            which several workers may share. None: by `$ELASTICD_DEVICE`, else what torch was built for.
        environ: has LOCAL_RANK, which torchrun sets.

    Raises:
        NoDevice: there is no such device; or the CPU would be taken though nobody asked for it, on a machine
            with a GPU or by a torch that was built for one; or two workers would share a device unasked.
    """
    asked = str(asked or environ.get(DEVICE_VARIABLE) or "").lower()
    if asked in ("cpu", "cpu:0"):
        return CPU
    built = torch.accelerator.current_accelerator()
    hidden = _hidden(environ) and (built is None or built.type == "cuda")
    if not asked and (built is None or hidden):
        if built is None and not hidden and driver_is_there():
            raise NoDevice(
                f"this machine has a GPU, and this torch ({torch.__version__}) computes on CPUs alone: install "
                f"a build for the GPU, or ask for the CPU by {DEVICE_VARIABLE}=cpu"
            )
        return CPU
    kind, _, index = (asked or str(built)).partition(":")
    if built is None or kind != built.type or not (index.isdecimal() or not index):
        has = f"computes on {'CPUs alone' if built is None else f'cpu and {built.type}'}"
        raise NoDevice(f"device {asked!r}: this torch ({torch.__version__}) {has}")
    count = torch.accelerator.device_count()
    if not count:
        if not asked and kind == "cuda" and not _gpu_may_be_there():
            return CPU  # the index's default build of torch, on a machine without GPUs
        raise NoDevice(
            f"this torch ({torch.__version__}) is built for {kind}, and finds no such device: look whether its "
            f"driver is loaded, or ask for the CPU by {DEVICE_VARIABLE}=cpu"
        )
    # `elasticd run` gives each worker a torchrun and a GPU of its own, or else a slot that says which.
    rank = (environ.get(SLOT_VARIABLE) if count > 1 else None) or environ.get("LOCAL_RANK") or "0"
    if not rank.isdecimal():
        raise NoDevice(f"LOCAL_RANK is {rank!r}: torchrun sets it to a number")
    if count == 1 and len(visible(environ.get("CUDA_VISIBLE_DEVICES", ""))) == 1:
        rank = "0"  # whoever started this worker gave it this one
    place = int(index or rank)
    if place >= count:
        shared = "" if index else f"; {DEVICE_VARIABLE}={kind}:0 has all workers of this node share one"
        raise NoDevice(f"{kind}:{place}: this process sees {count} of {kind} alone{shared}")
    return Accelerator(torch.device(kind, place), shared=bool(index))


def _gpu_may_be_there() -> bool:
    """Returns True if this machine has a GPU of the kind that this torch was built for, or its driver."""
    return driver_is_there() or gpu_is_there(NVIDIA if torch.version.cuda else AMD)


def _hidden(environ: Mapping[str, str]) -> bool:
    """Returns True if the user hides all GPUs, which asks for the CPU."""
    names = _HIDING if torch.version.cuda else _HIDING_OF_AMD
    return any(name in environ and not visible(environ[name]) for name in names)
