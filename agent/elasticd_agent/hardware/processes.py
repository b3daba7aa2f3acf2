"""The processes of workers on devices without sensors, such as CPU devices: their memory and processor time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import psutil

from elasticd.wire.node_health import DeviceHealth


class WorkerProcesses:
    """Reads the process that drives each device. `pids` gives them by device, at each reading."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._known: dict[int, psutil.Process] = {}  # by process id, as of the reading before

    def read(self) -> tuple[DeviceHealth, ...]:
        """The devices that have a process, by name; how busy one is, is since the reading before."""
        readings = []
        before, self._known = self._known, {}
        for device, pid in sorted(self._pids().items()):
            try:
                process = before.get(pid)
                if process is None or not process.is_running():  # also where another process has its number
                    process = psutil.Process(pid)
                    process.cpu_percent()  # the next one is since this
                    busy = None
                else:
                    busy = process.cpu_percent() / 100
                memory = int(process.memory_info().rss)
            except psutil.Error:  # it has ended
                continue
            self._known[pid] = process
            readings.append(DeviceHealth(name=device, pid=pid, memory_used=memory, utilisation=busy))
        return tuple(readings)
