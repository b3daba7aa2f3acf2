"""A job that gives its first plan runs it; one that keeps its plan has it until a device of it leaves."""

from __future__ import annotations

import msgspec
import pytest
from elasticd_planner.layout.annotated_plan import plan_of
from elasticd_planner.layout.annotations import Annotation

from elasticd.machines.job.assembly import difference
from elasticd.machines.job.state.job_state import JobPhase
from tests.machines import cast
from tests.machines.test_drain import train_until
from tests.machines.test_draining import depart, left, members, tell
from tests.machines.test_recovery import ROOM, recovered, running
from tests.machines.test_replan_paused import slowed
from tests.machines.world import World

#: The planner would use all four devices, and no TP group across nodes.
GIVEN = plan_of(
    cast.model(),
    {"*": Annotation(groups=[("alpha/1", "beta/0"), ("alpha/0",)], states=[{"tp": (3, 1)}, {}])},
    micro_batches=[3, 5],
)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> None:
    _give(monkeypatch, plan=GIVEN)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _give(monkeypatch, plan=GIVEN, keep_plan=True)


def _give(monkeypatch: pytest.MonkeyPatch, **fields: object) -> None:
    from tests.machines import world

    monkeypatch.setattr(world, "spec", lambda **changes: cast.spec(**fields, **changes))


def started(nodes: tuple[str, ...] = ("alpha", "beta")) -> World:
    world = World(nodes, memory=ROOM)
    world.start()
    world.settle()
    return world


@pytest.mark.usefixtures("given")
def test_the_given_plan_is_the_first_and_another_replaces_it_once_that_pays() -> None:
    world = running()
    first = world.plan()
    assert first is not None
    assert first.pipelines == GIVEN.pipelines
    assert first.reason.startswith("given by the job")
    assert first.idle == ("beta/1",)
    world.train(12)
    later = world.plan()
    assert later is not None
    assert later.number > first.number
    assert len(later.members) == 4


@pytest.mark.usefixtures("kept")
def test_a_kept_plan_stays_beside_idle_devices_and_a_straggler_in_it() -> None:
    world = running()
    world.train(12)
    world.rates["alpha/0"] = 3.0
    world.train(12)
    assert "slow" in world.kinds(), "it is still found"
    plan = world.plan()
    assert plan is not None
    assert plan.pipelines == GIVEN.pipelines
    said = [note.text for note in world.notes if note.kind == "kept_plan"]
    assert 2 <= len(said) <= 4, "once for the fitted profile, once for each rate that was found"
    assert set(said) == {"plan 1 stays: the job keeps its plan (ParallelismOptions.keep_plan)"}


@pytest.mark.usefixtures("kept")
def test_a_kept_plan_stays_under_another_leader() -> None:
    world = running()
    world.new_leader()
    world.settle()
    slowed(world)
    plan = world.plan()
    assert plan is not None
    assert plan.pipelines == GIVEN.pipelines


@pytest.mark.usefixtures("kept")
def test_the_loss_of_a_device_is_answered_with_a_plan_of_the_others_which_stays_then() -> None:
    world = running()
    world.train(12)
    world.kill("beta/0")
    world.settle()
    assert recovered(world)
    plan = world.plan()
    assert plan is not None
    assert "beta/0" not in plan.members
    world.rates[plan.members[0]] = 3.0
    world.train(24)
    after = world.plan()
    assert after is not None
    assert after.number == plan.number


@pytest.mark.usefixtures("kept")
def test_a_kept_plan_whose_device_is_not_there_ends_the_job_by_name() -> None:
    world = started(("alpha", "gamma"))
    assert world.phase is JobPhase.STOPPED
    (text,) = [note.text for note in world.notes if "needs beta/0" in note.text]
    assert "there is no plan for this job: the plan that the job gives cannot be: it needs beta/0" in text


@pytest.mark.usefixtures("given")
def test_without_keeping_it_another_is_made_of_the_devices_that_are_there() -> None:
    world = started(("alpha", "gamma"))
    assert world.phase is JobPhase.RUNNING
    (text,) = [note.text for note in world.notes if note.kind == "proposed"]
    assert "the plan that the job gives cannot be: it needs beta/0" in text


def test_workers_that_give_other_plans_do_not_train_together() -> None:
    ours, theirs = cast.spec(plan=GIVEN), cast.spec()
    assert difference(ours, theirs) == "the plan that it gives differs: make the same one on every node"
    assert difference(ours, msgspec.structs.replace(theirs, plan=GIVEN)) == ""
    assert "keep_plan is True, not False" in difference(theirs, cast.spec(keep_plan=True))


@pytest.mark.usefixtures("kept")
def test_a_device_of_a_kept_plan_that_is_to_leave_is_left() -> None:
    world = running()
    world.train(12)
    tell(world, "beta/0")
    train_until(world, lambda: left(world, "beta/0"))
    depart(world, "beta/0")
    plan = world.plan()
    assert plan is not None
    world.train(12)
    assert members(world) == {*plan.members}, "the plan that followed stays"
    assert "fenced" not in world.kinds()
