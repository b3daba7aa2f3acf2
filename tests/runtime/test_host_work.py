"""A step has no work of the host's that training does not need: calls are counted."""

from __future__ import annotations

from typing import cast

from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, MemoryWorld
from tests.runtime.test_engine import engine_on
from tests.runtime.test_parity import make_recipe, plan_of, stage


def test_nothing_of_ours_is_hooked_to_a_section_alone_on_its_parameters() -> None:
    memory = cast(PlanGroups, MemoryPlanGroups(MemoryWorld(), "a/0"))
    engine = engine_on(memory, make_recipe(), plan_of((8, [stage(0, 6, ("a/0", 1))])))
    for step in range(4):
        engine.step(step, lambda: 0)
    tables = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_backward_hooks")
    for section, module in engine.local.modules.items():
        assert not any(getattr(module, table) for table in tables), section
