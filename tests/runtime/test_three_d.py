"""Data, tensor and pipeline parallelism of two each over two nodes train like one process, with ZeRO 0 to 2."""

from __future__ import annotations

from typing import Any, cast

import pytest
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.plan import StatePolicy

from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads
from tests import sizes
from tests.runtime import gang, test_engine_parity
from tests.runtime.test_engine_parity import plan_of, stage

#: TP inside a node, a pipeline's stages on two nodes: a mesh (pp, dp, tp) of 2 x 2 x 2.
PLAN = plan_of(
    (4, [stage(0, 3, ("a/0", 1), ("a/1", 1)), stage(3, 6, ("b/0", 1), ("b/1", 1))]),
    (4, [stage(0, 3, ("a/2", 1), ("a/3", 1)), stage(3, 6, ("b/2", 1), ("b/3", 1))]),
)
PLANS = {
    f"2 x 2 x 2, zero {zero}": PLAN.replace(state=StatePolicy(zero=zero, replicas=1 if zero else None))
    for zero in (0, 1, 2)
}
#: Each emulated node has an address of its own.
ADDRESSES = {"a": "127.0.0.1", "b": "127.0.0.2"}


def worker(device: str, store: Any, plan: Any) -> dict[str, Any]:
    """As one of eight processes, over gloo."""
    return test_engine_parity.trained(
        device, plan, PlanGroups("plan/1", device, ADDRESSES[node_of(device)], store)
    )


@pytest.mark.parametrize("name", sizes.beside(["2 x 2 x 2, zero 1"], PLANS))
def test_three_dimensions_train_like_one_process(name: str) -> None:
    plan = PLANS[name]
    assert {(len(p.stages), len(s.devices)) for p in plan.pipelines for s in p.stages} == {(2, 2)}
    assert len(plan.pipelines) == 2
    found = run_threads(
        plan.members, lambda memory: test_engine_parity.trained(memory.me, plan, cast(PlanGroups, memory))
    )
    test_engine_parity.check(plan, found)


@pytest.mark.slow
@pytest.mark.full  # tests/integration/test_three_d.py has processes
@pytest.mark.parametrize("name", PLANS)
def test_eight_processes_on_two_nodes_train_like_one(name: str) -> None:
    test_engine_parity.check(PLANS[name], gang.run(__file__, "worker", PLANS[name].members, PLANS[name]))
