"""The health of an agent's machine and devices, which may explain why one of them is slow.

All of it is counted where the system offers it; what it does not offer is left out (None), never guessed.
"""

from __future__ import annotations

import msgspec

from elasticd.codec.message import Message

#: Degrees below the temperature at which a device holds its clocks down by itself, for those that do not say.
HOT = 85.0
#: Parts of the processors' time that others on the same host took, and that work waited for something.
STOLEN, PRESSED = 0.05, 0.2


class DeviceHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A device: NVIDIA's by its driver, a CPU device by its worker's process. What is not offered is None."""

    name: str  # "node/local rank"
    #: of the worker's process whose memory and processor time these are (None: they are of the device itself)
    pid: int | None = None
    #: part of the time in which it computed, 0 to 1; above 1 where a process had more than one processor
    utilisation: float | None = None
    memory_used: int | None = None  # bytes
    clock: float | None = None  # of its processors now, Hz
    most_clock: float | None = None  # of its processors at most, Hz
    throttled: tuple[str, ...] = ()  # why its clocks are held down
    temperature: float | None = None  # degrees Celsius
    power: float | None = None  # watts
    power_limit: float | None = None  # watts
    corrected: int | None = None  # ECC errors since its reset that were corrected
    uncorrected: int | None = None  # ECC errors since its reset that were not
    #: rows of its memory that were replaced, for corrected and for uncorrected errors
    remapped: tuple[int, int] | None = None
    remapping: str = ""  # whether a row waits for a reset, or no spare was left
    pcie: tuple[int, int] | None = None  # bytes a second sent and received
    pcie_replays: int | None = None  # so far
    nvlink: tuple[int, int] | None = None  # bytes sent and received so far
    nvlink_errors: int | None = None  # so far
    xids: tuple[int, ...] = ()  # numbers of the driver's error reports since the agent began, the last ones


class Health(Message, frozen=True, kw_only=True, tag="node-health"):
    """A node now. What the system does not offer is None or empty."""

    stolen: float | None = None  # part of the processors' time that a hypervisor gave to others, 0 to 1
    #: part of the last ten seconds in which work waited, 0 to 1, by what it waited for: cpu, memory, io
    pressure: dict[str, float] = msgspec.field(default_factory=dict)
    memory_available: int | None = None  # bytes
    disk: tuple[float, float] | None = None  # bytes a second read and written
    network: tuple[float, float] | None = None  # bytes a second received and sent
    devices: tuple[DeviceHealth, ...] = ()  # those of NVIDIA, or those that a worker drives

    def device(self, name: str) -> DeviceHealth | None:
        """One of its devices; None where it is not known."""
        return next((device for device in self.devices if device.name == name), None)


def causes(health: Health | None, name: str) -> tuple[str, ...]:
    """The possible causes of slow devices on this node, in words; empty where none is known."""
    if health is None:
        return ()
    sentences = list(_of_device(health.device(name)))
    if health.stolen is not None and health.stolen >= STOLEN:
        sentences.append(f"others on its host take {health.stolen:.0%} of the processors' time")
    waits = {"cpu": "processors", "memory": "memory", "io": "disks"}
    sentences += [
        f"work on its node waits for {waits.get(what, what)} {part:.0%} of the time"
        for what, part in sorted(health.pressure.items())
        if part >= PRESSED
    ]
    return tuple(sentences)


def _of_device(device: DeviceHealth | None) -> tuple[str, ...]:
    if device is None:
        return ()
    symptoms = []
    if device.throttled:
        clock, most = device.clock, device.most_clock
        known = clock is not None and most is not None
        held = f" at {clock / 1e6:.0f} of {most / 1e6:.0f} MHz" if known else ""  # type: ignore[operator]
        symptoms.append(f"its clocks are held down{held}: {', '.join(device.throttled)}")
    if device.temperature is not None and device.temperature >= HOT:
        symptoms.append(f"it is at {device.temperature:.0f} °C")
    if device.uncorrected:
        symptoms.append(f"{device.uncorrected} ECC errors that could not be corrected")
    if device.remapping:
        symptoms.append(f"rows of its memory: {device.remapping}")
    if device.xids:
        symptoms.append(f"the driver reported XID {', '.join(map(str, device.xids))}")
    if device.nvlink_errors:
        symptoms.append(f"{device.nvlink_errors} errors on its NVLinks")
    return tuple(symptoms)
