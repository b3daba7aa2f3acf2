"""Which plan's groups are let go when; groups themselves are in test_groups."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticd.machines.worker import switch as sw
from elasticd.runtime.comm.groups import DataPlane, PlanGroups
from elasticd.runtime.comm.groups_by_plan import GroupsByPlan
from elasticd.runtime.switch.switcher import Switcher


class Parked:
    """Stands for a plan's groups: how often they were let go, and whether their threads were free before."""

    def __init__(self) -> None:
        self.times, self.freed, self.dead = 0, False, False
        self.planes: list[DataPlane] = []

    def shut_sockets(self) -> None:
        self.freed = self.times == 0

    def park(self) -> threading.Thread:
        self.times += 1
        thread = threading.Thread(target=lambda: None)
        thread.start()
        return thread


def spend(groups_by_plan: GroupsByPlan, *, now: bool) -> Parked:
    plan_groups = Parked()
    groups_by_plan.add(1, cast(PlanGroups, plan_groups))
    groups_by_plan.spent(cast(PlanGroups, plan_groups), now=now)
    return plan_groups


def test_what_is_spent_waits_for_the_first_step_unless_it_is_to_go_now() -> None:
    groups_by_plan = GroupsByPlan()
    assert spend(groups_by_plan, now=True).times == 1
    later = spend(groups_by_plan, now=False)
    assert later.times == 0
    groups_by_plan.release_spent()
    groups_by_plan.release_spent()
    assert later.times == 1


def test_a_second_switch_before_that_step_lets_the_first_ones_groups_go() -> None:
    groups_by_plan = GroupsByPlan()
    first = spend(groups_by_plan, now=False)
    second = spend(groups_by_plan, now=False)
    assert (first.times, second.times) == (1, 0)


def test_the_end_frees_who_waits_and_lets_go_of_what_is_spent_once() -> None:
    groups_by_plan = GroupsByPlan()
    plan_groups = spend(groups_by_plan, now=False)
    groups_by_plan.end()
    assert (plan_groups.times, plan_groups.freed) == (1, True)


@pytest.mark.parametrize("switched_to", [False, True])
def test_a_copy_that_is_dropped_takes_the_groups_of_its_move_along_unless_they_went_after_the_switch(
    switched_to: bool,
) -> None:
    """A verified copy of a plan in doubt is kept for the recovery, and with it what its move was made over."""
    nothing: Any = None
    control: Any = SimpleNamespace(welcome=SimpleNamespace(device="alpha/0", address="127.0.0.1"))
    switcher = Switcher(nothing, control, nothing, nothing)
    own, transition = Parked(), Parked()
    for plan_groups in (own, transition):
        switcher._groups_by_plan.add(7, cast(PlanGroups, plan_groups))
    engine: Any = SimpleNamespace(plan_groups=own)
    switcher._copies.keep(7, engine, 5)
    if switched_to:
        switcher._groups_by_plan.spent(cast(PlanGroups, transition), now=True)
    else:
        switcher._prepared[7] = cast(Any, SimpleNamespace(engine=engine, transition=transition))
    switcher._do(sw.DropOld())  # not: at the end of the process
    assert (own.times, transition.times) == (1, 1)
    assert not switcher._prepared
