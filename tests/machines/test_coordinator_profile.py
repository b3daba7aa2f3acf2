"""A job that brings a measured profile: its first plan is made from it, and measured steps still teach more."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from elasticd_planner.cost.model_profile import ModelProfile, derive
from elasticd_planner.profiling.samples import MeasuredBytes, ModelBytes

from elasticd.machines.job.replan import first_profile
from elasticd.records import JobSpec, decode, encode
from tests.machines import cast, world
from tests.machines.cast import JOB, TRUTH, model
from tests.machines.world import World

#: Ten times slower than the truth in seconds, with a fixed part and a loss by width, as profiles have.
BLOCK = msgspec.structs.replace(TRUTH.block, seconds=1e-2, fixed_seconds=1e-3, slowdown={1: 1.0, 2: 1.3})
GIVEN = msgspec.structs.replace(TRUTH, block=BLOCK)


def started(profile: ModelProfile | None, monkeypatch: object) -> World:
    monkeypatch.setattr(world, "spec", lambda **changes: cast.spec(profile=profile, **changes))  # type: ignore[attr-defined]
    made = World()
    made.start()
    return made


def test_the_first_plan_is_made_from_the_profile_that_the_job_brings(monkeypatch: object) -> None:
    made = started(GIVEN, monkeypatch)
    assert made.job.learned.profile == GIVEN
    plan = made.plan()
    assert plan is not None
    assert plan.prediction is not None
    tokens, layers = 64 * 8, GIVEN.layers
    least = tokens * layers * BLOCK.seconds / 4  # four devices, nothing but blocks
    assert plan.prediction.step_seconds > least
    guessed = started(None, monkeypatch).job.learned.profile
    assert guessed is not None
    assert guessed.block.seconds == derive(model(), 64.0, 1, flops=made.settings.flops).block.seconds


def test_a_first_profile_counts_what_waits_for_memory_where_its_bandwidth_is_known() -> None:
    known, blind = (first_profile(cast.spec(), 1e12, bandwidth) for bandwidth in (1e9, 0.0))
    derived = derive(model(), 64.0, 1, flops=1e12, memory_bandwidth=1e9).block
    assert (known.block.seconds, known.block.whole_seconds) == (derived.seconds, derived.whole_seconds)
    assert known.block.seconds > blind.block.seconds
    assert known.block.whole_seconds > 0


def test_steps_that_were_measured_are_believed_more(monkeypatch: object) -> None:
    made = started(GIVEN, monkeypatch)
    made.train(16)
    profile = made.job.learned.profile
    assert profile is not None
    assert profile.fitted
    plan = made.plan()
    assert plan is not None
    stage = plan.pipelines[0].stages[0]
    block, part = profile.block, stage.fraction(0)
    found = block.fixed_seconds + profile.tokens * block.seconds * block.factor(len(stage.devices)) * part
    truth = TRUTH.tokens * TRUTH.block.seconds * part
    assert 0.8 < found / truth < 1.2


def measured_enough() -> World:
    """A world at the end of the last step that the fit needs."""
    made = World()
    made.start()
    while len(made.job.learned.sampled) < made.settings.fit_steps:
        made.train()
        assert made.steps < 20
    assert "fitted" not in made.kinds()
    return made


def test_the_first_report_of_a_step_has_the_profile_fitted_and_the_last_one_has_it_asked_about() -> None:
    """Both take a large job's leader long, and are not done in one message."""
    made = measured_enough()
    made.planner_waits = True
    plan = made.plan()
    assert plan is not None
    made.steps += 1
    for device in plan.members:
        made.up(device, made.report(plan, device))
    made.turn()
    assert made.kinds()[-1] == "fitted"
    assert made.job.learned.profile is not None
    assert made.job.learned.profile.fitted
    assert made.planning is None
    while made.inbox:
        made.turn()
    assert made.planning is not None
    assert made.planning.problem.profile == made.job.learned.profile


def test_a_step_is_predicted_anew_by_the_fitted_profile() -> None:
    """The guess that a first plan was made from is not shown for the plan's whole life."""
    made = measured_enough()
    plan = made.plan()
    assert plan is not None
    assert plan.prediction is not None
    assert made.job.predicted_seconds == plan.prediction.step_seconds
    sampled = made.job.learned.sampled
    made.planner_waits = True  # no other plan takes its place
    made.train(2)
    (fitted,) = [note for note in made.notes if note.kind == "fitted"]
    longest = sorted(float(max(step.column("step_seconds"))) for step in sampled)
    seconds = made.job.predicted_seconds
    assert seconds is not None
    assert longest[0] <= seconds <= longest[-1], "what was measured"
    assert fitted.data["step_seconds"] == seconds
    assert f"{plan.prediction.step_seconds:.3f} s" in fitted.text


def test_steps_of_a_plan_that_was_replaced_meanwhile_teach_nothing() -> None:
    made = measured_enough()
    other = tuple(msgspec.structs.replace(step, plan=0) for step in made.job.learned.sampled)
    jobs = {JOB: made.job.changed("learned", sampled=other)}
    made.state = msgspec.structs.replace(made.state, jobs=jobs)
    made.train(2)
    assert not {"fitted", "refused"} & {*made.kinds()}
    made.train(12)
    assert "fitted" in made.kinds()


def test_a_spec_with_a_profile_travels_as_it_is() -> None:
    sent = cast.spec(profile=GIVEN)
    assert decode(encode(sent), JobSpec) == sent


@pytest.mark.parametrize("place", [0, 3])
def test_the_bytes_that_one_of_four_workers_measured_are_those_of_the_job(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hello of the one that measured them comes first, or last."""
    measured = ModelBytes(sections=(MeasuredBytes(section="block", share=1.0, tokens=64, kept=64 * 1000),))
    count = itertools.count()
    monkeypatch.setattr(
        world, "spec", lambda **_: cast.spec(measured_bytes=measured if next(count) == place else None)
    )
    made = World()
    made.start()
    assert next(count) == 4, "four workers, one hello each"
    assert made.job.spec is not None
    assert made.job.spec.measured_bytes == measured
    assert made.plan() is not None
    profile = made.job.learned.profile
    assert profile is not None
    assert profile.activation_bytes(profile.block, profile.share_units) == pytest.approx(1000 * profile.tokens)
    made.new_leader()
    assert made.job.spec is not None
    assert made.job.spec.measured_bytes == measured
