"""This machine beside its work, by psutil and the kernel's own counts, and its accelerators."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from elasticd.wire.node_health import DeviceHealth, Health

#: Where Linux tells how long work waited ("pressure stall information").
PRESSURE = Path("/proc/pressure")
#: Where Linux has control groups (version 2), and where it says which one this process is in.
CONTROL_GROUPS, CONTROL_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class Sensors:
    """Read one after the other: rates are those since the reading before. `devices` reads the accelerators."""

    def __init__(
        self, devices: Callable[[], tuple[DeviceHealth, ...]] = tuple, pressure: Path = PRESSURE
    ) -> None:
        self._devices, self._pressure = devices, pressure
        self._before: tuple[float, tuple[int, int] | None, tuple[int, int] | None] | None = None
        psutil.cpu_times_percent(interval=None)  # the next one is since this

    def read(self) -> Health:
        """Now. Whatever this system does not tell is left out."""
        now = time.monotonic()
        disk = _counted(psutil.disk_io_counters, "read_bytes", "write_bytes")
        network = _counted(psutil.net_io_counters, "bytes_recv", "bytes_sent")
        before, self._before = self._before, (now, disk, network)
        seconds = now - before[0] if before is not None else 0.0
        steal = getattr(psutil.cpu_times_percent(interval=None), "steal", None)
        return Health(
            stolen=steal / 100 if steal is not None else None,
            pressure=_pressures(self._pressure),
            memory_available=min(
                [int(psutil.virtual_memory().available), *_allowed(CONTROL_GROUPS, CONTROL_GROUP)]
            ),
            disk=_rates(before[1], disk, seconds) if before is not None else None,
            network=_rates(before[2], network, seconds) if before is not None else None,
            devices=self._devices(),
        )


def _rates(
    before: tuple[int, int] | None, now: tuple[int, int] | None, seconds: float
) -> tuple[float, float] | None:
    if before is None or now is None or seconds <= 0:
        return None
    return max(0, now[0] - before[0]) / seconds, max(0, now[1] - before[1]) / seconds


def _counted(counters: Callable[[], Any], into: str, out: str) -> tuple[int, int] | None:
    """Bytes of all disks, or of all interfaces, so far, by the names that psutil has for both ways."""
    with suppress(OSError, RuntimeError, NotImplementedError):
        counts = counters()
        return (getattr(counts, into), getattr(counts, out)) if counts is not None else None
    return None


def _allowed(folder: Path, own: Path) -> Iterator[int]:
    """Bytes of memory that may still be taken in this process's control group and in those above it, as in a
    container: what each is allowed, less what it has and could not give back at once."""
    try:
        names = [line.partition("::")[2] for line in own.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        return
    group = folder / names[0].strip("/") if names else folder
    while group.is_relative_to(folder):
        with suppress(OSError, ValueError, StopIteration):
            most = int((group / "memory.max").read_text())  # "max" where there is no limit
            held = int((group / "memory.current").read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            files = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
            yield max(0, most - held + files)
        group = group.parent


def _pressures(folder: Path) -> dict[str, float]:
    """Part of the last ten seconds in which some work waited, by what for."""
    pressures = {}
    for what in ("cpu", "memory", "io"):
        with suppress(OSError, ValueError, StopIteration):
            line = next(line for line in (folder / what).read_text().splitlines() if line.startswith("some "))
            fields = dict(part.split("=") for part in line.split()[1:])
            pressures[what] = float(fields["avg10"]) / 100
    return pressures
