"""Nothing is compared over the time between two starts of a job under its name."""

from __future__ import annotations

from elasticd.coordinator.events.event_log import EventRecord
from elasticd.coordinator.events.switch_gain import StepRecord
from elasticd.dashboard.why import earlier_starts, gained, use
from tests.runtime import image_model


def step(index: int, plan: int, seconds: float) -> StepRecord:
    return StepRecord(step=index, plan=plan, loss=1.0, tokens=10, seconds=seconds, time=100.0 + index)


def again(number: int) -> EventRecord:
    return EventRecord(id=1, time=1.0, kind="started_again", job="j", text="", data={"number": number})


def test_a_plan_after_a_new_start_gained_nothing_over_the_plans_before_it() -> None:
    steps = [*(step(index, 7, 0.6) for index in range(5)), *(step(index, 8, 0.7) for index in range(5, 15))]
    assert gained(8, [], steps) is not None, "a switch of a job that trains"
    assert gained(8, [again(7)], steps) is None
    assert gained(8, [again(3)], steps) is not None


def test_the_starts_before_a_plan_are_those_whose_numbers_are_below_it() -> None:
    told = [again(3), again(7)]
    assert [earlier_starts(number, told) for number in (2, 4, 7, 8, 20)] == [0, 3, 3, 7, 7]
    older = EventRecord(id=1, time=1.0, kind="started_again", job="j", text="", data={"step": 4})
    assert earlier_starts(5, [older]) == 0


def test_a_device_of_several_modules_is_told_each_of_its_places() -> None:
    plan = image_model.plan_of(
        [image_model.pipeline(1, image_model.stage(0, 2, ("a/0", 1)))],
        [image_model.pipeline(5, image_model.stage(0, 2, ("a/0", 1)), image_model.stage(2, 5, ("a/1", 1)))],
    )
    both, one = use(plan, "a/0"), use(plan, "a/1")
    assert both.startswith("vision: pipeline 0, layers 0-1")
    assert "; language: pipeline 0, layers 0-1" in both
    assert one.startswith("language: pipeline 0, layers 2-4")
    assert use(plan, "b/0") == "no part of it"
