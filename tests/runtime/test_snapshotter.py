"""A rank's snapshots: copied when all may, handed over whole, and a file in use is left alone."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from elasticd_migration.local_state import LocalState, NotElementWise
from elasticd_planner.layout.layouts import Layouts

from elasticd.codec.message import Message
from elasticd.runtime.accelerator import CPU
from elasticd.runtime.checkpoint.options import CheckpointingOptions
from elasticd.runtime.checkpoint.staging import shares
from elasticd.runtime.snapshot.memory_file import MemoryFile, read
from elasticd.runtime.snapshot.snapshotter import Snapshotter
from elasticd.testing.waiting import until
from elasticd.wire.snapshots import Held, Snapped
from elasticd.wire.worker import Welcome
from tests.checkpoints.support import THREE
from tests.migration.ranks import assert_same_bits, copy_of, local, trained

DEVICE = THREE.plan.members[0]
PLAN = THREE.plan.number


class Agent:
    """Keeps descriptors of its own, as an agent does."""

    def __init__(self) -> None:
        self.came: queue.Queue[tuple[Snapped, int]] = queue.Queue()
        self.kept: list[int] = []

    def __call__(self, message: Message, fd: int | None = None) -> None:
        assert isinstance(message, Snapped)
        assert fd is not None
        self.kept.append(os.dup(fd))
        self.came.put((message, self.kept[-1]))


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    for fd in agent.kept:
        os.close(fd)


def state(steps: int) -> LocalState:
    return local(trained(steps), THREE, DEVICE)


def snapshotter(agent: Agent, every: int = 1, welcome: Welcome | None = None) -> Snapshotter:
    me = welcome or Welcome(device=DEVICE, incarnation="aa", address="127.0.0.1")
    return Snapshotter(every, "job", lambda: me, agent)


def ready(snapshotter: Snapshotter, step: int) -> bool:
    """Its files were made by now."""
    until(lambda: snapshotter.ready(PLAN, step))
    return True


def begun(agent: Agent, every: int = 1) -> Snapshotter:
    """After a plan's first step."""
    made = snapshotter(agent, every)
    made.voted(1, [made.ready(PLAN, 1)], THREE, lambda: state(1))
    return made


def test_what_was_copied_is_what_the_agent_gets_whatever_training_does_then(agent: Agent) -> None:
    made = begun(agent)
    held = state(2)
    expected = copy_of(held)
    made.voted(2, [ready(made, 2)] * 3, THREE, lambda: held)
    made.copied()
    for tensor in held.tensors.values():  # the next update
        for shard in tensor.shards:
            for plane in shard.planes.values():
                plane.zero_()
    message, fd = agent.came.get(timeout=60)
    size = message.held.size
    assert message.held == Held(
        job="job", device=DEVICE, incarnation="aa", plan=PLAN, step=2, node="n0", size=size, every=1
    )
    assert message.plan == THREE.plan, "from the first rank"
    _, found = read(fd, size)
    boxes = shares(THREE)[DEVICE]
    assert set(found.tensors) == set(boxes)
    for item, tensor in found.tensors.items():
        whole = expected.tensors[item]
        for shard in tensor.shards:
            around = whole.around(shard.box)
            for plane, values in shard.planes.items():
                assert (
                    torch.equal(
                        values.view(torch.uint8), around.part(plane, shard.box).contiguous().view(torch.uint8)
                    )
                    or not values.dim()
                ), item
    assert found.extras == expected.extras
    made.end()


