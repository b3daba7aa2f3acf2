"""Devices without work are rated: new ones before the first plan, standby ones while they stand by."""

from __future__ import annotations

import msgspec

from elasticd.machines.job.state.events import AgentUp, Received
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.wire.node_health import DeviceHealth, Health
from elasticd.wire.worker import Hello, Probed
from tests.machines.cast import FakeWorker
from tests.machines.world import World


class Probing(World):
    """Its workers answer probes, where a test lets them."""

    def hello(self, worker: FakeWorker, **changes: object) -> Hello:
        return msgspec.structs.replace(super().hello(worker, **changes), probes=True)

    def probe(self, device: str, factor: float = 1.0) -> None:
        self.up(device, Probed(seconds=(0.03 * factor, 0.02 * factor)))

    def gathered(self) -> None:
        for name in self.records:
            self.join(name)
        self.settle()


def test_the_first_plan_waits_for_the_probes_and_counts_with_them() -> None:
    world = Probing()
    world.gathered()
    assert world.phase is JobPhase.PLANNING
    for device in world.workers:
        assert not world.proposals, "not all were probed"
        world.probe(device, 4.0 if device == "beta/1" else 1.0)
        world.settle()
    assert world.job.detection.rates.rates == {"beta/1": 4.0}
    (told,) = [note for note in world.notes if note.kind == "slow"]
    assert "beta/1 is slow" in told.text
    problem = world.job.planning.decided
    assert problem is not None
    assert problem.rates == {"beta/1": 4.0}


def test_a_device_that_does_not_answer_is_waited_for_a_while() -> None:
    world = Probing()
    world.gathered()
    for device in list(world.workers)[:-1]:
        world.probe(device)
    world.settle()
    assert not world.proposals
    world.tick(world.settings.probe_seconds)
    assert world.proposals
    assert world.job.detection.rates.rates == {}


def test_a_standby_device_that_recovers_is_planned_with_again_and_a_member_is_not_judged() -> None:
    world = Probing(memory=60_000_000)
    world.rates["beta/1"] = 8.0
    world.gathered()
    for device in world.workers:
        world.probe(device, 8.0 if device == "beta/1" else 1.0)
    world.settle()
    world.train(30)
    plan = world.plan()
    assert plan is not None
    assert "beta/1" not in plan.members, "eight times slower: it is of no use"
    member = plan.members[0]
    for _ in range(3):
        world.probe(member, 9.0)
    world.settle()
    assert member not in world.job.detection.rates.rates, "it works: its steps say how fast it is"
    world.rates.clear()
    for _ in range(2):
        world.probe("beta/1")
        world.settle()
    assert world.job.detection.rates.rates == {}
    assert "recovered" in world.kinds()
    world.train(10)
    plan = world.plan()
    assert plan is not None
    assert "beta/1" in plan.members


def test_why_a_device_is_slow_is_told_where_its_agent_knows() -> None:
    world = Probing()
    hot = DeviceHealth(name="beta/1", throttled=("heat",))
    world.say(Received(node="beta", message=Health(devices=(hot,))))
    world.gathered()
    for device in world.workers:
        world.probe(device, 4.0 if device == "beta/1" else 1.0)
    world.settle()
    (told,) = [note for note in world.notes if note.kind == "slow"]
    assert told.text.endswith("; its clocks are held down: heat")
    world.disconnect("beta")
    world.say(AgentUp(record=world.records["beta"]))
    world.settle()
    assert world.state.nodes["beta"].health == Health(devices=(hot,)), "it lasts until it is told anew"
