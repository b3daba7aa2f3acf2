"""What an agent sees of its machine and devices beside their work: what may explain why one of them is slow.

All of it is counted where the system offers it; what it does not offer is left out (None), never guessed.
"""

from __future__ import annotations

import msgspec

from elasticd.codec.message import Message
from elasticd.wire.probes import Crossed

#: Degrees below the temperature at which a device holds its clocks down by itself, for those that do not say.
HOT = 85.0
#: Parts of the processors' time that others on the same host took, and that work waited for something.
STOLEN, PRESSED = 0.05, 0.2


class DeviceHealth(msgspec.Struct, frozen=True, kw_only=True):
    """An NVIDIA device. utilisation: part of the time in which it computed; clock: of its processors, now and
    at most, Hz; throttled: why they are held down; temperature: degrees Celsius; power: watts, and the limit;
    corrected, uncorrected: ECC errors since it was reset; remapped: rows of its memory (for corrected, for
    uncorrected errors), remapping: whether a row waits for a reset, or none was left; pcie: bytes a second sent
    and received, and replays so far; nvlink: bytes sent and received so far, and errors; xids: of the driver's
    error reports since the agent began, the last."""

    name: str
    utilisation: float | None = None
    memory_used: int | None = None
    clock: float | None = None
    most_clock: float | None = None
    throttled: tuple[str, ...] = ()
    temperature: float | None = None
    power: float | None = None
    power_limit: float | None = None
    corrected: int | None = None
    uncorrected: int | None = None
    remapped: tuple[int, int] | None = None
    remapping: str = ""
    pcie: tuple[int, int] | None = None
    pcie_replays: int | None = None
    nvlink: tuple[int, int] | None = None
    nvlink_errors: int | None = None
    xids: tuple[int, ...] = ()


class Health(Message, frozen=True, kw_only=True, tag="node-health"):
    """A node, now. stolen: part of the processors' time that a hypervisor gave to others; pressure: part of the
    last ten seconds in which work waited for processors, memory or disks, by which; memory_available in bytes;
    disk and network: bytes a second read and written, received and sent."""

    stolen: float | None = None
    pressure: dict[str, float] = msgspec.field(default_factory=dict)
    memory_available: int | None = None
    disk: tuple[float, float] | None = None
    network: tuple[float, float] | None = None
    devices: tuple[DeviceHealth, ...] = ()

    def device(self, name: str) -> DeviceHealth | None:
        return next((device for device in self.devices if device.name == name), None)


#: What agents tell of their nodes, and that is about no job.
OfNode = Crossed | Health


def causes(health: Health | None, name: str) -> tuple[str, ...]:
    """What may make a device of this node slow, in words; none where nothing is known to."""
    if health is None:
        return ()
    found = list(_of_device(health.device(name)))
    if health.stolen is not None and health.stolen >= STOLEN:
        found.append(f"others on its host take {health.stolen:.0%} of the processors' time")
    waits = {"cpu": "processors", "memory": "memory", "io": "disks"}
    found += [
        f"work on its node waits for {waits.get(what, what)} {part:.0%} of the time"
        for what, part in sorted(health.pressure.items())
        if part >= PRESSED
    ]
    return tuple(found)


def _of_device(device: DeviceHealth | None) -> tuple[str, ...]:
    if device is None:
        return ()
    found = []
    if device.throttled:
        clock, most = device.clock, device.most_clock
        known = clock is not None and most is not None
        held = f" at {clock / 1e6:.0f} of {most / 1e6:.0f} MHz" if known else ""  # type: ignore[operator]
        found.append(f"its clocks are held down{held}: {', '.join(device.throttled)}")
    if device.temperature is not None and device.temperature >= HOT:
        found.append(f"it is at {device.temperature:.0f} °C")
    if device.uncorrected:
        found.append(f"{device.uncorrected} ECC errors that could not be corrected")
    if device.remapping:
        found.append(f"rows of its memory: {device.remapping}")
    if device.xids:
        found.append(f"the driver reported XID {', '.join(map(str, device.xids))}")
    if device.nvlink_errors:
        found.append(f"{device.nvlink_errors} errors on its NVLinks")
    return tuple(found)
