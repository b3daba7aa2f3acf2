"""A lasting change of the data's lengths is another problem to plan for, and nobody's slowness."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import msgspec
import pytest
from elasticd_planner.detection.lengths import attention_rise
from elasticd_planner.spec.sequence_lengths import bucket
from elasticd_planner.spec.step_measurements import Step

from elasticd.machines.job import replan
from elasticd.machines.job.measurements import data_lengths
from elasticd.machines.job.state.job_state import JobPhase, JobSettings, JobState, Part
from elasticd.machines.job.state.transaction import Transaction
from elasticd.records import ModuleSpec, ProfileRecord
from tests.machines.cast import spec
from tests.machines.test_recovery import running
from tests.machines.world import World
from tests.planner.models import cluster
from tests.planner.test_module_measurements import (
    BOTH,
    ENCODER,
    VISION,
    measured,
    plan_of,
    problem_of,
    profiles,
)


def shifted() -> World:
    world = running()
    world.train(40)
    assert "shifted" not in world.kinds(), "as long as the spec says"
    before = world.job.learned.profile
    assert before is not None
    world.length = 256
    world.train(10)
    after = world.job.learned.profile
    assert after is not None
    assert round(after.tokens / before.tokens, 6) == 4
    return world


def test_the_profile_is_evaluated_anew_and_nobody_is_called_slow() -> None:
    world = shifted()
    assert world.kinds().count("shifted") == 1
    assert "slow" not in world.kinds()
    assert world.phase is JobPhase.RUNNING


def test_a_plan_is_asked_for_and_made_where_that_pays() -> None:
    world = shifted()
    world.train(30)
    kinds = world.kinds()
    after = kinds[kinds.index("shifted") :]
    assert "planning" in after
    assert {"proposed", "kept_plan"} & {*after}


def test_back_again_is_a_shift_too_and_gives_the_profile_that_was() -> None:
    world = running()
    world.train(40)
    before = world.job.learned.profile
    assert before is not None
    world.length = 256
    world.train(60)
    world.length = 64
    world.train(60)
    assert world.kinds().count("shifted") == 2
    profile = world.job.learned.profile
    assert profile is not None
    assert abs(profile.block.cut_activation / before.block.cut_activation - 1) < 1e-9
    assert abs(profile.tokens / before.tokens - 1) < 1e-9


def test_lengths_that_are_not_those_of_the_spec_are_told_once_they_are_known() -> None:
    world = World(("alpha", "beta"), memory=60_000_000)
    world.length = 128
    world.start()
    world.settle()
    world.train(40)
    assert world.kinds().count("shifted") == 1
    assert "assumed, 64 tokens in the mean" in next(n.text for n in world.notes if n.kind == "shifted")
    assert world.job.learned.profile is not None
    assert world.job.data.lengths is not None
    assert round(world.job.data.lengths.mean) == 128


def test_what_a_token_takes_in_longer_sequences_is_measured_not_guessed_from_shapes() -> None:
    """The world's devices take 1 ms for a token whatever sequence it is in; by shapes it would be more."""
    world = shifted()
    before, after = world.job.data.lengths, world.job.learned.profile
    assert before is not None
    assert after is not None
    assert world.job.spec is not None
    assert attention_rise(world.job.spec.model) * before.effective > 0.1, "shapes say another thing"
    assert after.block.seconds == pytest.approx(1e-3, rel=0.02)


def test_lengths_that_are_others_than_assumed_teach_the_module_with_the_loss() -> None:
    """In a job of several modules; the encoders' profiles stay."""
    problem = problem_of(BOTH, profiles(), cluster(1, 2))

    class Learned:
        """A turn of a leader that notes."""

        job = JobState(
            job="j", phase=JobPhase.RUNNING, since=0.0, spec=spec(sample_tokens=16.0), plan=BOTH
        ).changed("learned", profile=problem.profile, modules=problem.modules)
        settings = JobSettings()
        kinds: ClassVar[list[str]] = []

        def change(self, part: Part, **changes: object) -> None:
            self.job = self.job.changed(part, **changes)

        def note(self, kind: str, *_: object, **__: object) -> None:
            self.kinds.append(kind)

        def write(self, record: object) -> None:
            assert isinstance(record, ProfileRecord)
            assert record.modules == problem.modules

    turn = cast(Transaction, Learned())
    for at in range(12):
        reports = [
            msgspec.structs.replace(each, squares=each.tokens * 64.0, longest=64, lengths={bucket(64): 4})
            for each in measured(BOTH, at)
        ]
        step = Step.of(reports)
        turn.change("steps", last_steps=(step,))
        data_lengths.measured(turn, step)
    assert Learned.kinds == ["shifted"]
    assert turn.job.learned.profile is not None
    assert turn.job.learned.profile.block.seconds == pytest.approx(1e-3, rel=0.05)
    assert turn.job.learned.prediction is not None


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("encoders", [(ENCODER,), (ENCODER, "n1/0")])
def test_images_of_another_size_teach_the_encoders_profile_and_make_none_slow(
    encoders: tuple[str, ...], *, trainable: bool
) -> None:
    """All images become twice as large, and a row of them takes 1.5 times as long, which shapes do not say.
    Then the encoder becomes slow, which is seen by the new profile."""
    plan = plan_of(encoders, trainable=trainable)
    problem = problem_of(plan, profiles(), cluster(1, 2))
    (known,) = problem.modules
    known = msgspec.structs.replace(known, profile=known.profile.sized(32.0))
    model = spec().model
    modules = (ModuleSpec(name="vision", model=model, items="images"), ModuleSpec(name="language", model=model))

    class Watched:
        """A turn of a leader that notes."""

        job = JobState(
            job="j",
            phase=JobPhase.RUNNING,
            since=0.0,
            spec=msgspec.structs.replace(spec(), modules=modules),
            plan=plan,
        ).changed("learned", profile=problem.profile, modules=(known,), taught_by=1)
        settings = JobSettings()
        kinds: ClassVar[list[str]] = []
        now, nodes = 0.0, {}  # type: ignore[var-annotated]

        def change(self, part: Part, **changes: object) -> None:
            self.job = self.job.changed(part, **changes)

        def note(self, kind: str, *_: object, **__: object) -> None:
            self.kinds.append(kind)

        def write(self, record: object) -> None:
            assert isinstance(record, ProfileRecord)

    Watched.kinds.clear()
    turn = cast(Transaction, Watched())

    def train(steps: range, **changes: Any) -> None:
        for at in steps:
            replan._observe(turn, plan, Step.of(measured(plan, at, **changes)))

    train(range(30))
    assert not Watched.kinds
    train(range(30, 60), rows=64, vision=1.5)
    assert Watched.kinds == ["shifted"]
    assert not turn.job.detection.rates.rates
    (now,) = turn.job.learned.modules
    assert now.rows_an_item == pytest.approx(64)
    assert now.profile.tokens == pytest.approx(64)
    assert now.profile.block.seconds == pytest.approx(1.5 * VISION, rel=0.03)
    train(range(60, 90), rows=64, vision=1.5, rates={ENCODER: 3.0})
    assert turn.job.detection.rates.rates == {ENCODER: pytest.approx(3.0, rel=0.05)}
