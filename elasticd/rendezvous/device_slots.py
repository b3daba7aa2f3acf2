"""The devices of a torchrun's workers, by their indices on the node, as the agent counts them."""

from __future__ import annotations

from collections.abc import Mapping

from elasticd.system import torch_build
from elasticd.system.torchrun_launcher import GPUS_VARIABLE
from elasticd.wire.unix_socket import SLOT_VARIABLE, SLOTS_VARIABLE


def launched_slots(environment: Mapping[str, str]) -> tuple[int, ...]:
    """The devices that `elasticd run` chose, one for each worker; empty where it started no torchrun."""
    text = environment.get(SLOTS_VARIABLE) or environment.get(SLOT_VARIABLE) or ""
    return tuple(int(name) for name in text.split(",") if name.isdecimal())


def slots_of(environment: Mapping[str, str], workers: int) -> tuple[int, ...]:
    """The devices of so many workers: those that `elasticd run` chose, else the GPUs that the environment
    leaves visible, else the node's first ones."""
    visible = torch_build.visible(environment.get(GPUS_VARIABLE, ""))
    numbered = tuple(int(name) for name in visible if name.isdecimal())
    for slots in (launched_slots(environment), numbered):
        if len(slots) >= workers:
            return slots[:workers]
    return tuple(range(workers))
