"""NVIDIA's devices by NVML, as far as driver and device offer it; `pynvml` is handed in, so that tests can.

Whatever a device or its driver does not support is left out, one thing at a time. A driver in trouble may not
return from a call at all: so the agent calls it on threads that it need not wait for (`DriverCalls`).
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import ModuleType
from typing import Any, TypeVar

from elasticd.wire.node_health import DeviceHealth

T = TypeVar("T")

#: XIDs that are remembered of a device.
_MOST_XIDS = 8
#: Seconds that a call into the driver may take, which takes milliseconds; and one at the end of the process.
PATIENCE_SECONDS, END_SECONDS = 5.0, 0.5

_log = logging.getLogger(__name__)

#: Why clocks are held down, by what NVML calls it; idling and settings of the user's own are no trouble.
REASONS = {
    "SwPowerCap": "power limit",
    "HwSlowdown": "hardware",
    "HwThermalSlowdown": "heat (hardware)",
    "SwThermalSlowdown": "heat",
    "HwPowerBrakeSlowdown": "power brake",
    "SyncBoost": "another device of its sync group",
}


class Nvml:
    """NVML while it is open. `names` are those of the devices, in NVML's order, of which the first count."""

    def __init__(self, pynvml: ModuleType | Any, names: Sequence[str]) -> None:
        """Raises `pynvml.NVMLError` where there is no driver."""
        self._nvml = pynvml
        pynvml.nvmlInit()
        count = min(len(names), pynvml.nvmlDeviceGetCount())
        self._handles = {names[i]: pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)}
        self._xids: dict[str, tuple[int, ...]] = {}
        self._events = self._ask(self._subscribed)

    def close(self) -> None:
        """Ends the subscription to the driver's events, and NVML. Errors of NVML are ignored."""
        if self._events is not None:
            self._ask(lambda: self._nvml.nvmlEventSetFree(self._events))
        self._ask(self._nvml.nvmlShutdown)

    def read(self) -> tuple[DeviceHealth, ...]:
        """All devices now. It takes milliseconds for each, and does not wait for what they compute."""
        self._read_events()
        return tuple(self._device(name, handle) for name, handle in self._handles.items())

    def _ask(self, question: Callable[[], T]) -> T | None:
        """The answer, None where device or driver has none."""
        try:
            return question()
        except (self._nvml.NVMLError, AttributeError):
            return None

    def _device(self, name: str, handle: Any) -> DeviceHealth:
        nvml, ask = self._nvml, self._ask
        rows = ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
        links = self._fields(handle, "DATA_TX", "DATA_RX", prefix="NVML_FI_DEV_NVLINK_THROUGHPUT_")
        errors = self._fields(
            handle, "CRC_FLIT", "REPLAY", "RECOVERY", prefix="NVML_FI_DEV_NVLINK_", suffix="_ERROR_COUNT_TOTAL"
        )
        return DeviceHealth(
            name=name,
            utilisation=ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            memory_used=ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)),
            clock=ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6),
            most_clock=ask(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6),
            throttled=self._throttled(handle),
            temperature=ask(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
            power=ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
            power_limit=ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3),
            corrected=self._ecc(handle, "CORRECTED"),
            uncorrected=self._ecc(handle, "UNCORRECTED"),
            remapped=(int(rows[0]), int(rows[1])) if rows is not None else None,
            remapping=_remapping(rows) if rows is not None else "",
            pcie=self._pcie(handle),
            pcie_replays=ask(lambda: int(nvml.nvmlDeviceGetPcieReplayCounter(handle))),
            # Those of NVLink count KiB.
            nvlink=(links[0] << 10, links[1] << 10) if links is not None else None,
            nvlink_errors=sum(errors) if errors is not None else None,
            xids=self._xids.get(name, ()),
        )

    def _throttled(self, handle: Any) -> tuple[str, ...]:
        nvml = self._nvml
        mask = self._ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
        if mask is None:  # drivers before 535
            mask = self._ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
        bits = {name: getattr(nvml, f"nvmlClocksThrottleReason{name}", 0) for name in REASONS}
        return tuple(REASONS[name] for name, bit in bits.items() if (mask or 0) & bit)

    def _ecc(self, handle: Any, kind: str) -> int | None:
        nvml = self._nvml

        def count() -> int:
            error = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}")
            return int(nvml.nvmlDeviceGetTotalEccErrors(handle, error, nvml.NVML_VOLATILE_ECC))

        return self._ask(count)

    def _pcie(self, handle: Any) -> tuple[int, int] | None:
        nvml = self._nvml

        def both() -> tuple[int, int]:
            sent = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
            received = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
            return int(sent) << 10, int(received) << 10  # KiB a second

        return self._ask(both)

    def _fields(self, handle: Any, *names: str, prefix: str, suffix: str = "") -> list[int] | None:
        """Of all links together; None where one of them is not offered."""
        nvml = self._nvml
        everywhere = 0xFFFFFFFF

        def read() -> list[int] | None:
            fields = [getattr(nvml, prefix + name + suffix) for name in names]
            scoped = [(field, everywhere) for field in fields] if "THROUGHPUT" in prefix else fields
            values = nvml.nvmlDeviceGetFieldValues(handle, scoped)
            if any(value.nvmlReturn != nvml.NVML_SUCCESS for value in values):
                return None
            return [int(value.value.ullVal) for value in values]

        return self._ask(read)

    def _subscribed(self) -> Any:
        """To the driver's reports of critical errors."""
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        for handle in self._handles.values():
            with suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        return events

    def _read_events(self) -> None:
        """Takes in what was reported since, without waiting."""
        while self._events is not None:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:  # nothing more, or not supported
                return
            name = next((n for n, h in self._handles.items() if _same(h, event.device)), None)
            if name is not None:
                _log.warning("the driver reports XID %d of %s", event.eventData, name)
                self._xids[name] = (*self._xids.get(name, ()), int(event.eventData))[-_MOST_XIDS:]


