"""`elasticd drain NODE`: plans leave its devices while training goes on, and use them again when told to."""

from __future__ import annotations

import msgspec

from elasticd.machines.job.state.events import AgentUp, CoordinatorSend, NodeDrained
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.wire.coordinator import Drain
from tests.machines.test_coordinator_faults import ROOM
from tests.machines.world import World


def nodes_of(world: World) -> frozenset[str]:
    plan = world.plan()
    assert plan is not None
    return plan.nodes


def drain(world: World, node: str, on: bool = True) -> None:
    """The leader's wish, and what the agent makes of it."""
    before = len(world.sent)
    world.say(NodeDrained(node=node, on=on))
    world.settle()
    assert world.sent[before:] == [CoordinatorSend(node=node, message=Drain(on=on))]
    world.records[node] = msgspec.structs.replace(world.records[node], draining=on)
    world.say(AgentUp(record=world.records[node]))
    world.settle()


def train_until(world: World, condition: object) -> None:
    for _ in range(200):
        if condition():  # type: ignore[operator]
            return
        world.train(1)
        world.tick(1.0)
    raise AssertionError([note.text for note in world.notes[-10:]])


def test_a_drained_node_is_left_at_once_and_nobody_is_lost() -> None:
    world = World(("alpha", "beta"), memory=ROOM)
    world.start()
    world.settle()
    world.train(2)
    assert nodes_of(world) == {"alpha", "beta"}
    drain(world, "beta")
    train_until(world, lambda: world.phase is JobPhase.RUNNING and nodes_of(world) == {"alpha"})
    assert "fenced" not in world.kinds()
    world.train(3)
    text = next(note.text for note in world.notes if note.kind == "drained")
    assert text == "node beta is being drained: the next plans leave its devices"
    told = [note.data["number"] for note in world.notes if note.kind == "prepared"]
    assert told == sorted(set(told)), "once for each plan, though those that leave with it prepare it, too"


def test_a_drained_node_that_all_the_state_needs_is_kept_and_it_is_said() -> None:
    world = World(("alpha", "beta"))  # of memory that is enough for the two together alone
    world.start()
    world.settle()
    world.train(2)
    number = world.job.number
    drain(world, "beta")
    for _ in range(10):
        world.train(1)
        world.tick(1.0)
    assert nodes_of(world) == {"alpha", "beta"}
    assert world.job.number == number
    assert "refused" in world.kinds()


def test_undone_the_node_is_used_again() -> None:
    world = World(("alpha", "beta"), memory=ROOM)
    world.start()
    world.settle()
    world.train(2)
    drain(world, "beta")
    train_until(world, lambda: world.phase is JobPhase.RUNNING and nodes_of(world) == {"alpha"})
    drain(world, "beta", on=False)
    train_until(world, lambda: world.phase is JobPhase.RUNNING and nodes_of(world) == {"alpha", "beta"})


def test_the_wish_is_said_once() -> None:
    world = World(("alpha", "beta"), memory=ROOM)
    world.start()
    drain(world, "beta")
    before = len(world.sent)
    world.say(NodeDrained(node="beta", on=True))
    world.settle()
    assert not world.sent[before:]
    world.say(NodeDrained(node="nobody", on=True))
    world.settle()
    assert not world.sent[before:]
