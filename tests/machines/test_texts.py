"""Texts that workers and agents say: what is kept of them, and that no record or event grows by them."""

from __future__ import annotations

from typing import Any

import pytest

from elasticd.codec.safe_text import MARK, MOST_TEXT, shortened
from elasticd.machines.coordinator.message_checks import MOST_PRESSURES, bounded
from elasticd.machines.job.lifecycle.job_end import MOST_REASON
from elasticd.machines.job.state.events import Received
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.names import MOST_DEVICES
from elasticd.records import DoneRecord, Fence, decode, encode
from elasticd.wire.coordinator import FromClient, Frozen, Unreached, WorkerLost
from elasticd.wire.node_health import DeviceHealth, Health
from elasticd.wire.worker import (
    DrainNotice,
    Goodbye,
    InDoubt,
    PeersLost,
    Prepared,
    Raised,
    Refused,
    StayedOnPlan,
)
from tests.machines.test_coordinator_lives import slowed
from tests.machines.test_recovery import running
from tests.machines.world import KEYS, World

LONG = "x" * 100_000
OF: dict[str, Any] = {"job": "demo", "device": "alpha/0", "incarnation": "i"}
BODIES = (
    Refused(number=1, reason=LONG),
    StayedOnPlan(number=1, step=1, reason=LONG),
    InDoubt(number=1, step=1, reason=LONG),
    PeersLost(step=1, reason=LONG),
    DrainNotice(reason=LONG),
    Goodbye(reason=LONG),
)
MESSAGES = (
    *(FromClient(client="c", body=body, **OF) for body in BODIES),
    WorkerLost(clean=False, how=LONG, **OF),
    Frozen(how=LONG, **OF),
    Unreached(job="demo", round=1, nodes={"beta": LONG, LONG: "no"}),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(getattr(each, "body", each)).__name__)
def test_a_long_text_is_cut_where_it_comes_in_and_says_so(message: Any) -> None:
    cut = encode(bounded(message))
    assert len(cut) < 3 * MOST_TEXT
    assert MARK.encode() in cut
    assert bounded(bounded(message)) == bounded(message)


def test_a_message_without_a_long_text_is_itself() -> None:
    message = FromClient(client="c", body=Prepared(number=1), **OF)
    assert bounded(message) is message
    assert shortened("a" * 10, 10) == "a" * 10
    assert shortened("a" * 40, 20) == "a" * (20 - len(MARK)) + MARK


def largest(world: World) -> int:
    return max(len(item.value) for item in world.store.snapshot(KEYS.jobs).items if "/spec" not in item.key)


def test_how_a_worker_ended_makes_no_large_fence() -> None:
    world = running()
    before = largest(world)
    lost = WorkerLost(
        job="demo", device="alpha/0", incarnation=world.workers["alpha/0"].incarnation, clean=False, how=LONG
    )
    world.workers["alpha/0"].alive = False
    world.say(Received(node="alpha", message=lost))
    world.settle()
    fence = decode(world.fence_record, Fence)
    assert MOST_REASON / 2 < len(fence.reason) <= MOST_REASON
    assert largest(world) < before + 3 * MOST_REASON
    assert max(len(note.text) for note in world.notes) <= MOST_TEXT


def test_why_a_proposal_is_refused_makes_no_large_record() -> None:
    world = slowed()
    before = largest(world)
    world.refuse, world.rates = {"alpha/0"}, {"beta/1": 50.0}
    refuse = world.outcome

    def outcome(worker: Any, body: Any) -> None:
        refuse(worker, Refused(number=body.number, reason=LONG) if isinstance(body, Refused) else body)

    world.outcome = outcome  # type: ignore[method-assign]
    world.train(20)
    assert "aborted" in world.kinds()
    assert largest(world) < before + 3 * MOST_REASON


def test_one_process_raises_once_and_makes_one_fence() -> None:
    world = running()
    for number in range(50):
        text = "abcdefghij"[number % 10]  # another exception each time, and not by a number alone
        body = Raised(plan=1, step=1, kind="ValueError", text=text, traceback="", holds=True)
        world.up("alpha/0", body)
    world.settle()
    assert world.kinds().count("raised") == 1
    assert world.kinds().count("fenced") == 1


def test_many_reasons_together_make_no_large_end() -> None:
    world = running()
    for device in list(world.workers):
        world.leave_cleanly(device, f"{device}: {LONG}")
    world.settle()
    world.tick(5.0)
    assert world.phase is JobPhase.STOPPED
    done = decode(world.store.get(KEYS.job("demo", "done")).value, DoneRecord)  # type: ignore[union-attr]
    assert len(done.reason) < 2 * MOST_REASON


def test_a_nodes_health_has_as_many_words_as_a_machine_has_resources() -> None:
    """Each becomes a series of the metrics."""
    devices = tuple(DeviceHealth(name=f"alpha/{index}") for index in range(MOST_DEVICES + 5))
    many = {f"kind-{index}": 0.5 for index in range(1000)}
    health = Health(pressure={"\x1b[31m": 0.9} | many, devices=devices)
    cut = bounded(health)
    assert isinstance(cut, Health)
    assert list(cut.pressure) == [f"kind-{index}" for index in range(MOST_PRESSURES - 1)]
    assert cut.devices == devices[:MOST_DEVICES]
    usual = Health(pressure={"cpu": 0.1, "io": 0.0, "memory": 0.2}, devices=devices[:8])
    assert bounded(usual) == usual