class HeldUp:
    """A device whose copies to the host begin when a test lets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may, to_host = threading.Event(), CPU.to_host

        def waits(*pairs: Any) -> None:
            assert self.may.wait(60)
            to_host(*pairs)

        monkeypatch.setattr(CPU, "to_host", waits)


def test_training_goes_on_while_a_snapshot_is_copied_and_the_update_waits_for_it(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, held, copies = begun(agent), state(2), HeldUp(monkeypatch)
    made.voted(2, [ready(made, 2)], THREE, lambda: held)
    assert agent.came.empty(), "voted has returned, and nothing is copied yet"
    updates = threading.Thread(target=made.copied)
    updates.start()
    updates.join(0.2)
    assert updates.is_alive()
    copies.may.set()
    updates.join(60)
    assert not updates.is_alive()
    assert agent.came.get(timeout=60)[0].held.step == 2
    made.copied()  # nothing is under way
    assert ready(made, 3)
    made.end()
    made.voted(3, [True], THREE, lambda: state(3))
    made.copied()  # nor is it begun at the end


def test_a_state_that_the_script_wrote_to_meanwhile_is_not_handed_over(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, held, copies = begun(agent), state(2), HeldUp(monkeypatch)
    made.voted(2, [ready(made, 2)], THREE, lambda: held)
    item = next(item for item in shares(THREE)[DEVICE] if held.tensors[item].shards)
    next(iter(held.tensors[item].shards[0].planes.values())).mul_(2)
    copies.may.set()
    made.copied()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["no snapshot of step 2"]
    assert f"the script wrote to {item.name} while it was copied" in caplog.text
    made.voted(3, [ready(made, 3)], THREE, lambda: state(3))
    assert agent.came.get(timeout=60)[0].held.step == 3, "its slot is free again"
    made.end()


def test_nothing_is_copied_where_one_rank_cannot(agent: Agent) -> None:
    made = begun(agent)
    made.voted(2, [ready(made, 2), False, True], THREE, lambda: pytest.fail("state is not looked at"))
    assert made.ready(PLAN, 3)
    made.end()
    assert agent.came.empty()


def test_a_file_in_use_is_left_alone_until_it_is_freed(agent: Agent) -> None:
    made = begun(agent)
    states = {step: state(step) for step in (2, 3, 4)}
    sent = {}
    for step in states:
        made.voted(step, [ready(made, step)], THREE, lambda step=step: states[step])
        sent[step] = agent.came.get(timeout=60)
    assert not made.ready(PLAN, 5), "all are in use"
    first = {step: read(fd, message.held.size)[1] for step, (message, fd) in sent.items()}
    made.freed(PLAN, 2)
    made.voted(5, [ready(made, 5)], THREE, lambda: state(5))
    message, _ = agent.came.get(timeout=60)
    assert message.held.step == 5
    for step in (3, 4):
        assert_same_bits(read(sent[step][1], sent[step][0].held.size)[1], first[step])
    assert read(sent[2][1], message.held.size)[0].step == 5, "its memory was used again"
    made.end()


def test_another_agent_finds_files_of_its_own(agent: Agent) -> None:
    """Those that the last one was given stay as they are: it may live, and be sending them."""
    made = begun(agent)
    sent = []
    for step in (2, 3):
        made.voted(step, [ready(made, step)], THREE, lambda step=step: state(step))
        sent.append(agent.came.get(timeout=60))
    made.welcomed()
    for step in (4, 5, 6):
        made.voted(step, [ready(made, step)], THREE, lambda step=step: state(step))
        agent.came.get(timeout=60)
    made.freed(PLAN, 2)  # a late word of the last one
    assert not made.ready(PLAN, 7)
    assert [read(fd, message.held.size)[0].step for message, fd in sent] == [2, 3]
    made.end()


def test_a_state_that_cannot_be_carried_is_told_and_nothing_breaks(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    made = snapshotter(agent)

    def refuse() -> LocalState:
        raise NotElementWise("LBFGS keeps 'd'")

    for step in (1, 2, 3):
        made.voted(step, [made.ready(PLAN, step)], THREE, refuse)
    assert not made.ready(PLAN, 4)
    assert [record.message for record in caplog.records] == ["no snapshot of step 1: LBFGS keeps 'd'"]
    made.end()


def test_state_that_grows_after_the_first_step_is_measured_anew(agent: Agent) -> None:
    """The first updates of a plan may be skipped, and with them the optimizer's state."""
    made = snapshotter(agent)
    made.voted(1, [False], THREE, lambda: LocalState())
    made.voted(2, [ready(made, 2)], THREE, lambda: enlarged(state(2)))
    for step in range(3, 9):
        made.voted(step, [ready(made, step)], THREE, lambda step=step: enlarged(state(step)))
        if not agent.came.empty():
            break
    assert agent.came.get(timeout=60)[0].held.step >= 3
    made.end()


def test_one_failed_allocation_is_of_one_plan(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    made, refused = snapshotter(agent), list[int]()

    def refuse(size: int, accelerator: object) -> MemoryFile:
        refused.append(size)
        raise OSError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr("elasticd.runtime.snapshot.snapshotter.MemoryFile", refuse)
        made.voted(1, [False], THREE, lambda: state(1))
        until(lambda: len(refused) == 3 and not any(slot.making for slot in made._state.slots))
    later = Layouts(THREE.spec, msgspec.structs.replace(THREE.plan, number=PLAN + 1))
    made.voted(2, [False], later, lambda: state(2))
    until(lambda: made.ready(PLAN + 1, 3))
    made.end()


def enlarged(state: LocalState) -> LocalState:
    return LocalState(tensors=state.tensors, groups=state.groups, extras={"large": "x" * (4 << 20)})


def test_the_least_is_every_step() -> None:
    with pytest.raises(ValueError, match="snapshot_every is 0; it must be a whole number from 1 on"):
        CheckpointingOptions(snapshot_every=0)
