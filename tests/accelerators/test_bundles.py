"""Named tensors of all types between stages, on a device that is not the CPU and under the rules of NCCL."""

from __future__ import annotations

from typing import Any

import pytest
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import Plan

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.groups import PlanGroups
from tests.accelerators import vgpu
from tests.accelerators.strict_process_group import StrictGroups, connected, told
from tests.planner.launch_order import deadlock
from tests.planner.launches import launches
from tests.runtime import gang, test_bundles
from tests.runtime.bundled import READS, make_recipe
from tests.runtime.test_engine_parity import plan_of, stage

PLAN = plan_of(
    (5, [stage(0, 1, ("a/0", 1)), stage(1, READS, ("a/1", 3), ("a/2", 1)), stage(READS, 6, ("b/0", 1))]),
    (3, [stage(0, 2, ("c/0", 1)), stage(2, 6, ("c/1", 1))]),
)
#: Between all stages: positions, hidden, real, feature, table, gate, busy, spare. Of them hidden, feature, gate
#: and spare have a gradient.
TENSORS = (8, 4)


def worker(device: str, store: Any, plan: Plan) -> dict[str, Any]:
    """One member of the plan, on a vgpu of its own."""
    vgpu.load()
    accelerator = Accelerator(f"vgpu:{plan.rank(device)}")
    accelerator.use()
    made: list[StrictGroups] = []
    connect = connected(made)
    groups = PlanGroups("plan/1", device, "127.0.0.1", store)
    with vgpu.counting(plan.rank(device)) as spent:
        found = test_bundles.trained(device, plan, groups, make_recipe(accelerator, connect))
    log = made[0].log.entries
    return found | {"launches": spent.launches, "noted": vgpu.settled_errors(), "log": log}


@pytest.mark.slow
def test_named_tensors_train_on_the_device_as_one_process_and_launch_as_predicted() -> None:
    vgpu.needed()
    results = gang.run(__file__, "worker", PLAN.members, PLAN)
    test_bundles.check(PLAN, results)
    assert deadlock({device: result["log"] for device, result in results.items()}) is None
    recipe = make_recipe()
    layouts = Layouts(recipe.model.spec, PLAN)
    predicted = [
        launches(layouts, recipe.feed.dealing(PLAN, step)(), recipe.schedule, tensors=TENSORS)
        for step in range(test_bundles.STEPS)
    ]
    for device, result in results.items():
        assert result["launches"] > 100, f"{device} computed on the CPU"
        assert not result["noted"], device
        steps = [at for step in predicted for at in told(step[device])]
        log = told(result["log"])
        assert log[: len(steps)] == steps, device
        assert all(at.startswith("activation ") for at in log[len(steps) :]), "of the evaluation"
