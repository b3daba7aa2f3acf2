"""Recordings of a leader: a job is written as every release reads it, without the parts of `JobState`."""

from __future__ import annotations

import msgspec

from elasticd import recording
from elasticd.machines.job.state.job_state import PARTS, JobPhase, JobState
from tests.machines.cast import JOB
from tests.machines.test_recovery import running
from tests.machines.world import World

#: The fields of a job in recordings so far. Add those that are new; none of these is renamed or left out.
FIELDS = frozenset(
    {
        "abandoned",
        "arrived",
        "asked",
        "batch",
        "cause",
        "checkpoint_at",
        "decided",
        "deferred",
        "done_epoch",
        "earlier",
        "enough_since",
        "expert_rows",
        "experts",
        "failing",
        "fence",
        "first_step",
        "fresh",
        "gathered",
        "give_up",
        "gone",
        "highest",
        "item_shares",
        "item_shifts",
        "job",
        "joined",
        "joiners",
        "last_steps",
        "left_out",
        "lengths",
        "likely",
        "longest",
        "modules",
        "moved",
        "network",
        "no_aside",
        "not_before",
        "orderly",
        "patient_until",
        "phase",
        "plan",
        "prediction",
        "probes",
        "profile",
        "progress",
        "proposal",
        "published",
        "published_at",
        "rates",
        "read_step",
        "reason",
        "rehearsal",
        "requested",
        "rehearsed",
        "remedy",
        "republish",
        "sampled",
        "setback",
        "settle_until",
        "shares",
        "shares_plan",
        "shifts",
        "since",
        "snapshots",
        "spec",
        "stability",
        "standstill",
        "stop_asked_at",
        "stop_at",
        "stopping",
        "stuck_step",
        "taught_by",
        "thrown",
        "token",
        "unadopted",
        "unexpected",
        "unmade",
        "unmet",
        "unpublished",
        "workers",
        "world_size",
    }
)


def after_a_loss() -> World:
    """A world whose job has trained, and recovers: nearly every part of it has something."""
    world = running()
    world.train(12)
    world.planner_waits = True
    world.kill("beta/1")
    world.settle()
    assert world.phase is JobPhase.RECOVERING
    return world


def began(world: World) -> recording.Line:
    (line,) = recording.read([recording.began(world.state, 1.5, 2.5)], "test")
    return line


def test_a_job_in_parts_is_written_flat_and_read_again() -> None:
    world = after_a_loss()
    line = began(world)
    assert msgspec.json.decode(line.body)["jobs"][JOB].keys() == FIELDS
    assert line.state().jobs == world.state.jobs


def test_no_two_parts_have_a_field_of_one_name() -> None:
    names = [name for kind in PARTS.values() for name in kind.__struct_encode_fields__]
    names += [name for name in JobState.__struct_encode_fields__ if name not in PARTS]
    assert sorted(names) == sorted(FIELDS)
    assert not FIELDS & {*PARTS}


def test_a_recording_that_lacks_fields_of_a_part_has_its_defaults() -> None:
    line = began(after_a_loss())
    body = msgspec.json.decode(line.body)
    for name in ("published", "no_aside", "token"):
        del body["jobs"][JOB][name]
    job = msgspec.structs.replace(line, body=msgspec.Raw(msgspec.json.encode(body))).state().jobs[JOB]
    assert (job.checkpoints.published, job.switching.no_aside, job.planning.token) == ((), False, 0)
