"""A packed job's leader: its plans are for the lengths of its sequences, at the start and after a shift."""

from __future__ import annotations

import pytest
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.sequence_lengths import Lengths, even

from elasticd.machines.job.measurements import data_lengths, step_prediction
from elasticd.machines.job.state.job_state import JobPhase, JobSettings
from tests.machines.world import World
from tests.planner.test_packed_modules import drawn


def world_of(
    lengths: Lengths, longest: int, memory: int = 60_000_000, saved_longest: int = 0, **options: object
) -> World:
    """A job on two nodes that packs sequences of these lengths."""
    world = World(("alpha", "beta"), memory=memory)
    values = {"sample": "sample 7", "linear": 96, "least": 8, **options}
    packed = PackedSequences(sequences=8.0, lengths=lengths, longest=longest, **values)  # type: ignore[arg-type]
    world.saved_longest = saved_longest
    world.of_spec["packed"] = packed
    world.length = round(lengths.mean)
    world.start()
    world.settle()
    return world


def test_a_packed_job_trains_under_a_plan_that_says_what_its_lanes_hold() -> None:
    world = world_of(even(64.0), 64)
    world.train(12)
    assert world.phase is JobPhase.RUNNING
    assert world.job.plan is not None
    assert world.job.plan.packed
    assert all(lane.packed[0].capacity >= 64 for lane in world.job.plan.by_lane)


def test_a_job_whose_longest_sequence_no_plan_holds_ends_before_it_starts_and_names_the_sample() -> None:
    world = world_of(even(64.0), 1_000_000_000)
    assert world.phase is JobPhase.STOPPED
    assert "does not fit: sample 7 has 1000000000 tokens, and the lanes of no pipeline" in world.job.reason
    assert "add a node" in world.job.reason


def test_an_explicit_limit_of_rows_that_is_too_small_is_refused_with_its_name() -> None:
    world = world_of(even(64.0), 4096, row_tokens=128)
    assert "raise Packing(tokens=...)" in world.job.reason


def test_a_lasting_shift_of_lengths_asks_for_a_plan_for_these() -> None:
    world = world_of(even(64.0), 4096)
    world.train(40)
    before = world.job.plan
    assert before is not None
    asked = world.kinds().count("planning")
    assert data_lengths.packed(world.job) == world.job.spec.packed  # type: ignore[union-attr]
    world.length = 1024
    world.train(40)
    found = data_lengths.packed(world.job)
    assert found is not None
    assert round(found.lengths.mean) == 1024
    assert (found.longest, found.sample) == (4096, "sample 7")  # it may still come
    kinds = world.kinds()
    assert kinds.count("planning") > asked
    assert {"proposed", "kept_plan"} & {*kinds[kinds.index("shifted") :]}


def test_one_long_step_asks_for_no_plan() -> None:
    world = world_of(even(64.0), 4096)
    world.train(40)
    asked = world.kinds().count("planning")
    world.length = 1024
    world.train(1)
    world.length = 64
    world.train(40)
    assert "shifted" not in world.kinds()
    assert world.kinds().count("planning") == asked


def test_reported_lengths_beyond_all_that_was_known_become_the_longest() -> None:
    world = world_of(even(64.0), 64)
    world.train(40)
    world.length = 512
    world.train(40)
    found = data_lengths.packed(world.job)
    assert found is not None
    assert (found.longest, found.sample) == (512, "")


def test_one_long_sequence_is_the_longest_from_then_on_and_a_new_leader_learns_it() -> None:
    world = world_of(even(64.0), 64)
    world.train(40)
    world.length = 1024
    world.train(1)
    world.length = 64
    world.train(40)
    assert "shifted" not in world.kinds()
    assert longest(world) == 1024
    world.new_leader()
    world.settle()
    world.train(2)
    assert longest(world) == 1024


def test_the_longest_is_measured_even_where_lengths_are_about_as_assumed() -> None:
    world = world_of(Lengths(mean=64.0, effective=64.0, longest=64.0), 60)
    world.train(40)
    assert longest(world) == 64


def test_a_job_that_stopped_at_a_long_sequence_is_planned_for_it_when_it_starts_again() -> None:
    assert held(world_of(even(64.0), 64, saved_longest=0)) < 8000
    assert held(world_of(even(64.0), 64, saved_longest=8000)) >= 8000


def test_a_long_sequence_of_a_checkpoint_that_no_plan_holds_keeps_no_job_from_starting() -> None:
    assert world_of(even(64.0), 64, saved_longest=1_000_000_000).phase is JobPhase.RUNNING


def test_of_a_stream_twice_what_was_measured_is_likely() -> None:
    world = world_of(Lengths(mean=64.0, effective=192.0, longest=576.0), 64, sample="", likely=576)
    assert found(world).likely == 576
    world.train(40)
    assert found(world).likely == 128


def held(world: World) -> int:
    assert world.job.plan is not None
    return max(sum(lane.capacity for lane in pipeline.packed) for pipeline in world.job.plan.pipelines)


def found(world: World) -> PackedSequences:
    made = data_lengths.packed(world.job)
    assert made is not None
    return made


def longest(world: World) -> int:
    return found(world).longest


def test_a_step_of_packed_samples_with_images_is_predicted_as_it_was_planned() -> None:
    problem = drawn(3)
    made = plan(problem, 3).plan
    assert made is not None
    assert made.prediction is not None
    settings = JobSettings(inside=problem.cluster.inside, between=problem.cluster.between)
    seconds = step_prediction.modules_seconds(
        made, settings, problem.profile, problem.modules, problem.rates, None, problem.packed
    )
    assert seconds == pytest.approx(made.prediction.step_seconds)
