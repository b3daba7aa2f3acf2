"""A job whose steps change no weight: events, status and a metric say since when, how many and why."""

from __future__ import annotations

from msgspec import structs

from elasticd.coordinator.metrics import LeaderReading, _of_job
from elasticd.coordinator.status import job_status
from tests.machines.test_endings import begun
from tests.machines.world import World

WHY = "its loss is not finite"


def step(world: World, left_out: int) -> None:
    """One step, which rank 0 reports as the last of so many that changed no weight."""
    world.steps += 1
    plan = world.job.plan
    assert plan is not None
    for device in plan.members:
        report = world.report(plan, device)
        if report.loss is not None:
            report = structs.replace(report, left_out=left_out, left_out_why=WHY if left_out else "")
        world.up(device, report)
    world.settle()


def texts(world: World) -> list[str]:
    return [note.text for note in world.notes if note.kind == "no_progress"]


def shown(world: World) -> tuple[str, float]:
    reason = job_status(world.job, world.now, 0.0, None).reason
    metrics = {
        name: value for name, _, value in _of_job(world.job, LeaderReading(state=world.state, at=world.now))
    }
    return reason, metrics["elasticd_job_steps_without_update"]


def test_steps_without_an_update_are_told_at_first_and_at_each_tenfold() -> None:
    world = begun()
    first = world.steps
    for left_out in (0, 0, *range(3, 13)):
        step(world, left_out)
    since = first  # the index of the third step from here, less the two before it
    assert texts(world) == [
        f"no progress: 3 steps in a row, from step {since} on, changed no weight; of the last one, {WHY}",
        f"no progress: 10 steps in a row, from step {since} on, changed no weight; of the last one, {WHY}",
    ]
    reason, count = shown(world)
    assert reason.startswith("no progress: 12 steps in a row")
    assert count == 12


def test_an_update_ends_it() -> None:
    world = begun()
    for left_out in (3, 4, 0, 0):
        step(world, left_out)
    assert texts(world)[1:] == [
        f"step {world.steps - 2} changed weights again, after 4 steps that changed none"
    ]
    assert shown(world) == ("", 0)


def test_another_row_is_told_anew() -> None:
    world = begun()
    for left_out in (3, 0, 3):
        step(world, left_out)
    assert len(texts(world)) == 3
