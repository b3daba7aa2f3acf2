"""What a step of one device costs on an accelerator, beside a plain loop: waits of the host, and launches."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import Plan

from elasticd.models import Decoder, next_token_loss
from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, MemoryWorld
from elasticd.runtime.data.collate import pad
from elasticd.runtime.engine.engine import Engine, first_state
from tests import sizes
from tests.accelerators import vgpu
from tests.accelerators.strict_process_group import connected
from tests.accelerators.test_training import PLANS
from tests.runtime import gang
from tests.runtime.test_engine_parity import CLIP, CONFIG, SEED, Text, make_recipe, plan_of, stage, unpaced

#: Waits of the host in a step beyond those of the user's own code; launches as a multiple of the plain loop's.
WAITS, LAUNCHES = 2, 1.03
#: ZeRO 2 with pipelines of unlike depth; `make test-all` has all layouts.
HERE = ("pipelines of 2 and 3 stages, zero 2",)
#: In these layouts devices that keep such state.
ASKING = ("c/0",)
#: Steps before the one that counts: optimizers make their state in the first.
WARM = 2


def in_a_plain_loop(device: torch.device) -> vgpu.Counts:
    """Of one step: the same micro-batches, gradients added up, divided once, clipped."""
    model = Decoder(CONFIG).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    recipe = make_recipe()
    for step in range(WARM + 1):
        with vgpu.counting() as spent:
            total = torch.zeros((), dtype=torch.float64, device=device)
            count = torch.zeros((), dtype=torch.int64, device=device)
            for index in recipe.sampler.samples(step):
                batch = {
                    key: value.pin_memory().to(device, non_blocking=True)
                    for key, value in pad([Text()[index]]).items()
                }
                loss, targets = next_token_loss(model(batch), batch)
                loss.backward()
                total += loss.detach()
                count += targets
            gradients = [parameter.grad for parameter in model.parameters()]
            torch._foreach_div_(gradients, count)
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return spent


def in_the_engine(accelerator: Accelerator) -> vgpu.Counts:
    plan, recipe = plan_of((8, [stage(0, 6, ("a/0", 1))])), make_recipe(accelerator)
    layouts = Layouts(recipe.model.spec, plan)
    groups = cast(PlanGroups, MemoryPlanGroups(MemoryWorld(), "a/0"))
    engine = Engine(recipe, layouts, groups, unpaced)
    engine.adopt(first_state(recipe.model, layouts, "a/0", SEED, accelerator=accelerator))
    for step in range(WARM + 1):
        with vgpu.counting() as spent:
            engine.step(step, lambda: 0)
    return spent


def counted(name: str, store: object) -> tuple[tuple[int, int], tuple[int, int]]:
    """Waits and launches of the plain loop, and of the engine, in a process of its own."""
    vgpu.load()
    accelerator = Accelerator("vgpu:0")
    accelerator.use()
    each = in_a_plain_loop(accelerator.device), in_the_engine(accelerator)
    plain, ours = ((spent.synchronizations, spent.launches) for spent in each)
    return plain, ours


def test_a_step_of_one_device_costs_what_a_plain_loop_costs() -> None:
    vgpu.needed()
    (found,) = gang.run(__file__, "counted", ["alone"]).values()
    (plain_waits, plain), (waits, launches) = found
    assert plain > 1000
    assert waits <= plain_waits + WAITS
    assert waits == 0, "our decoder and its loss ask for nothing"
    assert launches <= LAUNCHES * plain


def counted_in_a_plan(device: str, store: Any, plan: Plan) -> tuple[int, int]:
    """Waits and launches of one member of a plan in a step, under NCCL's rules."""
    vgpu.load()
    accelerator = Accelerator(f"vgpu:{plan.rank(device)}")
    accelerator.use()
    groups = PlanGroups("plan/1", device, "127.0.0.1", store)
    recipe = make_recipe(accelerator, connected([]))
    layouts = Layouts(recipe.model.spec, plan)
    engine = Engine(recipe, layouts, groups, unpaced)
    engine.adopt(first_state(recipe.model, layouts, device, SEED, accelerator=accelerator))
    for step in range(WARM + 1):
        with vgpu.counting(plan.rank(device)) as spent:
            engine.step(step, lambda: 0)
    engine.settle()
    return spent.synchronizations, spent.launches


@pytest.mark.slow
@pytest.mark.parametrize("name", sizes.beside(HERE, PLANS))
def test_a_member_of_a_plan_waits_for_its_device_once(name: str) -> None:
    """It polls an event, which is no synchronization. A device that keeps state of parameters that it does not
    compute with asks which of them got a gradient."""
    vgpu.needed()
    plan = PLANS[name]
    found = gang.run(__file__, "counted_in_a_plan", plan.members, plan)
    assert {device: waits for device, (waits, _) in found.items() if waits > WAITS} == {}
    assert not any(waits for device, (waits, _) in found.items() if device not in ASKING)
