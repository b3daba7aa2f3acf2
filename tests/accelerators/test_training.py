"""The product on a device that is not the CPU, under the rules of NCCL: what trains there trains as one process
on the CPU, and launches what the plan says."""

from __future__ import annotations

from typing import Any

import pytest
from elasticd_planner.layout import channels
from elasticd_planner.layout.gradient_reduction import reductions
from elasticd_planner.layout.launch_order import deadlock
from elasticd_planner.layout.launches import launches
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import Plan, StatePolicy

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.groups import PlanGroups
from tests import sizes
from tests.accelerators import vgpu
from tests.accelerators.strict_process_group import StrictGroups, connected, told
from tests.runtime import gang, test_lanes, test_parity

#: A pipeline of interleaved chunks with unequal tensor parallelism; and pipelines of unlike depth.
HERE = ("interleaved and uneven beside a plain pipeline", "pipelines of 2 and 3 stages")
#: State apart from values, so that gradients and values go between processes, too.
SHARDED = {
    f"{name}, zero {zero}": test_parity.PLANS[name].replace(state=StatePolicy(zero=zero, replicas=2))
    for zero, name in zip((1, 2), HERE, strict=True)
}
#: Lanes of unlike width, and lanes beside other pipelines with their state apart.
LANES = {
    f"{name}, zero {zero}": test_lanes.PLANS[name].replace(state=test_lanes.POLICIES[f"zero {zero}"])
    for zero, name in (
        (0, "2 + 1, uneven, in two stages"),
        (1, "two pipelines of lanes, micro-batches of two"),
        (2, "three lanes of unlike width beside a deeper pipeline"),
    )
}
PLANS = test_parity.PLANS | SHARDED | LANES
#: Communicators of a device, where sets of holders are to have none.
FEW = 5


def worker(device: str, store: Any, plan: Plan) -> dict[str, Any]:
    """One member of the plan, on a vgpu of its own."""
    vgpu.load()
    accelerator = Accelerator(f"vgpu:{plan.rank(device)}")
    accelerator.use()
    groups = PlanGroups("plan/1", device, "127.0.0.1", store)
    made: list[StrictGroups] = []
    connect = connected(made)
    with vgpu.counting(plan.rank(device)) as spent:
        found = test_parity.trained(device, plan, groups, accelerator, connect)
    log = made[0].log.entries
    counts = {"launches": spent.launches, "waits": spent.synchronizations, "communicators": made[0].made}
    return found | counts | {"noted": vgpu.settled_errors(), "log": log}


def worker_with_few(device: str, store: Any, plan: Plan) -> dict[str, Any]:
    """The same, of which gradients of most sets of holders have no communicator."""
    channels.MOST = FEW
    return worker(device, store, plan)


@pytest.mark.slow
def test_gradients_of_sets_without_a_communicator_go_as_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    vgpu.needed()
    monkeypatch.setattr(channels, "MOST", FEW)
    plan = PLANS["three lanes of unlike width beside a deeper pipeline, zero 2"]
    layouts = Layouts(test_parity.make_recipe().model.spec, plan)
    own, sets = channels.own_sets(layouts), {each.devices for each in reductions(layouts)}
    assert own < {devices for devices in sets if len(devices) > 1}
    check(plan, "worker_with_few")


@pytest.mark.slow
@pytest.mark.parametrize("name", sizes.beside((*HERE, "2 + 1, uneven, in two stages, zero 0"), PLANS))
def test_a_layout_on_the_device_trains_like_one_process_on_the_cpu(name: str) -> None:
    vgpu.needed()
    check(PLANS[name])


def check(plan: Plan, member: str = "worker") -> None:
    """Trains under a plan, in a process for each device, and looks at all that is promised."""
    results = gang.run(__file__, member, plan.members, plan)
    test_parity.check(plan, results)
    for device, result in results.items():
        assert result["launches"] > 100, f"{device} computed on the CPU"
        assert not result["noted"], device
    assert deadlock({device: result["log"] for device, result in results.items()}) is None
    recipe = test_parity.make_recipe()
    predicted = [
        launches(Layouts(recipe.model.spec, plan), recipe.feed.batch(plan, step), recipe.schedule)
        for step in range(test_parity.STEPS)
    ]
    listed = channels.channels_by_device(Layouts(recipe.model.spec, plan))
    for device, result in results.items():
        assert result["communicators"] == len(listed[device])
        assert told(result["log"]) == [at for step in predicted for at in told(step[device])], device
