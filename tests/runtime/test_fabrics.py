"""Which fabrics are let go when; groups themselves are in test_groups."""

from __future__ import annotations

import threading
from typing import cast

from elasticd.runtime.comm.groups import Fabric
from elasticd.runtime.comm.plan_groups import Fabrics


class Parked:
    """Stands for a fabric: knows how often it was let go, and whether who waited in it was free before."""

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


def spend(fabrics: Fabrics, *, now: bool) -> Parked:
    fabric = Parked()
    fabrics.add(1, cast(Fabric, fabric))
    fabrics.spent(cast(Fabric, fabric), now=now)
    return fabric


def test_what_is_spent_waits_for_the_first_step_unless_it_is_to_go_now() -> None:
    fabrics = Fabrics()
    assert spend(fabrics, now=True).times == 1
    later = spend(fabrics, now=False)
    assert later.times == 0
    fabrics.release_spent()
    fabrics.release_spent()
    assert later.times == 1


def test_a_second_switch_before_that_step_lets_the_first_ones_groups_go() -> None:
    fabrics = Fabrics()
    first = spend(fabrics, now=False)
    second = spend(fabrics, now=False)
    assert (first.times, second.times) == (1, 0)


def test_the_end_frees_who_waits_and_lets_go_of_what_is_spent_once() -> None:
    fabrics = Fabrics()
    fabric = spend(fabrics, now=False)
    fabrics.end()
    assert (fabric.times, fabric.freed) == (1, True)
