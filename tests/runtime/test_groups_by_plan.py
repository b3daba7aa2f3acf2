"""Which plan's groups are let go when; groups themselves are in test_groups."""

from __future__ import annotations

import threading
from typing import cast

from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.groups_by_plan import GroupsByPlan


class Parked:
    """Stands for a plan's groups: how often they were let go, and whether their threads were free before."""

    def __init__(self) -> None:
        self.times, self.freed, self.dead = 0, False, False

    def shut(self) -> int:
        self.freed = self.times == 0
        return 0

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
