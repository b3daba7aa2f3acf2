"""Parameter groups by name: their settings survive a switch to any layout, and a scheduler's work too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from elasticd_migration.local_state import LocalState
from elasticd_migration.migrate import migrate
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan, StatePolicy

import elasticd
from elasticd.models import Decoder, next_token_loss
from elasticd.runtime.api.ema import AVERAGE
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.data.collate import pad
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.engine.recipe import Recipe
from tests.runtime.test_engine import TWO_STAGES, UNEQUAL, engine_on
from tests.runtime.test_engine_parity import CONFIG, SEED, Text, make_recipe

STEPS = 4
RATES = (1e-2, 3e-3)


def optimizer(named: Any) -> torch.optim.Optimizer:
    """Decay for matrices alone; the embedding learns more slowly; a running mean beside."""
    decayed, plain, slow = [], [], []
    for name, parameter in named:
        (slow if name.startswith("embed.") else plain if "norm" in name else decayed).append((name, parameter))
    groups = [
        {"params": decayed, "weight_decay": 0.1, "lr": RATES[0]},
        {"params": plain, "weight_decay": 0.0, "lr": RATES[0]},
        {"params": slow, "weight_decay": 0.0, "lr": RATES[1], "betas": (0.8, 0.99)},
    ]
    return elasticd.average(torch.optim.AdamW(groups), 0.5)


def scheduler(made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(made, gamma=0.5)


def recipe() -> Recipe:
    return replace(make_recipe(), optimizer=optimizer, scheduler=scheduler, clip=None)


def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    model, made = Decoder(CONFIG), recipe()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(made.model.first_value(name, Box.whole(parameter.shape), SEED))
    update = optimizer(model.named_parameters())
    rates = scheduler(update)
    losses = []
    for step in range(STEPS):
        batch = pad([Text()[i] for i in made.sampler.samples(step)])
        total, count = next_token_loss(model(batch), batch)
        update.zero_grad()
        (total / count).backward()
        update.step()
        rates.step()
        losses.append(float(total.detach()) / count)
    return losses, {name: update.state[p][AVERAGE] for name, p in model.named_parameters()}


def settings(engine: Engine) -> list[tuple[float, float, tuple[float, float]]]:
    return [(g["lr"], g["weight_decay"], tuple(g["betas"])) for g in engine.optimizer.param_groups]


@pytest.mark.parametrize("zero", [0, 2])
def test_groups_settings_and_the_average_survive_a_switch(zero: int) -> None:
    """Half of the steps under one plan, half under another that has fewer and other devices' shares."""
    before = UNEQUAL.replace(state=StatePolicy(zero=zero, replicas=1 if zero else None))
    after = TWO_STAGES.replace(number=2, state=before.state)
    members = tuple(dict.fromkeys((*before.members, *after.members)))
    transports = dict(zip(members, MemoryTransport.connect(members, timeout=180.0), strict=True))
    losses, averages = plain()

    def worker(plan_groups: MemoryPlanGroups) -> dict[str, Any]:
        made, me = recipe(), plan_groups.me
        engine = engine_on(plan_groups, made, before) if me in before.members else None
        found: dict[str, Any] = {"losses": [], "kept": {}}
        for step in range(STEPS // 2):
            if engine is not None:
                found["losses"].append(engine.step(step, lambda: 0).outcome.vote.loss)
        state = engine.state() if engine is not None else LocalState()
        old, new = (Layouts(made.model.spec, plan) for plan in (before, after))
        moved = migrate(old, new, state, transports[me])
        if me not in after.members:
            return found
        engine = engine_on(plan_groups, made, after)
        assert [lr for lr, *_ in settings(engine)] == [RATES[0], RATES[0], RATES[1]]
        engine.adopt(moved.state)
        decayed = 0.5 ** (STEPS // 2)
        assert settings(engine) == [
            (RATES[0] * decayed, 0.1, (0.9, 0.999)),
            (RATES[0] * decayed, 0.0, (0.9, 0.999)),
            (RATES[1] * decayed, 0.0, (0.8, 0.99)),
        ]
        for step in range(STEPS // 2, STEPS):
            found["losses"].append(engine.step(step, lambda: 0).outcome.vote.loss)
        for name, box, parameter in engine.owned:
            if not box.empty:
                found["kept"][name, box] = engine.optimizer.state[parameter][AVERAGE].cpu()
        return found

    results = run_threads(members, worker)
    assert results["a/0"]["losses"] == pytest.approx(losses, abs=1e-10)
    held = [pair for each in results.values() for pair in each["kept"].items()]
    assert {name for (name, _), _ in held} == set(averages)
    for (name, box), kept in held:
        expected = averages[name][box.slices(Box.whole(averages[name].shape))]
        assert float((kept - expected).abs().max()) < 1e-10, name


def test_groups_that_mix_what_had_different_settings_are_refused() -> None:
    def mixed(named: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(named))

    plan: Plan = TWO_STAGES

    def worker(plan_groups: MemoryPlanGroups) -> None:
        engine = engine_on(plan_groups, recipe(), plan)
        engine.step(0, lambda: 0)
        state = engine.state()
        other = engine_on(plan_groups, replace(recipe(), optimizer=mixed, scheduler=None), plan)
        with pytest.raises(ValueError, match="let the optimizer's function group parameters by name alone"):
            other.adopt(state)

    run_threads(plan.members, worker)
