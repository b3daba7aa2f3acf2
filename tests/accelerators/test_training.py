"""The product on a device that is not the CPU: what trains there trains as one process on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from elasticd_planner.spec.plan import Plan, StatePolicy

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.groups import PlanGroups
from tests import sizes
from tests.accelerators import vgpu
from tests.runtime import gang, test_parity

#: A pipeline of interleaved chunks with unequal tensor parallelism; and pipelines of unlike depth.
HERE = ("interleaved and uneven beside a plain pipeline", "pipelines of 2 and 3 stages")
#: State apart from values, so that gradients and values go between processes, too.
SHARDED = {
    f"{name}, zero {zero}": test_parity.PLANS[name].replace(state=StatePolicy(zero=zero, replicas=2))
    for zero, name in zip((1, 2), HERE, strict=True)
}
PLANS = test_parity.PLANS | SHARDED


def worker(device: str, store: Any, plan: Plan) -> dict[str, Any]:
    """One member of the plan, on a vgpu of its own."""
    vgpu.load()
    accelerator = Accelerator(f"vgpu:{plan.rank(device)}")
    accelerator.use()
    groups = PlanGroups("plan/1", device, "127.0.0.1", store)
    with vgpu.counting(plan.rank(device)) as spent:
        made = test_parity.trained(device, plan, groups, accelerator)
    return made | {"launches": spent.launches, "noted": vgpu.settled_errors()}


@pytest.mark.slow
@pytest.mark.parametrize("name", sizes.beside(HERE, PLANS))
def test_a_layout_on_the_device_trains_like_one_process_on_the_cpu(name: str) -> None:
    vgpu.needed()
    plan = PLANS[name]
    results = gang.run(__file__, "worker", plan.members, plan)
    test_parity.check(plan, results)
    for device, result in results.items():
        assert result["launches"] > 100, f"{device} computed on the CPU"
        assert not result["noted"], device
