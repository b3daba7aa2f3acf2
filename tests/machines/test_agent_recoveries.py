"""Whom an agent tells of a recovery: those that it goes on from and to; and all, once it is recorded."""

from __future__ import annotations

import msgspec
import pytest

from elasticd.machines.agent.state import FenceRead, PlanRead, ProposalRead
from elasticd.records import Fence, PlanRecord, Recovery
from elasticd.wire.worker import Propose, Recorded
from tests.machines.agent_scene import JOB, hello, plan, proposal, read_proposal, run, sent

OLD = {"n0/0": "i0", "n0/1": "i1", "n1/0": "x"}
FENCE = FenceRead(job=JOB, record=Fence(number=3, epoch=5, gone={"n1/0": "x"}, reason="it died"))
BEFORE = PlanRead(job=JOB, record=PlanRecord(plan=plan(2, OLD), epoch=5, step=0))


def recovery(sources: dict[str, str], new: dict[str, str]) -> ProposalRead:
    found = Recovery(fence=3, step=7, sources=sources, snapshots=dict.fromkeys(OLD, next(iter(sources), "")))
    return read_proposal(msgspec.structs.replace(proposal(4, new, OLD), recovery=found))


@pytest.mark.parametrize(
    ("sources", "told"), [({"n0/1": "i1"}, ["w0", "w1"]), ({"n0/1": "another"}, ["w0"]), ({}, ["w0"])]
)
def test_a_recovery_concerns_its_sources_and_the_new_members_alone(
    sources: dict[str, str], told: list[str]
) -> None:
    state, _ = run(BEFORE, hello(0), hello(1), FENCE)
    read = recovery(sources, {"n0/0": "i0"})
    _, effects = run(read, state=state)
    assert [client for client, body in sent(effects) if isinstance(body, Propose)] == told
    again, _ = run(FENCE, read)
    late = [effect for event in (hello(0), hello(1)) for effect in run(event, state=again)[1]]
    assert [client for client, body in sent(late) if isinstance(body, Propose)] == told


def test_all_that_stood_hear_that_a_recovery_is_recorded_and_nobody_else_of_later_plans() -> None:
    state, _ = run(hello(0), hello(1), FENCE, recovery({}, {"n0/0": "i0"}))
    first = PlanRead(job=JOB, record=PlanRecord(plan=plan(4, {"n0/0": "i0"}), epoch=5, step=7))
    state, effects = run(first, state=state)
    assert sent(effects) == [("w0", Recorded(number=4)), ("w1", Recorded(number=4))]
    later = PlanRead(job=JOB, record=PlanRecord(plan=plan(5, {"n0/0": "i0"}), epoch=5, step=9))
    _, effects = run(later, state=state)
    assert sent(effects) == [("w0", Recorded(number=5))]
