"""What devices this node has: NVIDIA's by NVML; else the machine's cores; or what the configuration says."""

from __future__ import annotations

import os

import psutil
from elasticd_planner.spec.cluster import Device

from elasticd.config.tree import AgentSection, EmulateSection

#: Without accelerators a node offers this many CPU devices at most.
MOST_CPU_DEVICES = 8


class ProbeError(Exception):
    """The configured devices are not there; the message says what is."""


def devices(agent: AgentSection, emulate: EmulateSection) -> tuple[Device, ...]:
    """The node's devices with their memory in bytes. Raises ProbeError."""
    found = [] if emulate.enabled else nvidia_memory()
    if found and agent.devices is not None and agent.devices > len(found):
        raise ProbeError(
            f"[agent] devices = {agent.devices}, but this machine has {len(found)} NVIDIA devices: "
            "lower it, or turn [emulate] on"
        )
    memory = [agent.memory or size for size in found[: agent.devices]]
    if not found:
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
