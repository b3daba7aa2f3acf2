"""A rank makes what its own part of a plan needs and nothing else: modules, state and process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from elasticd_planner.layout.layouts import Layouts, sections_of
from elasticd_planner.spec.plan import Plan
from torch import nn

from elasticd.models import Decoder
from elasticd.runtime.comm.in_memory import MemoryGroup, MemoryPlanGroups, MemoryWorld, run_threads
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.local_model import local_model
from tests import sizes
from tests.planner.drawn_plans import drawn_plan
from tests.planner.launch_order import Launch
from tests.planner.launches import launches
from tests.runtime.test_engine import engine_on
from tests.runtime.test_engine_parity import BATCH, CONFIG, make_recipe, stage

DEVICES = tuple(f"n{node}/{local}" for node in range(3) for local in range(3))
SEEDS = sizes.beside(range(2), range(40))


def drawn(seed: int) -> Plan:
    return drawn_plan(seed, layers=CONFIG.layers, devices=DEVICES, micro_batches=BATCH)


class CountedGroups(MemoryPlanGroups):
    """Notes the groups that are made."""

    def __init__(self, world: MemoryWorld, me: str) -> None:
        super().__init__(world, me)
        self.made: set[str] = set()

    def group(self, members: Sequence[str], label: str) -> MemoryGroup:
        self.made.add(f"{label} {' '.join(members)}")
        return super().group(members, label)


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_are_made_for_the_sets_that_talk_and_no_others(seed: int) -> None:
    plan = drawn(seed)

    def member(groups: MemoryPlanGroups) -> set[str]:
        counted = CountedGroups(groups.world, groups.me)
        engine = engine_on(counted, make_recipe(), plan)
        engine.step(0, lambda: 0)
        engine.settle()
        return counted.made

    made, recipe = run_threads(plan.members, member), make_recipe()
    layouts = Layouts(recipe.model.spec, plan)
    logs = launches(layouts, recipe.feed.dealing(plan, 0)(), recipe.schedule)
    for device in plan.members:
        named = {entry.communicator for entry in logs[device] if isinstance(entry, Launch)}
        sets = {name for name in named if name.startswith(("tensor ", "reduce "))}
        assert made[device] == {*sets, f"vote {' '.join(plan.members)}"}


@pytest.mark.parametrize("seed", SEEDS)
def test_modules_and_state_are_of_the_boxes_that_the_rank_holds(seed: int) -> None:
    plan, recipe = drawn(seed), make_recipe()
    assert all(p.is_meta for module in recipe.model.sections.values() for p in module.parameters())
    layouts = Layouts(recipe.model.spec, plan)
    engines = {device: made(recipe, layouts, device) for device in plan.members}
    for device, engine in engines.items():
        place = plan.places.get(device)
        sections = () if place is None else sections_of(recipe.model.spec, plan.stage(place))
        assert tuple(engine.module.local.modules) == sections
        tensors = {
            id(tensor): tensor
            for module in engine.module.local.modules.values()
            for tensor in (*module.parameters(), *module.buffers())
        }
        assert not any(tensor.is_meta for tensor in tensors.values())
        assert elements(tensors.values()) == sum(
            box.size for boxes in layouts.of(device).values() for box in boxes
        )
        values = [parameter for held in engine.module.zero.values.values() for _, parameter in held]
        kept = {item: boxes for item, boxes in layouts.held(device).items() if item.role == "value"}
        assert elements(values) == sum(box.size for boxes in kept.values() for box in boxes)


def made(recipe: Recipe, layouts: Layouts, device: str) -> Engine:
    return Engine(recipe, layouts, MemoryPlanGroups(MemoryWorld(), device), lambda *_: None)


def elements(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors)


def test_no_parameter_of_the_full_model_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is not on meta either: a section may be larger than what is left of the memory."""
    model = Decoder(CONFIG).describe()
    before = {name: parameter for s, m in model.sections.items() for name, parameter in m.named_parameters(s)}

    def copied(parameter: nn.Parameter, memo: object) -> None:
        raise AssertionError(f"a parameter of {tuple(parameter.shape)} is copied")

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", copied)
    local = local_model(model, stage(0, CONFIG.layers, ("a/0", 1), ("a/1", 1)), 0)
    after = {name: parameter for s, m in model.sections.items() for name, parameter in m.named_parameters(s)}
    assert {name: id(parameter) for name, parameter in after.items()} == {
        name: id(parameter) for name, parameter in before.items()
    }
    mine = {id(parameter) for module in local.modules.values() for parameter in module.parameters()}
    assert mine == {id(parameter) for _, parameter in local.parameters.values()}
    assert mine.isdisjoint(map(id, before.values()))
