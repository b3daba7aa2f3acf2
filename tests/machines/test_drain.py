"""`elasticd drain NODE`: plans leave its devices while training goes on, and use them again when told to."""

from __future__ import annotations

import msgspec

from elasticd.machines.job.state.events import AgentUp, CoordinatorSend, NodeDrained
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.wire.coordinator import Drain
from tests.machines.test_recovery import ROOM
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


def on_drained_nodes(*nodes: str) -> World:
    """A job whose only torchrun is on the first of these nodes, which is drained."""
    world = World(nodes, memory=ROOM)
    world.counts_joined = True
    drain(world, nodes[0])
    world.join(nodes[0], 1, len(nodes))
    world.settle()
    world.tick(world.settings.gather_seconds + 0.1)
    assert world.phase is JobPhase.PLANNING
    return world


SAYS = (
    "node alpha is drained, and no other device is there: undo it (elasticd drain --undo alpha), or give the "
    "job's command on other nodes"
)


def test_a_job_on_drained_nodes_alone_says_so_and_ends_in_time() -> None:
    world = on_drained_nodes("alpha")
    world.tick(58.0)
    assert "waiting" not in world.kinds()
    world.tick(2.0)
    assert [note.text for note in world.notes if note.kind == "waiting"] == [f"waiting: {SAYS}"]
    assert world.job.reason == SAYS
    world.tick(world.settings.assemble_seconds)
    assert world.phase is JobPhase.STOPPED
    assert world.job.reason.startswith(f"{SAYS}; it has waited for")
    assert "assemble_seconds" in world.job.reason


def test_a_job_on_drained_nodes_alone_begins_once_the_drain_is_undone() -> None:
    world = on_drained_nodes("alpha")
    world.tick(61.0)
    drain(world, "alpha", on=False)
    train_until(world, lambda: world.phase is JobPhase.RUNNING and nodes_of(world) == {"alpha"})
    assert not world.job.reason


def test_a_job_on_drained_nodes_alone_begins_with_those_that_come_late() -> None:
    """Before a first plan a job waits for its own workers alone; with these there can be none."""
    world = on_drained_nodes("alpha", "beta", "gamma")
    world.tick(61.0)
    for node in ("beta", "gamma"):
        world.join(node, 1, 3)
    world.settle()
    train_until(world, lambda: world.phase is JobPhase.RUNNING and nodes_of(world) == {"beta", "gamma"})
    assert not world.job.reason
    assert set(world.workers) == {f"{node}/{i}" for node in ("alpha", "beta", "gamma") for i in (0, 1)}


def test_survivors_on_drained_nodes_alone_go_on_there_until_others_come() -> None:
    world = World(("alpha", "beta"), memory=ROOM)
    world.start()
    world.settle()
    world.train(2)
    world.planner_waits = True
    drain(world, "alpha")
    for device in ("beta/0", "beta/1"):
        world.kill(device)
    world.planner_waits = False
    world.settle()
    train_until(world, lambda: world.phase is JobPhase.RUNNING and nodes_of(world) == {"alpha"})
    world.train(2)
    assert world.phase is JobPhase.RUNNING
    world.restart("beta")
    train_until(world, lambda: world.phase is JobPhase.RUNNING and nodes_of(world) == {"beta"})
