"""Models of several modules on a device that is not the CPU, under the rules of NCCL: they train as one process
on the CPU, and no order of launches lets ranks wait for each other."""

from __future__ import annotations

from typing import Any

import pytest
from elasticd_planner.layout.launch_order import deadlock, in_one_queue
from elasticd_planner.spec.plan import Plan

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.groups import PlanGroups
from tests import sizes
from tests.accelerators import vgpu
from tests.accelerators.strict_process_group import StrictGroups, connected
from tests.runtime import gang, test_modules

PLANS = test_modules.PLACEMENTS
#: Modules that share some devices, TP groups that overlap; and pipelines in both, one of them interleaved.
HERE = ("partly shared, unequal", "encoder pp 2, language interleaved")


def worker(device: str, store: Any, plan: Plan) -> dict[str, Any]:
    """One member of the plan, on a vgpu of its own."""
    vgpu.load()
    accelerator = Accelerator(f"vgpu:{plan.rank(device)}")
    accelerator.use()
    groups = PlanGroups("plan/1", device, "127.0.0.1", store)
    made: list[StrictGroups] = []
    with vgpu.counting(plan.rank(device)) as spent:
        found = test_modules.trained(device, plan, groups, accelerator=accelerator, connect=connected(made))
    del found["state"], found["encoder"]
    found["weights"] = {name: (box, value.cpu()) for name, (box, value) in found["weights"].items()}
    return found | {"launches": spent.launches, "noted": vgpu.settled_errors(), "log": made[0].log.entries}


@pytest.mark.slow
@pytest.mark.parametrize("name", sizes.beside(HERE[:1], PLANS))
def test_two_modules_on_the_device_train_like_one_process_on_the_cpu(name: str) -> None:
    vgpu.needed()
    plan = PLANS[name]
    results = gang.run(__file__, "worker", plan.members, plan)
    test_modules.check(plan, results)
    for device, result in results.items():
        assert result["launches"] > 100, f"{device} computed on the CPU"
        assert not result["noted"], device
        assert not result["kept"], f"{device} keeps messages of steps that are over"
    logs = {device: result["log"] for device, result in results.items()}
    assert deadlock(logs) is None
    assert deadlock(in_one_queue(logs)) is None
