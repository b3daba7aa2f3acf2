"""State that moves from device to device: the contract of transports, and moves, under NCCL's rules on vgpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from elasticd_migration.local_state import LocalState
from elasticd_migration.migrate import migrate
from elasticd_migration.transport import ProcessGroupTransport
from elasticd_planner.layout.channels import Channel
from elasticd_planner.layout.layouts import Layouts

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.device_communicators import DeviceCommunicators
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.nccl import NcclLibrary
from elasticd.runtime.switch.device_transport import DeviceTransport
from tests.accelerators import vgpu
from tests.accelerators.strict_process_group import StrictGroups, wrong
from tests.migration.contract import CHECKS
from tests.migration.gang import AFTER, BEFORE
from tests.migration.plans import SPEC
from tests.migration.ranks import assert_same_bits, local, mapped, members, trained
from tests.runtime import gang

MEMBERS = members(BEFORE, AFTER)


def transport(device: str, store: Any) -> tuple[DeviceTransport, Accelerator]:
    vgpu.load()
    accelerator = Accelerator(f"vgpu:{MEMBERS.index(device)}")
    accelerator.use()
    groups = PlanGroups("transition", device, "127.0.0.1", store)
    group = groups.group(MEMBERS, "transition")
    control = ProcessGroupTransport(group.backend, group.members, group.me, group.all_gather)
    channel = Channel("state", MEMBERS)
    made = DeviceCommunicators(groups, (channel,), group, NcclLibrary(accelerator.device, StrictGroups()))
    return DeviceTransport(control, made.mesh(channel), accelerator.device), accelerator


def tried(device: str, store: Any) -> tuple[list[str], list[str]]:
    """All checks of the contract, one after the other."""
    end, _ = transport(device, store)
    for check in CHECKS:
        check(end)
        end.all_gather(b"done")
        end.drain()
    return wrong, vgpu.settled_errors()


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    vgpu.needed()
    for mismatches, noted in gang.run(__file__, "tried", MEMBERS).values():
        assert not mismatches
        assert not noted


def moved(device: str, store: Any, in_place: bool) -> tuple[int, int, list[str]]:
    """Moves AdamW's state, and looks at every bit of it."""
    end, accelerator = transport(device, store)
    old, new = Layouts(SPEC, BEFORE), Layouts(SPEC, AFTER)
    whole = trained()
    state = mapped(local(whole, old, device), lambda plane: plane.to(accelerator.device))
    start = end.bytes_sent
    result = migrate(old, new, state, end, limit=20_000, in_place=in_place, device=accelerator.device)
    assert end.bytes_sent - start == result.bytes_sent + result.bytes_sealed
    end.all_gather(b"ok")
    end.drain()
    assert all(plane.device == accelerator.device for plane in planes(result.state))
    assert_same_bits(mapped(result.state, torch.Tensor.cpu), local(whole, new, device))
    return result.bytes_sent, result.bytes_received, wrong + vgpu.settled_errors()


def planes(state: LocalState) -> list[torch.Tensor]:
    shards = [shard for tensor in state.tensors.values() for shard in tensor.shards]
    return [plane for shard in shards for plane in shard.planes.values()]


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True], ids=["beside", "in place"])
def test_state_moves_to_the_bit(in_place: bool) -> None:
    vgpu.needed()
    found = gang.run(__file__, "moved", MEMBERS, in_place).values()
    assert sum(sent for sent, _, _ in found) == sum(received for _, received, _ in found) > 50_000
    assert not [noted for _, _, noted in found if noted]
