"""Placed experts over lanes, with balance, on a device that is not the CPU and under the rules of NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan

from elasticd.models import next_token_loss
from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.engine.engine import Engine, first_state
from tests.accelerators import vgpu
from tests.accelerators.strict_process_group import StrictGroups, connected
from tests.integration.train_experts import BALANCE, whole
from tests.models.layouts import SEED, Training
from tests.models.mixture import LAYERS, VOCABULARY
from tests.models.test_balance import one_process
from tests.models.test_experts import NEAR, PLACED
from tests.models.texts import Text
from tests.planner.launch_order import deadlock
from tests.runtime import gang
from tests.runtime.test_engine_parity import unpaced

STEPS = 2


def training(**options: Any) -> Training:
    given = {"model": whole(LAYERS).describe(), "loss": next_token_loss, "dataset": Text(VOCABULARY)}
    return Training(**given, steps=STEPS, options={"balance": BALANCE} | options)


def worker(device: str, store: Any, plan: Plan) -> dict[str, Any]:
    """One member of the plan, on a vgpu of its own."""
    vgpu.load()
    accelerator = Accelerator(f"vgpu:{plan.rank(device)}")
    accelerator.use()
    made: list[StrictGroups] = []
    groups = PlanGroups("plan/1", device, "127.0.0.1", store)
    recipe = training(accelerator=accelerator, connect=connected(made)).recipe()
    layouts = Layouts(recipe.model.spec, plan)
    with vgpu.counting(plan.rank(device)) as spent:
        engine = Engine(recipe, layouts, groups, unpaced)
        engine.adopt(first_state(recipe.model, layouts, device, SEED, None, accelerator))
        votes = [engine.step(step, lambda: 0).outcome.vote for step in range(STEPS)]
        engine.settle()
    held = {
        name: [(box, parameter.part(box).cpu()) for box in parameter.boxes]
        for name, parameter in engine.module.local.parameters.items()
    }
    said = {"losses": [vote.loss for vote in votes], "balances": [vote.balance for vote in votes]}
    return said | {"held": held, "launches": spent.launches, "log": made[0].log.entries}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["over lanes, two stages"])
def test_placed_experts_train_on_the_device_as_in_one_process(name: str) -> None:
    vgpu.needed()
    plan, alone = PLACED[name], whole(LAYERS)
    results = gang.run(__file__, "worker", plan.members, plan)
    blocks = [(block.router, block.experts, block.shift) for block in alone.blocks]
    (losses, weights), balances, _ = one_process(training(), alone, BALANCE, blocks)
    assert deadlock({device: result["log"] for device, result in results.items()}) is None
    for device, result in results.items():
        assert result["launches"] > 100, f"{device} computed on the CPU"
        assert result["losses"] == pytest.approx(losses, rel=NEAR)
        assert result["balances"] == pytest.approx(balances, rel=NEAR)
        for full, parts in result["held"].items():
            for box, value in parts:
                expected = weights[full][box.slices(Box.whole(weights[full].shape))]
                assert torch.allclose(value, expected, rtol=0, atol=NEAR), (device, full)
