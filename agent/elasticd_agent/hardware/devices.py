"""The devices of this node: NVIDIA's by NVML; else the machine's cores; or what the configuration says."""

from __future__ import annotations

import os

import psutil
from elasticd_planner.spec.cluster import Device

from elasticd.config.tree import AgentSection, EmulateSection
from elasticd_agent.hardware.nvml import DriverCalls, DriverHangs

#: Without accelerators a node offers this many CPU devices at most.
MOST_CPU_DEVICES = 8
#: Seconds that NVIDIA's driver may take to say what devices there are: the first call may load it.
DRIVER_SECONDS = 60.0


class ProbeError(Exception):
    """The configured devices are not there; the message says what is."""


def devices(agent: AgentSection, emulate: EmulateSection) -> tuple[Device, ...]:
    """The node's devices with their memory in bytes. Raises ProbeError."""
    try:
        memories = [] if emulate.enabled else DriverCalls().call(nvidia_memory, DRIVER_SECONDS)
    except DriverHangs:
        raise ProbeError(
            f"NVIDIA's driver has not said in {DRIVER_SECONDS:g} s what devices there are (nor would it tell "
            "nvidia-smi): reset the devices, or start the machine again"
        ) from None
    if memories and agent.devices is not None and agent.devices > len(memories):
        raise ProbeError(
            f"[agent] devices = {agent.devices}, but this machine has {len(memories)} NVIDIA devices: "
            "lower it, or turn [emulate] on"
        )
    memory = [agent.memory or size for size in memories[: agent.devices]]
    if not memories:
        count = agent.devices or min(os.cpu_count() or 1, MOST_CPU_DEVICES)
        emulated = emulate.memory if emulate.enabled else None
        memory = [emulated or agent.memory or psutil.virtual_memory().total // count] * count
    return tuple(Device(name=f"{agent.node}/{i}", memory=size) for i, size in enumerate(memory))


def nvidia_memory() -> list[int]:
    """Bytes of each NVIDIA device; none without a driver or its Python package."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError):
        return []
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
