"""Parameters without dimensions are parameters: master weights and moments go through switches to the bit, and
averages and exports have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from elasticd_migration.local_state import LocalState
from elasticd_migration.migrate import migrate
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.layout.layouts import Layouts

import elasticd
from elasticd.runtime.api.full_state_dict import gathered
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.engine.parallelism import ParallelismOptions
from tests.runtime.test_engine import engine_on
from tests.runtime.test_optimizer_groups import PLANS, recipe

SCALE = "blocks.1.scale"


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-4, weight_decay=0.0)


def averaging(named: Any) -> torch.optim.Optimizer:
    return elasticd.average(torch.optim.AdamW(named, lr=0.1), 0.9)


def owned(engine: Engine) -> list[tuple[float, dict[str, Any]]]:
    """Values and moments of the scale where this device keeps them."""
    return [
        (
            float(part.parameter.detach()),
            {k: float(v) for k, v in engine.optimizer.state[part.parameter].items()},
        )
        for part in engine.owned
        if part.name == SCALE and not part.box.empty
    ]


@pytest.mark.parametrize("after", ["TP 2 beside two stages", "ZeRO 2"])
def test_master_weight_and_moments_go_through_a_switch_to_the_bit(after: str) -> None:
    before, then = PLANS["one device"], PLANS[after].replace(number=2)
    job = recipe(adamw, parallelism=ParallelismOptions(precision="bf16"))
    transports = dict(zip(then.members, MemoryTransport.connect(then.members, timeout=60.0), strict=True))

    def worker(plan_groups: MemoryPlanGroups) -> Any:
        me, state, kept = plan_groups.me, LocalState(), []
        if me in before.members:
            engine = engine_on(plan_groups, job, before)
            for step in range(4):
                engine.step(step, lambda: 0)
            state, kept = engine.state(), owned(engine)
        old, new = (Layouts(job.model.spec, plan) for plan in (before, then))
        moved = migrate(old, new, state, transports[me])
        return kept, owned(engine_on(plan_groups, job, then, moved.state))

    results = run_threads(then.members, worker)
    (expected,) = results["a/0"][0]
    assert expected[0] not in (0.0, 1.0), "it moved, by less than bf16 shows"
    kept = [value for _, after_switch in results.values() for value in after_switch]
    assert kept
    assert all(value == expected for value in kept)


def test_averages_and_exports_have_them() -> None:
    job = recipe(averaging)

    def worker(plan_groups: MemoryPlanGroups) -> Any:
        engine = engine_on(plan_groups, job, PLANS["one device"])
        for step in range(4):
            engine.step(step, lambda: 0)
        return tuple(gathered(engine, content) for content in ("value", "average", "all"))

    value, average, everything = run_threads(("a/0",), worker)["a/0"]
    assert abs(float(value[SCALE]) - float(average[SCALE])) > 1e-2
    assert everything[f"optimizer.state.{SCALE}.exp_avg"].shape == ()
