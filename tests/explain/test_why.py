"""Nothing is compared over the time between two starts of a job under its name."""

from __future__ import annotations

import msgspec
from elasticd_planner.spec.plan import Strategy

from elasticd.explain.why import decided, did, earlier_starts, gained, module_changes, record_before, use
from elasticd.records import HistoryRecord
from elasticd.wire.event_record import EventRecord
from elasticd.wire.step_record import StepRecord
from tests.planner.models import cluster
from tests.planner.test_module_measurements import ALONE, BOTH, problem_of, profiles
from tests.runtime import image_model

PROBLEM = problem_of(BOTH, profiles(), cluster(1, 2))


def step(index: int, plan: int, seconds: float) -> StepRecord:
    return StepRecord(step=index, plan=plan, loss=1.0, tokens=10, seconds=seconds, time=100.0 + index)


def again(number: int) -> EventRecord:
    return EventRecord(id=1, time=1.0, kind="started_again", job="j", text="", data={"number": number})


def test_a_plan_after_a_new_start_gained_nothing_over_the_plans_before_it() -> None:
    steps = [*(step(index, 7, 0.6) for index in range(5)), *(step(index, 8, 0.7) for index in range(5, 15))]
    assert gained(8, [], steps) is not None, "a switch of a job that trains"
    assert gained(8, [again(7)], steps) is None
    assert gained(8, [again(3)], steps) is not None


def test_a_plan_after_a_fault_has_its_change_and_no_gain() -> None:
    steps = [*(step(index, 7, 0.9) for index in range(5)), *(step(index, 9, 0.6) for index in range(5, 15))]
    fence = EventRecord(id=1, time=1.0, kind="fenced", job="j", text="", data={"number": 8, "gone": ["a/0"]})
    plan = image_model.plan_of(
        [image_model.pipeline(1, image_model.stage(0, 2, ("a/0", 1)))],
        [image_model.pipeline(5, image_model.stage(0, 2, ("a/0", 1)), image_model.stage(2, 5, ("a/1", 1)))],
    )
    record = HistoryRecord(number=9, plan=plan, problem=PROBLEM, reason="without a/0")
    for told, about in (([], "gained"), ([fence], "fault")):
        lines = {each.about.strip(): each.text for each in did(record, told, steps)}
        assert lines[about].startswith("0.900 s a step before, 0.600 s after (1.50x)")
        assert ("paid back" in lines[about]) == (about == "gained")


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


def test_a_plan_says_which_modules_it_changed() -> None:
    """An encoder more, whose device was there: language stays as it is."""
    alone, both = (
        HistoryRecord(number=n, problem=PROBLEM, plan=p, reason="") for n, p in ((1, ALONE), (2, BOTH))
    )
    assert record_before(both, [both, alone]) is alone
    assert record_before(alone, [both, alone]) is None
    changes = module_changes(alone, both)
    assert changes == {"vision": "another layout (n1/0 added)", "language": "as before"}
    lines = [each.text for each in decided(both, alone)]
    assert "vision: another layout (n1/0 added); language: as before" in lines
    (vision, language), edges = BOTH.modules, BOTH.strategies[0].edges
    weighed = msgspec.structs.replace(
        vision, pipelines=(msgspec.structs.replace(vision.pipelines[0], micro_batches=3), *vision.pipelines[1:])
    )
    plan = BOTH.replace(strategies=(Strategy(modules=(weighed, language), edges=edges),))
    after = HistoryRecord(number=3, problem=PROBLEM, plan=plan, reason="")
    assert module_changes(both, after) == {"vision": "other shares of images", "language": "as before"}
