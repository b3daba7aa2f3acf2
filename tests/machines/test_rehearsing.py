"""Before a job's first plan its workers say what an all-reduce takes: the plan counts with that."""

from __future__ import annotations

import math

import msgspec

from elasticd.machines.job.state.job_state import JobPhase
from elasticd.wire.worker import Hello, Rehearse, Rehearsed
from tests.machines.cast import FakeWorker
from tests.machines.world import World

#: Far more than an all-reduce of the links' configured speed takes.
SECONDS = 0.004


class Rehearsing(World):
    """Its workers rehearse, where a test lets them."""

    def hello(self, worker: FakeWorker, **changes: object) -> Hello:
        return msgspec.structs.replace(super().hello(worker, **changes), rehearses=True)

    def gathered(self) -> None:
        for name in self.records:
            self.join(name)
        self.settle()

    def orders(self) -> dict[str, list[Rehearse]]:
        """By device."""
        found = {
            client.removeprefix("w"): [body for body in told if isinstance(body, Rehearse)]
            for client, told in self.told.items()
        }
        return {device: orders for device, orders in found.items() if orders}

    def answer(self, device: str, seconds: float, width: int = 2) -> None:
        self.up(device, Rehearsed(seconds={width: seconds}))
        self.settle()


def test_the_first_plan_waits_for_the_all_reduces_and_is_predicted_from_them() -> None:
    world = Rehearsing()
    world.gathered()
    assert world.phase is JobPhase.PLANNING
    (size,) = {order.size for orders in world.orders().values() for order in orders}
    assert world.orders() == {
        f"{node}/{i}": [Rehearse(members=(f"{node}/0", f"{node}/1"), widths=(2,), size=size)]
        for node in ("alpha", "beta")
        for i in range(2)
    }
    assert size == 64 * 64 * 4, "an activation of a micro-batch"
    world.answer("alpha/0", SECONDS)
    assert not world.proposals, "one group has not answered yet"
    world.answer("beta/0", 2 * SECONDS)
    assert world.proposals
    basis = world.job.planning.decided
    assert basis is not None
    assert basis.profile.collective_seconds == {2: 1.5 * SECONDS}
    assert not basis.profile.fitted
    (told,) = [note for note in world.notes if note.kind == "rehearsed"]
    assert told.text == "an all-reduce takes 6.00 ms among 2"


def test_workers_that_do_not_answer_are_waited_for_a_while() -> None:
    world = Rehearsing()
    world.gathered()
    world.answer("alpha/0", SECONDS)
    assert not world.proposals
    world.tick(world.settings.probe_seconds)
    assert world.proposals
    assert world.job.learned.profile is not None
    assert world.job.learned.profile.collective_seconds == {2: SECONDS}


def test_what_is_no_time_or_was_not_asked_for_is_not_believed() -> None:
    world = Rehearsing()
    world.gathered()
    world.answer("alpha/1", SECONDS)  # the first member speaks for its group
    world.answer("alpha/0", -1.0)
    world.answer("beta/0", math.inf)
    assert world.proposals
    assert world.job.learned.profile is not None
    assert world.job.learned.profile.collective_seconds == {}
    assert "rehearsed" not in world.kinds()


def test_steps_teach_what_was_only_rehearsed() -> None:
    world = Rehearsing()
    world.gathered()
    for node in ("alpha", "beta"):
        world.answer(f"{node}/0", SECONDS)
    assert world.job.learned.rehearsed == {2}
    world.train(1)
    plan = world.plan()
    assert plan is not None
    widths = {len(stage.devices) for _, _, stage in plan.walk()}
    world.train(world.settings.fit_steps + 3)
    assert world.job.learned.profile is not None
    assert world.job.learned.profile.fitted
    assert world.job.learned.rehearsed == {2} - widths
    if 2 in widths:
        assert world.job.learned.profile.collective_seconds[2] != SECONDS


def test_workers_of_a_release_that_does_not_rehearse_are_not_asked() -> None:
    world = World()
    for name in world.records:
        world.join(name)
    world.settle()
    assert world.proposals
    assert not [body for told in world.told.values() for body in told if isinstance(body, Rehearse)]


def test_only_the_first_nodes_are_asked() -> None:
    world = Rehearsing(nodes=("a", "b", "c"))
    for name in world.records:
        world.join(name, least=3, most=3)
    world.settle()
    assert world.orders().keys() == {"a/0", "a/1", "b/0", "b/1"}
