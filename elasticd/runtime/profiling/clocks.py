"""How time and memory are read on a device: the only place where measuring knows CUDA from the CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class NoDevice(ValueError):
    """The device that was named is not there."""


class DeviceClock(Protocol):
    """Marks moments in the device's own order of work; seconds between two of them."""

    device: torch.device
    name: str

    def mark(self) -> Any:
        """Marks the moment after all that was asked of the device until now."""

    def between(self, earlier: Any, later: Any) -> float:
        """Seconds from one mark to another; waits until the device has passed the later one."""

    def wait(self) -> None:
        """Returns when the device has done all that was asked of it."""

    def free_bytes(self) -> int:
        """Bytes of memory that the device has free."""


class CpuClock:
    """The CPU, which has done its work when a call returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.name = "cpu"

    def mark(self) -> float:
        """Seconds on `time.perf_counter`."""
        return time.perf_counter()

    def between(self, earlier: float, later: float) -> float:
        """Seconds between two marks."""
        return later - earlier

    def wait(self) -> None:
        """Returns at once: work on a CPU is done when its call returns."""
        return

    def free_bytes(self) -> int:
        """Bytes of memory of the machine that are free."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class CudaClock:
    """A CUDA device, by events on its current stream."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        self.device = device
        self.name = torch.cuda.get_device_name(device)

    def mark(self) -> torch.cuda.Event:
        """Records a timing event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        """Seconds between two events; waits until the device has passed the later one."""
        later.synchronize()
        return earlier.elapsed_time(later) / 1e3

    def wait(self) -> None:
        """Waits until the device has done all that was queued on any stream."""
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        """Bytes of the device's memory that are free."""
        return torch.cuda.mem_get_info(self.device)[0]


def timed(clock: DeviceClock, work: Callable[[], T]) -> tuple[T, float]:
    """What `work` gives, and the seconds that the device took for it; it has done all else before and after."""
    clock.wait()
    start = clock.mark()
    made = work()
    end = clock.mark()
    clock.wait()
    return made, clock.between(start, end)


def clock_of(device: str) -> DeviceClock:
    """The clock of "cpu", "cuda" or "cuda:N". Raises NoDevice where torch has none of that name."""
    if device == "cpu":
        return CpuClock()
    if not device.startswith("cuda"):
        raise NoDevice(f"device {device!r} is neither cpu nor cuda")
    if not torch.cuda.is_available():
        raise NoDevice(f"device {device!r}: this torch ({torch.__version__}) finds no CUDA device")
    found = torch.device(device if ":" in device else "cuda:0")
    if (found.index or 0) >= torch.cuda.device_count():
        raise NoDevice(f"device {device!r}: there are {torch.cuda.device_count()} CUDA devices")
    return CudaClock(found)
