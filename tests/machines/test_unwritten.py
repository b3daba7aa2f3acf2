"""A write that the store does not take for its size: the job of it ends, with the reason, and no other."""

from __future__ import annotations

import pytest

from elasticd.codec.safe_text import MARK
from elasticd.coordinator.store_transactions import StoreTransactions
from elasticd.machines.job.lifecycle.job_end import MOST_REASON
from elasticd.machines.job.state.events import Unwritten
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.records import DoneRecord, decode
from elasticd.wire.worker import Rejected
from tests.machines.asked import refused
from tests.machines.cast import JOB
from tests.machines.checked import KEYS
from tests.machines.test_coordinator_lives import fitted, started
from tests.machines.world import World

WHY = "a request of 3,000,000 bytes is more than the store takes: 1,572,864 are the most"


def unwritten(world: World, *records: str, why: str = WHY) -> None:
    world.say(Unwritten(job=JOB, records=records, reason=why))
    world.settle()


def done(world: World) -> DoneRecord:
    item = world.store.get(KEYS.job(JOB, "done"))
    assert item is not None
    return decode(item.value, DoneRecord)


def test_a_job_whose_plan_is_not_taken_stops_with_the_reason_and_says_it_to_its_torchruns() -> None:
    world = started()
    unwritten(world, "proposal", "plan-history")
    assert world.phase is JobPhase.STOPPED
    assert done(world).reason.startswith(f"the store does not take its proposal and plan-history: {WHY}; ")
    world.join("alpha", pid=8)
    world.settle()
    assert any(isinstance(body, Rejected) for body in world.told["talpha"])
    assert WHY in refused(world, "talpha")[0]


@pytest.mark.parametrize("records", [("proposal", "plan-history"), ("fence",), ("job-spec",), ("checkpoints",)])
def test_its_end_does_not_need_what_the_store_did_not_take(records: tuple[str, ...]) -> None:
    """An open proposal is not written again as aborted: that would be as large."""
    world = fitted()
    world.deaf = {"alpha/1"}
    world.rates = {"beta/1": 3.0}
    world.train(8)
    assert world.phase is JobPhase.PROPOSED
    world.notes.clear()
    before = world.store.get(KEYS.job(JOB, "proposal"))
    unwritten(world, *records)
    assert world.phase is JobPhase.STOPPED
    assert world.store.get(KEYS.job(JOB, "proposal")) == before
    assert world.kinds() == ["stopped"]


def test_an_end_that_is_not_taken_with_the_rest_is_written_alone_and_only_once() -> None:
    world = started()
    world.finish()
    world.settle()
    written = done(world)
    world.store.delete(KEYS.job(JOB, "done"))
    world.ledger = StoreTransactions(KEYS, world.store.limits, world.store.snapshot(KEYS.jobs).items)
    for records, again in ((("fence", "proposal"), 0), (("proposal", "job-done"), 1), (("job-done",), 0)):
        revision = world.store.identity().revision
        unwritten(world, *records)
        assert world.store.identity().revision == revision + again
    assert done(world) == written


def test_a_reason_without_end_is_shortened() -> None:
    world = started()
    unwritten(world, "fence", why="x" * 3_000_000)
    assert MOST_REASON < len(done(world).reason) < MOST_REASON + 100
    assert done(world).reason.endswith(f"{MARK}; the same command starts it again")


def test_a_job_that_the_leader_does_not_know_loses_nothing() -> None:
    """One in restart mode, whose rounds no leader makes."""
    world = started()
    before = world.state
    world.say(Unwritten(job="another", records=("torchrun-excluded",), reason=WHY))
    world.settle()
    assert world.state == before
