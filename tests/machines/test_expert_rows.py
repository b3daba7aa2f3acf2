"""The leader takes in the load of experts, plans for an uneven one, and takes no hot device for slow."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np
import pytest
from elasticd_planner.cost.model_profile import ExpertProfile, derive
from elasticd_planner.detection.expert_work import expert_work, with_work
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.stragglers import RateState, observe
from elasticd_planner.problem import Problem
from elasticd_planner.spec.expert_load import ExpertLoad, costed
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import Edge, ModulePlan, Pipeline, Plan, Stage, Strategy
from elasticd_planner.spec.step_measurements import Step

from elasticd.coordinator.metrics import _modules_of
from elasticd.coordinator.status import _experts
from elasticd.machines.job.measurements import expert_rows
from elasticd.machines.job.state.events import Configured
from elasticd.machines.job.state.job_state import JobPhase, JobSettings, JobState, Part
from elasticd.machines.job.state.transaction import Transaction
from elasticd.records import JobSpec, ModuleSpec
from tests.machines.test_recovery import running
from tests.models.mixture import EXPERTS, LAYERS, Mixture
from tests.planner.models import plan as plan_of
from tests.planner.models import planned

MODEL = Mixture().describe().spec
DEVICES = ["n0/0", "n0/1", "n0/2", "n0/3"]
PLAN = plan_of((8, [(LAYERS, DEVICES, [2, 2, 2, 2])])).replace(number=3)
#: Most rows go to the experts of the first device.
HOT = (400, 200, 50, 50, 25, 25, 25, 25)


#: The same beside an encoder, on a device of its own and on two of these.
ENCODER = ModulePlan(
    module="vision",
    items="images",
    pipelines=tuple(
        Pipeline(stages=(Stage(start=0, stop=2, devices=(device,), shares=(8,)),), micro_batches=1)
        for device in ("n1/0", "n0/1", "n0/2")
    ),
)
BESIDE = PLAN.replace(
    strategies=(
        Strategy(
            modules=(ENCODER, msgspec.structs.replace(PLAN.module, module="language")),
            edges=(Edge(source="vision", target="language"),),
        ),
    )
)


def turn_of(plan: Plan = PLAN, **settings: Any) -> Any:
    """A turn that keeps what is set."""
    spec = JobSpec(
        job="j",
        model=MODEL,
        global_batch=8,
        micro_batch=1,
        sample_tokens=50,
        samples=100,
        seed=0,
    )

    class Kept:
        def __init__(self) -> None:
            self.job = JobState(job="j", phase=JobPhase.RUNNING, since=0.0, plan=plan, spec=spec)
            policy = msgspec.structs.replace(JobSettings().policy, **settings)
            self.settings = msgspec.structs.replace(JobSettings(), policy=policy)

        def set(self, **changes: object) -> None:
            self.job = msgspec.structs.replace(self.job, **changes)

        def change(self, part: Part, **changes: object) -> None:
            self.job = self.job.changed(part, **changes)

    return Kept()


def report(step: int, rows: tuple[int, ...], device: str = "n0/0") -> Measurement:
    return Measurement(
        device=device,
        plan=3,
        step=step,
        tokens=400,
        block_seconds=1.0,
        block_work=1.0,
        expert_rows=dict.fromkeys(range(LAYERS), rows),
    )


def test_a_load_that_one_device_has_most_of_is_planned_for_and_not_asked_for_twice() -> None:
    turn = turn_of()
    for step in (0, 10):
        expert_rows.reported(cast(Transaction, turn), report(step, HOT))
    load = turn.job.learned.experts
    assert load is not None
    assert load.rows == dict.fromkeys(range(LAYERS), HOT)
    assert turn.job.learned.expert_rows.chosen == 2.0
    assert 0 < load.part < 1
    own = [p for p in MODEL.kinds[0] if p.experts]
    assert load.expert_bytes == sum(int(np.prod(p.shape)) for p in own) / EXPERTS * 4
    for step in range(20, 60, 10):
        expert_rows.reported(cast(Transaction, turn), report(step, HOT))
    assert turn.job.learned.experts is load


def test_reports_of_several_lanes_add_up_and_the_mean_follows_the_newest() -> None:
    plan = plan_of((4, [(LAYERS, DEVICES[:2], [4, 4])]), (4, [(LAYERS, DEVICES[2:], [4, 4])])).replace(number=3)
    turn = turn_of(plan)
    for step in range(0, 40, 10):
        expert_rows.reported(cast(Transaction, turn), report(step, HOT))
        expert_rows.reported(cast(Transaction, turn), report(step, HOT[::-1], "n0/2"))
    assert turn.job.learned.expert_rows.mean[0][0] == HOT[0] + HOT[-1]


@pytest.mark.parametrize("rows", [(100,) * EXPERTS, (13, 10, 12, 9, 11, 10, 9, 12)])
def test_an_even_load_and_one_that_is_uneven_by_chance_ask_for_nothing(rows: tuple[int, ...]) -> None:
    turn = turn_of()
    for step in range(0, 60, 10):
        expert_rows.reported(cast(Transaction, turn), report(step, rows))
    assert turn.job.learned.experts is None


def test_with_fixed_experts_nothing_is_asked_for() -> None:
    turn = turn_of(experts="fixed")
    for step in (0, 10, 20):
        expert_rows.reported(cast(Transaction, turn), report(step, HOT))
    assert turn.job.learned.experts is None
    assert turn.job.learned.expert_rows.work["n0/0"] > 1  # what devices have to do is known all the same


def test_a_device_whose_experts_are_hot_is_no_straggler_and_a_slow_one_is() -> None:
    turn = turn_of(experts="fixed")
    for step in (0, 10):
        expert_rows.reported(cast(Transaction, turn), report(step, HOT))
    load = costed(MODEL, 50, turn.job.learned.expert_rows.mean, 2.0)
    assert load is not None
    work, uneven = expert_work(PLAN, load, {})
    assert uneven == pytest.approx(600 / 200 - 1)

    def judged(slow: float, corrected: bool) -> set[str]:
        state = RateState()
        settings = DetectSettings()
        for number in range(30):
            seconds = [work[device] * (slow if device == "n0/2" else 1.0) for device in DEVICES]
            step = Step.timed(3, number, tuple(DEVICES), seconds, [1.0] * 4)
            state, _ = observe(state, with_work(step, work) if corrected else step, settings)
        return {*state.rates}

    assert judged(1.0, corrected=True) == set()
    assert judged(1.0, corrected=False) != set()
    assert judged(2.0, corrected=True) == {"n0/2"}


def test_the_part_of_experts_that_was_measured_counts_in_the_place_of_the_shapes() -> None:
    parts = []
    for measured in (None, ExpertProfile(part=0.9, chosen=2, count=EXPERTS)):
        turn = turn_of()
        turn.change("learned", profile=msgspec.structs.replace(derive(MODEL, 50, 1), experts=measured))
        expert_rows.reported(cast(Transaction, turn), report(0, HOT))
        parts.append((turn.job.learned.experts.part, turn.job.learned.expert_rows.work["n0/0"]))
    assert parts[0][0] < 0.8
    assert parts[1] == (0.9, pytest.approx(1 + 0.9 * 2))  # its experts have 600 rows of 800, and not 200


def test_a_load_is_known_once_all_lanes_have_reported_a_step() -> None:
    turn = turn_of()
    expert_rows.reported(cast(Transaction, turn), report(0, HOT))
    assert turn.job.learned.experts is not None
    assert expert_rows.work(cast(Transaction, turn), PLAN)["n0/0"] > 1  # before the step is judged


def test_a_load_of_a_language_model_beside_an_encoder_is_planned_for() -> None:
    """Devices of the encoder alone report no rows, and are not waited for."""
    turn = turn_of(BESIDE)
    modules = [ModuleSpec(name="vision", model=MODEL, items="images"), ModuleSpec(name="language", model=MODEL)]
    turn.set(spec=msgspec.structs.replace(turn.job.spec, modules=tuple(modules)))
    assert expert_rows.unjudged(cast(Transaction, turn), BESIDE)
    alone_encodes = msgspec.structs.replace(report(0, HOT, "n1/0"), tokens=0, expert_rows={})
    expert_rows.reported(cast(Transaction, turn), alone_encodes)
    expert_rows.reported(cast(Transaction, turn), report(0, HOT))
    load = turn.job.learned.experts
    assert load is not None
    assert load.rows == dict.fromkeys(range(LAYERS), HOT)
    assert not expert_rows.unjudged(cast(Transaction, turn), BESIDE)
    alone = turn_of()
    expert_rows.reported(cast(Transaction, alone), report(0, HOT))
    work = expert_rows.work(cast(Transaction, turn), BESIDE)
    assert work == expert_rows.work(cast(Transaction, alone), PLAN)
    assert {*work} <= {*DEVICES}
    status = _experts(turn.job, brief=False)
    assert status is not None
    assert status == _experts(alone.job, brief=False)


def test_until_a_load_is_known_no_device_is_judged_and_a_restored_one_is_used() -> None:
    turn = turn_of()
    withheld = [expert_rows.unjudged(cast(Transaction, turn), PLAN) for _ in range(12)]
    assert withheld == [True] * 10 + [False] * 2
    load = costed(MODEL, 50, dict.fromkeys(range(LAYERS), HOT), 2.0)
    restored = turn_of()
    restored.change("learned", experts=load)
    assert not expert_rows.unjudged(cast(Transaction, restored), PLAN)
    assert expert_rows.work(cast(Transaction, restored), PLAN)["n0/0"] > 1


def test_a_step_that_a_lane_did_not_report_changes_nothing() -> None:
    plan = plan_of((4, [(LAYERS, DEVICES[:2], [4, 4])]), (4, [(LAYERS, DEVICES[2:], [4, 4])])).replace(number=3)
    turn = turn_of(plan)
    for device in ("n0/0", "n0/2"):
        expert_rows.reported(cast(Transaction, turn), report(0, HOT, device))
    known = turn.job.learned.expert_rows.mean
    expert_rows.reported(cast(Transaction, turn), report(10, HOT[::-1]))
    expert_rows.reported(cast(Transaction, turn), report(20, HOT[::-1]))
    assert (
        turn.job.learned.expert_rows.mean
        == known
        == dict.fromkeys(range(LAYERS), tuple(2 * row for row in HOT))
    )


def test_a_report_counts_once_and_after_a_roll_back_again() -> None:
    turn = turn_of()
    for _ in range(2):
        expert_rows.reported(cast(Transaction, turn), report(20, HOT))
    assert (turn.job.learned.expert_rows.forecast.reports, turn.job.learned.expert_rows.mean[0]) == (1, HOT)
    turn.set(plan=PLAN.replace(number=4))
    expert_rows.reported(cast(Transaction, turn), msgspec.structs.replace(report(10, HOT), plan=4))
    assert (turn.job.learned.expert_rows.forecast.reports, turn.job.learned.expert_rows.step) == (2, 10)


def test_after_an_even_time_a_load_as_uneven_as_before_is_planned_for() -> None:
    turn = turn_of()
    expert_rows.reported(cast(Transaction, turn), report(0, HOT))
    before = turn.job.learned.expert_rows.decided
    assert before > 0
    for step in range(10, 200, 10):
        expert_rows.reported(cast(Transaction, turn), report(step, (100,) * EXPERTS))
    assert turn.job.learned.expert_rows.decided == 0
    turn.change("learned", experts=None)
    for step in range(200, 400, 10):
        expert_rows.reported(cast(Transaction, turn), report(step, HOT))
    assert turn.job.learned.experts is not None


@pytest.mark.parametrize("rows", [(), (1, 2), (-5, *HOT[1:])])
def test_rows_that_are_none_of_the_model_do_not_count(rows: tuple[int, ...]) -> None:
    turn = turn_of()
    expert_rows.reported(cast(Transaction, turn), report(0, rows))
    expert_rows.reported(cast(Transaction, turn), report(10, HOT))
    assert turn.job.learned.expert_rows.mean[0] == HOT


def test_a_plan_for_another_reason_is_made_for_the_newest_load() -> None:
    turn = turn_of()
    for step in range(0, 40, 10):
        expert_rows.reported(cast(Transaction, turn), report(step, (100,) * EXPERTS))
    assert turn.job.learned.experts is None
    expert_rows.renewed(cast(Transaction, turn))
    assert turn.job.learned.experts.rows[0] == (100,) * EXPERTS


def test_lanes_that_share_experts_have_the_rows_of_all_lanes() -> None:
    stage = Stage(
        start=0,
        stop=1,
        devices=("n0/0", "n0/1"),
        shares=(1, 1),
        lanes=(1, 1),
        experts=(((0, 1), (2, 3)),),
    )
    plan = planned(Pipeline(stages=(stage,), micro_batches=2, rows=(1, 1)))
    load = ExpertLoad(rows={0: (50.0, 25.0, 15.0, 10.0)}, part=0.5, expert_bytes=1)
    work, uneven = expert_work(plan, load, {})
    assert work == pytest.approx({"n0/0": 1.25, "n0/1": 0.75})
    assert uneven == pytest.approx(0.5)


def test_status_has_the_load_of_experts_and_the_work_of_their_devices() -> None:
    turn = turn_of()
    assert _experts(turn.job, brief=False) is None
    expert_rows.reported(cast(Transaction, turn), report(0, HOT))
    status = _experts(turn.job, brief=False)
    assert status is not None
    assert (status.experts, status.copies, status.heaviest) == (LAYERS * EXPERTS, 0, 0)
    assert status.part == 0.5
    assert status.uneven == pytest.approx(600 / 200 - 1)
    assert [(each.device, each.experts) for each in status.by_device] == [(d, LAYERS * 2) for d in DEVICES]
    assert status.by_device[0].work > 1 > status.by_device[1].work


def test_the_metric_is_there_once_a_load_is_known() -> None:
    turn = turn_of()
    assert not [*_modules_of(turn.job)]
    expert_rows.reported(cast(Transaction, turn), report(0, HOT))
    assert [*_modules_of(turn.job)] == [("elasticd_job_experts_uneven", (), pytest.approx(600 / 200 - 1))]


def test_a_running_job_is_planned_anew_when_fewer_copies_of_experts_are_allowed() -> None:
    world = running()
    world.train(12)
    load = ExpertLoad(rows={0: (3.0, 1.0)}, part=0.5, expert_bytes=1)
    job = world.job.changed("learned", experts=load)
    world.state = msgspec.structs.replace(world.state, jobs={**world.state.jobs, job.job: job})
    world.train(2)
    world.planner_waits = True
    settings = world.state.settings
    policy = msgspec.structs.replace(settings.policy, expert_replicas=0)
    world.say(Configured(detect=settings.detect, policy=policy, changes="by a test"))
    world.settle()
    world.train(2)
    assert world.planning is not None
    assert isinstance(world.planning.problem, Problem)
    assert world.planning.problem.experts == msgspec.structs.replace(load, replicas=0)


def test_a_straggler_brings_a_plan_for_the_newest_load(monkeypatch: pytest.MonkeyPatch) -> None:
    world = running()
    world.train(12)
    load = ExpertLoad(rows={0: (3.0, 1.0)}, part=0.5, expert_bytes=1)
    monkeypatch.setattr(expert_rows, "newest", lambda turn, job: load)
    world.planner_waits = True
    world.train(2)
    assert world.planning is None, "a load that is even enough asks for nothing"
    world.rates["alpha/0"] = 3.0
    world.train(12)
    assert world.planning is not None
    assert isinstance(world.planning.problem, Problem)
    assert world.planning.problem.experts == load
