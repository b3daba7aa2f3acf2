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
    memory = _emulated_memory(agent, emulate) if emulate.enabled else _real_memory(agent)
    return tuple(Device(name=f"{agent.node}/{i}", memory=size) for i, size in enumerate(memory))


def _emulated_memory(agent: AgentSection, emulate: EmulateSection) -> list[int]:
    count = agent.devices or _cpu_devices()
    size = emulate.memory or agent.memory or psutil.virtual_memory().total // count
    return [size] * count


def _real_memory(agent: AgentSection) -> list[int]:
    found = nvidia_memory()
    if not found:
        count = agent.devices or _cpu_devices()
        return [agent.memory or psutil.virtual_memory().total // count] * count
    if agent.devices is not None and agent.devices > len(found):
        raise ProbeError(
            f"[agent] devices = {agent.devices}, but this machine has {len(found)} NVIDIA devices: "
            "lower it, or turn [emulate] on"
        )
    return [agent.memory or size for size in found[: agent.devices]]


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


def _cpu_devices() -> int:
    return min(os.cpu_count() or 1, MOST_CPU_DEVICES)
