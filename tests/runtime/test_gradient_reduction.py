"""Gradients of sets of devices without a communicator go as messages, and layouts train as before."""

from __future__ import annotations

from itertools import product
from typing import cast

import pytest
from elasticd_planner.layout import channels
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import StatePolicy

from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads
from tests import sizes
from tests.runtime import test_engine_parity, test_messages
from tests.runtime.test_lanes import PLANS as LANES

MIXED = test_messages.MIXED
PLANS = {
    "tp3+tp1 beside tp2": test_engine_parity.PLANS["tp3+tp1 beside tp2"],
    "lanes, zero 1": LANES[MIXED].replace(state=StatePolicy(zero=1, replicas=2)),
    "lanes, zero 2": LANES[MIXED].replace(state=StatePolicy(zero=2, replicas=1)),
}


@pytest.mark.parametrize(
    ("name", "most"),
    sizes.beside([("tp3+tp1 beside tp2", 1), ("lanes, zero 2", 5)], list(product(PLANS, [1, 5]))),
)
def test_it_trains_like_one_process(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MOST", most)
    plan = PLANS[name]
    spec = test_engine_parity.make_recipe().model.spec
    own = channels.own_sets(Layouts(spec, plan))
    assert (most == 1) == (not own)
    found = run_threads(
        plan.members, lambda memory: test_engine_parity.trained(memory.me, plan, cast(PlanGroups, memory))
    )
    test_engine_parity.check(plan, found)


@pytest.mark.parametrize("name", sizes.beside(["plain", "bf16"], ["plain", "bf16", "no update"]))
def test_every_rank_launches_what_the_plan_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MOST", 4)
    test_messages.test_every_rank_launches_what_the_plan_says_with_an_evaluation_after_each_step(name)