class DriverHangs(RuntimeError):
    """A call into the driver has not returned in its time."""


class DriverCalls:
    """Calls into a driver, one at a time, each on a daemon thread: one that does not return holds up neither
    its caller nor the end of the process."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def call(self, work: Callable[[], T], seconds: float) -> T:
        """The result of a call.

        Args:
            work: the call.
            seconds: the longest wait for it.

        Raises:
            DriverHangs: it has not returned by then, or one before it never has.
        """
        if self._thread is not None and self._thread.is_alive():
            raise DriverHangs
        future: Future[T] = Future()
        self._thread = threading.Thread(target=_run, args=(work, future), name="elasticd-driver", daemon=True)
        self._thread.start()
        try:
            result = future.result(seconds)
        except TimeoutError:
            if future.done():  # the call's own
                raise
            raise DriverHangs from None
        self._thread.join()
        return result


def _run(work: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


class NvidiaReader:
    """Reads devices by NVML for as long as it answers; where there is no driver, otherwise."""

    def __init__(self, names: Sequence[str], otherwise: Callable[[], tuple[DeviceHealth, ...]]) -> None:
        """
        Args:
            names: of the devices, as in `Nvml`; empty: none of them is NVIDIA's.
            otherwise: reads the devices of a node without a driver.
        """
        self._names, self._otherwise = names, otherwise
        self._calls = DriverCalls()
        self._nvml: Nvml | None = None
        self._opened = not names
        self._hangs = False

    def read(self) -> tuple[DeviceHealth, ...]:
        """All devices now; none while the driver hangs, which the log says once."""
        try:
            readings = self._calls.call(self._read, PATIENCE_SECONDS)
        except DriverHangs:
            if not self._hangs:
                _log.warning("NVIDIA's driver does not answer: how the devices are is not known until it does")
            self._hangs = True
            return ()
        if self._hangs:
            _log.warning("NVIDIA's driver answers again")
        self._hangs = False
        return readings

    def close(self) -> None:
        """Closes NVML, unless the driver hangs."""
        if self._nvml is not None:
            with suppress(DriverHangs):
                self._calls.call(self._nvml.close, END_SECONDS)

    def _read(self) -> tuple[DeviceHealth, ...]:
        if not self._opened:
            self._nvml = opened(self._names)
            self._opened = True
        return self._nvml.read() if self._nvml is not None else self._otherwise()


def _same(one: Any, other: Any) -> bool:
    """Returns True if two handles, which are pointers, are of one device."""
    try:
        return ctypes.cast(one, ctypes.c_void_p).value == ctypes.cast(other, ctypes.c_void_p).value
    except (ctypes.ArgumentError, TypeError):
        return one is other


def _remapping(rows: Sequence[int]) -> str:
    """In words, from (corrected, uncorrected, pending, failed)."""
    if rows[3]:
        return "one could not be remapped, replace the device"
    return "one is to be remapped, reset the device" if rows[2] else ""


def opened(names: Sequence[str]) -> Nvml | None:
    """NVML, None without a driver or its Python package."""
    try:
        import pynvml
    except (ImportError, OSError):
        return None
    try:
        return Nvml(pynvml, names)
    except pynvml.NVMLError:
        return None
