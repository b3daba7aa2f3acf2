"""Pages of jobs of several modules: all modules are drawn, on one axis of time, with times of their own."""

from __future__ import annotations

import io
import itertools
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.problem_files import file_format
from elasticd_planner.problem_files.convert import problem_of as problem_of_file
from elasticd_planner.problem_files.shapes import shapes_of
from elasticd_planner.problem_files.solve import solve
from elasticd_planner.search.planner import plan as planned
from elasticd_planner.spec.step_measurements import Step
from rich.console import Console
from rich.text import Text

from elasticd.cli.picture import module_picture
from elasticd.cli.step_picture import StepPicture
from elasticd.coordinator.live_feed import measurements
from elasticd.dashboard import job_page, plan_page
from elasticd.dashboard.known import table_of
from elasticd.explain.why import use
from elasticd.machines.job.measurements.module_times import module_times
from elasticd.machines.job.state.job_state import JobPhase, JobState
from elasticd.records import HistoryRecord, JobSpec, ModuleSpec
from tests.planner.drawn_module_problems import drawn_problem
from tests.planner.models import cluster
from tests.planner.test_module_measurements import ALONE, BOTH, ENCODER, measured, problem_of, profiles
from tests.planner.test_packed_modules import drawn

EXAMPLE = Path(__file__).parents[2] / "examples/problems/vision_language.json"


def record(*, packed: bool = False) -> HistoryRecord:
    problem = drawn(3) if packed else drawn_problem(3, modules=2)
    answer = planned(problem, 1)
    assert answer.plan is not None
    return HistoryRecord(number=1, problem=problem, plan=answer.plan, reason="the first plan")


@pytest.mark.parametrize("packed", [False, True])
def test_a_plans_page_has_all_modules_and_their_one_order(packed: bool) -> None:
    made = record(packed=packed)
    plan = made.plan
    boxes = plan_page.boxes(made)
    assert [box.module for box in boxes] == [module.module for module in plan.modules for _ in module.by_lane]
    loads = [stage.load for box in boxes for stage in box.stages]
    assert max(loads) == pytest.approx(1.0)
    assert min(loads) > 0
    lanes = plan_page.timeline(made)
    assert {lane.module for lane in lanes} == {module.module for module in plan.modules}
    assert len({lane.seconds for lane in lanes}) == 1
    busy = defaultdict(list)
    for lane in lanes:
        own = plan.view(lane.module).pipelines[lane.pipeline].by_lane[lane.lane]
        for stage, passes in zip(own.stages, lane.stages, strict=True):
            for one in passes:
                assert 0 <= one.start < one.stop <= lane.seconds
                for device in stage.devices:
                    busy[device].append((one.start, one.stop))
    for spans in busy.values():
        spans.sort()
        for (_, stop), (start, _) in itertools.pairwise(spans):
            assert stop <= start + 1e-9, "a device does one pass at a time"


def test_a_plan_of_packed_rows_beside_images_is_shown_in_a_terminal_and_by_device() -> None:
    made = record(packed=True)
    step = StepPicture(made.problem, made.plan)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(module_picture(made.plan, made.problem.rates, step.busy))
    for line in (*step.lanes(), *step.order(), Text(step.limit())):
        console.print(line)
    shown = console.export_text()
    assert all(module.module in shown for module in made.plan.modules)
    assert step.seconds == pytest.approx(made.plan.prediction.step_seconds)  # type: ignore[union-attr]
    own = made.plan.loss_view.by_lane[0]
    assert f"a step of at most {own.packed[0].capacity} tokens" in use(made.plan, own.stages[0].devices[0])


def test_a_jobs_page_has_the_seconds_of_each_module() -> None:
    job = JobState(job="j", phase=JobPhase.RUNNING, since=0.0)
    news = measurements(job, BOTH, {each.device: each for each in measured(BOTH, 4)})
    assert news is not None
    table = table_of(news)
    rows = {(row.module, row.pipeline): row for row in job_page.stages(BOTH, table)}
    assert set(rows) == {("vision", 0), ("vision", 1), ("language", 0), ("language", 1)}
    vision = rows["vision", 0]
    assert vision.devices == (ENCODER,)
    assert vision.seconds["blocks"] == pytest.approx(8 * 32 * 2 * 2e-3, rel=0.1)
    assert vision.seconds["reduction"] == pytest.approx(0.01)
    both = rows["language", 0]  # n1/0 encodes, too: that is no part of its time in language
    assert sum(both.seconds.values()) == pytest.approx(both.total - rows["vision", 1].seconds["blocks"] - 0.01)
    assert both.seconds["blocks"] == pytest.approx(4 * 64 * 4 * 1e-3, rel=0.1)


