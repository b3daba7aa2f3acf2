"""The profile that steps have taught of a job's model, and the prediction by it, outlive the leader."""

from __future__ import annotations

from elasticd.coordinator.store_writer import stored
from elasticd.machines.job.state.job_state import JobSettings, JobState
from elasticd.machines.job.state.restored_job import restored
from tests.machines.checked import KEYS
from tests.machines.test_coordinator_lives import started
from tests.machines.world import World


def taught(job: JobState) -> tuple[object, ...]:
    return job.learned.profile, job.learned.taught_by, job.predicted_seconds


def next_leaders(world: World) -> JobState:
    """The job as a leader would find it that took over now."""
    (found,) = stored(KEYS, world.store.snapshot(KEYS.jobs).items)
    return restored(found, world.now, JobSettings())


def test_a_leader_that_takes_over_after_any_step_predicts_what_the_one_before_did() -> None:
    world = started()
    seen: list[float | None] = []
    for step in range(24):
        if step == 18:
            world.rates = {"beta/1": 3.0}
        world.train(1)
        assert taught(next_leaders(world)) == taught(world.job), f"after {step} steps"
        seen.append(world.job.predicted_seconds)
    assert len(set(seen)) > 2, "it was guessed, fitted, and predicted for another plan"


def test_a_leader_that_takes_over_fits_no_profile_again_that_was_fitted() -> None:
    world = started()
    world.train(32)
    fits, before = world.kinds().count("fitted"), world.job.predicted_seconds
    assert fits == world.job.number == 2, "each plan has taught something"
    world.new_leader()
    for _ in range(20):
        world.train(1)
        assert world.job.predicted_seconds == before
    assert world.kinds().count("fitted") == fits
