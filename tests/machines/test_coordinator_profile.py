"""A job that brings a measured profile: its first plan is made from it, and measured steps still teach more."""

from __future__ import annotations

import msgspec
from elasticd_planner.profiles import ModelProfile, derive

from elasticd.records import JobSpec, decode, encode
from tests.machines import cast, world
from tests.machines.cast import TRUTH, model
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
    assert made.job.profile == GIVEN
    plan = made.plan()
    assert plan is not None
    assert plan.prediction is not None
    tokens, layers = 64 * 8, GIVEN.layers
    least = tokens * layers * BLOCK.seconds / 4  # four devices, nothing but blocks
    assert plan.prediction.step_seconds > least
    guessed = started(None, monkeypatch).job.profile
    assert guessed is not None
    assert guessed.block.seconds == derive(model(), 64.0, 1, flops=made.settings.flops).block.seconds


def test_steps_that_were_measured_are_believed_more(monkeypatch: object) -> None:
    made = started(GIVEN, monkeypatch)
    made.train(16)
    profile = made.job.profile
    assert profile is not None
    assert profile.fitted
    plan = made.plan()
    assert plan is not None
    stage = plan.modules[0].pipelines[0].stages[0]
    block, part = profile.block, stage.fraction(0)
    found = block.fixed_seconds + profile.tokens * block.seconds * block.factor(len(stage.devices)) * part
    truth = TRUTH.tokens * TRUTH.block.seconds * part
    assert 0.8 < found / truth < 1.2


def test_a_spec_with_a_profile_travels_as_it_is() -> None:
    sent = cast.spec(profile=GIVEN)
    assert decode(encode(sent), JobSpec) == sent
