"""Half precision between processes: over gloo's own sums and messages, as among threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from elasticd_migration.local_state import LocalState
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import StatePolicy

from elasticd.runtime.comm.groups import PlanGroups
from tests import sizes
from tests.models.layouts import plan_of, stage
from tests.models.precise import alone, apart, engine_of, together
from tests.models.test_mixed_precision_matrix import NEAR, course
from tests.runtime import gang

pytestmark = pytest.mark.slow

#: A TP group beside a pipeline of two stages, state apart from values.
PLAN = plan_of(
    (3, [stage(0, 1, ("a/0", 1)), stage(1, 4, ("a/1", 2), ("a/2", 1))]),
    (5, [stage(0, 4, ("b/0", 1))]),
).replace(state=StatePolicy(zero=1, replicas=2))
HALVES = ("bf16", "fp16")


def worker(device: str, store: Any, precision: str) -> tuple[list[float], LocalState]:
    torch.set_num_threads(1)
    made, _ = course("gpt", precision, "adamw")
    plan_groups: Any = PlanGroups("plan/1", device, "127.0.0.1", store)
    engine = engine_of(made, PLAN, plan_groups)
    losses = [engine.step(step, lambda: 0).outcome.vote.loss for step in range(made.training.steps)]
    engine.settle()
    return losses, engine.state()


@pytest.mark.parametrize("precision", sizes.beside(["fp16"], HALVES))
def test_processes_train_like_one(precision: str) -> None:
    made, _ = course("gpt", precision, "adamw")
    expected = alone(made)
    results = gang.run(__file__, "worker", PLAN.members, precision, seconds=400)
    for losses, _ in results.values():
        assert losses == pytest.approx(expected.losses, rel=NEAR[precision])
    states = {device: state for device, (_, state) in results.items()}
    found = together(Layouts(made.recipe().model.spec, PLAN), states)
    assert apart(made, type(expected)(losses=[], weights=found, applied=[]), expected) < NEAR[precision]
