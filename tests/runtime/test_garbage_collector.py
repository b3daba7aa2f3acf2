"""Full garbage collections fall on the same steps of all ranks, and none into another one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from elasticd.runtime.garbage_collector import EVERY, GarbageCollector


class Cycle:
    """Refers to itself, as the modules of a plan do."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def full() -> Iterator[Callable[[], int]]:
    """The number of full collections."""
    count = 0

    def look(phase: str, info: dict[str, int]) -> None:
        nonlocal count
        count += phase == "start" and info["generation"] == 2

    frozen, threshold = gc.get_freeze_count(), gc.get_threshold()
    gc.callbacks.append(look)
    yield lambda: count
    gc.callbacks.remove(look)
    assert gc.get_threshold() == threshold, "as it was"
    gc.unfreeze()
    if frozen:
        gc.freeze()  # what the test run had put aside


def test_what_a_plan_needs_is_put_aside_and_all_collect_at_the_same_steps(full: Callable[[], int]) -> None:
    collector = GarbageCollector()
    collector.stepped(1, 997)
    before = gc.get_freeze_count()
    collector.stepped(1, 998)
    assert gc.get_freeze_count() > before
    assert gc.get_threshold()[2] > 1 << 20, "no full collection comes by itself"
    collector.stepped(1, 999)
    assert full() == 0
    collector.stepped(1, EVERY)
    assert full() == 1
    collector.release()
    assert gc.get_freeze_count() == 0


def test_what_the_plan_before_leaves_is_found_once_a_new_plan_trains(full: Callable[[], int]) -> None:
    collector, left = GarbageCollector(), Cycle()
    gone = weakref.ref(left)
    for step in range(1, 4):
        collector.stepped(1, step)
    del left
    for step in range(4, 6):
        collector.stepped(2, step)
    assert gone() is None
    assert full() == 1
    collector.release()


def test_a_script_that_collects_by_itself_is_left_alone(full: Callable[[], int]) -> None:
    gc.disable()
    try:
        collector, frozen, threshold = GarbageCollector(), gc.get_freeze_count(), gc.get_threshold()
        for step in range(EVERY - 2, EVERY + 1):
            collector.stepped(1, step)
        assert (gc.get_freeze_count(), gc.get_threshold(), full()) == (frozen, threshold, 0)
        collector.release()
        assert gc.get_freeze_count() == frozen
    finally:
        gc.enable()
