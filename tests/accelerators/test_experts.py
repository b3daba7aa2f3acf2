"""Placed experts over lanes, with balance, on a device that is not the CPU and under the rules of NCCL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan
from torch import Tensor

from elasticd import Balance
from elasticd.models import next_token_loss
from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.engine.engine import Engine, first_state
from tests.accelerators import vgpu
from tests.accelerators.strict_process_group import StrictGroups, connected
from tests.integration.train_experts import BALANCE, whole
from tests.models import mixture
from tests.models.layouts import SEED, Training, plan_of
from tests.models.mixture import EXPERTS, LAYERS, VOCABULARY, Mixture, StackedExperts
from tests.models.test_balance import one_process
from tests.models.test_experts import NEAR, PLACED, placed
from tests.models.texts import Text
from tests.planner.launch_order import deadlock
from tests.runtime import gang
from tests.runtime.test_engine_parity import stage, unpaced

STEPS = 2
#: Passes of a device in a step, of two blocks with experts, and the experts of two devices.
PASSES, BLOCKS, HALVES = 3, 2, (tuple(range(0, EXPERTS, 2)), (0, *range(1, EXPERTS, 2)))
TWO, COLUMNS = ("a/0", "a/1"), "columns of each expert in one lane"
_LANE = stage(0, BLOCKS, *((device, 1) for device in TWO))
WAITING: dict[str, Plan] = {
    COLUMNS: plan_of((PASSES, [_LANE])),
    "placed experts of one lane": plan_of(
        (PASSES, [msgspec.structs.replace(placed(_LANE, HALVES), slowdowns=(64, 96))])
    ),
    "experts that lanes share": plan_of(
        ((PASSES, PASSES - 1), [placed(msgspec.structs.replace(_LANE, lanes=(1, 1)), HALVES)])
    ),
}


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


class GatheredExperts(StackedExperts):
    """Experts whose own code makes no host wait."""

    def forward(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(rows)
        for slot in range(index.shape[1]):
            own = index[:, slot]
            hidden = (F.silu(torch.bmm(rows[:, None], self.up[own])) @ self.down[own])[:, 0]
            hidden = hidden if self.bias is None else hidden + self.bias[own]
            output = output + hidden * weights[:, slot, None]
        return output


def waits(device: str, store: Any) -> dict[str, float]:
    """Host waits of one of two members for a block and pass with experts, under each plan of `WAITING`."""
    vgpu.load()
    accelerator = Accelerator(f"vgpu:{device[-1]}")
    accelerator.use()
    counted = {}
    for name, plan in WAITING.items():
        model = Mixture()
        model.blocks = model.blocks[:BLOCKS]
        for block in model.blocks:
            block.experts.__class__ = GatheredExperts
            if name == COLUMNS:
                block.experts.bias = None
        described = model.describe(**({"rules": mixture.COLUMNS, "units": {}} if name == COLUMNS else {}))
        given = Training(model=described, loss=next_token_loss, dataset=Text(VOCABULARY))
        balance = Balance(loss=0.05, router="blocks.*.router")
        options = {"accelerator": accelerator, "connect": connected([]), "balance": balance}
        recipe = replace(given, batch=plan.global_batch, options=options).recipe()
        layouts = Layouts(recipe.model.spec, plan)
        engine = Engine(recipe, layouts, PlanGroups(name, device, "127.0.0.1", store), unpaced)
        engine.adopt(first_state(recipe.model, layouts, device, SEED, None, accelerator))
        for step in range(STEPS):
            with vgpu.counting(plan.rank(device)) as spent:
                engine.step(step, lambda: 0)
        engine.settle()
        counted[name] = spent.synchronizations / (PASSES * BLOCKS)
    return counted


def most_waits() -> dict[str, float]:
    """Of the member that waits most."""
    found = gang.run(__file__, "waits", TWO)
    return {name: max(each[name] for each in found.values()) for name in WAITING}


@pytest.mark.slow
def test_the_host_waits_once_for_the_rows_of_a_block_and_pass() -> None:
    """The experts' own code makes no wait here."""
    vgpu.needed()
    assert most_waits() == {COLUMNS: 0, "placed experts of one lane": 1, "experts that lanes share": 1}