def test_status_and_metrics_have_the_busiest_device_of_each_module() -> None:
    problem = problem_of(ALONE, profiles(), cluster(1, 2))
    steps = (Step.of(measured(ALONE, 3)),)
    job = (
        JobState(job="j", phase=JobPhase.RUNNING, since=0.0, plan=ALONE)
        .changed("steps", last_steps=steps)
        .changed("learned", modules=problem.modules)
    )
    vision, language = module_times(job)
    assert (vision.module, vision.devices, vision.busiest) == ("vision", 1, ENCODER)
    assert vision.seconds == pytest.approx(16 * 32 * 2 * 2e-3, rel=0.1)
    assert (vision.items, vision.items_a_sample, vision.rows_an_item) == ("images", 2.0, 32.0)
    assert (language.module, language.devices, language.items) == ("language", 2, "")
    assert language.busiest in ("n1/0", "n1/1")


def test_status_has_the_devices_of_each_module_with_their_shares_of_the_items() -> None:
    """n1/0 takes twice the planned time for an image, and was dealt 4 of the 16."""
    reports = {each.device: each for each in measured(BOTH, 3)}
    dealt = {ENCODER: (12, 64), "n1/0": (4, 128)}
    for device, (items, slowdown) in dealt.items():
        vision = msgspec.structs.replace(
            reports[device].modules["vision"], items=items, tokens=items * 32, slowdown=slowdown
        )
        reports[device] = msgspec.structs.replace(reports[device], modules={"vision": vision})
    job = (
        JobState(job="j", phase=JobPhase.RUNNING, since=0.0, plan=BOTH)
        .changed("steps", last_steps=(Step.of(reports.values()),))
        .changed("learned", modules=problem_of(BOTH, profiles(), cluster(1, 2)).modules)
    )
    vision, language = module_times(job)
    assert [(each.device, each.items, each.share, each.planned_share) for each in vision.by_device] == [
        (ENCODER, 12, 0.75, 0.5),
        ("n1/0", 4, 0.25, 0.5),
    ]
    assert [each.slowdown for each in vision.by_device] == [1.0, 2.0]
    assert [(each.device, each.items) for each in language.by_device] == [("n1/0", 0), ("n1/1", 0)]


def test_what_goes_over_links_is_listed_by_module_and_between_modules() -> None:
    given = file_format.load(EXAMPLE.read_bytes())
    plan = solve(given).plan
    assert plan is not None
    made = HistoryRecord(number=1, problem=problem_of_file(given), plan=plan, reason="")
    specs = {name: each.spec for name, each in shapes_of(given).items()}
    spec = JobSpec(
        job="j",
        model=specs["language"],
        modules=tuple(ModuleSpec(name=name, model=each) for name, each in specs.items()),
        global_batch=16,
        micro_batch=1,
        samples=64,
        sample_tokens=4096,
        seed=0,
    )
    rows, missing = plan_page.communications(made, spec)
    assert not missing
    purposes = {row.purpose for row in rows}
    assert {"language: activations", "vision: gradients", "between modules: items"} <= purposes
    listed = {
        name: sum(row.groups * row.times for row in rows if row.purpose.startswith(name)) for name in specs
    }
    assert all(listed.values())


def test_the_difference_of_two_plans_is_of_all_modules() -> None:
    """An encoder more: its device holds all of vision, and of language as much as before."""
    before, now = (
        HistoryRecord(number=at, problem=problem_of(each, weighty(), cluster(1, 2)), plan=each, reason="")
        for at, each in enumerate((ALONE, BOTH), 1)
    )
    found = plan_page.diff(before, now, None)
    assert found is not None
    (moving,) = found.devices
    assert moving.device == "n1/0"
    assert moving.before == "language layers 0-3"
    assert moving.after == "vision layers 0-1; language layers 0-3"
    assert found.bytes_lacking == moving.bytes_lacking == 2 * 1000 * 3  # a value, and two moments


def weighty() -> dict[str, ModelProfile]:
    return {
        name: msgspec.structs.replace(profile, block=msgspec.structs.replace(profile.block, cut_bytes=1000))
        for name, profile in profiles().items()
    }
